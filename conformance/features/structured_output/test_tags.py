"""Structural tags of the mini engine beside the real backend's grammars and the real door."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conformance.features.structured_output import tags_replay as tags
from conformance.mutants import Mutant
from labkit.tables import markdown_table


@pytest.mark.slow
def test_on_a_quarter_of_the_walks_the_masks_are_the_real_ones() -> None:
    assert tags.differing(tags.recorded()[1][1::4]) == []


@pytest.mark.slow
def test_on_every_walk_the_masks_and_the_last_verdict_are_the_real_ones() -> None:
    found = tags.recorded()[1]
    assert len(found) == 120 and tags.differing(found) == []


def test_what_the_real_door_refuses_is_refused_here() -> None:
    door = tags.recorded()[2][:-1]
    assert not [c["spec"] for c in door if not c["taken"] and tags.is_taken(c["spec"])]
    assert len({c["taken"] for c in door}) == 2


def test_the_real_grammar_overlooks_a_trigger_inside_of_another_and_such_a_pair_is_refused() -> (
    None
):
    case = tags.recorded()[2][-1]
    assert case["after"] == "ab" and case["spec"]["format"]["triggers"] == ["abc", "b"]
    assert int(case["mask"], 16) == tags.reasoning_replay.FULL
    assert not tags.is_taken(case["spec"])


@pytest.mark.slow
def test_the_page_says_what_the_recording_holds() -> None:
    held = tags.told()
    rows = [[name, f"{count:,}"] for name, count in held.items()]
    assert markdown_table(["the recording", "how many"], rows) in tags.README.read_text("utf-8")
    assert all(held.values())


def test_a_dozen_of_the_runs_has_the_real_plans_drafts_masks_and_texts() -> None:
    which = tags.runs()[::19]
    assert len({str(case["config"].get("speculative")) for case in which}) == 3
    assert tags.differing_runs(which) == []


@pytest.mark.slow
def test_every_run_has_the_real_plans_drafts_masks_and_texts() -> None:
    assert tags.differing_runs(tags.runs()) == []


def test_the_page_says_what_the_runs_hold() -> None:
    held = tags.told_of_runs()
    rows = [[name, f"{count:,}"] for name, count in held.items()]
    assert markdown_table(["the runs", "how many"], rows) in tags.README.read_text("utf-8")
    assert len(held) == 11 and all(held.values())


@pytest.mark.slow
@pytest.mark.parametrize("mutant", tags.WRONG_RUNS, ids=[each.name for each in tags.WRONG_RUNS])
def test_a_wrong_treatment_of_tags_shows(mutant: Mutant) -> None:
    count = tags.caught_in_runs(mutant)
    assert count and f"| {mutant.name} | {count} |" in tags.README.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", tags.WRONG, ids=[each.name for each in tags.WRONG])
def test_a_wrong_reading_of_tags_shows(mutant: Mutant) -> None:
    count = tags.caught(mutant)
    assert count and f"| {mutant.name} | {count} |" in tags.README.read_text("utf-8")


_OLDER = {"structures": [{"begin": "<a>", "schema": {}, "end": "b"}], "triggers": ["<a"]}
FORMATS: tuple[dict[str, Any], ...] = (
    {"format": {"type": "any_text"}}, {"format": None}, {"format": 3, "other": [1]}, _OLDER,
    {**_OLDER, "format": 1, "other": 2}, {"structures": [], "triggers": []},
    {**_OLDER, "structures": [{"begin": "a", "end": "b", "more": 1}]},
    {}, {"structures": []}, {"triggers": []}, {**_OLDER, "structures": 1},
    {**_OLDER, "structures": [{"begin": "a"}]}, {**_OLDER, "triggers": "a"},
    {**_OLDER, "structures": [{"begin": "a", "schema": "{}", "end": "b"}]},
    {**_OLDER, "structures": [{"begin": "a", "schema": True, "end": "b"}]},
)  # fmt: skip


@pytest.mark.upstream
@pytest.mark.parametrize("kind", ["chats", "completions"])
def test_a_response_format_becomes_the_structural_tag_that_upstream_makes_of_it(kind: str) -> None:
    pytest.importorskip("openai")
    from pydantic import ValidationError
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest as RealChat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest as RealCompletion

    from mini_vllm.entrypoints.openai.protocol import CompletionRequest
    from mini_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest

    real, mini = (
        (RealChat, ChatCompletionRequest)
        if kind == "chats"
        else (RealCompletion, CompletionRequest)
    )
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "prompt": "a"}
    taken = 0
    for form in FORMATS:
        body = said | {"response_format": {"type": "structural_tag", **form}}
        try:
            theirs = real(**body).to_sampling_params(9, {}).structured_outputs.structural_tag
        except ValidationError:
            with pytest.raises(ValidationError):
                mini.model_validate(body)
            continue
        ours = mini.model_validate(body).sampling_params(9, {}).structured_outputs.structural_tag
        assert json.loads(ours) == json.loads(theirs), form
        taken += 1
    assert 0 < taken < len(FORMATS)

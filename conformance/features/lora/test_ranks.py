"""Adapters over tensor ranks as the whole real engine served them, step by step."""

from __future__ import annotations

import pytest

from conformance import recording
from conformance.features.lora import faults, steps, texts
from mini_vllm import LLM, SamplingParams


@pytest.mark.slow
@pytest.mark.parametrize("run", steps.RUNS)
def test_every_step_and_text_is_the_real_engines_on_as_many_ranks(run: str) -> None:
    wrong, line = steps.compare(run)
    assert not wrong, (line, wrong[:3])


@pytest.mark.parametrize("run", ["tp2", "tp2-sharded"])
def test_two_tensor_ranks_of_the_real_engine_adapt_as_one(run: str) -> None:
    one, two = (steps.kept(name)["recording"] for name in ("one", run))
    for name in ("events", "steps", "outputs"):
        assert two[name] == one[name]


def test_the_recorded_steps_skip_preempt_and_adopt_blocks() -> None:
    entry = steps.kept("tp2")["recording"]
    assert sum(bool(step["skipped_waiting"]) for step in entry["steps"]) > 100
    assert sum(len(step["preempted"]) for step in entry["steps"]) > 10
    adapters = {add["lora"] for event in entry["events"] for add in event["add"]}
    assert len(adapters) == 4 > entry["config"]["max_loras"]


@pytest.mark.slow
def test_the_texts_of_three_adapters_and_the_base_on_two_ranks_are_the_real_engines() -> None:
    found = texts.kept("texts-lora-tp2")
    assert found["outputs"] == texts.kept()["outputs"]
    assert not any(texts.differing(found, texts.mini_ranks(found)).values())


@pytest.mark.slow
def test_a_text_under_another_adapter_is_another() -> None:
    """So the texts show whose adapter each request had."""
    entry = steps.kept("one")["recording"]
    turned = [
        {**event, "add": [{**add, "lora": add["lora"] % 4 + 1} for add in event["add"]]}
        for event in entry["events"]
    ]
    said = steps.mini("one", {**entry, "events": turned})
    same = [name for name, tokens in entry["outputs"].items() if said[name] == tokens]
    assert len(same) <= 2


def test_at_the_pin_two_ranks_with_a_whole_end_the_engine_on_a_processor(tmp_path) -> None:
    """Ours answer, as the real ones do once they gather nothing: the recording "tp2"."""
    [found] = recording.lines(texts.KEPT / "lora-faults-tp2.jsonl.gz")
    assert found["run"] == "two ranks" and "einsum" in found["error"]
    max_loras, prompts, name, _ = faults.RANK_RUNS["two ranks"]
    llm = LLM(
        faults.MODEL, enable_lora=True, max_loras=max_loras, max_lora_rank=8,
        tensor_parallel_size=2,
    )  # fmt: skip
    folder = texts.write_ends(tmp_path)
    wanted = texts.adapter(name, names=tuple(texts.ENDS), folder=folder)
    answers = llm.generate(prompts, SamplingParams(max_tokens=4), [wanted] * len(prompts))
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [4, 4]

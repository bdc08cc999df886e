"""Drafts: what the recordings hold, and which wrong treatments of drafts they catch."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

from conformance import parts, replay
from conformance.features.spec_decode import texts as real_spec
from conformance.mutants import RECORDINGS
from mini_vllm.spec_decode import mtp
from mini_vllm.spec_decode.ngram import ngram_propose
from mini_vllm.spec_decode.rejection import rejection_sample


def test_the_ngram_drafter_says_what_the_real_one_said() -> None:
    num_contexts = num_drafted = 0
    for case in parts.load("ngram_proposer"):
        bounds = case["min_n"], case["max_n"], case["k"], case["max_model_len"]
        for context, drafts in zip(case["contexts"], case["drafts"], strict=True):
            assert ngram_propose(np.array(context), *bounds) == drafts, (bounds, context)
            num_contexts, num_drafted = num_contexts + 1, num_drafted + bool(drafts)
    assert num_contexts >= 2000
    assert num_contexts > num_drafted > num_contexts / 2


def test_the_rejection_sampler_keeps_what_the_real_one_kept() -> None:
    kept = {"greedy": 0, "certain": 0, "drawn": 0}
    cut = 0
    for case in parts.load("rejection_sampler"):
        laws = None if case["draft_probs"] is None else np.array(case["draft_probs"])
        got = rejection_sample(
            case["drafts"],
            laws,
            np.array(case["logits"]),
            case["bonus"],
            case["is_greedy"],
            np.array(case["uniforms"]),
            np.array(case["exponentials"]),
        )
        assert got == case["tokens"]
        for drafts, tokens, greedy in zip(case["drafts"], got, case["is_greedy"], strict=True):
            kind = "greedy" if greedy else "certain" if laws is None else "drawn"
            kept[kind] += len(tokens) - 1
            cut += len(tokens) <= len(drafts)
    assert min(kept.values()) > 50 and cut > 200


KEPT = sorted((RECORDINGS / "engine").glob("spec-*.jsonl.gz"))


@pytest.mark.slow
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_the_mini_scheduler_decides_as_the_whole_real_engine_did_with_its_drafts(
    path: Path,
) -> None:
    found = real_spec.load(path)
    steps, difference = replay.replay(found["recording"])
    assert difference is None, str(difference)
    assert steps > 50
    assert sum(len(step["preempted"]) for step in found["recording"]["steps"])


@pytest.mark.slow
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_the_mini_engine_drafts_accepts_and_says_what_the_real_one_did(
    path: Path, tmp_path: Path
) -> None:
    wrong, line = real_spec.compare(real_spec.load(path), real_spec.make_draft(tmp_path))
    assert not wrong, (line, wrong[:3])


def test_every_drafter_is_kept() -> None:
    names = {path.name.removeprefix("spec-").removesuffix("-float32.jsonl.gz") for path in KEPT}
    assert names == set(real_spec.METHODS)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_two_tensor_ranks_of_the_real_engine_draft_and_accept_as_one(method: str) -> None:
    one, two = (
        real_spec.load(RECORDINGS / "engine" / f"spec-{run}-float32.jsonl.gz")
        for run in (method, f"{method}-tp2")
    )
    assert two["metrics"] == one["metrics"]
    for name in ("events", "steps", "outputs"):
        assert two["recording"][name] == one["recording"][name]


def test_the_modules_logits_are_the_real_engines() -> None:
    found = real_spec.load(RECORDINGS / "engine" / "spec-mtp-float32.jsonl.gz")
    ours = real_spec.mini_draft_logits()
    theirs = np.array(found["draft_logits"])[: len(ours)]
    assert len(ours) == 9
    assert np.abs(theirs - ours).max() < real_spec.TOLERANCE < np.ptp(theirs) / 1e4


MODULES = {
    "reads a token at position 0": ("embeds[positions == 0] = 0", "pass"),
    "joins the other way round": ("np.concatenate(pair, axis=1)", "np.concatenate(pair[::-1], 1)"),
    "does not norm the hidden state": ("rms_norm(hidden_states, self.hidden_layernorm, eps)",
                                       "hidden_states"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_reads_something_else_has_other_logits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = MODULES[name]
    source = inspect.getsource(mtp.MtpModule)
    assert source.count(right) == 1
    scope = dict(vars(mtp))
    exec("from __future__ import annotations\n" + source.replace(right, wrong), scope)
    monkeypatch.setattr(mtp.MtpModule, "inputs_embeds", scope["MtpModule"].inputs_embeds)
    found = real_spec.load(RECORDINGS / "engine" / "spec-mtp-float32.jsonl.gz")
    first = real_spec.mini_draft_logits()[0]  # later ones follow other drafts
    assert np.abs(np.array(found["draft_logits"])[0] - first).max() > 10 * real_spec.TOLERANCE


def test_one_long_request_switches_off_the_drafts_of_its_batch() -> None:
    """Zeros for all while it is there, and the module's own before and after."""
    found = real_spec.load(RECORDINGS / "engine" / "spec-mtp-short-float32.jsonl.gz")
    steps = found["recording"]["steps"]
    drafted = [step["scheduled_spec_decode_tokens"] for step in steps]
    off = [d for d in drafted if d and all(set(tokens) == {0} for tokens in d.values())]
    assert len(off) > 5 and max(map(len, off)) > 4
    on = [d for d in drafted if d and not any(set(tokens) == {0} for tokens in d.values())]
    assert len(off) + len(on) == sum(map(bool, drafted)) and len(on) > 5


def test_a_drafters_layers_are_added_to_every_block() -> None:
    """One pool, one table: a block holds its tokens' K and V of the drafter's layers as well."""
    cases = parts.load("drafter_memory")
    assert sum(case["drafter"] is not None for case in cases) >= 5
    for case in cases:
        layers = [case["target"], *([case["drafter"]] if case["drafter"] else [])]
        numbers = sum(count * heads * size for _, count, heads, size in layers)
        per_token = numbers * case["dtype_bytes"] * (1 if case["is_mla"] else 2)
        blocks = case["memory_bytes"] // (per_token * case["block_size"])
        assert (case["num_blocks"], case["num_groups"]) == (blocks, 1), case

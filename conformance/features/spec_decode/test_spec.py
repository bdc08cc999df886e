"""Drafts: what the recordings hold, and which wrong treatments of drafts they catch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conformance import parts, replay
from conformance.features.spec_decode import texts as real_spec
from conformance.mutants import RECORDINGS
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


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_the_mini_scheduler_decides_as_the_whole_real_engine_did_with_its_drafts(
    path: Path,
) -> None:
    found = real_spec.load(path)
    steps, difference = replay.replay(found["recording"])
    assert difference is None, str(difference)
    assert steps > 100
    assert sum(len(step["preempted"]) for step in found["recording"]["steps"])


@pytest.mark.slow
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_the_mini_engine_drafts_accepts_and_says_what_the_real_one_did(
    path: Path, tmp_path: Path
) -> None:
    wrong, line = real_spec.compare(real_spec.load(path), real_spec.make_draft(tmp_path))
    assert not wrong, (line, wrong[:3])


def test_both_methods_are_kept() -> None:
    methods = {real_spec.load(p)["recording"]["config"]["speculative"]["method"] for p in KEPT}
    assert methods == set(real_spec.METHODS)

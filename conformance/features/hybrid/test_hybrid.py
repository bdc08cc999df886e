"""Groups of layers: what is recorded, and what the real managers decide beside ours."""

from __future__ import annotations

import copy
import os

import pytest

from conformance import recording, replay
from conformance.features.hybrid import checkpoints, plugin, spiral, texts
from conformance.prefixes import entries
from conformance.real_core import core_of, why_not
from conformance.recorders import hybrid
from labkit.modules import load_module
from mini_vllm import LLM, SamplingParams

needs_core = pytest.mark.skipif(bool(why_not()), reason=why_not())
RECORDERS = (
    hybrid.record, hybrid.record_drafts, hybrid.record_states, hybrid.record_aligned,
)  # fmt: skip
TIMES = int(os.environ.get("CONFORMANCE_TIMES", "1"))
FILES = ("hybrid", "hybrid_spec", "states", "states_align")


def differences(entries_of):
    replayed = (replay.replay(entry) for entry in entries_of)
    return [difference for _, difference in replayed if difference is not None]


@needs_core
@pytest.mark.parametrize("record", RECORDERS, ids=FILES)
def test_fresh_workloads_are_decided_as_the_real_managers_decide_them(record):
    assert differences(record(range(3), core_of())) == []


@needs_core
@pytest.mark.slow
@pytest.mark.parametrize("record", RECORDERS, ids=FILES)
def test_many_fresh_workloads_are_decided_as_the_real_managers_decide_them(record):
    """A hundred of each kind; more with CONFORMANCE_TIMES."""
    assert differences(record(range(1000, 1000 + 100 * TIMES), core_of())) == []


@needs_core
@pytest.mark.parametrize(("file", "record"), zip(FILES, RECORDERS, strict=True), ids=FILES)
def test_the_real_core_still_says_what_is_recorded(file, record):
    kept = next(entries(file))
    assert list(record([kept["seed"]], core_of())) == [kept]


def test_a_table_of_every_group_is_compared():
    kept = next(e for e in entries("hybrid") if len(e["config"]["kv_groups"]) > 1)
    entry = copy.deepcopy(kept)
    step = next(s for s in entry["steps"] if s["block_ids"])
    tables = next(iter(step["block_ids"].values()))
    tables[-1][0] += 1
    assert replay.replay(entry)[1].field == "block_ids"


def test_a_kind_that_there_is_not_is_refused():
    entry = copy.deepcopy(next(entries("hybrid")))
    entry["config"]["kv_groups"][0]["kind"] = "none"
    assert "kind=none is not full, sliding_window or mamba" in recording.problem_of(entry)


@pytest.mark.slow
def test_the_texts_of_the_real_engine_are_ours():
    assert texts.differing(texts.mini()) == []


@pytest.mark.slow
def test_the_texts_of_a_plugin_in_the_real_engine_are_ours(tmp_path):
    """Lab 14-06's solution: 24 prompts of 32 tokens, and log probabilities."""
    (kept,) = recording.lines(plugin.KEPT)
    assert kept["architecture"] == "ParallelLlamaForCausalLM"
    load_module(plugin.LAB / "solution.py").register()
    folder = load_module(plugin.LAB / "checkpoint.py").write(tmp_path / "model")
    params = SamplingParams(
        max_tokens=plugin.MAX_TOKENS, ignore_eos=True, temperature=0, logprobs=plugin.NUM_LOGPROBS
    )
    results = LLM(folder, num_blocks=400, **plugin.SETTINGS).generate(kept["prompts"], params)
    assert [list(r.outputs[0].token_ids) for r in results] == kept["outputs"]
    for result, first in zip(results, kept["first"], strict=True):
        ours = result.outputs[0].logprobs[0]
        assert max(abs(ours[int(t)].logprob - p) for t, p in first.items()) < 1e-4


@pytest.mark.slow
def test_the_real_schedulers_still_find_what_lab_14_05_has():
    """Every mode of the pin, and 0.33.0's where its archive is."""
    for version in {version for version, _ in checkpoints.MODES.values()}:
        if problem := why_not(version):
            pytest.skip(problem)
    for case in list(recording.lines(checkpoints.KEPT))[::4]:
        assert case["trace"] == checkpoints.traffic.trace(case["kind"], case["seed"])
        for mode, told in case["modes"].items():
            assert checkpoints.served(case["trace"], case["num_blocks"], mode) == told
        for mode in ("align", "all", "none"):  # and the lab's own way of serving finds the same
            mine = checkpoints.traffic.serve(case["trace"], case["num_blocks"], mode=mode)
            told = case["modes"][mode]
            assert (mine.hits, mine.steps, mine.wrong) == (told["hits"], told["steps"], [])


@pytest.mark.slow
def test_the_releases_still_walk_as_lab_14_04_has_it():
    """Each cache of the lab, look-up by look-up, on the releases' own code."""
    for version in spiral.RELEASES:
        if problem := why_not(version):
            pytest.skip(problem)
    kept = list(recording.lines(spiral.KEPT))
    assert list(spiral.cases()) == kept

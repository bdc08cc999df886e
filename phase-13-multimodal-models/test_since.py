"""What 0.33.0 decides otherwise about pictures, run on its own scheduler beside the pin's.

The table of the deep dive's section "Since the pin". Without an archive in `build/releases` its
release is skipped: `course upstream fetch --version 0.33.0`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from conformance.features.multimodal import frees, spins
from conformance.features.multimodal.test_multimodal import add, twice_and_another, workload_of
from conformance.real_core import core_of, why_not
from conformance.recorders.run import run

PIN, NEW = "0.22.1", "0.33.0"
pytestmark = pytest.mark.slow  # two cores are loaded


@pytest.fixture(autouse=True)
def _present():
    for version in (PIN, NEW):
        if problem := why_not(version):
            pytest.skip(problem)


@functools.cache
def plans(version: str, what: str) -> list[dict[str, Any]]:
    """The steps of a workload on a release's own scheduler."""
    return run(WORKLOADS[what](), core_of(version))["steps"]


def blocked() -> dict[str, Any]:
    """Two pictures for a budget of one, and a text behind them in the queue."""
    return workload_of(
        add("first", 6, ("A", 0)), add("other", 6, ("B", 0)), add("text", 4),
        max_num_batched_tokens=24,
    )  # fmt: skip


def at_its_beginning() -> dict[str, Any]:
    """A picture that stays whole, at the beginning of a prompt that gets two tokens first."""
    return workload_of(
        add("text", 8), add("whole", 8, ("A", 0)), max_num_batched_tokens=10,
        long_prefill_token_threshold=0, disable_chunked_mm_input=True,
    )  # fmt: skip


WORKLOADS = {"twice": twice_and_another, "blocked": blocked, "whole": at_its_beginning}


def runs(version: str) -> int:
    return sum(len(step["encoder_inputs"].get("twice", ())) for step in plans(version, "twice"))


def test_a_picture_in_two_places_is_encoded_once():
    assert (runs(PIN), runs(NEW)) == (2, 1)


def test_a_blocked_request_holds_up_nobody_behind_it():
    admitted = [set(plans(v, "blocked")[0]["num_scheduled_tokens"]) for v in (PIN, NEW)]
    assert admitted == [{"first"}, {"first", "text"}]


def test_a_chunk_that_begins_with_a_whole_picture_does_not_end_in_it():
    first = [dict(plans(v, "whole")[0]["num_scheduled_tokens"]) for v in (PIN, NEW)]
    assert first == [{"text": 8, "whole": 2}, {"text": 8}]


@pytest.mark.parametrize("number", range(len(spins.KNOWN)))
def test_a_prompt_that_spun_comes_to_its_end(number):
    ends = [spins.chunks(v, spins.KNOWN[number])["ends"] for v in (PIN, NEW)]
    assert ends == [False, True]


def test_what_is_dropped_is_not_what_is_cached():
    told = []
    for version in (PIN, NEW):
        manager = frees.manager_of(version, 4)
        for name in "AB":
            request = frees.request_of(name, name)
            assert manager.can_allocate(request, 0, 4, 0)
            manager.allocate(request, 0)
            manager.free(request)
        again = frees.request_of("again", "A")
        assert manager.can_allocate(again, 0, 4, 0)
        manager.allocate(again, 0)
        told.append(manager.get_freed_mm_hashes())
    assert told == [["A", "B"], ["B"]]


def test_a_token_in_doubt_keeps_a_picture():
    """60 states; the pin gives up more in some, and never less."""
    early = 0
    for seed in frees.SEEDS:
        old, new = (frees.released(v, seed)["released"] for v in (PIN, NEW))
        assert set(new) <= set(old)
        early += new != old
    assert early == 19


@pytest.mark.parametrize(
    ("version", "at_its_end"),
    [(PIN, True), ("0.24.0", False), ("0.28.0", False), ("0.32.0", False), (NEW, True)],
)
def test_a_drafter_that_reads_ahead_kept_a_picture_for_a_token_from_0_24_to_0_32(
    version, at_its_end
):
    """32469, 46315: whether rows are given up at a picture's end, and one token behind it."""
    if problem := why_not(version):
        pytest.skip(problem)
    given_up = []
    for ahead in (0, 1):
        scheduler = core_of(version).make_scheduler(workload_of(add("r", 6, ("A", 0)))["config"])
        scheduler.use_eagle, scheduler.num_prefill_lookahead = True, 1  # the latter since 0.28.0
        request = frees.request_of("r", "A")
        assert scheduler.encoder_cache_manager.can_allocate(request, 0, 64, 0)
        scheduler.encoder_cache_manager.allocate(request, 0)
        place = request.mm_features[0].mm_position
        request.num_computed_tokens = place.offset + place.length + ahead
        request.num_output_placeholders = 0
        scheduler._free_encoder_inputs(request)
        given_up.append(not scheduler.encoder_cache_manager.cached["A"])
    assert given_up == [at_its_end, True]


def test_rows_of_another_number_are_not_taken():
    """One identifier, two sizes, as a client's own ids allow."""
    small, large = add("small", 8, ("A", 0)), add("large", 12, ("A", 0))
    large["mm"][0]["length"] = 6
    large["prompt_token_ids"][:6] = [1] * 6
    workload = workload_of(small, large, together=False, encoder_cache_size=16,
                           encoder_compute_budget=16)  # fmt: skip
    told = []
    for version in (PIN, NEW):
        core = core_of(version)
        scheduler = core.make_scheduler(workload["config"])
        for arrival in (small, large):
            scheduler.add_request(core.make_request(arrival, 4, 2))
            plan = scheduler.schedule()
            scheduled = dict(plan.num_scheduled_tokens)
            sampled = {
                name: 7 for name in scheduled
                if scheduler.requests[name].num_computed_tokens
                >= scheduler.requests[name].num_prompt_tokens
            }  # fmt: skip
            scheduler.update_from_output(plan, core.runner_output(plan, sampled))
        told.append(scheduled.get("large", 0))
    assert told[0] > 0, "the pin takes the four rows for six tokens"
    assert told[1] == 0


def test_a_whole_picture_above_the_budget_is_never_begun():
    """A picture of four tokens that stays whole, three tokens a step; alone."""
    told = []
    for version in (PIN, NEW):
        core = core_of(version)
        workload = workload_of(
            add("a", 8, ("A", 0)), max_num_batched_tokens=3, long_prefill_token_threshold=0,
            disable_chunked_mm_input=True,
        )  # fmt: skip
        scheduler = core.make_scheduler(workload["config"])
        scheduler.add_request(core.make_request(workload["events"][0]["add"][0], 4, 2))
        counts = []
        for _ in range(3):
            plan = scheduler.schedule()
            counts.append(dict(plan.num_scheduled_tokens).get("a", 0))
            samples = {"a": 7} if sum(counts) == 8 else {}
            scheduler.update_from_output(plan, core.runner_output(plan, samples))
        told.append(counts)
    assert told == [[3, 3, 2], [0, 0, 0]]


@pytest.mark.parametrize(
    ("version", "states", "drafter"),
    [("0.27.1", False, False), ("0.28.0", True, False), ("0.32.0", True, False), (NEW, True, True)],
)
def test_the_two_spins_were_mended_in_two_releases(version, states, drafter):
    if problem := why_not(version):
        pytest.skip(problem)
    ends = [spins.chunks(version, known)["ends"] for known in spins.KNOWN]
    assert ends == [states, states, drafter, drafter]

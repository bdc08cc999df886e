"""Pictures: the real classes beside ours, what goes wrong at the pin, and what later mended it."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from conformance import recording, replay
from conformance.features.multimodal import recorder, texts
from conformance.prefixes import entries
from conformance.real_core import core_of, why_not
from conformance.recorders import combined
from mini_vllm import Request, SamplingParams
from mini_vllm.multimodal.encoder_cache_manager import EncoderCacheManager
from mini_vllm.multimodal.gate import EncoderGate
from mini_vllm.multimodal.inputs import BlockKeys, MultiModalFeatureSpec, PlaceholderRange
from mini_vllm.parts import EngineParts
from mini_vllm.releases import encoder_cache, parts_of, v0_33_0

MANAGERS = {
    "0.22.1": EncoderCacheManager,
    "0.27.1": encoder_cache.ReferencesNoted,
    "0.28.0": encoder_cache.AllocatedAgainStays,
    "0.32.0": encoder_cache.HeldByPlace,
    "0.33.0": encoder_cache.HeldByPlace,
}
"""Ours, by the release whose counts they keep."""
BASES = {
    "0.22.1": EngineParts(),
    "0.27.1": parts_of("0.27.1"),
    "0.28.0": EngineParts(block_pool=v0_33_0.UnhashedFirstAlways),
}
"""Ours besides, where whole schedules are compared."""


def present(version: str) -> None:
    if problem := why_not(version):
        pytest.skip(problem)


def real_manager(version: str, size: int) -> Any:
    """The release's own class, as its scheduler makes it."""
    workload = recorder.generate(0)
    workload["config"] |= {"encoder_cache_size": size, "encoder_compute_budget": size}
    made = core_of(version).make_scheduler(workload["config"]).encoder_cache_manager
    return type(made)(size)


def both(name: str, hashes: list[str], length: int = 4) -> tuple[Any, Request]:
    """A request with these pictures one after another: for the real class, and for ours."""
    places = [PlaceholderRange(10 * i, length) for i in range(len(hashes))]
    features = tuple(map(MultiModalFeatureSpec, hashes, places))
    ours = Request(name, [1] * (10 * len(hashes) + length), SamplingParams())
    ours.block_keys = BlockKeys(features)
    theirs = SimpleNamespace(
        request_id=name, mm_features=list(features), has_encoder_inputs=True,
        get_num_encoder_embeds=lambda i: length,
    )  # fmt: skip
    return theirs, ours


# ------------------------------------------------------------------ the counts


@pytest.mark.slow
@pytest.mark.parametrize("version", MANAGERS)
def test_the_counts_are_those_of_the_releases_own_class(version):
    """Random calls of both, in the orders in which a scheduler may make them."""
    present(version)
    rng = random.Random(version)
    evictions = 0
    for _ in range(24):
        size = rng.choice((4, 8, 12, 20))
        theirs, ours = real_manager(version, size), MANAGERS[version](size)
        requests = [
            both(f"r{i}", [rng.choice("ABCDEF") for _ in range(rng.choice((1, 2, 3, 12)))])
            for i in range(4)
        ]
        for _ in range(60):
            pair = rng.choice(requests)
            kind, i = rng.choice("aaarrfd"), rng.randrange(len(pair[0].mm_features))
            said: list[Any] = []
            for manager, request in zip((theirs, ours), pair, strict=True):
                if kind == "a":
                    found: Any = manager.check_and_update_cache(request, i)
                    if not found and (found := manager.can_allocate(request, i, 8, 0)):
                        manager.allocate(request, i)
                        found = "new"
                elif kind == "r":
                    found = manager.free_encoder_input(request, i)
                elif kind == "f":
                    found = manager.free(request)
                else:
                    found = manager.get_freed_mm_hashes()
                    evictions += len(found)
                said.append((
                    found, manager.num_free_slots, manager.num_freeable_slots,
                    {key: set(value) for key, value in manager.cached.items()},
                    list(manager.freeable.items()), list(manager.freed),
                ))  # fmt: skip
            assert said[0] == said[1], (kind, i)
    assert evictions > 30


# ------------------------------------------------------------------ 52482, 54284


def told_to_drop(manager: Any, kind: int) -> tuple[list[str], list[str]]:
    """A is evicted for B; B is refused its blocks; A is allocated again: what the worker drops
    after that pass, and what is counted as cached. `kind`: 0 for a real class, 1 for ours."""
    one, other, again = (both(n, [h])[kind] for n, h in (("a", "A"), ("b", "B"), ("c", "A")))
    assert manager.can_allocate(one, 0, 4, 0)
    manager.allocate(one, 0)
    manager.free(one)
    manager.get_freed_mm_hashes()
    assert manager.can_allocate(other, 0, 4, 0)
    manager.allocate(other, 0)
    manager.free(other)
    assert not manager.check_and_update_cache(again, 0)
    assert manager.can_allocate(again, 0, 4, 0)
    manager.allocate(again, 0)
    return manager.get_freed_mm_hashes(), list(manager.cached)


def may_be_evicted(manager: Any, kind: int) -> bool:
    """Whether a picture that stands in two places can go when the first is computed."""
    twice, other = both("r", ["A", "A"])[kind], both("o", ["C"])[kind]
    assert manager.can_allocate(twice, 0, 4, 0)
    manager.allocate(twice, 0)
    manager.check_and_update_cache(twice, 1)
    manager.free_encoder_input(twice, 0)
    return bool(manager.can_allocate(other, 0, 4, 0))


@pytest.mark.parametrize("version", MANAGERS)
def test_what_is_allocated_again_in_one_pass_is_dropped_by_the_worker_until_0_28(version):
    present(version)
    stale = version in ("0.22.1", "0.27.1")
    expected = (["A", "B"] if stale else ["B"], ["A"])
    assert told_to_drop(real_manager(version, 4), 0) == expected
    assert told_to_drop(MANAGERS[version](4), 1) == expected


@pytest.mark.parametrize("version", MANAGERS)
def test_a_picture_in_two_places_could_be_evicted_after_the_first_until_0_32(version):
    present(version)
    expected = version in ("0.22.1", "0.27.1", "0.28.0")
    assert may_be_evicted(real_manager(version, 4), 0) is expected
    assert may_be_evicted(MANAGERS[version](4), 1) is expected


# ------------------------------------------------------------------ whole schedules


def add(name: str, length: int, *items: tuple[str, int], priority: int = 0) -> dict[str, Any]:
    """An arrival whose prompt has pictures of four tokens at these places."""
    prompt = list(range(100, 100 + length))
    for _, at in items:
        prompt[at : at + 4] = [recorder.PLACEHOLDER] * 4
    return {
        "request_id": name, "prompt_token_ids": prompt, "max_tokens": 2, "priority": priority,
        "arrival_time": 0.0, "ignore_eos": True,
        "mm": [{"hash": mm_hash, "offset": at, "length": 4} for mm_hash, at in items],
    }  # fmt: skip


def workload_of(*arrivals: dict[str, Any], together: bool = True, **config: Any) -> dict[str, Any]:
    """Arrivals at step 0, or one at each step; room for one picture in the budget and the cache."""
    steps = [0] * len(arrivals) if together else range(len(arrivals))
    events: dict[int, list[dict[str, Any]]] = {}
    for step, arrival in zip(steps, arrivals, strict=True):
        events.setdefault(step, []).append(arrival)
    return {
        "seed": 0, "eos_token_id": 2,
        "config": {
            "num_blocks": 40, "block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 12,
            "long_prefill_token_threshold": 6, "enable_prefix_caching": False,
            "enable_chunked_prefill": True, "max_model_len": 64, "policy": "fcfs",
            "encoder_compute_budget": 4, "encoder_cache_size": 4,
            "disable_chunked_mm_input": False, **config,
        },
        "events": [{"step": step, "add": adds, "abort": []} for step, adds in events.items()],
        "outputs": {arrival["request_id"]: [7] * 2 for arrival in arrivals},
    }  # fmt: skip


def twice_and_another() -> dict[str, Any]:
    """54284 in a run: a chunk ends inside the second place of a picture, so the first releases it,
    and a request in front has it evicted for another."""
    return workload_of(add("other", 12, ("B", 8)), add("twice", 12, ("A", 0), ("A", 4)))


def runs_of_a(entry: recording.Recording) -> int:
    """How often the encoder runs for the picture in two places."""
    return sum(len(step["encoder_inputs"].get("twice", ())) for step in entry["steps"])


@pytest.mark.parametrize(
    ("version", "runs"), [("0.22.1", 2), ("0.28.0", 2), ("0.32.0", 1), ("0.33.0", 1)]
)
def test_the_same_picture_twice_is_encoded_twice_until_it_is_held_by_place(version, runs):
    present(version)
    entry = combined.run(twice_and_another(), core_of(version))
    assert runs_of_a(entry) == runs


def test_the_parts_of_the_later_release_encode_it_once_in_ours():
    gates = EncoderGate, encoder_cache.DuplicatesReferenced
    managers = EncoderCacheManager, encoder_cache.HeldByPlace
    for gate, manager, runs in zip(gates, managers, (2, 1), strict=True):
        made = functools.partial(gate, encoder_cache_manager=manager)
        build = functools.partial(replay.mini_scheduler, gates={"multimodal": made})
        assert runs_of_a(replay.run(twice_and_another(), build)) == runs


def schedules(version: str, seeds: range) -> Iterator[replay.Difference | None]:
    """Fresh workloads on the release's own scheduler, replayed with our parts of it."""
    from conformance.releases import builders

    build, make = builders(BASES[version])
    gate = functools.partial(EncoderGate, encoder_cache_manager=MANAGERS[version])
    build = functools.partial(build, gates={"multimodal": gate})
    for seed in seeds:
        for generate in (recorder.generate, recorder.generate_dense):
            entry = combined.run(generate(seed), core_of(version))
            yield replay.replay(entry, build, make)[1]


@pytest.mark.parametrize("version", BASES)
def test_fresh_workloads_with_pictures_are_decided_as_by_the_release(version):
    present(version)
    assert [str(d) for d in schedules(version, range(500, 503)) if d] == []


@pytest.mark.slow
@pytest.mark.parametrize("version", BASES)
def test_many_fresh_workloads_with_pictures_are_decided_as_by_the_release(version):
    present(version)
    assert [str(d) for d in schedules(version, range(1000, 1200)) if d] == []


def test_since_0_33_a_request_that_an_encoder_blocks_holds_up_nobody():
    """Not a part of ours: at the pin the scan of the waiting ends there."""
    workload = workload_of(
        add("first", 6, ("A", 0)), add("other", 6, ("B", 0)), add("text", 4),
        max_num_batched_tokens=24,
    )  # fmt: skip
    for version, admitted in (("0.22.1", False), ("0.33.0", True)):
        if not why_not(version):
            entry = combined.run(workload, core_of(version))
            plan = entry["steps"][0]["num_scheduled_tokens"]
            assert "other" not in plan and ("text" in plan) is admitted, version


@pytest.mark.parametrize("version", ["0.22.1", "0.28.0"])
def test_a_picture_that_is_to_stay_whole_is_cut_where_a_chunk_begins_with_it(version):
    """`disable_chunked_mm_input` looks at pictures behind a chunk's first token alone."""
    present(version)
    workload = workload_of(
        add("a", 12, ("A", 4)), add("b", 12), long_prefill_token_threshold=6,
        max_num_batched_tokens=8, disable_chunked_mm_input=True,
    )  # fmt: skip
    entry = combined.run(workload, core_of(version))
    ends = [step["num_computed_tokens"]["a"] for step in entry["steps"][:3]]
    assert ends[0] == 4  # before the picture, though six tokens would do
    if version == "0.22.1":
        assert replay.replay(entry)[1] is None
    workload["config"]["long_prefill_token_threshold"] = 3
    entry = combined.run(workload, core_of(version))
    ends = [step["num_computed_tokens"]["a"] for step in entry["steps"][:3]]
    assert ends[:3] == [3, 4, 7]  # the last one inside of it


# ------------------------------------------------------------------ the budget of a victim


def test_a_withdrawn_victims_budget_is_given_back_as_by_the_real_scheduler():
    """No workload of the files shows it. Three run in chunks of a block; at step 5 the last free
    block is the victim's, the urgent one takes it, and the third encodes with the victim's
    budget."""
    present("0.22.1")
    workload = workload_of(
        add("victim", 24, ("A", 20), priority=9), add("urgent", 20, priority=1),
        add("third", 16, ("B", 12), priority=5), together=False, num_blocks=14,
        long_prefill_token_threshold=4, policy="priority",
    )  # fmt: skip
    entry = combined.run(workload, core_of())
    step = entry["steps"][5]
    assert (step["preempted"], step["encoder_inputs"]) == (["victim"], {"third": [0]})
    assert replay.replay(entry)[1] is None
    wrong = functools.partial(replay.mini_scheduler, gates={"multimodal": _KeepsTheBudget})
    difference = replay.replay(entry, wrong)[1]
    assert difference is not None and difference.step == 5


class _KeepsTheBudget(EncoderGate):
    def leaves(self, request: Request) -> bool:
        before = self._budget
        left = super().leaves(request)
        self._budget = before
        return left


# ------------------------------------------------------------------ texts


def test_the_recorded_texts_are_of_the_pictures_that_are_drawn_today():
    assert texts.kept()["mark"] == texts.mark_of(texts.questions())


@pytest.mark.slow
def test_answers_about_pictures_are_the_real_engines():
    found = texts.kept()
    assert len(found["outputs"]) == len(texts.questions())
    assert texts.differing(found, texts.mini()) == 0


def test_a_kept_workload_has_pictures():
    for name in ("encoder", "encoder_dense", "encoder_async"):
        entry = next(entries(name))
        assert any(add["mm"] for event in entry["events"] for add in event["add"])

"""What lab 13-06 pins: 60 stories on 0.33.0's own cache, and what its scheduler gives up."""

from __future__ import annotations

import functools
import gzip
import json
from functools import cache
from pathlib import Path

import pytest

from conformance import replay
from labkit import same
from mini_vllm import Request, SamplingParams
from mini_vllm.multimodal.encoder_cache_manager import EncoderCacheManager
from mini_vllm.multimodal.gate import EncoderGate
from mini_vllm.multimodal.inputs import BlockKeys, MultiModalFeatureSpec, PlaceholderRange
from mini_vllm.releases.encoder_cache import DuplicatesReferenced

FILE = Path(__file__).parent / "recordings" / "frees.jsonl.gz"
SIZES = {"A": 4, "B": 4, "C": 3, "D": 6, "E": 1}
LAST = 12
"""Calls that a difference shows."""


@cache
def recorded(kind, release):
    with gzip.open(FILE, "rt") as file:
        lines = [json.loads(line) for line in file]
    return [line[kind] for line in lines if line["release"] == release and kind in line]


def places_of(pictures):
    places, at = [], 0
    for letter in pictures:
        places.append(PlaceholderRange(at, SIZES[letter]))
        at += SIZES[letter] + 1
    return places


def request_of(name, pictures):
    """A request with these pictures, by letter, one after another."""
    places = places_of(pictures)
    made = Request(name, [1] * places[-1].end, SamplingParams())
    made.block_keys = BlockKeys(tuple(map(MultiModalFeatureSpec, pictures, places)))
    return made


def answer(manager, requests, size, what, name, index):
    """One call as a scheduler makes it, and what the counts are after it."""
    if what == "enter":
        said = manager.check_and_update_cache(requests[name], index)
        if not said and (said := manager.can_allocate(requests[name], index, size, 0)):
            manager.allocate(requests[name], index)
            said = "encode"
    elif what == "computed":
        said = manager.free_encoder_input(requests[name], index)
    elif what == "leaves":
        said = manager.free(requests[name])
    else:
        said = manager.get_freed_mm_hashes()
    return [said, manager.num_free_slots, manager.num_freeable_slots,
            list(manager.cached), list(manager.freeable)]  # fmt: skip


FIELDS = ("answer", "free", "freeable", "cached", "evictable")


def difference(manager_class, story):
    """The first call after which a manager is not where the recorded one was; None: everywhere."""
    manager = manager_class(story["size"])
    requests = {name: request_of(name, letters) for name, letters in story["requests"].items()}
    for number, (call, *told) in enumerate(story["calls"]):
        came = answer(manager, requests, story["size"], *call)
        for field, expected, got in zip(FIELDS, told, came, strict=True):
            if expected != got:
                return number, field, expected, got
    return None


def agree(manager_class, release, why):
    """Fail with how many stories agree, and with the shortest way into one that does not."""
    stories = recorded("story", release)
    differ = [(d, s) for s in stories if (d := difference(manager_class, s)) is not None]
    if not differ:
        return
    (number, field, expected, got), story = min(differ, key=lambda each: each[0][0])
    calls = [
        f"  {what} {name} {story['requests'][name][index] if what in ('enter', 'computed') else ''}"
        f" [{index}] -> {said}, free {free}, freeable {freeable}, cached {''.join(there)}"
        if name
        else f"  {what}: drops {said}"
        for (what, name, index), said, free, freeable, there, _ in story["calls"][: number + 1]
    ]
    pytest.fail(
        f"{len(stories) - len(differ)} of {len(stories)} stories of {release} agree. {why}\n"
        f"story {story['seed']}, call {number}, {field}: a cache of {story['size']}, requests "
        f"{story['requests']}, sizes {SIZES}\nexpected {expected}\ncame     {got}\n"
        f"the calls up to it, as recorded\n" + "\n".join(calls[-LAST:]),
        pytrace=False,
    )


# --- one picture, two places ----------------------------------------------------------------------


def test_worked_example(lab):
    """A reference per request: the first place that is computed gives it up for all."""
    manager = lab.Mended(4)
    twice, other = request_of("twice", "AA"), request_of("other", "B")
    assert manager.can_allocate(twice, 0, 4, 0), "an empty cache of 4 has room for A"
    manager.allocate(twice, 0)
    same(manager.check_and_update_cache(twice, 1), True, "the second place finds A")
    manager.free_encoder_input(twice, 0)
    same(
        manager.can_allocate(other, 0, 4, 0),
        False,
        "A stands twice in a prompt, its first place is computed, the second is not: may A be "
        "evicted for B? (G1)",
    )
    manager.free_encoder_input(twice, 1)
    same(manager.can_allocate(other, 0, 4, 0), True, "both places are computed: A may go")
    same(manager.get_freed_mm_hashes(), ["A"], "and the worker drops it")


def test_evicted_and_allocated_in_one_pass(lab):
    """The worker drops what it is to compute."""
    manager = lab.Mended(4)
    one, other, again = (request_of(name, letter) for name, letter in ("aA", "bB", "cA"))
    for request in (one, other):
        assert manager.can_allocate(request, 0, 4, 0), "room by eviction"
        manager.allocate(request, 0)
        manager.free(request)
        if request is one:
            same(manager.get_freed_mm_hashes(), [], "nothing was evicted in the first pass")
    same(manager.check_and_update_cache(again, 0), False, "A was evicted for B")
    assert manager.can_allocate(again, 0, 4, 0), "B is unreferenced"
    manager.allocate(again, 0)
    same(
        (manager.get_freed_mm_hashes(), list(manager.cached)),
        (["B"], ["A"]),
        "in one pass A is evicted for B, B finds no blocks, and A is allocated again: what the "
        "worker drops before it runs A's encoder, and what is cached (G2)",
    )


@pytest.mark.slow
def test_stories_of_the_release(lab, record_property):
    """Any order of calls: who holds what, who goes first, what is dropped."""
    agree(lab.Mended, "0.33.0", "Mended is the pin's cache and your changes.")
    pin = [difference(EncoderCacheManager, story) for story in recorded("story", "0.22.1")]
    assert pin == [None] * len(pin), "the mini engine's cache is the pin's"
    differ = [difference(EncoderCacheManager, story) for story in recorded("story", "0.33.0")]
    record_property("measured.differ", round(100 * (1 - differ.count(None) / len(differ))))


def test_nothing_is_left_behind(lab):
    """References of a request that is gone."""
    for story in recorded("story", "0.33.0")[:30]:
        manager = lab.Mended(story["size"])
        requests = {name: request_of(name, letters) for name, letters in story["requests"].items()}
        for call, *_ in story["calls"]:
            answer(manager, requests, story["size"], *call)
        for request in requests.values():
            manager.free(request)
            same(set(manager.get_cached_input_ids(request)), set(), f"{request.request_id} is gone")
        same(
            (manager.num_freeable_slots, {k: v for k, v in manager.cached.items() if v}),
            (story["size"], {}),
            f"story {story['seed']}: everybody is gone: all may be evicted, nobody is referenced",
        )
        manager.reset()
        same(manager.num_free_slots, story["size"], "after a reset the cache is empty")


# --- what a schedule makes of it ------------------------------------------------------------------


def workload():
    """A picture twice in a prompt, in chunks of 6; another request wants the room in between."""

    def arrival(name, *items):
        prompt = list(range(100, 112))
        for _, at in items:
            prompt[at : at + 4] = [1] * 4
        return {
            "request_id": name, "prompt_token_ids": prompt, "max_tokens": 2, "priority": 0,
            "arrival_time": 0.0, "ignore_eos": True,
            "mm": [{"hash": mm_hash, "offset": at, "length": 4} for mm_hash, at in items],
        }  # fmt: skip

    return {
        "seed": 0, "eos_token_id": 2,
        "config": {
            "num_blocks": 40, "block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 12,
            "long_prefill_token_threshold": 6, "enable_prefix_caching": False,
            "enable_chunked_prefill": True, "max_model_len": 64, "policy": "fcfs",
            "encoder_compute_budget": 4, "encoder_cache_size": 4,
            "disable_chunked_mm_input": False,
        },
        "events": [{
            "step": 0, "abort": [],
            "add": [arrival("other", ("B", 8)), arrival("twice", ("A", 0), ("A", 4))],
        }],
        "outputs": {"other": [7, 7], "twice": [7, 7]},
    }  # fmt: skip


def runs(gate, manager):
    """How often the encoder runs for the picture that stands twice."""
    made = functools.partial(gate, encoder_cache_manager=manager)
    build = functools.partial(replay.mini_scheduler, gates={"multimodal": made})
    entry = replay.run(workload(), build)
    return sum(len(step["encoder_inputs"].get("twice", ())) for step in entry["steps"])


def test_the_same_picture_twice(lab, record_property):
    """A picture encoded again for its second place."""
    same(
        runs(DuplicatesReferenced, lab.Mended),
        1,
        "a picture at 0 and 4 of a prompt that is computed in chunks of 6; another request wants "
        "the cache's only room in between: runs of its encoder, with your cache",
    )
    record_property("measured.twice", runs(EncoderGate, EncoderCacheManager))


# --- what is behind -------------------------------------------------------------------------------


def test_what_is_in_doubt_is_not_behind(lab, record_property):
    """A counter that is ahead of what is known, taken for what is known."""
    places = places_of("AB")
    same(lab.releasable(places, 9, 0), [0, 1], "A ends at 4, B at 9; 9 computed, nothing in doubt")
    same(lab.releasable(places, 9, 1), [0], "the same with one token in doubt (G3)")
    told = recorded("released", "0.33.0")
    for case in told:
        given = case["num_computed_tokens"], case["num_output_placeholders"]
        same(
            lab.releasable(places_of(case["pictures"]), *given),
            case["released"],
            f"pictures {case['pictures']}, {given[0]} computed, {given[1]} of them in doubt: "
            "0.33.0 gives up",
        )
    pairs = zip(told, recorded("released", "0.22.1"), strict=True)
    record_property("measured.early", sum(new["released"] != old["released"] for new, old in pairs))

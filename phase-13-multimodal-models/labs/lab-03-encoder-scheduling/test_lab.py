"""What lab 13-03 pins: a chunk among pictures by hand, then the real scheduler's own schedules."""

from __future__ import annotations

import copy
import functools
import random
from pathlib import Path

import pytest

from conformance import recording, replay
from labkit import refused, same
from mini_vllm import Request, SamplingParams
from mini_vllm.multimodal.inputs import BlockKeys, MultiModalFeatureSpec, PlaceholderRange
from mini_vllm.plan import SchedulerOutput

HERE = Path(__file__).resolve().parent
PLACES = (PlaceholderRange(50, 100), PlaceholderRange(180, 100))
"""A at 50 to 150, B at 180 to 280, in a prompt of 300 tokens."""


def names(encode):
    return tuple("AB"[index] for index in encode)


def chunk(lab, computed, new, budget, cached=""):
    found = lab.plan_chunk(computed, new, PLACES, budget, {"AB".index(name) for name in cached})
    return found[0], names(found[1]), found[2]


# --- one chunk ------------------------------------------------------------------------------------


def test_worked_example(lab):
    """A chunk that goes on into a picture nobody encodes."""
    same(
        chunk(lab, 0, 300, 150),
        (180, ("A",), 50),
        "300 tokens from 0, a budget of 150; A at 50 to 150, B at 180 to 280 (E3)",
    )


ROWS = [
    ((0, 50, 1000, ""), (50, (), 1000), "it ends where A begins"),
    ((0, 90, 100, ""), (90, ("A",), 0), "it takes 40 tokens of A, whose encoder runs for all 100"),
    ((0, 90, 99, ""), (50, (), 99), "one short of A"),
    ((0, 51, 0, ""), (50, (), 0), "no budget"),
    ((0, 90, 0, "A"), (90, (), 0), "A is cached: free"),
    ((90, 60, 0, "A"), (60, (), 0), "it goes on inside A"),
    ((150, 30, 0, ""), (30, (), 0), "between both"),
    ((150, 31, 0, ""), (30, (), 0), "one token of B, no budget"),
    ((280, 20, 0, ""), (20, (), 0), "behind both: they need not be cached any more"),
    ((0, 300, 200, ""), (300, ("A", "B"), 0), "both"),
    ((0, 300, 100, "A"), (300, ("B",), 0), "A cached, B encoded"),
    ((0, 300, 0, "B"), (50, (), 0), "B is cached, and behind A, which is not"),
    ((60, 100, 0, ""), (0, (), 0), "a hit ended inside A, and its rows are gone"),
    ((60, 100, 100, ""), (100, ("A",), 0), "the same with budget"),
    ((50, 10, 0, ""), (0, (), 0), "at A's first token"),
]  # fmt: skip


def test_every_row_of_the_table(lab, record_property):
    """Each row is a bug of its own; the message has its words."""
    for arguments, expected, why in ROWS:
        same(
            chunk(lab, *arguments), expected, f"(computed, new, budget, cached) {arguments}: {why}"
        )
    record_property("measured.partly", chunk(lab, 0, 90, 1000)[2])


def test_no_skipping_ahead(lab):
    """A small picture encoded although a large one stands in front of it."""
    places = [PlaceholderRange(50, 100), PlaceholderRange(180, 20)]
    same(tuple(lab.plan_chunk(0, 300, places, 50, frozenset())), (50, (), 50), "100, then 20 (E3)")
    for start, new, budget in ((-1, 5, 5), (0, -1, 5), (0, 5, -1)):
        refused(
            lambda s=start, n=new, b=budget: lab.plan_chunk(s, n, places, b, frozenset()),
            f"from {start}, {new} tokens, a budget of {budget}",
        )


def test_chunks_hold_what_they_promise(lab):
    """Random prompts: E1, E2 and E4 counted token by token; nothing given is changed."""
    rng = random.Random(5)
    for _ in range(400):
        places, start = [], 0
        for _ in range(rng.randint(0, 5)):
            start += rng.randint(0, 4)
            places.append(PlaceholderRange(start, rng.randint(1, 9)))
            start = places[-1].end
        cached = {i for i in range(len(places)) if rng.random() < 0.3}
        computed, new, budget = rng.randint(0, start + 2), rng.randint(0, 20), rng.randint(0, 14)
        given = copy.deepcopy((places, cached))
        tokens, encode, left = lab.plan_chunk(computed, new, places, budget, cached)
        what = f"plan_chunk({computed}, {new}, {places}, {budget}, {cached})"
        same((places, cached), given, f"{what} changed what it was given")
        same(budget - sum(places[i].length for i in encode), left, f"{what}: budget left (E2)")
        assert left >= 0, f"{what} spends more than there is (E2); came {left} left"
        have = cached | set(encode)
        ready = {p for i in have for p in range(places[i].offset, places[i].end)}
        pictures = {p for place in places for p in range(place.offset, place.end)}
        missing = (set(range(computed, computed + tokens)) & pictures) - ready
        assert not missing, f"{what}: covers {sorted(missing)[:3]} without an embedding (E1)"
        if tokens < new:
            blocked = next(i for i, p in enumerate(places) if p.offset <= computed + tokens < p.end)
            assert blocked not in have and places[blocked].length > left, (
                f"{what}: stops at {computed + tokens}, where nothing hinders it (E4)"
            )


def simulated(lab, tokens, budget, steps=8):
    """Chunks of the prompt until it is computed: (start, length, pictures)."""
    computed, cached, found = 0, set(), []
    for _ in range(steps):
        new, encode, _ = lab.plan_chunk(
            computed, min(tokens, 300 - computed), PLACES, budget, cached
        )
        found.append((computed, new, "".join(names(encode))))
        computed, cached = computed + new, cached | set(encode)
        if computed == 300 or not new:
            break
    return found


def test_a_prompt_goes_through(lab, record_property):
    """Encodes paid for twice; a budget that nobody can ever meet, taken for a delay."""
    same(simulated(lab, 300, 150), [(0, 180, "A"), (180, 120, "B")], "300 tokens, budget of 150")
    same(simulated(lab, 300, 200), [(0, 300, "AB")], "300 tokens, budget of 200")
    same(
        simulated(lab, 64, 100),
        [(0, 64, "A"), (64, 64, ""), (128, 64, "B"), (192, 64, ""), (256, 44, "")],
        "64 tokens, budget of 100",
    )
    same(simulated(lab, 64, 99), [(0, 50, ""), (50, 0, "")], "64 tokens, 99 for pictures of 100")
    record_property("measured.waits", "for ever")


# --- the real scheduler ---------------------------------------------------------------------------


@functools.cache
def recorded(name):
    return tuple(recording.read(HERE / "recordings" / f"{name}.jsonl.gz"))


def agree(lab, name, why):
    """Fail with how many agree, and with the smallest workload that does not."""
    build = functools.partial(replay.mini_scheduler, gates={"multimodal": lab.EncoderGate})
    differ = []
    for entry in recorded(name):
        _, difference = replay.replay(entry, build)
        if difference is not None:
            differ.append((difference.step, len(entry["outputs"]), entry, difference))
    if not differ:
        return
    _, _, entry, difference = min(differ, key=lambda each: each[:2])
    pictures = [
        f"  {add['request_id']}: "
        + ", ".join(
            f"{i}: {item['hash']} at {item['offset']}, {item['length']} tokens"
            + (f" {item['is_embed']}" if "is_embed" in item else "")
            for i, item in enumerate(add["mm"])
        )
        for event in entry["events"] for add in event["add"] if add["mm"]
    ]  # fmt: skip
    before = [
        f"  step {index:<3} {step['num_scheduled_tokens']} encodes {step['encoder_inputs']} "
        f"evicted {step['freed_encoder_hashes']} free, freeable {step['encoder_free']}"
        for index, step in enumerate(entry["steps"][: difference.step + 1])
    ][-10:]
    total = len(recorded(name))
    pytest.fail(
        f"{name}: {total - len(differ)} of {total} recorded workloads agree. {why} The smallest:\n"
        f"{difference}\npictures\n" + "\n".join(pictures) + "\nrecorded\n" + "\n".join(before),
        pytrace=False,
    )


def test_budget_and_cache_as_recorded(lab):
    """Who gets how much, whose encoder runs, what is evicted; nobody is preempted here."""
    agree(lab, "budget", "The scheduler and the cache are the mini engine's; the gate is yours.")


def test_whole_pictures_as_recorded(lab):
    """A chunk that may not end inside a picture."""
    agree(lab, "whole", "`disable_chunked_mm_input` is on.")


def test_who_leaves_as_recorded(lab):
    """Preemptions and aborts; who is released first in one update."""
    agree(lab, "leaving", "Somebody leaves: preempted, aborted, ended.")


def test_plans_ahead_as_recorded(lab):
    """A picture released by an older plan while the next is under way."""
    agree(lab, "ahead", "The next step is planned before this one is updated.")


def request_of(name, tokens, *places):
    """A request whose pictures, p0 and on, stand at (offset, length)."""
    made = Request(name, [5] * tokens, SamplingParams(max_tokens=2))
    specs = [MultiModalFeatureSpec(f"p{i}", PlaceholderRange(*at)) for i, at in enumerate(places)]
    made.block_keys = BlockKeys(tuple(specs)) if specs else None
    return made


def test_a_text_costs_nothing(lab):
    """Requests without pictures walked through for pictures."""
    gate, plan = lab.EncoderGate(8, 8), SchedulerOutput()
    request = request_of("t", 9)
    gate.begins(plan)
    same(gate.limit(request, 0, 9), 9, "a text of 9 tokens")
    gate.scheduled(request, 9, plan)
    same(gate.planned(), ({}, []), "nothing is encoded and nothing evicted")


def test_a_restart_forgets_everything(lab):
    """Rows counted as cached in a worker that has none any more."""
    gate, plan = lab.EncoderGate(8, 8), SchedulerOutput()
    request = request_of("r", 9, (1, 6))
    gate.begins(plan)
    same(gate.limit(request, 0, 9), 9, "a picture of 6 for a budget of 8")
    gate.scheduled(request, 9, plan)
    same(gate.planned()[0], {"r": [0]}, "its encoder runs")
    gate.restart()
    same((gate.planned(), gate.cache.num_free_slots), (({}, []), 8), "after restart()")
    again = request_of("s", 9, (1, 6))
    gate.begins(plan)
    gate.limit(again, 0, 9)
    gate.scheduled(again, 9, plan)
    same(gate.planned()[0], {"s": [0]}, "after restart() the same picture is encoded again")

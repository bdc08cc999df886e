"""What lab 14-05 pins: steps that end where a state may be kept, and places that are worth it."""

from __future__ import annotations

import functools
import gzip
import json
import random
from pathlib import Path

import pytest

from labkit import same
from labkit.modules import sibling

traffic = sibling(__file__, "traffic")
FILE = Path(__file__).parent / "recordings" / "hits.jsonl.gz"
MOST_STEPS = 2.3
"""Steps per prompt, on average: one, and a little more than one for a place."""


@functools.cache
def recorded():
    """18 traces, and what vLLM's own scheduler found of each in each mode."""
    with gzip.open(FILE, "rt") as file:
        return [json.loads(line) for line in file]


class At:
    """The same places for every prompt, or those that a function of its length gives."""

    def __init__(self, of=lambda length: ()):
        self.of = of

    def places(self, prompt, found):
        return [place for place in self.of(len(prompt)) if place > found]


# --- how a step ends ------------------------------------------------------------------------------


def test_worked_example(lab):
    """A step that passes a place by, or that ends inside of a block."""
    same(lab.cut([64], 0, 100, 100, 16), 64, "a place within reach ends the step")
    same(lab.cut([64], 64, 36, 100, 16), 36, "behind the last place: to the prompt's end")
    same(lab.cut([], 0, 100, 300, 16), 96, "no place, and the budget ends inside of a block")
    same(lab.cut([32, 96], 32, 100, 300, 16), 64, "the next place, not the one that is there")
    same(lab.cut([160], 0, 100, 300, 16), 96, "a place out of reach: as far as whole blocks go")
    same(lab.cut([], 64, 9, 300, 16), 0, "no end of a block within reach: the prompt waits")


def test_a_step_ends_at_a_block_or_at_the_end(lab):
    """C1, for any places and budgets, and every place is a step's end."""
    rng = random.Random(3)
    for _ in range(300):
        size, blocks = rng.choice((4, 16, 64)), rng.randint(1, 30)
        tokens = size * blocks + rng.randint(0, size - 1)
        places = sorted(
            rng.sample([size * (b + 1) for b in range(blocks)], rng.randint(0, 2) % blocks)
        )
        budget, at, ends = rng.randint(size, 12 * size), 0, []
        while at < tokens:
            taken = lab.cut(places, at, min(budget, tokens - at), tokens, size)
            case = f"places {places}, {tokens} tokens from {at}, budget {budget}, blocks of {size}"
            assert 0 < taken <= budget, f"{case}\nexpected 1 to {budget} tokens\ncame     {taken}"
            at += taken
            ends.append(at)
            assert at == tokens or at % size == 0, (
                f"{case}\nexpected a step that ends at the end of a block, or of the prompt\n"
                f"came     one that ends at {at}"
            )
        missed = [place for place in places if place not in ends]
        assert not missed, f"steps end at {ends}, so no state is kept at {missed} (places {places})"


@pytest.mark.slow
def test_upstreams_places_give_upstreams_hits(lab):
    """A step more or less, or a state under another name: the real scheduler is the judge."""
    upstream = At(lambda length: [length // traffic.BLOCK_SIZE * traffic.BLOCK_SIZE])
    for case in recorded()[::2]:
        choose = traffic.choosing(lab, upstream)
        got = traffic.serve(case["trace"], case["num_blocks"], choose)
        told = case["modes"]["align"]
        same(
            (got.steps, got.hits), (told["steps"], told["hits"]),
            f"{case['kind']}, seed {case['seed']}: with a place at each prompt's last whole block "
            "your steps are those of mode 'align' of v0.22.1 (steps, tokens found per prompt)",
        )  # fmt: skip


def test_a_state_is_that_of_its_block(lab):
    """A state that has read 100 tokens, found by a prompt that shares 128."""
    for case in recorded()[6:9]:
        for places in ((), (48, 240)):
            choose = traffic.choosing(lab, At(lambda length, places=places: places))
            served = traffic.serve(case["trace"], 4000, choose, budget=100)
            assert not served.wrong, (
                f"{case['kind']}, seed {case['seed']}, blocks of 16, at most 100 tokens a step, "
                f"places {list(places)}: prompt {served.wrong[0][0]} begins at "
                f"{served.wrong[0][1]} tokens\nexpected a state that has read {served.wrong[0][1]}"
                f"\ncame     one that has read {served.wrong[0][2]}: its text would be another"
            )
            assert sum(served.hits) > 0, "whole blocks end within 100 tokens, so states are found"


# --- which places ---------------------------------------------------------------------------------


def test_places_are_ends_of_blocks_ahead(lab):
    """C2: a place that was passed, is inside of a block, behind the prompt, or twice there."""
    for case in recorded()[::6]:
        policy = lab.Checkpoints(traffic.BLOCK_SIZE)
        rng = random.Random(case["seed"])
        for line in case["trace"]:
            prompt = traffic.tokens_of(line)
            found = rng.choice((0, len(prompt) // 32)) * 16
            places = list(policy.places(prompt, found))
            allowed = range(found + 16, len(prompt) + 1, 16)
            assert places == sorted(set(places)) and all(p in allowed for p in places), (
                f"a prompt of {len(prompt)} tokens, {found} of them found, blocks of 16\n"
                f"expected ascending ends of blocks, more than {found}, at most {len(prompt)}\n"
                f"came     {places}"
            )
    same(lab.Checkpoints(16).places([1] * 15, 0), [], "a prompt without a whole block has no place")


def of_mode(cases, mode):
    """Share of what could be found at all, and steps per prompt, over these traces."""
    most, prompts = sum(c["most"] for c in cases), sum(len(c["trace"]) for c in cases)
    found = sum(sum(c["modes"][mode]["hits"]) for c in cases)
    return found / most, sum(c["modes"][mode]["steps"] for c in cases) / prompts


def of_policy(lab, cases):
    """The same of the learner's places."""
    found = steps = 0
    for case in cases:
        choose = traffic.choosing(lab, lab.Checkpoints(traffic.BLOCK_SIZE))
        served = traffic.serve(case["trace"], case["num_blocks"], choose)
        found, steps = found + sum(served.hits), steps + served.steps
    most, prompts = sum(c["most"] for c in cases), sum(len(c["trace"]) for c in cases)
    return found / most, steps / prompts


def finds_enough(lab, kind, least):
    cases = [case for case in recorded() if case["kind"] == kind]
    found, steps = of_policy(lab, cases)
    lines = [f"{kind}: six traces, a pool of {cases[0]['num_blocks']} blocks of 16 tokens"]
    for name in ("none", "all", "align", "0.33.0"):
        share, each = of_mode(cases, name)
        lines.append(f"  {name:7} found {share:4.0%} in {each:.2f} steps per prompt")
    assert found >= least and steps <= MOST_STEPS, (
        "\n".join(lines) + f"\nexpected at least {least:.0%} of what an endless pool finds, in at "
        f"most {MOST_STEPS} steps per prompt\ncame     {found:.0%} in {steps:.2f}"
    )


@pytest.mark.slow
def test_documents(lab, record_property):
    """Questions about long texts: no later prompt comes as far as the end of an earlier one."""
    finds_enough(lab, "documents", 0.80)
    cases = [case for case in recorded() if case["kind"] == "documents"]
    record_property("measured.documents", round(100 * of_mode(cases, "align")[0]))


def test_conversations(lab, record_property):
    """Each turn goes on from the last one, which was seen once."""
    finds_enough(lab, "chat", 0.88)
    cases = [case for case in recorded() if case["kind"] == "chat"]
    shares = {name: of_mode(cases, name)[0] for name in ("none", "all", "align")}
    record_property("measured.conversations", max(shares, key=shares.get))


@pytest.mark.slow
def test_a_mixture(lab):
    """Both, and prompts that never come again, whose states take room."""
    finds_enough(lab, "mixed", 0.85)


@pytest.mark.slow
def test_traces_that_were_never_seen(lab):
    """A policy made for the traces that are recorded."""
    for kind, least in (("documents", 0.78), ("chat", 0.85), ("mixed", 0.82)):
        cases = []
        for seed in (200, 201):
            lines = traffic.trace(kind, seed)
            most = sum(traffic.serve(lines, traffic.UNBOUNDED, mode="all").hits)
            cases.append({"trace": lines, "num_blocks": traffic.NUM_BLOCKS[kind], "most": most})
        found, steps = of_policy(lab, cases)
        assert found >= least and steps <= MOST_STEPS, (
            f"{kind}, two traces of other seeds\nexpected at least {least:.0%} of what an endless "
            f"pool finds, in at most {MOST_STEPS} steps per prompt\n"
            f"came     {found:.0%} in {steps:.2f}"
        )

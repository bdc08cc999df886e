"""What lab 13-05 pins: the pin's walk into the spin, the least prompt for it, and a way through."""

from __future__ import annotations

import gzip
import json
import random
from functools import cache
from pathlib import Path

from labkit import refused, same

FILE = Path(__file__).parent / "recordings" / "spins.jsonl.gz"


@cache
def recorded():
    """Prompts, and what three releases of vLLM made of them."""
    with gzip.open(FILE, "rt") as file:
        return [json.loads(line) for line in file]


def prompt_of(lab, case):
    return lab.Prompt(
        tuple(map(tuple, case["pictures"])), case["num_tokens"], case["encoder_cache_size"],
        case["max_num_batched_tokens"], case["block_size"], case["eagle"],
    )  # fmt: skip


def shown(prompt):
    what = [f"pictures (offset, length) {prompt.pictures} in {prompt.num_tokens} tokens"]
    what.append(f"a cache of {prompt.encoder_cache_size}")
    what += [f"states every {prompt.block_size}"] if prompt.block_size else []
    return ", ".join(what + ["a drafter"] * prompt.eagle)


def counted(result):
    return [[tokens, list(encode)] for tokens, encode in result.chunks]


def agrees(lab, keep, enough):
    """The rule's walks are v0.22.1's own, chunk by chunk."""
    cases = [case for case in recorded() if keep(case)]
    assert len(cases) >= enough, f"the file has {len(cases)} such prompts"
    for case in cases:
        prompt, told = prompt_of(lab, case), case["releases"]["0.22.1"]
        result = lab.walk(lab.pin_chunk, prompt)
        assert (counted(result), result.ends) == (told["chunks"], told["ends"]), (
            f"seed {case['seed']}: {shown(prompt)}\n"
            f"expected {told['chunks']}, {'the end' if told['ends'] else 'and so on for ever'}\n"
            f"came     {counted(result)}, {'the end' if result.ends else 'and so on for ever'}"
        )


REPORTED = ((0, 5), (6, 5)), 20, 6
"""A and B of five tokens with one between them, under a cache of six."""


# --- what the pin does ----------------------------------------------------------------------------


def test_worked_example(lab, record_property):
    """The alignment looked for before the encoder has cut the chunk."""
    plain = lab.walk(lab.pin_chunk, lab.Prompt(*REPORTED))
    same(counted(plain), [[6, [0]], [14, [1]]], f"{shown(lab.Prompt(*REPORTED))}: no states")
    states = lab.Prompt(*REPORTED, block_size=8)
    same(lab.walk(lab.pin_chunk, states).ends, False, f"{shown(states)}: 6 tokens, aligned to 0")
    record_property("measured.invariant", "progress")


def test_prompts_without_states_or_drafter(lab):
    """How the encoder cuts a chunk, before anything else has a say."""
    agrees(lab, lambda case: not case["block_size"] and not case["eagle"], 60)


def test_prompts_with_states(lab, record_property):
    """Alignment of the end instead of the length; a last chunk that is aligned too."""
    agrees(lab, lambda case: case["block_size"], 150)
    ends = [
        c["releases"]["0.22.1"]["ends"] for c in recorded() if c["block_size"] and c["seed"] >= 0
    ]
    record_property("measured.spins", round(100 * ends.count(False) / len(ends)))


def test_prompts_with_a_drafter(lab):
    """A drafter that reads ahead in the window, in the cut, or in neither."""
    agrees(lab, lambda case: case["eagle"], 140)


def test_the_shortest_that_spin(lab, record_property):
    """A long prompt where a short one says the same."""
    for make, states in ((lab.smallest_with_states, True), (lab.smallest_with_a_drafter, False)):
        prompt = make()
        name = make.__name__
        same(
            (prompt.block_size > 0, prompt.eagle), (states, not states), f"{name}: states, drafter"
        )
        assert all(length <= prompt.encoder_cache_size for _, length in prompt.pictures), (
            f"{name}: {shown(prompt)}: each picture must fit the cache alone"
        )
        behind = 0
        for offset, length in prompt.pictures:
            assert behind <= offset < offset + length <= prompt.num_tokens and length > 0, (
                f"{name}: {shown(prompt)}: pictures in order, apart, inside the prompt"
            )
            behind = offset + length
        same(lab.walk(lab.pin_chunk, prompt).ends, False, f"{name}: {shown(prompt)} must spin")
        assert prompt.num_tokens <= 2, (
            f"{name}: {prompt.num_tokens} tokens spin; there is a shorter prompt that does"
        )
    known = [case for case in recorded() if case["num_tokens"] == 2]
    assert [case["releases"]["0.22.1"]["ends"] for case in known] == [False, False], (
        "the real scheduler was asked about both"
    )
    record_property("measured.shortest", lab.smallest_with_states().num_tokens)


# --- the way through ------------------------------------------------------------------------------


def checked(lab, prompt):
    """Walk by the mended rule, looking at every chunk (F1 to F3)."""

    def rule(given, computed, held):
        tokens, encode = lab.mended_chunk(given, computed, held)
        what = f"{shown(given)}; {computed} computed, {sorted(held)} held: chunk {tokens}, {encode}"
        end = computed + tokens
        assert 0 < tokens <= min(given.max_num_batched_tokens, given.num_tokens - computed), (
            f"{what}: need from 1 to what the budget and the prompt allow (F4)"
        )
        assert not set(encode) & held, f"{what}: a picture encoded that is there"
        need = {
            i for i, (at, length) in enumerate(given.pictures)
            if at < end and at + length > computed
        }  # fmt: skip
        assert need <= held | set(encode), f"{what}: covers a picture that is not there (F1)"
        size = sum(given.pictures[i][1] for i in {*held, *encode})
        assert size <= given.encoder_cache_size, f"{what}: {size} embeddings in the cache (F2)"
        late = [
            at for i, (at, length) in enumerate(given.pictures)
            if i not in held | set(encode) and at >= computed
        ]  # fmt: skip
        blocked = end in late and size + dict(given.pictures)[end] > given.encoder_cache_size
        block = given.block_size
        if block and end % block and not blocked and end < given.num_tokens:
            reach = computed + given.max_num_batched_tokens
            assert reach < (computed // block + 1) * block, (
                f"{what}: ends at {end}, no multiple of {block}, and nothing stands in the way (F3)"
            )
        if block and end == given.num_tokens:
            last = end // block * block
            assert computed >= last or end % block == 0, (
                f"{what}: reaches the end past {last}, whose state is then not kept (F3)"
            )
        return tokens, encode

    result = lab.walk(rule, prompt)
    assert result.ends, f"{shown(prompt)}: an empty chunk (F4)"
    return result


def test_the_reported_prompt_comes_to_its_end(lab):
    """An alignment that still has the last word."""
    for prompt in (
        lab.Prompt(*REPORTED, block_size=8), lab.Prompt(*REPORTED, eagle=True),
        lab.Prompt(((0, 5), (5, 5)), 20, 6, eagle=True), lab.Prompt(*REPORTED),
    ):  # fmt: skip
        result = checked(lab, prompt)
        same(sum(tokens for tokens, _ in result.chunks), 20, f"{shown(prompt)}: tokens in all")
        assert len(result.chunks) <= 4, (
            f"{shown(prompt)}: 0.33.0 takes at most 4 chunks; came {counted(result)}"
        )


def test_every_recorded_prompt_comes_to_its_end(lab):
    """A mend for one cause of two; chunks that are aligned no more once one was cut."""
    spun = 0
    for case in recorded():
        prompt = prompt_of(lab, case)
        checked(lab, prompt)
        told = case["releases"]
        spun += not told["0.22.1"]["ends"]
        assert told["0.33.0"]["ends"], "0.33.0 ends all of them"
    assert spun > 80, "the file holds prompts that spin at the pin"


def test_a_picture_above_the_cache_is_refused(lab):
    """A prompt that can never end, taken in."""
    prompt = lab.Prompt(((2, 3), (6, 9)), 20, 8)
    refused(lambda: lab.mended_chunk(prompt, 0, frozenset()), f"{shown(prompt)}")


def test_smaller_budgets_than_a_block(lab):
    """A block that no chunk reaches the end of: the same spin by another way."""
    rng = random.Random(3)
    for _ in range(300):
        pictures, at = [], rng.randint(0, 3)
        for _ in range(rng.randint(1, 4)):
            pictures.append((at, rng.randint(1, 6)))
            at = sum(pictures[-1]) + rng.randint(0, 4)
        most = max(length for _, length in pictures)
        checked(
            lab,
            lab.Prompt(
                tuple(pictures), at + 8, most + rng.randint(0, 4), rng.randint(1, 12),
                rng.choice((0, 4, 8)), rng.random() < 0.4,
            ),
        )  # fmt: skip

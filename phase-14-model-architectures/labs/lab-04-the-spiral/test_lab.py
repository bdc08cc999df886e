"""What lab 14-04 pins: the spiral of 0.14.0, look-up by look-up, and a walk that keeps a hit."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from labkit import same

FILE = Path(__file__).parent / "recordings" / "hits.jsonl.gz"


def recorded():
    """Caches, and what releases of vLLM made of them."""
    with gzip.open(FILE, "rt") as file:
        return [json.loads(line) for line in file]


def kinds_of(lab, case):
    pairs = zip(case["windows"], case["cached"], strict=True)
    return [lab.Kind(window, frozenset(blocks)) for window, blocks in pairs]


def shown(case):
    lines = [f"a prompt of {case['num_blocks']} blocks of 4, a drafter that reads hidden states"]
    for window, blocks in zip(case["windows"], case["cached"], strict=True):
        name = "full attention" if window is None else f"window of {window}"
        lines.append(f"  {name}: cached {blocks}")
    return "\n".join(lines)


def agrees(lab, function, release):
    """The function's walks are the release's own, in every recorded case that it took."""
    asked = 0
    for case in recorded():
        told = case["releases"][release]
        if told is None:
            continue
        asked += 1
        walk = function(kinds_of(lab, case), case["num_blocks"] * 4)
        calls = [list(call) for call in walk.calls]
        assert (walk.hit, calls) == (told["hit"], told["calls"]), (
            f"seed {case['seed']}, vLLM {release}: {shown(case)}\n"
            f"expected a hit of {told['hit']} by the look-ups (kind, found) {told['calls']}\n"
            f"came     a hit of {walk.hit} by {calls}"
        )
    assert asked > 100, "the recordings hold over a hundred cases"


def everything(lab, windows, num_blocks):
    return [lab.Kind(window, frozenset(range(num_blocks))) for window in windows]


# --- the release that lost every hit --------------------------------------------------------------


def test_worked_example(lab, record_property):
    """A walk that stops when nothing changes any more, at the first round."""
    walk = lab.spiral(everything(lab, [None, 8], 10), 40)
    same(
        (walk.hit, [found for _, found in walk.calls]),
        (0, [8, 7, 6, 5, 4, 3, 2, 1, 0, 0]),
        "ten blocks cached for full attention and for a window of 8, as 0.14.0 looked them up",
    )
    record_property("measured.rounds", sum(1 for place, _ in walk.calls if place == 1))


def test_0_14_0_agrees(lab):
    """Full attention looked up again in each round; a round that begins from the wrong length."""
    agrees(lab, lab.spiral, "0.14.0")


def test_it_never_left_anything(lab):
    """Not a fault of yours: it is what the release did."""
    for case in recorded():
        walk = lab.spiral(kinds_of(lab, case), case["num_blocks"] * 4)
        assert walk.hit == 0, (
            f"{shown(case)}\nexpected 0: each round takes another block; came {walk.hit}"
        )


# --- the walk as it should be ---------------------------------------------------------------------


def test_the_trace_of_the_mend(lab):
    """A block given up by every kind in turn, or once per round."""
    walk = lab.mended(everything(lab, [None, 8], 10), 40)
    same(
        (walk.hit, list(walk.calls)), (8, [(0, 8), (1, 8)]),
        "of ten cached blocks the last token needs one and the drafter one",
    )  # fmt: skip
    three = lab.mended(everything(lab, [None, 8, 12], 10), 40)
    same(three.hit, 8, "with a third kind: the same prefix, for all are there (H4)")


def test_the_pin_agrees(lab):
    """A kind that shortened the hit, and another whose left-out block was never looked at again."""
    agrees(lab, lab.mended, "0.22.1")


def brute(kinds, num_tokens):
    """The longest hit that no kind refuses, tried from the longest one down."""
    most = (num_tokens - 1) // 4
    for hit in range(most, 0, -1):
        if all(kind.look_up(min(4 * hit + 4, num_tokens - 1), True) == hit for kind in kinds):
            return hit
    return 0


def test_no_hit_is_longer(lab):
    """A hit that is shorter than every kind would allow (H2 to H4)."""
    rng = random.Random(5)
    for number in range(400):
        num_blocks = rng.randint(2, 14)
        kinds = [lab.Kind(None, frozenset(range(rng.randint(0, num_blocks))))]
        for window in rng.sample((5, 8, 12, 18), rng.randint(1, 3)):
            blocks = frozenset(b for b in range(num_blocks) if rng.random() < 0.85)
            kinds.append(lab.Kind(window, blocks))
        walk = lab.mended(kinds, 4 * num_blocks)
        best = brute(kinds, 4 * num_blocks)
        assert walk.hit >= best, (
            f"number {number}: {num_blocks} blocks, "
            f"{[(kind.window, sorted(kind.cached)) for kind in kinds]}\n"
            f"expected at least {best} blocks, which no kind refuses; came {walk.hit}"
        )


def test_a_later_release_still_lost_hits_with_three_kinds(lab, record_property):
    """Not a fault: 0.16.0 lost one block where there were two kinds, and all where three."""
    lost = {2: 0, 3: 0}
    for case in recorded():
        told = case["releases"]["0.16.0"]
        best = lab.mended(kinds_of(lab, case), case["num_blocks"] * 4).hit
        lost[len(case["windows"])] += best > 0 and told["hit"] == 0
    assert lost[3] > 10 and lost[2] < lost[3], f"hits that 0.16.0 lost whole, by kinds: {lost}"
    record_property("measured.repair", "where there are two kinds")


@pytest.mark.parametrize("name", ["spiral", "mended"])
def test_the_ends(lab, name):
    """A prompt of one block, or an empty cache: no hit, and no walk without end."""
    walk = getattr(lab, name)
    for tokens in (1, 3, 4, 5):
        same(walk(everything(lab, [None, 8], 2), tokens).hit, 0, f"{tokens} tokens: nothing to hit")
    empty = [lab.Kind(None, frozenset()), lab.Kind(8, frozenset())]
    same(walk(empty, 40).hit, 0, "nothing is cached")

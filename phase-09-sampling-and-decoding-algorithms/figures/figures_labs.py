"""The figures of the labs of phase 09; `course figures` draws them.

All of them show what the reference solutions say; `lab-02-blocks` is a run of `mini_vllm`. No
upstream counterpart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg

LABS = Path(__file__).resolve().parents[1] / "labs"


def solution(folder: str) -> ModuleType:
    """The reference solution of a lab as a module of its own."""
    return load_module(LABS / folder / "solution.py")


def two_orders() -> str:
    """Lab 01: one row through min-p and top-p, in both orders."""
    lab = solution("lab-01-sampling-ops")
    row = np.log([0.5, 0.2, 0.15, 0.1, 0.05])
    stages: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "min_p = .35": lambda z: lab.apply_min_p(z, 0.35),
        "top_p = .65": lambda z: lab.apply_top_p(z, 0.65),
    }
    svg = Svg(
        780, 330, "One row, min-p and top-p in two orders",
        "Probabilities .5 .2 .15 .1 .05. min-p first leaves .714 and .286, of which top-p keeps "
        "one; top-p first leaves the same two, and min-p keeps both.",
    )  # fmt: skip
    for line, (words, order) in enumerate(
        (
            ("the engine's order", ["min_p = .35", "top_p = .65"]),
            ("the other one", ["top_p = .65", "min_p = .35"]),
        )
    ):
        y, z = 30 + line * 155, row
        svg.text(16, y, words, bold=True)
        for place, name in enumerate(["softmax", *order]):
            z = stages[name](z) if place else z
            x = 16 + place * 262
            law = lab.softmax(z)
            svg.text(x, y + 22, name if place else "as it came", size=12, css="soft")
            for token, share in enumerate(law):
                height = 72 * share
                bar = GREEN if share else GREY
                svg.rect(x + token * 42, y + 112 - height, 34, height, fill=bar, opacity=0.55)
                digits = f"{share:.3g}".removeprefix("0") if share else "-"
                svg.text(x + token * 42 + 17, y + 128, digits, size=11, anchor="middle")
            if place:
                svg.line(x - 34, y + 72, x - 12, y + 72, arrow=True)
        kept = int((lab.softmax(z) > 0).sum())
        assert kept == (1, 2)[line]
    return svg.render()


def shared_blocks() -> str:
    """Lab 02: who holds which block when four siblings of 65 prompt tokens end."""
    lab = solution("lab-02-parallel-sampling")
    lengths = [2, 4, 8, 16]
    trace = lab.run_mini(4, 65, lengths)
    svg = Svg(
        780, 300, "Four siblings of 2, 4, 8 and 16 tokens: who holds the prompt's blocks",
        "Per step a column: the reference count of the prompt's four shared blocks falls from 4 to "
        f"{trace.refs[-1]} as siblings end, and they stay in use until the last one has ended.",
    )  # fmt: skip
    svg.text(
        16, 26, "prompt of 65 tokens: 4 shared blocks, one own block for each child", bold=True
    )
    left, width = 110, 40
    for child in range(4):
        y = 44 + child * 36
        svg.text(16, y + 19, f"child {child}", size=13)
        for step, plan in enumerate(trace.plans):
            if plan[child]:
                color = (ORANGE if child == 0 else GREEN) if step == 0 else BLUE
                svg.rect(left + step * width, y, width - 4, 28, fill=color, opacity=0.5, radius=4)
                words = str(plan[child])
                svg.text(left + step * width + 18, y + 19, words, size=12, anchor="middle")
    svg.text(16, 214, "holders", size=13)
    for step, holders in enumerate(trace.refs):
        fill = PURPLE if holders else GREY
        svg.rect(
            left + step * width,
            196,
            width - 4,
            28,
            fill=fill,
            opacity=0.1 + holders * 0.15,
            radius=4,
        )
        svg.text(left + step * width + 18, 215, str(holders), size=12, anchor="middle", bold=True)
        svg.text(left + step * width + 18, 242, str(step + 1), size=11, anchor="middle", css="soft")
    svg.text(16, 242, "step", size=12, css="soft")
    notes = (
        (16, ORANGE, "computes the prompt"),
        (220, GREEN, "finds 64 of 65 tokens"),
        (430, PURPLE, "reference count after the step"),
    )
    for x, color, words in notes:
        svg.rect(x, 264, 16, 16, fill=color, opacity=0.5, radius=3)
        svg.text(x + 24, 277, words, size=12)
    return svg.render()


def wider_loses() -> str:
    """Lab 03: the table in which width 2 loses to width 1."""
    lab = solution("lab-03-beam-search")
    first = {"A": 0.5, "B": 0.45, "C": 0.05}
    second = {"A": {"A": 0.4, "B": 0.3, "C": 0.3}, "B": {"A": 0.51, "B": 0.49}, "C": {"A": 1.0}}
    third = {"A": 1.0, "B": 0.2}

    def fn(tokens: tuple[int, ...]) -> np.ndarray:
        said = "".join("ABCDE"[token] for token in tokens)
        if len(said) < 2:
            row = second[said] if said else first
        else:
            fifths = dict.fromkeys("ABCDE", 0.2)
            row = fifths if said in ("BA", "BB") else {"A": 1.0}
        with np.errstate(divide="ignore"):
            return np.log([row.get(letter, 0.0) for letter in "ABCDE"])

    best = {w: math.exp(lab.beam_search(fn, w, 3)[0].score) for w in (1, 2, 3)}
    assert [round(best[w], 4) for w in (1, 2, 3)] == [0.2, 0.0459, 0.2]
    svg = Svg(
        780, 330, "A wider beam loses",
        "After two tokens BA has .2295, BB .2205 and AA .2. Width 2 keeps BA and BB, after which "
        "every token has .2; width 1 keeps A and ends with AAA, .2.",
    )  # fmt: skip
    for x, words in ((16, "start"), (150, "one token"), (360, "two tokens"), (570, "three tokens")):
        svg.text(x, 24, words, size=12, css="soft")
    rows = {"A": 90, "B": 190, "C": 286}
    svg.circle(40, 165, 6, GREY)
    y = 44
    for letter, share in first.items():
        svg.line(48, 165, 146, rows[letter])
        keep = letter != "C"
        svg.cell(150, rows[letter] - 14, 116, f"{letter}  {share:.3g}", BLUE if keep else GREY)
        for token, after in second[letter].items():
            word, together = letter + token, share * after
            svg.line(268, rows[letter], 356, y + 14)
            kept = word in ("BA", "BB")
            svg.cell(360, y, 116, f"{word}  {together:.4g}", RED if kept else GREY)
            final = together * third["B" if kept else "A"]
            svg.line(478, y + 14, 566, y + 14)
            leaf = f"{word}A  {final:.4g}"
            svg.cell(570, y, 128, leaf, GREEN if word == "AA" else RED if kept else GREY)
            y += 46
    svg.text(704, 62, "width 1", size=12, fill=GREEN, bold=True)
    svg.text(704, 204, "width 2", size=12, fill=RED, bold=True)
    return svg.render()


def streams() -> str:
    """Lab 04: one generator for all, and one for each, with 0, 1 and 5 neighbours."""
    lab = solution("lab-04-seeded-rng-batch-invariance")
    flat, uniform = np.zeros(1000), np.full(1000, 1e-3)
    svg = Svg(
        780, 206, "Request A with seed 7, and its neighbours",
        "With one generator for the batch A's three tokens change with the number of neighbours; "
        "with a generator of its own they are 625, 897, 775 each time.",
    )  # fmt: skip
    svg.text(190, 26, "one generator for the batch", bold=True)
    svg.text(490, 26, "a generator per request", bold=True)
    for line, neighbours in enumerate((0, 1, 5)):
        y = 46 + line * 46
        svg.text(16, y + 19, f"{neighbours} draw before A", size=13)
        shared, own = np.random.default_rng(7), lab.PerRequestSampler()
        for step in range(3):
            for other in range(neighbours):
                shared.choice(1000, p=uniform)
                own.sample(f"n{other}", flat, 1.0, other)
            token = int(shared.choice(1000, p=uniform))
            svg.cell(190 + step * 86, y, 76, str(token), RED if neighbours else BLUE)
            svg.cell(490 + step * 86, y, 76, str(own.sample("a", flat, 1.0, 7)), BLUE)
    svg.text(16, 194, "uniform logits over 1,000 ids", size=12, css="soft")
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-01-two-orders.svg": two_orders,
    "lab-02-blocks.svg": shared_blocks,
    "lab-03-wider-loses.svg": wider_loses,
    "lab-04-streams.svg": streams,
}

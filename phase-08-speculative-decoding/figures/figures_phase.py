"""The figures of phase 08; `course figures` draws them.

`timeline` and `counters` show traces of `mini_vllm` on the shipped model, run here in float64; the
curves are the labs' reference solutions. No upstream counterpart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from course.files import load_module
from course.site.widgets import speculation
from course.site.widgets.hardware import GPUS
from course.truth.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    Svg,
)
from course.truth.plots import Axes
from mini_vllm import LLMEngine, SamplingParams

ROOT = Path(__file__).resolve().parents[2]


LABS = Path(__file__).resolve().parents[1] / "labs"
PROMPT = "def f(x):\n    return x\n\ndef g(x):\n    ret"
CONFIG = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 5,
}


def solution(folder: str) -> ModuleType:
    """The reference solution of a lab as a module of its own."""
    return load_module(LABS / folder / "solution.py")


class Run(NamedTuple):
    """One step of one request: counters as the scheduler left them, drafts, and what was said."""

    scheduled: int
    computed: int
    """After `schedule()`, drafts included."""
    known: int
    drafts: list[int]
    said: list[int]


@functools.cache
def trace(speculate: bool) -> list[Run]:
    """Every step of one greedy request on the shipped model."""
    engine = LLMEngine(dtype="float64", speculative_config=CONFIG if speculate else None)
    name = engine.add_request(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True))
    request = engine.requests[name]
    runs: list[Run] = []

    def note(plan: object) -> None:
        scheduled = plan.num_scheduled_tokens[name]  # type: ignore[attr-defined]
        drafts = list(plan.spec_token_ids.get(name, ()))  # type: ignore[attr-defined]
        computed = plan.num_computed_tokens[name] + scheduled  # type: ignore[attr-defined]
        runs.append(Run(scheduled, computed, request.num_tokens, drafts, []))

    engine.observers.append(note)
    while engine.has_unfinished_requests():
        before = request.num_tokens
        engine.step()
        runs[-1].said.extend(request.all_token_ids[before:])
    return runs


def shown(token: int) -> str:
    """A byte as a character that can be seen."""
    return {10: "↵", 32: "·"}.get(token, chr(token))


# ------------------------------------------------------------------ from traces


def timeline() -> str:
    """The same 24 tokens, one per run, and with drafts."""
    plain, drafted = trace(False), trace(True)
    texts = [[t for run in runs for t in run.said] for runs in (plain, drafted)]
    assert texts[0] == texts[1]
    svg = Svg(
        780, 300, f"24 tokens in {len(plain)} runs, and the same 24 in {len(drafted)}",
        f"Plain decoding says one token in each of {len(plain)} runs. With three drafts a run, "
        f"looked up in the text, the same tokens take {len(drafted)} runs: green drafts are kept, "
        "red ones are not, and each run adds one blue token of the model's own.",
    )  # fmt: skip
    width = 748 / len(plain)
    svg.text(16, 24, f"without drafts: {len(plain)} runs", bold=True)
    for place, run in enumerate(plain):
        svg.cell(16 + place * width, 34, width - 3, shown(run.said[0]), BLUE)
    svg.text(16, 92, f"with drafts: {len(drafted)} runs, the same text", bold=True)
    for place, run in enumerate(drafted):
        x = 16 + place * width
        accepted = len(run.said) - 1
        for row, token in enumerate(run.said):
            color = GREEN if row < accepted else BLUE
            svg.cell(x, 104 + row * 28, width - 3, shown(token), color)
        for row, token in enumerate(run.drafts[accepted:], len(run.said)):
            svg.cell(x, 104 + row * 28, width - 3, shown(token), RED, opacity=0.22)
    legend = ((16, BLUE, "the model's own"), (250, GREEN, "draft, kept"), (430, RED, "draft, lost"))
    for x, color, words in legend:
        svg.rect(x, 262, 16, 16, fill=color, opacity=0.45, radius=3)
        svg.text(x + 24, 275, words, size=12)
    svg.text(764, 275, "one column: one run of the model", size=12, css="soft", anchor="end")
    return svg.render()


def counters() -> str:
    """known and computed of the same request, with the steps back."""
    runs = trace(True)[1:]
    low, high = runs[0].known - 2, runs[-1].computed + 4
    svg = Svg(
        780, 330, "num_tokens and num_computed_tokens of a request that speculates",
        "In each step the counter of computed tokens jumps over the known ones by the drafts, and "
        "falls back by those that were rejected; it always ends one behind.",
    )  # fmt: skip
    axes = Axes(svg, (60, 40, 690, 230), (0, len(runs)), (low, high))
    axes.frame(
        "step", "tokens",
        {i: str(i + 1) for i in range(0, len(runs), 2)},
        range(low - low % 5 + 5, high, 5),
    )  # fmt: skip
    known: list[tuple[float, float]] = []
    for place, run in enumerate(runs):
        after = run.known + len(run.said)
        known += [
            (place, run.known),
            (place + 0.75, run.known),
            (place + 0.75, after),
            (place + 1, after),
        ]
        rejected = len(run.drafts) - (len(run.said) - 1)
        begin = run.computed - run.scheduled
        axes.curve([(place, begin), (place + 0.25, begin)], ORANGE, width=2.5)
        axes.curve([(place + 0.25, begin), (place + 0.25, run.computed)], ORANGE, width=2.5)
        axes.curve([(place + 0.25, run.computed), (place + 0.75, run.computed)], ORANGE, width=2.5)
        axes.curve(
            [(place + 0.75, run.computed), (place + 0.75, run.computed - rejected)], RED, width=3
        )
        axes.curve(
            [(place + 0.75, run.computed - rejected), (place + 1, run.computed - rejected)],
            ORANGE, width=2.5,
        )  # fmt: skip
        assert run.computed - rejected == after - 1
    axes.curve(known, BLUE, width=2.5)
    svg.text(90, 62, "num_tokens", size=13, fill=BLUE, bold=True)
    svg.text(90, 82, "num_computed_tokens", size=13, fill=ORANGE, bold=True)
    svg.text(90, 102, "taken back: rejected drafts", size=13, fill=RED, bold=True)
    return svg.render()


# ------------------------------------------------------------------ the labs


def lookup() -> str:
    """Lab 01's worked example: match, drafts, rows, what is kept."""
    lab = solution("lab-01-ngram-spec-decode")
    context = [1, 2, 3, 4, 1, 2, 3]
    drafts = lab.ngram_propose(context, 2, 3)
    said, accepted = lab.verify_greedy(context, drafts, lambda c: [4, 1, 9, 9][len(c) - 7])
    svg = Svg(
        780, 270, "A draft looked up, and verified in one run",
        f"The context 1 2 3 4 1 2 3 ends in 2 3, which stood at place 1; behind it stood {drafts}. "
        f"The target's rows say 4, 1, 9: {accepted} drafts are kept, and its own 9 replaces the "
        "last.",
    )  # fmt: skip
    svg.text(16, 28, "context", size=12, css="soft")
    for place, token in enumerate(context):
        marked = place in (1, 2, 5, 6)
        svg.cell(110 + place * 42, 12, 36, str(token), ORANGE if marked else GREY)
    svg.line(191, 44, 191, 58)
    svg.line(359, 44, 359, 58)
    svg.line(191, 58, 359, 58)
    svg.text(275, 76, "the last two, and where they stood before", size=12, anchor="middle")
    svg.text(16, 122, "drafts", size=12, css="soft")
    for place, token in enumerate(drafts):
        x = 404 + place * 62
        svg.cell(x, 104, 36, str(token), PURPLE)
    svg.text(110, 122, "what followed: places 3, 4, 5", size=12, fill=PURPLE, bold=True)
    svg.text(16, 182, "one run", size=12, css="soft")
    svg.text(110, 182, "what the target says at each place", size=12)
    answers = [4, 1, 9]
    for place, token in enumerate(answers):
        good = place < accepted
        svg.cell(404 + place * 62, 164, 36, str(token), GREEN if good else RED)
        svg.line(422 + place * 62, 132, 422 + place * 62, 160, arrow=True)
    svg.text(600, 181, "a fourth row: worthless", size=12, css="soft")
    svg.text(16, 242, "said", size=12, css="soft")
    for place, token in enumerate(said):
        svg.cell(404 + place * 62, 224, 36, str(token), GREEN if place < accepted else BLUE)
    svg.text(600, 241, f"{accepted} accepted, one of its own", size=12)
    return svg.render()


def overlap() -> str:
    """Lab 03's pair: min(p, q) is kept, max(p - q, 0) is owed."""
    lab = solution("lab-03-rejection-sampling")
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.full(4, 0.25)
    alpha, residual = lab.expected_acceptance_rate(p, q), lab.residual_distribution(p, q)
    svg = Svg(
        780, 330, "What is kept and what is owed",
        f"p = .5, .3, .15, .05 and q uniform. The overlap, {alpha:.2f} in all, is said as kept "
        "drafts; tokens 0 and 1 are owed .25 and .05, the mass of the rejected drafts.",
    )  # fmt: skip
    axes = Axes(svg, (60, 40, 420, 230), (0, 4), (0, 0.6))
    axes.frame(
        "token", "probability",
        {i + 0.5: str(i) for i in range(4)}, {i / 10: f".{i}" for i in range(0, 7)},
    )  # fmt: skip
    places, kept = np.arange(4) + 0.5, np.minimum(p, q)
    for color, heights, base, words in (
        (GREEN, kept, np.zeros(4), f"min(p, q): kept drafts, {alpha:.2f}"),
        (BLUE, p - kept, kept, f"max(p - q, 0): owed, {1 - alpha:.2f}"),
    ):
        points = list(zip(places.tolist(), heights.tolist(), strict=True))
        axes.bars(points, color, base=base.tolist(), width=0.7, opacity=0.5, name=words)
    axes.bars(
        [(place, 0.25) for place in places.tolist()], ORANGE, width=0.76, opacity=0, stroke=ORANGE,
        name="q, what is drafted",
    )  # fmt: skip
    for token, place in enumerate(places.tolist()):
        keep = lab.accept_prob(p[token], q[token])
        axes.label(place, 0, f"kept {keep:g}", dx=0, dy=-8, anchor="middle")
    axes.legend(510, 56)
    svg.text(510, 180, "residual: " + ", ".join(f"{r:.3f}" for r in residual), size=13)
    svg.text(510, 204, "green + blue = p, whatever q is", size=13, bold=True)
    return svg.render()


def speedups() -> str:
    """Lab 04's curves."""
    lab = solution("lab-04-speedup-model")
    svg = Svg(
        780, 350, "Speedup over the number of drafts, c = .1",
        "Each curve rises from 1 at k = 0, peaks and falls; its best k is marked. At alpha .2 the "
        "best is one draft and hardly more than 1.",
    )  # fmt: skip
    axes = Axes(svg, (60, 40, 600, 250), (0, 16), (0, 4.5))
    axes.frame(
        "drafts per run, k", "times as fast",
        range(0, 17, 2), range(0, 5),
    )  # fmt: skip
    axes.rule(y=1)
    alphas = {0.2: RED, 0.3: ORANGE, 0.5: PURPLE, 0.7: BLUE, 0.9: GREEN}
    for alpha, color in alphas.items():
        points = [(k, lab.speedup(alpha, k, 0.1)) for k in range(17)]
        axes.curve(points, color, width=2.5)
        best = lab.optimal_k(alpha, 0.1)
        axes.dots([points[best]], color, radius=5)
        nudge = {0.2: 14, 0.5: -4}.get(alpha, 4)
        axes.label(16, points[-1][1], f"alpha {alpha:g}, best {best}", fill=color, dy=nudge)
    return svg.render()


def gain_loss() -> str:
    """Where speculation turns from gain to loss, over the batch."""
    svg = Svg(
        780, 350, "Speedup over the batch, H100, alpha .7, c = .05",
        "Up to a batch at which the drafts fill the ridge nothing changes; beyond it verification "
        "costs as many steps as tokens, and every k ends below 1. Larger k turns earlier.",
    )  # fmt: skip
    ridge = GPUS["H100 SXM"]["peak_flops"] / GPUS["H100 SXM"]["mem_bw"]
    axes = Axes(svg, (60, 40, 560, 250), (1, 1024), (0, 2.6), log_x=True)
    axes.frame(
        "requests in a batch", "times as fast",
        [2**i for i in range(0, 11)], [i / 2 for i in range(0, 6)],
    )  # fmt: skip
    axes.rule(y=1)
    for color, k in ((GREEN, 1), (BLUE, 3), (ORANGE, 5), (RED, 10)):
        points = [
            (batch, speculation.step(0.7, k, 0.05, batch, ridge)["speedup"])
            for batch in (2 ** (i / 8) for i in range(81))
        ]
        axes.curve(points, color, width=2.5)
        turn = ridge / (k + 1)
        svg.line(axes.x(turn), axes.y(0), axes.x(turn), axes.y(0) - 8, stroke=color, width=2)
        axes.label(1024, points[-1][1], f"k = {k}: {points[-1][1]:.2f}", fill=color)
    axes.rule(x=ridge, dash=None, width=0.5)
    axes.label(ridge, 2.6, f"ridge: {ridge:.0f} tokens", dx=0, dy=-6, anchor="middle")
    return svg.render()


def rows() -> str:
    """The logits rows of upstream's own example: counts 3, 0, 2, 0, 1."""
    counts, lengths = [3, 0, 2, 0, 1], [4, 100, 3, 100, 2]
    svg = Svg(
        780, 262, "Which rows of a ragged batch become logits",
        "Five requests with 3, 0, 2, 0 and 1 drafts. Of each request's scheduled tokens the last "
        "1 + n give logits; the rows of drafts verify, the last row of each gives the bonus.",
    )  # fmt: skip
    start, row = 0, 0
    for place, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        y = 40 + place * 40
        svg.text(16, y + 17, f"request {place}: {length} tokens, {count} drafts", size=12)
        for index in range(count + 1):
            token = start + length - count - 1 + index
            target = index < count
            svg.cell(260 + index * 66, y, 60, str(token), GREEN if target else BLUE)
            color = GREEN if target else BLUE
            svg.text(600 + index * 44, y + 17, str(row), size=12, fill=color, bold=True)
            row += 1
        start += length
    svg.text(260, 28, "index among the batch's tokens", size=12, css="soft")
    svg.text(600, 28, "row of the logits", size=12, css="soft")
    svg.text(16, 248, "green: verifies the next draft; blue: gives the bonus", size=12, css="soft")
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "timeline.svg": timeline,
    "counters.svg": counters,
    "gain-loss.svg": gain_loss,
    "rows.svg": rows,
    "lab-01-lookup.svg": lookup,
    "lab-03-overlap.svg": overlap,
    "lab-04-speedup.svg": speedups,
}

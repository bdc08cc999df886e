"""The figures of the labs of phase 18: what their reference solutions come to, drawn.

`course figures 18` writes them. No upstream counterpart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import ModuleType

from course.files import load_module
from course.truth.figures import BLUE, GREEN, ORANGE, Svg
from course.truth.plots import Axes

LABS = Path(__file__).resolve().parents[1] / "labs"


def solution(folder: str) -> ModuleType:
    """The reference solution of a lab as a module of its own."""
    return load_module(LABS / folder / "solution.py")


def steps() -> str:
    """Lab 01: tokens of each step, and the step of each first token, for six settings."""
    lab = solution("lab-01-tune-the-knobs")
    arrivals = [lab.Arrival(0, "hello", 24), lab.Arrival(1, "b" * 96, 2)]
    arrivals.append(lab.Arrival(1, "c" * 96, 2))
    settings = (
        ("free", {}),
        ("threshold 32", {"long_prefill_token_threshold": 32}),
        ("threshold 16", {"long_prefill_token_threshold": 16}),
        ("budget 40", {"max_num_batched_tokens": 40}),
        ("both, 32 and 40", {"max_num_batched_tokens": 40, "long_prefill_token_threshold": 32}),
        ("one slot", {"max_num_seqs": 1}),
    )
    found = [lab.simulate(arrivals, **knobs) for _, knobs in settings]
    svg = Svg(
        780, 446, "The same 222 tokens in six shapes",
        "Bars of tokens per step. " + "; ".join(
            f"{name}: fullest step {each.max_step_tokens}, {each.total_steps} steps"
            for (name, _), each in zip(settings, found, strict=True)
        ),
    )  # fmt: skip
    for row, ((name, _), each) in enumerate(zip(settings, found, strict=True)):
        base = 66 + row * 70
        svg.text(16, base - 24, name, size=13, bold=True)
        svg.text(16, base - 6, f"fullest step {each.max_step_tokens}", size=12, css="soft")
        first_steps = [a.step + ttft - 1 for a, ttft in zip(arrivals, each.ttft_steps, strict=True)]
        for step, tokens in enumerate(each.step_tokens):
            x, height = 160 + step * 21, max(2, tokens / found[0].max_step_tokens * 52)
            fullest = tokens == each.max_step_tokens
            svg.rect(x, base - height, 18, height, fill=ORANGE if fullest else BLUE)
            names = "".join(n for n, at in zip("ABC", first_steps, strict=True) if at == step)
            if names:
                svg.text(x + 9, base + 12, names, size=11, anchor="middle")
        svg.line(160, base, 160 + 28 * 21, base, css="soft-line")
    svg.text(220, 438, "steps; a letter is a request's first token", size=12, css="soft")
    return svg.render()


def queue() -> str:
    """Lab 03: a recorded case, its free blocks beside what the head of the queue needs."""
    judging = load_module(LABS / "lab-03-diagnose" / "judging.py")
    file = LABS / "lab-03-diagnose" / "recordings" / "cases.jsonl.gz"
    case = next(each for each in judging.load(file) if each["case"] == "queue")
    steps = case["steps"]
    svg = Svg(
        780, 300, "A queue that does not move",
        f"Over {len(steps)} steps of a recorded case: free blocks, requests that run and requests "
        f"that wait. {len(steps[10]['running'])} runs and {len(steps[10]['waiting'])} wait while "
        f"{steps[10]['free_blocks']} blocks are free.",
    )  # fmt: skip
    axes = Axes(svg, (60, 30, 560, 216), (0, len(steps)), (0, 42))
    axes.frame("step", "blocks, requests", range(0, len(steps), 10), range(0, 41, 8))
    for values, colour, name in (
        ([step["free_blocks"] for step in steps], BLUE, "free blocks"),
        ([len(step["waiting"]) for step in steps], ORANGE, "requests that wait"),
        ([len(step["running"]) for step in steps], GREEN, "requests that run"),
    ):
        axes.curve(list(enumerate(values)), colour, width=2.5)
        axes.label(24, values[24], name, fill=colour, dy=-6)
    return svg.render()


def fit() -> str:
    """Lab 04: measured times beside predicted ones, those that were held out marked."""
    lab = solution("lab-04-fit-and-predict")
    file = LABS / "lab-04-fit-and-predict" / "recordings" / "h100-llama-8b.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    before = found["decode_context"]
    cases = [
        (f"decode {batch}", ((1, before),) * int(batch), [each / 1e3 for each in times])
        for batch, times in found["decode_ms"].items()
    ]
    for shape, times in found["prefill_s"].items():
        batch, length = map(int, shape.split("x"))
        cases.append((f"prefill {shape}", ((length, 0),) * batch, times))
    held = ("decode 64", "prefill 1x2048")
    steps = [lab.Timed(rows, t) for name, rows, times in cases if name not in held for t in times]
    cost = lab.fit(steps)
    svg = Svg(
        780, 330, "Measured and predicted steps of an 8 B model on an H100",
        "; ".join(
            f"{name}: {median(times) * 1e3:.1f} ms measured, {cost.seconds(rows) * 1e3:.1f} "
            "predicted" for name, rows, times in cases
        ),
    )  # fmt: skip
    axes = Axes(svg, (60, 30, 560, 246), (5, 500), (5, 500), log_x=True, log_y=True)
    ticks = {5: "5", 10: "10", 20: "20", 50: "50", 100: "100", 200: "200", 500: "500"}
    axes.frame("measured, ms", "predicted, ms", ticks, ticks)
    axes.curve([(5, 5), (500, 500)], "#888888", width=1, dash="5 4")
    for chosen, colour, name in ((False, BLUE, "fitted"), (True, ORANGE, "held out")):
        points = [
            (median(times) * 1e3, cost.seconds(rows) * 1e3)
            for each, rows, times in cases
            if (each in held) is chosen
        ]
        axes.dots(points, colour, radius=5, name=name)
    axes.legend(90, 50)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-01-steps.svg": steps, "lab-03-queue.svg": queue, "lab-04-fit.svg": fit,
}  # fmt: skip

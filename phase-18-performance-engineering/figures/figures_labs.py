"""The figures of the labs of phase 18: what their reference solutions come to, drawn.

`course figures 18` writes them. No upstream counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from course.files import load_module
from course.truth.figures import BLUE, ORANGE, Svg

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
            x, height = 160 + step * 21, tokens / found[0].max_step_tokens * 52
            fullest = tokens == each.max_step_tokens
            svg.rect(x, base - height, 18, height, fill=ORANGE if fullest else BLUE)
            names = "".join(n for n, at in zip("ABC", first_steps, strict=True) if at == step)
            if names:
                svg.text(x + 9, base + 12, names, size=11, anchor="middle")
        svg.line(160, base, 160 + 28 * 21, base, css="soft-line")
    svg.text(160, 438, "steps; a letter is a request's first token", size=12, css="soft")
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {"lab-01-steps.svg": steps}

"""The figures of the labs of phase 11: what their reference solutions say, drawn.

`course figures 11` writes them. No upstream counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, Svg

LABS = Path(__file__).resolve().parents[1] / "labs"
COLORS = {-1: GREY, 0: BLUE, 1: ORANGE, 2: GREEN, 3: PURPLE}


def solution(folder: str) -> ModuleType:
    """The reference solution of a lab as a module of its own."""
    return load_module(LABS / folder / "solution.py")


def groups() -> str:
    """Lab 01: six rows, one product for all, two for each adapter."""
    lab = solution("lab-01-batched-lora-matmul")
    ids = [0, 0, -1, 1, 1, 0]
    rows, found, counts, starts = (each.tolist() for each in lab.sort_by_adapter(ids))
    svg = Svg(
        780, 250, "Six rows of two adapters and the base",
        "All six rows go through W together; then the rows of each adapter are gathered, shrunk, "
        "expanded and added back to their places; the base row gets nothing more.",
    )  # fmt: skip
    svg.text(16, 40, "the batch", bold=True)
    for row, adapter in enumerate(ids):
        name = "base" if adapter == -1 else f"adapter {adapter}"
        svg.cell(130 + row * 104, 20, 98, f"{row}: {name}", COLORS[adapter])
    svg.line(439, 56, 439, 72, arrow=True)
    svg.box(130, 76, 618, 34, ["x Wᵀ: one product, all rows"], fill=GREY)
    svg.text(16, 148, "sorted", bold=True)
    for place, row in enumerate(rows):
        svg.cell(130 + place * 104, 128, 98, f"row {row}", COLORS[ids[row]])
    svg.text(16, 190, "groups", bold=True)
    for adapter, count, start in zip(found, counts, starts[:-1], strict=True):
        x, width = 130 + start * 104, count * 104 - 6
        noun = "row" if count == 1 else "rows"
        svg.text(x + width / 2, 182, f"{count} {noun}", size=12, anchor="middle")
        words = "+ 0" if adapter == -1 else f"+ s (x A{adapter}ᵀ) B{adapter}ᵀ"
        svg.text(x + width / 2, 200, words, size=12, anchor="middle", bold=True)
    last = f"starts {starts}: what a kernel needs to know besides the order of the rows"
    svg.text(130, 232, last, size=12, css="soft")
    return svg.render()


def slots() -> str:
    """Lab 04: who runs, who waits and what stands in two slots, step by step."""
    lab = solution("lab-04-adapter-slot-cache")
    wanted = [(1, 4), (2, 2), (3, 2), (None, 2), (1, 2)]  # adapter and steps of each request
    left = [steps for _, steps in wanted]
    running: list[int] = []
    waiting = list(range(len(wanted)))
    cache = lab.AdapterSlotCache(2)
    svg = Svg(
        780, 330, "Two slots, five requests, adapters 1, 2, 3, base, 1",
        "The request of adapter 3 is passed over while adapters 1 and 2 hold both slots; the base "
        "request and the second one of adapter 1 behind it run at once. When adapter 2 has ended, "
        "adapter 3 takes its slot.",
    )  # fmt: skip
    names = ["base" if adapter is None else f"adapter {adapter}" for adapter, _ in wanted]
    for request, name in enumerate(names):
        svg.text(16, 64 + request * 38, f"{'abcde'[request]}: {name}", size=13)
    svg.line(16, 240, 764, 240)
    for slot in range(2):
        svg.text(16, 268 + slot * 34, f"slot {slot}", size=13, bold=True)
    step = 0
    while running or waiting:
        x = 140 + step * 150
        svg.text(x + 70, 28, f"step {step}", size=12, anchor="middle", css="soft")
        queue = [wanted[request][0] for request in waiting]
        admitted, _ = lab.max_schedulable(queue, 2, [wanted[request][0] for request in running])
        running += [waiting[place] for place in admitted]
        waiting = [request for place, request in enumerate(waiting) if place not in admitted]
        for request in running:
            adapter = wanted[request][0]
            if adapter is not None:
                cache.ensure(adapter)
            color = GREY if adapter is None else COLORS[adapter - 1]
            svg.cell(x, 44 + request * 38, 140, "runs", color)
        for request in waiting:
            svg.text(x + 70, 64 + request * 38, "waits", size=12, anchor="middle", css="soft")
        for adapter in cache.resident():
            y = 248 + cache.slot_of(adapter) * 34
            svg.cell(x, y, 140, f"adapter {adapter}", COLORS[adapter - 1])
        for request in running:
            left[request] -= 1
        running = [request for request in running if left[request]]
        step += 1
    assert step == 4
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-01-groups.svg": groups,
    "lab-04-slots.svg": slots,
}

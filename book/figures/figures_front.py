"""The figures of the front pages.

The timeline is a run of mini_vllm, recorded
by `course.site.gantt`. No upstream counterpart.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from conformance.broken_rules import document
from course.incidents import judge
from course.site import gantt, recordings
from course.site.widgets.code_points import FORMATS, on_grid, round_to_points, rows
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, RED, Svg
from mini_vllm.cudagraph.launches import LAYER, MODES, simulate


def engine_timeline() -> str:
    """The run that the interactive timeline steps through, as one picture."""
    return gantt.draw(gantt.engine_timeline())


def flight_sample(first: int = 24, steps: int = 36) -> str:
    """Some steps of the shipped recording of a real server: who waits, and who is preempted."""
    told = recordings.sample()
    rows = []
    for request in told["requests"][4:16]:
        cells = [
            {"step": step - first, "kind": kind, "tokens": tokens, "hit": hit, "finish": None}
            for begin, end, kind, tokens, hit in request["cells"]
            for step in range(max(begin, first), min(end, first + steps - 1) + 1)
        ]
        rows.append({
            "id": request["id"], "cells": cells, "prompt_tokens": request["prompt"],
            "output_tokens": request["max"],
        })  # fmt: skip
    data = {
        "title": f"A real server, recorded: 12 of its requests in steps {first} to "
        f"{first + steps - 1}",
        "steps": steps, "requests": rows,
        "totals": [
            {"step": step, "free_blocks": told["totals"]["free"][first + step]}
            for step in range(steps)
        ],
    }  # fmt: skip
    return gantt.draw(data, first_step=first, totals=("free_blocks",))


def cuda_graphs() -> str:
    """Three layers of short kernels in the three modes, both lanes, on one scale."""
    launch_us, kernel_us, layers = 5, 2, 3
    lines = {m: simulate(LAYER * layers, m, launch_us, kernel_us) for m in MODES}
    longest = max(line.step_us for line in lines.values())
    left, right, row, gap = 90, 12, 22, 34
    width, height = 760, len(MODES) * (2 * row + gap) + 30
    svg = Svg(
        width,
        height,
        "Launches and kernels of one step in three modes",
        f"{layers} layers of {len(LAYER)} kernels of {kernel_us} microseconds, {launch_us} for a "
        "launch. Eager: the GPU waits for every launch. Piecewise: graphs between the attentions. "
        "Full: one launch, then kernel after kernel.",
    )
    scale = (width - left - right) / longest
    for number, (mode, line) in enumerate(lines.items()):
        top = 24 + number * (2 * row + gap)
        issued = "1 launch" if len(line.launches) == 1 else f"{len(line.launches)} launches"
        summary = f"{issued}, {line.step_us:g} µs, GPU busy {line.gpu_busy:.0%}"
        svg.text(0, top - 7, mode, bold=True)
        svg.text(left, top - 7, summary, css="soft", size=12)
        for lane, (name, spans) in enumerate((("host", line.launches), ("GPU", line.kernels))):
            y = top + lane * row
            svg.text(left - 8, y + 14, name, anchor="end", size=12)
            for span in spans:
                color = ORANGE if lane == 0 else GREEN if span.name == "attention" else BLUE
                length = max(0.6, (span.end - span.start) * scale - 0.6)
                svg.rect(left + span.start * scale, y + 2, length, row - 5, fill=color)
    svg.text(left, height - 6, "orange: a launch; blue: a kernel; green: attention", css="soft")
    svg.text(width - right, height - 6, f"{longest:g} µs", anchor="end", css="soft")
    return svg.render()


def code_points() -> str:
    """One row of weights on int4 and on E4M3, as it is and with its largest weight 8 times."""
    name, values = next(iter(rows().items()))
    row = np.array(values)
    loud = int(np.abs(row).argmax())
    svg = Svg(
        760,
        4 * 74 + 34,
        f"{len(row)} weights ({name}) on two grids",
        "Above the line of each lane the weights, red where they become 0; below it the values the "
        "format can say, one scale for the row. With the largest weight 8 times as large, int4 "
        "loses nearly all others to 0, and E4M3 none.",
    )
    left, width = 150, 596
    for lane, (form, spike) in enumerate((f, s) for s in (1, 8) for f in ("int4", "E4M3")):
        points = np.array(FORMATS[form]["points"])
        weights = row.copy()
        weights[loud] *= spike
        largest = np.abs(weights).max()
        codes = round_to_points(np.abs(weights) / largest * points[-1], points)
        found = on_grid(row, form, len(row), spike)
        y = 12 + 74 * lane
        svg.text(0, y + 18, form + (f", one weight x{spike}" if spike > 1 else ""), bold=True)
        svg.text(0, y + 36, f"error {found['error']:.1%}", css="soft", size=12)
        svg.text(0, y + 52, f"{found['zeros']} lost to 0", css="soft", size=12)
        spots = left + width * (weights / largest + 1) / 2
        grid = left + width * (np.concatenate([-points[:0:-1], points]) / points[-1] + 1) / 2
        for places, top, colour in (
            (spots[codes > 0], y, BLUE),
            (spots[codes == 0], y, RED),
            (grid, y + 34, GREY),
        ):
            strokes = "".join(f"M{x:.1f} {top}v{26 if top > y else 30}" for x in np.sort(places))
            svg.raw(f'<path d="{strokes}" fill="none" style="stroke:{colour}"/>')
        svg.line(left, y + 32, left + width, y + 32, css="grid-line")
    svg.text(
        left, 4 * 74 + 28, "blue: a weight; red: one that becomes 0; grey: a value of the format"
    )
    return svg.render()


def broken_rules() -> str:
    """A bar per broken rule: the share of its recording's workloads that leave it."""
    kept = document()
    svg = Svg(
        720, 24 + 26 * len(kept) + 6, "Ten rules broken one at a time, and who notices",
        "; ".join(f"{each['rule']} {each['differ']} of {each['workloads']}" for each in kept),
    )  # fmt: skip
    left, width = 500.0, 170.0
    svg.text(left, 16, f"of {kept[0]['workloads']} workloads, those that differ", size=12)
    for row, each in enumerate(kept):
        y = 24.0 + 26 * row
        svg.text(left - 8, y + 15, each["rule"].rstrip("."), size=12, anchor="end")
        wide = width * each["differ"] / each["workloads"]
        svg.rect(left, y + 2, max(1.0, wide), 17, fill=ORANGE, opacity=0.75)
        svg.text(left + wide + 5, y + 15, str(each["differ"]), size=12)
    return svg.render()


def incident_days() -> str:
    """Each recorded bad day: requests that run, above, and that wait, below, step by step."""
    days = [judge.load(name) for name in judge.NAMES]
    left, wide, row, unit = 92.0, 676.0, 62, 3.4
    svg = Svg(
        780, 30 + row * len(days), "Seven bad days of a real server, step by step",
        "; ".join(
            f"{day.name}: {len(day.case['steps'])} steps, at most "
            f"{max(len(step['running']) for step in day.case['steps'])} run and "
            f"{max(_waiting(step) for step in day.case['steps'])} wait"
            for day in days
        ),
    )  # fmt: skip
    svg.text(left, 16, "requests that run", size=12, fill=BLUE)
    svg.text(left + 130, 16, "requests that wait", size=12, fill=ORANGE)
    for number, day in enumerate(days):
        middle = 30.0 + row * number + 28
        steps = day.case["steps"]
        svg.text(left - 10, middle + 4, day.name, size=12, anchor="end")
        svg.text(left + wide, middle + 30, f"{len(steps)} steps", size=11, anchor="end")
        svg.line(left, middle, left + wide, middle, stroke=GREY)
        each = wide / len(steps)
        place = 0
        for (running, waiting), same in itertools.groupby(
            (len(step["running"]), _waiting(step)) for step in steps
        ):
            count = len(list(same))
            x, wide_of_it = left + place * each, count * each
            svg.rect(x, middle - running * unit, wide_of_it, running * unit, fill=BLUE)
            if waiting:
                svg.rect(x, middle, wide_of_it, waiting * unit, fill=ORANGE)
            place += count
    return svg.render()


def _waiting(step: dict[str, Any]) -> int:
    return len(step["waiting"]) + len(step["skipped_waiting"])


FIGURES = {
    "engine-timeline.svg": engine_timeline,
    "flight-sample.svg": flight_sample,
    "cuda-graphs.svg": cuda_graphs,
    "code-points.svg": code_points,
    "broken-rules.svg": broken_rules,
    "incident-days.svg": incident_days,
}

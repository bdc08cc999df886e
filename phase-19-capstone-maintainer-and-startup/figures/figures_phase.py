"""The figures of the phase's chapters: CI jobs by diff, the museum by release, the service's run.

The first is upstream's CI files at the pin, the second what each release's own code did, the third
a run of the drill. No upstream counterpart.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.museum import EXHIBITS, INVARIANTS
from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg

LABS = Path(__file__).resolve().parents[1] / "labs"
SCOPE, BISECT = LABS / "lab-01-find-and-scope-a-pr", LABS / "lab-04-bisect"
DIFFS = {
    "docs/README.md": "documents",
    "tests/v1/core/test_scheduler.py": "a test",
    "vllm/tool_parsers/utils.py": "a tool parser",
    "vllm/v1/core/sched/scheduler.py": "the scheduler",
    "csrc/cache_kernels.cu": "a kernel",
}
KINDS = {"processor": GREEN, "one shared GPU": BLUE, "other GPUs": ORANGE, "not named": GREY}


def _kind(device: str | None) -> str:
    """What a step runs on, as its `device` says it."""
    if device is None:
        return "not named"
    if device.startswith("cpu"):
        return "processor"
    return "one shared GPU" if device.endswith("gb") else "other GPUs"


def selection() -> str:
    """Mandatory CI steps that five diffs select, by what they run on."""
    lab = load_module(SCOPE / "solution.py")
    areas: Any = json.loads((SCOPE / "recordings" / "areas.json").read_text("utf-8"))
    device = {step["label"]: _kind(step.get("device")) for step in areas["steps"]}
    rows = []
    for path, name in DIFFS.items():
        rows.append((path, name, Counter(device[label] for label in lab.jobs_for([path], areas))))
    said = "; ".join(f"{name}, {path}: {count.total()}" for path, name, count in rows)
    svg = Svg(780, 262, "Mandatory CI steps that a change of one file selects at the pin", said)
    left, width = 262.0, 440.0
    most = max(count.total() for *_, count in rows)
    place = left
    for kind, colour in KINDS.items():
        svg.rect(place, 14, 12, 12, fill=colour, opacity=0.75, radius=2)
        svg.text(place + 18, 24, kind, size=12)
        place += 118
    for row, (path, name, count) in enumerate(rows):
        y = 44 + row * 42
        svg.text(left - 10, y + 13, name, anchor="end")
        svg.text(left - 10, y + 29, path, size=11, anchor="end", css="ink mono")
        x = left
        for kind, colour in KINDS.items():
            wide = width * count[kind] / most
            if count[kind]:
                svg.rect(x, y, wide, 28, fill=colour, opacity=0.75, tip=f"{count[kind]} {kind}")
            x += wide
        svg.text(x + 8, y + 19, str(count.total()))
    return svg.render()


ROOMS = dict(zip(INVARIANTS, (BLUE, RED, PURPLE, ORANGE, GREEN, GREY), strict=True))


def museum() -> str:
    """A row per bug, a cell per release whose own code was asked: filled where it has the bug."""
    verdicts: dict[str, dict[str, bool]] = json.loads(
        (BISECT / "recordings" / "verdicts.json").read_text("utf-8")
    )
    versions = sorted(
        {version for said in verdicts.values() for version in said},
        key=lambda version: tuple(map(int, version.split("."))),
    )
    rows = [
        (room, number)
        for room in INVARIANTS
        for number, exhibit in EXHIBITS.items()
        if exhibit.invariant == room
    ]
    at_pin = sum(verdicts[str(number)].get("0.22.1", False) for _, number in rows)
    newest = sum(verdicts[str(number)].get(versions[-1], False) for _, number in rows)
    svg = Svg(
        780, 66 + len(rows) * 21,
        f"{len(rows)} bugs of vLLM in {len(versions)} releases, by the invariant that breaks",
        f"{at_pin} of them in 0.22.1, {newest} in {versions[-1]}. A filled cell: the release's own "
        "code shows the bug; an empty one: it does not; none: the release cannot be asked.",
    )  # fmt: skip
    left, wide = 176.0, 31.0
    svg.text(left - 8, 26, "0.", size=12, anchor="end")
    for column, version in enumerate(versions):
        x = left + column * wide
        svg.text(x + 13, 26, version.removeprefix("0."), size=11, anchor="middle")
    before = ""
    for row, (room, number) in enumerate(rows):
        y = 36 + row * 21
        if room != before:
            svg.text(14, y + 13, room, size=12)
        before = room
        svg.text(left - 8, y + 13, str(number), size=12, anchor="end", css="ink mono")
        for column, version in enumerate(versions):
            bad = verdicts[str(number)].get(version)
            if bad is None:
                continue
            x = left + column * wide
            tip = f"{number} at {version}: {'has it' if bad else 'does not have it'}"
            svg.rect(x, y, 27, 16, fill=ROOMS[room], opacity=0.75 if bad else 0.12, radius=3,
                     tip=tip)  # fmt: skip
    svg.text(left, 56 + len(rows) * 21, "filled: the release's own code shows it", size=12)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "ci-selection.svg": selection,
    "museum.svg": museum,
}

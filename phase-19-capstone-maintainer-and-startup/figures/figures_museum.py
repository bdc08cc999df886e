"""The figures of labs 19-02 and 19-04, from their recordings.

No upstream counterpart; the recordings are of the releases that each names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance import museum_parts, recording, replay
from conformance.releases import builders
from course.files import load_module
from course.truth.figures import BLUE, GREEN, ORANGE, RED, Svg
from mini_vllm import EngineParts

LABS = Path(__file__).resolve().parents[1] / "labs"
MEND, BISECT = LABS / "lab-02-mend-the-museum", LABS / "lab-04-bisect"
PLANNED = ("num_scheduled_tokens", "preempted", "running", "waiting", "finished")
KNOWN = ("42656", "0.27.1")


def agree(number: int, part: str, kind: type) -> tuple[int, int]:
    """How many of the recorded workloads a part decides as recorded, and of how many."""
    entries = list(recording.read(MEND / "recordings" / f"{number}.jsonl.gz", None))
    build = builders(EngineParts(**{part: kind}))
    first = [replay.replay(entry, *build, fields=PLANNED)[1] for entry in entries]
    return first.count(None), len(entries)


def mending() -> str:
    """Two rules: the workloads on which the part with the bug agrees with the good release."""
    lab = load_module(MEND / "solution.py")
    rows = []
    for number, good, part, names in (
        (37307, "0.19.0", "scheduler", ("FirstChunk", "Admission")),
        (49097, "0.28.0", "async_scheduler", ("SteppedOver", "Walk")),
    ):
        for module, name in zip((museum_parts, lab), names, strict=True):
            count, total = agree(number, part, getattr(module, name))
            rows.append((number, good, name, count, total))
    said = "; ".join(
        f"{n}, {name}: {count} of {total} as {good}" for n, good, name, count, total in rows
    )
    svg = Svg(640, 200, "Workloads decided as the first good release decides them", said)
    for row, (number, good, name, count, total) in enumerate(rows):
        y = 20 + row * 40 + (row // 2) * 12
        svg.text(150, y + 18, name, anchor="end", css="ink mono")
        svg.rect(160, y, 360, 26, fill=ORANGE, opacity=0.35, radius=2)
        svg.rect(160, y, 360 * count / total, 26, fill=GREEN, opacity=0.8, radius=2)
        svg.text(530, y + 18, f"{count} of {total}", size=12)
        if row % 2 == 0:
            svg.text(20, y + 18, str(number), size=12)
            svg.text(20, y + 36, f"as {good}", size=12)
    return svg.render()


class Asked:
    """`ask` of the lab, in the order of the questions."""

    def __init__(self, said: dict[str, bool]) -> None:
        self.said, self.places = said, []  # type: ignore[var-annotated]

    def __call__(self, version: str) -> bool:
        self.places.append(version)
        return self.said[version]


def asked() -> str:
    """What bisection asks of a verdict that comes and goes, and what three more questions find."""
    lab = load_module(BISECT / "solution.py")
    verdicts: dict[str, Any] = json.loads(
        (BISECT / "recordings" / "verdicts.json").read_text("utf-8")
    )
    number, known = KNOWN
    said = verdicts[number]
    plain, more = Asked(said), Asked(said)
    found = lab.fewest(list(said), known, plain), lab.careful(list(said), known, more, 3)
    svg = Svg(
        780, 196, f"{number}: bad and good releases, and the order in which they are asked",
        f"{known} is known to be bad. Bisection asks {', '.join(plain.places)} and says "
        f"{found[0][0]} to {found[0][1]}; with three questions more it asks "
        f"{', '.join(more.places[len(plain.places) :])} "
        f"as well and says {found[1][0]} to {found[1][1]}.",
    )  # fmt: skip
    left, wide = 100.0, 35.0
    for place, (version, bad) in enumerate(said.items()):
        x = left + place * wide
        svg.text(x + 15, 24, version.removeprefix("0."), size=12, anchor="middle")
        svg.rect(x, 34, 30, 26, fill=RED if bad else GREEN, opacity=0.7, radius=3,
                 tip=f"{version} {'bad' if bad else 'good'}")  # fmt: skip
        for y, asks in ((92, plain), (140, more)):
            if version == known:
                svg.text(x + 15, y, "known", size=11, anchor="middle")
            elif version in asks.places:
                svg.text(x + 15, y, str(asks.places.index(version) + 1), anchor="middle")
    svg.text(92, 24, "0.", size=12, anchor="end")
    svg.text(92, 52, "verdict", size=12, anchor="end")
    for y, name, (first, good) in ((92, "fewest", found[0]), (140, "careful", found[1])):
        svg.text(92, y, name, anchor="end", css="ink mono")
        a, b = list(said).index(first), list(said).index(good)
        svg.line(left + a * wide, y + 12, left + b * wide - 5, y + 12, stroke=BLUE, width=3)
    svg.text(
        left, 184, "red: bad; numbers: the order of the questions; blue: what is answered", size=12
    )
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-02-mending.svg": mending,
    "lab-04-asked.svg": asked,
}

"""The figure of lab 19-05: its workloads, replayed here with one rule of the solution more per row.

No upstream counterpart; the recordings are of vLLM 0.33.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from conformance import recording
from conformance.releases import builders, release_of
from conformance.replay import replay
from course.files import load_module
from course.truth.figures import BLUE, GREEN, ORANGE, PURPLE, Svg
from mini_vllm import EngineParts, Scheduler

LAB = Path(__file__).resolve().parents[1] / "labs" / "lab-05-since-the-pin"
COLOURS = {"agree": GREEN, "block_ids": BLUE, "num_scheduled_tokens": ORANGE, "new": PURPLE}


def rows() -> list[tuple[str, Counter[str]]]:
    """What is mended, and how many workloads agree or leave the recording in which field first."""
    lab = load_module(LAB / "solution.py")
    upstream = release_of("0.33.0").upstream
    files = sorted((LAB / "recordings").glob("*.jsonl.gz"))
    entries = [entry for path in files for entry in recording.read(path, upstream)]
    found = []
    mended: tuple[type[Scheduler], ...] = ()
    for name in ("the pin", "Pool", "Chunks", "Labels", "Walk"):
        if name not in ("the pin", "Pool"):
            mended = (*mended, getattr(lab, name))
        scheduler = type("Mended", mended or (Scheduler,), {})
        pool = {} if name == "the pin" else {"block_pool": lab.Pool}
        build, make_request = builders(EngineParts(scheduler=scheduler, **pool))
        first = [replay(entry, build, make_request)[1] for entry in entries]
        found.append((name, Counter(each.field if each else "agree" for each in first)))
    return found


def mending() -> str:
    """A bar per rule mended, in pieces by the field that differs first."""
    counted = rows()
    total = counted[0][1].total()
    svg = Svg(
        640, 262, f"The {total} workloads of the lab, with one rule more mended in each row",
        "; ".join(
            f"{name}: " + ", ".join(f"{field} {count[field]}" for field in COLOURS if count[field])
            for name, count in counted
        ),
    )  # fmt: skip
    left, width, top, height = 92.0, 532.0, 54.0, 28.0
    places = {"agree": left, "block_ids": 262, "num_scheduled_tokens": 362, "new": 532}
    svg.text(250, 26, "first difference:", size=12, anchor="end")
    for field, colour in COLOURS.items():
        svg.rect(places[field], 16, 12, 12, fill=colour, opacity=0.75, radius=2)
        svg.text(places[field] + 18, 26, field, size=12)
    for row, (name, count) in enumerate(counted):
        y = top + row * 40
        words = name if row == 0 else f"+ {name}"
        svg.text(left - 8, y + 19, words, anchor="end", css="ink" if row == 0 else "ink mono")
        x = left
        for field, colour in COLOURS.items():
            wide = width * count[field] / total
            if count[field]:
                tip = f"{words}: {count[field]} of {total} {field}"
                svg.rect(x, y, wide, height, fill=colour, opacity=0.75, tip=tip)
            if wide > 22:
                svg.text(x + wide / 2, y + 19, str(count[field]), size=12, anchor="middle")
            x += wide
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {"lab-05-mending.svg": mending}

"""The figures of phase 17; `course figures 17` draws them.

`defaults` is what the pinned platforms made of a configuration. `rows` and `load` are of a run of
the real engine with lab 17-03's plugins, as those plugins noted it; `orders` is what vLLM IR chose;
`funnel` counts the pinned source.
"""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

from course.truth.figures import BLUE, GREEN, GREY, ORANGE, Svg

LABS = Path(__file__).resolve().parents[1] / "labs"
FOLDERS = (
    "model_executor", "v1/attention", "distributed", "config", "compilation", "v1/executor",
    "models", "v1/worker", "v1/sample", "v1/core",
)  # fmt: skip


@functools.cache
def recorded() -> dict[str, Any]:
    """What the real engine did with the plugins."""
    with gzip.open(LABS / "lab-03-ten-line-plugins" / "recordings" / "plugins.jsonl.gz", "rt") as f:
        return json.loads(f.read())


def rows() -> str:
    """Which rows of the batch may not say a letter, step by step; arrows are moves."""
    steps = [note for note in recorded()["served"]["notes"] if note["what"] == "rows"]
    moved = [n for n, s in enumerate(steps) if s["update"] and s["update"]["moved"]]
    steps = steps[: max(moved) + 4]
    left, top, width, height = 60.0, 34.0, 17.0, 20.0
    moves = "; ".join(
        f"step {number}: row {a} to {b}"
        for number in moved
        for a, b, _ in steps[number]["update"]["moved"]
    )
    svg = Svg(
        780, int(top + 8 * height + 40), "Rows of a real server's batch that may not say a letter",
        f"{len(steps)} steps, up to eight rows. {moves}.",
    )  # fmt: skip
    for row in range(8):
        svg.text(left - 8, top + row * height + 14, f"row {row}", anchor="end", size=11)
    for number, step in enumerate(steps):
        x, meant = left + number * width, {row for row, _ in step["rows"]}
        for row in range(step["size"]):
            colour = ORANGE if row in meant else GREY
            opacity = 0.8 if row in meant else 0.25
            svg.rect(x, top + row * height, width - 2, height - 2, fill=colour, opacity=opacity)
        for a, b, _ in (step["update"] or {}).get("moved", ()):
            middle = x + width / 2 - 1
            svg.line(middle, top + a * height + 10, middle, top + b * height + 12, arrow=True)
        if number % 5 == 0:
            svg.text(x + width / 2, top + 8 * height + 16, str(number), anchor="middle", size=11)
    svg.text(
        left, 20, "orange: kept from a letter; an arrow: the last row moves into a hole", size=12
    )
    return svg.render()


def load() -> str:
    """Running and waiting requests and tokens per step, as the stat logger wrote them."""
    lines = [line for line in recorded()["served"]["stats"] if "running" in line]
    left, base, width, height = 60.0, 172.0, 8.0, 13.0
    shown = lines[:80]
    most = max(line["running"] + line["waiting"] for line in shown)
    svg = Svg(
        780, 220, "Requests of the same server, as a stat logger of ten lines sees them",
        f"{len(shown)} steps; at most {most} requests, {max(s['running'] for s in shown)} running",
    )  # fmt: skip
    for count in (0, 4, 8, 12):
        svg.text(left - 8, base - count * height + 4, str(count), anchor="end", size=11)
    for number, line in enumerate(shown):
        x = left + number * width
        run = line["running"] * height
        svg.rect(x, base - run, width - 1, run, fill=BLUE, opacity=0.7)
        if waits := line["waiting"] * height:
            svg.rect(x, base - run - waits, width - 1, waits, fill=ORANGE, opacity=0.7)
        if number % 10 == 0:
            svg.text(x + width / 2, base + 16, str(number), anchor="middle", size=11)
    svg.text(
        left, base + 36, "steps; blue: running, orange: waiting for one of eight places", size=12
    )
    return svg.render()


def orders() -> str:
    """What becomes of the order a, b, native, for each kind of a and b."""
    words = {(True, None): "takes all", (True, True): "takes these", (True, False): "refuses these",
             (False, None): "not supported"}  # fmt: skip
    cases = {}
    for case in recorded()["dispatched"]:
        kinds = tuple(tuple(case["impls"][name]) for name in ("a", "b"))
        if case["priority"] == ["a", "b", "native"] and all(kind in words for kind in kinds):
            cases[kinds] = case
    svg = Svg(
        620, 60 + 30 * len(cases), "The order a, b, native: what is kept, and who serves",
        "; ".join(
            f"a {words[a]}, b {words[b]}: {c['serves']}" for (a, b), c in cases.items()
        ),
    )  # fmt: skip
    for x, text in ((12, "a"), (130, "b"), (260, "kept when the order is set"), (500, "serves")):
        svg.text(x, 22, text, size=12)
    for place, ((a, b), case) in enumerate(cases.items()):
        y = 36.0 + 30 * place
        svg.text(12, y + 17, words[a], size=12)
        svg.text(130, y + 17, words[b], size=12)
        for number, name in enumerate(case["kept"]):
            colour = GREEN if name == case["serves"] else GREY
            svg.rect(260.0 + 74 * number, y + 2, 68, 22, fill=colour, opacity=0.5, radius=3)
            svg.text(294.0 + 74 * number, y + 17, name, anchor="middle", css="ink mono", size=12)
        svg.text(500, y + 17, case["serves"], css="ink mono", size=12)
    return svg.render()


def funnel() -> str:
    """How often each folder asks the platform, and how often it asks which one it is."""
    path = LABS / "lab-02-read-the-cpu-build" / "recordings" / "uses.json"
    folders = json.loads(path.read_text(encoding="utf-8"))["folders"]
    svg = Svg(
        640, 46 + 24 * len(FOLDERS), "Uses of current_platform by folder, at the pin",
        "; ".join(
            f"{name} {folders[name]['uses']}, {folders[name]['which']} ask which"
            for name in FOLDERS
        ),
    )  # fmt: skip
    left, scale = 120.0, 1.15
    svg.text(left, 20, "all uses, and in orange those that ask which platform it is", size=12)
    for place, name in enumerate(FOLDERS):
        y = 32.0 + 24 * place
        uses, which = folders[name]["uses"], folders[name]["which"]
        svg.text(left - 8, y + 13, name, anchor="end", css="ink mono", size=12)
        svg.rect(left, y, uses * scale, 16, fill=GREY, opacity=0.4)
        svg.rect(left, y, which * scale, 16, fill=ORANGE, opacity=0.8)
        svg.text(left + uses * scale + 6, y + 13, f"{uses}, {which}", size=11)
    return svg.render()


def defaults() -> str:
    """What each platform makes of `vllm serve` without a flag; what moves stands out."""
    path = LABS / "lab-02-read-the-cpu-build" / "recordings" / "defaults.json"
    found = {
        row["platform"]: row
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
        if (row["use"], row["flag"]) == ("vllm serve", "none")
    }
    names = [name for name in found["cpu"] if name not in ("platform", "use", "flag")]
    words = {
        platform: {n: ", ".join(v) if isinstance(v := row[n], list) else str(v) for n in names}
        for platform, row in found.items()
    }
    svg = Svg(
        620, 44 + 24 * len(names), "vllm serve without a flag, on two of the pin's platforms",
        "; ".join(f"{n}: CPU {words['cpu'][n]}, CUDA {words['cuda'][n]}" for n in names),
    )  # fmt: skip
    for x, text in ((210.0, "CPU"), (400.0, "CUDA, told of an H100")):
        svg.text(x, 22, text, size=12)
    for place, name in enumerate(names):
        y = 32.0 + 24 * place
        svg.text(200, y + 15, name, anchor="end", css="ink mono", size=11)
        for x, platform in ((206.0, "cpu"), (396.0, "cuda")):
            if words["cpu"][name] != words["cuda"][name]:
                svg.rect(x, y, 184, 20, fill=ORANGE, opacity=0.25, radius=3)
            svg.text(x + 6, y + 15, words[platform][name], css="ink mono", size=11)
    return svg.render()


FIGURES = {
    "defaults.svg": defaults, "rows.svg": rows, "load.svg": load, "orders.svg": orders,
    "funnel.svg": funnel,
}  # fmt: skip

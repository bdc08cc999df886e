"""The figure of lab 17-04: preemptions by release, without the plugin's fault and with it.

No upstream counterpart; the recordings are of the releases' own schedulers.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from course.truth.figures import GREEN, ORANGE, Svg

LAB = Path(__file__).resolve().parents[1] / "labs" / "lab-04-review-a-plugin"


def rows() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each release with its own scheduler on a device without fault, and with the plugin."""
    with gzip.open(LAB / "recordings" / "outcomes.jsonl.gz", "rt") as file:
        read = [json.loads(line) for line in file]
    found = {(row["release"], row["device"], row["scheduler"]): row for row in read}
    releases = list(dict.fromkeys(row["release"] for row in read))
    return [(r, found[r, "none", "stock"], found[r, "early", "Guard"]) for r in releases]


def preemptions() -> str:
    """Two bars per release."""
    counted = rows()
    svg = Svg(
        640, 40 + 34 * len(counted), "Preemptions of forty workloads, by release",
        "; ".join(
            f"{release}: {own['preemptions']} by its own scheduler, "
            f"{guard['preemptions']} with the plugin, {guard['other texts']} other texts"
            for release, own, guard in counted
        ),
    )  # fmt: skip
    left, scale = 72.0, 3.9
    svg.rect(left, 12, 12, 12, fill=GREEN, opacity=0.75, radius=2)
    svg.text(left + 18, 22, "the release's own scheduler", size=12)
    svg.rect(left + 200, 12, 12, 12, fill=ORANGE, opacity=0.75, radius=2)
    svg.text(left + 218, 22, "with the plugin; no text differs", size=12)
    for row, (release, own, guard) in enumerate(counted):
        y = 36.0 + row * 34
        svg.text(left - 8, y + 17, release, anchor="end", css="ink mono", size=12)
        for place, (made, colour) in enumerate(((own, GREEN), (guard, ORANGE))):
            count = made["preemptions"]
            svg.rect(left, y + 13 * place, count * scale, 11, fill=colour, opacity=0.75)
            svg.text(left + count * scale + 6, y + 13 * place + 10, str(count), size=11)
    return svg.render()


FIGURES = {"lab-04-preemptions.svg": preemptions}

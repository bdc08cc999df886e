"""The home page as the book shows it: README with one button, a picture that moves, an engine.

Promises: nothing here changes a word of the page; where the page says `<!-- home: NAME -->` the
next paragraph stands in a box of that name; no page but README is touched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course.site import live
from course.site.addresses import SOURCE
from course.site.play_pins import RUNTIME_BYTES
from course.truth.citations import Finding

NAMES = ("start", "proofs")

WIDGET = "<!-- widget: engine-timeline -->"
"""What the live engine takes the place of."""

_BOX = re.compile(r"^<!-- home: (?P<name>[\w-]+) -->\n+(?P<inside>(?:[^\n]+\n)+)", re.MULTILINE)


def dress(
    root: Path, page: Path, text: str, hold: Callable[[str], str], findings: list[Finding]
) -> str:
    """`text` of a page, with its boxes and the live engine's document if it is the home page.

    Args:
        hold: keeps a piece of HTML out of reach of what reads the page after this.
    """
    if page != root / "README.md":
        return text

    def box(match: re.Match[str]) -> str:
        if match["name"] not in NAMES:
            known = ", ".join(NAMES)
            findings.append(Finding(page, 1, f"home has no {match['name']!r}; there are {known}"))
            return match["inside"]
        opening = hold(f'<div class="home-{match["name"]}">')
        return f"{opening}\n\n{match['inside']}\n{hold('</div>')}\n"

    text = _BOX.sub(box, text)
    if WIDGET not in page.read_text(encoding="utf-8"):
        return text
    data = json.dumps(given(), ensure_ascii=True, separators=(",", ":")).replace("</", "<\\/")
    tags = f'<script type="application/json" id="course-live">{data}</script>'
    tags += '<script defer src="book/widgets/live-home.js"></script>'
    return f"{text}\n\n{hold(tags)}\n"


def given() -> dict[str, Any]:
    """What the page's scripts are given: the run to begin with, where sources are."""
    return {
        **live.defaults(),
        "source": SOURCE,
        "bytes": RUNTIME_BYTES,
        "up": "",
    }

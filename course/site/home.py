"""The home page as the book shows it: README with a lab first, a picture that moves, an engine.

Promises: where the page says `<!-- home: NAME -->` the next paragraph stands in a box of that name;
at `<!-- home: lab -->` stands the lab of `widgets/first_lab.py`, and at `<!-- home: here -->` what
the site itself can do, before the page's own words on a terminal; every other word is the page's;
no page but README is touched.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course.site import live, play, widgets
from course.site.addresses import SOURCE
from course.site.play_pins import RUNTIME_BYTES
from course.site.widgets import first_lab
from course.truth.citations import Finding

NAMES = ("start", "proofs")

WIDGET = "<!-- widget: engine-timeline -->"
"""What the live engine takes the place of."""

LAB_NAME = "first-lab"
LAB, HERE = "<!-- home: lab -->\n", "<!-- home: here -->\n"
"""Where the lab stands, and where the heading of the words on a terminal gets company."""

READ_HERE = f"""## Start here

The labs that need no GPU run in their pages. Read the lab, write under the text, and run its tests.
You install nothing, and what you write stays in this browser until you export it. Begin with
[lab 00-01]({first_lab.LAB.as_posix()}/README.md), or read
[phase 00's guide](phase-00-foundations/00-guide.md), which sends you to the labs as it goes.

## On your machine
"""

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

    if LAB in text:
        text = text.replace(LAB, f"{hold(_lab())}\n\n")
        shared = () if "<!-- widget: " in page.read_text(encoding="utf-8") else ("widget",)
        tags = "".join(
            f'<script defer src="book/widgets/{name}.js"></script>' for name in (*shared, LAB_NAME)
        )
        text += f"\n\n{hold(tags)}\n"
    if HERE in text and not play.problem(root):  # else the site has nothing that runs Python
        text = re.sub(f"{HERE}\n*## [^\n]+\n", lambda _: READ_HERE, text)

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


def _lab() -> str:
    """The lab; without scripts its code stands there, to be read."""
    code = html.escape(first_lab.SHIPPED)
    return (
        f'<div class="widget" data-widget="{LAB_NAME}">\n'
        f'<script type="application/json">{widgets.embedded(LAB_NAME)}</script>\n'
        f'<pre><code class="language-python">{code}</code></pre>\n</div>'
    )


def given() -> dict[str, Any]:
    """What the page's scripts are given: the run to begin with, where sources are."""
    return {
        **live.defaults(),
        "source": SOURCE,
        "bytes": RUNTIME_BYTES,
        "up": "",
    }

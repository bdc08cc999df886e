"""Where the page of challenges plots one's tries: `<!-- tries -->` becomes a box for a script.

Promises: the marks are those of `course challenge`; without JavaScript, and for a reader who tried
nothing, the page is as it is written. `book/widgets/tries.js` reads what stands here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course.challenges import judge

PAGE = "CHALLENGES.md"
MARK = "<!-- tries -->"


def embed(root: Path, page: Path, text: str, hold: Callable[[str], str]) -> str:
    """`text` of a page, with the box if it is the page of challenges.

    Args:
        hold: keeps a piece of HTML out of reach of what reads the page after this.
    """
    if page != root / PAGE or MARK not in text:
        return text
    data = json.dumps(given(), separators=(",", ":")).replace("</", "<\\/")
    box = (
        f'<div class="tries" hidden><script type="application/json">{data}</script></div>\n'
        '<script defer src="book/widgets/tries.js"></script>'
    )
    return text.replace(MARK, hold(box))


def given() -> list[dict[str, Any]]:
    """Of each challenge what a plot of tries needs: title, unit, and the score of each mark."""
    return [
        {
            "name": challenge.name,
            "title": challenge.meter.TITLE,
            "unit": challenge.meter.UNIT,
            "fewer": challenge.meter.FEWER,
            "marks": challenge.needed(judge.standard(challenge)),
        }
        for challenge in judge.every()
    ]

"""Below the heading of a section, since when a statement of it is otherwise.

Promises: made from `conformance/releases/statements.yaml` alone; the pages themselves stay as they
are written.
"""

from __future__ import annotations

import html
from pathlib import Path

from conformance.releases import statements
from course.truth import pages

TOLD = "SINCE_THE_PIN"


def of(root: Path, page: Path) -> dict[int, str]:
    """The last line of a heading, from 1, and the mark that belongs below it."""
    if not (root / f"{TOLD}.md").is_file():
        return {}
    name = page.relative_to(root).as_posix()
    _, otherwise, _ = statements.load()
    sections: dict[str, list[statements.Statement]] = {}
    for each in otherwise:
        if each.page == name:
            sections.setdefault(each.section, []).append(each)
    lines = pages.headings(page) if sections else {}
    up = "../" * (len(page.relative_to(root).parts) - 1)
    return {lines[s]: _mark(up, found) for s, found in sections.items() if s in lines}


def _mark(up: str, found: list[statements.Statement]) -> str:
    """One line for a section: the first release that is otherwise, and what it is about."""
    first = min((each.since for each in found), key=lambda v: [int(n) for n in v.split(".")])
    told = f"since {first}: otherwise" if len(found) == 1 else f"{len(found)} statements otherwise"
    if len(found) > 1:
        told = f"since {first}: {told}"
    says = html.escape("; ".join(each.says for each in found))
    there = f"{up}{TOLD}.html#{statements.anchor_of(found[0].phase)}"
    return f'<p class="since-mark"><a href="{there}" title="{says}">{told}</a></p>'

"""Tables that a command writes into a page, between `<!-- name -->` and `<!-- /name -->`."""

from __future__ import annotations

import re
from pathlib import Path


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A GitHub table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_section(name: str, text: str, path: Path) -> None:
    """Replace the part of the page at `path` between `<!-- name -->` and `<!-- /name -->`.

    Raises:
        ValueError: the page has no such pair of markers.
    """
    page = path.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"{path}: no section <!-- {name} --> ... <!-- /{name} -->")
    page = pattern.sub(lambda m: f"{m[1]}\n{text}\n\n{m[2]}", page)
    path.write_text(page, encoding="utf-8")

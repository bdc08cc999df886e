"""What the pages need to be worked in: a desk below each lab, and marks on pages with code.

Promises: a page without JavaScript, and one in a site that can run nothing, shows what it showed
before; the solution is in no page and in no file that a page loads unasked; a file's name changes
with its content. `book/play/desk.js` reads what stands here.
"""

from __future__ import annotations

import functools
import hashlib
import html
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from course.learning import hunts, manifest, mine, starters
from course.learning.labs import Lab, find_labs
from course.site import answers, desk_real
from course.truth import pages

FOLDER = "desk"
"""In the site: the scripts, and two documents a lab."""
SOURCE = Path("book") / "play"
SCRIPTS = (
    "desk.js",
    "desk-report.js",
    "desk-diff.js",
    "desk-results.js",
    "desk-share.js",
    "desk-lab.js",
    "desk-blocks.js",
)
ASKING = ("desk-judge.js", "desk-predict.js")
"""Besides, where a lab asks for predictions; they stand on the scripts of the exercises' boxes."""
CODE = "desk-exercise.js"
"""Besides, where a page has exercises that are answered with code."""
REAL, HUNT = "desk-real.js", "desk-hunt.js"
"""Loaded when a lab's "Ask vLLM", or its hunt, is opened; the lab's document names them."""
APART = {
    f"conformance/features/{room}/README.md": "they replay recordings, which takes a page minutes"
    for room in ("core", "engine", "entrypoints")
}
"""Pages whose blocks are not offered, and why; `play_excepted` names single blocks."""
_COMMENT = re.compile(rb"^ *(?://.*|/\*\*? [^\n]* \*/)\n", re.MULTILINE)
"""A comment that has lines of its own, or one: no text of a script begins so."""
END = '<nav class="neighbours"'
"""What follows a lab's text: the desk stands before it."""


def furnish(root: Path, page: Path, text: str) -> str:
    """`text`, as the book shows `page`, with its desk and the script where they have a use."""
    lab = _lab_of(root, page)
    code = answers.with_code(page)
    if lab is None and not code and not pages.runnable(page):
        return text
    up = "../" * (len(page.relative_to(root).parts) - 1)
    if lab is not None:
        lab_name, solution_name = (name for name, _ in documents(root, lab))
        host = (
            f'<div class="desk" data-lab="{lab.id}" data-desk="{up}{FOLDER}/{lab_name}" '
            f'data-solution="{up}{FOLDER}/{solution_name}"></div>\n\n'
        )
        before, end, after = text.partition(END)
        text = f"{before.rstrip()}\n\n{host}{end}{after}"
    asks = lab is not None and bool(lab.manifest.predictions)
    names = [*SCRIPTS, *(ASKING if asks else ()), *([CODE] if code else ())]
    first, *others = [f"{up}{FOLDER}/{name}?v={_version(root, name)}" for name in names]
    others[:0] = [answers.address(name, up) for name in ("quiz", "asks")] if asks else []
    name = page.relative_to(root).as_posix()
    apart = f' data-apart="{html.escape(APART[name])}"' if name in APART else ""
    tag = (
        f'<script defer src="{first}" data-page="{html.escape(name)}"{apart} '
        f'data-parts="{" ".join(others)}"></script>'
    )
    return f"{text.rstrip()}\n\n{tag}\n"


def write(root: Path, site: Path, listed: list[Path]) -> None:
    """Put the scripts, and the documents of the labs in the book, into a site."""
    folder = site / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*SCRIPTS, *ASKING, CODE, REAL, HUNT):
        if data := _sent(root, name):
            (folder / name).write_bytes(data)
    for page in listed:
        lab = _lab_of(root, page)
        for name, text in documents(root, lab) if lab else ():
            (folder / name).write_text(text, encoding="utf-8")


def documents(root: Path, lab: Lab) -> Iterator[tuple[str, str]]:
    """Name and text of a lab's two documents: what its desk holds, and the solution."""
    reference = {"text": lab.solution.read_text(encoding="utf-8")}
    for kind, content in (("lab", document(root, lab)), ("solution", reference)):
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        yield f"{lab.id}-{kind}.{_digest(text.encode())}.json", text


def document(root: Path, lab: Lab) -> dict[str, Any]:
    """What the desk of a lab holds."""
    spec = lab.manifest
    return {
        "id": lab.id,
        "title": spec.title,
        "file": lab.starter.relative_to(root).as_posix(),
        "starter": starters.required(lab),
        "tests": lab.test_names(),
        "hints": {
            test: [{"text": hint.text, "field": hint.field} for hint in hints]
            for test, hints in spec.hints.items()
        },
        "predictions": {name: asdict(asked) for name, asked in spec.predictions.items()},
        "built": list(dict.fromkeys(name.partition(".")[0] for name in spec.yours)),
        "part": mine.command(spec.part) if spec.part else "",
        "hunt": f"{HUNT}?v={_version(root, HUNT)}" if hunts.pool(lab) else "",
        "next": _next(root, lab),
        **_asking(root, lab),
    }


def _asking(root: Path, lab: Lab) -> dict[str, Any]:
    """What "Ask vLLM" begins with, where the lab has something to ask."""
    asked = desk_real.LABS.get(lab.id)
    script = f"{REAL}?v={_version(root, REAL)}"
    return {"vllm": {"script": script, "workload": asked.workload}} if asked else {}


def _next(root: Path, lab: Lab) -> dict[str, str] | None:
    """The lab after this one whose page the book has, from the root of the site."""
    labs = _labs(root)
    place = next(place for place, each in enumerate(labs) if each.id == lab.id)
    for following in labs[place + 1 :]:
        if (following.folder / "README.md").is_file():
            path = (following.folder / "index.html").relative_to(root).as_posix()
            return {"id": following.id, "title": following.manifest.title, "path": path}
    return None


def _lab_of(root: Path, page: Path) -> Lab | None:
    """The lab whose text a page is."""
    folder = page.parent
    if page.name != "README.md" or manifest.id_of(folder) is None:
        return None
    whole = all((folder / name).is_file() for name in ("lab.yaml", "solution.py", "test_lab.py"))
    return next((lab for lab in _labs(root) if lab.folder == folder), None) if whole else None


@functools.cache
def _labs(root: Path) -> tuple[Lab, ...]:
    return tuple(find_labs(root))


def _sent(root: Path, name: str) -> bytes:
    """A script without the lines that say something to its author alone; empty if there is none."""
    path = root / SOURCE / name
    return _COMMENT.sub(b"", path.read_bytes()) if path.is_file() else b""


def _version(root: Path, name: str) -> str:
    data = _sent(root, name)
    return _digest(data) if data else ""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]

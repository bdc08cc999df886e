"""Sentences of cheat sheets and interviews that say what vLLM does, without source and scope.

These pages are quoted without their phase. So a sentence such as "vLLM takes the newest" needs a
citation, a link or the words that bound it. `course words` lists those without; a person decides,
and nothing fails on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_CLAIM = re.compile(
    r"(?<!\bin )\bvLLM (?:also |never |always |only |then |itself )?"
    r"(?:does|has|is|can|cannot|may|will|[a-z]{2,}s)\b"
)
_SOURCE = re.compile(r"\.py(?::[\d-]+)?`|\]\(|\bissue \d+|\bpull request \d+|\bPR \d+")
_SCOPE = re.compile(
    r"\bpin(?:ned)?\b|\b0\.\d+\.\d+|\b(?:if|with|without|where|when|unless|until|while|under|for)\b"
    r"|\bby default\b|\bdefaults?\b|\brecorded\b|\bmeasured\b|\bon (?:an? |the )?(?-i:[A-Z0-9])",
    re.IGNORECASE,
)
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,}).*?^ {0,3}\1`*~*[ \t]*$", re.MULTILINE | re.DOTALL)
_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n(?=[|*#-])")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page, each line of a list or table its own, code left out."""
    for piece in _END.split(_FENCE.sub("", text)):
        yield " ".join(piece.split())


def unbounded(text: str) -> list[str]:
    """Those that say what vLLM does, without source and without scope."""
    return [
        sentence
        for sentence in sentences(text)
        if _CLAIM.search(sentence) and not _SOURCE.search(sentence) and not _SCOPE.search(sentence)
    ]


def listed(root: Path, paths: Iterable[str]) -> list[tuple[str, str]]:
    """Path and sentence, of the cheat sheets and interviews among `paths`."""
    return [
        (path, sentence)
        for path in paths
        if path.endswith(("/CHEATSHEET.md", "/INTERVIEW.md"))
        for sentence in unbounded((root / path).read_text(encoding="utf-8"))
    ]

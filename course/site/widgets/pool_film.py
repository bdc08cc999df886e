"""The story of ten blocks, frame by frame."""

from __future__ import annotations

from typing import Any

from course.site.film import pool_film


def document() -> dict[str, Any]:
    """The film, as `course.site.film` records it."""
    return dict(pool_film())

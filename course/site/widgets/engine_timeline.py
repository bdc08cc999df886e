"""A run with everything in it: chunks, hits, a preemption, a queue."""

from __future__ import annotations

from typing import Any

from course.site import gantt


def document() -> dict[str, Any]:
    """The run, as `course.site.gantt` records it."""
    return gantt.engine_timeline()

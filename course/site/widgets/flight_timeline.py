"""The page of recordings: a server's queues, plans and reasons, drawn by its script."""

from __future__ import annotations

from typing import Any

from course.site import gantt, recordings
from course.site.play_pins import RUNTIME_BYTES
from course.site.widgets.scheduler_desk import MODEL_BYTES


def document() -> dict[str, Any]:
    """The recording that is shipped, as the page draws any, and what it may open."""
    return {
        "sample": recordings.sample(), "words": gantt.WORDS, "bytes": RUNTIME_BYTES - MODEL_BYTES,
        "most": {"bytes": recordings.MOST_BYTES, "steps": recordings.MOST_STEPS},
    }  # fmt: skip

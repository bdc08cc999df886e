"""Draw a shape, and a model in the page says what it sees: what the widget begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from course.site import seeing
from course.site.play_pins import RUNTIME_BYTES
from course.site.widgets.scheduler_desk import MODEL_BYTES
from labkit.pictures import COLOURS, SIZE

MODEL = Path(__file__).resolve().parents[3] / "models" / "byte-sees"
QUESTIONS = ("what is this?", "what colour is it?", "how many things?", "is there a circle?")


def document() -> dict[str, Any]:
    """Colours, questions, budgets, and how much the first click loads."""
    size = sum(path.stat().st_size for path in MODEL.iterdir() if path.suffix != ".md")
    return {
        "side": SIZE, "colours": {name: list(rgb) for name, rgb in COLOURS.items()},
        "questions": list(QUESTIONS), "budget": seeing.BUDGET, "most": seeing.MOST_WORDS,
        "bytes": RUNTIME_BYTES - MODEL_BYTES + size,
    }  # fmt: skip

"""Draw the figures of the front pages.

Run `python book/figures/make.py [--check] [NAME...]`. The timeline is a run of mini_vllm, recorded
by `course.gantt`. No upstream counterpart.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from course import gantt  # noqa: E402
from course.figures import write_or_check  # noqa: E402


def engine_timeline() -> str:
    """The run that the interactive timeline steps through, as one picture."""
    return gantt.draw(gantt.engine_timeline())


FIGURES = {"engine-timeline.svg": engine_timeline}

if __name__ == "__main__":
    raise SystemExit(write_or_check(FIGURES, Path(__file__).parent))

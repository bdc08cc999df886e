"""Draw the figures of phase 08: those of every `figures_*.py` beside this file.

Run `python phase-08-speculative-decoding/figures/make.py [--check] [NAME...]`. Each of
those modules exposes `FIGURES`, file name to drawing function. No upstream counterpart.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from course.truth.figures import collect, write_or_check  # noqa: E402

FIGURES = collect(HERE)

if __name__ == "__main__":
    raise SystemExit(write_or_check(FIGURES, HERE, sys.argv[1:]))

"""Draw the figures of phase 06: those of every `figures_*.py` beside this file.

Run `python phase-06-quantization/figures/make.py [--check] [NAME...]`. Each of
those modules exposes `FIGURES`, file name to drawing function. No upstream counterpart.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from course.figures import write_or_check  # noqa: E402


def collect() -> dict[str, Callable[[], str]]:
    """All figures; two modules that name the same file are an error."""
    figures: dict[str, Callable[[], str]] = {}
    for path in sorted(HERE.glob("figures_*.py")):
        spec = importlib.util.spec_from_file_location(f"_phase_06_{path.stem}", path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        twice = figures.keys() & module.FIGURES.keys()
        if twice:
            raise ValueError(f"{path.name}: {', '.join(sorted(twice))} is drawn twice")
        figures |= module.FIGURES
    return figures


FIGURES = collect()

if __name__ == "__main__":
    raise SystemExit(write_or_check(FIGURES, HERE, sys.argv[1:]))

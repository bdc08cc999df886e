"""Every figure of the phase is what `make.py` draws today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


def _make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_phase_01_figures", HERE / "make.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKE = _make()


@pytest.mark.parametrize("name", sorted(MAKE.FIGURES))
def test_figure_is_what_the_script_draws(name):
    drawn = MAKE.FIGURES[name]()
    saved = (HERE / name).read_text(encoding="utf-8")
    assert drawn == saved, (
        f"{name} is stale: run python phase-01-architecture-and-request-lifecycle/figures/make.py"
    )


def test_every_svg_has_a_drawing_function():
    assert {path.name for path in HERE.glob("*.svg")} == set(MAKE.FIGURES)

"""Every figure of every phase is what its `figures/make.py` draws today."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from course.files import load_module

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((*ROOT.glob("phase-*/figures/make.py"), ROOT / "book" / "figures" / "make.py"))


load = functools.cache(load_module)

FIGURES = [
    pytest.param(script, name, id=f"{script.parts[-3]}/{name}")
    for script in SCRIPTS
    for name in sorted(path.name for path in script.parent.glob("*.svg"))
]


@pytest.mark.parametrize(("script", "name"), FIGURES)
def test_a_figure_is_what_its_script_draws(script, name):
    figures = load(script).FIGURES
    path = script.relative_to(ROOT)
    assert name in figures, f"{name} has no drawing function in {path}"
    saved = script.with_name(name).read_text(encoding="utf-8")
    assert figures[name]() == saved, f"{name} is stale: run python {path}"


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.parts[-3] for script in SCRIPTS])
def test_every_drawing_function_has_its_file(script):
    missing = [name for name in load(script).FIGURES if not script.with_name(name).exists()]
    assert not missing, f"not written yet: {missing}; run python {script.relative_to(ROOT)}"

"""Every figure of every phase is what its script draws today."""

from __future__ import annotations

from pathlib import Path

import pytest

from course.truth import figures

pytest.importorskip("matplotlib", reason="plots need the figures extra")

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = figures.folders(ROOT)


@pytest.mark.slow  # `course figures --check` asks the same
@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.parent.name for folder in FOLDERS])
def test_figures_are_what_their_scripts_draw(folder):
    names = list(figures.stale(folder, figures.collect(folder)))
    assert not names, f"stale: {names}; run course figures {folder.parent.name}"

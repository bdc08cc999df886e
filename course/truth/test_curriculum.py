"""README's table of phases is the one the folders give."""

from __future__ import annotations

import pytest

from course.conftest import REPOSITORY
from course.truth import curriculum


@pytest.mark.slow
def test_the_readme_has_the_table_that_the_folders_give():
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert curriculum.replaced(page) == page, "stale: run python -m course.truth.curriculum"


def test_a_phase_is_linked_and_counted_once_its_guide_or_a_lab_exists(tmp_path):
    phase = tmp_path / "phase-02-paged-attention"
    lab = phase / "labs" / "lab-01-a"
    lab.mkdir(parents=True)
    (lab / "lab.yaml").write_text(
        'id: "02-01"\ntitle: A\ntag: GPU-OPT\nkind: build\nminutes: 5\nyours: [a]\nhints: {}\n',
        encoding="utf-8",
    )
    before, fold, planned = curriculum.table(tmp_path).partition("<details>")
    assert "| 02 PagedAttention ★ | KV memory" in planned and not before and fold
    (phase / "labs" / "README.md").write_text("# The labs\n", encoding="utf-8")
    row = curriculum.table(tmp_path).split("\n")[2]
    assert row.startswith("| [02 PagedAttention](phase-02-paged-attention/labs/README.md) ★ |")
    assert row.endswith("| 1 GPU-OPT, chapters planned |")
    (phase / "00-guide.md").write_text("# The guide\n", encoding="utf-8")
    row = curriculum.table(tmp_path).split("\n")[2]
    assert row.startswith("| [02 PagedAttention](phase-02-paged-attention/00-guide.md) ★ |")
    assert row.endswith("| 1 GPU-OPT |")


@pytest.mark.slow
def test_what_is_only_planned_is_folded_below_the_table():
    shown, _, folded = curriculum.table().partition("<details><summary>")
    assert "planned |" not in shown.replace("chapters planned |", "")
    names = [f"{number:02d} {title}" for number, (title, _) in enumerate(curriculum.PHASES)]
    assert all((f"[{name}](" in shown) != (f"| {name} |" in folded) for name in names)


def test_a_page_without_the_markers_is_refused():
    with pytest.raises(ValueError, match="no <!-- curriculum -->"):
        curriculum.replaced("# README\n")

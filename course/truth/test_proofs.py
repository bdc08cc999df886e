"""The numbers of the first page are those of what proves them."""

from __future__ import annotations

import gzip
import json

import pytest

from course.conftest import REPOSITORY
from course.truth import checking, proofs


@pytest.mark.slow
def test_the_first_page_has_the_numbers_that_are_counted():
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    made = proofs.table(REPOSITORY, proofs.said(page))  # which `course cite check` counts
    assert proofs.replaced(page, made) == page, "stale: run python -m course.truth.proofs"


def test_a_number_of_citations_that_is_not_so_is_told(tmp_path):
    assert proofs.stale(tmp_path, 5) == ""
    (tmp_path / "README.md").write_text("- **1,200 citations, each exact.**\n", encoding="utf-8")
    assert proofs.stale(tmp_path, 1_299) == ""
    assert "README.md says 1,200 citations" in proofs.stale(tmp_path, 1_300)


def test_steps_are_counted_over_all_recordings(tmp_path):
    folder = tmp_path / "conformance" / "recordings"
    folder.mkdir(parents=True)
    for name, lengths in (("a", (3, 4)), ("b", (5,))):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"steps": [{}] * n}) + "\n" for n in lengths)
    assert proofs.recorded(tmp_path) == (3, 12)


def test_citations_are_counted_on_every_page(tmp_path):
    (tmp_path / "A.md").write_text("`vllm/a.py:1` `f` and `vllm/b.py:2` `g`\n", encoding="utf-8")
    (tmp_path / "b.py").write_text('"""`vllm/a.py:1` `f`"""\n', encoding="utf-8")
    assert proofs.cited(tmp_path) == 3


def test_an_include_and_the_link_under_it_are_one_citation(tmp_path):
    page = """<!--{{#upstream vllm/a.py f}}-->
[`vllm/a.py:1-3` `f`](https://github.com/vllm-project/vllm/blob/0decac0/vllm/a.py#L1-L3)
"""
    (tmp_path / "A.md").write_text(page, encoding="utf-8")
    assert proofs.cited(tmp_path) == 1
    assert proofs.cited(tmp_path) == checking.check(tmp_path, tmp_path)[0]


def test_a_page_without_the_markers_is_refused():
    with pytest.raises(ValueError, match="no <!-- proofs -->"):
        proofs.replaced("# README\n", "")

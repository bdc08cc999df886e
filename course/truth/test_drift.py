"""What a later release made of a citation, on two small trees, and the tables that are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import releases
from course.truth import drift
from course.truth.citations import Citation

ROOT = Path(__file__).parents[2]
BEFORE = """class Pool:
    def take(self):
        return 1

    def give(self):
        return 2


def lone():
    return 3


def dropped():
    return 4
"""
AFTER = """# a line more
class Pool:
    def take(self):
        return 1

    def give(self):
        return 22
"""


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    pin, later = tmp_path / "pin", tmp_path / "later"
    for tree in (pin, later):
        (tree / "vllm").mkdir(parents=True)
        (tree / "csrc").mkdir()
    (pin / "vllm/pool.py").write_text(BEFORE)
    (later / "vllm/pool.py").write_text(AFTER)
    (later / "vllm/other.py").write_text("def lone():\n    return 3\n")
    (pin / "vllm/same.py").write_text("x = 1\n")
    (later / "vllm/same.py").write_text("x = 1\n")
    (pin / "csrc/k.cu").write_text("one\ntwo\nthree();\n")
    (later / "csrc/k.cu").write_text("zero\none\ntwo\n")
    return pin, later


@pytest.mark.parametrize(
    "path, first, symbol, kind, place",
    [
        ("vllm/same.py", 1, "x", "same", "vllm/same.py:1"),
        ("vllm/pool.py", 2, "Pool.take", "moved", "vllm/pool.py:3"),
        ("vllm/pool.py", 3, "Pool.take", "moved", "vllm/pool.py:4"),
        ("vllm/pool.py", 5, "Pool.give", "changed", "vllm/pool.py:6"),
        ("vllm/pool.py", 9, "lone", "moved", "vllm/other.py:1"),
        ("vllm/pool.py", 13, "dropped", "gone", ""),
        ("csrc/k.cu", 2, "two", "moved", "csrc/k.cu:3"),
        ("csrc/k.cu", 3, "three", "gone", ""),
        ("vllm/pool.py", 0, "Pool.give", "changed", "vllm/pool.py:6"),
    ],
)
def test_the_fate_of_a_citation(trees, path, first, symbol, kind, place):
    citation = Citation(Path("page.md"), 1, 0, path, first, first, symbol)
    assert drift.fate_of(citation, *trees) == drift.Fate(kind, place)


def test_a_table_is_read_back_as_it_was_written(tmp_path: Path):
    fates = {"`vllm/a.py:1` `é`": drift.Fate("gone", ""), "b": drift.Fate("same", "vllm/b.py:2")}
    drift.write(tmp_path / "1.2.3.json", fates)
    assert drift.read(tmp_path / "1.2.3.json") == fates
    assert drift.read(tmp_path / "none.json") == {}


@pytest.mark.slow
def test_every_compared_release_has_a_table_and_the_newest_is_the_books():
    kept = {path.stem: drift.read(path) for path in (ROOT / drift.FOLDER).glob("*.json")}
    assert set(kept) == set(releases.RELEASES)
    assert drift.newest(ROOT)[0] == list(releases.RELEASES)[-1]
    for fates in kept.values():
        assert {fate.kind for fate in fates.values()} <= set(drift.FATES)
        assert all(bool(fate.place) != (fate.kind == drift.GONE) for fate in fates.values())

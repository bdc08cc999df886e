"""The home page of the book: its boxes, the live engine's document, and no other page touched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from course.conftest import REPOSITORY
from course.site import home, live
from course.truth.citations import Finding

TIMELINE = f"{home.WIDGET}\n\n![A run](run.svg)\n"


@pytest.fixture
def dressed(tmp_path: Path):
    def dress(text: str, name: str = "README.md") -> tuple[str, list[Finding]]:
        page = tmp_path / name
        page.write_text(text, encoding="utf-8")
        findings: list[Finding] = []
        return home.dress(tmp_path, page, text, lambda piece: piece, findings), findings

    return dress


def test_a_marked_paragraph_stands_in_its_box_and_no_word_changes(dressed):
    text, findings = dressed("# T\n\n<!-- home: start -->\n[Begin](a.md)\n\nMore.\n")
    assert text == '# T\n\n<div class="home-start">\n\n[Begin](a.md)\n\n</div>\n\nMore.\n'
    assert not findings


def test_a_box_that_does_not_exist_is_refused_by_name(dressed):
    text, findings = dressed("# T\n\n<!-- home: begin -->\n[Begin](a.md)\n")
    assert "<div" not in text
    assert "no 'begin'; there are start, proofs" in findings[0].text


def test_a_page_with_the_timeline_gets_the_run_to_begin_with(dressed):
    text, _ = dressed(f"# T\n\n{TIMELINE}")
    given = json.loads(re.search(r'id="course-live">(.*?)</script>', text)[1])
    live.start(given["settings"], given["requests"], model="toy")
    assert given["settings"] == live.defaults()["settings"]


@pytest.mark.parametrize("name", ["SETUP.md", "README.md"])
def test_other_pages_and_a_page_without_the_timeline_stay(dressed, name):
    text = f"# T\n\n{TIMELINE if name == 'SETUP.md' else 'Words.'}\n"
    assert dressed(text, name)[0] == text


def test_readme_has_one_start_and_three_proofs_behind_comments_that_github_hides():
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"<!-- home: (\w+) -->\n(?:\[|- \*\*)", page) == ["start", "proofs"]
    assert "<div" not in page and "<script" not in page

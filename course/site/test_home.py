"""The home page of the book: its boxes, the live engine's document, and no other page touched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from course.conftest import REPOSITORY
from course.site import home, live
from course.site.widgets import first_lab
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


def test_the_lab_of_the_first_screen_stands_where_the_page_says_with_its_code_and_answers(dressed):
    text, findings = dressed(f"# T\n\n{home.LAB}\nMore.\n")
    assert not findings
    data = json.loads(re.search(r'json">(.*?)</script>', text)[1])
    assert data["text"] == first_lab.SHIPPED
    assert "tokens = wanted if wanted &lt;= budget else 0" in text, "to be read without scripts"
    assert text.count("widget.js") == text.count("first-lab.js") == 1


def test_the_pages_shared_script_is_loaded_once(dressed):
    text, _ = dressed(f"# T\n\n{home.LAB}\n{TIMELINE}")
    assert "/widget.js" not in text, "the timeline brings it"


@pytest.mark.parametrize("there", [True, False])
def test_what_the_page_can_do_is_said_before_the_terminal_where_python_runs(
    dressed, monkeypatch, there
):
    monkeypatch.setattr(home.play, "problem", lambda root: "" if there else "it is not there")
    text, _ = dressed(f"# T\n\n{home.HERE}## Start\n\nOn a terminal.\n")
    heads = re.findall("^## (.+)$", text, re.MULTILINE)
    assert heads == (["Start here", "On your machine"] if there else ["Start"])

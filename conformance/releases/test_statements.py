"""What is said to be otherwise: where it stands on the pages, in the trees, and since when."""

from __future__ import annotations

import ast

import pytest

from conformance.real_core import why_not
from conformance.real_core.places import tree_of
from conformance.releases import statements
from conformance.releases.statements import Statement
from course.site import book_pages, since_marks
from course.truth import pages
from mini_vllm.releases import PARTS

RELEASE, OTHERWISE, UNKNOWN = statements.load()
VERSIONS = list(PARTS)


def test_the_page_has_what_the_data_says():
    text = statements.PAGE.read_text(encoding="utf-8")
    kept = text.partition("<!-- statements -->")[2].partition("<!-- /statements -->")[0]
    assert kept.strip() == statements.text(), "python -m conformance.releases.statements --write"


@pytest.mark.slow
def test_a_section_that_is_named_is_there():
    named = {each.at.partition("#")[::2] for each in (*OTHERWISE, *UNKNOWN)}
    gone = [(p, s) for p, s in named if s not in pages.headings(statements.ROOT / p)]
    assert gone == []


def test_each_release_that_is_named_was_looked_at():
    assert VERSIONS[-1] == RELEASE
    assert {each.since for each in OTHERWISE} <= set(VERSIONS[1:])


@pytest.mark.slow
def test_a_test_that_is_named_is_there():
    for file, _, name in {each.run.partition("::") for each in OTHERWISE if each.run}:
        body = ast.parse((statements.ROOT / file).read_text(encoding="utf-8")).body
        assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}


def text_of(version: str, file: str) -> str:
    """A file of a release; nothing where it has none of that name."""
    if problem := why_not(version):
        pytest.skip(problem)
    path = tree_of(version) / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def shows(each: Statement, version: str) -> bool:
    """Whether a release has the text that the statement's change brought, or lacks what it took."""
    text = text_of(version, each.place.partition(":")[0])
    if each.lacks:
        return each.lacks not in text
    return each.has in text or (bool(each.then) and each.then in text)


@pytest.mark.slow
def test_a_change_is_there_since_the_release_that_is_named():
    wrong = []
    for each in OTHERWISE:
        before = VERSIONS[VERSIONS.index(each.since) - 1]
        if [shows(each, version) for version in (before, each.since, RELEASE)] != [0, 1, 1]:
            wrong.append((each.phase, each.says))
    assert wrong == []


@pytest.mark.slow
def test_a_place_is_where_its_text_begins():
    wrong = []
    for each in OTHERWISE:
        file, _, line = each.place.partition(":")
        text = text_of(RELEASE, file)
        found = text.count("\n", 0, text.index(each.has)) + 1 if each.has in text else 0
        if (line and int(line)) != (found if each.has else ""):
            wrong.append((each.phase, each.says, found))
    assert wrong == []


def test_an_entry_with_both_or_neither_text_is_refused(tmp_path):
    path = tmp_path / "statements.yaml"
    entry = "{at: a#b, says: x, since: 0.24.0, now: y, place: z.py:1}"
    path.write_text(f"release: 0.33.0\nstatements: [{entry}]\nunknown: []\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"a#b, 'x': need one of has and lacks"):
        statements.load(path)


@pytest.mark.slow
def test_the_site_marks_the_sections_below_their_headings():
    root = statements.ROOT
    for page in {each.page for each in OTHERWISE}:
        marks = since_marks.of(root, root / page)
        lines = (root / page).read_text(encoding="utf-8").split("\n")
        assert len(marks) == len({each.section for each in OTHERWISE if each.page == page})
        assert all(lines[line - 1].startswith("#") for line in marks)
    guide = next(each for each in OTHERWISE if each.section == "why-tail-first")
    line = pages.headings(root / guide.page)["why-tail-first"]
    assert since_marks.of(root, root / guide.page)[line] == (
        '<p class="since-mark"><a href="../SINCE_THE_PIN.html#phase-02" '
        'title="longest free goes first">since 0.24.0: otherwise</a></p>'
    )
    assert since_marks.of(root, root / "README.md") == {}


@pytest.mark.slow
def test_a_page_of_the_site_has_its_marks():
    if problem := why_not():
        pytest.skip(problem)
    root = statements.ROOT
    guide = root / next(each.page for each in OTHERWISE if each.section == "why-tail-first")
    text, _, _ = book_pages.render(root, tree_of("0.22.1"), guide, [])
    marks = since_marks.of(root, guide)
    assert '### Why tail first\n\n<p class="since-mark">' in text
    assert text.count("since-mark") == len(marks)

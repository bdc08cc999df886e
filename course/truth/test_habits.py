"""Habits of prose: what is counted, and what is left alone."""

from __future__ import annotations

import pytest

from course.truth import habits


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A draft is no token.", "negated noun"),
        ("Whoever waits is looked at.", "a person for a component"),
        ("The manager is told.", "told, asked, given back"),
        ("One sentence; another sentence.", "sentences glued"),
    ],
)
def test_each_habit_is_seen_in_running_text(text, name):
    assert habits.of("a.md", text).found == dict.fromkeys(habits.HABITS, 0) | {name: 1}


@pytest.mark.parametrize(
    "text",
    [
        "The block is no longer held, and it is no slower.",
        "There is no block.",
        "```text\nnobody is told; a draft is no token\n```\n",
        "| nobody | is told |\n",
        "`somebody; is told`",
        "> a quotation of somebody; it is no matter\n",
    ],
)
def test_code_tables_and_quotations_are_left_alone(text):
    assert habits.of("a.md", text).total == 0


def test_the_worst_come_first_and_a_short_page_is_left_out(tmp_path):
    (tmp_path / "a.md").write_text("A draft is no token. " + "word " * 400)
    (tmp_path / "b.md").write_text("Nobody is told. " + "word " * 400)
    (tmp_path / "c.md").write_text("Nobody is told.")
    pages = habits.worst(tmp_path, ["a.md", "b.md", "c.md"])
    assert [page.path for page in pages] == ["b.md", "a.md"]
    assert pages[0].total == 2 and 4 < pages[0].share < 6

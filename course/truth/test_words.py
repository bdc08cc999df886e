"""Words are counted as `wc -w` counts them, page by page against a budget."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from course.truth import words


@pytest.fixture
def write(little_course):
    def put(name: str, count: int) -> None:
        path = little_course / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "# Title\n\n" + "`a`\u00a0b, c\n" * ((count - 2) // 2) + "end\n" * (count % 2)
        )

    return put


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("phase-03-x/00-guide.md", 3400),
        ("phase-03-x/01-deep-dive.md", 3000),
        ("phase-03-x/02-mini-build.md", 1200),
        ("phase-03-x/EXERCISES.md", 2000),
        ("phase-03-x/INTERVIEW.md", 2500),
        ("phase-03-x/CHEATSHEET.md", 450),
        ("phase-03-x/labs/README.md", 350),
        ("phase-03-x/labs/lab-01-y/README.md", 900),
        ("phase-03-x/labs/lab-01-y/notes.md", 1300),
        ("phase-03-x/experiments/README.md", 1000),
        ("phase-03-x/studies/deep/one.md", 1000),
        ("phase-03-x/served-by-vllm.md", 1300),
    ],
)
def test_each_page_has_the_budget_of_its_kind(little_course, write, name, budget):
    write(name, budget + 1)
    (page,) = [page for page in words.count(little_course) if page.path == name]
    assert (page.words, page.budget, page.over) == (budget + 1, budget, 1)


def test_words_are_those_of_wc(little_course, write):
    if shutil.which("wc") is None:
        pytest.skip("there is no wc here")
    write("phase-03-x/00-guide.md", 101)
    done = subprocess.run(
        ["wc", "-w", "phase-03-x/00-guide.md"], cwd=little_course, capture_output=True, text=True,
        check=True, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert words.count(little_course)[0].words == int(done.stdout.split()[0]) == 101


def test_the_blocks_of_a_guide_do_not_count(little_course, write):
    for kind, counted in (("00-guide", 4), ("01-deep-dive", 13)):
        write(f"phase-03-x/{kind}.md", 3)
        path = little_course / "phase-03-x" / f"{kind}.md"
        path.write_text(
            "one two\n\n````python\na = 1\n```\n````\nthree\n\n```text\nfour\n```\nfive\n"
        )
        (page,) = [page for page in words.count(little_course) if page.path.endswith(path.name)]
        assert page.words == counted


def test_a_page_that_git_does_not_track_does_not_count(little_course, write):
    if shutil.which("git") is None:
        pytest.skip("there is no git here")
    write("phase-03-x/00-guide.md", 10)
    write("phase-03-x/gone.md", 10)
    for command in (["init", "-q"], ["add", "phase-03-x"]):
        subprocess.run(["git", *command], cwd=little_course, check=True)
    (little_course / "phase-03-x" / "gone.md").unlink()
    write("phase-03-x/my-notes.md", 10)
    assert [page.path for page in words.count(little_course)] == ["phase-03-x/00-guide.md"]


def test_within_the_budgets_the_command_succeeds_and_adds_up(course, write):
    write("phase-03-x/00-guide.md", 3400)
    write("phase-03-x/labs/README.md", 350)
    write("phase-04-x/00-guide.md", 20)
    ran = course("words")
    assert ran.code == 0
    rows = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert "3,400 3,400 phase-03-x/00-guide.md" in rows
    assert "3,750 phase 03" in rows and "20 phase 04" in rows
    assert rows[-1].endswith("phases 00-06: 3,770 of 121,000")


def test_over_a_budget_it_fails_and_names_the_page(course, write):
    write("phase-03-x/CHEATSHEET.md", 460)
    ran = course("words")
    assert ran.code == 1 and ran.out.endswith("phase-03-x/CHEATSHEET.md: 10 words over 450\n")


@pytest.mark.slow
def test_the_first_phases_together_have_a_limit_of_their_own(course, write, monkeypatch):
    write("phase-03-x/00-guide.md", 60)
    write("phase-06-x/00-guide.md", 60)
    write("phase-07-x/00-guide.md", 3400)
    assert course("words").code == 0
    monkeypatch.setattr(words, "FIRST_PHASES_LIMIT", 119)
    ran = course("words")
    assert ran.code == 1 and "phases 00-06: 120 of 119" in ran.out

"""The maintainer's commands, from the command line on."""

from __future__ import annotations

import pytest

from course.learning.labs import find_labs
from course.truth import upstream

RIGHT = """\
def num_blocks(num_tokens, block_size):
    return -(-num_tokens // block_size)
"""
WRONG = RIGHT.replace("-(-num_tokens // block_size)", "num_tokens // block_size")


@pytest.fixture
def starter(little_course):
    return find_labs(little_course)[0].starter


@pytest.mark.slow
def test_selfcheck_passes_sound_labs_and_says_the_counts(course):
    ran = course("selfcheck")
    assert ran.code == 0
    assert "2 labs, 2 tests, 2 misconceptions caught, 0 labs to mend" in ran.out


@pytest.mark.slow
def test_selfcheck_takes_a_whole_phase_by_its_number(course):
    for name in ("90", "phase-90-little"):
        assert "2 labs, 2 tests" in course("selfcheck", name).out
    gone = course("selfcheck", "17")
    assert gone.code == 2 and "There is no lab in '17'." in gone.err


@pytest.mark.slow
def test_starters_are_made_from_solutions_and_what_they_replace_is_kept(
    course, starter, little_course
):
    shipped = starter.read_text()
    starter.write_text(WRONG)
    ran = course("starters", "--check")
    assert ran.code == 1 and "starter.py is not what its solution gives" in ran.out
    assert "2 starters, 1 to write" in ran.out and starter.read_text() == WRONG
    ran = course("starters", "90-00")
    assert ran.code == 0 and starter.read_text() == shipped
    assert [f.read_text() for f in (little_course / ".course" / "backup").iterdir()] == [WRONG]
    assert course("starters", "--check").out == "2 starters, 0 to write\n"


def test_the_pages_runtime_is_asked_for_before_labs_are_checked_in_it(course):
    ran = course("book", "runtime", "--check", "90-00")
    assert ran.code == 2
    assert "it is not there. Make it: course book runtime" in " ".join(ran.err.split())


def test_labs_are_named_for_the_check_of_the_runtime_only(course):
    ran = course("book", "runtime", "90-00")
    assert ran.code == 2 and "for --check only" in ran.err


@pytest.fixture
def pinned(little_course):
    """A tree small enough to read, that `upstream verify` takes for the pinned one."""
    tree = little_course / "upstream"
    for name in upstream.NEEDED:
        path = tree / name
        if path.suffix:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("class Scheduler:\n    def schedule(self):\n        return 1\n")
        else:
            path.mkdir(parents=True)
    (tree / "vllm" / "_version.py").write_text(
        f"version = '{upstream.VERSION}'\ncommit_id = 'g{upstream.COMMIT}'\n"
    )
    return tree


def test_cite_check_needs_the_pinned_tree_and_says_how_to_get_it(course):
    ran = course("cite", "check")
    assert ran.code == 2 and "course upstream fetch" in ran.err


@pytest.mark.slow
def test_cite_check_and_fix_work_from_the_command_line(course, pinned, little_course):
    page = little_course / "page.md"
    page.write_text("`vllm/v1/core/sched/scheduler.py:1` `Scheduler.schedule`\n")
    ran = course("cite", "check")
    assert ran.code == 1
    assert "page.md:1: " in ran.out and "the symbol stands on lines 2-3, not 1" in ran.out
    assert "1 would move (--write)" in course("cite", "fix").out
    assert course("cite", "fix", "--write").code == 0
    assert page.read_text() == "`vllm/v1/core/sched/scheduler.py:2` `Scheduler.schedule`\n"
    assert course("cite", "check").code == 0


@pytest.mark.slow
def test_a_path_that_is_not_there_is_refused_not_passed(course, pinned):
    for command in (("cite", "check"), ("cite", "fix"), ("cite", "link"), ("docs", "check")):
        ran = course(*command, "README.md", "no/such/page.md")
        assert ran.code == 2
        assert ran.err == "There is no such file or folder: README.md, no/such/page.md\n"


@pytest.mark.slow
def test_cite_link_writes_only_when_asked_and_only_once(course, pinned, little_course):
    page = little_course / "page.md"
    text = "`vllm/v1/core/sched/scheduler.py:2` `Scheduler.schedule`\n"
    page.write_text(text)
    ran = course("cite", "link", "page.md")
    assert ran.out == "page.md: 1 more links\n1 pages would change (--write)\n"
    assert page.read_text() == text
    assert "1 pages written" in course("cite", "link", "--write", "page.md").out
    assert page.read_text() == (
        "[`vllm/v1/core/sched/scheduler.py:2` `Scheduler.schedule`](https://github.com/vllm-project"
        "/vllm/blob/0decac0/vllm/v1/core/sched/scheduler.py#L2)\n"
    )
    assert "0 pages written" in course("cite", "link", "--write", "page.md").out
    assert course("cite", "check").code == 0 and course("docs", "check").code == 0


def test_upstream_show_prints_a_citation_ready_to_copy_and_the_source(course, pinned):
    ran = course("upstream", "show", "Scheduler.schedule")
    assert ran.out == (
        "`vllm/v1/core/sched/scheduler.py:2` `Scheduler.schedule`\n"
        "     2      def schedule(self):\n     3          return 1\n"
    )


def test_upstream_show_refuses_a_symbol_that_is_not_there(course, pinned):
    assert course("upstream", "show", "Scheduler.gone").code == 2


@pytest.mark.slow
def test_docs_check_counts_pages_blocks_and_findings(course, little_course):
    (little_course / "page.md").write_text("[a](gone.md)\n\n```python\nprint(1)\n```\n")
    ran = course("docs", "check")
    assert ran.code == 1
    assert "page.md:1: gone.md: there is no such file" in ran.out
    assert "3 pages, 1 blocks run, 1 to mend" in ran.out

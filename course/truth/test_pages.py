"""Pages: blocks that run, outputs that are exact, links that lead somewhere."""

from __future__ import annotations

import json

import pytest

from course.conftest import REPOSITORY
from course.truth import citations, pages


@pytest.fixture
def page(tmp_path):
    def write(text: str, name: str = "page.md"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def ran(path, **options) -> list[tuple[int, str]]:
    return [(f.line, f.text) for f in pages.run(REPOSITORY, path, **options)]


def linked(tmp_path, path) -> list[tuple[int, str]]:
    return [(f.line, f.text) for f in pages.check_links(tmp_path, path)]


def test_blocks_share_names_and_a_text_block_is_the_exact_output(page):
    path = page(
        "```python\nx = 2\n```\n\nwords\n\n"
        "```python\nprint(x + 1)\nprint()\n```\n\n```text\n3\n\n```\n"
    )
    assert ran(path) == []


@pytest.mark.slow
def test_a_difference_names_the_line_and_both_sides(page):
    path = page("# T\n\n```python\nprint('a')\nprint('b')\n```\n\n```text\na\nc\n```\n")
    assert ran(path) == [(10, "the output of the block above differs here\n  page   c\n  output b")]


def test_output_the_page_does_not_show_in_full_is_a_difference(page):
    path = page("```python\nprint('a')\nprint('b')\n```\n```text\na\n```\n")
    assert ran(path)[0][1].endswith("page   <nothing>\n  output b")


def test_an_error_names_the_line_on_the_page(page):
    path = page("text\n\n```python\nx = 1\n\ny = x / 0\n```\n")
    assert ran(path) == [(6, "this block raised ZeroDivisionError: division by zero")]


@pytest.mark.slow
def test_a_block_that_is_not_python_is_named_with_its_line(page):
    path = page("```python\nx =\n```\n")
    assert ran(path)[0][0] == 2 and "this block is not Python" in ran(path)[0][1]


def test_a_block_in_a_folded_answer_runs_too(page):
    path = page(
        "<details><summary>Answer</summary>\n\n```python\nprint(1)\n```\n\n```text\n2\n```\n\n"
        "</details>\n"
    )
    assert len(ran(path)) == 1


@pytest.mark.slow
def test_a_block_in_a_list_runs_without_its_indentation(page):
    path = page("- item\n\n  ```python\n  print(1)\n  ```\n\n  ```text\n  1\n  ```\n")
    assert ran(path) == []


def test_other_languages_do_not_run(page):
    assert ran(page("```python-repl\n1/0\n```\n```console\n$ false\n```\n```py\n1/0\n```\n")) == []


@pytest.mark.slow
def test_an_endless_block_ends_at_the_time_limit(page):
    path = page(
        "```python\nx = 1\n```\n\n```python\nwhile True:\n    __import__('time').sleep(0.1)\n```\n"
    )
    for limit in (1.5, 6, 24, 96):  # on a busy machine Python may take the first to start
        (finding,) = ran(path, time_limit=limit)
        if finding[0] == 5:
            break
    assert finding[0] == 5 and f"did not finish: out of time after {limit:g} s" in finding[1]


def test_blocks_run_from_the_root_and_may_define_dataclasses(page):
    path = page(
        "```python\nfrom dataclasses import dataclass\nfrom pathlib import Path\n\n\n@dataclass\n"
        "class A:\n    x: int\n\n\nprint(A(1), Path('pyproject.toml').exists())\n```\n\n"
        "```text\nA(x=1) True\n```\n"
    )
    assert ran(path) == []


def test_links_and_anchors_that_exist_pass(tmp_path, page):
    page("# A Title, with `code` & more\n\n## Twice\n\n## Twice\n\n<a id='own'></a>\n", "other.md")
    path = page(
        "# Here\n\n[a](other.md#a-title-with-code--more) [b](other.md#twice-1) [c](other.md#own)\n"
        "[d](#here) [e](https://example.org/x#y) [f](.)\n"
    )
    assert linked(tmp_path, path) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a](gone.md)", "gone.md: there is no such file"),
        ("[a](other.md#twise)", "other.md has no anchor #twise"),
        ("[a](#nowhere)", "page.md has no anchor #nowhere"),
        ("[a](../../etc)", "leads out of the repository"),
        ("[a](/other.md)", "write a relative link"),
        ("[a](Other.md)", "there is no such file"),
        ("![](figure.svg)", "the image figure.svg has no alt text"),
        ("![A figure](gone.svg)", "gone.svg: there is no such file"),
        ('<img src="figure.svg">', "the image figure.svg has no alt text"),
        ('<a href="gone.md">x</a>', "gone.md: there is no such file"),
        ("[a][b]\n\n[b]: gone.md", "gone.md: there is no such file"),
    ],
)
def test_a_dead_link_is_refused_with_the_reason(tmp_path, page, text, complaint):
    page("# Twice\n", "other.md")
    page("<svg/>", "figure.svg")
    found = linked(tmp_path, page(f"text\n\n{text}\n"))
    assert len(found) == 1 and found[0][0] == 3 and complaint in found[0][1]


def test_a_sentence_that_wraps_into_a_list_is_refused(tmp_path, page):
    assert linked(tmp_path, page("Costs more than P\n+ k per request.\n")) == [
        (2, "a list begins inside a paragraph: leave a line, or reword this one")
    ]
    sound = "Two:\n\n1. one\n   - in it\n2. two\n\n- three\n\nAt most\n16. That is all.\n"
    assert linked(tmp_path, page(sound, "sound.md")) == []


def test_an_anchor_that_is_nearly_right_is_answered_with_the_near_ones(tmp_path, page):
    page("# Block table\n\n# Block size\n", "other.md")
    (found,) = linked(tmp_path, page("[a](other.md#block-tabel)\n"))
    assert found[1].endswith("(it has #block-size, #block-table)")


CAPTURE = json.dumps({"output": "first line\nsecond line\nthird line\n"})


def test_a_quoted_capture_may_leave_lines_out_where_it_says_so(tmp_path, page):
    page(CAPTURE, "run.json")
    path = page("```console capture=run.json\nfirst line\n...\nthird line\n```\n")
    assert linked(tmp_path, path) == []


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("capture=run.json\nfirst lime\n", "run.json does not hold this line"),
        ("capture=run.json\nthird line\nfirst line\n", "(in this order): first line"),
        ("capture=gone.json\nx\n", "there is no capture gone.json"),
        ("capture=page.md\nx\n", "page.md is not a capture written by course gpu run"),
    ],
)
def test_a_quote_that_is_not_in_its_capture_is_refused(tmp_path, page, block, complaint):
    page(CAPTURE, "run.json")
    found = linked(tmp_path, page(f"```console {block}```\n"))
    assert len(found) == 1 and complaint in found[0][1]


def test_an_environment_beside_the_pages_is_none_of_them(tmp_path):
    ours = tmp_path / "phase" / "README.md"
    theirs = tmp_path / ".venv-cpu" / "lib" / "README.md"
    for page in (ours, theirs):
        page.parent.mkdir(parents=True)
        page.write_text("# A page\n")
    assert pages.find(tmp_path) == citations.pages(tmp_path) == [ours]

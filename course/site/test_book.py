"""The book: every page in its place, includes and citations from the pin, nothing dead."""

from __future__ import annotations

import html
import json
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from course.conftest import REPOSITORY
from course.learning.labs import CourseError
from course.site import addresses, book, book_extras, book_pages, book_site, widgets
from course.truth import links, upstream

PHASE = "phase-00-first-steps"
SOURCE = "https://github.com/vllm-project/vllm/blob/0decac0d96c42b49572498019f0a0e3600f50398"


@pytest.fixture
def root(tmp_path):
    """A repository of one phase and one lab, with a pinned tree of one file."""
    texts = {
        "README.md": f"# The course\n\n[start]({PHASE}/00-guide.md)\n",
        "GLOSSARY.md": "# Glossary\n\n## KV cache\n\nKept keys and values.\n",
        f"{PHASE}/00-guide.md": "# The guide\n",
        f"{PHASE}/01-deep-dive.md": "# The deep dive\n",
        f"{PHASE}/02-mini-build.md": "# The mini-build\n",
        f"{PHASE}/labs/README.md": "# The labs\n",
        f"{PHASE}/labs/lab-01-count/README.md": "# Lab 00-01: Count [CPU-OK]\n",
        f"{PHASE}/EXERCISES.md": "# Exercises\n",
        f"{PHASE}/INTERVIEW.md": "# Interview\n",
        f"{PHASE}/CHEATSHEET.md": "# Cheat sheet\n",
        "upstream/vllm/pool.py": 'class Pool:\n    def take(self):\n\n        return "```"\n',
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def guide(root, text: str):
    path = root / PHASE / "00-guide.md"
    path.write_text(text, encoding="utf-8")
    return path


def staged(root) -> list[tuple[str, int, str]]:
    findings = book.stage(root, root / "upstream", root / "build" / "book" / "src")
    return [(f.page.relative_to(root).as_posix(), f.line, f.text) for f in findings]


def page_of_book(root, name: str = f"{PHASE}/00-guide.md") -> str:
    return (root / "build" / "book" / "src" / name).read_text(encoding="utf-8")


def test_the_commit_in_links_is_the_pinned_one():
    assert addresses.COMMIT.startswith(upstream.COMMIT)


def test_the_summary_has_front_matter_then_each_phase_in_reading_order(root):
    assert staged(root) == []
    assert page_of_book(root, "SUMMARY.md") == (
        "# Summary\n\n"
        "- [Home](index.md)\n"
        "- [Glossary](GLOSSARY.md)\n\n"
        "# 00 First steps\n\n"
        f"- [00 Overview]({PHASE}/index.md)\n"
        f"- [00 Guide]({PHASE}/00-guide.md)\n"
        f"- [00 Deep dive]({PHASE}/01-deep-dive.md)\n"
        f"- [00 Mini-build]({PHASE}/02-mini-build.md)\n"
        f"- [00 Labs]({PHASE}/labs/index.md)\n"
        f"  - [Lab 00-01: Count]({PHASE}/labs/lab-01-count/index.md)\n"
        f"- [00 Exercises]({PHASE}/EXERCISES.md)\n"
        f"- [00 Interview]({PHASE}/INTERVIEW.md)\n"
        f"- [00 Cheat sheet]({PHASE}/CHEATSHEET.md)\n"
    )


def test_a_phase_whose_guide_is_not_written_yet_shows_its_labs(root):
    for name in (*book.CHAPTERS, *book.CLOSING):
        (root / PHASE / name).unlink()
    (root / "README.md").write_text("# The course\n", encoding="utf-8")
    assert staged(root) == []
    assert page_of_book(root, "SUMMARY.md").endswith(
        "# 00 First steps\n\n"
        f"- [00 Overview]({PHASE}/index.md)\n"
        f"- [00 Labs]({PHASE}/labs/index.md)\n"
        f"  - [Lab 00-01: Count]({PHASE}/labs/lab-01-count/index.md)\n"
    )
    text = page_of_book(root, f"{PHASE}/labs/lab-01-count/index.md")
    assert ">Labs</a>" in text and ">Guide</a>" not in text


def test_a_phase_without_guide_and_labs_is_left_out(root):
    (root / PHASE / "00-guide.md").unlink()
    (root / PHASE / "labs" / "README.md").unlink()
    (root / "README.md").write_text("# The course\n", encoding="utf-8")
    assert "First steps" not in book.summary(root, book.contents(root))
    assert staged(root) == []


def test_a_page_of_a_phase_shows_where_it_stands_and_what_it_takes(root):
    guide(root, "# The guide\n\n" + "word " * 1000)
    assert staged(root) == []
    text = page_of_book(root)
    place, _, text = text.partition("\n\n")
    assert place == '<p class="phase-place">Phase 00, 1 of 20</p>'
    assert text.startswith('# The guide\n\n<nav class="phase-strip" aria-label="Phase 00, first ')
    assert '<a href="00-guide.html" aria-current="page">Guide</a>' in text
    assert '<a href="labs/index.html">Labs</a>' in text
    assert '<p class="page-facts">5 min to read</p>' in text
    assert '<a class="next-page" href="01-deep-dive.html"><small>Next</small>Deep dive</a>' in text
    assert '<a class="previous-page" href="index.html"><small>Previous</small>Overview</a>' in text
    assert "previous-page" not in page_of_book(root, f"{PHASE}/index.md")
    lab = page_of_book(root, f"{PHASE}/labs/lab-01-count/index.md")
    assert '<a href="../index.html" class="phase-inside">Labs</a>' in lab
    assert '<a class="previous-page" href="../index.html"><small>Previous</small>Labs</a>' in lab
    assert "phase-strip" not in page_of_book(root, "GLOSSARY.md")


def test_what_the_tests_pin_is_marked_with_the_lab_it_waits_for(root):
    pins = (
        "<details><summary>What the tests pin (open after passing)</summary>\n\nx\n\n</details>\n"
    )
    other = "<details><summary>Answer</summary>\n\ny\n\n</details>\n"
    page = root / PHASE / "labs" / "lab-01-count" / "README.md"
    page.write_text(f"# Lab 00-01: Count [CPU-OK]\n\n{pins}\n{other}\n`{pins[:40]}`\n")
    guide(root, f"# The guide\n\n{pins}")
    assert staged(root) == []
    text = page_of_book(root, f"{PHASE}/labs/lab-01-count/index.md")
    marked = '<details class="until-passed" data-lab="00-01"><summary>What the tests pin (open'
    assert text.count(marked) == text.count("until-passed") == 1 and other in text
    assert "until-passed" not in page_of_book(root), "a guide waits for no lab"


def test_a_lab_shows_its_command(root):
    lab = root / PHASE / "labs" / "lab-01-count"
    (lab / "lab.yaml").write_text(
        'id: "00-01"\ntitle: Count\ntag: CPU-OK\nkind: build\nminutes: 30\nyours: [a]\nhints: {}\n',
        encoding="utf-8",
    )
    assert staged(root) == []
    text = page_of_book(root, f"{PHASE}/labs/lab-01-count/index.md")
    assert "about 30 min to do · <code>course check 00-01</code>" in text


def test_a_widget_holds_its_document_and_its_figure(root):
    (root / PHASE / "a.svg").write_text("<svg/>", encoding="utf-8")
    guide(root, "# The guide\n\n<!-- widget: roofline -->\n\n![A roofline](a.svg)\n\nEnd.\n")
    assert staged(root) == []
    text = page_of_book(root)
    host = re.search(
        r'<div class="widget" data-widget="roofline">\n'
        r'<script type="application/json">(.*?)</script>\n\n'
        r"!\[A roofline\]\(a.svg\)\n\n</div>",
        text,
    )
    assert host and json.loads(host[1]) == widgets.document("roofline")
    assert '<script defer src="../book/widgets/roofline.js"></script>' in text


@pytest.mark.parametrize(
    ("name", "problem"),
    [("rooflin", "no widget is called rooflin"), ("roofline", "needs a figure")],
)
def test_a_widget_that_does_not_exist_or_has_no_figure_is_refused_by_page_and_line(
    root, name, problem
):
    (root / PHASE / "a.svg").write_text("<svg/>", encoding="utf-8")
    figure = "![x](a.svg)" if name == "rooflin" else "text"
    guide(root, f"# The guide\n\n<!-- widget: {name} -->\n\n{figure}\n")
    (only,) = staged(root)
    assert only[:2] == (f"{PHASE}/00-guide.md", 3) and problem in only[2]


def test_a_phase_without_a_page_on_its_labs_has_a_title_there(root):
    (root / PHASE / "labs" / "README.md").unlink()
    assert "\n- [Labs]()\n  - [Lab 00-01" in book.summary(root, book.contents(root))


def test_pages_that_pages_link_follow_their_lab_their_phase_or_the_last_phase(root):
    lab = root / PHASE / "labs" / "lab-01-count"
    (lab / "data").mkdir()
    (root / "results").mkdir()
    (lab / "data" / "README.md").write_text("# Data\n", encoding="utf-8")
    (lab / "README.md").write_text("# Lab\n\n[d](data/)\n", encoding="utf-8")
    (root / "results" / "README.md").write_text("# Results\n", encoding="utf-8")
    (root / PHASE / "MORE.md").write_text("# More\n", encoding="utf-8")
    guide(root, "# The guide\n\n[r](../results/README.md), [m](MORE.md)\n")
    assert staged(root) == []
    lines = page_of_book(root, "SUMMARY.md").splitlines()
    at = lines.index(f"  - [Lab]({PHASE}/labs/lab-01-count/index.md)")
    assert lines[at + 1] == f"    - [Data]({PHASE}/labs/lab-01-count/data/index.md)"
    at = lines.index(f"- [More]({PHASE}/MORE.md)")
    assert lines[at + 1] == f"- [00 Exercises]({PHASE}/EXERCISES.md)", (
        "the cheat sheet ends a phase"
    )
    assert lines[-3:] == ["# Reference", "", "- [Results](results/index.md)"]


def test_what_is_for_those_who_keep_the_course_follows_the_phases(root):
    for name in ("ARCHITECTURE", "CONTRIBUTING", "PUBLISHING", "CHANGES"):
        (root / f"{name}.md").write_text(f"# {name.capitalize()}\n", encoding="utf-8")
    assert staged(root) == []
    assert page_of_book(root, "SUMMARY.md").endswith(
        f"- [00 Cheat sheet]({PHASE}/CHEATSHEET.md)\n\n# Reference\n\n"
        "- [Architecture](ARCHITECTURE.md)\n- [Contributing](CONTRIBUTING.md)\n"
        "- [Publishing](PUBLISHING.md)\n- [Changes](CHANGES.md)\n"
    )


def test_the_last_page_of_a_phase_leads_to_the_next_one_and_the_last_phase_ends(root):
    second = "phase-01-second-steps"
    (root / second / "labs").mkdir(parents=True)
    (root / second / "labs" / "README.md").write_text("# The labs\n", encoding="utf-8")
    assert staged(root) == []
    end = page_of_book(root, f"{PHASE}/CHEATSHEET.md")
    assert (
        f'<a class="next-page" href="../{second}/index.html">'
        "<small>Next phase</small>01 Second steps</a>"
    ) in end
    assert "Next phase" not in page_of_book(root, f"{PHASE}/INTERVIEW.md")
    assert "next-page" not in page_of_book(root, f"{second}/labs/index.md")


@pytest.mark.parametrize(
    "name", [f"{PHASE}/CHEATSHEET.md", f"{PHASE}/labs/lab-01-count/README.md", "README.md"]
)
def test_a_page_that_a_chapter_needs_and_nobody_wrote_is_refused_by_name(root, name):
    (root / name).unlink()
    assert (name, 1, "the book needs this page") in staged(root)


def test_a_page_that_no_chapter_lists_is_refused_by_name(root):
    (root / PHASE / "NOTES.md").write_text("# Notes\n", encoding="utf-8")
    assert staged(root) == [
        (f"{PHASE}/NOTES.md", 1, "no chapter lists this page and none links it")
    ]


def test_an_include_is_filled_with_numbered_lines_a_link_and_the_licence(root):
    guide(root, "# The guide\n\n{{#upstream vllm/pool.py Pool.take}}\n")
    assert staged(root) == []
    text = page_of_book(root)
    assert '````python\ndef take(self):\n\n    return "```"\n````' in text
    assert '<pre class="upstream-numbers" aria-hidden="true">2\n3\n4</pre>' in text
    assert f'<a href="{SOURCE}/vllm/pool.py#L2-L4"><code>vllm/pool.py:2-4</code></a>' in text
    assert "SPDX-License-Identifier: Apache-2.0" in text and f'"{SOURCE}/LICENSE"' in text


def test_an_include_that_finds_nothing_is_refused_by_page_and_line(root):
    guide(root, "# The guide\n\ntext\n\n{{#upstream vllm/pool.py Pool.give}}\n")
    assert staged(root) == [
        (
            f"{PHASE}/00-guide.md",
            5,
            "{{#upstream vllm/pool.py Pool.give}}: the file defines no such symbol",
        )
    ]


def test_an_include_that_is_only_talked_about_stays(root):
    guide(root, "# The guide\n\nWrite `{{#upstream vllm/pool.py Pool.give}}`.\n")
    assert staged(root) == []
    assert "`{{#upstream vllm/pool.py Pool.give}}`" in page_of_book(root)


def test_citations_link_to_their_lines_at_the_pinned_commit(root):
    guide(root, "See `vllm/pool.py:2` `Pool.take`, `vllm/pool.py:2-4` `Pool.take`.\n")
    assert staged(root) == []
    assert page_of_book(root).startswith(
        f"See [`vllm/pool.py:2`]({SOURCE}/vllm/pool.py#L2) `Pool.take`, "
        f"[`vllm/pool.py:2-4`]({SOURCE}/vllm/pool.py#L2-L4) `Pool.take`.\n"
    )


def test_a_page_linked_for_github_gives_the_same_page_of_the_book(root):
    plain = (
        "# The guide\n\nSee `vllm/pool.py:2` `Pool.take`, `vllm/pool.py`.\n\n"
        "{{#upstream vllm/pool.py Pool.take}}\n\nAnd on.\n"
    )
    path = guide(root, plain)
    assert staged(root) == []
    before = page_of_book(root)
    linked = links.linked(plain, path, root, root / "upstream")
    assert linked != plain and f"]({links.BLOB}/0decac0/vllm/pool.py#L2-L4)\n" in linked
    guide(root, linked)
    assert staged(root) == []
    assert page_of_book(root) == before.replace("And on.", "\nAnd on.")


def test_a_citation_that_is_not_exact_is_refused_by_page_and_line(root):
    guide(root, "# The guide\n\n`vllm/pool.py:1` `Pool.take`\n")
    (only,) = staged(root)
    assert only[:2] == (f"{PHASE}/00-guide.md", 3)


def test_a_term_is_defined_by_its_words_without_citation_and_with_one_full_stop(tmp_path):
    glossary = tmp_path / "GLOSSARY.md"
    glossary.write_text(
        "# Glossary\n\n### Warm-up\n\nA run, before `vllm/a.py:1` `b`, a capture... or two.\n"
        "`vllm/a.py:2` `c`.\n"
    )
    assert book_extras.definitions(glossary) == {"warm-up": "A run, before, a capture... or two."}


def test_formulas_become_mathml_and_code_and_prices_stay(root):
    pytest.importorskip("latex2mathml", reason="needs the book extra")
    guide(
        root, "It is $x_i$, for 2 $ or 3 $; `$y$`.\n\n$$a =\nb$$\n\n```console\n$ ls $HOME\n```\n"
    )
    assert staged(root) == []
    text = page_of_book(root)
    assert text.count("<math ") == 2 and text.count('display="block"') == 1
    assert "<msub><mi>x</mi><mi>i</mi></msub>" in text
    assert "for 2 $ or 3 $; `$y$`." in text and "\n$ ls $HOME\n" in text


def test_a_formula_holds_nothing_that_markdown_would_read():
    pytest.importorskip("latex2mathml", reason="needs the book extra")
    made = book_pages.mathml(r"a * b * \text{max_num_seqs}")
    assert not re.search(r"[*_`\[\]|\n]", re.sub(r"<[^>]*>", "", made))


@pytest.mark.parametrize("command", ["text", "texttt"])
def test_a_formula_shows_the_underscore_of_a_name(command):
    pytest.importorskip("latex2mathml", reason="needs the book extra")
    made = html.unescape(book_pages.mathml(rf"\{command}{{start\_pos}} = n"))
    assert ">start_pos</mtext>" in made


@pytest.mark.parametrize("latex", ["x_1_2", r"\unknown x"])
def test_a_formula_that_cannot_be_read_is_refused_by_page_and_line(root, latex):
    pytest.importorskip("latex2mathml", reason="needs the book extra")
    guide(root, f"# The guide\n\nIt is ${latex}$.\n")
    (only,) = staged(root)
    assert only[:2] == (f"{PHASE}/00-guide.md", 3) and "not a formula" in only[2]


def test_links_lead_to_pages_figures_and_files_and_folders_become_text(root):
    (root / "tools").mkdir()
    (root / "tools" / "tool.py").write_text("x = 1\n", encoding="utf-8")
    (root / PHASE / "a.svg").write_text("<svg/>", encoding="utf-8")
    guide(
        root,
        "[l](labs/lab-01-count/README.md#x), [g](../GLOSSARY.md#kv-cache), [`t`](../tools/), "
        "[p](../tools/tool.py), ![two\nlines](a.svg)\n",
    )
    (root / PHASE / "labs" / "lab-01-count" / "README.md").write_text("# L\n\n## X\n", "utf-8")
    assert staged(root) == []
    assert page_of_book(root).startswith(
        "[l](labs/lab-01-count/index.md#x), "
        '[g](../GLOSSARY.md#kv-cache "Kept keys and values."), `t`, '
        "[p](../tools/tool.py), ![two\nlines](a.svg)\n"
    )
    assert page_of_book(root, f"{PHASE}/a.svg") == "<svg/>"
    assert page_of_book(root, "tools/tool.py") == "x = 1\n"


def test_a_dead_anchor_is_refused_by_page_and_line(root):
    guide(root, "# The guide\n\n[g](../GLOSSARY.md#kv-cash)\n")
    (only,) = staged(root)
    assert only[:2] == (f"{PHASE}/00-guide.md", 3) and "no anchor #kv-cash" in only[2]


def test_the_site_is_whole_and_loads_nothing_from_the_network(root):
    pytest.importorskip("latex2mathml", reason="needs the book extra")
    try:
        book.find_mdbook()
    except CourseError:
        pytest.skip("needs mdbook, from the book extra")
    shutil.copy(REPOSITORY / "book.toml", root)
    shutil.copytree(REPOSITORY / "book", root / "book")
    guide(
        root,
        "# The guide\n\n{{#upstream vllm/pool.py Pool.take}}\n\n[g](../GLOSSARY.md#kv-cache), "
        "$x$\n\n<details><summary>Answer</summary>\n\n*Yes*.\n\n</details>\n",
    )
    assert book.build(root, root / "upstream") == []
    made = (book.site_folder(root) / PHASE / "00-guide.html").read_text(encoding="utf-8")
    assert '<a href="../GLOSSARY.html#kv-cache" title="Kept keys and values.">g</a>' in made
    assert "<em>Yes</em>" in made and "<mi>x</mi>" in made


def test_a_script_from_the_network_and_a_dead_link_in_the_site_are_findings(root):
    site = book.site_folder(root)
    (site / PHASE).mkdir(parents=True)
    (site / PHASE / "00-guide.html").write_text(
        '<script src="https://cdn.example/x.js"></script><a href="gone.html">x</a>'
        '<p id="here"><a href="#here">y</a><a href="#there">z</a>',
        encoding="utf-8",
    )
    guide(root, "# The guide\n\n[x](gone.md)\n")
    found = [
        (f.page.relative_to(root).as_posix(), f.line, f.text) for f in book_site.check(root, site)
    ]
    assert found == [
        (f"{PHASE}/00-guide.md", 1, "https://cdn.example/x.js: is loaded from the network"),
        (f"{PHASE}/00-guide.md", 3, "gone.html: leads nowhere in the book"),
        (f"{PHASE}/00-guide.md", 1, "#there: has no such anchor"),
    ]


def test_without_mdbook_the_message_says_what_to_run(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(book.sysconfig, "get_path", lambda _name: str(tmp_path))
    with pytest.raises(CourseError, match=r"uv run --extra book course book build"):
        book.find_mdbook()


def got(address: str) -> int:
    """The status of a request."""
    try:
        with urllib.request.urlopen(address) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "html"
    (folder / "empty").mkdir(parents=True)
    (folder / "index.html").write_text("<p>first", encoding="utf-8")
    return folder


@pytest.mark.slow
def test_every_request_is_answered_while_the_site_is_replaced(site, tmp_path):
    swapping, done, answers = threading.Lock(), threading.Event(), []

    def ask(address):
        while not done.is_set():
            answers.append(got(f"{address}index.html"))

    with book_site.serving(site, 0, swapping) as address:
        asking = threading.Thread(target=ask, args=(address,))
        asking.start()
        for number in range(200):
            new = tmp_path / "new"
            new.mkdir()
            (new / "index.html").write_text(f"<p>{number}", encoding="utf-8")
            with swapping:
                book_site.publish(new, site)
        done.set()
        asking.join()
        assert got(address) == 200
    assert answers and set(answers) == {200}
    assert (site / "index.html").read_text() == "<p>199"
    assert not (tmp_path / "html.old").exists()


@pytest.mark.slow
def test_nothing_outside_the_site_is_served(site, tmp_path):
    (tmp_path / "private.html").write_text("mine", encoding="utf-8")
    (site / "out.html").symlink_to(tmp_path / "private.html")
    (site / "up").symlink_to(tmp_path)
    (site / "in.html").symlink_to(site / "index.html")
    with book_site.serving(site, 0) as address:
        paths = ["out.html", "up/private.html", "../private.html", "%2e%2e/private.html", "empty/"]
        assert [got(address + path) for path in paths] == [404] * 5
        assert (got(f"{address}in.html"), got(address)) == (200, 200)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["%00", "index.html%00", "a" * 5000])
def test_an_address_that_can_be_no_file_gets_an_answer(site, path):
    with book_site.serving(site, 0) as address:
        assert 400 <= got(address + path) < 500


def test_a_site_with_something_to_mend_does_not_replace_the_last(root, monkeypatch):
    site = book.site_folder(root)
    site.mkdir(parents=True)
    (site / "index.html").write_text("<p>the last", encoding="utf-8")

    def mdbook(command, **_):
        new = Path(command[command.index("--dest-dir") + 1])
        new.mkdir(parents=True)
        (new / "index.html").write_text('<a href="gone.html">x</a>', encoding="utf-8")
        return book.subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(book, "find_mdbook", lambda: "mdbook")
    monkeypatch.setattr(book.subprocess, "run", mdbook)
    assert len(book.build(root, root / "upstream")) == 1
    assert (site / "index.html").read_text() == "<p>the last"


def test_the_line_on_later_releases_counts_every_place_and_says_how_many_were_compared():
    met = Counter({"same": 2, "moved": 1})
    whole = book_pages.drift_line("0.33.0", met, 3)
    assert "in 3 places. In 0.33.0: 2 same, 1 moved; " in whole
    part = book_pages.drift_line("0.33.0", met, 5, "x.html")
    assert "in 5 places." in part and "</a>, of 3 that were compared: 2 same, 1 moved" in part

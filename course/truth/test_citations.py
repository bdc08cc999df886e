"""Citations: what counts as one, what is true at the pin, where it moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from course.files import write_atomically
from course.truth import checking, citations, links
from course.truth.checking import problem_of
from course.truth.symbols import lookup, source_of, symbols

MODULE = '''\
"""A module of the pinned tree."""

LIMIT = 3
FIRST, SECOND = 1, 2


class Pool:
    """A pool."""

    size: int = 0

    def __init__(self, n):
        self.free = n
        if n:
            self.extra: int = 1

    @property
    def used(self):
        return LIMIT - self.free

    class Inner:
        def touch(self):
            def helper():
                pass
            return helper


def touch():
    return None


try:
    import x
except ImportError:
    def fallback():
        return 1
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "upstream"
    (folder / "vllm").mkdir(parents=True)
    (folder / "csrc").mkdir()
    (folder / "vllm" / "pool.py").write_text(MODULE, encoding="utf-8")
    (folder / "csrc" / "cache.cu").write_text(
        "// cache\nvoid reshape_and_cache(\n    int n) {\n}\n", encoding="utf-8"
    )
    (folder / "csrc" / "block.h").write_text(
        "typedef struct {\n    int n;\n} block;\nint blocks;\n"
    )
    return folder


@pytest.fixture
def page(tmp_path: Path):
    def write(text: str, name: str = "page.md") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def findings(tmp_path: Path, tree: Path, path: Path) -> list[str]:
    return [finding.text for finding in checking.check(tmp_path, tree, [path])[1]]


@pytest.mark.parametrize(
    ("symbol", "line"),
    [
        ("LIMIT", 3),
        ("SECOND", 4),
        ("Pool", 7),
        ("Pool.size", 10),
        ("Pool.__init__", 12),
        ("Pool.free", 13),
        ("Pool.extra", 15),
        ("Pool.used", 18),
        ("Pool.Inner.touch", 22),
        ("Pool.Inner.touch.helper", 23),
        ("helper", 23),
        ("touch", 28),
        ("fallback", 35),
        ("fallback()", 35),
    ],
)
def test_a_symbol_stands_on_its_definition_line(tree, symbol, line):
    assert lookup(symbols(tree / "vllm/pool.py"), symbol)[0][0] == line


@pytest.mark.parametrize(
    "text",
    [
        "`vllm/pool.py:12` `Pool.__init__`",
        "`vllm/pool.py:12-15` `Pool.__init__`",
        "`vllm/pool.py:13-14` `Pool.__init__`",
        "`vllm/pool.py:14` `Pool.__init__`",
        "`vllm/pool.py:17` `Pool.used`",
        "`vllm/pool.py:17-19` `Pool.used`",
        "`vllm/pool.py:18` `Pool.used`",
        "`vllm/pool.py:7-10` `Pool`",
        "`vllm/pool.py:8` `Pool`",
        "`csrc/cache.cu:2-4` `reshape_and_cache`",
        "`csrc/block.h:1-3` `block`",
        "`vllm/pool.py:12`\n`Pool.__init__`",
        "> `vllm/pool.py:12`\n> `Pool.__init__`",
        "`csrc/cache.cu:2` `reshape_and_cache`",
        "`csrc/cache.cu:2-3` `vllm::reshape_and_cache`",
        "{{#upstream vllm/pool.py Pool.used}}",
        "{{#upstream vllm/pool.py}}",
        "the file `vllm/pool.py` as a whole",
        "`page.md:1` is a file of ours",
    ],
)
def test_a_true_citation_passes(tmp_path, tree, page, text):
    assert findings(tmp_path, tree, page(f"Words {text} words.\n")) == []


def test_fenced_code_cites_nothing(tmp_path, tree, page):
    path = page("```text\n`vllm/nowhere.py:1` `Not`\n```\n> ~~~\n> `vllm/x.py:1`\n> ~~~\n")
    assert checking.check(tmp_path, tree, [path]) == (0, [])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "`vllm/pool.py:11` `Pool.__init__`",
            "the symbol stands on lines 12-15, not 1",
        ),
        (
            "`vllm/pool.py:16` `Pool.__init__`",
            "the symbol stands on lines 12-15, not 1",
        ),
        ("`vllm/pool.py:1-2` `Pool.__init__`", "the range begins before the symbol, which begins"),
        (
            "`vllm/pool.py:11-16` `Pool.__init__`",
            "the range begins before the symbol, which begins",
        ),
        (
            "`vllm/pool.py:11-13` `Pool.__init__`",
            "the range begins before the symbol, which begins",
        ),
        ("`vllm/pool.py:16-18` `Pool.used`", "begins on line 18 (its decorator on 17)"),
        ("`vllm/pool.py:13-17` `Pool.__init__`", "spans lines 12-15, which do not hold"),
        ("`vllm/pool.py:14` `Pool`", "these lines are Pool.__init__: name it"),
        ("`vllm/pool.py:17-19` `Pool`", "these lines are Pool.used: name it"),
        (
            "`vllm/pool.py:2-5` `LIMIT`",
            "the range begins before the symbol, which begins on line 3",
        ),
        ("`csrc/cache.cu:1-3` `reshape_and_cache`", "does not stand there; it stands on line 2"),
        ("`csrc/cache.cu:2` `reshape`", "the file does not hold 'reshape'"),
        ("`csrc/block.h:1-4` `block`", "does not stand there; it stands on line 3"),
        ("`vllm/pool.py:12` `Pool.gone`", "the file defines no such symbol"),
        ("`vllm/pool.py:900` `Pool`", "the file has 36 lines"),
        ("`vllm/none.py:1` `Pool`", "there is no such file at the pin"),
        ("`vllm/pool.py:7` `the pool`", "is not a symbol"),
        ("`vllm/pool.py:7`, the pool", "names no symbol: write `path:line` `Symbol`"),
        ("`vllm/pool.py:7` and then `Pool`", "names no symbol"),
        ("`vllm/pool.py:7` `vllm/pool.py:12` `Pool`", "names no symbol"),
        ("`vllm/pool.py#L7` `Pool`", "is not of the form `path:line` or `path:a-b`"),
        ("`pool.py:7` `Pool`", "is no path from the root of the pinned tree: write it whole"),
        ("the file `vllm/attention/layer.py`", "there is no such file at the pin"),
        ("`vllm/pool.py:7ff` `Pool`", "is not of the form `path:line` or `path:a-b`"),
        ("`csrc/cache.cu:3` `reshape_and_cache`", "does not stand there; it stands on line 2"),
        ("`csrc/cache.cu:1` `absent`", "the file does not hold 'absent'"),
        ("{{#upstream vllm/pool.py Pool.gone}}", "the file defines no such symbol"),
        ("{{#upstream vllm/pool.py\nPool.used}}", "an include directive stands on one line"),
    ],
)
def test_an_untrue_citation_is_refused_with_the_reason(tmp_path, tree, page, text, complaint):
    found = findings(tmp_path, tree, page(f"{text}\n"))
    assert found and complaint in found[0]


def test_the_projects_own_rules_are_cited_as_its_code_is(tmp_path, tree, page):
    (tree / "AGENTS.md").write_text("# Rules\n\nno busywork\n", encoding="utf-8")
    (tree / ".github").mkdir()
    (tree / ".github" / "CODEOWNERS").write_text("/vllm/v1/core @a\n", encoding="utf-8")
    good = "`AGENTS.md:3` `busywork` and `.github/CODEOWNERS:1` `/vllm/v1/core`\n"
    assert not findings(tmp_path, tree, page(good))
    (wrong,) = findings(tmp_path, tree, page("`AGENTS.md:1` `busywork`\n"))
    assert "does not stand there; it stands on line 3" in wrong


def test_a_name_two_classes_define_must_say_which(tmp_path, tree, page):
    module = tree / "vllm" / "two.py"
    module.write_text("class A:\n    def f(self): ...\nclass B:\n    def f(self): ...\n")
    found = findings(tmp_path, tree, page("`vllm/two.py:2` `f`\n"))
    assert "the file defines it 2 times: say which (A.f, B.f)" in found[0]


def test_docstrings_and_comments_of_python_files_cite_too(tmp_path, tree, page):
    path = page(
        'def f():\n    """Mirrors `vllm/pool.py:7` `Pool.gone`."""\n'
        "    x = '`vllm/pool.py:1` `Not`'\n    # `vllm/pool.py:6`\n    # `Pool`\n",
        "module.py",
    )
    found = checking.check(tmp_path, tree, [path])[1]
    assert [(finding.line, finding.text.split(": ")[-1]) for finding in found] == [
        (2, "the file defines no such symbol"),
        (4, "the symbol stands on lines 7-25, not 6"),
    ]


def test_a_finding_names_the_line_of_the_page(tmp_path, tree, page):
    path = page("# Title\n\ntext\n\n- item `vllm/pool.py:6` `Pool`\n")
    assert checking.check(tmp_path, tree, [path])[1][0].line == 5


def test_fix_moves_lines_and_ranges_to_another_tree(tmp_path, tree, page):
    other = tmp_path / "other"
    (other / "vllm").mkdir(parents=True)
    (other / "vllm" / "pool.py").write_text("# one\n# two\n" + MODULE, encoding="utf-8")
    path = page(
        "`vllm/pool.py:7` `Pool` and `vllm/pool.py:13-14` `Pool.__init__`,\n"
        "again `vllm/pool.py:7` `Pool`\n"
    )
    moved = checking.moves(tmp_path, tree, other, [path])
    assert checking.rewrite(moved, write_atomically) == 3
    assert path.read_text() == (
        "`vllm/pool.py:9` `Pool` and `vllm/pool.py:15-16` `Pool.__init__`,\n"
        "again `vllm/pool.py:9` `Pool`\n"
    )


def test_fix_says_what_is_gone_and_leaves_it(tmp_path, tree, page):
    other = tmp_path / "other"
    other.mkdir()
    path = page("`vllm/pool.py:7` `Pool`\n")
    moved = checking.moves(tmp_path, tree, other, [path])
    assert [move.first for move in moved] == [0]
    assert checking.rewrite(moved, write_atomically) == 0


def test_source_of_finds_a_method_by_its_own_name(tree):
    assert source_of(tree, "used") == [("vllm/pool.py", 18, 19)]


def test_a_citation_that_ends_a_page_without_a_newline_is_read(tmp_path, tree, page):
    path = page("`vllm/pool.py:7` `Pool`")
    (citation,), _ = citations.in_file(path, tmp_path)
    assert problem_of(citation, tree) == ""


# ------------------------------------------------------------------ links to the pinned commit

BLOB = "https://github.com/vllm-project/vllm/blob/0decac0"
PLAIN = """\
# Title

See `vllm/pool.py:12` `Pool.__init__`, `vllm/pool.py:12-15`
`Pool.__init__` and `vllm/pool.py` as a whole.

> in a quote `vllm/pool.py:18`
> `Pool.used`

{{#upstream vllm/pool.py Pool.used}}

- in a list:

  {{#upstream vllm/pool.py touch}}

Talked about: `{{#upstream vllm/pool.py touch}}`, [of ours `vllm/pool.py:3` `LIMIT`](a.md).

```text
`vllm/pool.py:3` `LIMIT`
{{#upstream vllm/pool.py touch}}
```
"""
LINKED = f"""\
# Title

See [`vllm/pool.py:12` `Pool.__init__`]({BLOB}/vllm/pool.py#L12), [`vllm/pool.py:12-15`
`Pool.__init__`]({BLOB}/vllm/pool.py#L12-L15) and `vllm/pool.py` as a whole.

> in a quote [`vllm/pool.py:18`
> `Pool.used`]({BLOB}/vllm/pool.py#L18)

<!--{{{{#upstream vllm/pool.py Pool.used}}}}-->
[`vllm/pool.py:18-19` `Pool.used`]({BLOB}/vllm/pool.py#L18-L19)

- in a list:

  <!--{{{{#upstream vllm/pool.py touch}}}}-->
  [`vllm/pool.py:28-29` `touch`]({BLOB}/vllm/pool.py#L28-L29)

Talked about: `{{{{#upstream vllm/pool.py touch}}}}`, [of ours `vllm/pool.py:3` `LIMIT`](a.md).

```text
`vllm/pool.py:3` `LIMIT`
{{{{#upstream vllm/pool.py touch}}}}
```
"""


def test_every_citation_becomes_a_link_and_every_include_a_comment_with_one(tmp_path, tree, page):
    path = page(PLAIN)
    assert links.linked(PLAIN, path, tmp_path, tree) == LINKED


def test_linking_twice_changes_nothing(tmp_path, tree, page):
    assert links.linked(LINKED, page(LINKED), tmp_path, tree) == LINKED


def test_a_linked_page_without_its_links_has_the_same_words_on_the_same_lines(tree):
    before = PLAIN.replace("Pool.used}}\n", "Pool.used}}\n\n").replace(
        "touch}}\n\nT", "touch}}\n\n\nT"
    )
    assert links.unlinked(LINKED) == before
    assert links.unlinked(PLAIN) == PLAIN


def test_a_linked_page_has_the_same_citations(tmp_path, tree, page):
    plain, linked = page(PLAIN), page(LINKED, "linked.md")
    counted = [checking.check(tmp_path, tree, [path]) for path in (plain, linked)]
    assert counted[0] == counted[1] == (7, [])


def test_a_link_that_leads_elsewhere_than_its_text_says_is_found(tmp_path, tree, page):
    path = page(
        LINKED.replace("#L12)", "#L13)").replace("0decac0/vllm/pool.py#L18)", "main/x#L18)")
    )
    found = checking.check(tmp_path, tree, [path])[1]
    assert [finding.line for finding in found] == [3, 6]
    assert all(finding.text.startswith("the link leads to https") for finding in found)
    assert links.linked(path.read_text(), path, tmp_path, tree) == LINKED


def test_fix_moves_a_linked_citation_and_its_link(tmp_path, tree, page):
    other = tmp_path / "other"
    (other / "vllm").mkdir(parents=True)
    (other / "vllm" / "pool.py").write_text("# one\n# two\n" + MODULE, encoding="utf-8")
    path = page(f"[`vllm/pool.py:7` `Pool`]({BLOB}/vllm/pool.py#L7)\n")
    moved = checking.moves(tmp_path, tree, other, [path])
    assert checking.rewrite(moved, write_atomically) == 1
    assert path.read_text() == f"[`vllm/pool.py:9` `Pool`]({BLOB}/vllm/pool.py#L9)\n"

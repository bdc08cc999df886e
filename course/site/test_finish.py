"""The last hand on a page: tables that stack, names that break, figures that open, shared links."""

from __future__ import annotations

import re

import pytest

from course.site import book_finish

WIDE = (
    "<table><thead>\n<tr><th>call</th><th>effect &amp; cost</th></tr>\n</thead><tbody>\n"
    '<tr><td><code>take</code></td><td style="text-align: right">' + "words " * 30 + "</td></tr>"
    "\n</tbody></table>"
)


def test_a_wide_table_is_marked_and_its_cells_name_their_columns():
    made = book_finish.tables_stack(f"<p>x</p>{WIDE}")
    assert made.startswith('<p>x</p><table class="stack"><thead>')
    assert '<td data-label="call"><code>take</code></td>' in made
    assert '<td style="text-align: right" data-label="effect &amp; cost">words' in made
    assert "<th>call</th>" in made


def test_a_narrow_table_stays_a_table():
    narrow = WIDE.replace("words " * 30, "12")
    assert 'class="stack"' not in book_finish.tables_stack(narrow)


@pytest.mark.parametrize(
    ("rows", "wide"),
    [
        ([["n", "bytes"], ["1", "16"]], False),
        ([["n", "bytes"], ["a_name_of_eighteen_", "another_of_eighteen"]], True),
        ([["n", "bytes"], ["a_name_of\u200b_eighteen", "another\u200b_of\u200b_eighteen"]], False),
        ([["only"], ["one_column_of_any_width_whatsoever_is_no_table_to_stack"]], False),
    ],
)
def test_a_table_is_too_wide_when_its_unbroken_parts_do_not_fit_side_by_side(rows, wide):
    assert book_finish.too_wide(rows) is wide


def test_a_name_may_break_after_its_joints_and_nowhere_else():
    made = book_finish.breakable("<code>vllm/v1/block_pool.py:34</code>")
    assert made == "<code>vllm/<wbr>v1/<wbr>block_<wbr>pool.<wbr>py:34</code>"
    assert book_finish.words(made) == "vllm/v1/block_pool.py:34"


@pytest.mark.parametrize(
    "text",
    [
        "<pre><code>num_computed_tokens</code></pre>",
        "<p>num_computed_tokens</p>",
        "<code>a_b</code>",
        '<script type="application/json">{"a": "<code>num_computed_tokens</code>"}</script>',
        '<p><img alt="<code> num_computed_tokens" src="a.png"></p>',
    ],
)
def test_what_is_no_long_name_in_a_line_stays(text):
    assert book_finish.breakable(text) == text


def test_a_tag_is_kept_together_but_not_in_code():
    made = book_finish.breakable("<h1>Count [CPU-OK]</h1><code>[GPU-REQ]</code>")
    assert made == '<h1>Count <span class="tag">[CPU-OK]</span></h1><code>[GPU-REQ]</code>'


def test_a_figure_leads_to_itself_unless_it_is_a_link_or_a_widget_already():
    figure = '<img src="figures/a.svg" alt="x">'
    made = book_finish.figures_open(f"<p>{figure}</p>")
    assert made == f'<p><a class="figure" href="figures/a.svg" title="Open large">{figure}</a></p>'
    widget = f'<div class="widget" data-widget="w"><div>y</div><p>{figure}</p></div>'
    linked = f'<a href="b.html">{figure}</a>'
    assert book_finish.figures_open(widget + linked) == widget + linked
    assert 'class="figure"' in book_finish.figures_open(widget + figure), "the widget never ends"


def test_the_second_picture_of_the_theme_and_its_hidden_checkbox_are_gone():
    figure = '<img src="figures/a.svg" alt="x">'
    theme = (
        f'<label class="checkbox-label"><input class="checkbox-img" type="checkbox">{figure}'
        f'<span class="img-wrapper">{figure}</span></label>'
    )
    assert book_finish.figures_open(theme) == book_finish.figures_open(figure)


PAGE = (
    '<head><meta name="description" content="the book">\n</head><h1 class="menu-title">Book</h1>'
    "<main>{}</main>"
)
MAIN = (
    '<h1 id="a"><a href="#a">Blocks &amp; pools</a></h1><p class="page-facts">' + "facts " * 20
    + "</p><p>A <code>pool</code> holds every block that the engine has, says who owns it.</p>"
)  # fmt: skip


def test_a_shared_link_shows_the_pages_own_title_and_first_words():
    made = book_finish.shared(PAGE.format(MAIN), MAIN, "phase-02/labs/index.html", "")
    tags = dict(re.findall(r'(?:property|name)="([\w:]+)" content="([^"]*)"', made))
    words = "A pool holds every block that the engine has, says who owns it."
    assert tags == {
        "description": words,
        "og:type": "article",
        "og:site_name": "Book",
        "og:title": "Blocks &amp; pools",
        "og:description": words,
        "og:image": "../../social.png",
        "og:image:alt": tags["og:image:alt"],
        "twitter:card": "summary_large_image",
    }


def test_a_site_that_knows_its_address_gives_it_in_full():
    made = book_finish.shared(PAGE.format(MAIN), MAIN, "a/b.html", "https://example.org/course/")
    assert '<meta property="og:image" content="https://example.org/course/social.png">' in made
    assert '<meta property="og:url" content="https://example.org/course/a/b.html">' in made


def test_a_long_description_ends_with_a_word():
    about = book_finish.description(f"<p>{'twelve words ' * 40}</p>")
    assert len(about) <= book_finish.DESCRIPTION_LIMIT
    assert re.search(r"(twelve|words)\u2026$", about)


def test_the_box_of_a_task_has_a_name_and_no_other_box_changes():
    task = '<li><input disabled="" type="checkbox"/>\nread it</li>'
    made = book_finish.named_boxes(task)
    assert made == task.replace('"checkbox"/>', '"checkbox" aria-label="task"/>')
    other = '<p><input type="checkbox"> mine</p>'
    assert book_finish.named_boxes(other) == other


def test_the_first_stop_of_a_page_leads_to_its_text():
    made = book_finish.skippable('<body class="x">\n<nav></nav><main><p>a</p></main></body>')
    assert made.index("Skip to the text") < made.index("<nav>")
    assert '<main id="text" tabindex="-1"><p>a</p></main>' in made


SOURCE = (
    '<a href="https://github.com/vllm-project/vllm/blob/0decac0/vllm/v1/request.py#L1">'
    "<code>vllm/v1/request.py:1</code></a>"
)


def test_citations_in_brackets_become_one_note_with_every_word_kept():
    mark = '<abbr class="drift" title="x">°</abbr>'
    text = f"<p>It ends ({SOURCE}{mark}\n<code>Request</code>,\n{SOURCE}).</p>"
    made = book_finish.side_notes(text)
    assert made.count('class="side"') == 1 and made.count('class="folder"') == 2
    assert book_finish.words(made) == book_finish.words(text)


@pytest.mark.parametrize(
    "text",
    [f"<p>In {SOURCE} it ends.</p>", f"<p>(see {SOURCE})</p>", "<p>(<code>a/b.py:1</code>)</p>"],
)
def test_other_citations_and_brackets_stay(text):
    assert book_finish.side_notes(text) == text

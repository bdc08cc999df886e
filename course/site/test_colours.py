"""Colours of code: the text stays, kinds are the theme's, and what is not known stays plain."""

from __future__ import annotations

import html
import re

import pytest

from course.site.colours import coloured
from mini_vllm.tests.support import for_all


def block(code: str, language: str = "python") -> str:
    return f'<pre><code class="language-{language}">{html.escape(code, quote=False)}</code></pre>'


def text_of(made: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", made))


def kinds(made: str) -> dict[str, str]:
    found = re.findall(r'<span class="hljs-(\w+)">(.*?)</span>', made, re.DOTALL)
    return {html.unescape(piece).rstrip("\n "): kind for kind, piece in found}


def test_python_has_the_kinds_that_the_theme_colours():
    made = coloured(block("@cache\ndef take(n: int) -> None:\n    return 'a<b', 3, len(n)  # so\n"))
    assert kinds(made) == {
        "@cache": "meta", "def": "keyword", "take": "title", "int": "built_in", "None": "literal",
        "return": "keyword", "'a<b'": "string", "3": "number", "len": "built_in", "# so": "comment",
    }  # fmt: skip


def test_a_session_tells_prompts_from_what_was_printed():
    made = coloured(block('$ course check 02-01\n3 passed "all"\n', "console"))
    assert kinds(made)["$"] == "meta"
    assert "passed" not in "".join(kinds(made))


@pytest.mark.parametrize("page", [block("for x in y", "text"), "<p><code>for</code></p>", ""])
def test_what_is_no_code_of_a_known_language_stays_as_it_is(page):
    assert coloured(page) == page


@pytest.mark.slow
@for_all(
    lambda st: st.text(),
    lambda st: st.sampled_from(["python", "console", "bash", "yaml"]),
    max_examples=100,
)
def test_no_sign_of_a_block_changes(code, language):
    code = code.replace("\0", "")
    assert text_of(coloured(block(code, language))) == code

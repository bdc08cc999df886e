"""Colours of code, put into the pages when they are made: no script does it while they are read.

Promises: the text of a block stays as it is, sign by sign; what a language's lexer does not name
stays plain. Classes are those of the theme's style sheets, `hljs-` and a kind; `book/theme/
highlight.js` stands where mdBook's own highlighter would be loaded.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from pygments.lexer import Lexer
from pygments.lexers.data import YamlLexer
from pygments.lexers.python import PythonLexer
from pygments.lexers.shell import BashLexer, BashSessionLexer
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, String, _TokenType

_BLOCK = re.compile(r'(<code class="language-(\w+)[^"]*"[^>]*>)([^<]*)(</code>)')
_LANGUAGES: dict[str, type[Lexer]] = {
    "python": PythonLexer, "bash": BashLexer, "console": BashSessionLexer,
    "yaml": YamlLexer,
}  # fmt: skip
_KINDS = {
    Comment: "comment",
    String: "string",
    Number: "number",
    Keyword: "keyword",
    Keyword.Constant: "literal",
    Operator.Word: "keyword",
    Name.Builtin: "built_in",
    Name.Function: "title",
    Name.Class: "title",
    Name.Decorator: "meta",
    Name.Tag: "title",
    Generic.Prompt: "meta",
}


def coloured(page: str) -> str:
    """A page's HTML with its blocks of code in colours."""
    return _BLOCK.sub(_coloured, page)


def _coloured(block: re.Match[str]) -> str:
    if block[2] not in _LANGUAGES:
        return block[0]
    text = html.unescape(block[3])
    lexer = _LANGUAGES[block[2]](stripnl=False, ensurenl=False)
    pieces = list(_pieces(lexer, text))
    if "".join(piece for _, piece in pieces) != text:  # as a lexer does with a carriage return
        return block[0]
    spans = (
        f'<span class="hljs-{kind}">{html.escape(piece, quote=False)}</span>'
        if kind
        else html.escape(piece, quote=False)
        for kind, piece in pieces
    )
    return block[1] + "".join(spans) + block[4]


def _pieces(lexer: Lexer, text: str) -> Iterator[tuple[str, str]]:
    """Runs of one kind, "" where it is plain: neighbours of a kind are one run.

    A command's numbers are parts of names and options: plain.
    """
    is_command = isinstance(lexer, (BashLexer, BashSessionLexer))
    run_kind, run = "", ""
    for token, piece in lexer.get_tokens(text):
        kind = _kind(token) if piece.strip() else run_kind
        if is_command and kind == "number":
            kind = ""
        if kind != run_kind:
            if run:
                yield run_kind, run
            run_kind, run = kind, ""
        run += piece
    yield run_kind, run


def _kind(token: _TokenType) -> str:
    while token is not None:
        if token in _KINDS:
            return _KINDS[token]
        token = token.parent
    return ""

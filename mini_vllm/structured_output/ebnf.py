"""Grammars in xgrammar's EBNF: `root ::= "a" word ("," word)*`.

Promises: literals, classes, groups, `|`, `*`, `+`, `?`, `{m,n}`, comments and rules that call each
other; a rule that begins with itself is rewritten when it does so directly, and refused by name
otherwise; so are lookahead and macros. Mirrors
`vllm/v1/structured_output/backend_xgrammar.py:77` `XgrammarBackend.compile_grammar`.
"""

from __future__ import annotations

import re

from mini_vllm.structured_output.expressions import (
    EMPTY,
    Call,
    Chars,
    Choice,
    Concat,
    Effort,
    Expression,
    Grammar,
    GrammarError,
    Repeat,
    choice,
    complement,
    concat,
    normal,
    text,
)

MAX_DEPTH = 100
"""Of groups in groups."""

MAX_COUNT = 100_000
"""In braces."""

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_DEFINES = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*::=")
_COUNTS = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d+)?\s*)?\}")
_ESCAPES = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "b": 8, "a": 7, "e": 27, "0": 0}
_WIDTHS = {"x": 2, "u": 4, "U": 8}


def parse_ebnf(source: str, effort: Effort | None = None) -> Grammar:
    """The rules of a grammar; texts must match `root`.

    Raises:
        GrammarError: not a grammar (the place is named), no `root`, an undefined or doubled rule,
            lookahead or a macro; or one that takes more than the `effort`.
    """
    return _Parser(source, effort or Effort()).whole()


class _Parser:
    def __init__(self, source: str, effort: Effort) -> None:
        self.source, self.at, self.depth = source, 0, 0
        self.effort, self._checked_at = effort, 0

    def whole(self) -> Grammar:
        rules: dict[str, Expression] = {}
        self.space()
        while self.at < len(self.source):
            name = self.name()
            defines = _DEFINES.match(self.source, self.at)
            if name is None or defines is None:
                raise self.error("need 'name ::= ...'")
            self.at = defines.end()
            if name in rules:
                self.refuse(f"rule {name!r} is defined twice")
            self.space()
            rules[name] = self.alternatives()
            self.check_effort()
        if "root" not in rules:
            raise GrammarError("grammar: has no rule named 'root', with which a text begins")
        for name, body in rules.items():
            self.effort.check()
            for called in sorted(_called(body)):
                if called not in rules:
                    raise GrammarError(
                        f"grammar: rule {name!r} uses {called!r}, which is undefined"
                    )
        return Grammar({name: _without_left(name, body) for name, body in rules.items()})

    def alternatives(self) -> Expression:
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        return choice(options)

    def sequence(self) -> Expression:
        parts: list[Expression] = []
        while (element := self.element()) is not None:
            parts.append(self.repeated(element))
            self.check_effort()
        if not parts:
            self.refuse("need an element")
        return concat(*parts)

    def repeated(self, element: Expression) -> Expression:
        bounds: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        while True:
            sign = self.source[self.at : self.at + 1]
            if sign in bounds and sign:
                self.at += 1
                element = Repeat(element, *bounds[sign])
            elif found := _COUNTS.match(self.source, self.at):
                least = int(found[1]) if len(found[1]) < 9 else MAX_COUNT + 1
                most = int(found[3]) if found[3] and len(found[3]) < 9 else None
                if found[3] and most is None:
                    most = MAX_COUNT + 1
                most = least if not found[2] else most
                if least > MAX_COUNT or (most or 0) > MAX_COUNT:
                    self.refuse(f"a repetition of more than {MAX_COUNT}")
                if most is not None and least > most:
                    self.refuse(f"a repetition of at least {least} and at most {most}")
                self.at = found.end()
                element = Repeat(element, least, most)
            else:
                self.space()
                return element

    def element(self) -> Expression | None:
        char = self.source[self.at : self.at + 1]
        if char == '"':
            return self.literal()
        if char == "[":
            return self.char_class()
        if char == "(":
            return self.group()
        if char in ("", "|", ")"):
            return None
        before = self.at
        name = self.name()
        if name is None:
            self.refuse(f"{char!r} is no element")
        if _DEFINES.match(self.source, self.at):
            self.at = before  # the next rule begins
            return None
        if self.source[self.at : self.at + 1] == "(":
            self.refuse(f"the macro {name!r} is not supported")
        return Call(name or "")

    def group(self) -> Expression:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.refuse(f"more than {MAX_DEPTH} groups in one another")
        self.take("(")
        if self.source[self.at : self.at + 1] == "=":
            self.refuse("lookahead is not supported")
        body = EMPTY if self.source[self.at : self.at + 1] == ")" else self.alternatives()
        if self.source[self.at : self.at + 1] != ")":
            self.refuse("a '(' without ')'")
        self.at += 1
        self.depth -= 1
        return body

    def literal(self) -> Expression:
        self.at += 1
        found: list[str] = []
        while (char := self.source[self.at : self.at + 1]) != '"':
            if char in ("", "\n"):
                self.refuse("a text without its closing quote")
            self.check_effort()
            found.append(chr(self.escape()) if char == "\\" else char)
            self.at += char != "\\"
        self.at += 1
        return text("".join(found)) if found else EMPTY

    def char_class(self) -> Expression:
        self.at += 1
        negated = self.source[self.at : self.at + 1] == "^"
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while (char := self.source[self.at : self.at + 1]) != "]":
            self.check_effort()
            low = self.member(char)
            high = low
            ahead = self.source[self.at : self.at + 2]
            if ahead[:1] == "-" and ahead[1:] not in ("", "]"):
                self.at += 1
                high = self.member(ahead[1:])
            if low > high:
                self.refuse(f"the range {chr(low)}-{chr(high)} is reversed")
            ranges.append((low, high))
        self.at += 1
        return Chars(complement(ranges) if negated else normal(ranges))

    def member(self, char: str) -> int:
        if char in ("", "\n"):
            self.refuse("a '[' without ']'")
        if char == "\\":
            return self.escape()
        self.at += 1
        return ord(char)

    def escape(self) -> int:
        """The code point of an escape; the place moves behind it."""
        kind = self.source[self.at + 1 : self.at + 2]
        self.at += 2
        if kind in _WIDTHS and kind:
            digits = self.source[self.at : self.at + _WIDTHS[kind]]
            if not re.fullmatch(f"[0-9a-fA-F]{{{_WIDTHS[kind]}}}", digits):
                self.refuse("an escape without its hexadecimal digits")
            self.at += len(digits)
            found = int(digits, 16)
            if found > 0x10FFFF or 0xD800 <= found <= 0xDFFF:
                self.refuse(f"code point {found:#x} is no character")
            return found
        if kind in _ESCAPES and kind:
            return _ESCAPES[kind]
        if not kind or kind.isalnum():
            self.refuse(f"the escape \\{kind} is not known")
        return ord(kind)

    def check_effort(self) -> None:
        """Once per some hundred characters."""
        if self.at >= self._checked_at:
            self.effort.check()
            self._checked_at = self.at + 256

    def name(self) -> str | None:
        found = _NAME.match(self.source, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found[0]

    def take(self, char: str) -> bool:
        found = self.source[self.at : self.at + 1] == char
        self.at += found
        if found:
            self.space()
        return found

    def space(self) -> None:
        found = _SPACE.match(self.source, self.at)
        self.at = found.end() if found else self.at

    def error(self, what: str) -> GrammarError:
        line = self.source.count("\n", 0, self.at) + 1
        return GrammarError(f"grammar: line {line}, near position {self.at}: {what}")

    def refuse(self, what: str) -> None:
        raise self.error(what)


def _called(expression: Expression) -> set[str]:
    """The rules that an expression uses."""
    if isinstance(expression, Call):
        return {expression.rule}
    if isinstance(expression, Repeat):
        return _called(expression.body)
    parts: tuple[Expression, ...] = ()
    if isinstance(expression, Concat):
        parts = expression.parts
    elif isinstance(expression, Choice):
        parts = expression.options
    return {rule for part in parts for rule in _called(part)}


def _without_left(name: str, body: Expression) -> Expression:
    """`a ::= a x | y` as `a ::= y x*`: the same texts, and it no longer begins with itself."""
    options = body.options if isinstance(body, Choice) else (body,)
    tails: list[Expression] = []
    others: list[Expression] = []
    for option in options:
        parts = option.parts if isinstance(option, Concat) else (option,)
        if parts[:1] == (Call(name),):
            if len(parts) > 1:  # `a ::= a` alone says nothing
                tails.append(concat(*parts[1:]))
        else:
            others.append(option)
    if len(others) == len(options):
        return body
    return concat(choice(others), Repeat(choice(tails), 0, None)) if tails else choice(others)

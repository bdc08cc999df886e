"""Regular expressions: from a pattern to an expression over characters.

Promises: a pattern means what it means to xgrammar, the real engine's first choice: it must match
from end to end, `.` is any character, `\\d`, `\\w` and `\\s` are ASCII (`\\s` and U+00A0), lazy is
greedy. What is not a regular language, or is refused there, is refused by name. Mirrors
`vllm/v1/structured_output/backend_xgrammar.py:77` `XgrammarBackend.compile_grammar`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mini_vllm.structured_output.expressions import (
    ANY_CHAR,
    EMPTY,
    Chars,
    Choice,
    Effort,
    Expression,
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

Ranges = tuple[tuple[int, int], ...]

_DIGITS: Ranges = ((48, 57),)
_WORDS: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACES: Ranges = ((9, 13), (32, 32), (0xA0, 0xA0))
_ECMA_SPACES: Ranges = (
    (9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "0": 0}
_REFUSED_GROUPS = {
    "=": "lookahead",
    "!": "lookahead",
    "<=": "lookbehind",
    "<!": "lookbehind",
    "P<": "named group",
    "<": "named group",
    "P=": "backreference",
    "#": "comment",
    ">": "atomic group",
}


@dataclass(frozen=True, slots=True)
class Branch:
    """One alternative of the whole pattern."""

    body: Expression
    at_start: bool
    """It begins with `^`."""
    at_end: bool
    """It ends with `$`."""


def parse_regex(pattern: str, effort: Effort | None = None) -> Expression:
    """What `pattern` matches from end to end.

    Raises:
        GrammarError: not a pattern, one that takes more than the `effort`, or one that is refused:
            lookaround, backreferences, word boundaries, flags, named groups, Unicode properties,
            anchors inside.
    """
    return choice(branch.body for branch in branches(pattern, effort or Effort()))


def branches(pattern: str, effort: Effort, ecma: bool = False) -> list[Branch]:
    """The alternatives of a pattern, with their anchors.

    Args:
        pattern: the text of the pattern.
        effort: what may be spent.
        ecma: `.` stops at line ends and `\\s` is JavaScript's, as a JSON Schema `pattern` asks.

    Raises:
        GrammarError: see `parse_regex`.
    """
    return _Parser(pattern, effort, ecma).whole()


class _Parser:
    def __init__(self, pattern: str, effort: Effort, ecma: bool) -> None:
        self.pattern, self.at, self.depth = pattern, 0, 0
        self.effort, self._checked_at = effort, 0
        self.spaces = _ECMA_SPACES if ecma else _SPACES
        self.dot = Chars(complement(_LINE_ENDS)) if ecma else ANY_CHAR

    def whole(self) -> list[Branch]:
        found = []
        while True:
            at_start = False
            while self.take("^"):
                at_start = True
            body = self.sequence()
            at_end = False
            while self.take("$"):
                at_end = True
            found.append(Branch(body, at_start, at_end))
            if self.at == len(self.pattern):
                return found
            if not self.take("|"):
                self.refuse("a ')' without '('" if self.peek() == ")" else "'$' before the end")

    def alternatives(self) -> Expression:
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        return choice(options)

    def sequence(self) -> Expression:
        parts: list[Expression] = []
        self.check_effort()
        while (char := self.peek()) and char not in "|)$":
            atom = self.atom()
            parts.append(self.repeated(atom))
            self.check_effort()
        return concat(*parts) if parts else EMPTY

    def repeated(self, atom: Expression) -> Expression:
        counts = self.counts()
        if counts is None:
            return atom
        least, most = counts
        self.take("?")  # lazy: another order of search, the same texts
        if self.peek() in ("*", "+", "?", "{") and self.peek():
            self.refuse("two repetitions in a row")
        return Repeat(atom, least, most)

    def counts(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return bounds
        if not self.take("{"):
            return None
        least = self.count()
        most: int | None = least
        if self.take(","):
            most = None if self.peek() == "}" else self.count()
        if not self.take("}"):
            self.refuse("a repetition count that is not {n}, {n,} or {n,m}")
        if most is not None and least > most:
            self.refuse(f"a repetition of at least {least} and at most {most}")
        return least, most

    def count(self) -> int:
        start = self.at
        while self.peek() and self.peek() in "0123456789":
            self.at += 1
        digits = self.pattern[start : self.at]
        if not digits:
            self.refuse("a repetition count that is not {n}, {n,} or {n,m}")
        if len(digits) > 6 or int(digits) > MAX_COUNT:
            self.refuse(f"a repetition of more than {MAX_COUNT}")
        return int(digits)

    def atom(self) -> Expression:
        char = self.next()
        if char == "(":
            return self.group()
        if char == "[":
            return self.char_class()
        if char == ".":
            return self.dot
        if char == "\\":
            found = self.escape()
            return text(chr(found)) if isinstance(found, int) else Chars(found)
        if char in "*+?{":
            self.refuse(f"{char!r} with nothing to repeat")
        if char == "^":
            self.refuse("'^' after the start")
        if 0xD800 <= ord(char) <= 0xDFFF:
            self.refuse("half a surrogate pair")
        return text(char)

    def group(self) -> Expression:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.refuse(f"more than {MAX_DEPTH} groups in one another")
        if self.take("?") and not self.take(":"):
            rest = self.pattern[self.at : self.at + 2]
            names = sorted(_REFUSED_GROUPS, key=len, reverse=True)
            kind = next((n for n in names if rest.startswith(n)), None)
            self.refuse("flags in a group" if kind is None else _REFUSED_GROUPS[kind])
        body = self.alternatives()
        if self.peek() == "$":
            self.refuse("'$' inside a group")
        if not self.take(")"):
            self.refuse("a '(' without ')'")
        self.depth -= 1
        return body

    def char_class(self) -> Expression:
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        first = True
        while first or self.peek() != "]":
            if not self.peek():
                self.refuse("a '[' without ']'")
            if first and self.peek() == "]":
                if negated:
                    break
                self.refuse("an empty class")
            first = False
            self.check_effort()
            low = self.member()
            ahead = self.pattern[self.at : self.at + 2]
            if isinstance(low, int) and ahead[:1] == "-" and ahead[1:] not in ("", "]"):
                self.at += 1
                high = self.member()
                if not isinstance(high, int):
                    self.refuse("a range that ends with a class")
                elif low > high:
                    self.refuse(f"the range {chr(low)}-{chr(high)}, which is reversed")
                else:
                    ranges.append((low, high))
            else:
                ranges += [(low, low)] if isinstance(low, int) else low
        self.take("]")
        return Chars(complement(ranges) if negated else normal(ranges))

    def member(self) -> int | Ranges:
        char = self.next()
        return self.escape(in_class=True) if char == "\\" else ord(char)

    def escape(self, in_class: bool = False) -> int | Ranges:
        """What stands behind a backslash: a code point, or a class."""
        if not self.peek():
            self.refuse("a backslash at the end")
        char = self.next()
        classes = {"d": _DIGITS, "w": _WORDS, "s": self.spaces}
        if char.lower() in classes:
            ranges = classes[char.lower()]
            return ranges if char.islower() else complement(ranges)
        if char == "b" and in_class:
            return 8
        if char in "bB":
            self.refuse("a word boundary")
        if char in "pP":
            self.refuse("a Unicode property")
        if char in "123456789" or char == "k":
            self.refuse("a backreference")
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "x":
            return self.hexadecimal(2)
        if char == "u":
            if self.take("{"):
                end = self.pattern.find("}", self.at)
                found = self.hexadecimal(end - self.at)
                self.take("}")
                return found
            return self.hexadecimal(4)
        if char == "c" and self.peek().isalpha() and self.peek().isascii():
            return ord(self.next()) % 32
        if char.isalnum() and char.isascii():
            self.refuse(f"the escape \\{char}")
        return ord(char)

    def hexadecimal(self, count: int) -> int:
        digits = self.pattern[self.at : self.at + max(count, 0)]
        hexadecimal = "0123456789abcdefABCDEF"
        if not digits or len(digits) < count or not all(d in hexadecimal for d in digits):
            self.refuse("an escape without its hexadecimal digits")
        self.at += count
        found = int(digits, 16)
        if found > 0x10FFFF or 0xD800 <= found <= 0xDFFF:
            self.refuse(f"code point {found:#x}, which is no character")
        return found

    def check_effort(self) -> None:
        """Once per some hundred characters."""
        if self.at >= self._checked_at:
            self.effort.check()
            self._checked_at = self.at + 256

    def peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def next(self) -> str:
        self.at += 1
        return self.pattern[self.at - 1]

    def take(self, char: str) -> bool:
        found = self.peek() == char
        self.at += found
        return found

    def refuse(self, what: str) -> None:
        shown = self.pattern if len(self.pattern) <= 60 else self.pattern[:57] + "..."
        raise GrammarError(f"regex={shown!r}: {what} at position {self.at} is not supported")


def search(pattern: str, effort: Effort | None = None) -> Expression:
    """Texts that a JSON Schema `pattern` finds something in: anything around what is not anchored.

    Raises:
        GrammarError: see `parse_regex`.
    """
    anything = Repeat(ANY_CHAR, 0, None)
    found: list[Expression] = []
    for branch in branches(pattern, effort or Effort(), ecma=True):
        before = EMPTY if branch.at_start else anything
        found.append(concat(before, branch.body, EMPTY if branch.at_end else anything))
    return found[0] if len(found) == 1 else Choice(tuple(found))

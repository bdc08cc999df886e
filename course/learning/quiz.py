"""`quiz.yaml` of a phase: questions with an answer that can be checked, and when each comes back.

A question has `id` ("03-ex-04"), `source` ("EXERCISES.md, 4"), `ask`, `explain`, and one of:
`number` (with `unit`, and `tolerance`, relative, 0.01 unless given), `choices` with `choice`,
`accept` (short answers), `where` (lines of the pinned tree, cited as a page cites them: any line of
them answers, as path:line). `wrong`, where there is one, maps a wrong answer to what was thought.
A number, right or wrong, may be written as arithmetic ("16e9 / (64 * 131072)"). A `choice` without
`choices` stands among the answers of `wrong`, in an order that tells nothing.
A comma before exactly three digits groups thousands; any other single comma is a decimal one.
Promises: a file that loads has unique ids, sources that are on their
pages and no unknown key; an answer is checked by its meaning: letters or texts of choices, units
of the same kind, neither case nor punctuation. The book and the command read the same `Question`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import operator
import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import yaml

from course.files import locked, write_atomically
from course.truth.citations import Finding
from labkit.yaml_files import read_yaml

FILE = "quiz.yaml"
TOLERANCE = 0.01
WRONG_TOLERANCE = 0.005
"""How near a wrong answer that is not whole must be to its number, at least."""
KINDS = ("number", "choices", "accept", "where")
READING = "-re-"
"""In the id of a question that is answered with the pinned tree open: `course read` asks those."""
_NUMBER = re.compile(
    r"[~≈=\s]*([-+]?(?:\d[\d,_]*)?\.?\d+(?:e[-+]?\d+)?)(?:\s*/\s*(\d+))?\s*(.*)", re.I
)
_GROUPED = re.compile(r"(?<=\d)[ \xa0\u2009\u202f'](?=\d{3}(?!\d))")
"""Between thousands: 1 500 and 1'500."""
_POWER = re.compile(r"(?<=\d)\s*[x×*·]\s*10\s*(?:\^|\*\*)\s*([-+]?\d+)", re.I)
_PER_CENT = ("%", "percent", "per cent")
_PLACE = re.compile(r"((?:[\w.-]+/)*[\w.-]+\.[A-Za-z]+)(?::|#L| +line +| +)(\d+)\S*", re.ASCII)
"""A path, or its end, and a line: as cited, as in an address of GitHub, or in words."""
_LINES = re.compile(r"([\w./-]+):(\d+)(?:-(\d+))? \S+", re.ASCII)
_SIZES = {"b": 1.0, "bytes": 1.0, "byte": 1.0}
_SIZES |= {f"{p}ib": 2.0 ** (10 * n) for n, p in enumerate("kmgt", 1)}
_SIZES |= {f"{p}b": 10.0 ** (3 * n) for n, p in enumerate("kmgt", 1)}
_TIMES = {"s": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_TIMES |= {"µs".casefold(): 1e-6}  # folded, the micro sign is the Greek letter


@dataclass(frozen=True, slots=True)
class Question:
    """One question; exactly one of `KINDS` is given."""

    id: str
    source: str
    ask: str
    explain: str
    number: float | None = None
    tolerance: float = TOLERANCE
    unit: str = ""
    choices: tuple[str, ...] = ()
    choice: str = ""
    accept: tuple[str, ...] = ()
    where: str = ""
    """`PATH:FIRST-LAST SYMBOL` in the pinned tree."""
    wrong: tuple[tuple[str, str], ...] = ()
    """Wrong answers, each with the misconception that leads to it; the first that fits counts."""

    @property
    def answer(self) -> str:
        """The right answer, to be shown."""
        if self.number is not None:
            whole = float(self.number).is_integer()
            number = int(self.number) if whole else float(f"{self.number:.6g}")
            return f"{number:,} {self.unit}".rstrip().replace(" %", "%")
        return self.where or self.choice or self.accept[0]

    def check(self, given: str) -> bool:
        """Whether `given` answers it."""
        if self.number is not None:
            return self._is_number(given)
        if self.choices:
            letters = dict(zip(string.ascii_lowercase, self.choices, strict=False))
            known = {_plain(choice): choice for choice in self.choices}
            return (known.get(_plain(given)) or letters.get(_plain(given))) == self.choice
        if self.where:
            path, first, last = _cited(self.where)
            place = _place(given)
            return place is not None and _names(place[0], path) and first <= place[1] <= last
        return _plain(given) in map(_plain, self.accept)

    def misread(self, given: str) -> str:
        """Why `given` cannot be an answer at all, right or wrong; empty when it can be."""
        if not given.strip():
            return "Nothing was typed. Ctrl-D ends the questions."
        if self.number is not None and not _typed(given):
            return f"{given.strip()!r} is not a number. A unit may follow: 1.5 GiB, 1/4, 25 %."
        if self.choices:
            letters = string.ascii_lowercase[: len(self.choices)]
            if _plain(given) not in {*letters, *map(_plain, self.choices)}:
                return f"{given.strip()!r} is none of the choices: a letter, {', '.join(letters)}."
        if self.where and _place(given) is None:
            return f"{given.strip()!r} is no path:line, as in vllm/v1/core/sched/scheduler.py:329."
        return ""

    def misconception(self, given: str) -> str:
        """What was thought by who answers `given`, as far as the question knows; else empty."""
        for answer, thought in self.wrong:
            one = replace(self, **self._with(answer))
            if one.check(given):
                return thought
        place = _place(given) if self.where else None
        if place and _names(place[0], _cited(self.where)[0]) and not self.check(given):
            return "The file is right; it is decided in other lines of it."
        return "" if self.number is None or self.check(given) else self._slip(given)

    def _slip(self, given: str) -> str:
        """What a wrong number says about its unit."""
        value = self.value_of(given)
        typed = _typed(given)
        if value is None:
            theirs = typed[3].strip() if typed else ""
            return f"Wanted are {self.unit}: {theirs} measures something else." if theirs else ""
        if not self.number or not value:
            return ""
        near = max(self.tolerance, WRONG_TOLERANCE)
        for factor, thought in _slips(self.unit.casefold().strip()):
            if abs(value / self.number / factor - 1) <= near:
                return thought
        return ""

    def _with(self, answer: str) -> dict[str, Any]:
        """The fields of the question that this would be the right answer to."""
        if self.number is not None:
            number = float(answer)
            near = 0.0 if number.is_integer() else WRONG_TOLERANCE
            return {"number": number, "tolerance": max(near, self.tolerance)}
        if self.where:
            return {"where": answer}
        return {"choice": answer} if self.choices else {"accept": (answer,)}

    def read_as(self, given: str) -> str:
        """How a number was read, in our own form; empty for other answers."""
        match = _typed(given)
        if self.number is None or not match:
            return ""
        below = f" / {match[2]}" if match[2] else ""
        return f"{_shown(_value(match[1]))}{below} {match[3].strip()}".rstrip()

    def _is_number(self, given: str) -> bool:
        value = self.value_of(given)
        if value is None or self.number is None:
            return False
        return abs(value - self.number) <= self.tolerance * abs(self.number)

    def value_of(self, given: str) -> float | None:
        """A number in the question's unit; None where it is none, or of another kind."""
        match = _typed(given)
        below = float(match[2] or 1) if match else 0
        if not match or below == 0:
            return None
        value = _value(match[1]) / below
        if math.isnan(value):
            return None
        own, theirs = self.unit.casefold().strip(), match[3].casefold().strip(" .")
        if theirs in _PER_CENT and own != "%":
            value /= 100
        elif match[2] and not theirs and own == "%":
            value *= 100  # 1/2, where per cent are asked for
        for table in (_SIZES, _TIMES):
            if theirs in table and own in table:
                value *= table[theirs] / table[own]
            elif own and theirs in table and (len(theirs) > 1 or own in {*_SIZES, *_TIMES}):
                return None  # a size where steps are asked for; "8 b" may still be eight blocks
        return value


def _slips(own: str) -> Iterator[tuple[float, str]]:
    """Factors by which a number with this unit is often off, and what each says."""
    yield -1.0, "The size is right, the sign is not."
    if own in ("", *_PER_CENT):
        yield 100.0, "A share and a percentage differ by a factor of 100."
        yield 0.01, "A share and a percentage differ by a factor of 100."
    for factor in (1e3, 1e-3, 1e6, 1e-6, 1e9, 1e-9):
        yield factor, "The digits are right. A prefix or a power of ten is not."
    if own in _SIZES:
        yield 8.0, "Those are bits. A byte has 8."
        yield 0.125, "A byte has 8 bits: you divided by them."
        for factor in (1.024, 1.048576, 1.073741824):
            yield factor, "A unit of 1024 was taken for one of 1000: GB is 1e9 bytes, GiB 2^30."
            yield 1 / factor, "A unit of 1000 was taken for one of 1024: GB is 1e9 bytes, GiB 2^30."


def _typed(given: str) -> re.Match[str] | None:
    """A number, a divisor and what follows, of an answer as it was typed; None without a number."""
    text = _POWER.sub(r"e\1", _GROUPED.sub("", given.strip()))
    return _NUMBER.fullmatch(text)


def number_of(text: str) -> float:
    """A number without a unit, however it was typed; NaN where it is none."""
    match = _typed(text)
    below = float(match[2] or 1) if match and not match[3].strip() else 0
    return _value(match[1]) / below if match and below else math.nan


def _value(text: str) -> float:
    """A number as it was typed: 1,500 is fifteen hundred, 7,5 is seven and a half, 1,5,2 is
    none."""
    decimal = re.fullmatch(r"([-+]?\d*),(\d+)((?:e[-+]?\d+)?)", text, re.I)
    if decimal and (len(decimal[2]) != 3 or not decimal[1].strip("+-").lstrip("0")):
        return float(f"{decimal[1]}.{decimal[2]}{decimal[3]}")
    whole = re.split(r"[.e]", text, maxsplit=1, flags=re.I)[0]
    if "," in whole and not re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+", whole):
        return math.nan  # 1,5,2
    return float(re.sub("[,_]", "", text))


def _shown(value: float) -> str:
    """A number in our own form, in which a script writes it too."""
    return f"{value + 0.0:.10g}"  # never -0


def _cited(where: str) -> tuple[str, int, int]:
    """The path, the first and the last line of a `where`, which is sound."""
    match = _LINES.fullmatch(where)
    assert match is not None, where
    return match[1], int(match[2]), int(match[3] or match[2])


def _place(given: str) -> tuple[str, int] | None:
    """The path and the line that an answer names, the first line of a range; else None."""
    match = _PLACE.search(given.replace("`", "").replace("\\", "/"))
    return (match[1], int(match[2])) if match else None


def _names(given: str, path: str) -> bool:
    """Whether an answer's path means this one: it ends with it, or is an end of it."""
    return f"/{given}".endswith(f"/{path}") or f"/{path}".endswith(f"/{given}")


def _plain(text: str) -> str:
    """Without case, punctuation and article; an answer that is nothing else stays."""
    words = re.sub(r"[\W_]+", " ", text.casefold()).split()
    words = words[1:] if len(words) > 1 and words[0] in ("the", "a", "an") else words
    return " ".join(words) or text.strip()


# ------------------------------------------------------------------ reading


def files(root: Path, paths: Sequence[Path] = ()) -> list[Path]:
    """Every quiz of the phases, in course order; with `paths`, those in or at them."""
    found = sorted(root.resolve().glob(f"phase-*/{FILE}"))
    wanted = [path.resolve() for path in paths]
    return [f for f in found if not wanted or any(f == w or w in f.parents for w in wanted)]


def load(path: Path) -> tuple[list[Question], list[Finding]]:
    """The questions of a file that are sound, and what is wrong with the others, by line."""
    try:
        text = path.read_text(encoding="utf-8")
        data = read_yaml(text)
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        return [], [Finding(path, 1, f"not valid YAML: {' '.join(str(error).split())}")]
    if not isinstance(data, list):
        return [], [Finding(path, 1, "must be a list of questions")]
    lines = [n for n, line in enumerate(text.splitlines(), 1) if re.match(r"- ", line)]
    questions: list[Question] = []
    findings = []
    for place, given_item in enumerate(data):
        item = _written_out(given_item)
        problems = list(_problems(item, path, {question.id for question in questions}))
        line = lines[place] if len(lines) == len(data) else 1
        name = item.get("id", place + 1) if isinstance(item, dict) else place + 1
        findings += [Finding(path, line, f"question {name}: {problem}") for problem in problems]
        if problems:
            continue
        question = _question(item)
        for given, _ in question.wrong:
            if question.check(given):
                findings.append(Finding(path, line, f"question {name}: wrong: {given!r} is right"))
        questions.append(question)
    return questions, findings


def _written_out(item: Any) -> Any:
    """An item with its arithmetic done, and with the choices that `wrong` tells."""
    if not isinstance(item, dict):
        return item
    item = dict(item)
    wrong = item.get("wrong")
    if "number" in item:
        item["number"] = _computed(item["number"])
        if isinstance(wrong, dict):
            item["wrong"] = {_computed(given): thought for given, thought in wrong.items()}
    elif "choice" in item and "choices" not in item and isinstance(wrong, dict):
        texts = [text for text in (item["choice"], *wrong) if isinstance(text, str)]
        item["choices"] = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
    return item


_OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "ceil": math.ceil,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "min": min,
    "max": max,
    "round": round,
}


def _computed(given: Any) -> Any:
    """The value of a number written as arithmetic; what is not one stays as it is."""
    if not isinstance(given, str):
        return given
    try:
        return _worth(ast.parse(given, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, TypeError):
        return given


def _worth(node: ast.expr) -> float:
    match node:
        case ast.Constant(int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_worth(left), _worth(right))
        case ast.UnaryOp(kind, operand) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_worth(operand))
        case ast.Call(ast.Name(name), arguments, []) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_worth, arguments))
    raise ValueError(ast.dump(node))


def _question(item: dict[str, Any]) -> Question:
    lists: dict[str, Any] = {key: tuple(item[key]) for key in ("choices", "accept") if key in item}
    if "wrong" in item:
        lists["wrong"] = tuple((str(given), thought) for given, thought in item["wrong"].items())
    return Question(**(item | lists))


def _problems(item: Any, path: Path, taken: set[str]) -> Iterator[str]:
    if not isinstance(item, dict):
        yield f"must be a mapping of keys, not {item!r}"
        return
    for key in item.keys() - {field.name for field in fields(Question)}:
        yield f"unknown key {key!r}"
    texts = [key for key in ("id", "source", "ask", "explain", "unit", "choice") if key in item]
    for key in dict.fromkeys(["id", "source", "ask", "explain", *texts]):
        if not isinstance(item.get(key), str) or not item[key].strip():
            yield f"{key} must be a text, not {item.get(key)!r}"
    kinds = [kind for kind in KINDS if kind in item]
    if len(kinds) != 1:
        yield f"needs exactly one of {', '.join(KINDS)}, has {', '.join(kinds) or 'none'}"
    number = item.get("number", 0)
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        yield f"number must be a number, not {number!r}"
    tolerance = item.get("tolerance", 0)
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float):
        yield f"tolerance must be a number, not {tolerance!r}"
    elif not 0 <= tolerance < 1:
        yield f"tolerance is {tolerance}: relative, from 0 to below 1"
    for key in ("choices", "accept"):
        yield from _list_problems(key, item.get(key, ["a", "b"]))
    yield from _wrong_problems(item)
    belongs = {"number": ("tolerance", "unit"), "choices": ("choice",)}
    for kind, keys in belongs.items():
        for key in keys:
            if key in item and kind not in item:
                yield f"{key} has no meaning without {kind}"
    if "where" in item and not (isinstance(item["where"], str) and _LINES.fullmatch(item["where"])):
        yield f"where must be PATH:FIRST-LAST SYMBOL, not {item['where']!r}"
    if isinstance(item.get("choices"), list) and item.get("choice") not in item["choices"]:
        yield f"choice {item.get('choice')!r} is none of its choices"
    if isinstance(item.get("id"), str):
        if not re.fullmatch(r"\d\d-(ex|in|gu|re)-\d\d", item["id"]):
            yield "the id must be phase, ex, in, gu or re, number, as in 03-ex-04"
        elif item["id"][:2] != path.parent.name.partition("-")[2][:2]:
            yield f"the id does not agree with the folder {path.parent.name}"
        if item["id"] in taken:
            yield "the id is used twice"
    if isinstance(item.get("source"), str):
        for source in item["source"].split(";"):
            if problem := source_problem(path.parent, source.strip()):
                yield problem


def _wrong_problems(item: dict[str, Any]) -> Iterator[str]:
    """What is wrong with `wrong`: each key is an answer that could be given, and is not right."""
    wrong = item.get("wrong", {})
    if not isinstance(wrong, dict) or not all(
        isinstance(thought, str) and thought.strip() for thought in wrong.values()
    ):
        yield f"wrong must map answers to texts, not {wrong!r}"
        return
    for given in wrong:
        if "number" in item and (isinstance(given, bool) or not isinstance(given, int | float)):
            yield f"wrong: {given!r} is no number"
        elif isinstance(item.get("choices"), list) and given not in item["choices"]:
            yield f"wrong: {given!r} is none of its choices"
        elif not isinstance(given, str | int | float):
            yield f"wrong: {given!r} is no answer"
        elif "where" in item and not (isinstance(given, str) and _LINES.fullmatch(given)):
            yield f"wrong: {given!r} is no PATH:FIRST-LAST SYMBOL"
        elif isinstance(item.get("accept"), list) and not isinstance(given, str):
            yield f"wrong: {given!r} must be a text (in quotes)"


def _list_problems(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        yield f"{key} must be a list of texts (in quotes), not {value!r}"
    elif len(value) < (2 if key == "choices" else 1):
        yield f"{key} has too few entries"
    elif key == "choices" and len({_plain(each) for each in value}) < len(value):
        yield "two of its choices are the same text"


def source_problem(phase: Path, source: str) -> str:
    """Why "PAGE, PLACE" is not on the page; the place is a number, a heading, words, or several."""
    name, _, place = source.partition(",")
    page = phase / name.strip()
    if not page.is_file():
        return f"source: there is no page {name.strip()}"
    text = _flat(page.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    place = _flat(place.strip())
    if any(place and place in head for head in heads):
        return ""
    numbers = {match[1] for head in heads if (match := re.match(r"q?(\d+)[.:)]? ", head))}
    numbers |= set(re.findall(r"^ *(\d+)[.)] ", text, re.MULTILINE))
    for part in re.split(r"[,.:]\s+| in (?=section)", place):
        number = re.search(r"(\d+)$", part)
        words = re.sub(r"\b(?:section|exercise|question|q)?\s*\d+$", "", part).strip()
        if number and number[1] not in numbers:
            return f"source: {name} has no number {number[1]}"
        if words and words not in text:
            return f"source: {name} has no {words!r}"
    return "" if place else f"source: say where on {name}"


def _flat(text: str) -> str:
    return text.replace("`", "").casefold()


def document(questions: Sequence[Question]) -> str:
    """The questions as JSON, for a script of the book: a list of objects with every key."""
    return json.dumps([asdict(question) for question in questions], ensure_ascii=False)


# ------------------------------------------------------------------ when each comes back

DAYS = (0, 1, 3, 7, 21, 60)
"""Days until a question comes back, by its box; a wrong answer puts it into the first."""


class Boxes:
    """Leitner's boxes, in `.course/quiz.json`: question id to (box, the day it is due)."""

    def __init__(self, folder: Path, today: date | None = None) -> None:
        self.path = folder / "quiz.json"
        self.today = today or date.today()
        self.cards = self._read()

    def _read(self) -> dict[str, tuple[int, date]]:
        """What is there; what cannot be read is begun anew, since it holds no work."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))["cards"]
            cards = {key: (int(box), date.fromisoformat(due)) for key, (box, due) in data.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}
        return {key: (min(max(box, 0), len(DAYS) - 1), due) for key, (box, due) in cards.items()}

    def put(self, name: str, right: bool) -> None:
        """Keep an answer: a box further, or back into the first.

        Raises:
            OSError: it cannot be kept.
        """
        with locked(self.path.with_name("lock")):
            self.cards = self._read()
            box = min(self.cards.get(name, (0, self.today))[0] + 1, len(DAYS) - 1) if right else 0
            self.cards[name] = box, self.today + timedelta(DAYS[box])
            cards = {key: [box, due.isoformat()] for key, (box, due) in sorted(self.cards.items())}
            write_atomically(self.path, json.dumps({"version": 1, "cards": cards}, indent=1) + "\n")

    def due(self, questions: Sequence[Question]) -> list[Question]:
        """Those to ask today: the due ones, the lowest box first, then those never asked."""
        known = [q for q in questions if q.id in self.cards and self.cards[q.id][1] <= self.today]
        known.sort(key=lambda question: self.cards[question.id])
        return known + [question for question in questions if question.id not in self.cards]

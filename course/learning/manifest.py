"""lab.yaml: read, validated, and its misconceptions applied.

Promises: a manifest that loads has only known keys of the right types; every problem is
reported at once, each with the file and the key. Its keys:

    id, title, tag, minutes     "02-01", words, one of TAGS, an estimate
    kind                        what the learner mostly does, one of KINDS
    yours                       functions and methods of solution.py that the learner writes, and
                                classes whose methods the learner chooses
    hidden                      what else of solution.py the starter does not show
    hints                       per test, from a nudge to nearly the answer: texts, or mappings
                                {field: waiting, text: "..."} shown only when the last failure named
                                that field (a replay's difference reads "seed S, step K, FIELD")
    misconceptions              wrong solutions: name, why, replace, with, caught_by, inside
    predictions                 by name: ask, choices, tolerance, means; see `predictions.py`
    part                        the engine part the lab supplies to `course run --mine`
    run_on                      where run.py works: gpu, cpu

Steps towards a solution stand in the hints and nowhere else: a starter says what must hold.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from course.learning import predictions
from course.learning.predictions import Prediction
from labkit.yaml_files import read_yaml

TAGS = ("CPU-OK", "GPU-OPT", "GPU-REQ")
DEVICES = ("gpu", "cpu")
KINDS = {
    "build": "write a part of an engine",
    "mend": "repair what is given and decides wrongly",
    "find": "say from what is given what went wrong, and where",
    "measure": "predict counts or times, then count or time them",
    "read": "take what the real engine says, or its source, apart",
    "design": "choose a rule where several would do",
}
REQUIRED = {
    "id": str,
    "title": str,
    "tag": str,
    "kind": str,
    "minutes": int,
    "yours": list,
    "hints": dict,
}
OPTIONAL = {
    "hidden": list,
    "part": str,
    "run_on": list,
    "misconceptions": list,
    "predictions": dict,
}
MISCONCEPTION_REQUIRED = ("name", "why", "replace", "with", "caught_by")
MISCONCEPTION_OPTIONAL = ("inside",)


class ManifestError(ValueError):
    """What is wrong with a lab.yaml, one problem per line of the message."""


@dataclass(frozen=True, slots=True)
class Misconception:
    """A wrong solution a learner may believe in, and the test that must catch it."""

    name: str
    why: str
    replace: str
    with_: str
    caught_by: str
    inside: str | None = None


@dataclass(frozen=True, slots=True)
class Hint:
    """One hint; with a `field`, only for failures that name it."""

    text: str
    field: str = ""


def fitting(hints: Sequence[Hint], failure: str) -> list[Hint]:
    """The hints for a failure, in their order: the general ones, and those for its field.

    Where `failure` is the difference of a replay its field is the one meant; elsewhere every field
    that stands in it as a word is.
    """
    told = re.search(r"\bseed \d+[^\n]*, step \d+, (\w+)", failure)
    named = {told[1]} if told else set(re.findall(r"\w+", failure))
    return [hint for hint in hints if not hint.field or hint.field in named]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The validated content of a lab.yaml."""

    id: str
    title: str
    tag: str
    kind: str
    """What the learner mostly does, a key of KINDS."""
    minutes: int
    yours: tuple[str, ...]
    """What of solution.py the learner writes; see `starters.py`."""
    hints: dict[str, tuple[Hint, ...]]
    hidden: tuple[str, ...] = ()
    misconceptions: tuple[Misconception, ...] = ()
    part: str | None = None
    run_on: tuple[str, ...] = ("gpu",)
    """Where run.py works: on a CUDA GPU, on a CPU."""
    predictions: dict[str, Prediction] = field(default_factory=dict)


def load(path: Path) -> Manifest:
    """Read and validate `path`.

    Raises:
        ManifestError: naming the file and every key that is missing, unknown or of a wrong type.
    """
    try:
        data = read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ManifestError(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except RecursionError:
        raise ManifestError(f"{path}: not a manifest: nested too deeply") from None
    except yaml.YAMLError as error:
        raise ManifestError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    problems = list(_problems(data, path))
    if problems:
        raise ManifestError("\n".join(f"{path}: {problem}" for problem in problems))
    return Manifest(
        id=data["id"],
        title=data["title"],
        tag=data["tag"],
        kind=data["kind"],
        minutes=data["minutes"],
        yours=tuple(data["yours"]),
        hidden=tuple(data.get("hidden", ())),
        part=data.get("part"),
        run_on=tuple(data.get("run_on", ("gpu",))),
        predictions=predictions.from_manifest(data.get("predictions", {})),
        hints={
            test: tuple(Hint(**each) if isinstance(each, dict) else Hint(each) for each in several)
            for test, several in data["hints"].items()
        },
        misconceptions=tuple(
            Misconception(
                name=item["name"],
                why=item["why"],
                replace=item["replace"],
                with_=item["with"],
                caught_by=item["caught_by"],
                inside=item.get("inside"),
            )
            for item in data.get("misconceptions", [])
        ),
    )


def _problems(data: Any, path: Path) -> Any:
    if not isinstance(data, dict):
        yield f"must be a mapping of keys, not {type(data).__name__}"
        return
    known = REQUIRED | OPTIONAL
    for key in data:
        if key not in known:
            yield f"unknown key {key!r}; the keys are {', '.join(known)}"
    for key in REQUIRED:
        if key not in data:
            yield f"missing key {key!r}"
    for key, kind in known.items():
        if key in data and (not isinstance(data[key], kind) or isinstance(data[key], bool)):
            yield f"{key} must be {kind.__name__}, not {data[key]!r}"
    if isinstance(data.get("tag"), str) and data["tag"] not in TAGS:
        yield f"tag {data['tag']!r} must be one of {', '.join(TAGS)}"
    if isinstance(data.get("kind"), str) and data["kind"] not in KINDS:
        yield f"kind {data['kind']!r} must be one of {', '.join(KINDS)}"
    if isinstance(data.get("minutes"), int) and data["minutes"] < 1:
        yield f"minutes {data['minutes']} must be 1 or more"
    if isinstance(data.get("id"), str):
        expected = id_of(path.parent)
        if not re.fullmatch(r"\d\d-\d\d", data["id"]):
            yield f'id {data["id"]!r} must be phase-lab, as in "02-01"'
        elif expected and expected != data["id"]:
            yield f"id {data['id']!r} does not agree with the folder, which says {expected!r}"
    for key in ("yours", "hidden"):
        names = data.get(key)
        if isinstance(names, list) and (not names or not all(map(_is_dotted, names))):
            yield f"{key} {names!r} must be a list of names in solution.py, such as Class.method"
    where = data.get("run_on", ["gpu"])
    if isinstance(where, list) and (not where or any(each not in DEVICES for each in where)):
        yield f"run_on {where!r} must be a list of {' and '.join(DEVICES)}"
    hints = data.get("hints")
    for test, texts in hints.items() if isinstance(hints, dict) else ():
        if not (isinstance(texts, list) and texts and all(map(_is_hint, texts))):
            yield f"hints.{test} must be a list of texts, or of mappings of field and text"
        elif not any(isinstance(text, str) for text in texts):
            yield f"hints.{test} must have a text for every failure, one without a field"
    yield from predictions.problems_of(data.get("predictions"))
    items = data.get("misconceptions")
    seen: set[str] = set()
    for number, item in enumerate(items if isinstance(items, list) else []):
        where = f"misconceptions[{number}]"
        if not isinstance(item, dict):
            yield f"{where} must be a mapping of keys, not {type(item).__name__}"
            continue
        where = f"misconception {item.get('name', number)!r}"
        for key in item:
            if key not in MISCONCEPTION_REQUIRED + MISCONCEPTION_OPTIONAL:
                yield f"{where}: unknown key {key!r}"
            elif not isinstance(item[key], str):
                yield f"{where}: {key} must be a text, not {item[key]!r}"
        for key in MISCONCEPTION_REQUIRED:
            if key not in item:
                yield f"{where}: missing key {key!r}"
        name = item.get("name")
        if isinstance(name, str):
            if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
                yield f"{where}: the name must be lower-case words joined by hyphens"
            if name in seen:
                yield f"{where}: the name is used twice"
            seen.add(name)


def _is_dotted(name: Any) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))


def _is_hint(entry: Any) -> bool:
    if isinstance(entry, dict):
        texts = all(isinstance(value, str) and value for value in entry.values())
        return entry.keys() == {"field", "text"} and texts
    return isinstance(entry, str)


def id_of(folder: Path) -> str | None:
    """`"02-01"` for `.../phase-02-x/labs/lab-01-y`; None where the folders are named otherwise."""
    lab = re.match(r"lab-(\d\d)", folder.name)
    phase = re.match(r"phase-(\d\d)", folder.parent.parent.name)
    return f"{phase[1]}-{lab[1]}" if lab and phase else None


def wrong_solution(source: str, item: Misconception) -> str:
    """`source`, the text of solution.py, with the misconception put in.

    Whole lines match whatever their common indentation, and `with` is indented as they are;
    where that does not give Python, and in the middle of a line, the text is put in literally.

    Raises:
        ValueError: the text to replace does not occur exactly once, changes nothing, or leaves
            something that is not Python.
    """
    start, end = _extent(source, item.inside) if item.inside else (0, len(source))
    scope = source[start:end]
    error = ""
    for mutated in _replacements(scope, item.replace, item.with_, item.inside or "solution.py"):
        if mutated == scope:
            raise ValueError("replacing changes nothing: `with` says the same as `replace`")
        result = source[:start] + mutated + source[end:]
        try:
            compile(result, "solution.py", "exec")
        except SyntaxError as failure:
            error = error or f"line {failure.lineno}: {failure.msg}"
        else:
            return result
    raise ValueError(f"the wrong solution is not Python: {error}")


def _replacements(scope: str, old: str, new: str, place: str) -> list[str]:
    """`scope` with `old` replaced: by whole lines, then literally, as far as each is unique."""
    lines, block = scope.split("\n"), old.rstrip("\n").split("\n")
    found: list[tuple[int, str]] = []
    for at in range(len(lines) - len(block) + 1):
        if lines[at].endswith(block[0]):
            indent = lines[at][: len(lines[at]) - len(block[0])]
            window = lines[at : at + len(block)]
            if not indent.strip() and window == [indent + b if b else "" for b in block]:
                found.append((at, indent))
    results = []
    if len(found) == 1:
        at, indent = found[0]
        put = [indent + line if line else "" for line in new.rstrip("\n").split("\n")]
        results.append("\n".join(lines[:at] + put + lines[at + len(block) :]))
    if scope.count(old) == 1:
        results.append(scope.replace(old, new))
    if not results:
        count = len(found) or scope.count(old)
        raise ValueError(
            f"`replace` must occur exactly once in {place}; it occurs {count} times: {old!r}"
        )
    return results


def _extent(source: str, name: str) -> tuple[int, int]:
    """Character range of the function, method or class called `name` ("Class.method")."""
    body: list[ast.stmt] = ast.parse(source).body
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None = None
    for part in name.split("."):
        node = next(
            (
                n
                for n in body
                if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and n.name == part
            ),
            None,
        )
        if node is None:
            raise ValueError(f"`inside` names {name!r}, which solution.py does not define")
        body = node.body
    assert node and node.end_lineno
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    return offsets[node.lineno - 1], offsets[node.end_lineno]

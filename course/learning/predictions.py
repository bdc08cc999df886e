"""What a learner expects a lab to measure, committed before the measured value is shown.

`lab.yaml` asks, `predictions.yaml` beside the starter holds the answers (`steps: 39`; empty: not
committed), a test measures with pytest's `record_property("measured.steps", value)`. Promises: a
prediction is right, low, high or other, never a reason to fail; what stands in the learner's file
besides the answer stays.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from course.files import write_atomically
from course.learning import quiz
from labkit.yaml_files import read_yaml

FILE = "predictions.yaml"
MEANINGS = ("right", "low", "high", "other")
Answer = float | str


@dataclass(frozen=True, slots=True)
class Prediction:
    """One question: a number, or one of `choices`.

    `tolerance` is relative to the measured value; `means` says what each outcome tells, by the
    names of MEANINGS.
    """

    ask: str
    choices: tuple[str, ...] = ()
    tolerance: float = 0.0
    means: Mapping[str, str] = field(default_factory=dict)

    def read(self, given: object) -> Answer:
        """An answer as it was given: a number, or the text or the letter of a choice.

        Raises:
            ValueError: it is neither.
        """
        text = str(given).strip()
        if self.choices:
            letters = {chr(97 + place): choice for place, choice in enumerate(self.choices)}
            known = {choice.casefold(): choice for choice in self.choices}
            found = known.get(text.casefold()) or letters.get(text.casefold().rstrip(").:"))
            if found is None:
                raise ValueError(f"answer is {text!r}: give one of {', '.join(self.choices)}")
            return found
        value = quiz.number_of(text)
        if math.isnan(value):
            with contextlib.suppress(ValueError):
                value = float(text.replace("_", ""))  # 5. and 1e400, as a file may hold them
        if isinstance(given, bool) or not math.isfinite(value):
            raise ValueError(f"answer is {text!r}: give a number")
        return int(value) if value.is_integer() and abs(value) < 2**53 else value

    def judge(self, predicted: Answer, measured: Answer) -> str:
        """ "right", or on which side of the measured value the prediction lies."""
        if isinstance(predicted, str) or isinstance(measured, str):
            return "right" if predicted == measured else "other"
        if abs(predicted - measured) <= self.tolerance * abs(measured):
            return "right"
        return "low" if predicted < measured else "high"

    def meaning(self, outcome: str) -> str:
        """What the outcome tells, in the lab's words; "" where it has none."""
        return self.means.get(outcome) or (
            "" if outcome == "right" else self.means.get("other", "")
        )


def problems_of(data: Any) -> list[str]:
    """What is wrong with the `predictions` of a manifest, each by its key."""
    found = []
    for name, item in data.items() if isinstance(data, dict) else ():
        where = f"predictions.{name}"
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            found.append(f"{where}: the name must be lower-case words joined by underscores")
        if not isinstance(item, dict):
            found.append(f"{where} must be a mapping of keys, not {item!r}")
            continue
        for key in item:
            if key not in ("ask", "choices", "tolerance", "means"):
                found.append(f"{where}: unknown key {key!r}")
        if not isinstance(item.get("ask"), str):
            found.append(f"{where}.ask must be a text")
        choices = item.get("choices", ["a", "b"])
        if not (
            isinstance(choices, list)
            and len(choices) > 1
            and all(isinstance(choice, str) for choice in choices)
            and len({choice.casefold() for choice in choices}) == len(choices)
        ):
            found.append(f"{where}.choices must be a list of at least two different texts")
        tolerance = item.get("tolerance", 0)
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float):
            found.append(f"{where}.tolerance must be a number, not {tolerance!r}")
        elif not 0 <= tolerance < 1:
            found.append(f"{where}.tolerance is {tolerance}: relative, from 0 to below 1")
        elif tolerance and "choices" in item:
            found.append(f"{where}.tolerance has no meaning beside choices")
        means = item.get("means", {})
        if not isinstance(means, dict) or not all(
            key in MEANINGS and isinstance(text, str) for key, text in means.items()
        ):
            found.append(f"{where}.means must map some of {', '.join(MEANINGS)} to texts")
    return found


def from_manifest(data: Mapping[str, Any]) -> dict[str, Prediction]:
    """The predictions of a sound manifest."""
    return {
        name: Prediction(
            item["ask"],
            tuple(item.get("choices", ())),
            float(item.get("tolerance", 0)),
            dict(item.get("means", {})),
        )
        for name, item in data.items()
    }


# ------------------------------------------------------------------ the learner's file


def committed(folder: Path, asked: Mapping[str, Prediction]) -> tuple[dict[str, Answer], list[str]]:
    """The answers in a lab's folder, by name, and what is wrong with the file, in words."""
    path = folder / FILE
    try:
        data = read_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return {}, [f"{FILE} cannot be read: {' '.join(str(error).split())}"]
    if data is None:
        return {}, []
    if not isinstance(data, dict):
        return {}, [f"{FILE} must hold lines like `name: answer`"]
    answers: dict[str, Answer] = {}
    problems = []
    for name, given in data.items():
        if name not in asked:
            problems.append(f"{FILE}: {name!r} is not asked; asked are {', '.join(asked)}")
        elif given is not None and given != "":
            try:
                answers[name] = asked[name].read(given)
            except ValueError as error:
                problems.append(f"{FILE}: {name}: {error}")
    return answers, problems


def commit(folder: Path, name: str, answer: Answer) -> None:
    """Write one answer, leaving every other line and every comment as it is.

    Raises:
        ValueError: the file is written in a way that cannot be kept.
        OSError: it cannot be written.
    """
    path = folder / FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    value = json.dumps(answer, ensure_ascii=False)
    if isinstance(answer, float) and "." not in value:
        value = value.replace("e", ".0e")  # 1e-05 is a text in YAML
    old = r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^#\n]*?)"
    line = re.compile(
        rf"^{re.escape(name)}[ \t]*:[ \t]*{old}(?P<rest>[ \t]*(?:#.*)?)$", re.MULTILINE
    )
    if line.search(text):
        new = line.sub(lambda match: f"{name}: {value}{_apart(match['rest'])}", text, count=1)
    else:
        new = (text if text.endswith("\n") or not text else text + "\n") + f"{name}: {value}\n"
    try:
        kept = read_yaml(new) == {**(read_yaml(text) or {}), name: answer}
    except (yaml.YAMLError, TypeError, RecursionError):
        kept = False
    if not kept:
        raise ValueError(f"{path} cannot be changed line by line: write `{name}: {value}` in it")
    write_atomically(path, new)


def _apart(comment: str) -> str:
    """What follows an answer; a comment needs a space before it."""
    return f"  {comment.rstrip()}" if comment.startswith("#") else comment.rstrip()

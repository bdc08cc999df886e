"""Which bytes may follow while the shipped model writes under a constraint: what the widget shows.

Promises: every row is one that the engine sampled from, before and after the mask of its own
grammar; the browser draws and computes nothing.
Mirrors `vllm/v1/structured_output/utils.py:44` `apply_grammar_bitmask`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from course.site.play_pins import RUNTIME_BYTES
from mini_vllm import LLMEngine, Request, SamplingParams
from mini_vllm.structured_output import StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
}
BOUNDED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
}
FLAGS = {
    "type": "object",
    "properties": {"full": {"type": "boolean"}, "tier": {"enum": ["gpu", "host", "disk"]}},
    "required": ["full", "tier"],
}

CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "regex, a date": ("The date is ", {"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}, 16),
    "regex, 0x[0-9a-f]+": ("The address is ", {"regex": "0x[0-9a-f]+"}, 10),
    "choice, yes, no or maybe": ("Is it full? ", {"choice": ("yes", "no", "maybe")}, 8),
    "schema, a person, any space": ("Answer as JSON: ", {"json": PERSON}, 24),
    "schema, a person, compact": (
        "Answer as JSON: ", {"json": PERSON, "disable_any_whitespace": True}, 64,
    ),
    "schema, a person, compact and bounded": (
        "Answer as JSON: ", {"json": BOUNDED, "disable_any_whitespace": True}, 64,
    ),
    "schema, a flag and an enum": (
        "Answer as JSON: ", {"json": FLAGS, "disable_any_whitespace": True}, 64,
    ),
    "grammar, nested brackets": (
        "Write brackets: ", {"grammar": 'root ::= "[" root "]" | "x"'}, 24,
    ),
}  # fmt: skip
"""By the name in the menu: prompt, constraint, and the most tokens."""

SHOWN = 6
"""Of the likeliest tokens before and after the mask."""


class _Before:
    """Keeps the rows as they are before any mask."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []

    def validate_drafts(
        self, request: Request, in_flight: Sequence[int], drafts: Sequence[int]
    ) -> list[int]:
        """All of them."""
        return list(drafts)

    def failures(self) -> dict[str, str]:
        """None: no request waits for it."""
        return {}

    def __call__(self, request: Request, row: np.ndarray) -> np.ndarray:
        self.rows.append(row.copy())
        return row


def _law(row: np.ndarray) -> np.ndarray:
    mass: np.ndarray = np.exp(row - row.max())
    return mass / mass.sum()


def _likeliest(law: np.ndarray) -> list[list[float]]:
    order = np.argsort(-law, kind="stable")[:SHOWN]
    return [[int(token), round(float(law[token]), 4)] for token in order if law[token] > 0]


@functools.cache
def written(name: str) -> dict[str, Any]:
    """One greedy text under a constraint.

    Returns:
        `tokens`: the ids, EOS 256 included; `reason`: why it ended; `places`: one a token, each
        with `allowed` (ids in pairs, first and last of a run), `legal` (their mass before the
        mask), `before` and `after` (the likeliest ids with their probability); `forced`: how many
        places allow one token alone.
    """
    return _film(*CASES[name])


def _film(prompt: str, constraint: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0,
        structured_outputs=StructuredOutputsParams(**constraint),
    )  # fmt: skip
    engine, before = LLMEngine(dtype="float64"), _Before()
    engine.row_sampler.masks.append(before)
    masked: list[np.ndarray] = []

    def keep(request: Request, row: np.ndarray) -> np.ndarray:
        masked.append(row.copy())
        return row

    engine.row_sampler.logits_processors = [keep]
    [result] = engine.generate([prompt], params)
    places = []
    for raw, row in zip(before.rows, masked, strict=True):
        legal = np.isfinite(row)
        law = _law(raw)
        places.append(
            {
                "allowed": _runs(np.flatnonzero(legal)),
                "legal": round(float(law[legal].sum()), 4),
                "before": _likeliest(law),
                "after": _likeliest(_law(row)),
            }
        )
    output = result.outputs[0]
    return {
        "tokens": list(output.token_ids), "reason": output.finish_reason, "places": places,
        "forced": sum(count(place) == 1 for place in places),
    }  # fmt: skip


KINDS = ("regex", "choice", "json")
MOST_CHARACTERS = 600
MOST_PROMPT = 80
MOST_TOKENS = 48


def typed(kind: str, text: str, prompt: str) -> dict[str, Any]:
    """A greedy text under a constraint of the reader's own, as the films of the document.

    Args:
        kind: "regex"; "choice", one a line; or "json", a schema as JSON.
        text: the constraint.
        prompt: what the text goes on from.

    Raises:
        ValueError: no such kind, too long, no JSON; or what the engine says of the constraint.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: need one of {', '.join(KINDS)}")
    for name, value, most in (("text", text, MOST_CHARACTERS), ("prompt", prompt, MOST_PROMPT)):
        if not isinstance(value, str) or not 1 <= len(value) <= most:
            size = len(value) if isinstance(value, str) else type(value).__name__
            raise ValueError(f"{name}: {size} characters; need 1 to {most}")
    constraint: dict[str, Any] = {kind: text}
    if kind == "choice":
        constraint = {kind: tuple(line for line in text.split("\n") if line)}
    elif kind == "json":
        try:
            constraint = {kind: json.loads(text), "disable_any_whitespace": True}
        except json.JSONDecodeError as error:
            raise ValueError(f"json: the text is not JSON: {error}") from None
    return {"prompt": prompt, "constraint": constraint, **_film(prompt, constraint, MOST_TOKENS)}


def _runs(ids: np.ndarray) -> list[list[int]]:
    groups = np.split(ids, np.flatnonzero(np.diff(ids) > 1) + 1)
    return [[int(group[0]), int(group[-1])] for group in groups]


def count(place: dict[str, Any]) -> int:
    """How many tokens a place allows."""
    return sum(last - first + 1 for first, last in place["allowed"])


QUESTIONS: tuple[tuple[str, str, int, str, str], ...] = (
    ("A date. How many bytes may follow after four digits?", "regex, a date", 4, "count",
     "The hyphen."),
    ("0x[0-9a-f]+, and 0x with one digit is written. How many tokens, EOS among them?",
     "regex, 0x[0-9a-f]+", 3, "count",
     "Sixteen digits, and EOS, since one digit is enough."),
    ("yes, no or maybe: how many bytes at the start?", "choice, yes, no or maybe", 0, "count",
     "y, n and m."),
    ("The model takes m. How many places of its text, EOS's included, allow one token alone?",
     "choice, yes, no or maybe", 1, "forced",
     "a, y, b, e and EOS."),
    ("A person, compact and bounded: how many places of the text are forced, EOS among them?",
     "schema, a person, compact and bounded", 0, "forced",
     "The keys and all that stands around the values, then EOS."),
    ("A flag and an enum: after the quote that opens the enum, how many bytes?",
     "schema, a flag and an enum", 24, "count",
     "The first letters of gpu, host and disk."),
)  # fmt: skip
"""What is asked, of which case, at which place, and what answers."""


def document() -> dict[str, Any]:
    """The widget's document."""
    films = {
        name: {"prompt": prompt, "constraint": constraint, **written(name)}
        for name, (prompt, constraint, _) in CASES.items()
    }
    questions = []
    for ask, name, place, kind, because in QUESTIONS:
        film = films[name]
        answer = film["forced"] if kind == "forced" else count(film["places"][place])
        questions.append(
            {"ask": ask, "case": name, "place": place, "answer": answer, "because": because}
        )
    own = {"kinds": list(KINDS), "most": MOST_CHARACTERS, "most_prompt": MOST_PROMPT}
    return {"films": films, "questions": questions, "own": own, "bytes": RUNTIME_BYTES}

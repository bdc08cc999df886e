"""Lab 12-02: is it one hundred per cent? A claim, a control and what the claim leaves out.

Two arms answer the same prompts with the same seeds: one free, one constrained by a JSON schema.
Every answer gets one of five verdicts, and the arms are compared answer by answer. What holds:

- Q1: a verdict that the judge cannot give is an error; no keyword of a schema is passed over.
- Q2: both arms differ in the constraint alone, and are judged by the same rules.
- Q3: an answer that was cut off is a case of its own, whatever it looks like.
- Q4: a rate comes with its number of answers and its interval; no answers, no rate.

Sources: `vllm/sampling_params.py:41` `StructuredOutputsParams`,
`vllm/v1/structured_output/__init__.py:115` `StructuredOutputManager.grammar_init`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mini_vllm import LLM, SamplingParams
from mini_vllm.structured_output import StructuredOutputsParams

VERDICTS = ("valid", "wrapped", "wrong schema", "unparseable", "truncated")
CONFIG = {"backend": "xgrammar", "disable_any_whitespace": True}
"""What both engines are started with (given): the mini one and the real one."""
KEYWORDS = {"type", "properties", "required", "items", "enum", "minimum", "maximum"}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of an arm (given)."""

    prompt: str
    seed: int
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """What an arm came to (given)."""

    counts: dict[str, int]
    """By verdict, all five of them."""
    completed: int
    """Answers that were not cut off."""
    rate: float | None
    """Valid ones of those completed; None where none was."""
    interval: tuple[float, float] | None
    """Of the rate, see `wilson`."""


def conforms(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value that was read from JSON keeps a schema.

    The keywords are those of `KEYWORDS`: `type` (a name or a list of names of null, boolean,
    integer, number, string, array, object), `properties`, `required`, `items`, `enum`, `minimum`
    and `maximum`. As in the standard, a keyword about objects says nothing of other values, and so
    on; true is no number, 1.0 is an integer, and properties that are not named may be there.

    Raises:
        ValueError: another keyword, anywhere in the schema that is looked at (Q1).
    """
    unknown = set(schema) - KEYWORDS
    if unknown:
        raise ValueError(
            f"schema: {', '.join(sorted(unknown))}: need {', '.join(sorted(KEYWORDS))}"
        )
    names = schema.get("type", [])
    if names and not any(
        _is(value, each) for each in ([names] if isinstance(names, str) else names)
    ):
        return False
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        return False
    if _is(value, "number") and not (
        schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
    ):
        return False
    if isinstance(value, dict):
        inner = schema.get("properties", {})
        return set(schema.get("required", ())) <= set(value) and all(
            conforms(value[name], inner[name]) for name in value if name in inner
        )
    if isinstance(value, list):
        return all(conforms(each, schema.get("items", {})) for each in value)
    return True


def _is(value: Any, name: str) -> bool:
    """Whether a value has a type of JSON Schema."""
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    kinds = {"null": type(None), "number": (int, float), "string": str, "array": list}
    kinds |= {"object": dict, "boolean": ()}
    return isinstance(value, kinds[name])  # type: ignore[arg-type]


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return set(one) == set(other) and all(_same(one[name], other[name]) for name in one)
    return bool(one == other)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def classify(text: str, finish_reason: str, schema: Mapping[str, Any]) -> str:
    """The verdict on one answer.

    - "truncated": `finish_reason` is "length", also where the text is whole by chance (Q3);
    - "valid": the whole text is JSON (space around it is allowed) and conforms;
    - "wrong schema": the whole text is JSON and does not conform;
    - "wrapped": it is not, and somewhere in it stands an object that conforms, as in a fence or
      behind a sentence;
    - "unparseable": anything else. NaN and Infinity are no JSON.

    A trace with {"type": "object", "required": ["a"]}: `{"a": 1}` is valid, `{"b": 1}` has the
    wrong schema, `Sure: {"a": 1}` is wrapped, `{"a": ` with "stop" is unparseable.
    """
    if finish_reason == "length":
        return "truncated"
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return "wrapped" if _holds_one(text, schema) else "unparseable"
    return "valid" if conforms(value, schema) else "wrong schema"


def _holds_one(text: str, schema: Mapping[str, Any]) -> bool:
    """Whether an object that conforms stands somewhere in a text."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    for place, char in enumerate(text):
        if char != "{":
            continue
        try:
            value, _ = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        if conforms(value, schema):
            return True
    return False


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a rate: the rates that would not be surprised by what came (Q4).

    The two rates p at which |successes/trials - p| = z sqrt(p (1 - p) / trials).

    A trace: 50 of 50 is (0.9287, 1.0); 0 of 50 is (0.0, 0.0713); 5 of 10 is (0.2366, 0.7634).

    Raises:
        ValueError: no trials, or successes outside [0, trials].
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"successes={successes}, trials={trials}: need 0 to trials, and a trial")
    rate, share = successes / trials, z * z / trials
    middle = (rate + share / 2) / (1 + share)
    half = z / (1 + share) * math.sqrt(rate * (1 - rate) / trials + share / (4 * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def report(answers: Sequence[Answer], schema: Mapping[str, Any]) -> Report:
    """An arm in numbers (Q3, Q4).

    Raises:
        ValueError: there are no answers.
    """
    if not answers:
        raise ValueError("answers: need at least one")
    found = Counter(classify(each.text, each.finish_reason, schema) for each in answers)
    counts = {verdict: found[verdict] for verdict in VERDICTS}
    completed = len(answers) - counts["truncated"]
    if not completed:
        return Report(counts, 0, None, None)
    valid = counts["valid"]
    return Report(counts, completed, valid / completed, wilson(valid, completed))


def paired(
    free: Sequence[Answer], constrained: Sequence[Answer], schema: Mapping[str, Any]
) -> dict[tuple[str, str], int]:
    """How often the free arm got one verdict and the constrained one another (Q2).

    Returns:
        (free verdict, constrained verdict) to a count, pairs that occur only.

    Raises:
        ValueError: the arms do not have the same prompts and seeds in the same order.
    """
    asked = [(each.prompt, each.seed) for each in free]
    if asked != [(each.prompt, each.seed) for each in constrained]:
        raise ValueError("constrained: need the prompts and seeds of the free arm, in its order")
    pairs = zip(free, constrained, strict=True)
    return dict(Counter(
        tuple(classify(each.text, each.finish_reason, schema) for each in pair) for pair in pairs
    ))  # type: ignore[arg-type]  # fmt: skip


def compile_seconds(times: Sequence[tuple[str, float]]) -> float:
    """What a new constraint costs its first request, from the times of requests (Q4).

    Requests of one token each came one after the other. The engine's first constrained request also
    imports a library and reads the vocabulary, so its constraint does not count at all. Of every
    other constraint the first request compiled it and the second found it compiled.

    A trace: A 1.5, A 0.1, B 0.3, B 0.1, C 0.2, C 0.1, C 0.1: the first ones of B and C have the
    median 0.25, the second ones 0.1: 0.15.

    Args:
        times: constraint and seconds of every request, in order.

    Returns:
        The median of the first times less the median of the second.

    Raises:
        ValueError: no constraint but the engine's first has two requests.
    """
    by_name: dict[str, list[float]] = {}
    for name, seconds in times:
        by_name.setdefault(name, []).append(seconds)
    counted = [seconds for seconds in list(by_name.values())[1:] if len(seconds) > 1]
    if not counted:
        raise ValueError("times: need a second constraint with two requests")
    return median(each[0] for each in counted) - median(each[1] for each in counted)


def run_mini(
    prompts: Sequence[str],
    schema: Mapping[str, Any] | None,
    max_tokens: int,
    temperature: float = 0.8,
) -> list[Answer]:
    """One arm on `mini_vllm` and the shipped model (Q2).

    Request i has seed i. The engine is `LLM(dtype="float32", structured_outputs_config=CONFIG)`,
    and all prompts are generated in one call.

    Args:
        schema: the constraint of every request, or None for the free arm.
    """
    asked = None if schema is None else StructuredOutputsParams(json=schema)
    llm = LLM(dtype="float32", structured_outputs_config=CONFIG)
    params = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=max_tokens, structured_outputs=asked
        )
        for seed in range(len(prompts))
    ]
    outputs = [each.outputs[0] for each in llm.generate(list(prompts), params)]
    return [
        Answer(prompt, seed, output.text, str(output.finish_reason))
        for seed, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]

"""Constrained greedy texts of the shipped model, from the real engine: recorded, and compared.

    course engine run -m conformance.record texts-structured        # the real engine
    python -m conformance.texts structured_output             # compare: any machine

Fifty constraints of four kinds, two prompts each, all in one batch with free requests between
them. Both engines read them with `{"backend": "xgrammar", "disable_any_whitespace": True}`: a small
model is fond of spaces. Left out because the masks differ for reasons that `README.md` beside it
names: strings with `maxLength`, `minLength`, `pattern` or `format`, `enum` of objects or arrays,
bounds of numbers that are not whole, and negated classes of characters.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conformance import recording
from conformance.features import RECORDINGS
from conformance.real_engine import MODEL, provenance
from mini_vllm import LLM, SamplingParams
from mini_vllm.structured_output import StructuredOutputsParams

KEPT = RECORDINGS / "engine"
CONFIG = {"backend": "xgrammar", "disable_any_whitespace": True}
MAX_TOKENS = 48
PROMPTS = ("The scheduler returns ", "A token is ")


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_INT, _BOOL, _NULL = {"type": "integer"}, {"type": "boolean"}, {"type": "null"}
_TEXT, _NUMBER = {"type": "string"}, {"type": "number"}
_SMALL = {"type": "integer", "minimum": 0, "maximum": 99}
_WORD: dict[str, Any] = {"enum": ["red", "green", "blue"]}
_TREE = {
    "$defs": {"tree": _object(v=_SMALL, kids={"type": "array", "items": {"$ref": "#/$defs/tree"},
                                              "maxItems": 1})},
    "$ref": "#/$defs/tree",
}  # fmt: skip

REGEXES = (
    "[0-9]{4}-[0-9]{2}-[0-9]{2}", "(yes|no|maybe)", "0x[0-9a-f]{1,6}", "[a-z]{3,12}",
    "[A-Z][a-z]+( [a-z]+){1,3}\\.", "-?(0|[1-9][0-9]{0,4})", "(GET|POST) /[a-z/]{0,12} HTTP/1\\.1",
    "[a-z]+@[a-z]+\\.(com|org)", "\\([0-9]{3}\\) [0-9]{3}-[0-9]{4}", "(ab|ba)+c", "#[0-9A-F]{6}",
    "[a-z]+(_[a-z]+)*\\(\\)", "v[0-9]+\\.[0-9]+\\.[0-9]+", "(na){2,6} batman",
    "[01]{8}( [01]{8}){0,2}", "\"[a-z ]{0,20}\"",
)  # fmt: skip
CHOICES = (
    ("yes", "no"), ("positive", "negative", "neutral"), ("a", "ab", "abc", "abcd"),
    ("scheduler", "sampler", "worker", "block pool"), ("naïve", "日本", "plain"),
)  # fmt: skip
GRAMMARS = (
    'root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]{1,3} | "(" expr ")"',
    'root ::= "SELECT " name (", " name)* " FROM " name\nname ::= [a-z]{1,8}',
    'root ::= "[" (item ("," item)*)? "]"\nitem ::= [0-9] | root',
    'root ::= greeting ", " [A-Z] [a-z]{1,9} "."\ngreeting ::= "Hello" | "Dear"',
)
SCHEMAS: tuple[dict[str, Any], ...] = (
    _object(a=_INT), _object(ok=_BOOL), _object(name=_WORD), _object(n=_NULL),
    _object(a=_SMALL, b=_SMALL), _object(a=_BOOL, b=_WORD, c=_SMALL), _object(text=_TEXT),
    {"type": "array", "items": _SMALL, "minItems": 1, "maxItems": 5},
    {"type": "array", "items": _BOOL, "maxItems": 3}, {"type": "array", "items": _WORD,
                                                     "minItems": 2, "maxItems": 4},
    {"enum": ["low", "medium", "high"]}, {"enum": [1, 2, 3, "many", None]}, {"const": "fixed"},
    {"anyOf": [_BOOL, _NULL]}, {"anyOf": [_object(a=_SMALL), _object(b=_BOOL)]}, _BOOL,
    _object(outer=_object(inner=_SMALL)), _TREE, _object(a={"type": ["integer", "null"]}),
    {"type": "object", "properties": {"a": _SMALL, "b": _BOOL}},
    {"type": "object", "properties": {"x": _WORD, "y": _WORD}, "required": ["y"]},
    {"type": "array", "prefixItems": [_WORD, _SMALL], "items": False, "minItems": 2},
    {"type": "integer", "minimum": -20, "maximum": 20}, _object(n=_NUMBER),
    {"type": "object", "additionalProperties": _BOOL},
)  # fmt: skip


def constraints() -> list[tuple[str, Any]]:
    """Kind and value of every constraint."""
    kinds = {"regex": REGEXES, "choice": CHOICES, "grammar": GRAMMARS, "json": SCHEMAS}
    return [(kind, each) for kind, values in kinds.items() for each in values]


def rows() -> list[tuple[str, tuple[str, Any] | None]]:
    """(prompt, constraint) of every request, after every tenth a free one."""
    found: list[tuple[str, tuple[str, Any] | None]] = []
    for constraint in constraints():
        for prompt in PROMPTS:
            found.append((prompt, constraint))
            if len(found) % 10 == 9:
                found.append((prompt, None))
    return found


def recorded() -> Iterator[dict[str, Any]]:
    """What vLLM answers, float32 and greedy: one line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm
    from vllm.sampling_params import StructuredOutputsParams as Real

    llm = vllm.LLM(
        model=str(MODEL), dtype="float32", seed=0, max_model_len=256, max_num_seqs=64,
        enforce_eager=True, gpu_memory_utilization=0.4, structured_outputs_config=dict(CONFIG),
    )  # fmt: skip
    batch: Any = [{"prompt_token_ids": list(prompt.encode())} for prompt, _ in rows()]
    params = []
    for _, constraint in rows():
        asked = None
        if constraint is not None:
            kind, value = constraint
            asked = Real(**{kind: list(value) if kind == "choice" else value})
        params.append(vllm.SamplingParams(
            temperature=0.0, max_tokens=MAX_TOKENS, structured_outputs=asked))  # fmt: skip
    results = [result.outputs[0] for result in llm.generate(batch, params)]
    yield {
        "upstream": recording.UPSTREAM, "machine": provenance("float32"), "config": CONFIG,
        "constraints": constraints(), "prompts": list(PROMPTS),
        "outputs": [list(each.token_ids) for each in results],
        "reasons": [each.finish_reason for each in results],
    }  # fmt: skip


def kept(folder: Path = KEPT) -> dict[str, Any]:
    """The recording: "constraints", "prompts", and "outputs" and "reasons" of `rows`."""
    (found,) = recording.lines(folder / "texts-structured.jsonl.gz")
    return found


def mini(**knobs: Any) -> tuple[list[list[int]], list[str]]:
    """Tokens and reasons of the mini engine for the same rows: one batch, chunks, a cache."""
    llm = LLM(
        MODEL, num_blocks=1200, max_num_seqs=64, max_num_batched_tokens=256,
        structured_outputs_config=CONFIG, **knobs,
    )  # fmt: skip
    params = []
    for _, constraint in rows():
        asked = StructuredOutputsParams(**dict([constraint])) if constraint else None
        params.append(SamplingParams(max_tokens=MAX_TOKENS, structured_outputs=asked))
    results = llm.generate([prompt for prompt, _ in rows()], params)
    outputs = [result.outputs[0] for result in results]
    return [list(o.token_ids) for o in outputs], [str(o.finish_reason) for o in outputs]


def is_valid(constraint: tuple[str, Any], text: str) -> bool | None:
    """Whether a finished text keeps its constraint, by judges of other makers: `re`, `json` and
    `jsonschema`; None where there is none (a grammar, or no `jsonschema` installed)."""
    kind, value = constraint
    if kind == "regex":
        return re.fullmatch(value, text) is not None
    if kind == "choice":
        return text in value
    if kind == "grammar":
        return None
    try:
        import jsonschema  # type: ignore[import-untyped]
    except ImportError:
        json.loads(text)
        return None
    return bool(jsonschema.Draft202012Validator(value).is_valid(json.loads(text)))


def differing(found: Mapping[str, Any], answers: tuple[list[list[int]], list[str]]) -> list[int]:
    """The rows whose tokens or reason are not the recorded ones."""
    theirs = zip(found["outputs"], found["reasons"], strict=True)
    ours = zip(*answers, strict=True)
    return [i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if tuple(a) != tuple(b)]


def main() -> int:
    """Compare; returns the exit status."""
    found = kept()
    answers = mini()
    wrong = differing(found, answers)
    for index in wrong[:10]:
        prompt, constraint = rows()[index]
        ours, theirs = answers[0][index], found["outputs"][index]
        print(f"{prompt!r} {constraint}: {bytes(t for t in theirs if t < 256)!r} there, "
              f"{bytes(t for t in ours if t < 256)!r} here")  # fmt: skip
    print(f"{len(found['outputs'])} texts, {len(found['constraints'])} constraints: "
          f"{len(wrong)} differ")  # fmt: skip
    return 1 if wrong else 0

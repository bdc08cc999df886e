"""Rows of the shipped model's logits under every knob of the sampler: what the widget moves.

Promises: every law here is made by the engine's own processors and filters, in any order of them;
the browser's arithmetic is held against the examples of this document.
Mirrors `vllm/v1/sample/sampler.py:238` `Sampler.sample`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mini_vllm import LLMEngine, Request, SamplingParams
from mini_vllm.sample import processors
from mini_vllm.sampler import _apply_min_p, _apply_top_k, _apply_top_p, softmax

TEXTS = {
    "sure": ("def f(x):\n    return x\n\ndef g(x):\n    ret", 0),
    "open": ("A cache keeps what was computed before, so that ", 0),
    "in a loop": ("A block is ", 64),
}
"""Per row of the widget: a prompt, and how many greedy tokens are said before the row."""

OFF: dict[str, Any] = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0,
    "presence": 0.0, "frequency": 0.0, "bias_token": None, "bias": 0.0, "ban": None,
}  # fmt: skip
"""Knobs that change nothing. `bias_token` and `ban` are token ids."""

ORDERS: dict[str, tuple[str, ...]] = {
    "vLLM's": ("ban", "bias", "penalties", "temperature", "min_p", "top_k", "top_p"),
    "min-p last": ("ban", "bias", "penalties", "temperature", "top_k", "top_p", "min_p"),
    "min-p before temperature": (
        "ban", "bias", "penalties", "min_p", "temperature", "top_k", "top_p",
    ),
    "top-p before top-k": ("ban", "bias", "penalties", "temperature", "min_p", "top_p", "top_k"),
    "edits after temperature": (
        "ban", "temperature", "bias", "penalties", "min_p", "top_k", "top_p",
    ),
    "the ban last": ("bias", "penalties", "temperature", "min_p", "top_k", "top_p", "ban"),
}  # fmt: skip
"""Stages by the name of their order."""

QUESTIONS: tuple[tuple[str, str, dict[str, Any], str, str], ...] = (
    ("min-p = .1 on the open row, temperature 1. How many tokens are left?",
     "open", {"min_p": 0.1}, "vLLM's",
     "Those with at least a tenth of the likeliest one's probability."),
    ("The same min-p at temperature 2, in vLLM's order. How many?",
     "open", {"min_p": 0.1, "temperature": 2.0}, "vLLM's",
     "Temperature has flattened the law before min-p looks."),
    ("Now min-p before temperature, still at temperature 2. How many?",
     "open", {"min_p": 0.1, "temperature": 2.0}, "min-p before temperature",
     "Now min-p sees the law as it was."),
    ("The open row at temperature 1 with min-p = .3 and top-p = .65, in vLLM's order. How many?",
     "open", {"min_p": 0.3, "top_p": 0.65}, "vLLM's",
     "min-p leaves two, and of those two the first has more than .65."),
    ("The same two with min-p last. How many?",
     "open", {"min_p": 0.3, "top_p": 0.65}, "min-p last",
     "top-p looked first and kept more; min-p cuts that to two."),
    ("Only min-p = .1 again, on the row that is sure, at temperature 1. How many?",
     "sure", {"min_p": 0.1}, "vLLM's",
     "Nobody else has a tenth of the likeliest one's probability."),
    ("top_k = 1 on the row that is sure, and its likeliest token, u, banned last. How many?",
     "sure", {"top_k": 1, "ban": ord("u")}, "the ban last",
     "top-k kept u alone, and the ban takes it."),
)  # fmt: skip


@functools.cache
def rows() -> dict[str, dict[str, Any]]:
    """Prompt and output ids and the row [257] of logits that follows them, to three decimals."""
    found = {}
    for name, (text, outputs) in TEXTS.items():
        engine = LLMEngine(dtype="float64")
        seen: list[np.ndarray] = []

        def keep(request: Request, row: np.ndarray, seen: list[np.ndarray] = seen) -> np.ndarray:
            seen.append(row)
            return row

        engine.row_sampler.logits_processors = [keep]
        params = SamplingParams(max_tokens=outputs + 1, ignore_eos=True)
        [result] = engine.generate([text], params)
        found[name] = {
            "prompt": list(text.encode()),
            "output": list(result.outputs[0].token_ids[:outputs]),
            "logits": [round(float(logit), 3) for logit in seen[-1]],
        }
    return found


def _params(knobs: Mapping[str, Any]) -> SamplingParams:
    """The engine's parameters for `knobs`; a ban is a bad word of one token."""
    bias = knobs["bias_token"]
    return SamplingParams(
        temperature=knobs["temperature"], top_k=knobs["top_k"], top_p=knobs["top_p"],
        min_p=knobs["min_p"], repetition_penalty=knobs["repetition"],
        presence_penalty=knobs["presence"], frequency_penalty=knobs["frequency"],
        logit_bias=None if bias is None else {bias: knobs["bias"]},
        _bad_words_token_ids=() if knobs["ban"] is None else ((knobs["ban"],),),
    )  # fmt: skip


def stages(
    row: Mapping[str, Any], knobs: Mapping[str, Any], order: Sequence[str]
) -> tuple[list[int], np.ndarray]:
    """How many tokens are left after each stage, and the law [257] of the next token.

    At temperature 0 only the edits run and the law is the argmax. Where no token is left the law
    is all zeros.
    """
    params = _params(knobs)
    request = Request("r", row["prompt"], params)
    for token in row["output"]:
        request.append_output_token(token)
    apply = {
        "ban": lambda z: processors.bad_words(request, z),
        "bias": lambda z: processors.logit_bias(request, z),
        "penalties": lambda z: processors.penalties(request, z),
        "temperature": lambda z: z / params.temperature if params.temperature else z,
        "min_p": lambda z: _apply_min_p(z, params.min_p),
        "top_k": lambda z: _apply_top_k(z, params.top_k),
        "top_p": lambda z: _apply_top_p(z, params.top_p),
    }
    logits, left = np.array(row["logits"]), []
    for name in order:
        if logits.max() > -np.inf:
            logits = apply[name](logits)
        left.append(int(np.isfinite(logits).sum()))
    law = np.zeros(len(logits))
    if logits.max() > -np.inf:
        if params.temperature == 0.0:
            law[logits.argmax()] = 1.0
        else:
            law = softmax(logits)
    return left, law


def document() -> dict[str, Any]:
    """Rows, orders, and questions with their answers."""
    questions = []
    for ask, name, knobs, order, because in QUESTIONS:
        left, _ = stages(rows()[name], OFF | knobs, ORDERS[order])
        questions.append(
            {"ask": ask, "row": name, "knobs": OFF | knobs, "order": order, "answer": left[-1]}
            | {"because": because}
        )
    return {
        "rows": rows(), "orders": {name: list(order) for name, order in ORDERS.items()},
        "off": OFF, "questions": questions,
    }  # fmt: skip

"""The mini engine's sampler on the rows of the real one, and wrong samplers that they must catch.

    python -m conformance.mutants sampling --write

`stages` puts a recorded row through `sample/processors.py`, `sampler.py` and `sample/logprobs.py`
as `RowSampler` does. A mutant is a replacement in the source of one of the three; it stands for a
misreading of the real sampler.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import mini_vllm
from conformance import parts
from conformance.features.sampling.sampler import read, tolerance
from labkit.tables import markdown_table
from mini_vllm import Request, SamplingParams
from mini_vllm.sample import logprobs, processors

ROOT = Path(mini_vllm.__path__[0])
MODULES = {"processors": "sample/processors", "sampler": "sampler", "logprobs": "sample/logprobs"}
Modules = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One misreading."""

    name: str
    module: str
    """A key of `MODULES`."""
    old: str
    new: str
    """`old` occurs exactly once."""


MUTANTS = (
    Mutant("penalises the tokens of the output alone", "processors",
           "np.bincount(tokens, minlength=len(row))[: len(row)] > 0",
           "np.bincount(tokens[request.num_prompt_tokens :], minlength=len(row)) > 0"),
    Mutant("divides negative logits too", "processors",
           "np.where(row[seen] > 0, 1.0 / repetition, repetition)",
           "np.where(row[seen] > 0, 1.0 / repetition, 1.0 / repetition)"),
    Mutant("counts the prompt in frequency and presence", "processors",
           "counts = np.bincount(tokens[request.num_prompt_tokens :], minlength=len(row))",
           "counts = np.bincount(tokens, minlength=len(row))"),
    Mutant("counts presence per occurrence", "processors",
           "presence * (counts > 0)", "presence * counts"),
    Mutant("puts the additive penalties first", "processors",
           "    if repetition != 1.0:\n        seen",
           "    shift = np.bincount(tokens[request.num_prompt_tokens :], minlength=len(row))\n"
           "    row -= frequency * shift + presence * (shift > 0)\n    frequency = presence = 0.0\n"
           "    if repetition != 1.0:\n        seen"),
    Mutant("adds the bias after the penalties", "processors",
           "logit_bias, *own, penalties]", "*own, penalties, logit_bias]"),
    Mutant("levels the tokens that are allowed", "processors",
           "    masked[ids] = row[ids]\n", "    masked[ids] = 0.0\n"),
    Mutant("lets a bad word begin in the prompt", "processors",
           "first = max(request.num_prompt_tokens, request.num_tokens - longest)",
           "first = max(0, request.num_tokens - longest)"),
    Mutant("bans every token of a bad word", "processors",
           "return _without(row, banned)", "return _without(row, [t for w in words for t in w])"),
    Mutant("forgets stop tokens before min_tokens", "processors",
           "stops = (*self.eos_token_ids, *params.stop_token_ids)", "stops = self.eos_token_ids"),
    Mutant("holds the end back for one token too many", "processors",
           "if request.num_output_tokens >= params.min_tokens:",
           "if request.num_output_tokens > params.min_tokens or not params.min_tokens:"),
    Mutant("takes min-p as a floor of its own", "sampler",
           "probabilities < min_p * probabilities.max()", "probabilities < min_p"),
    Mutant("applies min-p before temperature", "sampler",
           "    scaled = np.asarray(logits, dtype=np.float64) / params.temperature\n"
           "    scaled = _apply_min_p(scaled, params.min_p)\n",
           "    scaled = _apply_min_p(np.asarray(logits, dtype=np.float64), params.min_p)\n"
           "    scaled = scaled / params.temperature\n"),
    Mutant("applies min-p last", "sampler",
           "    scaled = _apply_min_p(scaled, params.min_p)\n"
           "    scaled = _apply_top_k(scaled, params.top_k)\n"
           "    scaled = _apply_top_p(scaled, params.top_p)\n",
           "    scaled = _apply_top_k(scaled, params.top_k)\n"
           "    scaled = _apply_top_p(scaled, params.top_p)\n"
           "    scaled = _apply_min_p(scaled, params.min_p)\n"),
    Mutant("applies top-p before top-k", "sampler",
           "    scaled = _apply_top_k(scaled, params.top_k)\n"
           "    scaled = _apply_top_p(scaled, params.top_p)\n",
           "    scaled = _apply_top_p(scaled, params.top_p)\n"
           "    scaled = _apply_top_k(scaled, params.top_k)\n"),
    Mutant("drops the token that crosses top-p", "sampler",
           "keep = mass_before < p", "keep = mass_before + probabilities <= p"),
    Mutant("drops ties with the k-th", "sampler",
           "np.where(logits < threshold, -np.inf, logits)",
           "np.where(logits <= threshold, -np.inf, logits)"),
    Mutant("ranks from 0", "logprobs",
           "rank = int((logprobs >= logprobs[token_id]).sum())",
           "rank = int((logprobs > logprobs[token_id]).sum())"),
    Mutant("counts no equals in a rank", "logprobs",
           "rank = int((logprobs >= logprobs[token_id]).sum())",
           "rank = 1 + int((logprobs > logprobs[token_id]).sum())"),
    Mutant("leaves the sampled token out of the likeliest", "logprobs",
           "others = np.argsort(-logprobs, kind=\"stable\")[:count].tolist()",
           "order = np.argsort(-logprobs, kind=\"stable\").tolist()\n"
           "        others = [t for t in order if t != token_id][:count]"),
)  # fmt: skip


def request_of(case: Mapping[str, Any]) -> Request:
    """The request that stands in a recorded row."""
    wishes = dict(case["params"])
    wishes.pop("bad_words", None)
    bias = wishes.pop("logit_bias", None)
    words = tuple(tuple(word) for word in case["bad_words_token_ids"])
    params = SamplingParams(
        **wishes, logit_bias=bias and {int(t): b for t, b in bias.items()},
        max_tokens=max(16, wishes.get("min_tokens", 0)), _bad_words_token_ids=words,
    )  # fmt: skip
    made = Request("r", case["prompt_token_ids"], params, case["eos_token_id"])
    for token in case["output_token_ids"]:
        made.append_output_token(token)
    return made


def difference(case: Mapping[str, Any], modules: Modules | None = None) -> str | None:
    """The first stage at which a row comes out another, None if none does.

    float64 here and float32 there: masks, ranks and greedy tokens must be equal, numbers within
    the recorder's `tolerance`.
    """
    from mini_vllm import sampler

    used = {"processors": processors, "sampler": sampler, "logprobs": logprobs} | dict(
        modules or {}
    )
    made, row = request_of(case), read(case["logits"])
    edited = row
    for processor in used["processors"].in_order((case["eos_token_id"],)):
        edited = processor(made, edited)
    if not _same(read(case["edited"]), edited):
        return "edited"
    params = made.sampling_params
    if np.isfinite(edited).any():
        if params.temperature == 0.0:
            if used["sampler"].Sampler().sample(edited, params) != case["token"]:
                return "token"
        else:
            got, kept = used["sampler"].probabilities(edited, params), np.array(case["probs"])
            limit = tolerance(read(case["processed"]))
            least = 1e-30  # below it float32 rounds to 0
            if np.any((got > least) != (kept > least)) or np.abs(got - kept).max() > limit:
                return "probs"
    if (wanted := case["logprobs"]) is not None:
        entry = used["logprobs"].gather(row, case["token"], params.logprobs)
        close = len(entry.logprobs) == len(wanted["logprobs"]) and np.allclose(
            entry.logprobs, wanted["logprobs"], rtol=2e-6, atol=2e-6
        )
        if not close or entry.rank != wanted["rank"] or entry.token_ids[0] != case["token"]:
            return "logprobs"
    return None


def _same(wanted: np.ndarray, got: np.ndarray) -> bool:
    finite = np.isfinite(wanted)
    if not np.array_equal(finite, np.isfinite(got)):
        return False
    return not finite.any() or np.allclose(
        got[finite], wanted[finite], rtol=0, atol=tolerance(wanted)
    )


def built(mutant: Mutant) -> Modules:
    """The mutated module under its key.

    Raises:
        ValueError: the old text is not in the source exactly once.
    """
    source = (ROOT / f"{MODULES[mutant.module]}.py").read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        raise ValueError(f"mutant {mutant.name!r}: found {source.count(mutant.old)} times")
    module = ModuleType(f"_mutant_{mutant.module}")
    sys.modules[module.__name__] = module
    code = source.replace(mutant.old, mutant.new)
    exec(compile(code, f"<mutant {mutant.module}.py>", "exec"), module.__dict__)
    return {mutant.module: module}


def caught(mutant: Mutant, cases: Iterable[Mapping[str, Any]]) -> int:
    """How many rows come out another."""
    modules = built(mutant)
    with np.errstate(invalid="ignore"):  # a wrong order may leave a row without a token
        return sum(difference(case, modules) is not None for case in cases)


def counted() -> tuple[str, bool]:
    """The table of README, and whether every mutant is caught and the engine differs nowhere."""
    cases = parts.load("sampler")
    wrong = [difference(case) for case in cases]
    print(f"{len(cases)} rows: {len(wrong) - wrong.count(None)} differ")
    rows = [[mutant.name, str(caught(mutant, cases))] for mutant in MUTANTS]
    print("\n".join(f"{count:>6}  sampling       {name}" for name, count in rows))
    names = ["a sampler that", f"rows of {len(cases)} that differ"]
    held = not any(wrong) and all(count != "0" for _, count in rows)
    return markdown_table(names, rows), held


CATALOGUES = {"sampling-mutants": counted}

"""Greedy texts of the same prompts alone and together: which change with their batch, and why.

    course engine run -m conformance.record invariance-bfloat16    # or -float32: the real engine
    python -m conformance.features.sampling.invariance --write    # the table, any machine

All else is equal: one engine, one model, no sampling, prefix caching off. What differs is how many
rows a product has, hence which kernel runs it and in which order it adds. A text leaves the
other one where two candidates are closer than that rounding; `gap` is the difference of their
logprobs there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conformance import recording
from conformance.features import RECORDINGS
from conformance.features.sampling.texts import prompts
from conformance.real_engine import MODEL, provenance
from labkit.tables import markdown_table, write_section
from mini_vllm import LLM, SamplingParams

FOLDER = RECORDINGS / "engine"
README = Path(__file__).with_name("README.md")
NUM_PROMPTS, MAX_TOKENS = 100, 64
REAL = ("float32", "bfloat16")
OURS = ("float32", "float64")


def ask(llm: Any, params: Any, wrap: bool) -> dict[str, Any]:
    """The texts of one engine: every prompt alone, then all together, and where they part."""
    asked: list[Any] = [{"prompt_token_ids": p} if wrap else p for p in prompts()]
    alone = [llm.generate([one], params)[0].outputs[0] for one in asked]
    together = [result.outputs[0] for result in llm.generate(asked, params)]
    changed = [
        _parting(number, one, other)
        for number, (one, other) in enumerate(zip(alone, together, strict=True))
        if list(one.token_ids) != list(other.token_ids)
    ]
    shifts = [
        abs(one.logprob - other.logprob)
        for a, b in zip(alone, together, strict=True)
        for one, other in _same_context(a, b)
    ]
    return {
        "num_prompts": len(asked), "max_tokens": MAX_TOKENS, "changed": changed,
        "largest_shift": float(max(shifts)), "median_shift": float(np.median(shifts)),
    }  # fmt: skip


def _same_context(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    """The logprobs that both texts give a token after the same tokens."""
    for position, (one, other) in enumerate(zip(a.logprobs, b.logprobs, strict=True)):
        yield from ((one[token], other[token]) for token in one if token in other)
        if a.token_ids[position] != b.token_ids[position]:
            return


def _parting(number: int, one: Any, other: Any) -> dict[str, Any]:
    """Where two texts part: the position, and how close the two likeliest tokens were, alone."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    at = next(i for i, (a, b) in enumerate(pairs) if a != b)
    best = sorted((p.logprob for p in one.logprobs[at].values()), reverse=True)
    return {"prompt": number, "position": at, "gap": float(best[0] - best[1])}


def recorded(dtype: str) -> Iterator[dict[str, Any]]:
    """What vLLM says in `dtype`: one line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    llm = vllm.LLM(
        model=str(MODEL), dtype=dtype, seed=0, max_model_len=512, max_num_seqs=NUM_PROMPTS,
        enable_prefix_caching=False, enforce_eager=True, gpu_memory_utilization=0.4,
    )  # fmt: skip
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2, ignore_eos=True
    )
    found = ask(llm, params, wrap=True)
    yield {"upstream": recording.UPSTREAM, "machine": provenance(dtype), "dtype": dtype, **found}


def mini(dtype: str) -> dict[str, Any]:
    """The same of the mini engine."""
    llm = LLM(dtype=dtype, num_blocks=1600, enable_prefix_caching=False, max_num_seqs=NUM_PROMPTS)
    return ask(llm, SamplingParams(max_tokens=MAX_TOKENS, logprobs=2, ignore_eos=True), wrap=False)


def row(name: str, found: dict[str, Any]) -> list[str]:
    """One row of the table."""
    gaps = [each["gap"] for each in found["changed"]]
    return [
        name, f"{len(gaps)} of {found['num_prompts']}", f"{found['median_shift']:.1e}",
        f"{found['largest_shift']:.1e}", f"{max(gaps):.1e}" if gaps else "-",
    ]  # fmt: skip


def kept(dtype: str) -> dict[str, Any]:
    """The recording of the real engine in `dtype`."""
    (line,) = recording.lines(FOLDER / f"invariance-{dtype}.jsonl.gz")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m conformance.features.sampling.invariance")
    parser.add_argument("--write", action="store_true", help="update the README.md beside it")
    arguments = parser.parse_args(argv)
    rows = [row(f"vLLM on the CPU, {dtype}", kept(dtype)) for dtype in REAL]
    rows += [row(f"`mini_vllm`, {dtype}", mini(dtype)) for dtype in OURS]
    names = ["engine", "texts that change", "median shift", "largest shift", "widest gap crossed"]
    table = markdown_table(names, rows)
    print(table)
    if arguments.write:
        write_section("invariance", table, README)


if __name__ == "__main__":
    main()

"""What edits of logits cost: steps of 64 requests with wishes beside steps of 64 without.

    python -m benchmarks.bench_sampling --write

Shipped model, float32, one thread, processor time, prompts of 128 bytes and 64 tokens each, so a
row's history grows from 128 to 192 tokens. All contestants run in turn, five times; a row of the
table is the fastest run of each.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

from benchmarks.report import machine
from labkit.tables import markdown_table, write_section
from mini_vllm import LLMEngine, SamplingParams

ROOT = Path(__file__).parents[1]
README = Path(__file__).with_name("README.md")
BATCH, PROMPT_LEN, OUTPUT_LEN, ROUNDS = 64, 128, 64, 5
WISHES: dict[str, dict[str, Any]] = {
    "none": {},
    "three penalties": {
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2
    },
    "masks: allowed tokens, bad words, min_tokens": {
        "allowed_token_ids": list(range(32, 127)), "bad_words": ["the", "cache", "it"],
        "min_tokens": OUTPUT_LEN,
    },
    "all of them and a bias of eight tokens": {
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2,
        "allowed_token_ids": list(range(32, 127)), "bad_words": ["the", "cache", "it"],
        "min_tokens": OUTPUT_LEN, "logit_bias": dict.fromkeys(range(97, 105), 0.5),
    },
    "logprobs=5": {"logprobs": 5},
    "temperature 0.8, top_k 40, top_p 0.9": {
        "temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 1
    },
}  # fmt: skip


def run(engine: LLMEngine, wish: dict[str, Any]) -> float:
    """Processor seconds of a decode step of all requests, prefill apart."""
    text = (ROOT / "GLOSSARY.md").read_text(encoding="utf-8")
    params = SamplingParams(max_tokens=OUTPUT_LEN, ignore_eos=True, **wish)
    for number in range(BATCH):
        engine.add_request(text[300 + 61 * number :][:PROMPT_LEN], params)
    engine.step()
    began, steps = time.process_time(), 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    return (time.process_time() - began) / steps


def measure() -> dict[str, float]:
    """Seconds per step, per wish."""
    engine = LLMEngine(
        num_blocks=BATCH * 16 + 1, enable_prefix_caching=False, max_num_seqs=BATCH,
        max_num_batched_tokens=BATCH * PROMPT_LEN,
    )  # fmt: skip
    found: dict[str, list[float]] = {name: [] for name in WISHES}
    for _ in range(ROUNDS):
        for name, wish in WISHES.items():
            found[name].append(run(engine, wish))
    return {name: min(seconds) for name, seconds in found.items()}


def table(seconds: dict[str, float]) -> str:
    """Rows of wish, step, and what it adds to the plain step."""
    plain = seconds["none"]
    rows = [
        [name, f"{1e3 * s:.2f}", f"{100 * (s / plain - 1):+.1f} %" if name != "none" else ""]
        for name, s in seconds.items()
    ]
    return markdown_table(["64 requests with", "ms per step", "more than none"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_sampling")
    parser.add_argument("--write", action="store_true", help="update benchmarks/README.md")
    arguments = parser.parse_args(argv)
    made = table(measure())
    print(made)
    if arguments.write:
        write_section("sampling", f"{made}\n\n{machine()}", README)


if __name__ == "__main__":
    main()

"""Decoding with drafts beside decoding without, on the shipped model: where it pays, and why.

    python -m benchmarks.bench_spec --write

Greedy, float32. Three kinds of text (code, a quoted passage asked for again, prose) at batch 1, 8
and 64; both contestants say the same tokens, which is checked. Beside each measured ratio stands
the one that lab 08-04's arithmetic predicts from what the run itself shows: the share of accepted
drafts by position, the cost of a verifying step and the cost of drafting, each in plain steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np

from benchmarks.report import machine, markdown_table, paired, write_section
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.spec_decode.metrics import SpecDecodingStats

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).with_name("spec.json")
BATCHES = (1, 8, 64)
OUTPUT_LEN = 96

PASSAGE = (
    "The block table of a request lists its physical blocks in the order of its tokens, so the key "
    "and value of token t stand in block t // block_size at offset t % block_size."
)


def prompts(kind: str, count: int) -> list[str]:
    """`count` different prompts of one kind of text."""
    if kind == "code":  # a function whose body repeats the names of its head
        return [
            f"def area_{n}(width, height):\n    return width * height\n\n\n"
            f"def volume_{n}(width, height, depth):\n    return width * height * depth\n\n\n"
            f"def area_{n + 1}(width, height):\n    return"
            for n in range(count)
        ]
    if kind == "quoted":  # the passage, then its beginning once more
        return [f"{n}. {PASSAGE}\n\n{n}. {PASSAGE[: 24 + n % 17]}" for n in range(count)]
    text = (ROOT / "GLOSSARY.md").read_text(encoding="utf-8")
    return [text[300 + 61 * n : 300 + 61 * n + 90] for n in range(count)]


@dataclass(frozen=True, slots=True)
class Run:
    """One row of the table."""

    kind: str
    batch: int
    drafter: str
    k: int
    plain_seconds: float
    drafted_seconds: float
    ratios: tuple[float, ...]
    stats: SpecDecodingStats
    num_steps: tuple[int, int]
    """Engine steps without and with drafts."""
    draft_share: float
    """Of the time with drafts, what the drafter took."""
    equal: float
    """Share of requests whose tokens are those of plain decoding."""

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def accepted_per_step(self) -> float:
        """Tokens per request and step that the drafts added, steps without drafts included."""
        generated = self.batch * OUTPUT_LEN
        return generated / (generated - self.stats.num_accepted_tokens)

    @property
    def verify_cost(self) -> float:
        """Time of a step with drafts, the drafter's apart, in plain steps: 1 + k lambda."""
        verify = self.drafted_seconds * (1 - self.draft_share) / self.num_steps[1]
        return verify / (self.plain_seconds / self.num_steps[0])

    @property
    def draft_cost(self) -> float:
        """Time of the drafter in a step, in plain steps: k c."""
        drafting = self.drafted_seconds * self.draft_share / self.num_steps[1]
        return drafting / (self.plain_seconds / self.num_steps[0])

    def to_json(self) -> dict[str, Any]:
        """The row as data, for the page that predicts it."""
        return {
            "text": self.kind,
            "batch": self.batch,
            "drafter": self.drafter,
            "k": self.k,
            "per_position": [round(rate, 4) for rate in self.stats.acceptance_rates_per_pos],
            "mean_acceptance_length": round(self.stats.mean_acceptance_length, 3),
            "c": round(self.draft_cost / self.k, 4),
            "lambda": round((self.verify_cost - 1) / self.k, 4),
            "predicted": round(predicted(self), 3),
            "measured": round(self.ratio, 3),
        }


def predicted(run: Run) -> float:
    """Lab 08-04: tokens of a step over its cost, E / (1 + k (c + lambda)).

    E counts every token of every request's step, so runs without drafts are in it; it is an
    upper bound for a batch, whose last request decides when it ends.
    """
    return run.accepted_per_step / (run.verify_cost + run.draft_cost)


class Contestant:
    """One engine, its prompts, and what it did."""

    def __init__(self, texts: list[str], config: dict[str, Any] | None) -> None:
        blocks = len(texts) * 32 + 64
        self.engine = LLMEngine(
            num_blocks=blocks,
            enable_prefix_caching=False,
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            speculative_config=config,
        )
        self.texts = texts
        self.outputs: list[Any] = []
        self.num_steps = 0
        self.drafting = 0.0
        self.engine.observers.append(self._count)
        if self.engine.speculator is not None:
            self._propose: Callable[..., Any] = self.engine.speculator.propose
            self.engine.speculator.propose = self._timed  # type: ignore[assignment, method-assign]

    def _count(self, _: object) -> None:
        self.num_steps += 1

    def _timed(self, *given: Any) -> Any:
        began = time.perf_counter()
        drafts = self._propose(*given)
        self.drafting += time.perf_counter() - began
        return drafts

    def run(self) -> None:
        """All prompts to their full length."""
        self.num_steps, self.drafting = 0, 0.0
        if self.engine.speculator is not None:
            speculator = self.engine.speculator
            speculator.stats = SpecDecodingStats(speculator.k)
        wish = SamplingParams(max_tokens=OUTPUT_LEN, ignore_eos=True)
        self.outputs = [r.outputs[0].token_ids for r in self.engine.generate(self.texts, wish)]


def measure(kind: str, batch: int, config: dict[str, Any], repeats: int) -> Run:
    """Both contestants in turn."""
    texts = prompts(kind, batch)
    plain, drafted = Contestant(texts, None), Contestant(texts, config)
    times = paired(drafted.run, plain.run, repeats)
    speculator = drafted.engine.speculator
    assert speculator is not None
    same = [a == b for a, b in zip(plain.outputs, drafted.outputs, strict=True)]
    return Run(
        kind,
        batch,
        str(config["method"]),
        int(config["num_speculative_tokens"]),
        min(times.theirs),
        min(times.ours),
        tuple(times.ratios),
        speculator.stats,
        (plain.num_steps, drafted.num_steps),
        drafted.drafting / times.ours[-1],
        float(np.mean(same)),
    )


def drafters() -> list[dict[str, Any]]:
    """n-gram, and the shipped draft model where there is one."""
    found: list[dict[str, Any]] = [
        {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_min": 3,
            "prompt_lookup_max": 6,
        }
    ]
    model = ROOT / "models" / "byte-draft"
    if model.is_dir():
        found.append({"method": "draft_model", "model": str(model), "num_speculative_tokens": 3})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_spec")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=["code", "quoted", "prose"])
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--write", action="store_true", help="update benchmarks/README.md")
    arguments = parser.parse_args()
    runs, rows = [], []
    each = partial(measure, repeats=arguments.repeats)
    for config in drafters():
        for kind in arguments.kinds:
            for batch in arguments.batches:
                runs.append(run := each(kind, batch, config))
                rows.append(
                    [
                        kind,
                        str(batch),
                        f"{run.drafter}, k={run.k}",
                        f"{run.stats.acceptance_rate:.0%}",
                        f"{run.stats.mean_acceptance_length:.2f}",
                        f"{batch * OUTPUT_LEN / run.plain_seconds:,.0f}",
                        f"{batch * OUTPUT_LEN / run.drafted_seconds:,.0f}",
                        f"{run.ratio:.2f}x ({min(run.ratios):.2f}-{max(run.ratios):.2f})",
                        f"{predicted(run):.2f}x",
                        f"{run.equal:.0%}",
                    ]
                )
                print(" | ".join(rows[-1]), f"c={run.draft_cost / run.k:.3f}",
                      f"lambda={(run.verify_cost - 1) / run.k:.3f}", flush=True)  # fmt: skip
    header = [
        "text", "batch", "drafter", "accepted", "length", "plain, tokens/s", "with drafts",
        "ratio, median (min-max)", "predicted", "equal outputs",
    ]  # fmt: skip
    note = f"{machine()}; numpy {np.__version__}, float32, {arguments.repeats} pairs."
    if arguments.write:
        write_section("spec", f"\n{markdown_table(header, rows)}\n\n{note}")
        data = {"machine": note, "rows": [run.to_json() for run in runs]}
        DATA.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

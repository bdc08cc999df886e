"""Decoding with drafts beside decoding without, on the shipped model: where it pays, and why.

    python -m benchmarks.bench_spec --write

Greedy, float32, one thread, processor time. Three kinds of text (code, a passage quoted again,
prose) at batch 1, 8 and 64; both contestants say the same tokens, which is checked. A third one
drafts nonsense and has nothing accepted: its step beside the plain step is what verifying costs.
From that, from the drafter's own time and from the share of accepted drafts lab 08-04's arithmetic
predicts each ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from benchmarks.report import machine
from labkit.tables import markdown_table, write_section
from mini_vllm import EngineParts, LLMEngine, SamplingParams
from mini_vllm.spec_decode.metrics import SpecDecodingStats

ROOT = Path(__file__).parents[1]
README = Path(__file__).with_name("README.md")
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


class Contestant:
    """One engine, its prompts, and what it did."""

    def __init__(
        self,
        texts: list[str],
        config: dict[str, Any] | None = None,
        drafter: Callable[..., list[int]] | None = None,
    ) -> None:
        self.engine = LLMEngine(
            num_blocks=len(texts) * 32 + 64,
            enable_prefix_caching=False,
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            speculative_config=config,
            parts=EngineParts(rooms={"spec_decode": {"drafter": drafter}}),
        )
        self.texts = texts
        self.outputs: list[Any] = []
        self.seconds: list[float] = []
        self.drafting: list[float] = []
        self.num_steps = 0
        self.engine.observers.append(self._count)
        if self.engine.feature("spec_decode") is not None:
            self._propose: Callable[..., Any] = self.engine.feature("spec_decode").propose
            self.engine.feature("spec_decode").propose = self._timed

    def run(self) -> None:
        """All prompts to their full length."""
        self.num_steps = 0
        self.drafting.append(0.0)
        if self.engine.feature("spec_decode") is not None:
            self.engine.feature("spec_decode").stats = SpecDecodingStats(
                self.engine.feature("spec_decode").k
            )
        wish = SamplingParams(max_tokens=OUTPUT_LEN, ignore_eos=True)
        began = time.process_time()
        outputs = self.engine.generate(self.texts, wish)
        self.seconds.append(time.process_time() - began)
        self.outputs = [result.outputs[0].token_ids for result in outputs]

    @property
    def step_seconds(self) -> float:
        """Processor seconds of a step, without the drafter's, in the fastest run."""
        pairs = zip(self.seconds, self.drafting, strict=True)
        return min(total - drafting for total, drafting in pairs) / self.num_steps

    def _count(self, _: object) -> None:
        self.num_steps += 1

    def _timed(self, *given: Any) -> Any:
        began = time.process_time()
        drafts = self._propose(*given)
        self.drafting[-1] += time.process_time() - began
        return drafts


@dataclass(frozen=True, slots=True)
class Run:
    """One row of the table."""

    kind: str
    config: dict[str, Any]
    plain: Contestant
    drafted: Contestant
    nonsense: Contestant

    @property
    def k(self) -> int:
        return int(self.config["num_speculative_tokens"])

    @property
    def stats(self) -> SpecDecodingStats:
        assert self.drafted.engine.feature("spec_decode") is not None
        return self.drafted.engine.feature("spec_decode").stats

    @property
    def ratios(self) -> list[float]:
        """How many times faster with drafts, pair by pair."""
        pairs = zip(self.plain.seconds, self.drafted.seconds, strict=True)
        return [plain / drafted for plain, drafted in pairs]

    @property
    def num_tokens(self) -> int:
        return len(self.plain.texts) * OUTPUT_LEN

    @property
    def tokens_per_step(self) -> float:
        """E: tokens of a request's step, steps without drafts included."""
        return self.num_tokens / (self.num_tokens - self.stats.num_accepted_tokens)

    @property
    def draft_cost(self) -> float:
        """c: one draft, in plain steps."""
        drafting = min(self.drafted.drafting) / self.drafted.num_steps
        return drafting / self.plain.step_seconds / self.k

    @property
    def verify_cost(self) -> float:
        """lambda: what one more token to verify adds to a step, in plain steps."""
        return (self.nonsense.step_seconds / self.plain.step_seconds - 1) / self.k

    @property
    def drafts_per_step(self) -> float:
        """d: draft tokens of a request's step, at most k; less where the drafter finds nothing."""
        return self.stats.num_draft_tokens / (self.num_tokens - self.stats.num_accepted_tokens)

    @property
    def predicted(self) -> float:
        """Lab 08-04: tokens of a step over its cost, E / (1 + k c + d lambda)."""
        cost = 1 + self.k * self.draft_cost + self.drafts_per_step * self.verify_cost
        return self.tokens_per_step / cost

    @property
    def equal(self) -> float:
        """Share of requests whose tokens are those of plain decoding."""
        pairs = zip(self.plain.outputs, self.drafted.outputs, strict=True)
        return float(np.mean([a == b for a, b in pairs]))

    def to_json(self) -> dict[str, Any]:
        """The row as data, for the page that predicts it."""
        return {
            "text": self.kind,
            "batch": len(self.plain.texts),
            "drafter": self.config["method"],
            "k": self.k,
            "per_position": [round(rate, 4) for rate in self.stats.acceptance_rates_per_pos],
            "mean_acceptance_length": round(self.stats.mean_acceptance_length, 3),
            "tokens_per_step": round(self.tokens_per_step, 3),
            "drafts_per_step": round(self.drafts_per_step, 3),
            "c": round(self.draft_cost, 4),
            "lambda": round(self.verify_cost, 4),
            "predicted": round(self.predicted, 3),
            "measured": round(statistics.median(self.ratios), 3),
        }

    def row(self) -> list[str]:
        """The row of the page's table."""
        ratios = self.ratios
        return [
            self.kind,
            str(len(self.plain.texts)),
            f"{self.config['method']}, k={self.k}",
            f"{self.stats.acceptance_rate:.0%}",
            f"{self.tokens_per_step:.2f}",
            f"{self.drafts_per_step:.2f}",
            f"{self.draft_cost:.3f}",
            f"{self.verify_cost:.3f}",
            f"{self.predicted:.2f}x",
            f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})",
            f"{self.num_tokens / min(self.plain.seconds):,.0f}",
            f"{self.num_tokens / min(self.drafted.seconds):,.0f}",
            f"{self.equal:.0%}",
        ]


def nonsense(context: list[int], n: int, k: int) -> list[int]:
    """Drafts that no text goes on with: bytes that are not UTF-8."""
    return [255] * k


def measure(kind: str, batch: int, config: dict[str, Any], repeats: int) -> Run:
    """The three contestants in turn, after one run of each that does not count."""
    texts = prompts(kind, batch)
    k = config["num_speculative_tokens"]
    lookup = {"method": "ngram", "num_speculative_tokens": k}
    run = Run(
        kind, config, Contestant(texts), Contestant(texts, config),
        Contestant(texts, lookup, nonsense),
    )  # fmt: skip
    contestants = run.plain, run.drafted, run.nonsense
    for _ in range(repeats + 1):
        for contestant in contestants:
            contestant.run()
    for contestant in contestants:
        del contestant.seconds[0], contestant.drafting[0]
    return run


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
    runs = []
    for config in drafters():
        for kind in arguments.kinds:
            for batch in arguments.batches:
                runs.append(measure(kind, batch, config, arguments.repeats))
                print(" | ".join(runs[-1].row()), flush=True)
    header = [
        "text", "batch", "drafter", "accepted", "E", "d", "c", "λ", "predicted",
        "ratio, median (min-max)", "plain, tokens/s", "with drafts", "equal outputs",
    ]  # fmt: skip
    note = (
        f"{machine()}; numpy {np.__version__}, float32, one thread, processor time, "
        f"{arguments.repeats} pairs."
    )
    if arguments.write:
        table = markdown_table(header, [run.row() for run in runs])
        write_section("spec", f"\n{table}\n\n{note}", README)
        data = {"machine": note, "rows": [run.to_json() for run in runs]}
        DATA.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Grouped experts against a loop over (token, expert) pairs and a loop over experts; same results.

    python -m benchmarks.bench_experts --write

Shapes are those of the shipped model's layers with experts: hidden 256, 16 experts of 56, top-2,
float32. The loop over experts looks for each expert's tokens with a mask. The clock counts this
thread's CPU time, so that other work on the machine does not, with OPENBLAS_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.report import README, Paired, machine
from labkit.tables import markdown_table, write_section
from mini_vllm.models.mlp import Mlp
from mini_vllm.models.moe import moe_forward_grouped, route
from mini_vllm.models.transformer import Linear

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 256, 56, 16, 2
TARGETS = {"pairs": {64: 3.0}, "experts": dict.fromkeys((1, 8, 64, 512), 1.0)}


def by_pairs(
    x: np.ndarray, experts: Sequence[Mlp], topk_ids: np.ndarray, topk_weights: np.ndarray
) -> np.ndarray:
    """One product of one row for each pair."""
    out = np.zeros_like(x)
    for token, (ids, weights) in enumerate(zip(topk_ids, topk_weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            out[token] += weight * experts[expert](x[token : token + 1])[0]
    return out


def by_experts(
    x: np.ndarray, experts: Sequence[Mlp], topk_ids: np.ndarray, topk_weights: np.ndarray
) -> np.ndarray:
    """One product for each expert that a mask finds tokens for."""
    out = np.zeros_like(x)
    for number, expert in enumerate(experts):
        tokens, slots = np.nonzero(topk_ids == number)
        if len(tokens):
            out[tokens] += topk_weights[tokens, slots, None] * expert(x[tokens])
    return out


def main() -> None:
    """Measure every row, print it, and write the table into the README if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--write", action="store_true", help="update benchmarks/README.md")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    experts = [
        Mlp(
            Linear(rng.standard_normal((2 * INNER, HIDDEN), dtype=np.float32) / 16),
            Linear(rng.standard_normal((HIDDEN, INNER), dtype=np.float32) / 8),
        )
        for _ in range(NUM_EXPERTS)
    ]
    rows = []
    for name, other in (("pairs", by_pairs), ("experts", by_experts)):
        for tokens in (1, 8, 64, 512):
            x = rng.standard_normal((tokens, HIDDEN), dtype=np.float32)
            logits = rng.standard_normal((tokens, NUM_EXPERTS), dtype=np.float32)
            arguments = (x, experts, *route(logits, TOP_K, True))
            if not np.allclose(moe_forward_grouped(*arguments), other(*arguments), atol=1e-4):
                raise RuntimeError(f"{name}, {tokens} tokens: the results differ")
            timing = Paired([], [])
            for repeat in range(args.repeats + 1):
                for run, times in ((moe_forward_grouped, timing.ours), (other, timing.theirs)):
                    began = time.thread_time()
                    run(*arguments)
                    if repeat:  # the first pair warms up
                        times.append(time.thread_time() - began)
            each = [f"{statistics.median(t) * 1e6:,.0f}" for t in (timing.ours, timing.theirs)]
            target = TARGETS[name].get(tokens)
            goal = f"{target}x" if target else "-"
            rows.append([f"loop over {name}", str(tokens), *each, timing.ratio_text(), goal])
            print(" | ".join(rows[-1]), flush=True)
    header = ["against", "tokens", "grouped, µs", "loop, µs", "ratio, median (min-max)", "target"]
    text = markdown_table(header, rows)
    text += f"\n\nOne layer, median of {args.repeats} pairs. {machine()}."
    if args.write:
        write_section("experts", text, README)


if __name__ == "__main__":
    main()

"""What the type of the running sums costs, by context and by number of splits, against float64.

`python phase-04-attention-backends/experiments/measure_precision.py` runs the loop of labs 04-01
and 04-04 with m, denom and acc in fp16, bf16 and fp32, and the shipped model in float32 with one
split and with several. It prints tables and writes `precision.json` into `--out`. No time is
measured. Last digits may differ between machines, since BLAS libraries add in different orders.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mini_vllm import EngineParts, LLMEngine, SamplingParams
from mini_vllm.batch import ForwardBatch

ROOT = Path(__file__).resolve().parents[2]


HEADS, DIM, TILE = 16, 64, 16
"""Rows attended at once, numbers per head, keys per turn: the Triton kernel's tile for decode."""
CONTEXTS = (128, 512, 2048, 8192, 32768, 131072)
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Round = Callable[[np.ndarray], np.ndarray]


def to_fp16(x: np.ndarray) -> np.ndarray:
    """The nearest float16, kept in float32."""
    return x.astype(np.float16).astype(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, ties to even, kept in float32. Inputs are finite or infinite."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def to_fp32(x: np.ndarray) -> np.ndarray:
    """float32 itself."""
    return np.asarray(x, dtype=np.float32)


ROUNDINGS: dict[str, Round] = {"fp16": to_fp16, "bf16": to_bf16, "fp32": to_fp32}
EPSILON = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}
"""Largest relative error of one rounding."""


def inputs(context: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries [HEADS, DIM], keys and values [context, DIM] as fp16 numbers; values around 1."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((HEADS, DIM), dtype=np.float32)
    k = rng.standard_normal((context, DIM), dtype=np.float32)
    v = rng.standard_normal((context, DIM), dtype=np.float32) + 1
    return to_fp16(q), to_fp16(k), to_fp16(v)


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """float64 attention on the same fp16 numbers: [HEADS, DIM]."""
    scores = q.astype(np.float64) @ k.T.astype(np.float64) * DIM**-0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights @ v.astype(np.float64) / weights.sum(axis=1, keepdims=True)


def partial(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, rounded: Round
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(m, denom, acc) of some keys; the sums are rounded after every turn of the loop.

    Within a turn everything is float32, as a tensor core's product is: what differs is the type
    of what is carried from turn to turn.
    """
    m = np.full(len(q), -np.inf, dtype=np.float32)
    denom = np.zeros(len(q), dtype=np.float32)
    acc = np.zeros((len(q), v.shape[1]), dtype=np.float32)
    scaled = q * np.float32(DIM**-0.5)
    for start in range(0, len(k), TILE):
        scores = scaled @ k[start : start + TILE].T  # [HEADS, TILE]
        new_m = rounded(np.maximum(m, scores.max(axis=1)))
        corr, p = np.exp(m - new_m), np.exp(scores - new_m[:, None])
        denom = rounded(denom * corr + p.sum(axis=1))
        acc = rounded(acc * corr[:, None] + p @ v[start : start + TILE])
        m = new_m
    return m, denom, acc


def split_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, splits: int, rounded: Round
) -> np.ndarray:
    """Whole tiles per split, as the kernels cut; merged in float32: [HEADS, DIM]."""
    tiles = -(-len(k) // TILE)
    per_split = -(-tiles // splits) * TILE
    parts = [
        partial(q, k[i : i + per_split], v[i : i + per_split], rounded)
        for i in range(0, len(k), per_split)
    ]
    m = np.max([part[0] for part in parts], axis=0)
    denom = np.zeros_like(m)
    acc = np.zeros((len(m), v.shape[1]), dtype=np.float32)
    for part_m, part_denom, part_acc in parts:
        scale = np.exp(part_m - m)
        denom += part_denom * scale
        acc += part_acc * scale[:, None]
    return acc / denom[:, None]


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the error over that of the output."""
    return float(np.sqrt(np.mean((out - expected) ** 2) / np.mean(expected**2)))


def errors(cells: Sequence[tuple[int, int]], seeds: int) -> list[dict[str, Any]]:
    """Errors of each (context, splits) and each type of sum, averaged over seeds."""
    found = []
    for context, splits in cells:
        row: dict[str, Any] = {"context": context, "splits": splits}
        for name, rounded in ROUNDINGS.items():
            values = []
            for seed in range(seeds):
                q, k, v = inputs(context, seed)
                values.append(
                    relative_error(split_attention(q, k, v, splits, rounded), exact(q, k, v))
                )
            row[name] = float(f"{np.mean(values):.3e}")
        found.append(row)
    return found


def changed_bits(context: int, splits: Sequence[int], seeds: int) -> list[dict[str, Any]]:
    """Share of outputs whose bits differ from one split's, sums in fp32; then stored in 16 bits."""
    totals = {count: dict.fromkeys(ROUNDINGS, 0) for count in splits}
    for seed in range(seeds):
        q, k, v = inputs(context, seed)
        one = split_attention(q, k, v, 1, to_fp32)
        for count in splits:
            out = split_attention(q, k, v, count, to_fp32)
            for name, rounded in ROUNDINGS.items():
                totals[count][name] += int((rounded(out) != rounded(one)).sum())
    size = seeds * HEADS * DIM
    return [
        {"splits": count} | {name: round(found / size, 6) for name, found in total.items()}
        for count, total in totals.items()
    ]


# ------------------------------------------------------------------ the shipped model


def split_part(splits: int) -> Callable[..., np.ndarray]:
    """An attention part for the engine: one query and head at a time, keys in `splits` parts."""

    def paged_attention(
        query: np.ndarray, layer_cache: np.ndarray, batch: ForwardBatch, scale: float
    ) -> np.ndarray:
        group = query.shape[1] // layer_cache.shape[3]
        out = np.empty_like(query)
        for i in range(batch.num_reqs):
            table = batch.block_tables[i, : -(-int(batch.seq_lens[i]) // batch.block_size)]
            k, v = layer_cache[:, table].reshape(2, -1, *layer_cache.shape[3:])
            for token in range(batch.query_start_loc[i], batch.query_start_loc[i + 1]):
                stop = int(batch.positions[token]) + 1
                for head in range(query.shape[1]):
                    keys, values = k[:stop, head // group], v[:stop, head // group]
                    scores = keys @ (query[token, head] * query.dtype.type(scale))
                    m = scores.max()
                    parts = [
                        (p.sum(), p @ rows)
                        for p, rows in zip(
                            np.array_split(np.exp(scores - m), splits),
                            np.array_split(values, splits),
                            strict=True,
                        )
                    ]
                    denom = query.dtype.type(0)
                    acc = np.zeros(query.shape[2], dtype=query.dtype)
                    for part_denom, part_acc in parts:
                        denom, acc = denom + part_denom, acc + part_acc
                    out[token, head] = acc / denom
        return out

    return paged_attention


PROMPTS = (
    "The scheduler decides which requests run",
    "A block table maps positions to",
    "Attention reads the keys of",
    "import numpy as np\n\ndef ",
    "The KV cache holds",
    "When a request is preempted",
)


def model_run(splits: int, tokens: int, dtype: str) -> tuple[list[list[int]], list[np.ndarray]]:
    """Greedy tokens of the shipped model, and the logits behind each, request by request."""
    engine = LLMEngine(dtype=dtype, parts=EngineParts(attention=split_part(splits)))
    rows: list[np.ndarray] = []
    execute = engine.runner.execute

    def watch(plan: Any) -> np.ndarray:
        logits = execute(plan)
        rows.append(np.array(logits))
        return logits

    engine.runner.execute = watch  # type: ignore[assignment,method-assign]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    outputs, logits = [], []
    for prompt in PROMPTS:
        rows.clear()
        (result,) = engine.generate([prompt], params)
        outputs.append([int(t) for t in result.outputs[0].token_ids])
        logits.append(np.concatenate(rows)[-tokens:])
    return outputs, logits


def model_effect(splits: int, tokens: int) -> list[dict[str, Any]]:
    """The shipped model with one split and with several, in float32 and in float64."""
    found = []
    for dtype in ("float32", "float64"):
        (one, one_logits), (many, many_logits) = (model_run(n, tokens, dtype) for n in (1, splits))
        same = [_common(a, b) for a, b in zip(one, many, strict=True)]
        pairs = [
            (a[: n + 1], b[: n + 1]) for a, b, n in zip(one_logits, many_logits, same, strict=True)
        ]
        different = sum(int((a != b).sum()) for a, b in pairs)
        gaps = [np.sort(a, axis=1)[:, -1] - np.sort(a, axis=1)[:, -2] for a, _ in pairs]
        found.append(
            {
                "dtype": dtype,
                "splits": splits,
                "tokens": tokens * len(PROMPTS),
                "tokens_alike": sum(same),
                "logits_changed": different / sum(a.size for a, _ in pairs),
                "largest_change": float(max(np.abs(a - b).max() for a, b in pairs)),
                "smallest_gap": float(min(gap.min() for gap in gaps)),
            }
        )
    return found


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


# ------------------------------------------------------------------ merging in log-sum-exp form


def merge_lse(
    a: tuple[np.ndarray, np.floating[Any]], b: tuple[np.ndarray, np.floating[Any]]
) -> tuple[np.ndarray, Any]:
    """Lab 04-04's `merge_lse` for finite lse, in the dtype of its arguments."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    largest = max(lse_a, lse_b)
    weight_a, weight_b = np.exp(lse_a - largest), np.exp(lse_b - largest)
    total = weight_a + weight_b
    return out_a * (weight_a / total) + out_b * (weight_b / total), largest + np.log(total)


def merge_bound(lse: Sequence[float], values: np.ndarray, unit: float) -> tuple[float, float]:
    """How far two groupings of three parts may lie apart: (outputs, lse).

    `unit` is the largest relative error of one rounding, u; L is the size of the largest lse. The
    difference of two lse is at most 2 L and rounds by 2 L u, which exp turns into a relative
    error of a weight. With exp, the sum and the division, a normalised weight errs by about
    (4 L + 8) u, and so does the output, times the largest input. The new lse errs by about
    (3 L + 4) u: 2 L u from the weights, L u when it is stored. Two merges make a grouping, the
    second with weights that are off by twice the first's lse error, and there are two groupings:
    2 (2 (4 L + 8) + 2 (3 L + 4)) u = (28 L + 48) u, and 2 * 2 (3 L + 4) u in lse.
    """
    size = max(abs(value) for value in lse) + math.log(len(lse))
    outputs = (28 * size + 48) * unit * float(np.abs(values).max())
    return outputs, (12 * size + 16) * unit


# ------------------------------------------------------------------ tables


def table(saved: dict[str, Any]) -> str:
    """All tables as text."""
    lines = [
        "relative error of the output, root mean square, against float64; inputs are fp16 numbers",
        " context  splits      fp16 sums   bf16 sums   fp32 sums",
    ]
    for row in saved["by_context"] + saved["by_splits"]:
        lines.append(
            f"{row['context']:>8}  {row['splits']:>6}     "
            + "   ".join(f"{row[name]:9.1e}" for name in ROUNDINGS)
        )
    lines.append(
        f"{saved['bits_outputs']:,} outputs at context {saved['bits_context']}, fp32 sums: "
        "share that differs from one split's"
    )
    lines.append("  splits   as fp32   stored as fp16   stored as bf16")
    for row in saved["bits"]:
        lines.append(
            f"  {row['splits']:>6}   {row['fp32']:>7.1%}   {row['fp16']:>14.2%}"
            f"   {row['bf16']:>14.2%}"
        )
    lines.append("the shipped model, greedy, one split against several")
    for row in saved["model"]:
        lines.append(
            f"  {row['dtype']}, {row['splits']} splits: {row['tokens_alike']} of {row['tokens']} "
            f"tokens alike; {row['logits_changed']:.0%} of the logits changed, by at most "
            f"{row['largest_change']:.0e}; the two best logits are {row['smallest_gap']:.0e} apart "
            "at the closest"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Errors of attention's running sums.")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--splits", type=int, nargs="+", default=list(SPLITS))
    parser.add_argument("--splits-context", type=int, default=32768)
    parser.add_argument("--bits-context", type=int, default=8192)
    parser.add_argument("--bits-seeds", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("my-precision"))
    arguments = parser.parse_args(argv)
    context = arguments.splits_context
    saved = {
        "by_context": errors([(c, 1) for c in arguments.contexts], arguments.seeds),
        "by_splits": errors([(context, s) for s in arguments.splits], arguments.seeds),
        "bits_context": arguments.bits_context,
        "bits_outputs": arguments.bits_seeds * HEADS * DIM,
        "bits": changed_bits(arguments.bits_context, arguments.splits[1:], arguments.bits_seeds),
        "model": model_effect(16, arguments.tokens),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(saved, indent=1) + "\n"
    (arguments.out / "precision.json").write_text(text, encoding="utf-8")
    print(table(saved))


if __name__ == "__main__":
    main()

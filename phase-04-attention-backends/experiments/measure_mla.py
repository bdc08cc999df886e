"""Multi-head latent attention in numpy: two forms, one result; bytes of cache and FLOP of each.

`python phase-04-attention-backends/experiments/measure_mla.py` compares the forms on random
weights, counts what each costs, prints tables and writes `mla.json` into `--out`. No time is
measured. Names follow the notes at the top of
`vllm/model_executor/layers/attention/mla_attention.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of an MLA layer."""

    heads: int = 128
    latent: int = 512
    """Lkv, values of the compressed K and V."""
    nope: int = 128
    """P, values of a key per head that carry no position."""
    rope: int = 64
    """R, rotated values of a key, shared by all heads."""
    v: int = 128
    """V, values of a value per head."""

    @property
    def cached(self) -> int:
        """Values cached per token and layer."""
        return self.latent + self.rope

    @property
    def expanded(self) -> int:
        """Values per token and layer if K and V were cached for every head."""
        return self.heads * (self.nope + self.rope + self.v)


DEEPSEEK_V3 = Shape()
LAYERS = 61
SMALL = Shape(heads=4, latent=32, nope=12, rope=8, v=10)


@dataclass(frozen=True, slots=True)
class Weights:
    """The two halves of `kv_b_proj`, per head."""

    uk: np.ndarray
    """W_UK [latent, heads, nope]: latent to the part of a key without position."""
    uv: np.ndarray
    """W_UV [latent, heads, v]: latent to a value."""


def make_weights(shape: Shape, seed: int) -> Weights:
    """Random weights of a size that keeps keys and values of order 1."""
    rng = np.random.default_rng(seed)
    scale = shape.latent**-0.5
    return Weights(
        scale * rng.standard_normal((shape.latent, shape.heads, shape.nope)),
        scale * rng.standard_normal((shape.latent, shape.heads, shape.v)),
    )


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def causal(num_queries: int, num_keys: int) -> np.ndarray:
    """[num_queries, num_keys]: 0 where visible, -inf where not; queries are the last positions."""
    positions = num_keys - num_queries + np.arange(num_queries)[:, None]
    return np.where(np.arange(num_keys) <= positions, 0.0, -np.inf)


def forward_mha(
    q_nope: np.ndarray, q_pe: np.ndarray, kv_c: np.ndarray, k_pe: np.ndarray, weights: Weights
) -> np.ndarray:
    """Expand the latent to K and V of every head, then ordinary attention: the form for prefill.

    Args:
        q_nope: [queries, heads, nope].
        q_pe: [queries, heads, rope], rotated.
        kv_c: [keys, latent], from the cache.
        k_pe: [keys, rope], rotated, from the cache; one for all heads.

    Returns:
        [queries, heads, v].

    Source: `vllm/model_executor/layers/attention/mla_attention.py:2246`
    `MLACommonImpl.forward_mha`.
    """
    k_nope = np.einsum("kl,lhp->khp", kv_c, weights.uk)
    v = np.einsum("kl,lhv->khv", kv_c, weights.uv)
    k = np.concatenate(
        [k_nope, np.broadcast_to(k_pe[:, None], (*k_nope.shape[:2], len(k_pe[0])))], -1
    )
    q = np.concatenate([q_nope, q_pe], -1)  # [queries, heads, nope + rope]
    scores = np.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    return np.einsum("hqk,khv->qhv", softmax(scores + causal(len(q), len(k))), v)


def forward_mqa(
    q_nope: np.ndarray, q_pe: np.ndarray, kv_c: np.ndarray, k_pe: np.ndarray, weights: Weights
) -> np.ndarray:
    """Bring the query into the latent instead: one shared K and V for all heads; for decode.

    Arguments and result as `forward_mha`. The scale stays that of nope + rope.

    Source: `vllm/v1/attention/backends/mla/triton_mla.py:136` `TritonMLAImpl.forward_mqa`.
    """
    ql_nope = np.einsum("qhp,lhp->qhl", q_nope, weights.uk)
    k = np.concatenate([kv_c, k_pe], -1)  # [keys, latent + rope]: the cache as it is
    q = np.concatenate([ql_nope, q_pe], -1)
    scores = np.einsum("qhd,kd->hqk", q, k) * (q_nope.shape[2] + q_pe.shape[2]) ** -0.5
    latent = np.einsum("hqk,kl->qhl", softmax(scores + causal(len(q), len(k))), kv_c)
    return np.einsum("qhl,lhv->qhv", latent, weights.uv)


def case(shape: Shape, num_queries: int, num_keys: int, seed: int) -> tuple[Any, ...]:
    """Random arguments of both forms."""
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((num_queries, shape.heads, shape.nope)),
        rng.standard_normal((num_queries, shape.heads, shape.rope)),
        rng.standard_normal((num_keys, shape.latent)),
        rng.standard_normal((num_keys, shape.rope)),
        make_weights(shape, seed),
    )


def flops_mha(shape: Shape, num_queries: int, num_keys: int) -> int:
    """FLOP of `forward_mha` for all heads, every pair counted: expansion, scores, values."""
    expand = 2 * num_keys * shape.latent * (shape.nope + shape.v)
    attend = 2 * num_queries * num_keys * (shape.nope + shape.rope + shape.v)
    return shape.heads * (expand + attend)


def flops_mqa(shape: Shape, num_queries: int, num_keys: int) -> int:
    """FLOP of `forward_mqa`: two projections of the queries, scores and values in the latent."""
    project = 2 * num_queries * shape.latent * (shape.nope + shape.v)
    attend = 2 * num_queries * num_keys * (shape.latent + shape.rope + shape.latent)
    return shape.heads * (project + attend)


def crossover(shape: Shape, num_keys: int) -> int:
    """Fewest queries over `num_keys` cached keys for which the expanded form takes fewer FLOP."""
    queries = 1
    while flops_mha(shape, queries, num_keys) >= flops_mqa(shape, queries, num_keys):
        queries += 1
    return queries


def agreement(layers: dict[str, Shape]) -> list[dict[str, Any]]:
    """Whether both forms give the same on random weights, for a decode, a chunk and a prompt."""
    found = []
    for name, shape in layers.items():
        for num_queries, num_keys in ((1, 40), (7, 40), (40, 40)):
            arguments = case(shape, num_queries, num_keys, 0)
            difference = np.abs(forward_mha(*arguments) - forward_mqa(*arguments)).max()
            found.append(
                {
                    "layer": name,
                    "queries": num_queries,
                    "keys": num_keys,
                    "below": 1e-12,
                    "agree": bool(difference < 1e-12),
                }
            )
    return found


def counts() -> dict[str, Any]:
    """Bytes and FLOP of DeepSeek-V3's shape."""
    gqa = 2 * 8 * 128
    per_token = {
        "every head's K and V": DEEPSEEK_V3.expanded,
        "8 KV heads of 128 (GQA)": gqa,
        "latent and rope (MLA)": DEEPSEEK_V3.cached,
    }
    queries = [2**n for n in range(13)]
    return {
        "shape": asdict(DEEPSEEK_V3),
        "layers": LAYERS,
        "values_per_token_and_layer": per_token,
        "keys": 8192,
        "queries": queries,
        "flops_mha": [flops_mha(DEEPSEEK_V3, n, 8192) for n in queries],
        "flops_mqa": [flops_mqa(DEEPSEEK_V3, n, 8192) for n in queries],
        "crossover": {str(keys): crossover(DEEPSEEK_V3, keys) for keys in (1024, 8192, 131072)},
    }


def table(saved: dict[str, Any]) -> str:
    """The counts as text."""
    lines = ["two forms, float64"]
    for row in saved["agreement"]:
        verdict = "agree" if row["agree"] else "DIFFER"
        lines.append(
            f"  {row['layer']:<12} {row['queries']:>3} queries, {row['keys']} keys: {verdict} "
            f"to {row['below']:g}"
        )
    lines.append(f"cache per token, {saved['layers']} layers, 2 bytes a value")
    least = min(saved["values_per_token_and_layer"].values())
    for name, values in saved["values_per_token_and_layer"].items():
        size = values * saved["layers"] * 2
        lines.append(
            f"  {name:<24} {values:>6,} values a layer  {size:>9,} B  {size / 1024:>7,.1f} KiB"
            f"  {values / least:>5.2f} x"
        )
    lines.append(f"GFLOP of one layer over {saved['keys']:,} keys, all pairs")
    for n, mha, mqa in zip(saved["queries"], saved["flops_mha"], saved["flops_mqa"], strict=True):
        if n in (1, 16, 128, 256, 4096):
            lines.append(
                f"  {n:>4} queries   expanded {mha / 1e9:>9,.1f}   in the latent {mqa / 1e9:>9,.1f}"
            )
    for keys, queries in saved["crossover"].items():
        lines.append(
            f"  over {int(keys):>7,} keys the expanded form wins from {queries} queries on"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, count, print, write."""
    parser = argparse.ArgumentParser(description="Two forms of multi-head latent attention.")
    parser.add_argument("--out", type=Path, default=Path("my-mla"))
    arguments = parser.parse_args(argv)
    layers = {"small": SMALL, "DeepSeek-V3": DEEPSEEK_V3}
    saved = {"agreement": agreement(layers), **counts()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(saved, indent=1) + "\n"
    (arguments.out / "mla.json").write_text(text, encoding="utf-8")
    print(table(saved))


if __name__ == "__main__":
    main()

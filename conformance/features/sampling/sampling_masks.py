"""Record the three masks of the sampler of the real v0.22.1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Case = dict[str, Any]

ABOUT = (
    '`{"logits", "top_k", "top_p", "min_p", "kept"}`: ids that survive, in the real order. The '
    "real sampler works in float32. Rows where rounding could decide (a probability within 1e-4 "
    "of a bound, or equal logits under top-p) are left out; equal logits under top-k are kept."
)


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    import torch
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    rng = np.random.default_rng(6)
    count = 0
    while count < 600:
        vocabulary = int(rng.choice((4, 8, 24)))
        logits = rng.normal(0, float(rng.choice((0.5, 2.0, 6.0))), vocabulary)
        logits += float(rng.choice((0.0, 0.0, 1000.0)))
        top_k = int(rng.choice((0, 0, 1, 2, 3, vocabulary)))
        top_p = float(rng.choice((1.0, 0.1, 0.5, 0.9, 0.99)))
        min_p = float(rng.choice((0.0, 0.0, 0.05, 0.3, 1.0)))
        if top_p == 1.0 and rng.random() < 0.4:
            logits = np.round(logits)  # ties
        logits = np.round(logits.astype(np.float32), 3).astype(np.float32)
        if not _survives_rounding(logits.astype(np.float64), top_k, top_p, min_p):
            continue
        row = torch.tensor(logits).unsqueeze(0)
        processor = MinPLogitsProcessor.__new__(MinPLogitsProcessor)
        processor.min_p_count, processor.min_p = int(min_p > 0), torch.tensor([[min_p]])
        row = processor.apply(row)
        k = torch.tensor([top_k]) if 0 < top_k < vocabulary else None
        p = torch.tensor([top_p], dtype=torch.float32) if top_p < 1.0 else None
        row = apply_top_k_top_p_pytorch(row, k, p)
        yield {
            "logits": [round(float(value), 3) for value in logits],
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "kept": torch.nonzero(row[0] > -torch.inf).flatten().tolist(),
        }
        count += 1


def _survives_rounding(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether float32 cannot change the outcome: no probability is close to its bound."""
    if top_p < 1.0 and len(set(logits)) < len(logits):
        return False
    weights = np.exp(logits - logits.max())
    ratio = weights  # probability over the largest one: what min-p compares with min_p
    if 0.0 < min_p < 1.0 and np.abs(ratio - min_p).min() < 1e-4:
        return False
    kept = weights[ratio >= min_p] if min_p > 0.0 else weights
    kept = np.sort(kept)[::-1]
    if 0 < top_k < len(kept):
        kept = kept[kept >= kept[top_k - 1]]
    mass = np.cumsum(kept) / kept.sum()
    return top_p == 1.0 or float(np.abs(mass - top_p).min()) > 1e-4

"""Lab 07-01: route tokens to experts, and compute the experts one after the other.

`route`, `moe_forward_reference`, `moe_forward_grouped` and `align_block_size` are the lab. The
third has the signature the engine calls, so a model with experts can run on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Expert = Callable[[np.ndarray], np.ndarray]
"""[num_rows, hidden_size] to [num_rows, hidden_size], each row for itself. Its cost is the call."""


def route(
    x: np.ndarray, w_gate: np.ndarray, k: int, renormalize: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Choose `k` experts for each token.

    A token's logits are its products with the rows of `w_gate`; its scores are their softmax over
    *all* experts. The `k` largest scores are its weights, of equal ones the lower id's first; with
    `renormalize` they are divided by their sum. Logits of a thousand are as good as any.

    Args:
        x: [num_tokens, hidden_size]; no tokens are allowed.
        w_gate: [num_experts, hidden_size].
        k: 1 to num_experts.

    Returns:
        `topk_ids` int64 [num_tokens, k], in order of falling score, and `topk_weights`, the same
        shape.

    Raises:
        ValueError: `k` is out of range; the message holds it.

    Source: `vllm/model_executor/layers/fused_moe/router/fused_topk_router.py:69` `fused_topk`.
    """
    num_experts = len(w_gate)
    if not 1 <= k <= num_experts:
        raise ValueError(f"k={k}: need 1 to {num_experts}, the number of experts")
    logits = x @ w_gate.T  # [num_tokens, num_experts]
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)
    topk_ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    topk_weights = np.take_along_axis(scores, topk_ids, axis=1)
    if renormalize:
        topk_weights /= topk_weights.sum(axis=1, keepdims=True)
    return topk_ids, topk_weights


def moe_forward_reference(
    x: np.ndarray, experts: Sequence[Expert], topk_ids: np.ndarray, topk_weights: np.ndarray
) -> np.ndarray:
    """The definition: each token for itself, each of its experts for itself, weighted and summed.

    Args:
        x: [num_tokens, hidden_size].
        experts: by expert id.
        topk_ids: int [num_tokens, k]; topk_weights: the same shape. A token may name an expert
            twice: it gets both shares.

    Returns:
        [num_tokens, hidden_size], dtype of `x`. No argument is changed.
    """
    out = np.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(topk_ids[token], topk_weights[token], strict=True):
            out[token] += weight * experts[expert](x[token : token + 1])[0]
    return out


def moe_forward_grouped(
    x: np.ndarray, experts: Sequence[Expert], topk_ids: np.ndarray, topk_weights: np.ndarray
) -> np.ndarray:
    """The same values, with one call for each expert that was chosen and none for the others.

    An expert's call gets a row for each of its pairs, in the order of the tokens: one that names it
    twice has two rows in it. The engine calls this in each layer with experts.

    Args and returns:
        As `moe_forward_reference`.

    Source: `vllm/model_executor/layers/fused_moe/fused_moe.py:1664` `fused_experts_impl`.
    """
    num_tokens, k = topk_ids.shape
    flat = topk_ids.reshape(-1)  # [num_tokens * k], pair p belongs to token p // k
    order = np.argsort(flat, kind="stable")
    loads = np.bincount(flat, minlength=len(experts))
    ends = np.cumsum(loads)
    pairs = np.zeros((num_tokens * k, x.shape[1]), dtype=x.dtype)
    for expert, (load, end) in enumerate(zip(loads, ends, strict=True)):
        if load:
            mine = order[end - load : end]
            pairs[mine] = experts[expert](x[mine // k])
    weighted = pairs.reshape(num_tokens, k, -1) * topk_weights[:, :, None]
    return weighted.sum(axis=1).astype(x.dtype, copy=False)


def align_block_size(
    topk_ids: np.ndarray, block_size: int, num_experts: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Lay the pairs out so that every block of `block_size` rows belongs to one expert.

    Pair p is entry p of the flattened `topk_ids`. The pairs come expert by expert, within an expert
    in order; each expert's part is filled up to whole blocks with the number of pairs, which is no
    pair. An expert that nobody chose has no part.

    The buffer has room for the worst case: `topk_ids.size + num_experts * (block_size - 1)`
    entries, or `topk_ids.size * block_size` where there are fewer pairs than experts. Behind the
    parts it holds the number of pairs, and `expert_ids` -1.

    A trace: topk_ids [[0, 1], [2, 3], [1, 3], [3, 0]], blocks of 4, 4 experts: sorted_ids begins
    0 7 8 8, 1 4 8 8, 2 8 8 8, 3 5 6 8; it has 20 entries, expert_ids is 0 1 2 3 -1.

    Args:
        topk_ids: int [num_tokens, k], at least one pair.
        block_size: at least 1.

    Returns:
        `sorted_ids` int64 [room], `expert_ids` int64, one for each block that begins in the room,
        and how many entries the parts have together.

    Raises:
        ValueError: `block_size` below 1, or an id that is no expert's.

    Source: `vllm/model_executor/layers/fused_moe/moe_align_block_size.py:11`
    `moe_align_block_size`.
    """
    flat = np.asarray(topk_ids).reshape(-1)
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: need at least 1")
    if flat.min() < 0 or flat.max() >= num_experts:
        raise ValueError(f"topk_ids from {flat.min()} to {flat.max()}: need 0 to {num_experts - 1}")
    room = flat.size + num_experts * (block_size - 1)
    if flat.size < num_experts:
        room = flat.size * block_size
    loads = np.bincount(flat, minlength=num_experts)
    blocks = -(-loads // block_size)
    starts = (np.cumsum(blocks) - blocks) * block_size
    order = np.argsort(flat, kind="stable")
    within = np.arange(flat.size) - (np.cumsum(loads) - loads)[flat[order]]
    sorted_ids = np.full(room, flat.size, dtype=np.int64)
    sorted_ids[starts[flat[order]] + within] = order
    expert_ids = np.full(-(-room // block_size), -1, dtype=np.int64)
    expert_ids[: blocks.sum()] = np.repeat(np.arange(num_experts), blocks)
    return sorted_ids, expert_ids, int(blocks.sum()) * block_size

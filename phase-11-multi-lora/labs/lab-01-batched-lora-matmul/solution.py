"""Lab 11-01: the grouped product of the experts, used a second time, and what launching it costs.

An adapter changes a weight W [out, in] by adding s B A, with A [r, in] and B [out, r]. A batch
mixes rows of several adapters and of the base. A group of rows that needs weights of its own is
what an expert is in lab 07-01, so its grouped product is given here. What holds throughout:

- D1: a row gets what its own adapter gives it, however the rows are mixed; a base row gets x W^T.
- D2: W is read once per batch, and A and B of an adapter once.
- D3: B A is never built, and no weight is copied for a row.
- D4: no argument is changed; what is returned is new.

Sources: `vllm/lora/layers/base_linear.py:195` `BaseLinearLayerWithLoRA._apply_sync`,
`vllm/lora/ops/triton_ops/lora_shrink_op.py:132` `_lora_shrink`,
`vllm/model_executor/layers/fused_moe/fused_moe.py:709` `invoke_fused_moe_triton_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

BASE = -1
"""The id of rows without an adapter."""

Pair = tuple[np.ndarray, np.ndarray]
"""A [r, in] and B [out, r] of one adapter."""

Expert = Callable[[np.ndarray], np.ndarray]
"""Rows [n, in] to rows [n, out]."""


def sort_by_adapter(
    adapter_ids: Sequence[int] | np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Given. The rows of each id together: rows in their new order, ids, counts, starts.

    [0, 0, -1, 1, 1, 0] gives rows [2, 0, 1, 5, 3, 4], ids [-1, 0, 1], counts [1, 3, 2], starts
    [0, 1, 4, 6]. Source: `vllm/lora/ops/triton_ops/lora_kernel_metadata.py:109`
    `LoRAKernelMeta.prepare_tensors`.
    """
    ids = np.asarray(adapter_ids, dtype=np.int64)
    rows = np.argsort(ids, kind="stable")
    found, counts = np.unique(ids, return_counts=True)
    return rows, found, counts, np.concatenate([[0], np.cumsum(counts)])


def moe_forward_grouped(
    x: np.ndarray,
    experts: Sequence[Expert],
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
    width: int,
) -> np.ndarray:
    """Given, as you wrote it in lab 07-01, for experts that give `width` columns.

    One call for each expert that occurs, with its rows in the order of the batch; a row is the
    weighted sum of what its k experts give.

    Args:
        x: [n, in].
        experts: by number from 0 on; `topk_ids` [n, k] holds such numbers and nothing else.
        topk_weights: [n, k].

    Returns:
        [n, width], dtype of `x`.
    """
    num_tokens, k = topk_ids.shape
    order, found, _, starts = sort_by_adapter(topk_ids.reshape(-1))
    pairs = np.zeros((num_tokens * k, width), dtype=x.dtype)
    for place, expert in enumerate(found.tolist()):
        mine = order[starts[place] : starts[place + 1]]
        pairs[mine] = experts[expert](x[mine // k])
    weighted = pairs.reshape(num_tokens, k, width) * topk_weights[:, :, None]
    return weighted.sum(axis=1).astype(x.dtype, copy=False)


def lora_delta(x: np.ndarray, A: np.ndarray, B: np.ndarray, scaling: float = 1.0) -> np.ndarray:
    """What an adapter adds to the output of a layer: s B A x, row by row (D3).

    A trace: x [[1, 2, 3]], A [[1, 1, 1]], B [[1], [2]], scaling 0.5 give [[3, 6]].

    Args:
        x: [n, in].
        A: [r, in].
        B: [out, r].
        scaling: alpha / r, for example.

    Returns:
        [n, out], in the dtype of x.
    """
    return scaling * ((x @ A.T) @ B.T)


def apply_batched(
    x: np.ndarray,
    W: np.ndarray,
    adapters: Mapping[int, Pair | None] | Sequence[Pair | None],
    adapter_ids: Sequence[int] | np.ndarray,
    scalings: Mapping[int, float] | Sequence[float],
) -> np.ndarray:
    """A layer under mixed rows (D1 to D4): row i has the adapter `adapters[adapter_ids[i]]`.

    The grouped product has no base, no gaps between its numbers and no expert that does nothing;
    adapters have all three. What stands between the two is yours.

    A trace: W [[1, 0, 0], [0, 1, 0]]; x [[1, 2, 3], [1, 0, -1], [2, 1, 0]]; adapter 1 as in
    `lora_delta`; adapter 2: A [[1, 0, 0]], B [[-1], [1]], scaling 2; ids [1, -1, 2] give
    [[4, 8], [1, 0], [-2, 5]].

    Args:
        x: [n, in], n may be 0.
        W: [out, in].
        adapters: by id, ranks may differ; None leaves the base's output as it is.
        adapter_ids: n ids, `BASE` for none.
        scalings: by id, of every adapter that is used and not None.

    Returns:
        [n, out]: one product with W, and two for each adapter that occurs.

    Raises:
        ValueError: not n ids, an id below -1, or one that `adapters` or `scalings` lacks.
    """
    ids = np.asarray(adapter_ids, dtype=np.int64)
    if len(ids) != len(x):
        raise ValueError(f"adapter_ids: need {len(x)}, one per row; came {len(ids)}")
    if ids.min(initial=BASE) < BASE:
        raise ValueError(f"adapter_ids: {ids.min()}: need -1 for the base, or 0 and more")
    experts: list[Expert] = []
    number = np.full(len(ids), BASE)  # of each row's expert
    for adapter_id in set(ids.tolist()) - {BASE}:
        try:
            pair = adapters[adapter_id]
            if pair is None:
                continue
            A, B, scaling = *pair, scalings[adapter_id]
        except LookupError:
            raise ValueError(f"adapter_ids: {adapter_id}: no such adapter or scaling") from None
        number[ids == adapter_id] = len(experts)
        experts.append(partial(lora_delta, A=A, B=B, scaling=scaling))
    y = x @ W.T
    rows = np.flatnonzero(number != BASE)
    chosen = number[rows][:, None]  # [n, 1], one adapter a row
    if len(rows):
        y[rows] += moe_forward_grouped(x[rows], experts, chosen, np.ones(chosen.shape), len(W))
    return y


def num_programs(num_rows: int, num_groups: int, block: int) -> int:
    """With how many programs a grouped product must be launched, before the ids are known.

    A program computes up to `block` rows of one group. The processor that launches knows the three
    sizes; the ids are in the GPU's memory, and a captured graph is launched again with other ids.
    So the number must do for every batch of these sizes. It is the smallest that does.

    64 rows, 8 groups, blocks of 32: 9. A batch that needs all nine has 57 rows of one group.

    Args:
        num_rows: at least 0.
        num_groups, block: at least 1.
    """
    if num_rows <= num_groups:
        return num_rows
    return num_groups + (num_rows - num_groups) // block


def assign(
    ids: Sequence[int] | np.ndarray, num_groups: int, block: int
) -> list[tuple[int, np.ndarray]]:
    """What each program of a launch does: its group, and its rows.

    `num_programs(len(ids), num_groups, block)` entries. Each row with a group is in one program, of
    that group, with at most `block` rows. Rows of `BASE` are in none. A program with nothing to do
    is `(BASE, no rows)`. All else is yours.

    Raises:
        ValueError: an id that is not `BASE` and not 0 to `num_groups` - 1.
    """
    rows, found, _, starts = sort_by_adapter(ids)
    if len(found) and (found[0] < BASE or found[-1] >= num_groups):
        raise ValueError(f"ids {found[0]} to {found[-1]}: need -1 to {num_groups - 1}")
    work = [
        (group, rows[first : min(first + block, end)])
        for group, start, end in zip(found.tolist(), starts, starts[1:], strict=False)
        if group != BASE
        for first in range(start, end, block)
    ]
    idle = num_programs(len(rows), num_groups, block) - len(work)
    return work + [(BASE, rows[:0])] * idle

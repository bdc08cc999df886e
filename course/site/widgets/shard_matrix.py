"""A linear layer cut between ranks, and what has to move: what the widget shows.

Promises: every number is computed here, the products by the engine's own `Linear` on each rank's
slice, the bytes by the formulas that the engine's counters equal; the browser draws and computes
nothing. Mirrors `vllm/model_executor/layers/linear.py:410` `ColumnParallelLinear` and
`vllm/model_executor/layers/linear.py:1392` `RowParallelLinear`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from mini_vllm.distributed.bytes_moved import all_gather_bytes, all_reduce_bytes
from mini_vllm.distributed.collectives import bounds
from mini_vllm.models.transformer import Linear

WEIGHT = np.array([[1, 0, 2, 0], [0, 1, 0, 1], [1, 1, 1, 1], [2, 0, 0, -1]], float)
INPUT = np.array([[1, 2, 3, 4]], float)
"""Lab 10-01's worked example: W [out, in], x [1, in]."""

CUTS = {"outputs": "by rows of W: column-parallel", "inputs": "by columns of W: row-parallel"}
RANKS = (1, 2, 4)
SIZES = {
    "the 4 x 4 drawn here": (4, 4),
    "o_proj of an 8B": (4096, 4096),
    "gate_proj of an 8B": (14336, 4096),
    "down_proj of an 8B": (4096, 14336),
}
"""out, in."""
TOKENS = (1, 64, 2048)
ITEM_BYTES = 2


def cut(kind: str, order: tuple[int, ...]) -> dict[str, Any]:
    """One way to deal slices to ranks.

    Args:
        kind: of `CUTS`.
        order: the slice that each rank holds.

    Returns:
        `owner` of each row ("outputs") or column ("inputs") of W; `parts`, what each rank has
        computed; `together`, the parts as the collective puts them together, in order of ranks;
        `wrong`, outputs that are not those of the whole layer.
    """
    slices = bounds(len(WEIGHT), len(order))
    owner = [0] * len(WEIGHT)
    parts = []
    for rank, held in enumerate(order):
        part = slices[held]
        owner[part] = [rank] * (part.stop - part.start)
        weight = WEIGHT[part] if kind == "outputs" else np.ascontiguousarray(WEIGHT[:, part])
        x = INPUT if kind == "outputs" else INPUT[:, part]
        parts.append(Linear(weight, None, "shard")(x))
    together = np.concatenate(parts, axis=1) if kind == "outputs" else np.sum(parts, axis=0)
    whole = Linear(WEIGHT, None, "whole")(INPUT)
    return {
        "owner": owner,
        "parts": [part[0].astype(int).tolist() for part in parts],
        "together": together[0].astype(int).tolist(),
        "wrong": int((together != whole).sum()),
    }


def bill(kind: str, num_ranks: int, size: tuple[int, int], num_tokens: int) -> dict[str, int]:
    """Of one rank, the first: numbers of the weight and of x that it holds, bytes that it sends."""
    out, inner = size
    share = (out if kind == "outputs" else inner) // num_ranks
    if kind == "outputs":
        sent = all_gather_bytes(share * num_tokens * ITEM_BYTES, num_ranks)
        return {"weights": share * inner, "x": inner * num_tokens, "sent": sent}
    sent = all_reduce_bytes(out * num_tokens, ITEM_BYTES, num_ranks, 0)
    return {"weights": out * share, "x": share * num_tokens, "sent": sent}


QUESTIONS: tuple[tuple[str, str, tuple[int, ...], str, int, str, str], ...] = (
    ("o_proj of an 8B on 4 ranks, row-parallel, one token. How many KiB does a rank send?",
     "inputs", (0, 1, 2, 3), "o_proj of an 8B", 1, "sent",
     "An all-reduce on 4 ranks sends 2 x 3/4 of 8 KiB: 4,096 numbers of 2 bytes."),
    ("gate_proj on 2 ranks, column-parallel, one token, and all shall have all. How many KiB?",
     "outputs", (0, 1), "gate_proj of an 8B", 1, "sent",
     "Half of the 14,336 outputs, 2 bytes each, goes to the other rank."),
    ("Two ranks, cut by rows, change places. How many of the four outputs stand wrong?",
     "outputs", (1, 0), "the 4 x 4 drawn here", 1, "wrong",
     "Each rank's two outputs stand where the other's belong."),
    ("The same with a cut by columns. How many are wrong?",
     "inputs", (1, 0), "the 4 x 4 drawn here", 1, "wrong",
     "A sum does not ask in which order."),
    ("o_proj on 2 ranks, row-parallel, a prompt of 2,048 tokens. How many KiB does a rank send?",
     "inputs", (0, 1), "o_proj of an 8B", 2048, "sent",
     "2,048 times 8 KiB: 2 x 1/2 is all of it."),
)  # fmt: skip
"""What is asked, and of which cut, order, size and tokens; bytes are asked in KiB."""


def document() -> dict[str, Any]:
    """The widget's document."""
    orders = [order for n in RANKS for order in itertools.permutations(range(n))]
    cuts = {kind: {name_of(order): cut(kind, order) for order in orders} for kind in CUTS}
    bills = {
        kind: {
            size: {
                str(n): {str(tokens): bill(kind, n, shape, tokens) for tokens in TOKENS}
                for n in RANKS
            }
            for size, shape in SIZES.items()
        }
        for kind in CUTS
    }
    questions = []
    for ask, kind, order, size, tokens, field, because in QUESTIONS:
        said = bills[kind][size][str(len(order))][str(tokens)] | cuts[kind][name_of(order)]
        answer = said[field] // 1024 if field == "sent" else said[field]
        questions.append(
            {"ask": ask, "kind": kind, "order": list(order), "size": size, "tokens": tokens}
            | {"answer": answer, "because": because}
        )
    return {
        "weight": WEIGHT.astype(int).tolist(), "x": INPUT[0].astype(int).tolist(),
        "y": Linear(WEIGHT, None, "whole")(INPUT)[0].astype(int).tolist(),
        "kinds": CUTS, "ranks": list(RANKS), "sizes": list(SIZES), "tokens": list(TOKENS),
        "cuts": cuts, "bills": bills, "questions": questions,
    }  # fmt: skip


def name_of(order: tuple[int, ...]) -> str:
    """The key of an order: "10" when the ranks hold slices 1 and 0."""
    return "".join(map(str, order))

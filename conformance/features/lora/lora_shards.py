"""Record which rows and columns of A and B each rank keeps, as the pinned wrappers slice them.

Needs the pinned tree on `PYTHONPATH`, no GPU. Real linears are made rank by rank, wrapped, and
asked for their slices of matrices whose numbers say where they stood.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from conformance.features.distributed.tp_shards import as_rank

Case = dict[str, Any]
ABOUT = (
    '`{"heads", "kv_heads", "world", "fully_sharded", "ranks": [{matrix: {"a_rows", "a_columns", '
    '"b_rows"}}]}`. Other sizes are those of `SIZES`; adapters have rank 8, the largest there is. '
    "Experts are recorded without `fully_sharded`."
)
SIZES = {"hidden": 32, "head_dim": 4, "inner": 48, "moe_inner": 16, "rank": 8}
SPLITS = ((4, 2, 2), (4, 2, 4), (8, 8, 4), (8, 1, 8), (8, 4, 8))
"""Heads, KV heads, ranks."""


def numbered(rows: int, columns: int) -> Any:
    """[rows, columns] with 1000 * row + column."""
    import torch

    return 1000 * torch.arange(rows)[:, None] + torch.arange(columns)[None]


def found(a: Any, b: Any) -> dict[str, list[int]]:
    """The rows and columns of A and the rows of B that are there."""
    return {
        "a_rows": (a[:, 0] // 1000).tolist(), "a_columns": (a[0] % 1000).tolist(),
        "b_rows": (b[:, 0] // 1000).tolist(),
    }  # fmt: skip


def of_linears(heads: int, kv_heads: int, sharded: bool) -> dict[str, Any]:
    """A rank's parts of q, k, v, o, gate, up and down."""
    import torch
    from vllm.config import LoRAConfig
    from vllm.lora.utils import from_layer
    from vllm.model_executor.layers import linear

    hidden, inner, rank = SIZES["hidden"], SIZES["inner"], SIZES["rank"]
    kept: dict[str, Any] = {"bias": False, "params_dtype": torch.float32}
    q, kv = heads * SIZES["head_dim"], kv_heads * SIZES["head_dim"]
    config = LoRAConfig(
        max_lora_rank=rank, max_loras=1, fully_sharded_loras=sharded, lora_dtype=torch.float32
    )
    made = [
        (
            linear.QKVParallelLinear(hidden, SIZES["head_dim"], heads, kv_heads, **kept),
            {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)},
        ),
        (linear.RowParallelLinear(q, hidden, **kept), {"o_proj": (hidden, q)}),
        (
            linear.MergedColumnParallelLinear(hidden, [inner, inner], **kept),
            {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)},
        ),
        (linear.RowParallelLinear(inner, hidden, **kept), {"down_proj": (hidden, inner)}),
    ]
    parts: dict[str, Any] = {}
    for layer, matrices in made:
        wrapped = from_layer(layer, 1, config, list(matrices))
        a = [numbered(rank, into) for _, into in matrices.values()]
        b = [numbered(out, rank) for out, _ in matrices.values()]
        if len(matrices) == 1:
            parts[next(iter(matrices))] = found(
                wrapped.slice_lora_a(a[0]), wrapped.slice_lora_b(b[0])
            )
        else:
            sliced = zip(wrapped.slice_lora_a(a), wrapped.slice_lora_b(b), strict=True)
            parts |= {name: found(*pair) for name, pair in zip(matrices, sliced, strict=True)}
    return parts


def of_experts(rank: int, world: int) -> dict[str, Any]:
    """A rank's parts of an expert's gate and down."""
    from vllm.lora.layers import FusedMoEWithLoRA as Wrapper

    hidden, inner = SIZES["hidden"], SIZES["moe_inner"]
    base = SimpleNamespace(intermediate_size_per_partition=inner // world)
    me: Any = SimpleNamespace(tp_size=world, tp_rank=rank, fully_sharded=False, base_layer=base)
    a, b = numbered(SIZES["rank"], hidden)[None], numbered(inner, SIZES["rank"])[None]
    gate = found(Wrapper._slice_w13_a(me, a)[0], Wrapper._slice_w13_b(me, b)[0])
    a, b = numbered(SIZES["rank"], inner)[None], numbered(hidden, SIZES["rank"])[None]
    down = found(Wrapper._slice_w2_a(me, a)[0], Wrapper._slice_w2_b(me, b)[0])
    return {"experts.0.gate_proj": gate, "experts.0.down_proj": down}


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        for heads, kv_heads, world in SPLITS:
            for sharded in (False, True):
                ranks = []
                for rank in range(world):
                    with as_rank(rank, world):
                        ranks.append(of_linears(heads, kv_heads, sharded))
                    if not sharded:
                        ranks[-1] |= of_experts(rank, world)
                yield {
                    "heads": heads, "kv_heads": kv_heads, "world": world, "fully_sharded": sharded,
                    "ranks": ranks,
                }  # fmt: skip

"""Record which slices of a weight each rank holds, as the real v0.22.1 layers load them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

Case = dict[str, Any]

ABOUT = (
    "What each of `world` ranks keeps of a whole weight. `layer` says which one it went through. "
    '"column": `{"out", "in", "world", "ranks": [rows]}`. "merged": `{"sizes", "in", "world", '
    '"ranks": [rows]}`, rows of the fused weight on disk, in the order a rank has them. "qkv": '
    '`{"heads", "kv_heads", "head_dim", "in", "world", "ranks": [rows]}`, the same of q, k and v '
    'one after another. "row": `{"out", "in", "world", "weight", "bias", "x", "ranks": [columns], '
    '"partials"}`: a rank\'s columns, and what its forward gives for its part of x before anything '
    "is added up. Numbers are whole. `error` in place of `ranks`: the exception's name."
)

COLUMN = [(8, 3, 1), (8, 3, 2), (8, 3, 4), (12, 5, 3), (12, 5, 6), (10, 4, 4), (7, 2, 2)]
MERGED = [([6, 6], 4, 1), ([6, 6], 4, 2), ([6, 6], 4, 3), ([8, 4, 4], 3, 4), ([6, 4], 3, 4)]
QKV = [
    (4, 4, 2), (4, 2, 2), (8, 8, 1), (8, 2, 3), (6, 3, 2), (8, 1, 2), (16, 4, 1), (12, 3, 1),
]  # fmt: skip
ROW = [(4, 8, 1), (4, 8, 2), (3, 8, 4), (5, 12, 3), (2, 6, 6), (4, 10, 4)]


@contextlib.contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """The real layers, told that this process is `rank` of `world`; nothing is sent."""
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    with contextlib.ExitStack() as stack:
        for module in (linear, parameter):
            for name, value in (("rank", rank), ("world_size", world)):
                getter = f"get_tensor_model_parallel_{name}"
                stack.enter_context(patch.object(module, getter, lambda value=value: value))
        stack.enter_context(
            patch.object(linear, "tensor_model_parallel_all_reduce", lambda tensor: tensor)
        )
        yield


def _rows(make: Callable[[], Any], rows: int, cols: int, world: int) -> dict[str, Any]:
    """Load a weight whose numbers say where they stood; the rows that every rank has of it."""
    import torch

    whole = torch.arange(rows * cols, dtype=torch.float32).reshape(rows, cols)
    ranks = []
    try:
        for rank in range(world):
            with as_rank(rank, world):
                layer = make()
                layer.weight.weight_loader(layer.weight, whole.clone())
            found = (layer.weight.detach()[:, 0] / cols).int()
            if not torch.equal(layer.weight.detach(), whole[found.long()]):
                raise RuntimeError(f"rank {rank}: its weight is not rows of the whole one")
            ranks.append(found.tolist())
    except AssertionError as error:
        return {"error": type(error).__name__}
    return {"ranks": ranks}


def _row_parallel(out: int, into: int, world: int) -> dict[str, Any]:
    import torch
    from vllm.model_executor.layers.linear import RowParallelLinear

    generator = torch.Generator().manual_seed(out * 100 + into * 10 + world)
    weight, x = (
        torch.randint(-4, 5, shape, generator=generator).float()
        for shape in ((out, into), (2, into))
    )
    bias = torch.arange(1.0, out + 1) * 100
    places = torch.arange(into, dtype=torch.float32).repeat(out, 1)
    given = {
        name: value.int().tolist() for name, value in zip("wbx", (weight, bias, x), strict=True)
    }
    head = {"weight": given["w"], "bias": given["b"], "x": given["x"]}
    ranks, partials = [], []
    try:
        for rank in range(world):
            with as_rank(rank, world):
                layer = RowParallelLinear(
                    into, out, bias=True, params_dtype=torch.float32, return_bias=False
                )
                layer.weight.weight_loader(layer.weight, places.clone())
                columns = layer.weight.detach()[0].long()
                layer.weight.weight_loader(layer.weight, weight.clone())
                layer.bias.weight_loader(layer.bias, bias.clone())
                partials.append(layer(x[:, columns]).detach().int().tolist())
            ranks.append(columns.tolist())
    except AssertionError as error:
        return head | {"error": type(error).__name__}
    return head | {"ranks": ranks, "partials": partials}


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    import torch
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import linear

    kept = {"bias": False, "params_dtype": torch.float32}
    column, merged = linear.ColumnParallelLinear, linear.MergedColumnParallelLinear
    qkv = linear.QKVParallelLinear
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        for out, into, world in COLUMN:
            found = _rows(partial(column, into, out, **kept), out, into, world)
            yield {"layer": "column", "out": out, "in": into, "world": world} | found
        for sizes, into, world in MERGED:
            found = _rows(partial(merged, into, list(sizes), **kept), sum(sizes), into, world)
            yield {"layer": "merged", "sizes": sizes, "in": into, "world": world} | found
        for heads, kv_heads, head_dim in QKV:
            rows = (heads + 2 * kv_heads) * head_dim
            for world in (1, 2, 3, 4, 6, 8, 16):
                found = _rows(
                    partial(qkv, 3, head_dim, heads, kv_heads, **kept), rows, 3, world
                )  # fmt: skip
                yield {
                    "layer": "qkv", "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
                    "in": 3, "world": world,
                } | found  # fmt: skip
        for out, into, world in ROW:
            found = _row_parallel(out, into, world)
            yield {"layer": "row", "out": out, "in": into, "world": world} | found

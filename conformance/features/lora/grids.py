"""How many programs vLLM's grouped kernels launch: the host's side of both, with no GPU.

`vllm/lora/ops/triton_ops/lora_shrink_op.py:132` `_lora_shrink` and
`vllm/model_executor/layers/fused_moe/fused_moe.py:709` `invoke_fused_moe_triton_kernel` are called
on a processor with something in the kernel's place that keeps the grid it is given. The batches are
the same for both: rows of adapters on one side, rows of experts with k = 1 on the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

ABOUT = (
    '`{"name", "ids", "groups"}` of a batch, -1 for a row without an adapter; `"adapters"` and '
    '`"experts"`: the grid of each kernel, its block of rows, and how many of its programs lie '
    "along the rows and groups: those that share rows and group, and differ in columns, count once."
)
RANK, WIDTH = 16, 256


class Launched:
    """Stands where a Triton kernel stands: keeps the grid, computes nothing."""

    def __init__(self) -> None:
        self.grid: tuple[int, ...] = ()

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **meta: Any) -> None:
            self.grid = tuple(int(n) for n in (grid(meta) if callable(grid) else grid))

        return launch


def batches() -> Iterator[tuple[str, list[int], int]]:
    """Name, group of each row, number of groups."""
    rng = random.Random(11)
    yield "one adapter of eight", [3] * 64, 8
    yield "four adapters and the base", [(7 * place) % 5 - 1 for place in range(64)], 8
    yield "eight adapters, a row each", list(range(8)), 8
    yield "three rows of sixty-four", [5, 0, 63], 64
    yield "a prompt and 31 decodes", [0] * 500 + [rng.randrange(1, 8) for _ in range(31)], 8
    yield "the base and one row", [-1] * 255 + [2], 4
    for number in range(12):
        groups = rng.choice((2, 4, 8, 16, 64))
        rows = rng.choice((1, 5, 16, 33, 64, 200, 512))
        ids = [rng.randrange(-1, groups) for _ in range(rows)]
        yield f"drawn {number}", ids if max(ids) >= 0 else [0, *ids[1:]], groups


def of_adapters(ids: list[int], slots: int) -> dict[str, Any]:
    """The shrink kernel's launch, with the number of slots fixed and with the active ones only."""
    import torch
    from vllm.lora.ops.triton_ops import lora_shrink_op as op
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    meta = LoRAKernelMeta.make(slots, len(ids), torch.device("cpu"))
    meta.prepare_tensors(torch.tensor(ids))
    found: dict[str, Any] = {}
    real = op.get_lora_op_configs
    for name, active in (("fixed", False), ("active", True)):
        kernel, configs = Launched(), list[Any]()

        def config_of(*args: Any, kept: list[Any] = configs, **named: Any) -> Any:
            kept.append(real(*args, **named))
            return kept[-1]

        x = torch.zeros(len(ids), WIDTH, dtype=torch.bfloat16)
        a = torch.zeros(slots, RANK, WIDTH, dtype=torch.bfloat16)
        out = torch.zeros(1, len(ids), RANK)
        with (
            mock.patch.object(op, "_lora_shrink_kernel", kernel),
            mock.patch.object(op, "get_lora_op_configs", config_of),
            mock.patch.object(op, "supports_pdl", lambda device: False),
        ):
            op._lora_shrink(x, [a], out, *meta.meta_args(len(ids), active), 1.0)
        config = configs[0]
        columns = config["split_k"] * -(-RANK // config["block_n"])
        found[name] = kernel.grid[0] // columns * kernel.grid[2]
        found["block"], found[f"grid, {name}"] = config["block_m"], list(kernel.grid)
    return found


def of_experts(ids: list[int], groups: int, block: int) -> dict[str, Any]:
    """The experts' kernel's launch for the rows that have a group, each with one expert."""
    import torch
    from vllm.model_executor.layers.fused_moe import fused_moe as op
    from vllm.model_executor.layers.fused_moe import moe_align_block_size as align

    chosen = torch.tensor([[each] for each in ids if each >= 0])
    rows, kernel, columns = len(chosen), Launched(), 2
    with mock.patch.object(align.ops, "moe_align_block_size", lambda *args: None):
        sorted_ids, experts, padded = align.moe_align_block_size(chosen, block, groups)
    config = {
        "BLOCK_SIZE_M": block, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1,
    }  # fmt: skip
    with mock.patch.object(op, "fused_moe_kernel", kernel):
        op.invoke_fused_moe_triton_kernel(
            torch.zeros(rows, WIDTH), torch.zeros(groups, 64 * columns, WIDTH),
            torch.zeros(rows, 1, 64 * columns), None, None, None, sorted_ids, experts, padded,
            False, 1, config, None, False, False, False, False, False,
        )  # fmt: skip
    return {"block": block, "grid": list(kernel.grid), "launched": kernel.grid[0] // columns}


def cases() -> Iterator[dict[str, Any]]:
    """Every batch, launched by both."""
    for name, ids, groups in batches():
        adapters = of_adapters(ids, groups)
        experts = of_experts(ids, groups, adapters["block"])
        yield {
            "name": name, "ids": ids, "groups": groups, "adapters": adapters, "experts": experts,
        }  # fmt: skip

"""Record block-scaled FP8 by the pinned tree's reference code, on a processor, in float32.

Needs the pinned tree on `PYTHONPATH`, no GPU. The experts are those of `models/byte-moe`, quantized
in blocks of 64 by 64 because its experts are 64 wide; codes are bytes in hexadecimal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from mini_vllm.models.loader import load_checkpoint

Case = dict[str, Any]
BLOCK = (64, 64)
TOKENS = 4

ABOUT = (
    "Kinds: weight (a matrix to codes and scales), activations (rows to codes and scales per "
    "group), experts (a layer of byte-moe: rows, choices and weights to the result)."
)


def expert_matrices(weights: Any, layer: int, expert: int) -> tuple[np.ndarray, np.ndarray]:
    """gate over up [128, 256], and down [256, 64], of one expert of byte-moe, float32."""
    name = f"model.layers.{layer}.mlp.experts.{expert}"
    gate, up, down = (weights[f"{name}.{m}_proj.weight"] for m in ("gate", "up", "down"))
    return np.concatenate([gate, up]), down


def cases() -> Iterator[Case]:
    """All cases.

    `tests/kernels/moe/test_block_fp8.py:108` `torch_w8a8_block_fp8_moe`; its module asks for a
    device and its capability when it is imported; a CPU and 9.0 are answered.
    """
    import torch
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    platform = type(current_platform)
    with (
        mock.patch.object(platform, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(platform, "device_type", "cpu"),
    ):
        from tests.kernels.moe.test_block_fp8 import torch_w8a8_block_fp8_moe
        from tests.kernels.quant_utils import native_per_token_group_quant_fp8

    def hexed(codes: Any) -> str:
        return str(codes.contiguous().view(torch.uint8).numpy().tobytes().hex())

    rng = np.random.default_rng(0)
    for block in ((8, 8), (4, 16)):
        spread = np.float32(10) ** rng.integers(-3, 3, (16, 32)).astype(np.float32)
        weight = rng.standard_normal((16, 32), dtype=np.float32) * spread
        weight[:8, :8] = 0
        codes, scale = per_block_cast_to_fp8(torch.from_numpy(weight), list(block))
        yield {"kind": "weight", "block": [*block], "weight": weight.tolist(),
               "codes": hexed(codes), "scale_inv": scale.tolist()}  # fmt: skip
        x = torch.from_numpy(weight)
        codes, scale = native_per_token_group_quant_fp8(x, block[1])
        yield {"kind": "activations", "group": block[1], "x": weight.tolist(),
               "codes": hexed(codes), "scale": scale.tolist()}  # fmt: skip
    checkpoint = load_checkpoint("byte-moe")
    config, moe = checkpoint.config, checkpoint.config.moe
    assert moe is not None
    for layer in range(config.num_hidden_layers):
        stacks: list[list[Any]] = [[], [], [], []]
        for expert in range(moe.num_experts):
            for number, matrix in enumerate(expert_matrices(checkpoint.weights, layer, expert)):
                codes, scale = per_block_cast_to_fp8(torch.from_numpy(matrix), list(BLOCK))
                stacks[number].append(codes)
                stacks[2 + number].append(scale)
        w1, w2, w1_scale, w2_scale = (torch.stack(stack) for stack in stacks)
        x = rng.standard_normal((TOKENS, config.hidden_size), dtype=np.float32)
        ids = np.stack([rng.permutation(moe.num_experts)[:2] for _ in range(TOKENS)])
        chosen = rng.random((TOKENS, 2), dtype=np.float32)
        with (
            set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))),
            torch.compiler.set_stance("force_eager"),  # the functions as written, not as compiled
        ):
            out = torch_w8a8_block_fp8_moe(
                torch.from_numpy(x), w1, w2, w1_scale, w2_scale,
                torch.from_numpy(chosen), torch.from_numpy(ids), list(BLOCK),
            )  # fmt: skip
        yield {"kind": "experts", "layer": layer, "x": x.tolist(), "ids": ids.tolist(),
               "weights": chosen.tolist(), "out": out.tolist()}  # fmt: skip

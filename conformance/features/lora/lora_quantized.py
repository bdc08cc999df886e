"""Record what the pinned wrappers of linears give over block-scaled FP8, on a processor, float32.

Needs the pinned tree on `PYTHONPATH`, no GPU. The real manager wraps a decoder layer's four
linears. In each the quantization method is one that calls the tree's reference code, since its
kernels need a GPU; the weights are quantized as the tree quantizes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from conformance.features.lora.lora_embeddings import (
    MAX_LORA_RANK,
    PREFIX,
    add_adapters,
    on_a_processor,
    set_step,
    short,
)

Case = dict[str, Any]
BLOCK = (8, 8)
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 16, 24, 2, 1, 8
SHAPES = {
    "self_attn.qkv_proj": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_up_proj": (2 * INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
PARTS = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
"""What an adapter names: rows and columns of each."""
TARGETS = (
    tuple(PARTS), ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"),
    ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj"),
)  # fmt: skip

ABOUT = (
    '`{"block", "weights", "adapters": [{"r", "lora_alpha", "use_rslora", "tensors"}], "steps": '
    '[{"slots", "requests": [{"tokens", "adapter"}], "inputs", "outputs"}]}`. `weights` are those '
    "of a layer's four linears before they are quantized; `inputs` and `outputs` are by linear. "
    "Adapters are numbered from 1, 0 is the base; of a request `tokens` is how many it has."
)


class Reference:
    """A quantization method that computes as the tree's reference code."""

    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        """`tests/kernels/quant_utils.py:91` `native_w8a8_block_matmul`."""
        from tests.kernels.quant_utils import (
            native_per_token_group_quant_fp8,
            native_w8a8_block_matmul,
        )

        assert bias is None
        codes, scale = native_per_token_group_quant_fp8(x, BLOCK[1])
        return native_w8a8_block_matmul(
            codes, layer.weight, scale, layer.weight_scale_inv, list(BLOCK), x.dtype
        )


def manager_of(case: Case) -> Any:
    """The real manager over a layer whose linears are quantized; its model is wrapped."""
    import torch
    from vllm.config import LoRAConfig
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.layers import linear
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    kept: dict[str, Any] = {"bias": False, "params_dtype": torch.float32}
    attention, mlp, model = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    attention.qkv_proj = linear.QKVParallelLinear(HIDDEN, HEAD_DIM, HEADS, KV_HEADS, **kept)
    attention.o_proj = linear.RowParallelLinear(HEADS * HEAD_DIM, HIDDEN, **kept)
    mlp.gate_up_proj = linear.MergedColumnParallelLinear(HIDDEN, [INNER, INNER], **kept)
    mlp.down_proj = linear.RowParallelLinear(INNER, HIDDEN, **kept)
    layer = torch.nn.Module()
    layer.self_attn, layer.mlp = attention, mlp
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList([layer])
    model.packed_modules_mapping = LlamaForCausalLM.packed_modules_mapping
    model.config = SimpleNamespace()
    for name, weight in case["weights"].items():
        base = layer.get_submodule(name)
        codes, scale = per_block_cast_to_fp8(torch.tensor(weight), list(BLOCK))
        base.weight = torch.nn.Parameter(codes, requires_grad=False)
        base.weight_scale_inv, base.quant_method = scale, Reference()
    config = LoRAConfig(
        max_loras=3, max_cpu_loras=8, max_lora_rank=MAX_LORA_RANK, lora_dtype=torch.float32
    )
    return LoRAModelManager(model, 16, 64, 257, config, torch.device("cpu"))


def made() -> Case:
    """The case without results: three adapters, three slots of which the last stays free."""
    rng = np.random.default_rng(3)

    def normal(*shape: int, size: float = 1.0) -> list[list[float]]:
        return short(np.float32(size) * rng.standard_normal(shape, dtype=np.float32))

    adapters: list[Case] = []
    for rank, alpha, targets in zip((3, 8, 5), (6, 4, 5), TARGETS, strict=True):
        tensors = {}
        for name in targets:
            out, into = PARTS[name]
            base = f"{PREFIX}.model.layers.0.{name}"
            tensors[f"{base}.lora_A.weight"] = normal(rank, into, size=0.3)
            tensors[f"{base}.lora_B.weight"] = normal(out, rank, size=0.3)
        adapters.append(
            {"r": rank, "lora_alpha": alpha, "use_rslora": rank == 5, "tensors": tensors}
        )
    steps: list[Case] = []
    plans: list[tuple[list[int | None], list[tuple[int, int]]]] = [
        ([1, 2, None], [(2, 3), (0, 2), (1, 4), (2, 1)]),
        ([3, 2, None], [(0, 1), (3, 5), (2, 2)]),
        ([3, 1, None], [(0, 3), (0, 1)]),
    ]
    for slots, asked in plans:
        requests = [{"adapter": adapter, "tokens": tokens} for adapter, tokens in asked]
        total = sum(tokens for _, tokens in asked)
        inputs = {name: normal(total, into, size=2.0) for name, (_, into) in SHAPES.items()}
        steps.append({"slots": slots, "requests": requests, "inputs": inputs})
    weights = {name: normal(*shape) for name, shape in SHAPES.items()}
    return {"block": [*BLOCK], "weights": weights, "adapters": adapters, "steps": steps}


def cases() -> Iterator[Case]:
    """The case; the same every time."""
    import torch

    with on_a_processor():
        case = made()
        manager = manager_of(case)
        add_adapters(manager, case)
        layer = manager.model.model.layers[0]
        for step in case["steps"]:
            of_token = [r["adapter"] for r in step["requests"] for _ in range(r["tokens"])]
            set_step(manager, step["slots"], of_token, of_token)
            with torch.inference_mode():
                step["outputs"] = {
                    name: short(layer.get_submodule(name)(torch.tensor(x))[0])
                    for name, x in step["inputs"].items()
                }
        yield case

"""Record what the pinned manager, wrapper and kernels give of adapters on experts, interpreted.

Needs the pinned tree on `PYTHONPATH` and triton, no GPU. The real manager wraps a layer of a router
and experts, reads adapters' tensors by their names, packs them and fills slots. The deltas are
added by the wrapper's own calls, whose Triton kernels a process of its own runs one program at a
time on a processor, float32. The base's two products are torch's, since on a processor the pin has
no form of experts that takes adapters; so is the choice of experts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from conformance.features.lora import lora_embeddings
from conformance.features.lora.lora_embeddings import PREFIX, short

Case = dict[str, Any]
ABOUT = (
    '`{"kernel", "max_lora_rank", "router", "w13", "w2", "adapters": [{"r", "lora_alpha", '
    '"use_rslora", "tensors"}], "steps": [{"slots", "tokens", "inputs", "logits", "topk_ids", '
    '"topk_weights", "outputs"}]}`, and "fault" where the pin is wrong. `router`, `w13` and `w2` '
    "are a layer's weights, `tokens` has each token's adapter, 0 for the base. `logits` are the "
    "router's, `outputs` what the layer gave."
)
EXPERTS, TOP_K, HIDDEN, INNER, MAX_LORAS = 16, 2, 16, 8, 8
"""Few pairs for the experts and slots there are: then the kernels take them as they come, and
nothing is sorted, for which the pin has no form on processors."""


def made(kernel: str, max_lora_rank: int, seed: int) -> Case:
    """A case without results: three adapters of experts, one of the router alone."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, size: float = 1.0) -> list[Any]:
        return np.round(size * rng.standard_normal(shape), 3).tolist()

    adapters: list[Case] = []
    for rank, alpha, targets in ((3, 6, "experts"), (8, 4, "experts gate"), (2, 3, "gate")):
        shapes = {}
        if "gate" in targets:
            shapes[f"{PREFIX}.model.layers.0.mlp.gate"] = EXPERTS, HIDDEN
        if "experts" in targets:
            for expert in range(EXPERTS):
                name = f"{PREFIX}.model.layers.0.mlp.experts.{expert}"
                shapes |= {f"{name}.{part}": (INNER, HIDDEN) for part in ("gate_proj", "up_proj")}
                shapes[f"{name}.down_proj"] = HIDDEN, INNER
        tensors = {}
        for name, (out, into) in shapes.items():
            tensors[f"{name}.lora_A.weight"] = normal(rank, into, size=0.4)
            tensors[f"{name}.lora_B.weight"] = normal(out, rank, size=0.4)
        adapters.append({"r": rank, "lora_alpha": alpha, "use_rslora": False, "tensors": tensors})
    plans: list[tuple[list[int], list[int]]] = [
        ([1, 2], [1, 1, 0, 2, 2, 1, 0, 2]), ([3, 2], [3, 0, 2, 2, 3]), ([3, 1], [1, 0, 1, 3]),
    ]  # fmt: skip
    steps = [
        {
            "slots": [*slots, *[None] * (MAX_LORAS - len(slots))],
            "tokens": tokens,
            "inputs": normal(len(tokens), HIDDEN),
        }
        for slots, tokens in plans
    ]
    return {
        "kernel": kernel, "max_lora_rank": max_lora_rank, "adapters": adapters,
        "router": normal(EXPERTS, HIDDEN), "w13": normal(EXPERTS, 2 * INNER, HIDDEN, size=0.3),
        "w2": normal(EXPERTS, HIDDEN, INNER, size=0.3), "steps": steps,
    }  # fmt: skip


def faults() -> Iterator[Case]:
    """Where the pin is wrong: rsLoRA's scaling, and a step of base rows behind one of adapters."""
    case = made("small batch", 8, 5)
    case["adapters"] = [case["adapters"][0] | {"use_rslora": True}]
    first = {"slots": [1, *[None] * 7], "tokens": [1] * 8}
    yield case | {"fault": "scaling", "steps": [case["steps"][0] | first]}
    case = made("small batch", 8, 6)
    before, alone, _ = case["steps"]
    before["tokens"] = [1] * 8  # whose adapter leaves the router as it is
    alone |= {"slots": before["slots"], "tokens": [0] * 5}
    yield case | {"fault": "base rows alone", "steps": [before, alone]}


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "conformance.features.lora.lora_experts"]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=500, check=True
    )
    for line in done.stdout.splitlines():
        if line.startswith('{"kernel"'):  # the rest is the tree's log
            yield json.loads(line)


# ---------------------------------------------------------------------- in the other process


def manager_of(case: Case) -> Any:
    """The real manager over a layer of a router and experts; its model is wrapped."""
    import torch
    from vllm.config import LoRAConfig
    from vllm.lora.layers import fused_moe
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.layers.fused_moe import FusedMoE, unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoeModel

    block, layer, model = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    block.gate = ReplicatedLinear(HIDDEN, EXPERTS, bias=False, params_dtype=torch.float32)
    backend = unquantized_fused_moe_method.UnquantizedMoeBackend.TRITON
    chosen = mock.Mock(return_value=(backend, None))
    with mock.patch.object(unquantized_fused_moe_method, "select_unquantized_moe_backend", chosen):
        block.experts = FusedMoE(EXPERTS, TOP_K, HIDDEN, INNER, params_dtype=torch.float32)
    method = block.experts.quant_method
    method.moe_kernel = SimpleNamespace(
        fused_experts=LoRAExpertsMixin(), supports_lora=lambda: True, prepare_finalize=None
    )
    block.experts._replace_quant_method = lambda method: None
    block.experts.ensure_moe_quant_config_init = lambda: None
    layer.mlp = block
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList([layer])
    model.config, model.embedding_modules = SimpleNamespace(), {}
    model.packed_modules_mapping = dict(Qwen3MoeForCausalLM.packed_modules_mapping)
    model.is_3d_moe_weight = Qwen3MoeForCausalLM.is_3d_moe_weight
    model.is_non_gated_moe = Qwen3MoeForCausalLM.is_non_gated_moe
    of_model = SimpleNamespace(
        config=SimpleNamespace(num_experts=EXPERTS), num_redundant_experts=0,
        named_parameters=model.named_parameters,
    )  # fmt: skip
    model.get_expert_mapping = lambda: Qwen3MoeModel.get_expert_mapping(of_model)
    block.gate.weight.data.copy_(torch.tensor(case["router"]))
    config = LoRAConfig(
        max_loras=MAX_LORAS, max_cpu_loras=MAX_LORAS, max_lora_rank=case["max_lora_rank"],
        lora_dtype=torch.float32,
    )  # fmt: skip
    with mock.patch.object(fused_moe, "FusedMoEModularMethod"):
        return LoRAModelManager(model, 16, 64, 257, config, torch.device("cpu"))


def run_step(manager: Any, case: Case, step: Case) -> None:
    """Route a step's tokens and run them through the experts; adds the results to it."""
    import torch
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    lora_embeddings.set_step(manager, step["slots"], step["tokens"], step["tokens"])
    block = manager.model.model.layers[0].mlp
    block.gate.punica_wrapper = PunicaWrapperCPU(64, 16, "cpu")  # its kernels take 16 bits alone
    mapping = LoRAMapping(tuple(step["tokens"]), tuple(step["tokens"]), is_prefill=True)
    block.gate.punica_wrapper.update_metadata(
        mapping, manager.lora_index_to_id, manager.lora_slots + 1, manager.vocab_size
    )
    experts = block.experts._moe_kernel.fused_experts
    context = experts._lora_context
    w13, w2 = torch.tensor(case["w13"]), torch.tensor(case["w2"])
    x = torch.tensor(step["inputs"])
    logits = block.gate(x)[0]
    chosen, ids = logits.softmax(-1).topk(TOP_K)
    weights = chosen / chosen.sum(-1, keepdim=True)
    ids = ids.to(torch.int32)
    gate_up = torch.einsum("tkoi,ti->tko", w13[ids.long()], x)  # [tokens, k, 2 * inner]
    noted = experts.apply_w13_lora(
        context, y=gate_up, x=x, topk_ids=ids, topk_weights=weights, expert_map=None, w1=w13,
        w2=w2, num_tokens=len(x), top_k_num=TOP_K,
    )  # fmt: skip
    inner = torch.nn.functional.silu(gate_up[..., :INNER]) * gate_up[..., INNER:]
    out = torch.einsum("tkoi,tki->tko", w2[ids.long()], inner) * weights[..., None]
    experts.apply_w2_lora(
        context, y=out, x=inner.view(-1, INNER), topk_weights=weights,
        sorted_token_ids_lora=noted[0], expert_ids_lora=noted[1],
        num_tokens_post_padded_lora=noted[2], token_lora_mapping=noted[3], num_tokens=len(x),
        w1=w13, w2=w2, top_k_num=TOP_K,
    )  # fmt: skip
    step |= {
        "logits": short(logits.detach()), "topk_ids": ids.tolist(),
        "topk_weights": short(weights.detach()), "outputs": short(out.sum(1).detach()),
    }  # fmt: skip


def main() -> None:
    """Print a case in each line."""
    import torch
    from vllm.lora.ops.triton_ops import fused_moe_lora_op
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
    from vllm.model_executor.layers.fused_moe import fused_moe

    processor = mock.Mock(num_compute_units=mock.Mock(return_value=8))
    with (
        mock.patch.object(fused_moe, "get_moe_configs", return_value=None),
        mock.patch.object(fused_moe_lora_op, "current_platform", processor),
        torch.inference_mode(),
    ):
        for case in (made("small batch", 8, 3), made("one shot", 128, 4), *faults()):
            with lora_embeddings.on_a_processor(PunicaWrapperGPU):
                manager = manager_of(case)
                lora_embeddings.add_adapters(manager, case)
                for step in case["steps"]:
                    run_step(manager, case, step)
            print(json.dumps(case))


if __name__ == "__main__":
    main()

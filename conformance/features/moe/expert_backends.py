"""Record which kernels the real v0.22.1 chooses for experts, for GPUs that are not here.

Needs the pinned tree on `PYTHONPATH`, no GPU. What runs is upstream's own: the four functions
`select_*_moe_backend` of `vllm/model_executor/layers/fused_moe/oracle`, each candidate's
`FusedMoEExperts.is_supported_config`, and `FusedMoEParallelConfig.make`, which turns the sizes of
a deployment into a layer's. What is simulated:

- the device: a CUDA platform that reports the capability asked for;
- what is installed: DeepGEMM and `triton_kernels` always (upstream's wheel brings both), FlashInfer
  as asked, with all its kernels for experts or without any; compiled modules are empty stand-ins,
  and what CUTLASS is compiled for, which none of the candidates here asks, is nothing;
- the groups of ranks: this is rank 0 of each.

No environment variable and no `--moe-backend` is set. A process knows one device, so each one
runs in a child process.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from conformance import simulated_gpu

Case = dict[str, Any]

ABOUT = (
    "One case per device, FlashInfer or not, checkpoint, deployment and LoRA or not: `backend` is "
    "what the oracle chose, `experts` the class, `monolithic` whether that class routes inside its "
    "kernel, `batched` the activation format, `sizes` what `FusedMoEParallelConfig.make` made of "
    "the deployment (tp, dp, ep), `refused` the candidates before it with upstream's reason. "
    "`backend` null is an error, whose message is `error`."
)
CAPABILITIES = ("8.0", "8.9", "9.0", "10.0", "12.0")
CHECKPOINTS = ("bf16", "fp8_block", "nvfp4", "mxfp4")
"""bf16 as Mixtral 8x7B, fp8_block and nvfp4 as DeepSeek-V3, mxfp4 as gpt-oss-120b."""
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 8},
    "tp_ep": {"tp": 8, "ep": True},
    "dp": {"dp": 8},
    "dp_ep": {"dp": 8, "ep": True},
    "dp_ep_ht": {"dp": 8, "ep": True, "all2all": "deepep_high_throughput"},
    "dp_ep_ll": {"dp": 8, "ep": True, "all2all": "deepep_low_latency"},
    "dp_ep_one_sided": {"dp": 8, "ep": True, "all2all": "flashinfer_nvlink_one_sided"},
    "tp_ep_eplb": {"tp": 8, "ep": True, "eplb": True},
}
"""By name; what is not said is 1, no expert parallelism, the default exchange, no balancer."""


def settings() -> Iterator[dict[str, Any]]:
    """One per child process."""
    for capability in CAPABILITIES:
        for flashinfer in (True, False):
            yield {"capability": capability, "flashinfer": flashinfer}


# ------------------------------------------------------------------ in the child


class _Heard:
    """A logger that keeps why a candidate was refused."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def debug_once(self, message: str, *_: Any, **__: Any) -> None:
        self.refused.append(message)

    def info_once(self, *_: Any, **__: Any) -> None:
        pass

    warning_once = info_once


def _simulate(setting: dict[str, Any]) -> None:
    """Make this process believe in the device and in what is installed."""
    simulated_gpu.simulate(setting["capability"], "deep_gemm", "triton_kernels")
    import vllm._custom_ops as ops
    import vllm.utils.flashinfer as flashinfer
    import vllm.utils.import_utils as installed

    has = setting["flashinfer"]
    for name in [name for name in vars(flashinfer) if name.startswith("has_flashinfer")]:
        setattr(flashinfer, name, lambda has=has: has)
    for name in ("scaled_mm_supports_fp8", "scaled_mm_supports_block_fp8", "group_gemm_supported"):
        setattr(ops, f"cutlass_{name}", lambda capability: False)
    installed.has_deep_gemm = lambda: True
    installed.has_triton_kernels = lambda: True


def _layer(checkpoint: str, deployment: dict[str, Any], lora: bool) -> Any:
    """The layer's `FusedMoEConfig` on rank 0."""
    import torch
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    for group in ("get_dp_group", "get_pcp_group"):
        setattr(config, group, lambda: types.SimpleNamespace(rank_in_group=0))
    config.get_tensor_model_parallel_rank = lambda: 0
    asked = types.SimpleNamespace(
        enable_expert_parallel=deployment.get("ep", False),
        all2all_backend=deployment.get("all2all", "allgather_reducescatter"),
        enable_eplb=deployment.get("eplb", False),
    )
    parallel = config.FusedMoEParallelConfig.make(
        deployment.get("tp", 1), 1, deployment.get("dp", 1), 1, asked
    )
    method = config.RoutingMethodType
    experts, top_k, hidden, width, activation, routing = {
        "bf16": (8, 2, 4096, 14336, MoEActivation.SILU, method.Renormalize),
        "fp8_block": (256, 8, 7168, 2048, MoEActivation.SILU, method.DeepSeekV3),
        "nvfp4": (256, 8, 7168, 2048, MoEActivation.SILU, method.DeepSeekV3),
        "mxfp4": (128, 4, 2880, 2880, MoEActivation.SWIGLUOAI, method.Renormalize),
    }[checkpoint]
    return config.FusedMoEConfig(
        num_experts=experts,
        experts_per_token=top_k,
        hidden_dim=hidden,
        intermediate_size_per_partition=width // parallel.tp_size,
        num_local_experts=experts // parallel.ep_size,
        num_logical_experts=experts,
        activation=activation,
        device="cpu",
        routing_method=routing,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        has_bias=checkpoint == "mxfp4",
        is_lora_enabled=lora,
    )


def _select(checkpoint: str, layer: Any) -> tuple[Any, Any, list[str]]:
    """What the oracle returns, and the reasons it logs."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp4, nvfp4, unquantized
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    heard = _Heard()
    module = {"bf16": unquantized, "fp8_block": fp8, "nvfp4": nvfp4, "mxfp4": mxfp4}[checkpoint]
    module.logger = heard
    if checkpoint == "bf16":
        found = unquantized.select_unquantized_moe_backend(layer)
    elif checkpoint == "fp8_block":
        found = fp8.select_fp8_moe_backend(
            layer, keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym
        )
    elif checkpoint == "nvfp4":
        found = nvfp4.select_nvfp4_moe_backend(layer, keys.kNvfp4Static, keys.kNvfp4Dynamic)
    else:
        mxfp4._user_moe_activation_override = lambda: None  # it would read an engine's settings
        found = mxfp4.select_mxfp4_moe_backend(layer)
    return *found, heard.refused


def _reason(message: str) -> str:
    """Upstream's line without the printed configuration, which is the case's own."""
    return message.split(" FusedMoEParallelConfig(")[0].rstrip(".")


def observe(setting: dict[str, Any]) -> list[Case]:
    """Every case of one setting, in this process, which is of no use afterwards."""
    _simulate(setting)
    found = []
    for checkpoint in CHECKPOINTS:
        for name, deployment in DEPLOYMENTS.items():
            for lora in (False, True):
                layer = _layer(checkpoint, deployment, lora)
                sizes = {"tp": layer.tp_size, "dp": layer.dp_size, "ep": layer.ep_size}
                case = {
                    **setting, "checkpoint": checkpoint, "deployment": name, "lora": lora,
                    "sizes": sizes,
                    "batched": layer.moe_parallel_config.use_batched_activation_format,
                }  # fmt: skip
                try:
                    backend, experts, refused = _select(checkpoint, layer)
                except (NotImplementedError, ValueError) as error:
                    case |= {"backend": None, "error": _reason(str(error))}
                else:
                    case |= {
                        "backend": backend.value,
                        "experts": experts.__name__,
                        "monolithic": experts.is_monolithic(),
                        "refused": list(map(_reason, refused)),
                    }
                found.append(case)
    return found


# ------------------------------------------------------------------ in the parent


def record(setting: dict[str, Any]) -> list[Case]:
    """The cases of one setting, from a child process without vLLM's own variables.

    Raises:
        RuntimeError: the child failed; with what it said.
    """
    environment = {name: value for name, value in os.environ.items() if "VLLM_" not in name}
    found: list[Case] = simulated_gpu.in_child(__name__, setting, environment)
    return found


def cases() -> Iterator[Case]:
    """The cases of every setting."""
    for setting in settings():
        yield from record(setting)


if __name__ == "__main__":  # a child of `record`: one device
    print(json.dumps(observe(json.loads(sys.argv[1]))))

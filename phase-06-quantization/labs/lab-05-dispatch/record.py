"""Record which mixed-precision kernel the real v0.22.1 chooses, for GPUs that are not here.

    PYTHONPATH=.:upstream python phase-06-quantization/labs/lab-05-dispatch/record.py

Needs the pinned tree importable, no GPU. What runs is upstream's own
`vllm/model_executor/kernels/linear/__init__.py:618` `choose_mp_linear_kernel` with each kernel's
`can_implement`. Simulated is the platform: one that is CUDA and reports the capability asked for.
The package `conch` is not installed. Writes `recorded.json` beside this file.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
NUM_CASES = 600
TYPES = ("uint4b8", "uint8b128", "uint4")
SHAPES = (
    (4096, 4096),
    (4096, 6144),
    (896, 1152),
    (896, 9728),
    (4864, 896),
    (4096, 100),
    (2752, 4096),
)
"""in_features, out_features of one rank."""
DISABLED = ("MacheteLinearKernel", "MarlinLinearKernel", "AllSparkLinearKernel")


def cases() -> list[dict[str, Any]]:
    """Settings drawn at random, the same each time; an AWQ type has zero-points, others none."""
    rng = random.Random(6)
    drawn = []
    for _ in range(NUM_CASES):
        in_features, out_features = rng.choice(SHAPES)
        weight_type = rng.choice(TYPES)
        drawn.append(
            {
                "capability": rng.choice((60, 75, 80, 86, 89, 90, 90, 100)),
                "weight_type": weight_type,
                "act_type": rng.choice(("float16", "bfloat16")),
                "group_size": rng.choice((-1, -1, 32, 64, 128, 128, 48)),
                "zero_points": weight_type == "uint4",
                "in_features": in_features,
                "out_features": out_features,
                "full_in_features": in_features * rng.choice((1, 1, 2)),
                "act_order": rng.random() < 0.25,
                "disabled": rng.sample(DISABLED, rng.choice((0, 0, 0, 1))),
                "backend": rng.choice(("auto",) * 7 + ("marlin", "machete", "exllama", "triton")),
            }
        )
    return drawn


def real_choice(case: dict[str, Any]) -> str | None:
    """The kernel's name, or None for an error."""
    import torch
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mixed_precision import MPLinearLayerConfig
    from vllm.platforms.interface import DeviceCapability, PlatformEnum
    from vllm.scalar_type import scalar_types

    capability = DeviceCapability(*divmod(case["capability"], 10))
    platform = SimpleNamespace(
        _enum=PlatformEnum.CUDA,
        is_cuda=lambda: True,
        is_cuda_alike=lambda: True,
        is_cpu=lambda: False,
        is_xpu=lambda: False,
        is_rocm=lambda: False,
        get_device_capability=lambda: capability,
        is_device_capability=lambda wanted: wanted == case["capability"],
    )
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.model_executor.") and hasattr(module, "current_platform"):
            module.current_platform = platform
    linear.envs = SimpleNamespace(VLLM_DISABLED_KERNELS=case["disabled"])
    linear._get_linear_backend = lambda: case["backend"]
    config = MPLinearLayerConfig(
        full_weight_shape=(case["full_in_features"], case["out_features"]),
        partition_weight_shape=(case["in_features"], case["out_features"]),
        weight_type=getattr(scalar_types, case["weight_type"]),
        act_type=getattr(torch, case["act_type"]),
        group_size=case["group_size"],
        zero_points=case["zero_points"],
        has_g_idx=case["act_order"],
    )
    try:
        return linear.choose_mp_linear_kernel(config).__name__
    except ValueError:
        return None


def main() -> None:
    found = [{**case, "chosen": real_choice(case)} for case in cases()]
    keys = list(found[0])
    lines = [json.dumps([case[key] for key in keys]) for case in found]
    text = (
        '{"upstream": {"version": "0.22.1", "commit": "0decac0"},\n'
        f' "keys": {json.dumps(keys)},\n "cases": [\n' + ",\n".join(lines) + "\n]}\n"
    )
    (HERE / "recorded.json").write_text(text, encoding="utf-8")
    counts: dict[str, int] = {}
    for case in found:
        counts[str(case["chosen"])] = counts.get(str(case["chosen"]), 0) + 1
    print(counts)


if __name__ == "__main__":
    main()

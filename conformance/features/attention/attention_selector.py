"""Record which attention backend the real v0.22.1 selector chooses, for GPUs that are not here.

Needs the pinned tree on `PYTHONPATH`, no GPU. What runs is upstream's own:
`vllm/platforms/cuda.py:258` `CudaPlatformBase.get_valid_backends`, and each backend's
`vllm/v1/attention/backend.py:271` `AttentionBackend.validate_configuration`. What is simulated:

- the device: a platform that reports the capability asked for;
- what the wheel contains: compiled modules and FlashInfer are empty stand-ins, so FlashAttention 2
  and 3, FlashMLA and FlashInfer count as installed; FlashAttention 4 counts as installed or not, as
  asked; the package `tokenspeed_mla` is not installed;
- whether FlashInfer's TRT-LLM kernels can be had, as asked;
- no model: checks of a model's own dimensions do not apply.

A process knows one device, so each combination of these runs in a child process.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from conformance import simulated_gpu

ABOUT = (
    "One case per simulated device and wheel: `capability`, `fa4`, `trtllm` (what counts as "
    "available), `batch_invariant`. `grid` maps each argument of the selector to its values, and "
    "`features` are sets of arguments that go together. `found` has one entry per configuration, "
    "in the order of itertools.product over `grid` and then `features`: an index into `outcomes`. "
    "An outcome is {'valid': backends in order of priority, 'rejected': {backend: reasons}}; the "
    "first of `valid` is chosen, and none is an error."
)
CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
GRID: dict[str, list[Any]] = {
    "head_size": [16, 32, 64, 80, 100, 128, 256, 320, 512, 576],
    "dtype": ["float16", "bfloat16", "float32"],
    "kv_cache_dtype": [
        "auto",
        "fp8",
        "fp8_e5m2",
        "fp8_ds_mla",
        "int8_per_token_head",
        "nvfp4",
        "turboquant_k8v4",
    ],
    "block_size": [None, 8, 16, 32, 48, 64, 128],
}
FEATURES: list[dict[str, Any]] = [
    {},
    {"has_sink": True},
    {"use_mm_prefix": True},
    {"use_non_causal": True},
    {"attn_type": "encoder_only"},
    {"attn_type": "encoder_decoder"},
    {"use_mla": True},
    {"use_mla": True, "use_sparse": True},
    {"use_mla": True, "use_sparse": True, "num_heads": 16},
]


def configurations() -> Iterator[dict[str, Any]]:
    """Every configuration of a case, in the order of `found`."""
    for values in itertools.product(*GRID.values()):
        for feature in FEATURES:
            yield {**dict(zip(GRID, values, strict=True)), **feature}


def settings() -> Iterator[dict[str, Any]]:
    """Devices and wheels: the standard wheel on each, and what changes where it matters."""
    for capability in CAPABILITIES:
        usual = {"capability": capability, "fa4": True, "trtllm": True, "batch_invariant": False}
        yield usual
        yield {**usual, "batch_invariant": True}
        if capability == "10.0":
            yield {**usual, "trtllm": False}
        if capability in ("9.0", "10.0"):
            yield {**usual, "fa4": False}


# ------------------------------------------------------------------ in the child


def observe(setting: dict[str, Any]) -> dict[str, Any]:
    """One case, in this process, which is of no use for anything else afterwards."""
    platform = simulated_gpu.simulate(setting["capability"])
    capability = platform.get_device_capability()
    import torch
    import vllm.config
    import vllm.utils.flashinfer
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.vllm_flash_attn import flash_attn_interface

    options = types.SimpleNamespace(use_trtllm_attention=None, flash_attn_version=None)
    engine = types.SimpleNamespace(attention_config=options, model_config=None, cache_config=None)
    vllm.config.vllm._current_vllm_config = engine
    vllm.utils.flashinfer.has_nvidia_artifactory = lambda: setting["trtllm"]
    flash_attn_interface.FA4_AVAILABLE = setting["fa4"]

    outcomes: dict[str, int] = {}
    found = []
    for configuration in configurations():
        num_heads = configuration.pop("num_heads", None)
        configuration["dtype"] = getattr(torch, configuration["dtype"])
        asked = AttentionSelectorConfig(
            **configuration, use_batch_invariant=setting["batch_invariant"]
        )
        valid, rejected = platform.get_valid_backends(capability, asked, num_heads)
        outcome = {
            "valid": [backend.name for backend, _ in valid],
            "rejected": {backend.name: reasons for backend, (_, reasons) in rejected.items()},
        }
        found.append(outcomes.setdefault(json.dumps(outcome), len(outcomes)))
    listed = [json.loads(text) for text in outcomes]
    return {**setting, "grid": GRID, "features": FEATURES, "outcomes": listed, "found": found}


# ------------------------------------------------------------------ in the parent


def record(wanted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases of these settings, each from a child process.

    Raises:
        RuntimeError: a child failed; with what it said.
    """
    cases = []
    for setting in wanted:
        environment = {**os.environ, "VLLM_BATCH_INVARIANT": str(int(setting["batch_invariant"]))}
        cases.append(simulated_gpu.in_child(__name__, setting, environment))
    return cases


def cases() -> Iterator[dict[str, Any]]:
    """The cases of every setting."""
    yield from record(list(settings()))


if __name__ == "__main__":  # a child of `record`: one device
    print(json.dumps(observe(json.loads(sys.argv[1]))))

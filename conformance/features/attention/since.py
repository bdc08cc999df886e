"""Which attention backend a later release chooses for the rows of the guide, beside the pin's.

    python -m conformance.features.attention.since [RELEASE ...]

Needs torch (no GPU) and the archives in `build/releases`. What runs is each release's own
`vllm/platforms/cuda.py` `CudaPlatformBase.get_valid_backends`; what is simulated is what
`attention_selector` simulates. Rows that differ from the pin's are printed, with the release where
they begin to. A process knows one device and one release, so each pair runs in a child.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Sequence
from typing import Any

from conformance import simulated_gpu
from conformance.real_core.places import tree_of
from mini_vllm.releases import PARTS, PIN

DEVICES = {"T4": "7.5", "A100": "8.0", "H100": "9.0", "B200": "10.0"}
ROWS: dict[str, dict[str, Any]] = {
    "heads of 128": {"head_size": 128},
    "heads of 80": {"head_size": 80},
    "heads of 100": {"head_size": 100},
    "heads of 256": {"head_size": 256},
    "KV fp8": {"head_size": 128, "kv_cache_dtype": "fp8"},
    "32 bits": {"head_size": 128, "dtype": "float32"},
    "sinks": {"head_size": 64, "has_sink": True},
    "pictures": {"head_size": 128, "use_mm_prefix": True},
    "MLA": {"head_size": 576, "use_mla": True},
    "MLA, KV fp8": {"head_size": 576, "use_mla": True, "kv_cache_dtype": "fp8"},
    "MLA sparse": {"head_size": 576, "use_mla": True, "use_sparse": True},
}
"""What a layer asks for, in bfloat16 where no other type is named."""


class _Asked(types.SimpleNamespace):
    """A configuration in which whatever was not set is None."""

    def __getattr__(self, name: str) -> Any:
        return None


def observe(capability: str) -> dict[str, list[str]]:
    """Row -> backends without objection, the first of which is chosen; in a child of its own."""
    platform = simulated_gpu.simulate(capability)
    device = platform.get_device_capability()
    import torch
    import vllm.config
    import vllm.utils.flashinfer
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.vllm_flash_attn import flash_attn_interface

    alone = {"prefill_context_parallel_size": 1, "decode_context_parallel_size": 1}
    engine = _Asked(
        attention_config=_Asked(use_fp4_indexer_cache=False), parallel_config=_Asked(**alone)
    )
    vllm.config.vllm._current_vllm_config = engine
    vllm.utils.flashinfer.has_nvidia_artifactory = lambda: True
    flash_attn_interface.FA4_AVAILABLE = True
    found = {}
    for name, row in ROWS.items():
        asked = {"dtype": "bfloat16", "kv_cache_dtype": "auto", "block_size": None, **row}
        asked["dtype"] = getattr(torch, asked["dtype"])
        layer = AttentionSelectorConfig(**asked, use_batch_invariant=False)
        valid, _ = platform.get_valid_backends(device, layer, None)
        found[name] = [getattr(each, "backend", None) or each[0] for each in valid]
    return {name: [backend.name for backend in valid] for name, valid in found.items()}


def chosen(release: str, capability: str) -> dict[str, list[str]]:
    """`observe` in a child, with a release's tree in front.

    Raises:
        RuntimeError: the child failed; with what it said.
    """
    here = str(tree_of(PIN).parent)
    path = os.pathsep.join([str(tree_of(release)), here])
    done = subprocess.run(
        [sys.executable, "-m", "conformance.features.attention.since", "--child", capability],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"vLLM {release}, {capability}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str]) -> None:
    """Every row that a release lists another way than the one before it."""
    for device, capability in DEVICES.items():
        before = chosen(PIN, capability)
        for release in arguments or [version for version in PARTS if version != PIN]:
            now = chosen(release, capability)
            for name, valid in now.items():
                if valid != before[name]:
                    print(f"{device}, {name}, {release}: {before[name]} -> {valid}", flush=True)
            before = now


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(observe(sys.argv[2])))
    else:
        main(sys.argv[1:])

"""Launches and kernels of a step in three modes, by `mini_vllm.cudagraph.launches.simulate`."""

from __future__ import annotations

from typing import Any

from mini_vllm.cudagraph import launches


def document() -> dict[str, Any]:
    """The kernels of a layer, the modes, and where the sliders begin."""
    return {
        "layer": list(launches.LAYER),
        "modes": list(launches.MODES),
        "defaults": {"layers": 3, "launch_us": 5, "kernel_us": 2},
    }

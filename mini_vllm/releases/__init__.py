"""Releases after the pin: the parts with which the engine decides as they do.

Promises: `parts_of(version)` gives the core's parts with the rules that changed up to that release,
and nothing else; the default engine, the pin, never imports this room. What each release changed,
with the workloads that show it, is proved in `conformance/releases/`.
"""

from __future__ import annotations

from mini_vllm.parts import EngineParts
from mini_vllm.releases import v0_27_1, v0_33_0
from mini_vllm.releases.loads import AsyncLoadsReserve, LoadsReserve

PIN = "0.22.1"
PARTS = {
    PIN: EngineParts(rooms={"multimodal": {}, "kv_transfer": {}}),
    "0.23.0": EngineParts(  # decides as the pin does where nothing is loaded
        scheduler=LoadsReserve, async_scheduler=AsyncLoadsReserve, rooms={"kv_transfer": {}}
    ),
    "0.27.1": v0_27_1.PARTS,
    "0.33.0": v0_33_0.PARTS,
}
"""Release -> parts, oldest first."""


def parts_of(release: str) -> EngineParts:
    """The parts that decide as `release` does.

    Raises:
        ValueError: a release whose decisions were not compared.
    """
    if release not in PARTS:
        raise ValueError(f"release={release!r}: need one of {', '.join(PARTS)}")
    return PARTS[release]

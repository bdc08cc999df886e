"""Releases after the pin: the parts with which the engine decides as they do.

Promises: `parts_of(version)` gives the core's parts with the rules that changed up to that release,
and nothing else; the default engine, the pin, never imports this room. What each release changed,
with the workloads that show it, is proved in `conformance/releases/`.
"""

from __future__ import annotations

from mini_vllm.features import ROOMS
from mini_vllm.parts import EngineParts
from mini_vllm.releases import v0_27_1, v0_33_0
from mini_vllm.releases.loads import AsyncLoadsReserve, LoadsReserve
from mini_vllm.releases.lookahead import LookaheadAtAdmission

PIN = "0.22.1"


class Scheduler0230(LookaheadAtAdmission, LoadsReserve):
    """`Scheduler` with the rules of 0.23.0."""


class AsyncScheduler0230(LookaheadAtAdmission, AsyncLoadsReserve):
    """`AsyncScheduler` with the rules of 0.23.0."""


PARTS = {
    PIN: EngineParts(rooms={room: {} for room in ROOMS}),
    "0.23.0": EngineParts(  # decides as the pin does where nothing is loaded and nobody drafts
        scheduler=Scheduler0230,
        async_scheduler=AsyncScheduler0230,
        rooms={"kv_transfer": {}, "spec_decode": {}, "lora": {}, "structured_output": {}},
    ),
    "0.27.1": v0_27_1.PARTS,
    "0.33.0": v0_33_0.PARTS,
}
"""Release -> parts, oldest first. `rooms` has those whose decisions were compared with the release;
another one is refused with it."""


def parts_of(release: str) -> EngineParts:
    """The parts that decide as `release` does.

    Raises:
        ValueError: a release whose decisions were not compared.
    """
    if release not in PARTS:
        raise ValueError(f"release={release!r}: need one of {', '.join(PARTS)}")
    return PARTS[release]

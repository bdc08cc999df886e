"""Releases after the pin: the parts with which the engine decides as they do.

Promises: `parts_of(version)` gives the core's parts with the rules that changed up to that release,
and nothing else; the default engine, the pin, never imports this room. What each release changed,
with the workloads that show it, is proved in `conformance/releases/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mini_vllm.async_scheduler import AsyncScheduler
from mini_vllm.block_pool import BlockPool
from mini_vllm.features import ROOMS
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.parts import EngineParts
from mini_vllm.releases.adapters import RunningAdapters
from mini_vllm.releases.drafts import (
    AcceptedCachedAtOnce,
    HitsPadded,
    NewDecodesPadded,
    PaddedWhereRoom,
    SlotsByRequest,
)  # fmt: skip
from mini_vllm.releases.encoder_cache import ReferencesNoted
from mini_vllm.releases.hashes_ahead import HashesLookAhead
from mini_vllm.releases.loads import LoadsReserve
from mini_vllm.releases.lookahead import LookaheadAtAdmission
from mini_vllm.releases.one_queue import OneQueue
from mini_vllm.releases.stale_output import StaleOutputKept
from mini_vllm.releases.v0_27_1 import UnhashedFirst
from mini_vllm.releases.v0_33_0 import (
    LoneRequestUncapped,
    ResumedAreNew,
    ScanGoesOn,
    StopBeforeMinTokens,
    UnhashedFirstAlways,
)  # fmt: skip
from mini_vllm.request import Request
from mini_vllm.scheduler import Scheduler

PIN = "0.22.1"

_ROOMS: dict[str, dict[str, Any]] = {"spec_decode": {}, "lora": {}, "structured_output": {}}
"""Served with all of them: drafts, adapters and grammars."""
_PADS = {**_ROOMS, "spec_decode": {"pads_admissions": True}}


def _with(
    pool: type[BlockPool],
    *rules: type[Scheduler],
    only: tuple[type[Scheduler], ...] = (),
    ahead: tuple[type[AsyncScheduler], ...] = (),
    rooms: Mapping[str, Mapping[str, Any]] = _PADS,
    request: type[Request] = Request,
    manager: type[KVCacheManager] = KVCacheManager,
) -> EngineParts:
    """The pin's parts with rules of both schedulers, `only` of the one, `ahead` of the other.

    What takes off the budget stands before what looks at it.
    """
    return EngineParts(
        block_pool=pool,
        kv_cache_manager=manager,
        scheduler=type("ReleaseScheduler", (*only, *rules, Scheduler), {}),
        async_scheduler=type("ReleaseAsyncScheduler", (*rules, *ahead, AsyncScheduler), {}),
        rooms=rooms,
        request=request,
    )


_PADDED = (NewDecodesPadded, LookaheadAtAdmission)
_STALE = (StaleOutputKept,)
_SINCE_0_31 = (OneQueue, LoneRequestUncapped, SlotsByRequest, HitsPadded, LookaheadAtAdmission)

PARTS = {
    PIN: EngineParts(rooms={room: {} for room in ROOMS}),
    "0.23.0": _with(
        BlockPool, LookaheadAtAdmission, LoadsReserve, rooms={"kv_transfer": {}, **_ROOMS}
    ),
    "0.24.0": _with(UnhashedFirstAlways, LookaheadAtAdmission, rooms=_ROOMS),
    "0.25.0": _with(UnhashedFirstAlways, *_PADDED),
    "0.25.1": _with(UnhashedFirstAlways, *_PADDED),
    "0.26.0": _with(UnhashedFirstAlways, *_PADDED),
    "0.27.0": _with(UnhashedFirst, *_PADDED, ahead=_STALE),
    "0.27.1": _with(
        UnhashedFirst, *_PADDED, ahead=_STALE,
        rooms={
            "multimodal": {"encoder_cache_manager": ReferencesNoted, "synchronous_alone": True},
            **_PADS,
        },
    ),
    "0.28.0": _with(UnhashedFirstAlways, SlotsByRequest, *_PADDED, ahead=_STALE),
    "0.29.0": _with(
        UnhashedFirstAlways, SlotsByRequest, PaddedWhereRoom, LookaheadAtAdmission, ahead=_STALE,
        request=StopBeforeMinTokens,
    ),
    "0.30.0": _with(
        UnhashedFirstAlways, SlotsByRequest, HitsPadded, LookaheadAtAdmission, ahead=_STALE,
        request=StopBeforeMinTokens,
    ),
    "0.31.0": _with(
        UnhashedFirstAlways, *_SINCE_0_31, ahead=_STALE, request=StopBeforeMinTokens
    ),
    "0.32.0": _with(
        UnhashedFirstAlways, *_SINCE_0_31, ahead=_STALE, request=StopBeforeMinTokens
    ),
    "0.33.0": _with(
        UnhashedFirstAlways, *_SINCE_0_31, ResumedAreNew, ScanGoesOn,
        only=(AcceptedCachedAtOnce,), ahead=_STALE, request=StopBeforeMinTokens,
        manager=HashesLookAhead,
        rooms={**_PADS, "lora": {"adapter_gate": RunningAdapters}},
    ),
}  # fmt: skip
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

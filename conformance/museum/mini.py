"""The exhibits on the part of the mini engine that has the bug.

Six are the parts of lab 19-02 (`conformance/museum_parts.py`). The others are the engine's own,
which decide as the pin does and so have what the pin has. Promises: the same story or workload and
the same judgement as on a release's code; an exhibit without such a part is not here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from conformance import museum_parts, replay
from conformance.museum import exhibits
from conformance.museum.exhibit import Shown, Steps, judged
from conformance.museum.exhibits import EXHIBITS
from conformance.recorders.run import STALL_STEPS
from conformance.workloads import Workload
from mini_vllm.block_pool import BlockPool
from mini_vllm.config import SamplingParams, SchedulerConfig
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.multimodal.encoder_cache_manager import EncoderCacheManager
from mini_vllm.parts import EngineParts
from mini_vllm.request import Request
from mini_vllm.scheduler import Scheduler

MOST_STEPS = 200


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the engine that has the bug of an exhibit."""

    name: str
    """Of the class, as a reader finds it."""
    show: Callable[[], Shown]


def decided(
    workload: Workload, broken: Callable[[Steps], int | None], stalls: bool, parts: EngineParts
) -> Shown:
    """A workload on the mini scheduler, judged as `exhibit.run` judges a release.

    Raises:
        RuntimeError: it neither ends nor stands still within `MOST_STEPS`.
    """
    given = copy.deepcopy(workload)
    build, plain = replay.builders(parts)

    def make_request(add: Any, eos_token_id: int) -> Request:
        request = plain(add, eos_token_id)
        if "min_tokens" in add:
            params = dataclasses.replace(request.sampling_params, min_tokens=add["min_tokens"])
            request.sampling_params = params
        return request

    driven = replay.Driven(given, build(replay.config_of(given)), make_request)
    events = replay.events_by_step(given)
    steps: list[dict[str, Any]] = []
    idle, stalled = 0, False
    while not stalled and (driven.is_busy() or len(steps) <= max(events)):
        if len(steps) == MOST_STEPS:
            raise RuntimeError(f"workload: not finished after {MOST_STEPS} steps")
        steps.append(driven.step(events.get(len(steps), {})))
        comes = len(steps) <= max(events)
        idle = 0 if steps[-1]["num_scheduled_tokens"] or comes else idle + 1
        stalled = idle >= STALL_STEPS + driven.depth - 1
    return judged(steps, broken, stalls, stalled)


def _picture(name: str, *identifiers: str) -> Any:
    """A request with pictures of four embeddings, as the mini manager reads one."""
    place = SimpleNamespace(get_num_embeds=lambda: 4)
    features = [SimpleNamespace(identifier=each, mm_position=place) for each in identifiers]
    return SimpleNamespace(request_id=name, block_keys=SimpleNamespace(mm_features=features))


def _session() -> Shown:
    session, newcomer = museum_parts.KeptHashes(), museum_parts.KeptHashes()
    session.extend([1, 2, 3])
    session.extend([99])
    session.take_back(3)
    session.extend([4, 5, 6, 7])
    index = set(session.block_hashes)  # a block enters it under the hash that the session has
    newcomer.extend([1, 2, 3, 99, 5])
    found = [each in index for each in newcomer.block_hashes]
    whole = (*found, False).index(False)
    return exhibits.taken_back(session.tokens, whole * museum_parts.SIZE)


def _counted() -> Shown:
    kv = KVCacheManager(4, museum_parts.SIZE)
    kv.stats = museum_parts.AllAlike()
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    scheduler = Scheduler(kv, config)
    for name, first in (("a", 100), ("b", 200)):
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        scheduler.add_request(Request(name, range(first, first + 4), params))
    preempted: set[str] = set()
    while (plan := scheduler.schedule()).num_scheduled_tokens:
        preempted |= set(plan.preempted_req_ids)
        scheduler.update_from_output(plan, {name: [7] for name in plan.num_scheduled_tokens})
    return exhibits.counted(kv.stats, preempted)


def _scheduled(number: int, name: str, parts: EngineParts) -> Part:
    exhibit = EXHIBITS[number]
    broken = exhibit.broken or exhibits.unwritten
    assert exhibit.workload is not None
    workload = exhibit.workload
    return Part(name, lambda: decided(workload, broken, exhibit.stalls, parts))


_PLAIN, _ASYNC = "mini_vllm.Scheduler", "mini_vllm.AsyncScheduler"
PARTS: dict[int, Part] = {
    37307: _scheduled(
        37307, "museum_parts.FirstChunk", EngineParts(scheduler=museum_parts.FirstChunk)
    ),
    49097: _scheduled(
        49097, "museum_parts.SteppedOver", EngineParts(async_scheduler=museum_parts.SteppedOver)
    ),
    **{
        number: _scheduled(number, name, EngineParts())
        for number, name in (
            (26765, _PLAIN), (47489, "mini_vllm.Request"), (57951, _PLAIN), (43569, _PLAIN),
            (44560, "mini_vllm.ConnectorGate"), (46283, "mini_vllm.ConnectorGate"),
            (45138, _ASYNC),
        )
    },
    39734: _scheduled(39734, "museum_parts.OpenDoor", EngineParts(scheduler=museum_parts.OpenDoor)),
    52482: Part(
        "museum_parts.StaleEvictions",
        lambda: exhibits.dropped(museum_parts.StaleEvictions(4), _picture),
    ),
    54284: Part(
        "mini_vllm.EncoderCacheManager", lambda: exhibits.carried(EncoderCacheManager(4), _picture)
    ),
    49377: Part("museum_parts.KeptHashes", _session),
    25780: Part("museum_parts.AllAlike", _counted),
    42656: Part("mini_vllm.BlockPool", lambda: exhibits.flipped(BlockPool(6, False))),
}  # fmt: skip
"""By the number of the exhibit."""

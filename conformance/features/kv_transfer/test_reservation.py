"""44560, in 0.23.0: loads leave the blocks that others need. The queue that stands at the pin."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

from conformance import replay
from conformance.features.kv_transfer import recorder
from conformance.features.kv_transfer.test_kv_transfer import DIES
from conformance.real_core import core_of, why_not
from conformance.recorders import connector
from conformance.recorders.run import Run, Stalled
from mini_vllm import LLMEngine
from mini_vllm.kv_transfer.simulated import SimulatedNetwork
from mini_vllm.releases import parts_of
from mini_vllm.releases.loads import AsyncLoadsReserve, LoadsReserve
from mini_vllm.scheduler import Scheduler

VERSION = "0.23.0"
ENDS, STANDS = 150_612, 150_079
"""Of the 700 seeds of `connector` 11 stand at the pin; 2 of them end at 0.23.0, this is one."""
needs_core = pytest.mark.skipif(
    bool(why_not(VERSION)) or bool(why_not()), reason=why_not(VERSION) or why_not()
)


def stands_at(version: str, seed: int) -> bool:
    """Whether the real scheduler of a release stands still for ever."""
    core = core_of() if version == "0.22.1" else core_of(version)
    try:
        Run(copy.deepcopy(connector.generate(seed)), core).recorded()
    except Stalled:
        return True
    return False


def stands_here(scheduler: type[Scheduler], seed: int) -> bool:
    """Whether ours does, with this scheduler."""
    build = functools.partial(replay.mini_scheduler, scheduler=scheduler)
    try:
        replay.run(connector.generate(seed), build, max_steps=400)
    except RuntimeError:
        return True
    return False


@needs_core
def test_the_queue_that_stands_at_the_pin_moves_since_loads_reserve():
    assert stands_at("0.22.1", ENDS) and not stands_at(VERSION, ENDS)
    assert stands_here(Scheduler, ENDS) and not stands_here(LoadsReserve, ENDS)


@needs_core
def test_another_queue_still_stands_there():
    """As 57841 says: what is held is not reserved but loaded, and waits behind the head."""
    assert stands_at("0.22.1", STANDS) and stands_at(VERSION, STANDS)
    assert stands_here(Scheduler, STANDS) and stands_here(LoadsReserve, STANDS)


FAMILIES = {
    "loads": (recorder.record, LoadsReserve), "failures": (recorder.record_failures, LoadsReserve),
    "async": (recorder.record_async, AsyncLoadsReserve),
}  # fmt: skip


def differences(family: str, seeds: range, scheduler: Any = None) -> list[str]:
    record, mine = FAMILIES[family]
    build = functools.partial(replay.mini_scheduler, scheduler=scheduler or mine)
    found = []
    for seed in seeds:
        if seed == DIES and family == "failures":
            continue  # as the pin: `test_kv_transfer.py`
        [entry] = record([seed], core_of(VERSION))
        found.append(replay.replay(entry, build)[1])
    return [str(difference) for difference in found if difference]


@needs_core
@pytest.mark.parametrize("family", FAMILIES)
def test_fresh_workloads_are_decided_as_by_the_release(family):
    assert differences(family, range(174_000, 174_008)) == []


@needs_core
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_fresh_workloads_are_decided_as_by_the_release(family):
    assert differences(family, range(172_000, 172_300)) == []


@needs_core
@pytest.mark.slow
def test_the_pin_decides_some_of_them_otherwise():
    assert len(differences("loads", range(172_000, 172_100), Scheduler)) == 3


def test_an_engine_with_a_connector_takes_the_part_by_its_release():
    config = {
        "kv_connector": "SimulatedConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"network": SimulatedNetwork()},
    }  # fmt: skip
    for version, kind in (("0.22.1", Scheduler), (VERSION, LoadsReserve)):
        engine = LLMEngine(parts=parts_of(version), kv_transfer_config=config)
        assert isinstance(engine.scheduler, kind)
        assert isinstance(engine.scheduler, LoadsReserve) == (version == VERSION)

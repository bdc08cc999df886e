"""Recordings with a connector: loads and sends that take steps, loads that fail.

    python -m conformance.record connector connector_failures --core

`add.kv` is what `recorders/connector.py` says. In `connector_failures` it has `fails` besides, and
`config.kv_load_failure_policy` says what follows: a step then adds `invalid_block_ids`, which its
update reports. `connector_deaths` holds workloads in which the real scheduler fails an assertion of
its own: `dies` is the step whose update raises, and what.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from conformance import recording, workloads
from conformance.recorders import connector
from conformance.recorders.run import RefusedError, Run, Stalled
from conformance.recorders.source import Real, installed

FREED_TOGETHER = (162_160,)
"""Found among some 1,000 seeds with aborts: one update frees what was received for a request that
is gone and what was sent for another, and their order matters later."""
SEEDS = (*FREED_TOGETHER, *range(150_000, 150_699))
FAILURE_SEEDS = range(151_000, 151_300)
ASYNC_SEEDS = range(152_000, 152_100)
DEATH_SEEDS = range(153_000, 153_060)
"""Those of them are kept that the real scheduler does not survive."""


def record(seeds: Iterable[int] = SEEDS, real: Real | None = None) -> Iterator[recording.Recording]:
    """Each seed on the real scheduler, every field of every step."""
    for seed in seeds:
        yield _lean(connector.run(connector.generate(seed), real))


def generate_failures(seed: int, policy: str = "") -> dict[str, Any]:
    """The workload of a seed in which loads fail, once or twice, from some block on.

    Under "fail" one request's loads fail. `policy` is drawn where none is given.
    """
    rng = random.Random(seed * 37 + 5)
    profile = rng.choice(("prefix", "prefix", "pressure", "mixed", "priority", "aborts"))
    number = len(workloads.PROFILES) * seed + workloads.PROFILES.index(profile)
    workload = {**connector.generate(number), "seed": seed}
    policy = policy or rng.choice(("recompute", "fail"))
    workload["config"]["kv_load_failure_policy"] = policy
    adds = [add for event in workload["events"] for add in event["add"] if add.get("kv")]
    rng.shuffle(adds)
    for add in adds[:1] if policy == "fail" else adds:
        if not add["kv"]["external_tokens"]:  # a load that brings nothing cannot fail
            add["kv"]["external_tokens"] = max(0, len(add["prompt_token_ids"]) - 1)
        if policy == "fail" or rng.random() < 0.6:
            blocks = sorted({rng.randint(0, 5) for _ in range(rng.choice((1, 1, 2)))})
            add["kv"]["fails"] = {"blocks": blocks, "times": rng.choice((1, 1, 2))}
    return workload


def record_failures(
    seeds: Iterable[int] = FAILURE_SEEDS, real: Real | None = None
) -> Iterator[recording.Recording]:
    """Each seed of `generate_failures` on the real scheduler.

    Requests that fail together, since they share a block, are freed in the order of a set, which is
    none: such a workload is recorded under "recompute".
    """
    for seed in seeds:
        entry = connector.run(generate_failures(seed), real)
        ends = [[*step["finish_reasons"].values()].count("error") for step in entry["steps"]]
        if max(ends) > 1:
            entry = connector.run(generate_failures(seed, "recompute"), real)
        yield _lean(entry)


def record_async(
    seeds: Iterable[int] = ASYNC_SEEDS, real: Real | None = None
) -> Iterator[recording.Recording]:
    """Each seed on the real `AsyncScheduler`: reports reach it with a plan in flight."""
    for seed in seeds:
        workload = connector.generate(seed)
        workload["config"]["async_scheduling"] = True
        yield connector.run(workload, real)


def generate_deaths(seed: int) -> dict[str, Any]:
    """The workload of a seed whose worker reports a request that the scheduler has let go.

    `kv["unasked"]` says how: "send" keeps the blocks of an aborted request for a send as well as
    for its load (46240); "report" reports a send of blocks that were not kept (43226).
    """
    rng = random.Random(seed * 41 + 3)
    workload = connector.generate(seed)
    for event in workload["events"]:
        for add in event["add"]:
            if (kv := add.get("kv")) and rng.random() < 0.7:
                kv["unasked"] = rng.choice(("send", "send", "report"))
                kv["send_steps"] = rng.randint(0, 6)
                if kv["load_async"] and kv["external_tokens"] and rng.random() < 0.7:
                    kv["load_steps"] = rng.randint(2, 8)
                    last = event["step"] + rng.randint(1, 3)
                    taken = {e["step"] for e in workload["events"]}
                    if last not in taken:
                        abort = {"step": last, "add": [], "abort": [add["request_id"]]}
                        workload["events"].append(abort)
    workload["events"].sort(key=lambda event: event["step"])
    return workload


def record_deaths(
    seeds: Iterable[int] = DEATH_SEEDS, real: Real | None = None
) -> Iterator[recording.Recording]:
    """The seeds of `generate_deaths` in which the real scheduler fails: its steps up to there."""
    for seed in seeds:
        if entry := death_of(generate_deaths(seed), real):
            yield entry


def death_of(workload: dict[str, Any], real: Real | None = None) -> recording.Recording | None:
    """The workload up to the step whose update raises, with `dies`; None if it does not raise."""
    run = Run(workload, real or installed())
    try:
        run.recorded(most=400)
    except RefusedError as error:
        step = len(run.steps) - 1
        last = run.steps[step]
        entry = _lean({**error.entry, "steps": [*error.entry["steps"]]})
        if last not in entry["steps"]:
            last.pop("sampled_token_ids", None)
            entry["steps"].append({**last, "finished": [], "finish_reasons": {}})
        said = str(error).split(": ", 1)[1]
        events = [event for event in entry["events"] if event["step"] <= step]
        adds = [add for event in events for add in event["add"]]  # others can go on from here
        outputs = {a["request_id"]: run.script[a["request_id"]][: a["max_tokens"]] for a in adds}
        dies = {"step": step, "error": said}
        return {**entry, "events": events, "outputs": outputs, "dies": dies}
    except Stalled:  # 45388 comes first
        pass
    return None


def _lean(entry: recording.Recording) -> recording.Recording:
    for step in entry["steps"]:
        step.pop("sampled_token_ids", None)  # `outputs` says it
    return entry

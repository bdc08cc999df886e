"""The deep dive's section "Since the pin", run on the releases' own schedulers, without torch.

Without an archive in `build/releases` its release is skipped: `course upstream fetch --version
0.33.0`. The last tests read the archives.
"""

from __future__ import annotations

import contextlib
import copy
import re

import pytest

from conformance import replay, workloads
from conformance.features.kv_transfer import recorder
from conformance.features.kv_transfer.test_kv_transfer import (
    DIES,
    ahead,
    lone,
    two_with_a_failed_prefix,
)
from conformance.real_core import core_of, why_not
from conformance.real_core.places import tree_of
from conformance.recorders import connector
from conformance.recorders.run import RefusedError, Run, Stalled
from mini_vllm.releases.loads import LoadsReserve
from mini_vllm.scheduler import Scheduler

PIN = "0.22.1"
STANDING = (
    150_079, 150_097, 150_164, 150_190, 150_402, 150_519, 150_568, 150_610, 150_612, 150_622,
    150_663,
)  # fmt: skip
"""Those of the recorder's 700 seeds whose queue stands at the pin."""


def core(version):
    if problem := why_not(version):
        pytest.skip(problem)
    return core_of() if version == PIN else core_of(version)


def outcome(version, workload):
    """What becomes of a workload: "ends", "stands" or "dies"."""
    try:
        Run(copy.deepcopy(workload), core(version)).recorded()
    except Stalled:
        return "stands"
    except RefusedError:
        return "dies"
    return "ends"


def stranded():
    """`ahead`, beside a second request: 0.31.0 and newer spare a lone one the threshold."""
    workload = ahead(max_tokens=1, long_prefill_token_threshold=2)
    adds = workload["events"][0]["add"]
    other = {"request_id": "other", "prompt_token_ids": list(range(20, 26)), "max_tokens": 14}
    adds.append({**adds[0], **other, "kv": None})
    workload["outputs"]["other"] = [7] * 14
    return workload


def against_itself():
    """A load of two blocks fails whole, in a pool of three."""
    workload = lone(load_steps=2, fails={"blocks": [0], "times": 1})
    workload["config"] |= {"kv_load_failure_policy": "recompute", "num_blocks": 4}
    del workload["events"][1]
    return workload


ROWS = {
    "received and sent after an abort": (
        lone(load_steps=4, send_steps=3, unasked="send"), ("dies", "dies", "dies", "dies"),
    ),
    "the remote never answers": (lone(load_steps=None), ("stands",) * 4),
    "a failure with a plan in flight, beside another": (stranded(), ("stands",) * 4),
    "a queue that stands": (
        connector.generate(150_612), ("stands", "ends", "ends", "ends"),
    ),
    "another": (connector.generate(150_079), ("stands", "stands", "stands", "ends")),
    "a load that failed, in a small pool": (
        against_itself(), ("ends", "stands", "stands", "stands"),
    ),
}  # fmt: skip
VERSIONS = (PIN, "0.23.0", "0.30.0", "0.33.0")


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("place", range(len(VERSIONS)))
def test_the_table(row, place):
    workload, said = ROWS[row]
    assert outcome(VERSIONS[place], workload) == said[place]


@pytest.mark.slow
@pytest.mark.parametrize("version", [PIN, "0.33.0"])
def test_as_many_draws_of_reports_end_the_engine(version):
    draws = map(recorder.generate_deaths, recorder.DEATH_SEEDS)
    assert sum(recorder.death_of(each, core(version)) is not None for each in draws) == 44


@pytest.mark.slow
@pytest.mark.parametrize(("version", "count"), [(PIN, 11), ("0.30.0", 9), ("0.31.0", 0)])
def test_how_many_of_eleven_queues_stand(version, count):
    outcomes = [outcome(version, connector.generate(seed)) for seed in STANDING]
    assert outcomes.count("stands") == count and "dies" not in outcomes


@pytest.mark.slow
@pytest.mark.parametrize(("version", "said"), [("0.30.0", "dies"), ("0.31.0", "ends")])
def test_a_prompt_loaded_whole_whose_failed_block_is_anothers(version, said):
    assert outcome(version, recorder.generate_failures(DIES)) == said


@pytest.mark.slow
@pytest.mark.parametrize("version", [PIN, "0.33.0"])
def test_a_newcomer_hits_a_block_that_is_half_computed(version):
    entry = Run(two_with_a_failed_prefix(), core(version)).recorded()
    assert entry["steps"][1]["num_computed_tokens"]["late"] == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "preemptions", "of_all"),
    [(PIN, 72, 0), ("0.24.0", 3775, 1849), ("0.29.0", 3775, 1849), ("0.30.0", 64, 0)],
)
def test_a_preemption_whose_blocks_come_later_frees_nothing(version, preemptions, of_all):
    """49674, on 40 workloads with plans in flight; `defer_block_free` is what a consumer's
    scheduler sets for itself from 0.24.0 on."""
    counted, everyone = 0, 0
    for seed in range(40):
        number = len(workloads.PROFILES) * seed + workloads.PROFILES.index("pressure")
        workload = workloads.generate(number)
        workload["config"]["async_scheduling"] = True
        run = Run(workload, core(version))
        if version != PIN:
            assert run.scheduler.defer_block_free is False
            run.scheduler.defer_block_free = True
        with contextlib.suppress(Stalled):
            run.recorded()
        counted += sum(len(step["preempted"]) for step in run.steps)
        everyone += sum(bool(step["preempted"]) and not step["running"] for step in run.steps)
    assert (counted, everyone) == (preemptions, of_all)


@pytest.mark.slow
def test_ours_preempts_as_often_as_the_pin_on_these():
    """It defers no frees, as the pin."""
    counted = 0
    for seed in range(40):
        number = len(workloads.PROFILES) * seed + workloads.PROFILES.index("pressure")
        workload = workloads.generate(number)
        workload["config"]["async_scheduling"] = True
        steps = replay.run(workload, replay.mini_scheduler, max_steps=3000)["steps"]
        counted += sum(len(step["preempted"]) for step in steps)
        assert not any(step["preempted"] and not step["running"] for step in steps), seed
    assert counted == 72


@pytest.mark.parametrize(("rule", "stands"), [(Scheduler, False), (LoadsReserve, True)])
def test_ours_with_the_rule_reserves_against_itself_too(rule, stands):
    """The part does as the release; the plain engine ends."""

    def build(config):
        return replay.mini_scheduler(config, scheduler=rule)

    if stands:
        with pytest.raises(RuntimeError):
            replay.run(against_itself(), build, max_steps=60)
    else:
        assert replay.run(against_itself(), build, max_steps=60)


# ------------------------------------------------------------------ read


def tree(version):
    if problem := why_not(version):
        pytest.skip(problem)
    return tree_of(version)


def text_of(version, path):
    return (tree(version) / path).read_text(encoding="utf-8")


CONNECTORS = "vllm/distributed/kv_transfer/kv_connector"


@pytest.mark.parametrize(
    ("name", "path", "before", "since"),
    [
        ("NixlPushConnector", f"{CONNECTORS}/factory.py", "0.23.0", "0.24.0"),
        ("HiSparseConnector", f"{CONNECTORS}/factory.py", "0.29.0", "0.30.0"),
        ("offload_prompt_only", "vllm/v1/kv_offload/base.py", PIN, "0.23.0"),
        ("kv_holding_waiting", "vllm/v1/core/sched/scheduler.py", "0.30.0", "0.31.0"),
    ],
)
def test_a_name_is_there_from_the_release_that_the_page_names(name, path, before, since):
    held = {release: name in text_of(release, path) for release in (before, since)}
    assert held == {before: False, since: True}


def test_a_connector_is_gone():
    assert "P2pNcclConnector" in text_of("0.23.0", f"{CONNECTORS}/factory.py")
    assert "P2pNcclConnector" not in text_of("0.24.0", f"{CONNECTORS}/factory.py")


@pytest.mark.parametrize(
    ("version", "lines"), [(PIN, 4156), ("0.23.0", 4181), ("0.24.0", 5779), ("0.33.0", 8318)]
)
def test_the_nixl_connector_grows(version, lines):
    files = (tree(version) / CONNECTORS / "v1" / "nixl").glob("*.py")
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) == lines


@pytest.mark.parametrize(("version", "count", "tiers"), [(PIN, 3, 0), ("0.33.0", 37, 19)])
def test_metrics_of_offloading_grow(version, count, tiers):
    names = set()
    for path in (tree(version) / "vllm").rglob("*.py"):
        if "offload" in str(path) or "metrics" in str(path):
            found = re.findall(r'"(vllm:kv_offload_\w+)"', path.read_text(encoding="utf-8"))
            names |= set(found)
    assert len(names) == count
    assert sum("_tiering_" in name for name in names) == tiers

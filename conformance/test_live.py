"""Fresh workloads on the real scheduler and on the mini engine, in one process.

The real scheduler is the pinned core from its archive, wherever `upstream/` is; with the pinned
tree importable, `-m upstream` asks the installed package too, and whether both decide equally. The
seeds differ in every run; a failure prints the one that reproduces it. `CONFORMANCE_SEED` repeats a
run, `CONFORMANCE_TIMES` makes it so many times as long.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest

from benchmarks import bench_scheduler
from conformance import mutants, recording, replay, together, workloads
from conformance.features.core import recorder as scheduler
from conformance.features.distributed import recorder as pipeline
from conformance.features.lora import recorder as lora
from conformance.features.multimodal import recorder as encoder
from conformance.features.spec_decode import recorder as spec
from conformance.features.structured_output import recorder as grammar
from conformance.real_core import core_of, why_not
from conformance.recorders import again, combined, connector, hybrid, source
from course.site import gantt
from course.site.widgets import first_lab
from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine

FIRST_SEED = int(os.environ.get("CONFORMANCE_SEED", random.randrange(10**6, 10**9)))
TIMES = int(os.environ.get("CONFORMANCE_TIMES", "1"))
CORE = pytest.param("core", marks=pytest.mark.skipif(bool(why_not()), reason=why_not()))
MANY = pytest.param("many", marks=[*CORE.marks, pytest.mark.slow])
INSTALLED = pytest.param("installed", marks=pytest.mark.upstream)
SHARES = {"core": 1, "many": 20, "installed": 5}
"""How often each asks a real scheduler what the default suite asks it once."""


@dataclass(frozen=True, slots=True)
class Judge:
    """A real scheduler, and how many times as many workloads as usual it is asked."""

    real: source.Real
    times: int

    def seeds(self, count: int) -> range:
        """Fresh seeds."""
        return range(FIRST_SEED, FIRST_SEED + count * self.times * TIMES)


@pytest.fixture(params=[CORE, MANY, INSTALLED])
def judge(request: pytest.FixtureRequest) -> Judge:
    """The pinned core from its archive, or the installed package."""
    real = source.installed() if request.param == "installed" else core_of()
    return Judge(real, SHARES[request.param])


def hold(entries: Iterable[recording.Recording]) -> None:
    """The mini engine decides each as it was recorded."""
    for entry in entries:
        _, difference = replay.replay(entry)
        assert difference is None, f"{difference}\nCONFORMANCE_SEED={FIRST_SEED} repeats this run"


@pytest.mark.slow
@pytest.mark.parametrize("profile", workloads.PROFILES)
def test_fresh_workloads_are_decided_as_by_the_real_scheduler(profile: str, judge: Judge) -> None:
    seeds = judge.seeds(4 * len(workloads.PROFILES))
    assert any(workloads.profile_of(seed) == profile for seed in seeds)
    hold(scheduler.profile(profile, seeds, judge.real))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recorded", "count"),
    [
        (scheduler.asynchronous, 6),
        (spec.record, 3),
        (spec.record_async, 3),
        (lora.record, 3),
        (lora.record_async, 3),
        (grammar.record, 3),
        (pipeline.record, 3),
    ],
    ids=["async", "drafts", "async drafts", "adapters", "async adapters", "grammars", "pipeline"],
)
def test_fresh_workloads_of_one_feature_are_decided_as_by_the_real_scheduler(
    recorded: Callable[..., Iterator[recording.Recording]], count: int, judge: Judge
) -> None:
    hold(recorded(judge.seeds(count), judge.real))


def test_fresh_workloads_of_all_features_are_decided_as_by_the_real_scheduler(judge: Judge) -> None:
    counts = together.compare(judge.seeds(8), judge.real)
    assert counts.differences == []
    assert len(counts.refused) <= counts.num_workloads // 8  # drafts in flight with adapters


@pytest.mark.upstream
def test_the_core_from_the_archive_decides_as_the_installed_package() -> None:
    """The judge of the judge: every field, whatever the mini engine would say."""
    installed, core = source.installed(), core_of()
    for seed in range(FIRST_SEED, FIRST_SEED + 4 * len(workloads.PROFILES)):
        made = [scheduler.record(workloads.generate(seed), real) for real in (installed, core)]
        assert made[0] == made[1], seed
    for family in (combined, hybrid, encoder, connector):
        run = getattr(family, "run", combined.run)
        for seed in range(FIRST_SEED, FIRST_SEED + 60):
            workload = family.generate(seed)
            try:
                first = run(workload, installed)
            except combined.RefusedError:
                with pytest.raises(combined.RefusedError):
                    run(workload, core)
            else:
                assert run(workload, core) == first, (family.__name__, seed)


@pytest.mark.upstream
def test_kept_recordings_are_what_the_real_scheduler_still_says() -> None:
    """The kept files are not hand-made: recording a seed again gives the kept line."""
    for path in sorted(mutants.RECORDINGS.glob("*.jsonl.gz")):
        kept = next(recording.read(path))
        assert again.record(kept) == kept, path.name


def decided(
    arrivals: Iterable[gantt.Arrival], engine: LLMEngine, config: dict[str, object], judge: Judge
) -> list[dict[str, object]]:
    """The steps in which the real scheduler serves a run of the book, with the engine's outputs."""
    requests = {}
    events: dict[int, list[dict[str, object]]] = {}
    for arrival in sorted(arrivals, key=lambda arrival: arrival.step):
        prompt = arrival.prompt
        add = {
            "request_id": arrival.name,
            "prompt_token_ids": list(prompt.encode() if isinstance(prompt, str) else prompt),
            "max_tokens": arrival.max_tokens,
            "priority": 0,
            "arrival_time": float(arrival.step),
            "ignore_eos": True,
        }
        events.setdefault(arrival.step, []).append(add)
    step = 0
    while engine.has_unfinished_requests() or any(at >= step for at in events):
        for add in events.get(step, ()):
            name = str(add["request_id"])
            params = SamplingParams(max_tokens=int(str(add["max_tokens"])), ignore_eos=True)
            engine.add_request(add["prompt_token_ids"], params, request_id=name)
            requests[name] = engine.requests[name]
        engine.step()
        step += 1
    workload = {
        "seed": 0,
        "eos_token_id": 256,
        "config": {**config, "enable_chunked_prefill": True, "max_model_len": 256},
        "events": [{"step": at, "add": adds, "abort": []} for at, adds in events.items()],
        "outputs": {name: list(request.output_token_ids) for name, request in requests.items()},
    }
    steps: list[dict[str, object]] = scheduler.record(workload, judge.real)["steps"]
    return steps


def test_the_mended_lab_on_the_first_page_is_what_the_real_scheduler_decides(judge: Judge) -> None:
    text = first_lab.SHIPPED.replace(first_lab.NEVER, first_lab.MENDED)
    made = first_lab.run(text)
    assert made["same"]
    config = gantt.config_of(first_lab.engine())
    real = decided(first_lab.arrivals(), first_lab.engine(), config, judge)
    assert len(real) == made["steps"]
    for step, told in enumerate(real):
        ours = {
            name: tokens
            for name, cells in made["rows"].items()
            for at, _, tokens in cells
            if at == step and tokens
        }
        assert told["num_scheduled_tokens"] == ours, step


def test_the_run_on_the_first_page_is_what_the_real_scheduler_decides(judge: Judge) -> None:
    timeline = gantt.engine_timeline()
    arrivals, engine = gantt.timeline_arrivals(), gantt.timeline_engine()
    real = decided(arrivals, engine, timeline["config"], judge)
    assert len(real) == timeline["steps"]
    for told, total in zip(real, timeline["totals"], strict=True):
        number = total["step"]
        cells = {
            request["id"]: cell
            for request in timeline["requests"]
            for cell in request["cells"]
            if cell["step"] == number
        }
        tokens = {name: cell["tokens"] for name, cell in cells.items() if cell["tokens"]}
        assert told["num_scheduled_tokens"] == tokens, number
        assert told["preempted"] == total["preempted"], number
        assert told["free_blocks"] == total["free_blocks"], number
        for name in told["running"]:
            assert told["block_ids"][name] == cells[name]["blocks"], (number, name)


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("kind", "caching", "request_steps"),
    [
        ("decode", False, 1024),
        ("decode", True, 1024),
        ("prefill", False, 176),
        ("prefill", True, 122),
    ],
)
def test_benchmark_workloads_are_decided_equally(
    kind: str, caching: bool, request_steps: int
) -> None:
    timing, count = bench_scheduler.measure(*bench_scheduler.workload(kind, 16, caching), repeats=1)
    assert (len(timing.ours), len(timing.theirs), count) == (1, 1, request_steps)

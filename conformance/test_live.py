"""Fresh workloads on the real scheduler and on the mini engine, in one process.

Needs the pinned tree on `PYTHONPATH`. The seeds differ in every run; a failure prints the one that
reproduces it. `CONFORMANCE_SEED` repeats a run, `CONFORMANCE_WORKLOADS` makes it longer.
"""

from __future__ import annotations

import os
import random

import pytest

from benchmarks import bench_scheduler
from conformance import replay, workloads
from conformance.recorders import grammar, lora, pipeline, scheduler, spec
from mini_vllm.config import SamplingParams

NUM_WORKLOADS = int(os.environ.get("CONFORMANCE_WORKLOADS", "720"))
FIRST_SEED = int(os.environ.get("CONFORMANCE_SEED", random.randrange(10**6, 10**9)))


@pytest.mark.upstream
@pytest.mark.parametrize("profile", workloads.PROFILES)
def test_fresh_workloads_are_decided_as_by_the_real_scheduler(profile: str) -> None:
    seeds = [
        seed
        for seed in range(FIRST_SEED, FIRST_SEED + NUM_WORKLOADS)
        if workloads.profile_of(seed) == profile
    ]
    for seed in seeds:
        _, difference = replay.replay(scheduler.record(workloads.generate(seed)))
        assert difference is None, (
            f"{difference}\nreproduce: python -m conformance.record {profile} --seeds {seed} "
            f"--out FOLDER, then python -m conformance.replay FOLDER/{profile}.jsonl.gz"
        )
    assert len(seeds) >= NUM_WORKLOADS // len(workloads.PROFILES)


@pytest.mark.upstream
def test_fresh_asynchronous_workloads_are_decided_as_by_the_real_scheduler() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + len(workloads.PROFILES)):
        _, difference = replay.replay(scheduler.record_async(workloads.generate(seed)))
        assert difference is None, str(difference)


@pytest.mark.upstream
def test_fresh_workloads_with_drafts_are_decided_as_by_the_real_scheduler() -> None:
    for recorded in (spec.record, spec.record_async):
        for entry in recorded(range(FIRST_SEED, FIRST_SEED + 36)):
            _, difference = replay.replay(entry)
            assert difference is None, str(difference)


@pytest.mark.upstream
def test_fresh_workloads_with_adapters_are_decided_as_by_the_real_scheduler() -> None:
    for recorded in (lora.record, lora.record_async):
        for entry in recorded(range(FIRST_SEED, FIRST_SEED + 72)):
            _, difference = replay.replay(entry)
            assert difference is None, str(difference)


@pytest.mark.upstream
def test_fresh_workloads_with_grammars_are_decided_as_by_the_real_scheduler() -> None:
    for entry in grammar.record(range(FIRST_SEED, FIRST_SEED + 72)):
        _, difference = replay.replay(entry)
        assert difference is None, str(difference)


@pytest.mark.upstream
def test_kept_recordings_are_what_the_real_scheduler_still_says() -> None:
    """The kept files are not hand-made: recording a seed again gives the kept line."""
    from conformance import mutants, recording

    for path in sorted(mutants.RECORDINGS.glob("*.jsonl.gz")):
        kept = next(recording.read(path))
        if "grammar_rows" in kept["steps"][0]:
            assert next(grammar.record([kept["seed"]])) == kept, path.name
            continue
        if "max_loras" in kept["config"]:
            assert next(lora.record([kept["seed"]])) == kept, path.name
            continue
        if "pipeline_parallel_size" in kept["config"]:
            assert next(pipeline.record([kept["seed"]])) == kept, path.name
            continue
        if "speculative" in kept["config"]:
            drafted = spec.record_async if path.name[0] == "a" else spec.record
            assert next(drafted([kept["seed"]])) == kept, path.name
            continue
        again = (
            scheduler.record_async if kept["config"].get("async_scheduling") else scheduler.record
        )
        assert again(workloads.generate(kept["seed"])) == kept, path.name


@pytest.mark.upstream
def test_the_run_on_the_first_page_is_what_the_real_scheduler_decides() -> None:
    from course.site import gantt

    timeline = gantt.engine_timeline()
    config = {**timeline["config"], "enable_chunked_prefill": True, "max_model_len": 256}
    arrivals = gantt.timeline_arrivals()
    engine = gantt.timeline_engine()
    requests = {}
    events: dict[int, list[dict[str, object]]] = {}
    for arrival in sorted(arrivals, key=lambda arrival: arrival.step):
        assert isinstance(arrival.prompt, str)
        add = {
            "request_id": arrival.name,
            "prompt_token_ids": list(arrival.prompt.encode()),
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
        "config": config,
        "events": [{"step": at, "add": adds, "abort": []} for at, adds in events.items()],
        "outputs": {name: list(request.output_token_ids) for name, request in requests.items()},
    }
    real = scheduler.record(workload)["steps"]
    assert len(real) == timeline["steps"]
    for decided, total in zip(real, timeline["totals"], strict=True):
        number = total["step"]
        cells = {
            request["id"]: cell
            for request in timeline["requests"]
            for cell in request["cells"]
            if cell["step"] == number
        }
        tokens = {name: cell["tokens"] for name, cell in cells.items() if cell["tokens"]}
        assert decided["num_scheduled_tokens"] == tokens, number
        assert decided["preempted"] == total["preempted"], number
        assert decided["free_blocks"] == total["free_blocks"], number
        for name in decided["running"]:
            assert decided["block_ids"][name] == cells[name]["blocks"], (number, name)


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

"""The recorded runs of vLLM on the shipped model; the probe and the comparison on stand-ins.

The stand-in for vLLM's engine is the real scheduler of the pinned tree with mini_vllm's model
behind it (marked upstream). Without the tree, mini's own run poses as the recorded one.
"""

from __future__ import annotations

import copy
import functools
import gzip
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance import real_engine, record, recording, replay, shadow
from mini_vllm import LLMEngine, SamplingParams

MACHINE = {"gpu": "none, a stand-in", "dtype": "float64"}
RECORDED = [
    path
    for path in sorted((Path(__file__).parent / "recordings" / "engine").glob("*float*.jsonl.gz"))
    if not path.name.startswith("invariance")
]


@functools.cache
def load(name: str) -> dict[str, Any]:
    """A recorded run of vLLM."""
    (path,) = [path for path in RECORDED if path.name == f"{name}.jsonl.gz"]
    return recording.lines(path)[0]


@pytest.mark.slow
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.split(".")[0])
def test_given_its_tokens_the_recorded_engine_decided_as_the_mini_scheduler_does(path):
    found = recording.lines(path)[0]
    steps, difference = replay.replay(found["recording"])
    assert difference is None
    assert steps == len(found["recording"]["steps"]) >= 18


@pytest.mark.slow
def test_in_float32_the_recorded_engine_said_what_the_mini_engine_says():
    entry = load("arrivals-float32")["recording"]
    assert len(entry["outputs"]) == 128
    assert sum(len(step["preempted"]) for step in entry["steps"]) > 40
    # Every twelfth event, each prompt as if alone, which is quick. The README runs all of them.
    answers = real_engine.generate_alone({**entry, "events": entry["events"][::12]})
    assert len(answers) == 16
    assert answers == {name: entry["outputs"][name] for name in answers}


@pytest.mark.slow
def test_a_compiled_model_said_the_same_and_so_was_scheduled_the_same():
    eager, compiled = load("arrivals-float32"), load("compiled-float32")
    assert "--eager" in eager["machine"]["command"].split()
    assert "--eager" not in compiled["machine"]["command"].split()
    assert compiled["recording"] == eager["recording"]
    assert compiled["candidates"] != eager["candidates"], "other roundings: it was another program"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "texts"), [("float16", 121), ("bfloat16", 100)])
def test_in_16_bits_texts_part_where_two_candidates_are_close(dtype, texts):
    exact = load("arrivals-float32")["recording"]["outputs"]
    differences = real_engine.first_differences(load(f"arrivals-{dtype}"), exact)
    assert len(differences) == 128 - texts
    widest = max(difference.mini_gap for difference in differences)
    assert widest < (0.01 if dtype == "float16" else 0.15)
    if dtype == "float16":  # equal in 16 bits: the smaller token id is taken
        assert all(difference.recorded_gap == 0 for difference in differences)
        assert all(difference.recorded < difference.mini for difference in differences)


@pytest.mark.slow
def test_on_a_gpu_in_bfloat16_the_steps_are_the_same_and_texts_part_at_ties():
    exact = load("arrivals-float32")["recording"]["outputs"]
    found = load("gpu-bfloat16")
    assert found["machine"]["gpu"].startswith("NVIDIA H100")
    assert "--eager" not in found["machine"]["command"].split(), "compiled, CUDA graphs on"
    assert sum(len(step["preempted"]) for step in found["recording"]["steps"]) == 46
    assert len(found["recording"]["steps"]) == 442  # each compared above
    differences = real_engine.first_differences(found, exact)
    ties = [each for each in differences if each.recorded_gap == 0]
    assert (len(differences), len(ties)) == (29, 24)
    assert all(tie.recorded < tie.mini for tie in ties)
    assert max(each.mini_gap for each in differences) < 0.06


@pytest.mark.slow
def test_under_the_hazard_the_recorded_engine_gave_the_wrong_answer_that_the_mini_engine_gives():
    found, alone = load("hazard-float32")["recording"], load("alone-float32")["recording"]
    assert shadow.stale_reads(found) and not shadow.stale_reads(alone)
    assert found["outputs"]["low"] == found["outputs"]["again"] != alone["outputs"]["low"]
    assert real_engine.generate_on_arrivals(found) == found["outputs"]
    assert real_engine.generate_on_arrivals(alone) == alone["outputs"]


@pytest.fixture(scope="module")
def work() -> dict[str, Any]:
    return real_engine.workload(10, max_tokens=8)


@pytest.fixture(scope="module")
def tokens(work) -> dict[str, list[int]]:
    """What the shipped model answers, by request."""
    adds = [add for event in work["events"] for add in event["add"]]
    engine = LLMEngine(num_blocks=512, dtype="float64")
    results = engine.generate(
        [add["prompt_token_ids"] for add in adds], SamplingParams(max_tokens=8)
    )
    return {
        add["request_id"]: result.outputs[0].token_ids
        for add, result in zip(adds, results, strict=True)
    }


@pytest.fixture(scope="module")
def entry(work, tokens) -> dict[str, Any]:
    return replay.run({**work, "outputs": tokens})


@pytest.fixture
def found(entry) -> dict[str, Any]:
    """Mini's own run, posing as a recorded engine; each test may change its copy."""
    return copy.deepcopy({"machine": MACHINE, "recording": entry, "candidates": {}})


def test_the_workload_shares_prefixes_and_fills_the_pool():
    work = real_engine.workload()
    adds = [add for event in work["events"] for add in event["add"]]
    assert len(adds) >= 100
    assert len({add["request_id"] for add in adds}) == len(adds)
    assert all(max(add["prompt_token_ids"]) < real_engine.EOS for add in adds)
    outputs = {add["request_id"]: [101] * add["max_tokens"] for add in adds}
    steps = replay.run({**work, "outputs": outputs})["steps"]
    assert any(step["preempted"] for step in steps)
    assert any(step["resumed"] for step in steps)
    tables = {}
    for step in steps:
        tables = {**step["block_ids"], **tables}
    assert tables["r9"][:6] == tables["r1"][:6], "96 bytes of prefix are six blocks"
    assert tables["r8"][0] != tables["r1"][0]


@pytest.mark.slow
def test_equal_runs_are_equal(found):
    words, same = real_engine.compare(found)
    assert same
    assert "0 differ" in words
    assert "10 of 10 texts equal" in words


@pytest.mark.slow
def test_another_block_is_a_difference(found):
    found["recording"]["steps"][2]["free_blocks"] -= 1
    words, same = real_engine.compare(found)
    assert not same
    assert "step 2, free_blocks" in words


@pytest.mark.slow
def test_another_token_is_shown_with_both_gaps(found, tokens):
    outputs = found["recording"]["outputs"]
    outputs["r5"] = [*tokens["r5"][:4], 35, *tokens["r5"][5:]]
    found["candidates"]["r5"] = [[[35, -0.5], [36, -0.75]]] * len(outputs["r5"])
    found["recording"] = replay.run(
        {k: v for k, v in found["recording"].items() if k not in ("steps", "upstream")}
    )
    words, same = real_engine.compare(found)
    assert same, "given the recorded tokens the decisions are the same"
    assert "9 of 10 texts equal" in words
    (line,) = [line for line in words.splitlines() if "r5 token 4" in line]
    assert f"recorded 35, mini {tokens['r5'][4]}" in line
    assert "2.50e-01 in the recorded ones" in line
    (difference,) = real_engine.first_differences(found, tokens)
    assert difference.mini_gap > 0


def test_another_end_is_a_difference_too(found, tokens):
    found["recording"]["outputs"]["r5"] = tokens["r5"][:-2]
    found["recording"]["outputs"]["r7"] = [*tokens["r7"], 46]
    differences = real_engine.first_differences(found, tokens)
    ends = {d.request_id: (d.position, d.recorded, d.mini, d.mini_gap) for d in differences}
    assert ends == {
        "r5": (6, None, tokens["r5"][6], None),
        "r7": (8, 46, None, None),
    }


@pytest.mark.slow
def test_the_command_reads_what_was_written(found, tmp_path, capsys):
    path = tmp_path / "engine.jsonl.gz"
    recording.write(path, [found])
    assert real_engine.main([str(path)]) == 0
    assert "10 of 10" in capsys.readouterr().out


def test_recording_without_the_engine_is_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for part in ("arrivals-float32", "public-api"):
        with pytest.raises(SystemExit, match="needs vllm"):
            record.main([part, "--out", str(tmp_path)])


@pytest.mark.parametrize(
    "content", [b"", b"{}", *(gzip.compress(text, mtime=0) for text in (b"{}", b"[1]"))]
)
def test_a_file_that_is_none_is_refused(tmp_path, capsys, content):
    path = tmp_path / "engine.jsonl.gz"
    path.write_bytes(content)
    assert real_engine.main([str(path)]) == 2
    assert "not a recorded engine" in capsys.readouterr().err


class StandIn:
    """vLLM's engine as `drive` uses it: the real scheduler, mini's tokens."""

    def __init__(self, scheduler: Any, tokens: dict[str, list[int]], real: Any) -> None:
        self.scheduler, self.tokens, self.real = scheduler, tokens, real

    def add_request(self, name, prompt, params, arrival_time, *, priority):
        add = {"request_id": name, "arrival_time": arrival_time, "priority": priority}
        request = self.real.make_request({**prompt, **params, **add}, 16, real_engine.EOS)
        self.scheduler.add_request(request)

    def step(self) -> list[Any]:
        plan = self.scheduler.schedule()
        live = {name: self.scheduler.requests[name] for name in plan.num_scheduled_tokens}
        sampled = {
            name: self.tokens[name][request.num_output_tokens]
            for name, request in live.items()
            if request.num_computed_tokens == request.num_tokens
        }
        self.scheduler.update_from_output(plan, self.real.runner_output(plan, sampled))
        likely = {7: SimpleNamespace(logprob=-2.0), 8: SimpleNamespace(logprob=-0.25)}
        return [
            SimpleNamespace(
                request_id=name,
                finished=True,
                outputs=[SimpleNamespace(logprobs=[likely] * request.num_output_tokens)],
            )
            for name, request in live.items()
            if request.is_finished()
        ]


@pytest.mark.upstream
def test_the_probe_notes_what_the_real_scheduler_does(work, tokens):
    from conformance import real
    from conformance.features.core import recorder

    scheduler = real.make_scheduler(work["config"])
    engine = StandIn(scheduler, tokens, real)
    found = real_engine.drive(engine, scheduler, work, dict)
    assert found["recording"] == recorder.record({**work, "outputs": tokens})
    assert found["recording"]["outputs"] == tokens
    assert found["candidates"]["r0"][0] == [[8, -0.25], [7, -2.0]]
    assert scheduler.schedule.__func__ is type(scheduler).schedule
    words, same = real_engine.compare({**found, "machine": MACHINE})
    assert same
    assert "10 of 10 texts equal" in words


@pytest.mark.upstream
def test_the_probe_refuses_an_engine_that_schedules_twice(work, tokens):
    from conformance import real

    scheduler = real.make_scheduler(work["config"])
    engine = StandIn(scheduler, tokens, real)
    once = engine.step
    engine.step = lambda: [*once(), *once()]
    with pytest.raises(RuntimeError, match="step 0: the engine scheduled 2x"):
        real_engine.drive(engine, scheduler, work, dict)


@pytest.mark.gpu
def test_the_real_engine_on_a_gpu(tmp_path):
    pytest.importorskip("vllm", reason="needs vllm==0.22.1")
    assert record.main(["gpu-bfloat16", "--out", str(tmp_path)]) == 0
    assert real_engine.main([str(tmp_path / "engine" / "gpu-bfloat16.jsonl.gz")]) == 0

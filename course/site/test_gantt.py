"""The chart of a run: what is noted is what the engine did, and every cell is drawn."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ET

import pytest

from course.site import gantt
from course.site.gantt import Arrival
from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine


def kinds_of(data: dict, name: str) -> list[str]:
    (request,) = (r for r in data["requests"] if r["id"] == name)
    return [cell["kind"] for cell in request["cells"]]


def cells_of(data: dict) -> list[dict]:
    return [cell for request in data["requests"] for cell in request["cells"]]


def test_a_chunked_prompt_then_its_decodes():
    data = gantt.record(
        LLMEngine(model="toy", max_num_batched_tokens=4), [Arrival("r", "0123456789", 3)]
    )
    (request,) = data["requests"]
    assert [cell["tokens"] for cell in request["cells"]] == [4, 4, 2, 1, 1]
    assert kinds_of(data, "r") == ["prefill"] * 3 + ["decode"] * 2
    assert [cell["sampled"] for cell in request["cells"]] == [False, False, True, True, True]
    assert [cell["computed"] for cell in request["cells"]] == [0, 4, 8, 10, 11]
    assert [cell["known"] for cell in request["cells"]] == [10, 10, 10, 11, 12]
    assert [cell["finish"] for cell in request["cells"]] == [None] * 4 + ["length"]


def test_a_preempted_request_waits_and_computes_again():
    engine = LLMEngine(model="toy", num_blocks=5, block_size=4, enable_prefix_caching=False)
    data = gantt.record(engine, [Arrival("r0", "aaaabbbb", 8), Arrival("r1", "ccccdddd", 8)])
    assert kinds_of(data, "r1") == [
        "prefill", "preempted", *["waiting"] * 6, "recompute", *["decode"] * 6
    ]  # fmt: skip
    (again,) = (cell for cell in cells_of(data) if cell["kind"] == "recompute")
    assert (again["tokens"], again["recomputed"]) == (9, 8)
    assert [t["preempted"] for t in data["totals"]] == [[], ["r1"], *[[]] * 13]


def test_a_hit_is_noted_with_what_was_left_to_compute():
    data = gantt.record(
        LLMEngine(model="toy", block_size=4),
        [Arrival("first", "0123456789", 2), Arrival("second", "01234567xy", 2)],
    )
    (cell,) = (cell for cell in cells_of(data) if cell["kind"] == "hit")
    assert (cell["hit"], cell["tokens"], cell["computed"]) == (8, 2, 8)
    assert data["totals"][0]["hits"] == 8


def test_a_running_request_that_the_step_does_not_reach_is_starved():
    engine = LLMEngine(
        model="toy", num_blocks=5, block_size=4, enable_prefix_caching=False, policy="priority"
    )
    data = gantt.record(
        engine,
        [
            Arrival("urgent", "aaaabbbb", 6, step=1, priority=0),
            Arrival("patient", "ccccddd", 6, priority=5),
        ],
    )
    assert "preempted" in kinds_of(data, "patient")
    assert kinds_of(data, "urgent")[1] == "starved"


def test_arrivals_come_at_their_step_and_an_idle_engine_does_not_wait():
    data = gantt.record(
        LLMEngine(model="toy"),
        [Arrival("a", "abc", 4), Arrival("b", "abc", 1, step=2), Arrival("c", "abc", 1, step=90)],
    )
    assert [request["arrival"] for request in data["requests"]] == [0, 2, 4]
    assert data["steps"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_runs_are_noted_in_full_and_left_as_they_were(seed):
    rng = random.Random(seed)
    block_size = rng.choice((1, 3, 4))
    settings = {
        "model": "toy",
        "num_blocks": 1 + -(-40 // block_size) + rng.randint(0, 6),
        "block_size": block_size,
        "max_num_batched_tokens": rng.choice((5, 9, 64)),
        "max_num_seqs": rng.choice((2, 5)),
        "long_prefill_token_threshold": rng.choice((0, 4)),
        "enable_prefix_caching": rng.random() < 0.5,
    }
    prompts = ["ab" * rng.randint(1, 9) + "c" * rng.randint(0, 9) for _ in range(6)]
    lengths = [rng.randint(1, 12) for _ in prompts]

    alone = LLMEngine(**settings)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    ids = [
        alone.add_request(p, s, request_id=f"r{i}")
        for i, (p, s) in enumerate(zip(prompts, params, strict=True))
    ]
    plans = []
    alone.observers.append(lambda plan: plans.append(dict(plan.num_scheduled_tokens)))
    while alone.has_unfinished_requests():
        alone.step()

    arrivals = [Arrival(name, p, n) for name, p, n in zip(ids, prompts, lengths, strict=True)]
    data = gantt.record(LLMEngine(**settings), arrivals)
    noted: list[dict[str, int]] = [{} for _ in range(data["steps"])]
    for request in data["requests"]:
        steps = [cell["step"] for cell in request["cells"]]
        assert steps == list(range(request["arrival"], steps[-1] + 1))
        for cell in request["cells"]:
            assert cell["kind"] in gantt.KINDS
            if cell["tokens"]:
                noted[cell["step"]][request["id"]] = cell["tokens"]
        if not settings["enable_prefix_caching"]:
            new = sum(cell["tokens"] - cell["recomputed"] for cell in request["cells"])
            assert new == request["prompt_tokens"] + request["output_tokens"] - 1
    assert noted == plans
    for step, total in zip(noted, data["totals"], strict=True):
        assert sum(step.values()) == total["scheduled"] <= total["budget"]
    assert json.loads(json.dumps(data)) == data


def test_the_showcase_holds_everything():
    data = gantt.engine_timeline()
    assert 6 <= len(data["requests"]) <= 8
    assert 25 <= data["steps"] <= 40
    assert {cell["kind"] for cell in cells_of(data)} == set(gantt.KINDS) - {"starved"}
    assert sum(request["preemptions"] for request in data["requests"]) == 1
    assert max(total["waiting"] for total in data["totals"]) >= 2
    assert data == gantt.engine_timeline()


def test_every_cell_is_drawn_and_the_text_can_be_read_aloud():
    data = gantt.engine_timeline()
    svg = gantt.draw(data)
    tips = [
        node.text or "" for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")
    ]
    for request in data["requests"]:
        for cell in request["cells"]:
            if cell["kind"] == "waiting":
                continue
            start = f"{request['id']}, step {cell['step']}: {gantt.WORDS[cell['kind']]}"
            assert any(tip.startswith(start) for tip in tips), start
    assert "E computes 2 times 24, then 6, then 15" in gantt.describe(data)
    assert "is preempted in step 15" in gantt.describe(data)


def test_two_requests_of_one_name_are_refused():
    with pytest.raises(ValueError, match="same name"):
        gantt.record(LLMEngine(model="toy"), [Arrival("a", "x", 1), Arrival("a", "y", 1)])


def test_a_run_that_is_too_long_is_an_error():
    with pytest.raises(RuntimeError, match="max_steps=3"):
        gantt.record(LLMEngine(model="toy"), [Arrival("a", "x", 9)], max_steps=3)

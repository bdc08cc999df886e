"""What lab 01-04 pins: a probe that changes nothing, and the arithmetic of shared steps."""

from __future__ import annotations

import itertools
import random

import pytest

from mini_vllm import EngineParts, LLMEngine, SamplingParams, Scheduler

A, B = "hello world", "goodbye"  # 11 and 7 tokens


def run(lab, prompts, max_tokens: int = 4, **engine_kwargs) -> list[dict[str, int]]:
    """Rows of a run on the scheduling-only model, ids replaced by A, B, C and so on."""
    ids, rows = lab.trace_batches(list(prompts), max_tokens, model="toy", **engine_kwargs)
    assert len(ids) == len(prompts), f"one id per prompt: expected {len(prompts)}, came {ids}"
    names = {request_id: chr(65 + index) for index, request_id in enumerate(ids)}
    return [{names[request_id]: n for request_id, n in row.items()} for row in rows]


def same_rows(got, expected, why: str) -> None:
    expected_text, got_text = (
        "\n".join(f"  step {i + 1}: {row}" for i, row in enumerate(rows))
        for rows in (expected, got)
    )
    assert got == expected, f"{why}\nexpected\n{expected_text}\ncame\n{got_text}"


def sums(rows) -> dict[str, int]:
    total: dict[str, int] = {}
    for row in rows:
        for name, count in row.items():
            total[name] = total.get(name, 0) + count
    return total


def test_ample_budget_prefills_everyone_in_step_one(lab):
    same_rows(
        run(lab, [A, B]),
        [{"A": 11, "B": 7}] + [{"A": 1, "B": 1}] * 3,
        "18 prompt tokens fit the budget of 2,048: both prompts in step 1, then one token each",
    )


def test_tight_budget_chunks_and_defers(lab):
    same_rows(
        run(lab, [A, B], max_num_batched_tokens=8),
        [
            {"A": 8},
            {"A": 3, "B": 5},
            {"A": 1, "B": 2},
            {"A": 1, "B": 1},
            {"A": 1, "B": 1},
            {"B": 1},
        ],
        "budget 8: A takes all of step 1, B waits; running requests first, then the queue",
    )


def test_the_threshold_cuts_long_prompts(lab):
    same_rows(
        run(lab, [A, B], max_num_batched_tokens=8, long_prefill_token_threshold=4),
        [{"A": 4, "B": 4}, {"A": 4, "B": 3}, {"A": 3, "B": 1}]
        + [{"A": 1, "B": 1}] * 2
        + [{"A": 1}],
        "at most 4 tokens of one request per step: now both start in step 1, and B ends first",
    )


def test_token_conservation_per_request(lab):
    got = sums(run(lab, [A, B], max_num_batched_tokens=8))
    assert got == {"A": 14, "B": 10}, (
        "each request is scheduled prompt + max_tokens - 1 tokens over its life: 11 + 4 - 1 and "
        "7 + 4 - 1. The last token is never computed.\n"
        f"expected {{'A': 14, 'B': 10}}\ncame     {got}"
    )


def test_steps_fall_as_the_budget_grows(lab):
    steps = {
        budget: len(run(lab, [A, B], max_num_batched_tokens=budget)) for budget in range(1, 20)
    }
    expected = {1: 24, 2: 14, 3: 10, 4: 8, 5: 7, 6: 7, 7: 6, 8: 6}
    expected |= dict.fromkeys(range(9, 18), 5) | {18: 4, 19: 4}
    assert steps == expected, (
        "24 tokens in all: budget 1 needs 24 steps, and from 18 on, where both prompts fit step 1, "
        f"max_tokens steps are the floor.\nexpected {expected}\ncame     {steps}"
    )


def test_budget_is_never_exceeded(lab):
    for budget in (3, 5, 8, 13):
        rows = run(lab, [A, B, "x" * 20, "y"], max_num_batched_tokens=budget, max_num_seqs=3)
        most = max(sum(row.values()) for row in rows)
        assert most == budget, (
            f"no step computes more than max_num_batched_tokens={budget}, and under load some "
            f"step uses all of it; the fullest step has {most}"
        )


def test_mixed_batches_exist_under_load(lab):
    rows = run(lab, [A, B], max_num_batched_tokens=8)
    got = lab.mixed_steps(rows, {"A": 11, "B": 7})
    assert got == [2], (
        "step number 2 (the third) computes an output of A and the last 2 prompt tokens of B. "
        "Step 1 is prompt only: A's 3 tokens end its prompt.\n"
        f"expected [2]\ncame     {got}"
    )


def test_a_tail_of_one_token_is_not_a_decode(lab):
    rows = [{"A": 4}, {"A": 1, "B": 3}, {"A": 1, "B": 1}, {"A": 1, "B": 1}, {"B": 1}]
    got = lab.mixed_steps(rows, {"A": 5, "B": 4})
    assert got == [2], (
        "A's prompt of 5 is 4 + 1: in step 1 its single token is prompt, so the step is not mixed. "
        "In step 2 A decodes and B's single token is prompt: mixed. Sizes do not tell, counters "
        f"do.\nexpected [2]\ncame     {got}"
    )
    got = lab.mixed_steps([{"A": 3, "B": 2}, {"A": 1, "B": 1}, {"A": 1}], {"A": 3, "B": 2})
    assert got == [], f"all prompts in step 0, only outputs after: no step is mixed; came {got}"


def test_ids_are_those_of_the_engine_in_prompt_order(lab, monkeypatch):
    LLMEngine(model="toy").add_request("takes an id")
    prompts = ["c" * 9, "a" * 2, "b" * 5]
    ids, rows = lab.trace_batches(prompts, 2, model="toy")
    assert set(ids) == set(rows[0]), (
        f"the ids returned are the keys of the rows: ids {ids}, first row {rows[0]}. They come "
        "from add_request; the numbers depend on what else the process has run"
    )
    got = [rows[0][request_id] for request_id in ids]
    assert got == [9, 2, 5], (
        "ids stand in the order of the prompts, whatever order the rows have.\n"
        f"expected [9, 2, 5]\ncame     {got}"
    )
    many = ["x" * n for n in range(1, 12)]
    monkeypatch.setattr("mini_vllm.input_processor._request_numbers", itertools.count(5))
    ids, rows = lab.trace_batches(many, 1, model="toy")
    got = [rows[0][request_id] for request_id in ids]
    assert got == list(range(1, 12)), (
        "eleven prompts of 1 to 11 tokens, ids with another digit from the sixth on: sorted as "
        "text, req-10 comes before req-9.\n"
        f"expected {list(range(1, 12))}\ncame     {got}"
    )


class ReusingScheduler(Scheduler):
    """Hands out the same dict at every step, as a scheduler is free to do."""

    def __init__(self, kv, config=None) -> None:
        super().__init__(kv, config)
        self.shared: dict[str, int] = {}

    def schedule(self):
        plan = super().schedule()
        self.shared.clear()
        self.shared.update(plan.num_scheduled_tokens)
        plan.num_scheduled_tokens = self.shared
        return plan


def test_rows_are_copies(lab):
    parts = EngineParts(scheduler=ReusingScheduler)
    same_rows(
        run(lab, [A, B], max_num_batched_tokens=8, parts=parts),
        [
            {"A": 8},
            {"A": 3, "B": 5},
            {"A": 1, "B": 2},
            {"A": 1, "B": 1},
            {"A": 1, "B": 1},
            {"B": 1},
        ],
        "this scheduler reuses one dict for all its plans: a row that is not a copy changes when "
        "the next step is planned",
    )


class RecordingScheduler(Scheduler):
    """Keeps its plans and what finished, and checks that each plan comes back as it went out."""

    last: RecordingScheduler

    def __init__(self, kv, config=None) -> None:
        super().__init__(kv, config)
        RecordingScheduler.last = self
        self.plans, self.changed, self.ended = [], [], []

    def schedule(self):
        plan = super().schedule()
        self.plans.append((plan, dict(plan.num_scheduled_tokens)))
        return plan

    def update_from_output(self, output, sampled):
        plan, counts = self.plans[-1]
        if output is not plan or dict(output.num_scheduled_tokens) != counts:
            self.changed.append(len(self.plans) - 1)
        finished = super().update_from_output(output, sampled)
        self.ended += finished
        return finished


def test_the_probe_is_invisible(lab):
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    plain = LLMEngine(model="toy", max_num_batched_tokens=8)
    expected = [result.outputs[0].token_ids for result in plain.generate([A, B], params)]
    ids, rows = lab.trace_batches(
        [A, B],
        4,
        model="toy",
        max_num_batched_tokens=8,
        parts=EngineParts(scheduler=RecordingScheduler),
    )
    watched = RecordingScheduler.last
    outputs = {request.request_id: request.output_token_ids for request in watched.ended}
    got = [outputs.get(request_id) for request_id in ids]
    assert got == expected, (
        "a run with the probe says the same tokens as one without.\n"
        f"expected {expected}\ncame     {got}"
    )
    assert watched.changed == [], (
        "the engine must get back the very plan the scheduler made, unchanged; it got another in "
        f"steps {watched.changed}"
    )
    seen = [counts for _, counts in watched.plans]
    assert rows == seen, f"one row per call of schedule.\nexpected {seen}\ncame     {rows}"


def test_only_one_scheduler_is_watched(lab):
    before = Scheduler.schedule
    lab.trace_batches([A], 2, model="toy")
    assert Scheduler.schedule is before, (
        "the class Scheduler was patched: every engine of this process would report to you from "
        "now on. Put the probe on the object engine.scheduler"
    )
    first = run(lab, [A], 2)
    run(lab, [B], 2)
    assert len(first) == 2, f"a later run must not add rows to an earlier trace; came {first}"


def test_callers_rows_are_their_own(lab):
    _, rows = lab.trace_batches([A], 2, model="toy")
    rows[0].clear()
    _, again = lab.trace_batches([A], 2, model="toy")
    assert [sum(row.values()) for row in again] == [11, 1], (
        "emptying a returned row must not be felt by the next trace: expected shares [11, 1], came "
        f"{[sum(row.values()) for row in again]}"
    )


@pytest.mark.slow
def test_random_workloads_conserve_tokens(lab):
    rng = random.Random(4)
    for case in range(60):
        prompts = [chr(97 + i) * rng.randint(1, 30) for i in range(rng.randint(1, 6))]
        max_tokens, budget = rng.randint(1, 6), rng.choice((2, 5, 9, 16, 64))
        threshold = rng.choice((0, 2, 7))
        rows = run(
            lab,
            prompts,
            max_tokens,
            max_num_batched_tokens=budget,
            max_num_seqs=rng.randint(1, min(budget, 4)),
            long_prefill_token_threshold=threshold,
        )
        what = f"case {case}: {[len(p) for p in prompts]} prompt tokens, {max_tokens=}, {budget=}"
        expected = {chr(65 + i): len(p) + max_tokens - 1 for i, p in enumerate(prompts)}
        assert sums(rows) == expected, (
            f"{what}, {threshold=}: prompt + max_tokens - 1 per request\n"
            f"expected {expected}\ncame     {sums(rows)}"
        )
        fullest = max(sum(row.values()) for row in rows)
        assert fullest <= budget, f"{what}: a step computes {fullest} tokens, more than the budget"
        assert all(rows), f"{what}: a step without tokens was recorded: {rows}"

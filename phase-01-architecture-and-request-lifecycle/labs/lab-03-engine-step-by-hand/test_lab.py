"""What lab 01-03 pins: rows and tokens stay together, and what a plan ahead of its tokens costs."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from conformance import parts, recording, replay
from labkit import shipped_model
from mini_vllm import (
    KVCacheManager,
    LLMEngine,
    Request,
    Sampler,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
)

RECORDED = parts.FOLDER.parent / "async.jsonl.gz"
MAX_STEPS = 400
STEP_CAP = (
    f"still unfinished after {MAX_STEPS} steps: is every caught-up request given a token, and does "
    "its counter move once by what was planned?"
)


def greedy(max_tokens: int = 4, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)


def engine_with(prompts, params, **engine_kwargs) -> tuple[LLMEngine, list[Request]]:
    """An engine on the scheduling-only model with requests added, not stepped."""
    engine = LLMEngine(**{"model": "toy", **engine_kwargs})
    all_params = params if isinstance(params, list) else [params] * len(prompts)
    ids = [engine.add_request(p, s) for p, s in zip(prompts, all_params, strict=True)]
    return engine, [engine.requests[i] for i in ids]


def plans_of(engine: LLMEngine, requests: list[Request], step) -> list[list[tuple[int, int]]]:
    """Step to the end; per step the (request number, tokens) pairs in scheduling order."""
    number = {r.request_id: i for i, r in enumerate(requests)}
    plans, schedule = [], engine.scheduler.schedule

    def watched():
        plan = schedule()
        plans.append([(number[i], n) for i, n in plan.num_scheduled_tokens.items()])
        return plan

    engine.scheduler.schedule = watched
    for _ in range(MAX_STEPS):
        if not engine.has_unfinished_requests():
            return plans
        step()
    pytest.fail(STEP_CAP, pytrace=False)


def compare(lab, prompts, params, why: str, **engine_kwargs) -> list[Request]:
    """The learner's step against `LLMEngine.step`: every plan and every token."""
    reference, expected = engine_with(prompts, params, **engine_kwargs)
    plans = plans_of(reference, expected, reference.step)
    mine, got = engine_with(prompts, params, **engine_kwargs)
    came = plans_of(mine, got, lambda: lab.engine_step(mine.scheduler, mine.runner, mine.sampler))
    for index, (want, have) in enumerate(zip(plans, came, strict=False)):
        assert have == want, (
            f"{why}: step {index + 1} must plan the same (request, tokens) as the engine; the "
            f"books were left different by the step before.\nexpected {want}\ncame     {have}"
        )
    assert len(came) == len(plans), f"{why}: expected {len(plans)} steps, came {len(came)}"
    for number, (want, have) in enumerate(zip(expected, got, strict=True)):
        assert have.output_token_ids == want.output_token_ids, (
            f"{why}: the tokens of request {number} differ from the engine's.\n"
            f"expected {want.output_token_ids}\ncame     {have.output_token_ids}"
        )
    return expected


class RowNumberRunner:
    """Row i says token 10 + i, so a token tells which row it was sampled from."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def execute(self, plan):
        self.calls.append(len(plan.scheduled_requests))
        rows = np.zeros((len(plan.scheduled_requests), 257))
        rows[np.arange(len(rows)), 10 + np.arange(len(rows))] = 1.0
        return rows


# --- Part A --------------------------------------------------------------------------------------


def test_single_request_matches_reference(lab):
    compare(lab, ["hello"], greedy(), "one prompt of 5 tokens, 4 outputs")


def test_batch_matches_reference(lab):
    prompts = ["hello world", "goodbye", "a", "the quick brown fox"]
    params = [greedy(4), greedy(9), greedy(1), greedy(6)]
    compare(lab, prompts, params, "four requests of different lengths in one batch")


def test_returns_what_finished_and_nothing_else(lab):
    engine, requests = engine_with(["hello", "goodbye"], [greedy(1), greedy(2)])
    got = lab.engine_step(engine.scheduler, engine.runner, engine.sampler)
    assert got == [requests[0]], (
        "after step 1 the request with max_tokens=1 is finished and the other still runs; the "
        f"step returns the finished one only.\nexpected [{requests[0]!r}]\ncame     {got}"
    )


def test_empty_schedule_returns_no_finished(lab):
    engine = LLMEngine(model="toy")
    runner = RowNumberRunner()
    got = lab.engine_step(engine.scheduler, runner, Sampler())
    assert got == [], f"nothing to schedule, so nothing finished: expected [], came {got!r}"
    assert runner.calls == [], "an empty plan has no tokens to compute: leave the runner alone"


def test_mid_prefill_chunk_emits_no_token(lab):
    engine, (request,) = engine_with(["hello, world"], greedy(), long_prefill_token_threshold=4)
    seen = []
    for _ in range(3):
        lab.engine_step(engine.scheduler, engine.runner, engine.sampler)
        seen.append((request.num_computed_tokens, request.num_output_tokens))
    assert seen == [(4, 0), (8, 0), (12, 1)], (
        "12 prompt tokens, 4 per step: the runner returns a row in steps 1 and 2 too, but the "
        "model has not seen the whole prompt yet. The row is dropped, the counter moves all the "
        f"same.\nexpected (computed, outputs) [(4, 0), (8, 0), (12, 1)]\ncame     {seen}"
    )


def test_each_token_comes_from_its_own_row(lab):
    engine, requests = engine_with(
        ["a long first prompt", "short"], greedy(), long_prefill_token_threshold=8
    )
    runner = RowNumberRunner()
    lab.engine_step(engine.scheduler, runner, engine.sampler)
    got = [request.output_token_ids for request in requests]
    assert got == [[], [11]], (
        "step 1 computes 8 of 19 tokens of the first request and all of the second. Row 0 is "
        "dropped; the second request's token comes from row 1, which says 11. Dropping rows "
        f"must not shift the others.\nexpected [[], [11]]\ncame     {got}"
    )
    assert runner.calls == [2], f"one call with both requests; came calls of {runner.calls}"


def test_rows_follow_the_plan_not_the_running_list(lab):
    engine, requests = engine_with(
        ["abcd", "efgh", "ijkl"], greedy(), max_num_seqs=3, max_num_batched_tokens=12
    )
    scheduler, schedule = engine.scheduler, engine.scheduler.schedule

    def in_another_order():
        plan = schedule()
        plan.scheduled_requests.reverse()
        plan.num_scheduled_tokens = {
            r.request_id: plan.num_scheduled_tokens[r.request_id] for r in plan.scheduled_requests
        }
        return plan

    scheduler.schedule = in_another_order
    lab.engine_step(scheduler, RowNumberRunner(), engine.sampler)
    got = [request.output_token_ids for request in requests]
    assert got == [[12], [11], [10]], (
        "this plan lists the third request first, so row 0 is its row. The order of rows is the "
        f"order of the plan.\nexpected [[12], [11], [10]]\ncame     {got}"
    )


def test_each_row_gets_its_own_params(lab):
    class Recording(Sampler):
        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        def sample(self, logits, params, rng=None):
            self.seen.append((int(logits.argmax()), params.max_tokens))
            return 65

    params = [greedy(1), greedy(2), greedy(3)]
    engine, _ = engine_with(["abc", "d" * 20, "ef"], params, long_prefill_token_threshold=8)
    sampler = Recording()
    lab.engine_step(engine.scheduler, RowNumberRunner(), sampler)
    assert sampler.seen == [(10, 1), (12, 3)], (
        "the sampler is called for the two requests that caught up, each with its own row and its "
        f"own params.\nexpected (row, max_tokens) [(10, 1), (12, 3)]\ncame     {sampler.seen}"
    )


def test_matches_under_chunked_prefill(lab):
    prompts = ["hello world, this is long", "goodbye", "x" * 30]
    for settings in (
        {"long_prefill_token_threshold": 4},
        {"max_num_batched_tokens": 8, "max_num_seqs": 3},
        {"long_prefill_token_threshold": 3, "max_num_batched_tokens": 7, "max_num_seqs": 2},
    ):
        compare(lab, prompts, greedy(5), f"chunked prompts, {settings}", **settings)


def test_matches_under_preemption(lab):
    prompts = ["0123456789abcde", "the other prompt", "and a third one"]
    settings = {
        "num_blocks": 10, "block_size": 4, "enable_prefix_caching": False,
        "max_num_batched_tokens": 4, "max_num_seqs": 3,
    }  # fmt: skip
    expected = compare(lab, prompts, greedy(9), "a pool of 9 blocks", **settings)
    preemptions = sum(request.num_preemptions for request in expected)
    assert preemptions > 0, "this case is here for its preemptions, and there were none"


def test_matches_with_prefix_hits_on_the_real_model(lab):
    prompts = ["The KV cache is divided into blocks", "The KV cache is divided by two"] * 2
    settings = {
        "num_blocks": 20, "block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 3,
        "model": shipped_model(),
    }  # fmt: skip
    hits = []
    reference, requests = engine_with(prompts, greedy(3), **settings)
    reference.observers.append(lambda plan: hits.append(sum(plan.num_cached_tokens.values())))
    plans_of(reference, requests, reference.step)
    assert sum(hits) > 0, "this case is here for its prefix hits, and there were none"
    compare(lab, prompts, greedy(3), "prefix hits on the shipped model", **settings)


@pytest.mark.slow
def test_random_workloads_match_plan_by_plan(lab):
    rng = random.Random(6)
    for case in range(40):
        prompts = ["ab" * rng.randint(1, 9) for _ in range(rng.randint(1, 5))]
        params = [greedy(rng.randint(1, 7)) for _ in prompts]
        settings = {
            "num_blocks": rng.choice((9, 12, 40)),
            "block_size": 4,
            "max_num_batched_tokens": rng.choice((4, 7, 16)),
            "max_num_seqs": rng.choice((1, 2, 4)),
            "long_prefill_token_threshold": rng.choice((0, 3)),
        }
        compare(lab, prompts, params, f"random case {case}: {prompts}, {settings}", **settings)


# --- Part B --------------------------------------------------------------------------------------


class ScriptedDevice:
    """Says a given token for each output position; no model."""

    def __init__(self, script: dict[str, list[int]]) -> None:
        self.script = script
        self.said = dict.fromkeys(script, 0)

    def launch(self, plan, scheduler):
        sampled = {}
        for request in plan.scheduled_requests:
            name = request.request_id
            if scheduler.needs_sample(request, plan.num_scheduled_tokens[name]):
                tokens = self.script[name]
                said = self.said[name]
                sampled[name] = [tokens[said] if said < len(tokens) else 7]
                self.said[name] += 1
        return sampled


def run_ahead(lab, scheduler, device) -> list[dict]:
    """Run to the end; per step the plan, what finished, and the queue's length afterwards."""
    steps, schedule = [], scheduler.schedule
    plans: list[dict[str, int]] = []

    def watched():
        plan = schedule()
        plans.append(dict(plan.num_scheduled_tokens))
        return plan

    scheduler.schedule = watched
    in_flight: deque = deque()
    while scheduler.has_unfinished_requests() or in_flight:
        finished = lab.async_step(scheduler, device, in_flight)
        assert finished is not None, "async_step returns a list of requests; it returned None"
        steps.append(
            {
                "plan": plans[-1],
                "finished": sorted(r.request_id for r in finished),
                "in_flight": len(in_flight),
            }
        )
        assert len(steps) < MAX_STEPS, STEP_CAP
    return steps


def lone(max_tokens: int, says: list[int], num_prompt: int = 6, **config):
    """A scheduler with one request "r" of `num_prompt` tokens whose model says `says`."""
    scheduler = Scheduler(KVCacheManager(64, 4, False), SchedulerConfig(**config))
    request = Request("r", [7] * num_prompt, SamplingParams(max_tokens=max_tokens), eos_token_id=2)
    scheduler.add_request(request)
    return scheduler, request, ScriptedDevice({"r": says})


def test_two_steps_are_in_flight(lab, record_property):
    scheduler, _, device = lone(4, [])
    steps = run_ahead(lab, scheduler, device)
    plans = [step["plan"].get("r", 0) for step in steps]
    assert plans == [6, 1, 1, 1, 0], (
        "6 prompt tokens, then three decode steps, each planned before the token it computes is "
        "known; a fifth call plans nothing and takes the last token in.\n"
        f"expected [6, 1, 1, 1, 0]\ncame     {plans}"
    )
    depths = [step["in_flight"] for step in steps]
    assert depths == [1, 1, 1, 1, 0], (
        "the first call only fills the queue; from then on one step stays in flight while the "
        f"next is planned.\nexpected [1, 1, 1, 1, 0]\ncame     {depths}"
    )
    record_property("measured.calls", len(steps))


def test_the_books_after_each_call(lab):
    scheduler, request, device = lone(3, [], num_prompt=10, max_num_batched_tokens=4)
    in_flight: deque = deque()
    books = []
    for _ in range(6):
        finished = lab.async_step(scheduler, device, in_flight)
        placeholders = sum(token == lab.PLACEHOLDER for token in request.all_token_ids)
        arrived = request.num_output_tokens - placeholders
        books.append((request.num_computed_tokens, placeholders, arrived))
    expected = [(4, 0, 0), (8, 0, 0), (10, 1, 0), (11, 1, 1), (12, 0, 2), (12, 0, 3)]
    assert books == expected, (
        "10 prompt tokens, budget 4, max_tokens 3: (computed, placeholders, tokens arrived) after "
        "each call. What is taken in moves no counter, and a chunk that brings no token takes no "
        f"placeholder away.\nexpected {expected}\ncame     {books}"
    )
    assert finished == [request] and not in_flight, (
        f"the sixth call takes the last token in and returns the request; came {finished}, with "
        f"{len(in_flight)} steps in flight"
    )


def test_eos_wastes_one_token(lab, record_property):
    scheduler, request, device = lone(10, [7, 7, 2])
    scheduled = sum(step["plan"].get("r", 0) for step in run_ahead(lab, scheduler, device))
    came = (request.finish_reason, request.output_token_ids)
    assert came == ("stop", [7, 7, 2]), (
        "EOS as third output ends the request; what was computed behind it is dropped.\n"
        f"expected ('stop', [7, 7, 2])\ncame     {came}"
    )
    assert scheduled == 6 + 3, (
        "P + n = 6 + 3: one more than the 6 + 3 - 1 of the plain loop. When EOS was sampled the "
        f"next step was already planned; came {scheduled}"
    )
    record_property("measured.scheduled", scheduled)
    assert request.num_computed_tokens == 6 + 3, (
        "a request that finished while a plan was in flight is left alone when that plan comes in: "
        f"its counter keeps the wasted token, 6 + 3; came {request.num_computed_tokens}"
    )


def test_the_cap_wastes_nothing(lab):
    for max_tokens in (1, 2, 3, 7):
        scheduler, request, device = lone(max_tokens, [])
        scheduled = sum(step["plan"].get("r", 0) for step in run_ahead(lab, scheduler, device))
        assert request.finish_reason == "length", f"came {request.finish_reason!r}, not 'length'"
        assert scheduled == 6 + max_tokens - 1, (
            f"max_tokens={max_tokens}: the end is known beforehand, so no step is planned past it: "
            f"6 + {max_tokens} - 1 tokens; came {scheduled}"
        )


def test_chunks_do_not_promise_tokens(lab):
    scheduler, request, device = lone(3, [], num_prompt=10, max_num_batched_tokens=4)
    plans = [step["plan"].get("r", 0) for step in run_ahead(lab, scheduler, device)]
    assert plans == [4, 4, 2, 1, 1, 0], (
        "chunks of 4, 4 and 2; only the third promises a token, so only then is there a "
        f"placeholder to compute.\nexpected [4, 4, 2, 1, 1, 0]\ncame     {plans}"
    )
    assert request.output_token_ids == [7, 7, 7], f"three outputs; came {request.output_token_ids}"


def test_plans_equal_the_real_async_scheduler(lab):
    for number, case in enumerate(parts.load("async_plans")):
        config = case["config"]
        scheduler = Scheduler(
            KVCacheManager(config["num_blocks"], config["block_size"], False),
            SchedulerConfig(
                max_num_seqs=config["max_num_seqs"],
                max_num_batched_tokens=config["max_num_batched_tokens"],
                long_prefill_token_threshold=config["long_prefill_token_threshold"],
                max_model_len=config["max_model_len"],
            ),
        )
        requests = {}
        for add in case["requests"]:
            name = add["request_id"]
            requests[name] = Request(
                name,
                add["prompt_token_ids"],
                SamplingParams(max_tokens=add["max_tokens"], ignore_eos=add["ignore_eos"]),
                eos_token_id=case["eos_token_id"],
                arrival_time=add["arrival_time"],
            )
            scheduler.add_request(requests[name])
        steps = run_ahead(lab, scheduler, ScriptedDevice(case["outputs"]))
        for index, (want, have) in enumerate(zip(case["steps"], steps, strict=False)):
            for field, expected in (
                ("plan", want["num_scheduled_tokens"]),
                ("finished", want["finished"]),
            ):
                assert have[field] == expected, (
                    f"recorded workload {number}, step {index}: {field} of the real "
                    f"AsyncScheduler\nexpected {expected}\ncame     {have[field]}"
                )
        assert len(steps) == len(case["steps"]), (
            f"recorded workload {number}: expected {len(case['steps'])} steps, came {len(steps)}"
        )
        for name, request in requests.items():
            expected = (case["outputs"][name], case["finish_reasons"][name])
            came = (request.output_token_ids, request.finish_reason)
            assert came == expected, (
                f"recorded workload {number}, {name}: tokens and reason\n"
                f"expected {expected}\ncame     {came}"
            )


def recorded_ahead() -> list[dict]:
    """Workloads of the real AsyncScheduler within this loop's terms: no caching, no preemption."""
    return [
        entry
        for entry in recording.read(RECORDED)
        if not entry["config"]["enable_prefix_caching"]
        and not any(step["preempted"] for step in entry["steps"])
    ]


def decided(lab, scheduler, device, in_flight) -> dict[str, object]:
    """One `async_step`: the books after planning, as the recorder notes them, and what ended."""
    seen: dict[str, object] = {}
    schedule = type(scheduler).schedule

    def watched():
        plan = schedule(scheduler)
        running = scheduler.running
        seen.update(
            num_scheduled_tokens=dict(plan.num_scheduled_tokens),
            running=[r.request_id for r in running],
            waiting=[r.request_id for r in scheduler.waiting],
            num_computed_tokens={
                r.request_id: r.num_computed_tokens + plan.num_scheduled_tokens.get(r.request_id, 0)
                for r in running
            },
            block_ids={
                r.request_id: list(scheduler.kv.get_block_ids(r.request_id)) for r in running
            },
            free_blocks=scheduler.kv.block_pool.get_num_free_blocks(),
        )
        return plan

    scheduler.schedule = watched
    ended = lab.async_step(scheduler, device, in_flight)
    seen["finished"] = sorted(request.request_id for request in ended)
    seen["finish_reasons"] = {request.request_id: request.finish_reason for request in ended}
    return seen


@pytest.mark.slow
def test_every_step_is_the_real_async_schedulers(lab):
    entries = recorded_ahead()
    assert len(entries) == 418, "the recordings have moved on"
    for entry in entries:
        scheduler = replay.mini_scheduler({**entry["config"], "async_scheduling": False})
        device, in_flight = ScriptedDevice(entry["outputs"]), deque()
        events = {event["step"]: event for event in entry["events"]}
        for index, expected in enumerate(entry["steps"]):
            event = events.get(index, {"add": [], "abort": []})
            for add in event["add"]:
                scheduler.add_request(replay.mini_request(add, entry["eos_token_id"]))
            aborted = [name for name in event["abort"] if scheduler.abort_request(name)]
            came = decided(lab, scheduler, device, in_flight)
            came["finish_reasons"] |= dict.fromkeys(aborted, "abort")
            for field, value in came.items():
                assert value == expected[field], (
                    f"async.jsonl.gz, seed {entry['seed']}, step {index}, {field}: what the real "
                    f"AsyncScheduler had here (aborted before it: {aborted})\n"
                    f"expected {expected[field]}\ncame     {value}"
                )


@pytest.mark.slow
def test_planning_ahead_changes_no_token(lab):
    prompts = ["The engine", "A request", "x" * 11]
    settings = {
        "model": shipped_model(),
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 16,
    }
    params = SamplingParams(max_tokens=4)
    reference, expected = engine_with(prompts, params, **settings)
    while reference.has_unfinished_requests():
        reference.step()
    mine, got = engine_with(prompts, params, **settings)
    run_ahead(lab, mine.scheduler, lab.Device(mine.runner, mine.sampler))
    for number, (want, have) in enumerate(zip(expected, got, strict=True)):
        assert have.all_token_ids == want.all_token_ids, (
            f"request {number} on the shipped model: the plain loop and the loop two deep must say "
            f"the same.\nexpected {want.output_token_ids}\ncame     {have.output_token_ids}"
        )
    free = mine.scheduler.kv.block_pool.get_num_free_blocks()
    assert free == 255, f"every block is free again at the end: expected 255, came {free}"


def test_a_preempting_plan_is_refused(lab):
    scheduler = Scheduler(KVCacheManager(5, 2, False))
    for name in ("r", "s"):
        scheduler.add_request(Request(name, [7, 7, 7], greedy(4)))
    device = ScriptedDevice({"r": [], "s": []})
    try:
        steps = run_ahead(lab, scheduler, device)
    except RuntimeError as error:
        assert "preempted" in str(error), f"the refusal says what happened; it says: {error}"
        return
    pytest.fail(
        "two requests of up to 7 tokens in 4 blocks of 2: one is preempted while its token is on "
        f"its way. plan_ahead must raise RuntimeError; it went on for {len(steps)} steps",
        pytrace=False,
    )

"""Worked traces T1-T16 and T18: exact numbers, recomputed from the engine."""

from __future__ import annotations

from collections import deque

import pytest

from mini_vllm import LLMEngine, RequestOutput
from mini_vllm.config import SamplingParams, SchedulerConfig
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.request import Request, RequestStatus
from mini_vllm.scheduler import Scheduler
from mini_vllm.tests.support import ScriptedModel

EOS = 256
RUNNING, LENGTH = RequestStatus.RUNNING, RequestStatus.FINISHED_LENGTH


def toy_engine(**options) -> LLMEngine:
    return LLMEngine(**{"model": "toy"} | options)


def add(engine: LLMEngine, name: str, prompt, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.add_request(prompt, params, request_id=name)
    return engine.requests[name]


def plans(engine: LLMEngine) -> list[dict[str, int]]:
    """What each step schedules, until the engine is idle."""
    seen: list[dict[str, int]] = []
    engine.observers.append(lambda output: seen.append(dict(output.num_scheduled_tokens)))
    while engine.has_unfinished_requests():
        engine.step()
    return seen


# ------------------------------------------------------------------ requests (phase 01)


def test_t1_hello_takes_four_steps():
    engine = toy_engine()
    request = add(engine, "A", "hello", 4)
    seen = []
    while engine.has_unfinished_requests():
        engine.step()
        seen.append((request.status, request.num_computed_tokens, request.num_tokens))
    assert seen == [(RUNNING, 5, 6), (RUNNING, 6, 7), (RUNNING, 7, 8), (LENGTH, 8, 9)]


def test_t2_a_ten_byte_prompt_in_chunks_of_two():
    engine = toy_engine(long_prefill_token_threshold=2)
    request = add(engine, "A", "0123456789", 4)
    seen = []
    for _ in range(5):
        engine.step()
        seen.append((request.num_computed_tokens, request.num_tokens))
    assert seen == [(2, 10), (4, 10), (6, 10), (8, 10), (10, 11)]


def test_t3_two_prompts_share_a_budget_of_eight():
    engine = toy_engine(max_num_batched_tokens=8)
    add(engine, "A", "hello world", 4)
    add(engine, "B", "goodbye", 4)
    steps = plans(engine)
    assert steps == [
        {"A": 8},
        {"A": 3, "B": 5},
        {"A": 1, "B": 2},
        {"A": 1, "B": 1},
        {"A": 1, "B": 1},
        {"B": 1},
    ]
    assert [sum(step.get(name, 0) for step in steps) for name in "AB"] == [14, 10]


def test_t3_two_prompts_with_a_roomy_budget():
    engine = toy_engine()
    add(engine, "A", "hello world", 4)
    add(engine, "B", "goodbye", 4)
    assert plans(engine) == [{"A": 11, "B": 7}, *[{"A": 1, "B": 1}] * 3]


def scripted_result(stream: list[int], **params) -> RequestOutput:
    model = ScriptedModel(lambda _, position: stream[position])
    (result,) = toy_engine(model=model).generate(["x"], SamplingParams(**params))
    return result


def test_t4_eos_ends_a_request_and_is_kept():
    result = scripted_result([10, 20, EOS, 30], max_tokens=4)
    assert (result.outputs[0].token_ids, result.outputs[0].finish_reason) == ([10, 20, EOS], "stop")


def test_t4_ignored_eos_runs_to_the_cap():
    result = scripted_result([10, 20, EOS, 30], max_tokens=4, ignore_eos=True)
    assert (result.outputs[0].token_ids, result.outputs[0].finish_reason) == (
        [10, 20, EOS, 30],
        "length",
    )


def test_t4_eos_exactly_at_the_cap_reports_stop():
    result = scripted_result([10, 20, EOS], max_tokens=3)
    assert (result.outputs[0].token_ids, result.outputs[0].finish_reason) == ([10, 20, EOS], "stop")


# ------------------------------------------------------------------ blocks (phase 02)

PROMPT = list(range(100, 132))  # 32 tokens, 8 blocks of 4


def admit(kv: KVCacheManager, name: str, prompt: list[int]) -> tuple[Request, int]:
    """Look up, adopt, allocate and compute a whole prompt; returns the request and its hits."""
    request = Request(name, prompt, SamplingParams())
    hits, num_cached = kv.get_computed_blocks(request)
    request.num_computed_tokens = num_cached
    assert kv.allocate_slots(request, request.num_tokens - num_cached, hits) is not None
    request.num_computed_tokens = request.num_tokens
    return request, num_cached


def references(kv: KVCacheManager, name: str) -> list[int]:
    return [block.ref_cnt for block in kv.get_blocks(name)]


def queue(kv: KVCacheManager) -> list[int]:
    return [block.block_id for block in kv.block_pool.free_queue.get_all_free_blocks()]


def test_t5_an_identical_prompt_adopts_all_but_its_last_block():
    kv = KVCacheManager(64, 4)
    _, cached_a = admit(kv, "A", PROMPT)
    table_a = kv.get_block_ids("A")
    _, cached_b = admit(kv, "B", PROMPT)
    assert (cached_a, table_a) == (0, [1, 2, 3, 4, 5, 6, 7, 8])
    assert (cached_b, kv.get_block_ids("B")) == (28, [1, 2, 3, 4, 5, 6, 7, 9])
    assert references(kv, "A") == [2, 2, 2, 2, 2, 2, 2, 1]


def test_t6_freed_tails_are_evicted_first_and_the_shared_root_last():
    kv = KVCacheManager(10, 4)
    (a, _), (b, _) = admit(kv, "A", PROMPT), admit(kv, "B", PROMPT)
    kv.free(a)
    kv.free(b)
    assert queue(kv) == [8, 9, 7, 6, 5, 4, 3, 2, 1]
    assert kv.usage == 0.0
    kv.block_pool.get_new_blocks(2)  # takes both tails
    probe = Request("C", [*PROMPT, 1], SamplingParams())
    assert kv.get_computed_blocks(probe)[1] == 28
    kv.block_pool.get_new_blocks(6)
    assert kv.get_computed_blocks(probe)[1] == 4  # block 1 is left
    assert [block.block_id for block in kv.block_pool.get_new_blocks(1)] == [1]
    assert kv.get_computed_blocks(probe)[1] == 0


def test_t7_a_freed_prompt_is_found_again():
    kv = KVCacheManager(64, 4)
    a, _ = admit(kv, "A", PROMPT)
    kv.free(a)
    _, cached = admit(kv, "D", PROMPT)
    assert (cached, references(kv, "D")) == (28, [1] * 8)
    assert kv.get_block_ids("D") == [1, 2, 3, 4, 5, 6, 7, 9]


@pytest.mark.parametrize(("enable_caching", "cached"), [(True, 16), (False, 0)])
def test_t8_a_hit_covers_the_common_sixteen_tokens(enable_caching, cached):
    kv = KVCacheManager(64, 4, enable_caching)
    admit(kv, "A", PROMPT)
    assert admit(kv, "B", PROMPT[:16] + list(range(16)))[1] == cached


# ------------------------------------------------------------------ scheduling (phase 03)


def make_scheduler(num_blocks: int = 1000, block_size: int = 4, **options) -> Scheduler:
    return Scheduler(KVCacheManager(num_blocks, block_size, False), SchedulerConfig(**options))


def queued(scheduler: Scheduler, name: str, num_tokens: int) -> Request:
    prompt = [ord(name[0])] * num_tokens
    request = Request(name, prompt, SamplingParams(max_tokens=50, ignore_eos=True))
    scheduler.add_request(request)
    return request


def test_t9_three_prompts_of_eight_under_a_budget_of_ten():
    scheduler = make_scheduler(max_num_batched_tokens=10)
    for name in "ABC":
        queued(scheduler, name, 8)
    assert scheduler.schedule().num_scheduled_tokens == {"A": 8, "B": 2}
    assert [r.request_id for r in scheduler.waiting] == ["C"]


def test_t10_four_slots_admit_four_requests():
    scheduler = make_scheduler(max_num_seqs=4)
    for i in range(10):
        queued(scheduler, f"r{i}", 1)
    assert scheduler.schedule().num_scheduled_tokens == {"r0": 1, "r1": 1, "r2": 1, "r3": 1}
    assert len(scheduler.waiting) == 6


def test_t10_a_threshold_caps_the_first_chunk():
    scheduler = make_scheduler(long_prefill_token_threshold=16)
    queued(scheduler, "A", 100)
    assert scheduler.schedule().num_scheduled_tokens == {"A": 16}


def test_t10_a_decode_gets_its_token_before_a_waiting_prompt():
    scheduler = make_scheduler(max_num_batched_tokens=10)
    queued(scheduler, "A", 4)
    scheduler.update_from_output(scheduler.schedule(), {"A": [1]})
    queued(scheduler, "B", 20)
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens.items()) == [("A", 1), ("B", 9)]


@pytest.mark.parametrize(
    ("prompt", "threshold", "budget", "steps"),
    [(100, 0, 2048, 1), (100, 16, 2048, 7), (100, 16, 10, 10), (100, 0, 32, 4), (96, 32, 64, 3)],
)
def test_t11_prefill_takes_ceil_of_prompt_over_chunk_steps(prompt, threshold, budget, steps):
    chunk = min(threshold or budget, budget)
    assert -(-prompt // chunk) == steps
    engine = toy_engine(long_prefill_token_threshold=threshold, max_num_batched_tokens=budget)
    request = add(engine, "A", [1] * prompt, 1)
    taken = 0
    while not request.num_output_tokens:
        engine.step()
        taken += 1
    assert taken == steps


def test_t12_two_requests_outgrow_four_blocks():
    engine = toy_engine(num_blocks=5, block_size=4, enable_prefix_caching=False)
    a, b = add(engine, "A", "a" * 8, 6), add(engine, "B", "b" * 8, 6)
    steps: list[dict[str, int]] = []
    preempted: dict[int, list[str]] = {}
    tables: dict[str, list[list[int]]] = {"A": [], "B": []}

    def record(output) -> None:
        steps.append(dict(output.num_scheduled_tokens))
        if output.preempted_req_ids:
            preempted[len(steps)] = output.preempted_req_ids
        for name, seen in tables.items():
            table = engine.scheduler.kv.get_block_ids(name)
            if table and (not seen or seen[-1] != table):
                seen.append(table)

    engine.observers.append(record)
    finished_at: dict[str, int] = {}
    while engine.has_unfinished_requests():
        for request in engine.step():
            finished_at[request.request_id] = len(steps)
    assert steps == [{"A": 8, "B": 8}, *[{"A": 1}] * 5, {"B": 9}, *[{"B": 1}] * 4]
    assert preempted == {2: ["B"]}
    assert finished_at == {"A": 6, "B": 11}
    assert tables == {
        "A": [[1, 2], [1, 2, 4], [1, 2, 4, 3]],
        "B": [[3, 4], [3, 4, 2], [3, 4, 2, 1]],
    }
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)


@pytest.mark.parametrize(
    ("threshold", "costs"), [(0, [257, 2, *[1] * 13]), (32, [*[33] * 8, 2, *[1] * 6])]
)
def test_t13_a_long_prompt_beside_a_decode(threshold, costs):
    """Tokens in each step that gives A one of its 15 tokens after the first."""
    engine = toy_engine(long_prefill_token_threshold=threshold)
    add(engine, "A", "hi", 16)
    engine.step()
    add(engine, "B", [7] * 256, 2)
    assert [sum(step.values()) for step in plans(engine) if "A" in step] == costs


def prefix_run(prompts: list[str], enable_caching: bool) -> list[dict[str, int]]:
    engine = toy_engine(num_blocks=1000, block_size=4, enable_prefix_caching=enable_caching)
    for i, prompt in enumerate(prompts):
        add(engine, f"r{i}", prompt, 4)
    return plans(engine)


def total(steps: list[dict[str, int]]) -> int:
    return sum(sum(step.values()) for step in steps)


def test_t14_eight_prompts_with_a_common_prefix_of_64():
    prompts = ["S" * 64 + str(i) for i in range(8)]
    off, on = prefix_run(prompts, False), prefix_run(prompts, True)
    assert total(off) == 8 * (65 + 3) == 544
    assert total(on) == 68 + 7 * 4 == 96
    assert total(off) - total(on) == 448
    assert list(on[0].values()) == [65, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("shared", "tail", "expected"),
    [(66, True, 112), (63, True, 116), (64, False, 116), (66, False, 104), (63, False, 108)],
)
def test_t15_the_saving_is_counted_in_whole_blocks(shared, tail, expected):
    prompts = ["S" * shared + (str(i) if tail else "") for i in range(8)]
    length, block_size = len(prompts[0]), 4
    saving = 7 * block_size * min(shared // block_size, (length - 1) // block_size)
    assert total(prefix_run(prompts, True)) == expected
    assert total(prefix_run(prompts, False)) - saving == expected


# ------------------------------------------------------------------ latency (T18)


@pytest.mark.parametrize(
    ("options", "worst"),
    [
        ({}, 193),
        ({"long_prefill_token_threshold": 32}, 65),
        ({"max_num_batched_tokens": 40, "max_num_seqs": 8}, 40),
    ],
)
def test_t18_a_threshold_or_a_budget_caps_the_worst_step(options, worst):
    engine = toy_engine(**options)
    steps, _ = latency_workload(engine)
    assert max(steps) == worst
    assert len(steps) == 24


def test_t18_with_one_slot_the_last_request_waits_26_steps():
    _, first_token = latency_workload(toy_engine(max_num_seqs=1))
    assert first_token["C"] == 26


def latency_workload(engine: LLMEngine) -> tuple[list[int], dict[str, int]]:
    """A: 5 tokens, 24 outputs, at step 0; B and C: 96 tokens, 2 outputs, at step 1.

    Returns:
        Tokens per step, and per request the steps from its arrival to its first output.
    """
    arrivals = deque([(0, "A", 5, 24), (1, "B", 96, 2), (1, "C", 96, 2)])
    requests: dict[str, tuple[int, Request]] = {}
    steps: list[int] = []
    first_token: dict[str, int] = {}
    engine.observers.append(lambda output: steps.append(output.total_num_scheduled_tokens))
    while arrivals or engine.has_unfinished_requests():
        while arrivals and arrivals[0][0] == len(steps):
            step, name, length, max_tokens = arrivals.popleft()
            requests[name] = step, add(engine, name, [ord(name)] * length, max_tokens)
        engine.step()
        for name, (arrived, request) in requests.items():
            if request.num_output_tokens:
                first_token.setdefault(name, len(steps) - arrived)
    return steps, first_token

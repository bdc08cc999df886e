"""What lab 19-05 pins: five rules, each by the recordings that show it, then all of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from conformance import parts, recording, replay
from conformance.releases import FOLDER, builders, release_of
from labkit import shipped_model
from mini_vllm import (
    LLM,
    EngineParts,
    KVCacheManager,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
)
from mini_vllm.plan import Gate

HERE = Path(__file__).resolve().parent
RELEASE = release_of("0.33.0")
FILES = ("blocks", "chunks", "labels", "walk", "several", "same")
LONGEST = 12
"""Steps of a difference's workload up to which its plans are shown."""


@cache
def recorded(name: str) -> tuple[recording.Recording, ...]:
    return tuple(recording.read(HERE / "recordings" / f"{name}.jsonl.gz", RELEASE.upstream))


def survey(entries, mine: EngineParts) -> list[tuple[recording.Recording, replay.Difference]]:
    """What differs, the smallest workload first."""
    build, make_request = builders(mine)
    found = []
    for entry in entries:
        _, difference = replay.replay(entry, build, make_request)
        if difference is not None:
            found.append((entry, difference))
    return sorted(found, key=lambda pair: (pair[1].step, len(pair[0]["outputs"]), pair[0]["seed"]))


def agree(name: str, entries, mine: EngineParts, why: str) -> None:
    """Fail with how many agree, and with the smallest workload that does not."""
    differ = survey(entries, mine)
    if not differ:
        return
    result = replay.Result(len(entries), 0, tuple(difference for _, difference in differ))
    fields = ", ".join(f"{field} {len(of)}" for field, of in result.by_field().items())
    entry, difference = differ[0]
    before = [
        f"  step {index:<4} {step['num_scheduled_tokens']}"
        + "".join(f", {key} {step[key]}" for key in ("preempted", "new", "resumed") if step[key])
        + (f", finished {step['finished']}" if step["finished"] else "")
        for index, step in enumerate(entry["steps"][: difference.step + 1])
    ][-LONGEST:]
    pytest.fail(
        f"{name}: {len(entries) - len(differ)} of {len(entries)} workloads agree; first "
        f"difference, by field: {fields}. {why} The smallest:\n{difference}\n"
        "recorded plans up to it:\n" + "\n".join(before),
        pytrace=False,
    )


def step(scheduler: Scheduler) -> dict[str, int]:
    """One step in which whoever catches up samples token 7; the plan's numbers."""
    plan = scheduler.schedule()
    counts = dict(plan.num_scheduled_tokens)
    speaks = [r for r in plan.scheduled_requests if scheduler.needs_sample(r, counts[r.request_id])]
    scheduler.update_from_output(plan, {request.request_id: [7] for request in speaks})
    return counts


# --- which block --------------------------------------------------------------------------------


@pytest.mark.slow
def test_blocks_are_handed_out_as_recorded(lab):
    """The order in which freed blocks are reused."""
    agree(
        "blocks",
        recorded("blocks") + recorded("same"),
        EngineParts(block_pool=lab.Pool),
        "Your Pool beside the pin's scheduler. A table differs when blocks are taken; what "
        "decided it happened when they were given back, steps before perhaps.",
    )


def counted(queue) -> list[int]:
    """What is asked of a queue from now on: one per operation, a walk by its length."""
    calls: list[int] = []

    class Counting(type(queue)):  # type: ignore[misc]
        def popleft(self):
            calls.append(1)
            return super().popleft()

        def remove(self, block):
            calls.append(1)
            super().remove(block)

        def append(self, block):
            calls.append(1)
            super().append(block)

        def get_all_free_blocks(self):
            calls.append(self.num_free_blocks)
            return super().get_all_free_blocks()

    queue.__class__ = Counting
    return calls


def test_freeing_costs_what_is_freed(lab):
    """A queue that is emptied and filled again at every free."""
    counts, orders = [], []
    for num_blocks in (8, 800):
        pool = lab.Pool(num_blocks, True)
        queue = pool.free_queue
        first, second = pool.get_new_blocks(2)
        freed = [first, pool.null_block, second]
        pool.null_block.ref_cnt = 1
        calls = counted(queue)
        pool.free_blocks(freed)
        counts.append(sum(calls))
        assert pool.free_queue is queue, (
            "free_queue is another object now: whoever holds the queue of before counts blocks "
            "that nobody hands out"
        )
        orders.append([block.block_id for block in queue.get_all_free_blocks()][:3])
        assert queue.num_free_blocks == num_blocks - 1, (
            f"{num_blocks - 1} blocks are free; the queue says {queue.num_free_blocks}"
        )
    assert orders == [[1, 2, 3], [1, 2, 3]], (
        "blocks 1 and 2 are freed in this order, the null block between them, which is never "
        "queued (B5); nobody can hit them, and 3 and up are free.\n"
        f"expected the front of the queue [1, 2, 3] in both pools\ncame     {orders}"
    )
    assert counts[0] == counts[1] <= 8, (
        "two blocks were freed, once in a pool of 8 and once in one of 800: operations of the "
        "queue, a walk over it counted by its length. A pool has tens of thousands.\n"
        f"expected the same few in both\ncame     {counts}"
    )


# --- how much ------------------------------------------------------------------------------------


def test_chunks_are_cut_as_recorded(lab):
    """Who counts when a step asks whether the threshold is needed."""
    agree(
        "chunks",
        recorded("chunks") + recorded("same"),
        EngineParts(scheduler=lab.Chunks),
        "Your Chunks on the pin's pool. Who is there in this step, and who was in the one before?",
    )


def test_held_back_by_a_gate_is_there_all_the_same(lab):
    """A request that a gate passes over, left out of the count."""

    class Closed(Gate):
        def admission(self, request, plan):
            return "skip" if request.request_id == "held" else "admit"

    config = SchedulerConfig(long_prefill_token_threshold=4)
    scheduler = lab.Chunks(KVCacheManager(64, 4), config, [Closed()])
    for name, length in (("held", 4), ("long", 30)):
        scheduler.add_request(Request(name, [5] * length, SamplingParams(max_tokens=2)))
    came = [step(scheduler), step(scheduler)]
    scheduler.abort_request("held")
    came.append(step(scheduler))
    assert came == [{"long": 4}, {"long": 4}, {"long": 22}], (
        "long has 30 prompt tokens, the threshold is 4. held waits for something else than memory "
        "and stands in `skipped` between the steps; it is aborted before the third. 0.33.0 puts "
        "such a request back into the waiting queue it counts (scheduler.py, lines 1609-1610).\n"
        f"expected [{{'long': 4}}, {{'long': 4}}, {{'long': 22}}]\ncame     {came}"
    )
    assert scheduler.config == config and config.long_prefill_token_threshold == 4, (
        f"the configuration is shared and stays what it is; came {scheduler.config}"
    )


# --- who is new ----------------------------------------------------------------------------------


def test_admissions_are_called_as_recorded(lab):
    """The list a resumed request is in, and its place there."""
    agree(
        "labels",
        recorded("labels") + recorded("same"),
        EngineParts(scheduler=lab.Labels),
        "Your Labels on the pin's pool. Nobody gets more or less than at the pin.",
    )


def test_new_ones_stand_before_resumed_ones(lab):
    """Admission order taken for the order of the list."""
    scheduler = lab.Labels(KVCacheManager(5, 4, False), SchedulerConfig())
    for name in "ab":
        scheduler.add_request(Request(name, [5] * 8, SamplingParams(max_tokens=8)))
    step(scheduler)
    step(scheduler)
    scheduler.add_request(Request("c", [5] * 4, SamplingParams(max_tokens=2)))
    scheduler.abort_request("a")
    plan = scheduler.schedule()
    assert list(plan.num_scheduled_tokens) == ["b", "c"], (
        "b was preempted when a needed a third block, and waits in front of c; both fit now. "
        f"expected the order b, c; came {plan.num_scheduled_tokens}"
    )
    came = (plan.scheduled_new_req_ids, plan.scheduled_resumed_req_ids)
    assert came == (["c", "b"], []), (
        "in this step b comes back, in front, and c is admitted for the first time. The list of "
        "0.33.0 has all first admissions before all others, each in their order.\n"
        f"expected new ['c', 'b'], resumed []\ncame     new {came[0]}, resumed {came[1]}"
    )


# --- who gets a turn -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_preempting_step_goes_on_as_recorded(lab):
    """The end of the walk over running requests."""
    agree(
        "walk",
        recorded("walk") + recorded("same"),
        EngineParts(block_pool=lab.Pool, scheduler=lab.Newest),
        "All four rules together: this one shows only beside the others. If the field is block_ids "
        "or new, mend those first.",
    )


def urgent(scheduler_class, budget: int) -> Scheduler:
    """A scheduler by priority over four usable blocks of 4 that admits whoever has one block."""
    kv = KVCacheManager(5, 4, False)
    kv.full_sequence_fits = lambda request, hits: True  # type: ignore[method-assign]
    config = SchedulerConfig(policy="priority", max_num_batched_tokens=budget)
    return scheduler_class(kv, config)


def arrive(scheduler: Scheduler, **requests: tuple[int, int]) -> None:
    """Queue requests, each of so many prompt tokens and of this priority."""
    for name, (length, priority) in requests.items():
        params = SamplingParams(max_tokens=9)
        scheduler.add_request(Request(name, [5] * length, params, priority=priority))


def test_a_walk_that_goes_on_keeps_the_budget_and_the_rest(lab):
    """A walk begun again, from the front or with the whole budget."""
    scheduler = urgent(lab.Walk, budget=5)
    arrive(scheduler, a=(3, 0), b=(4, 5))
    came = [step(scheduler)]
    arrive(scheduler, c=(9, 1))
    came.append(step(scheduler))
    arrive(scheduler, d=(1, 2))
    plan = scheduler.schedule()
    came.append(dict(plan.num_scheduled_tokens))
    expected = [{"a": 3, "b": 2}, {"a": 1, "b": 2, "c": 2}, {"a": 1, "c": 4}]
    assert came == expected, (
        "four usable blocks of 4, a budget of 5; a, b, c run in this order, b is the least urgent. "
        "In the third step a takes the last free block and b needs one. c, behind b, gets what is "
        f"left of the budget; d is not admitted.\nexpected {expected}\ncame     {came}"
    )
    names = [request.request_id for request in plan.scheduled_requests]
    assert (names, plan.preempted_req_ids) == (["a", "c"], ["b"]), (
        "each request stands in scheduled_requests once, in the order of the plan.\n"
        f"expected ['a', 'c'], preempted ['b']\ncame     {names}, {plan.preempted_req_ids}"
    )


def test_a_second_one_may_preempt_itself(lab):
    """A walk that goes on once."""
    scheduler = urgent(lab.Walk, budget=16)
    arrive(scheduler, a=(1, 6))
    step(scheduler)
    arrive(scheduler, b=(2, 5), c=(2, 4))
    step(scheduler)
    arrive(scheduler, d=(2, 1))
    step(scheduler)
    step(scheduler)
    running = [request.request_id for request in scheduler.running]
    plan = scheduler.schedule()
    came = (running, plan.preempted_req_ids, dict(plan.num_scheduled_tokens))
    expected = (["a", "c", "b", "d"], ["a", "b"], {"c": 1, "d": 1})
    assert came == expected, (
        "four blocks, all taken; a, c and b need another one each, a is the least urgent and b is "
        "next. a preempts itself and c has its block; then b does, and d has its turn. That is who "
        f"ran, who was preempted, and the plan.\nexpected {expected}\ncame     {came}"
    )


# --- the end -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_requests_end_as_recorded(lab):
    """The place of min_tokens among the ends."""
    cases = parts.load("check_stop-0.33.0", FOLDER, RELEASE.upstream)
    wrong = [said for case in cases if (said := parts.replay_check_stop(case, lab.Ends))]
    if wrong:
        pytest.fail(
            f"{len(cases) - len(wrong):,} of {len(cases):,} recorded calls of the stop check "
            "agree (EOS is 2, the only stop id 5, every prompt has two tokens). The first that "
            f"does not:\n{wrong[0]}",
            pytrace=False,
        )


def test_min_tokens_still_masks_the_stops(lab):
    """min_tokens thrown away, for the sampler too."""
    asked = SamplingParams(max_tokens=8, min_tokens=4)
    request = lab.Ends("r", [1, 1], asked, eos_token_id=2)
    ended = request.maybe_finish(2)
    assert (ended, request.status) == (False, RequestStatus.WAITING), (
        "nothing is sampled yet, and the prompt fills max_model_len=2: there is no last token to "
        f"look at, so nothing ends here. expected (False, WAITING), came {(ended, request.status)}"
    )
    request.append_output_token(5)
    request.maybe_finish(99)
    assert request.sampling_params is asked, (
        "sampling reads min_tokens from the same object, and masks EOS until it is reached; it is "
        f"the caller's.\nexpected {asked}\ncame     {request.sampling_params}"
    )
    request.append_output_token(2)
    came = (request.maybe_finish(99), request.finish_reason)
    assert came == (True, "stop"), (
        "two of four tokens, the second of them EOS, which a sampler would have masked: 0.33.0 "
        f"ends the request.\nexpected (True, 'stop')\ncame     {came}"
    )


# --- all of them ---------------------------------------------------------------------------------


@pytest.mark.slow  # three replays of every file: exempt from the three seconds of a lab
def test_the_engine_agrees_with_the_release(lab, record_property):
    """A rule that disturbs another."""
    entries = [entry for name in FILES for entry in recorded(name)]
    agree("all files", entries, lab.parts(), "Everything that parts() names.")
    counts = []
    for mine in (EngineParts(), EngineParts(block_pool=lab.Pool)):
        fields = [difference.field for _, difference in survey(entries, mine)]
        counts.append(fields.count("num_scheduled_tokens"))
    assert counts[0] == 103, f"the prediction is about 103 workloads; came {counts[0]}"
    said = ("fewer than 103", "103", "more than 103")
    record_property("measured.tokens", said[1 + (counts[1] > 103) - (counts[1] < 103)])
    alone = survey(recorded("walk"), EngineParts(scheduler=lab.Walk))
    record_property("measured.alone", len(recorded("walk")) - len(alone))


def test_what_is_said_stays_the_same(lab):
    """A rule of scheduling that changes an answer."""
    prompts = ["The KV cache is divided into", "The KV cache is read by", "A request"]
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    expected = [o.outputs[0].text for o in LLM(shipped_model()).generate(prompts, params)]
    llm = LLM(
        shipped_model(), parts=lab.parts(), num_blocks=14, block_size=4, policy="priority",
        long_prefill_token_threshold=8, max_num_batched_tokens=24,
    )  # fmt: skip
    plans: list[Any] = []
    llm.llm_engine.observers.append(plans.append)
    came = [o.outputs[0].text for o in llm.generate(prompts, params)]
    assert came == expected, (
        "your parts on the shipped model, 13 blocks of 4, against a roomy engine of the pin: when "
        f"what is computed may differ, what is said may not.\nexpected {expected}\ncame     {came}"
    )
    preempted = {name for plan in plans for name in plan.preempted_req_ids}
    assert preempted, "this run is here for its preemptions"
    new = [name for plan in plans for name in plan.scheduled_new_req_ids]
    twice = {name for name in new if new.count(name) > 1}
    assert twice == preempted, (
        "who was preempted comes back as a new request, in an engine that serves as well: the "
        f"plans say who is new.\nexpected new a second time {preempted}\ncame     {twice}"
    )

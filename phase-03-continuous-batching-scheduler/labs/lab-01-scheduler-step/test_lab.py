"""What lab 03-01 pins: two phases, three limits, and every decision of the recorded scheduler."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import mini_vllm
from conformance import replay
from labkit import shipped_model
from mini_vllm import (
    EngineParts,
    KVCacheManager,
    LLMEngine,
    Request,
    SamplingParams,
    SchedulerConfig,
)

RECORDINGS = Path(__file__).resolve().parents[3] / "conformance" / "recordings"

# --- Part A: two phases, three limits ------------------------------------------------------------


def prompts(*lengths: int) -> list[tuple[str, int]]:
    return list(zip("abcdefghijklmnop", lengths, strict=False))


def step(
    lab,
    waiting: list[tuple],
    running: list[tuple] = (),  # type: ignore[assignment]
    *,
    slots: int = 1000,
    budget: int = 2048,
    seqs: int = 128,
    threshold: int = 0,
) -> tuple[dict[str, int], list[str], list[str], int]:
    """One call of the learner's step: the plan, both queues by id, and the free slots after it."""
    queue = deque(lab.Req(*request) for request in waiting)
    live = [lab.Req(*request) for request in running]
    kv = lab.FakeKV(slots)
    plan = lab.schedule_step(queue, live, kv, budget, seqs, threshold)
    return plan, [r.rid for r in queue], [r.rid for r in live], kv.free_slots


def test_clamp_chunks_and_budgets(lab):
    for args, expected, why in (
        ((100, 2048, 0), 100, "nothing binds"),
        ((100, 30, 0), 30, "the budget binds"),
        ((100, 2048, 16), 16, "the threshold binds"),
        ((100, 10, 16), 10, "the budget is below the threshold"),
        ((16, 2048, 16), 16, "exactly the threshold is not above it"),
        ((17, 2048, 16), 16, "one above the threshold"),
        ((3, 2048, 16), 3, "a request gets no more than it lacks"),
        ((5, 0, 0), 0, "no budget"),
        ((-3, 10, 4), 0, "never below 0"),
        ((100, 2048, -1), 100, "a threshold of 0 or less is no bound"),
    ):
        came = lab.clamp(*args)
        assert came == expected, (
            f"clamp(num_new, budget, threshold) of {args}: {why}; expected {expected}, came {came}"
        )


def test_budget_caps_total_tokens(lab):
    plan, waiting, running, _ = step(lab, prompts(8, 8, 8), budget=10)
    assert plan == {"a": 8, "b": 2}, (
        "three prompts of 8 tokens, budget 10 for all together: a gets 8, b the 2 that are left, c "
        f"nothing.\nexpected {{'a': 8, 'b': 2}}\ncame     {plan}"
    )
    assert (waiting, running) == (["c"], ["a", "b"]), (
        "whoever got tokens runs, in order of admission; c still waits.\n"
        f"expected waiting ['c'], running ['a', 'b']\ncame     waiting {waiting}, running {running}"
    )


def test_max_num_seqs_caps_running(lab):
    plan, waiting, running, _ = step(lab, prompts(*[2] * 10), seqs=4)
    assert list(plan) == list("abcd"), (
        f"ten tiny prompts, four slots: four are admitted.\nexpected a, b, c, d\ncame     {plan}"
    )
    assert (len(waiting), len(running)) == (6, 4), (
        f"expected 6 waiting and 4 running, came {len(waiting)} and {len(running)}"
    )


def test_running_requests_fill_slots_too(lab):
    plan, waiting, _, _ = step(lab, [("x", 5)], [("r", 9, 8), ("s", 9, 8)], seqs=2)
    assert plan == {"r": 1, "s": 1} and waiting == ["x"], (
        "two slots, and two requests run already: x is not admitted. max_num_seqs bounds the "
        "length of running, not the admissions of one step.\n"
        f"expected {{'r': 1, 's': 1}}, waiting ['x']\ncame     {plan}, waiting {waiting}"
    )
    plan, waiting, _, _ = step(lab, prompts(5, 5), [("r", 9, 8), ("s", 9, 8)], seqs=3)
    assert plan == {"r": 1, "s": 1, "a": 5} and waiting == ["b"], (
        "three slots, two of them taken: one admission.\n"
        f"expected {{'r': 1, 's': 1, 'a': 5}}, waiting ['b']\ncame     {plan}, waiting {waiting}"
    )


def test_chunked_prefill_caps_per_request(lab):
    plan, _, _, _ = step(lab, prompts(100), threshold=16)
    assert plan == {"a": 16}, (
        f"100 prompt tokens, threshold 16: a chunk of 16.\nexpected {{'a': 16}}\ncame     {plan}"
    )
    plan, _, _, _ = step(lab, prompts(100, 100), [("r", 100, 40)], threshold=16)
    assert plan == {"r": 16, "a": 16, "b": 16}, (
        "the threshold bounds each request, a running one too, not the sum of them.\n"
        f"expected {{'r': 16, 'a': 16, 'b': 16}}\ncame     {plan}"
    )


def test_running_scheduled_before_waiting_admitted(lab):
    plan, _, running, _ = step(lab, [("new", 20)], [("old", 9, 8)], budget=10)
    assert list(plan.items()) == [("old", 1), ("new", 9)], (
        "a decode of 1 token comes first, the newcomer gets the other 9 of a budget of 10; the "
        "order of the plan counts too.\n"
        f"expected old: 1, then new: 9\ncame     {plan}"
    )
    assert running == ["old", "new"], f"a newcomer goes to the end of running; came {running}"


def test_admission_stops_when_memory_exhausted(lab):
    plan, waiting, running, free = step(lab, prompts(8, 8), slots=10)
    assert plan == {"a": 8} and waiting == ["b"] and running == ["a"], (
        "10 slots of memory: a takes 8, b does not fit and waits. No error, and b is still at the "
        "front.\nexpected {'a': 8}, waiting ['b'], running ['a']\n"
        f"came     {plan}, waiting {waiting}, running {running}"
    )
    assert free == 2, f"a refused request holds nothing: expected 2 free slots, came {free}"


def test_nobody_overtakes_a_blocked_head(lab):
    plan, waiting, _, _ = step(lab, [("big", 50), ("small", 2)], slots=10)
    assert plan == {} and waiting == ["big", "small"], (
        "big does not fit, small would; nobody is admitted. A queue that lets small ones pass "
        "starves big ones.\nexpected {}, waiting ['big', 'small']\n"
        f"came     {plan}, waiting {waiting}"
    )


def test_memory_falls_by_the_plan(lab):
    plan, _, _, free = step(lab, prompts(30), [("r", 40, 10), ("s", 9, 8)], slots=100, threshold=8)
    assert (plan, free) == ({"r": 8, "s": 1, "a": 8}, 83), (
        "17 tokens are computed, so 17 slots are taken: for running requests too, and for a chunk "
        "no more than the chunk.\nexpected {'r': 8, 's': 1, 'a': 8}, 83 of 100 slots free\n"
        f"came     {plan}, {free} free"
    )


def test_a_waiter_gets_only_the_remainder(lab):
    plan, _, _, _ = step(lab, [("hit", 100, 96)])
    assert plan == {"hit": 4}, (
        "96 of 100 tokens are computed already (a prefix hit, say): 4 are lacking.\n"
        f"expected {{'hit': 4}}\ncame     {plan}"
    )


def test_no_zero_entries_and_no_counter_moved(lab):
    caught_up, decoding = lab.Req("done", 9, 9), lab.Req("next", 9, 8)
    plan = lab.schedule_step(deque(), [caught_up, decoding], lab.FakeKV(100), 4, 8)
    assert plan == {"next": 1}, (
        "a running request that lacks nothing is passed over, not entered with 0, and does not end "
        f"the phase for those behind it.\nexpected {{'next': 1}}\ncame     {plan}"
    )
    plan, _, _, _ = step(lab, prompts(3), [("r", 20, 4), ("s", 9, 8)], budget=6)
    assert plan == {"r": 6}, (
        f"r spends the whole budget: no entries of 0 for s and a.\ncame     {plan}"
    )
    assert (caught_up.num_computed, decoding.num_computed) == (9, 8), (
        "the plan is not the computation: num_computed moves when the step has run; came "
        f"{caught_up.num_computed} and {decoding.num_computed}, expected 9 and 8"
    )


def test_random_steps_keep_the_invariants(lab):
    rng = random.Random(3)
    for case in range(60):
        budget, seqs = rng.choice((3, 8, 40)), rng.choice((1, 3, 6))
        threshold = rng.choice((0, 0, 2, 5))
        requests = [lab.Req(f"r{i}", rng.randint(1, 25)) for i in range(8)]
        waiting, running = deque(requests), []
        kv = lab.FakeKV(rng.choice((20, 60, 500)))
        says = f"case {case}: budget {budget}, {seqs} slots, threshold {threshold}"
        for _ in range(12):
            before, first = {r.rid: r.num_computed for r in requests}, len(running)
            lacking = sum(min(r.num_tokens - r.num_computed, threshold or 99) for r in running)
            kv.free_slots += lacking if kv.free_slots < lacking else 0  # running never refused
            plan = lab.schedule_step(waiting, running, kv, budget, seqs, threshold)
            assert sum(plan.values()) <= budget, f"{says}: the plan {plan} exceeds the budget"
            assert min(plan.values(), default=1) > 0, f"{says}: an entry below 1 in {plan}"
            assert len(running) <= max(seqs, first), f"{says}: {len(running)} requests run"
            assert [r.rid for r in [*running, *waiting]] == [r.rid for r in requests], (
                f"{says}: each request stands in exactly one queue, first come first served"
            )
            assert before == {r.rid: r.num_computed for r in requests}, f"{says}: a counter moved"
            for request in running:
                request.num_computed += plan.get(request.rid, 0)


# --- Part B: what the recorded scheduler did in a step -------------------------------------------


class NarratedKV(KVCacheManager):
    """The engine's own manager; says what it was asked, and what it answered."""

    teller: Narrator

    def get_computed_blocks(self, request):
        blocks, num_cached = super().get_computed_blocks(request)
        self.teller.tell(
            request, f"{request.request_id} is in front of waiting; {num_cached} tokens cached"
        )
        return blocks, num_cached

    def full_sequence_fits(self, request, new_computed_blocks):
        fits = super().full_sequence_fits(request, new_computed_blocks)
        if not fits:
            free = self.block_pool.get_num_free_blocks()
            self.teller.tell(
                request,
                f"its whole sequence of {request.num_tokens} tokens does not fit into {free} free "
                "blocks: no more admissions",
            )
        return fits

    def allocate_slots(self, request, num_new_tokens, new_computed_blocks=None):
        free = self.block_pool.get_num_free_blocks()
        lacks = request.num_tokens - request.num_computed_tokens
        new = super().allocate_slots(request, num_new_tokens, new_computed_blocks)
        bounds = [f"lacks {lacks}"]
        if threshold := self.teller.config.long_prefill_token_threshold:
            bounds.append(f"threshold {threshold}")
        bounds.append(f"budget left {self.teller.left}")
        who = "runs" if new_computed_blocks is None else "is admitted"
        granted = f"{len(new or ())} of {free} free blocks"
        if new is None:
            who = "runs" if new_computed_blocks is None else "could be admitted"
            granted = f"{free} free blocks are too few: refused"
        amount = f"{', '.join(bounds)} -> {num_new_tokens}"
        self.teller.tell(request, f"{request.request_id} {who}: {amount}; {granted}")
        self.teller.left -= 0 if new is None else num_new_tokens
        return new


class Narrator(mini_vllm.Scheduler):
    """The engine's own scheduler, which decides as recorded, telling why."""

    def __init__(self, kv, *args, **kwargs):
        super().__init__(kv, *args, **kwargs)
        kv.teller = self
        self.left = 0
        self.stories: list[list[tuple[str, str]]] = []

    def tell(self, request: Request | None, words: str) -> None:
        self.stories[-1].append(("" if request is None else request.request_id, words))

    def schedule(self):
        self.left = self.config.max_num_batched_tokens
        self.stories.append([])
        bounds = f"budget {self.left}, {len(self.running)} of {self.max_num_seqs} slots taken"
        self.tell(None, f"{bounds}, {self.kv.block_pool.get_num_free_blocks()} free blocks")
        for name, queue in (("running", self.running), ("waiting", self.waiting)):
            states = [f"{r.request_id} {r.num_computed_tokens}/{r.num_tokens}" for r in queue]
            self.tell(None, f"{name} (computed/known): {', '.join(states) or 'nobody'}")
        output = super().schedule()
        if output.preempted_req_ids and self.waiting:
            self.tell(None, "somebody was preempted in this step: nobody is admitted")
        return output

    def _schedule_waiting(self, output, budget):
        super()._schedule_waiting(output, budget)
        told = self.stories[-1][-1][1]
        if not self.waiting:
            self.tell(None, "nobody waits any more")
        elif self.left == 0:
            self.tell(self.waiting[0], "the budget is spent: no more admissions")
        elif len(self.running) >= self.max_num_seqs:
            self.tell(self.waiting[0], "every slot is taken: no more admissions")
        elif "in front of waiting" in told:
            self.tell(
                self.waiting[0],
                "chunked prefill is off and the budget would cut its chunk: no more admissions",
            )

    def _pop_victim(self):
        victim = super()._pop_victim()
        by = "the last of running"
        if self.config.policy == "priority":
            by = f"the largest (priority, arrival): ({victim.priority}, {victim.arrival_time:g})"
        self.tell(victim, f"{victim.request_id} makes room, as {by}: its counter goes to 0")
        return victim

    def _withdraw(self, victim, output):
        refund = super()._withdraw(victim, output)
        self.left += refund
        self.tell(
            victim,
            f"{victim.request_id} was in this step's plan: its {refund} tokens go back to the "
            "budget",
        )
        return refund

    def update_from_output(self, output, sampled):
        finished = super().update_from_output(output, sampled)
        for request in finished:
            self.tell(request, f"{request.request_id} ends after the step: {request.finish_reason}")
        return finished


def build_narrator(config) -> Narrator:
    return replay.mini_scheduler(config, Narrator, NarratedKV)  # type: ignore[return-value]


def story_of(entry: dict[str, Any], index: int) -> list[tuple[str, str]]:
    """What is done in one step of a recording, line by line: (request id, words)."""
    narrators: list[Narrator] = []

    def build(config):
        narrators.append(build_narrator(config))
        return narrators[0]

    replay.replay({**entry, "steps": entry["steps"][: index + 1]}, build)
    return narrators[0].stories[index]


def first_parted(expected: Any, got: Any) -> str:
    """The first request id about which two values of one field disagree, "" if it is about none."""
    if isinstance(expected, dict) and isinstance(got, dict):
        pairs = itertools.zip_longest(expected.items(), got.items())
        return next(((want or have)[0] for want, have in pairs if want != have), "")
    if isinstance(expected, list) and isinstance(got, list):
        in_one = [name for name in [*expected, *got] if (name in expected) != (name in got)]
        pairs = itertools.zip_longest(expected, got)
        return next(iter(in_one), "") or next((a for a, b in pairs if a != b), "")
    return ""


def explained(entry: dict[str, Any], difference: replay.Difference, file: str) -> str:
    """A difference, with both decisions, and what the recorded scheduler did in that step."""
    story = story_of(entry, difference.step)
    about = first_parted(difference.expected, difference.got)
    lines = [f"  {'>' if about and who == about else ' '} {words}" for who, words in story]
    return "\n".join(
        [
            f"{file}, seed {difference.seed}, step {difference.step}: {difference.field} is not "
            f"what v0.22.1 decided.",
            f"expected {difference.expected}",
            f"came     {difference.got}",
            f"what v0.22.1 did in that step{', > where yours parts from it' if about else ''}:",
            *lines,
        ]
    )


# --- Part B: stages, each with the recordings that need no more than it ---------------------------


@dataclass(frozen=True)
class Stage:
    """Recorded workloads that need what this stage is about and what those before it are about."""

    name: str
    files: tuple[str, ...]
    """Recordings, each of which gives an equal share of `count`."""
    has: str = ""
    """Text that a recording's line holds, if it is to be one of this stage."""
    lacks: str = "?"
    count: int = 50


PREEMPTS = '"preempted":["'
STAGES = (
    Stage("admit", ("basic",), lacks=PREEMPTS, count=100),
    Stage("preempt", ("pressure",), has=PREEMPTS),
    Stage("chunk", ("whole-prompts",)),
    Stage("hits", ("prefix",)),
    Stage("ends", ("limits", "aborts"), has='"policy":"fcfs"'),
    Stage("priority", ("priority", "withdrawal"), has=PREEMPTS, count=100),
    Stage("mixture", ("mixed",)),
)
TOTAL = sum(stage.count for stage in STAGES)


@cache
def workloads(stage: Stage) -> list[tuple[str, dict[str, Any]]]:
    """(file, recording) of a stage's workloads."""
    share = stage.count // len(stage.files)
    chosen = []
    for file in stage.files:
        with gzip.open(RECORDINGS / f"{file}.jsonl.gz", "rt", encoding="utf-8") as lines:
            fit = (line for line in lines if stage.has in line and stage.lacks not in line)
            for line in itertools.islice(fit, share):
                chosen.append((file, json.loads(line)))
    return chosen


@cache
def differing(lab, stage: Stage) -> list[tuple[str, dict[str, Any], replay.Difference]]:
    """The workloads of a stage that are not served as recorded, the smallest first."""
    build = partial(replay.mini_scheduler, scheduler=lab.Scheduler)
    found = []
    for file, entry in workloads(stage):
        _, difference = replay.replay(entry, build)
        if difference is not None:
            found.append((file, entry, difference))
    return sorted(found, key=lambda item: (len(item[1]["outputs"]), item[2].step))


def tally(lab) -> str:
    """How far the class has come: "137 of 450 workloads equal", and that per stage."""
    equal = {stage.name: stage.count - len(differing(lab, stage)) for stage in STAGES}
    parts = ", ".join(f"{stage.name} {equal[stage.name]}/{stage.count}" for stage in STAGES)
    return f"{sum(equal.values())} of {TOTAL} workloads equal ({parts})"


def counted(test: Callable[..., None]) -> Callable[..., None]:
    """A test of part B: when it fails, its message begins with the tally."""

    @functools.wraps(test)
    def wrapped(lab, **fixtures):
        try:
            test(lab, **fixtures)
        except (AssertionError, NotImplementedError) as error:
            error.args = ("\n".join([tally(lab), *map(str, error.args)]),)
            raise

    return wrapped


def check_stage(lab, name: str) -> None:
    """Replay a stage; fail with the smallest workload that differs."""
    stage = next(stage for stage in STAGES if stage.name == name)
    chosen, found = workloads(stage), differing(lab, stage)
    assert len(chosen) == stage.count, f"stage {name} has {len(chosen)} workloads of {stage.count}"
    if not found:
        assert story_of(chosen[0][1], 0), "a difference could not be told: Narrator is out of step"
        return
    file, entry, difference = found[0]
    first = replay.Result(stage.count, 0, tuple(difference for _, _, difference in found))
    fields = ", ".join(f"{field} {len(of)}" for field, of in first.by_field().items())
    pytest.fail(
        f"{tally(lab)}\n{len(found)} of the {stage.count} of stage {name} differ, first in: "
        f"{fields}. The smallest:\n" + explained(entry, difference, file),
        pytrace=False,
    )


# --- Part B: the tests ---------------------------------------------------------------------------


def scheduler_with(lab, *lengths: int, num_blocks=64, caching=False, max_tokens=4, **config):
    """The learner's scheduler over blocks of 4, with requests "a", "b", ... of these lengths."""
    scheduler = lab.Scheduler(KVCacheManager(num_blocks, 4, caching), SchedulerConfig(**config))
    requests = [
        Request(name, [ord(name)] * n, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        for name, n in prompts(*lengths)
    ]
    for request in requests:
        scheduler.add_request(request)
    return scheduler, requests


def run_step(scheduler) -> dict[str, int]:
    """One step with token 7 for whoever catches up; the plan."""
    output = scheduler.schedule()
    assert output is not None, "schedule() returns the plan; it returned None"
    sampled = {
        r.request_id: [7]
        for r in output.scheduled_requests
        if scheduler.needs_sample(r, output.num_scheduled_tokens[r.request_id])
    }
    scheduler.update_from_output(output, sampled)
    return dict(output.num_scheduled_tokens)


@counted
def test_three_prompts_under_a_budget(lab, record_property):
    scheduler, _ = scheduler_with(lab, 8, 8, 8, max_num_batched_tokens=10, max_tokens=2)
    plans = []
    while scheduler.has_unfinished_requests() and len(plans) < 9:
        plans.append(run_step(scheduler))
    expected = [{"a": 8, "b": 2}, {"a": 1, "b": 6, "c": 3}, {"b": 1, "c": 5}, {"c": 1}]
    assert plans == expected, (
        "the README's example: three prompts of 8 tokens, budget 10, two outputs each. If a row "
        "repeats, no counter moved; if requests stay on, nobody retired them.\n"
        f"expected {expected}\ncame     {plans}"
    )
    free = scheduler.kv.block_pool.get_num_free_blocks()
    assert free == 63, f"finished requests give their blocks back: 63 free, came {free}"
    record_property("measured.steps", len(plans))


@counted
def test_update_returns_what_finished(lab):
    scheduler, (a, b, c) = scheduler_with(lab, 4, 4, 8, max_num_batched_tokens=12, max_tokens=1)
    output = scheduler.schedule()
    finished = scheduler.update_from_output(output, {"a": [7], "b": [7]})
    assert finished == [a, b], (
        "a and b have their only output token: finished, in scheduled order.\n"
        f"expected [a, b]\ncame     {finished}"
    )
    assert scheduler.running == [c] and list(scheduler.requests) == ["c"], (
        "finished requests leave running and are released; c is in the middle of its prompt.\n"
        f"came running {scheduler.running}, live {list(scheduler.requests)}"
    )
    came = (c.num_computed_tokens, c.output_token_ids, a.num_computed_tokens)
    assert came == (4, [], 4), (
        "c computed a chunk of 4 and said nothing: its counter moves all the same. a computed its "
        "4 prompt tokens; the sampled one is not computed.\n"
        f"expected (4, [], 4)\ncame     {came}"
    )


@counted
def test_who_lacks_nothing_blocks_nobody(lab):
    scheduler, _ = scheduler_with(lab, 4, 4)
    output = scheduler.schedule()
    scheduler.update_from_output(output, {"b": [7]})
    plan = dict(scheduler.schedule().num_scheduled_tokens)
    assert plan == {"b": 1}, (
        "a's sampled token is not there yet, so a lacks nothing: it is not in the plan, with 0 or "
        f"at all, and b behind it is served.\nexpected {{'b': 1}}\ncame     {plan}"
    )


@counted
def test_token_0_is_a_token(lab):
    scheduler, (a, b) = scheduler_with(lab, 4, 8, max_num_batched_tokens=8)
    output = scheduler.schedule()
    scheduler.update_from_output(output, {"a": [0]})
    assert (a.output_token_ids, b.output_token_ids) == ([0], []), (
        "the model said token 0 for a, and nothing for b, which is in the middle of its prompt. "
        "An id of 0 is false to Python, and still a token: ask whether there is an entry.\n"
        f"expected [0] and []\ncame     {a.output_token_ids} and {b.output_token_ids}"
    )


@counted
def test_a_step_may_bring_several_tokens(lab):
    scheduler, (a, b) = scheduler_with(lab, 4, 4, max_tokens=3)
    output = scheduler.schedule()
    finished = scheduler.update_from_output(output, {"a": [7, 8], "b": [7, 8, 9, 6]})
    assert a.output_token_ids == [7, 8] and a.num_computed_tokens == 4, (
        "a was given two tokens, as a step with accepted drafts gives them: both are its output, "
        "and the counter moves by what was scheduled, 4.\n"
        f"expected [7, 8] and 4\ncame     {a.output_token_ids} and {a.num_computed_tokens}"
    )
    assert (b.output_token_ids, finished) == ([7, 8, 9], [b]), (
        "b has max_tokens=3: its third token ends it, the fourth is dropped, and it is finished "
        f"once.\nexpected [7, 8, 9] and [b]\ncame     {b.output_token_ids} and {finished}"
    )


@counted
def test_an_aborted_request_is_passed_over(lab):
    scheduler, (a, b) = scheduler_with(lab, 4, 4)
    output = scheduler.schedule()
    scheduler.abort_request("a")
    scheduler.update_from_output(output, {"a": [7], "b": [7]})
    assert a.output_token_ids == [] and a.num_computed_tokens == 0, (
        "a was aborted while its step ran: its token is dropped and its counter left alone; came "
        f"{a!r} with outputs {a.output_token_ids}"
    )
    assert b.output_token_ids == [7], f"b is not touched by that; came {b.output_token_ids}"


@counted
def test_stage_admit(lab):
    check_stage(lab, "admit")


@counted
def test_a_victim_keeps_its_tokens_and_loses_the_rest(lab, record_property):
    scheduler, (a, b) = scheduler_with(lab, 8, 8, num_blocks=5, max_tokens=8)
    b.num_preemptions = 2
    run_step(scheduler)
    output = scheduler.schedule()
    assert output.preempted_req_ids == ["b"] and list(output.num_scheduled_tokens) == ["a"], (
        "4 blocks of 4, all taken by two prompts of 8; the ninth token of a needs a third block. "
        "b, the last admitted, makes room; a goes on.\nexpected preempted ['b'], plan ['a']\n"
        f"came     preempted {output.preempted_req_ids}, plan {list(output.num_scheduled_tokens)}"
    )
    came = (b.status.name, b.num_computed_tokens, b.num_preemptions, b.output_token_ids)
    assert came == ("PREEMPTED", 0, 3, [7]), (
        "nothing of b is in the cache any more, but what it said was said. This is its third "
        "preemption: num_preemptions counts on.\n"
        f"expected ('PREEMPTED', 0, 3, [7])\ncame     {came}"
    )
    held = scheduler.kv.get_block_ids("b")
    assert held == [] and list(scheduler.waiting) == [b] and scheduler.running == [a], (
        f"b waits and holds no block; came blocks {held}, waiting {list(scheduler.waiting)}, "
        f"running {scheduler.running}"
    )
    scheduler.update_from_output(output, {"a": [7]})
    victims = 1
    for _ in range(40):
        output = scheduler.schedule()
        victims += len(output.preempted_req_ids)
        scheduler.update_from_output(output, {name: [7] for name in output.num_scheduled_tokens})
    assert not scheduler.requests, f"both end; came {scheduler.requests} after 40 steps more"
    record_property("measured.preemptions", victims)


@counted
def test_stage_preempt(lab):
    check_stage(lab, "preempt")


@pytest.mark.slow
@counted
def test_stage_chunk(lab):
    check_stage(lab, "chunk")


@counted
def test_stage_hits(lab):
    check_stage(lab, "hits")


@counted
def test_a_refused_admission_leaves_no_trace(lab):
    class NoGate(KVCacheManager):
        """As with `scheduler_reserve_full_isl=False`: only the first chunk must fit."""

        def full_sequence_fits(self, request, new_computed_blocks):
            return True

    kv = NoGate(6, 4, True)
    scheduler = lab.Scheduler(kv)
    first, second = (
        Request(name, [5] * n, SamplingParams(max_tokens=4, ignore_eos=True))
        for name, n in (("first", 12), ("second", 30))
    )
    scheduler.add_request(first)
    run_step(scheduler)
    assert first.num_computed_tokens == 12, f"first runs alone, whole; came {first!r}"
    scheduler.add_request(second)
    run_step(scheduler)
    came = (second.num_computed_tokens, second.status.name, scheduler.kv.get_block_ids("second"))
    assert came == (0, "WAITING", []), (
        "second has hits (12 tokens) but the rest of it does not fit: it stays in front of waiting "
        "as if it had never been looked at. A counter left at 12 would skip tokens later, when "
        f"those blocks are gone.\nexpected (0, 'WAITING', [])\ncame     {came}"
    )
    assert list(scheduler.waiting) == [second], f"it still waits; came {list(scheduler.waiting)}"


@counted
def test_a_closed_gate_leaves_no_trace(lab):
    scheduler, (first, second) = scheduler_with(lab, 12, 30, num_blocks=8, caching=True)
    second.all_token_ids[:12] = [ord("a")] * 12
    run_step(scheduler)
    assert first.num_computed_tokens == 12, f"a is computed whole; came {first!r}"
    run_step(scheduler)
    came = (second.num_computed_tokens, second.status.name, scheduler.kv.get_block_ids("second"))
    assert came == (0, "WAITING", []), (
        "b has 12 tokens cached, but all of its 30 do not fit beside a: full_sequence_fits says "
        "no. Its counter counts tokens in blocks it holds, and it holds none.\n"
        f"expected (0, 'WAITING', [])\ncame     {came}"
    )


@counted
def test_stage_ends(lab):
    check_stage(lab, "ends")


@counted
def test_a_preempting_step_admits_nobody(lab):
    scheduler = lab.Scheduler(KVCacheManager(5, 4, False), SchedulerConfig(policy="priority"))
    urgent, patient, late = (
        Request(name, [5] * n, SamplingParams(max_tokens=8), arrival_time=at, priority=priority)
        for name, n, at, priority in (
            ("urgent", 8, 0.0, 0), ("patient", 8, 1.0, 5), ("late", 1, 2.0, 1),
        )
    )  # fmt: skip
    scheduler.add_request(urgent)
    scheduler.add_request(patient)
    run_step(scheduler)
    scheduler.add_request(late)
    output = scheduler.schedule()
    assert output.preempted_req_ids == ["patient"], (
        "urgent needs a third block and none is free: patient, the least urgent, makes room.\n"
        f"expected ['patient']\ncame     {output.preempted_req_ids}"
    )
    came = ([r.request_id for r in scheduler.waiting], output.scheduled_new_req_ids)
    assert came == (["late", "patient"], []), (
        "late is in front now, a block and a slot are free, and it would fit. But somebody has "
        "just lost its work for want of memory: a step that preempts admits no request.\n"
        f"expected waiting ['late', 'patient'], new []\ncame     waiting {came[0]}, new {came[1]}"
    )


def urgent_after_patient(lab, num_blocks: int, lengths: tuple[int, int], **config):
    """Two steps of the less urgent a, one of b. In step 3 b is refused, a withdrawn."""
    kv = KVCacheManager(num_blocks, 4, "forget_withdrawn_blocks" in config)
    kv.full_sequence_fits = lambda request, hits: True
    scheduler = lab.Scheduler(kv, SchedulerConfig(policy="priority", **config))
    a, b = (
        Request(name, [ord(name)] * n, SamplingParams(max_tokens=9), priority=priority)
        for name, n, priority in zip("ab", lengths, (5, 0), strict=True)
    )
    scheduler.add_request(a)
    run_step(scheduler)
    scheduler.add_request(b)
    run_step(scheduler)
    output = scheduler.schedule()
    assert output.preempted_req_ids == ["a"] and list(output.num_scheduled_tokens) == ["b"], (
        "a has its tokens of this step when b, more urgent, is refused: a is withdrawn from the "
        "plan and preempted, b goes on.\nexpected preempted ['a'], plan ['b']\n"
        f"came     preempted {output.preempted_req_ids}, plan {list(output.num_scheduled_tokens)}"
    )
    return scheduler, output, a


@counted
def test_a_refund_is_for_those_behind(lab):
    _, output, _ = urgent_after_patient(lab, 5, (4, 30), max_num_batched_tokens=6)
    assert output.num_scheduled_tokens == {"b": 5}, (
        "budget 6. a has 1 of it, so b is clamped to 5; then b is refused and a gives its 1 back. "
        "b asks again for what it asked for: the refund is for those behind it, of whom there are "
        f"none.\nexpected {{'b': 5}}\ncame     {output.num_scheduled_tokens}"
    )


@counted
def test_what_was_withdrawn_was_not_computed(lab):
    scheduler, _, a = urgent_after_patient(
        lab, 8, (24, 12), max_num_batched_tokens=12, long_prefill_token_threshold=8,
        forget_withdrawn_blocks=True,
    )  # fmt: skip
    probe = Request("probe", [*a.all_token_ids, 1], SamplingParams(max_tokens=1))
    _, num_cached = scheduler.kv.get_computed_blocks(probe)
    assert num_cached == 16, (
        "a has computed 16 tokens. The chunk of this step, tokens 17 to 24, was promised to the "
        "prefix index and withdrawn: nobody computes it, and nobody may find it. _withdraw looks "
        "at the blocks a holds, so a must hold them still.\n"
        f"expected 16 tokens cached\ncame     {num_cached}"
    )


@pytest.mark.slow
@counted
def test_stage_priority(lab):
    check_stage(lab, "priority")


@counted
def test_stage_mixture(lab):
    check_stage(lab, "mixture")


def test_it_decides_as_the_whole_engine_did(lab):
    path = RECORDINGS / "engine" / "arrivals-float32.jsonl.gz"
    entry = json.loads(gzip.decompress(path.read_bytes()))["recording"]
    build = partial(replay.mini_scheduler, scheduler=lab.Scheduler)
    steps, difference = replay.replay(entry, build)
    if difference is not None:
        pytest.fail(
            "no script this time: vLLM v0.22.1 served the shipped model whole, 128 requests over "
            "442 steps, and chose the tokens itself.\n" + explained(entry, difference, path.name),
            pytrace=False,
        )
    assert steps == 442, f"all 442 steps of the run are compared; came {steps}"


def test_it_serves_the_shipped_model(lab):
    texts = ["The KV cache is divided into", "The KV cache is read by", "A request"]
    settings: dict[str, Any] = {
        "model": shipped_model(), "num_blocks": 14, "block_size": 4, "max_num_seqs": 3,
        "max_num_batched_tokens": 16, "long_prefill_token_threshold": 7,
    }  # fmt: skip
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    roomy = LLMEngine(shipped_model())
    expected = [result.outputs[0].text for result in roomy.generate(texts, params)]
    engine = LLMEngine(parts=EngineParts(scheduler=lab.Scheduler), **settings)
    events = {"preempted": 0, "cached": 0, "chunks": 0}
    steps = itertools.count(1)

    def count(output):
        if next(steps) > 200:
            pytest.fail(
                "after 200 steps the engine is still not through; the course's scheduler takes "
                "fewer than 60. Who never leaves running, or comes back for ever?\n"
                f"running {engine.scheduler.running}\nwaiting {list(engine.scheduler.waiting)}",
                pytrace=False,
            )
        events["preempted"] += len(output.preempted_req_ids)
        events["cached"] += sum(output.num_cached_tokens.values())
        for r in output.scheduled_requests:
            n = output.num_scheduled_tokens[r.request_id]
            events["chunks"] += not engine.scheduler.needs_sample(r, n)

    engine.observers.append(count)
    came = [result.outputs[0].text for result in engine.generate(texts, params)]
    assert came == expected, (
        "your scheduler on the shipped model, 13 blocks of 4, chunks of 7, against a roomy engine: "
        "when it computes what may change, what is said may not.\n"
        f"expected {expected}\ncame     {came}"
    )
    assert min(events.values()) > 0, (
        f"this run is here for its preemptions, hits and chunks; came {events}"
    )

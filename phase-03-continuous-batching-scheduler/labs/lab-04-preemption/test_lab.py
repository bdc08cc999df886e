"""What lab 03-04 pins: an eviction costs steps and tokens of work, and never a token of output."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

import mini_vllm
from labkit import shipped_model
from mini_vllm import (
    BlockPool,
    EngineParts,
    KVCacheManager,
    LLMEngine,
    Request,
    SamplingParams,
    SchedulerConfig,
)

TWO = ["aaaabbbb", "ccccdddd"]
FOUR = [*TWO, "eeeeffff", "gggghhhh"]


@cache
def roomy(max_tokens: int) -> list[list[int]]:
    """What the engine's own scheduler says with 255 blocks: the reference, no preemption."""
    engine = LLMEngine(num_blocks=256, block_size=4, model=shipped_model())
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [result.outputs[0].token_ids for result in engine.generate(TWO, params)]


def scheduler_with(lab, num_blocks: int, *lengths: int, caching=False, max_tokens=8, **config):
    """The given scheduler over blocks of 4, with requests a, b, ... of these prompt lengths."""
    scheduler = lab.Scheduler(KVCacheManager(num_blocks, 4, caching), SchedulerConfig(**config))
    requests = [
        Request(name, [ord(name)] * n, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        for name, n in zip("abcdef", lengths, strict=False)
    ]
    for request in requests:
        scheduler.add_request(request)
    return scheduler, requests


def run_step(scheduler):
    """One step with token 7 for whoever catches up; the plan."""
    plan = scheduler.schedule()
    sampled = {
        r.request_id: [7]
        for r in plan.scheduled_requests
        if scheduler.needs_sample(r, plan.num_scheduled_tokens[r.request_id])
    }
    scheduler.update_from_output(plan, sampled)
    return plan


def names(requests) -> list[str]:
    return [request.request_id for request in requests]


# --- the emergency -------------------------------------------------------------------------------


def test_preemption_actually_happens_under_pressure(lab):
    scheduler, (a, b) = scheduler_with(lab, 5, 8, 8)
    run_step(scheduler)
    plan = scheduler.schedule()
    assert plan.preempted_req_ids == ["b"] and plan.num_scheduled_tokens == {"a": 1}, (
        "4 usable blocks of 4 hold two prompts of 8. Token 9 of a needs a third block, so b, "
        "admitted last, makes room and a goes on, in the first decode step already.\n"
        "expected preempted ['b'], plan {'a': 1}\n"
        f"came     preempted {plan.preempted_req_ids}, plan {plan.num_scheduled_tokens}"
    )
    assert scheduler.running == [a] and list(scheduler.waiting) == [b], (
        f"b is back in waiting; came running {scheduler.running}, waiting {list(scheduler.waiting)}"
    )
    free = scheduler.kv.block_pool.get_num_free_blocks()
    assert free == 1, f"b gave 2 blocks, a took 1: expected 1 free, came {free}"


def test_a_victim_keeps_its_tokens_and_nothing_else(lab):
    scheduler, (_, b) = scheduler_with(lab, 64, 8, 8)
    run_step(scheduler)
    scheduler.running.remove(b)
    b.num_preemptions, hits = 2, b.num_cached_tokens
    lab.preempt(scheduler, b)
    came = (b.status.name, b.num_computed_tokens, b.num_preemptions, b.num_cached_tokens)
    assert came == ("PREEMPTED", 0, 3, hits), (
        "nothing of b is in the cache any more, so nothing of it is computed. This was its third "
        "preemption, and the hits of its first admission stay on its record.\n"
        f"expected ('PREEMPTED', 0, 3, {hits})\ncame     {came}"
    )
    assert b.output_token_ids == [7] and b.num_tokens == 9, (
        "what was said was said: the user has that token on the screen.\n"
        f"expected outputs [7], 9 tokens\ncame     outputs {b.output_token_ids}, {b.num_tokens}"
    )
    held, free = scheduler.kv.get_block_ids("b"), scheduler.kv.block_pool.get_num_free_blocks()
    assert held == [] and free == 61, (
        f"b holds no block and 63 - 2 are free; came {held} and {free} free"
    )


def test_a_victim_waits_in_front(lab):
    scheduler, (_, b, c) = scheduler_with(lab, 64, 8, 8, 8, max_num_seqs=2)
    run_step(scheduler)
    b.request_id, c.request_id = "b", "a0"  # not the alphabet decides
    scheduler.running.remove(b)
    lab.preempt(scheduler, b)
    assert names(scheduler.waiting) == ["b", "a0"], (
        "c (named a0) has never run, b has: first come, first served, also after an eviction.\n"
        f"expected ['b', 'a0']\ncame     {names(scheduler.waiting)}"
    )


def test_two_victims_keep_their_order(lab):
    scheduler, (a, b, c) = scheduler_with(lab, 7, 24, 4, 4, long_prefill_token_threshold=12)
    run_step(scheduler)
    came = lab.make_room(scheduler, a, 12)
    assert came == (True, [c, b]), (
        "a has 3 blocks and wants 3 more for its second chunk; 1 is free. c gives 1, which is not "
        "enough, b gives another.\nexpected (True, [c, b])\n"
        f"came     {came}"
    )
    assert names(scheduler.waiting) == ["b", "c"] and names(scheduler.running) == ["a"], (
        "evicted from the end, each put in front: they wait in the order in which they came.\n"
        f"expected waiting ['b', 'c']\ncame     waiting {names(scheduler.waiting)}"
    )


def test_no_more_victims_than_needed(lab):
    scheduler, (a, _, c) = scheduler_with(lab, 7, 8, 8, 8)
    run_step(scheduler)
    came = lab.make_room(scheduler, a, 1)
    assert came == (True, [c]) and names(scheduler.running) == ["a", "b"], (
        "one victim makes enough room: ask again after each.\nexpected (True, [c])\n"
        f"came     {came}"
    )
    came = lab.make_room(scheduler, a, 1)
    assert came == (True, []), f"memory that is free needs no victim; came {came}"
    came = [len(scheduler.kv.get_block_ids(name)) for name in "ab"]
    assert came == [3, 2], (
        "a asked for one slot twice without computing it, so it still needs 3 blocks for 9 tokens; "
        f"b has its 2.\nexpected [3, 2]\ncame     {came}"
    )


def test_it_asks_once_more_than_it_evicts(lab):
    scheduler, (a, *_) = scheduler_with(lab, 7, 8, 8, 8)
    run_step(scheduler)
    asked, allocate_slots = [], scheduler.kv.allocate_slots

    def spy(request, num_new_tokens, *args, **kwargs):
        asked.append((request.request_id, num_new_tokens))
        return allocate_slots(request, num_new_tokens, *args, **kwargs)

    scheduler.kv.allocate_slots = spy
    lab.make_room(scheduler, a, 1)
    assert asked == [("a", 1)] * 2, (
        "asked, refused; c evicted; asked again and granted. A grant is the end: asking again "
        "could only take more, and every ask costs a look at the pool.\n"
        f"expected [('a', 1), ('a', 1)]\ncame     {asked}"
    )


def test_the_only_one_running_goes_too(lab):
    scheduler, (a,) = scheduler_with(lab, 3, 8)
    run_step(scheduler)
    came = lab.make_room(scheduler, a, 1)
    seen = (names(scheduler.running), names(scheduler.waiting), a.num_computed_tokens)
    assert came == (False, [a]) and seen == ([], ["a"], 0), (
        "nobody else runs, and the pool cannot hold a's ninth token. A request that is refused "
        "does not stay in running with blocks nobody else can have: it goes like any victim.\n"
        f"expected (False, [a]), running [], waiting ['a'], 0 computed\ncame     {came}, {seen}"
    )


def test_the_last_one_evicts_itself(lab):
    scheduler, (_, b) = scheduler_with(lab, 5, 8, 8)
    run_step(scheduler)
    came = lab.make_room(scheduler, b, 1)
    assert came == (False, [b]) and names(scheduler.running) == ["a"], (
        "b asks and is itself the last of running: it goes, and the answer is no. Going on would "
        "evict a, which is older, and allocate for a request that does not run any more.\n"
        f"expected (False, [b]), running ['a']\ncame     {came}, running {names(scheduler.running)}"
    )


class Generous(KVCacheManager):
    """Finds the first block of every prompt but the first, without any work."""

    def get_computed_blocks(self, request):
        donor = next(iter(self.req_to_blocks.values()), [])
        return (donor[:1], self.block_size) if donor else ([], 0)


# --- what it costs -------------------------------------------------------------------------------


def test_what_can_ever_finish(lab):
    limits = [n for n in range(1, 20) if lab.fits_alone(8, n, 5, 4)]
    assert limits == list(range(1, 10)), (
        "8 prompt tokens in 5 blocks of 4. One is the null block, so 16 slots; the last output is "
        f"never computed: 8 + n - 1 <= 16.\nexpected n = 1 to 9\ncame     {limits}"
    )


@pytest.mark.parametrize("prompt_len", [1, 7, 8, 9])
def test_a_request_finishes_alone_exactly_when_it_fits(lab, prompt_len):
    for num_blocks in (2, 3, 4):
        for max_tokens in (1, 2, 4, 5, 6, 9):
            fits = lab.fits_alone(prompt_len, max_tokens, num_blocks, 4)
            scheduler, _ = scheduler_with(lab, num_blocks, prompt_len, max_tokens=max_tokens)
            for _ in range(40):
                if scheduler.has_unfinished_requests():
                    run_step(scheduler)
            finished = not scheduler.has_unfinished_requests()
            assert fits == finished, (
                f"{prompt_len} prompt tokens, {max_tokens} outputs, {num_blocks} blocks of 4 with "
                f"the null block: run alone it {'finishes' if finished else 'never finishes'}, "
                f"fits_alone says {fits}. An engine that lets such a request in spins for ever."
            )


def test_the_cost_of_one_eviction(lab, record_property):
    came = lab.measure(TWO, 5, 4, 8)
    assert came == lab.Cost(steps=15, scheduled=38, wasted=8, evictions=1), (
        "two prompts of 8, 8 outputs each, 4 usable blocks: b is evicted in step 1 with 8 tokens "
        "computed, waits for a, and computes its 9 tokens in one go.\n"
        f"expected 15 steps, 38 = 2 x (8 + 8 - 1) + 8 tokens, 8 wasted, 1 eviction\ncame     {came}"
    )
    record_property("measured.evictions", lab.measure(FOUR, 8, 4, 20).evictions)
    came = lab.measure(TWO, 256, 4, 8)
    assert came == lab.Cost(steps=8, scheduled=30, wasted=0, evictions=0), (
        f"with room for both: 8 steps, 30 tokens, nothing wasted\ncame     {came}"
    )


def test_a_letter_may_be_two_tokens(lab):
    came = lab.measure(["ééééé", "cc"], 256, 4, 3)
    assert came == lab.Cost(steps=3, scheduled=16, wasted=0, evictions=0), (
        "the model reads bytes, and é has two: 10 tokens and 2, with 2 computed outputs each. "
        "Nothing is computed twice here; ask engine.tokenizer how long a prompt is, not the text.\n"
        f"expected 3 steps, 16 tokens, 0 wasted\ncame     {came}"
    )


def test_work_may_also_be_saved(lab):
    parts = EngineParts(scheduler=lab.Scheduler, kv_cache_manager=Generous)
    came = lab.measure(["aaaabbbb"] * 2, 256, 4, 3, parts=parts)
    assert (came.scheduled, came.wasted) == (16, -4), (
        "a cache of its own, put in through parts, gives the second prompt 4 tokens for nothing. "
        "wasted is scheduled minus 2 x (8 + 3 - 1), whatever its sign: a floor of 0 hides it.\n"
        f"expected 16 tokens, -4 wasted\ncame     {came}"
    )


@pytest.mark.parametrize("name", ["run", "measure"])
def test_the_end_of_text_ends_nothing(lab, name, monkeypatch):
    seen, add_request = [], mini_vllm.Scheduler.add_request

    def spy(self, request):
        seen.append(request.sampling_params)
        add_request(self, request)

    monkeypatch.setattr(mini_vllm.Scheduler, "add_request", spy)
    settings = {"model": "toy"} if name == "run" else {}
    getattr(lab, name)(TWO, 64, 4, 5, **settings)
    came = [(params.max_tokens, params.ignore_eos, params.temperature) for params in seen]
    assert came == [(5, True, 0.0)] * 2, (
        f"{name}: exactly max_tokens outputs each, greedy. A model that says EOS early would end a "
        "request before memory is short, and two pools would be compared by nothing.\n"
        "expected (max_tokens, ignore_eos, temperature) (5, True, 0.0) for both\n"
        f"came     {came}"
    )


def test_prompts_are_answered_one_by_one(lab):
    prompts = ["ccccdddd", "aaaabbbb", "ccccdddd"]
    came = lab.run(prompts, 64, 4, 4, model=shipped_model())
    expected = [roomy(8)[i][:4] for i in (1, 0, 1)]
    assert came == expected, (
        "one answer per prompt, in the order of the prompts, also where two are the same text.\n"
        f"expected {expected}\ncame     {came}"
    )


def test_what_can_never_finish_is_refused(lab):
    try:
        came: Any = lab.run(["aaaabbbb"], 5, 4, 10, model="toy")
    except ValueError:
        came = ValueError
    assert came is ValueError, (
        "8 prompt tokens and 10 outputs do not fit into 4 usable blocks of 4. The engine refuses "
        "at the door, and run passes that on: an empty answer would look like one.\n"
        f"expected ValueError\ncame     {came}"
    )


def test_the_price_of_memory(lab):
    expected = {
        8: (66, 151, 43, 4), 10: (57, 172, 64, 5), 12: (49, 180, 72, 5), 16: (35, 140, 32, 2),
        22: (27, 128, 20, 1), 28: (23, 132, 24, 1), 29: (20, 108, 0, 0), 40: (20, 108, 0, 0),
    }  # fmt: skip
    for num_blocks, cost in expected.items():
        came = lab.measure(FOUR, num_blocks, 4, 20)
        assert came == lab.Cost(*cost), (
            f"four prompts of 8, 20 outputs, {num_blocks} blocks: expected {lab.Cost(*cost)}, "
            f"came {came}. An eviction is an event, not a request: the same one may be evicted "
            "again. From 29 = 1 + 4 x 7 blocks on everybody fits."
        )


def test_two_victims_of_one_step_are_two_evictions(lab):
    came = lab.measure(["aaaa", "bbbb", "cccc"], 4, 4, 6)
    assert came == lab.Cost(steps=16, scheduled=35, wasted=8, evictions=2), (
        "three prompts of 4 fill 3 usable blocks. In step 1 a needs a second one, for which c "
        "goes; then b needs one, and is the last itself. Both in one plan.\n"
        f"expected 16 steps, 35 tokens, 8 wasted, 2 evictions\ncame     {came}"
    )


def test_your_make_room_is_in_the_engine(lab, monkeypatch):
    make_room, asked = lab.make_room, []

    def spy(scheduler, request, num_new_tokens):
        asked.append(num_new_tokens)
        return make_room(scheduler, request, num_new_tokens)

    monkeypatch.setattr(lab, "make_room", spy)
    for name, serve in (
        ("run", lambda: lab.run(["aaaa"], 8, 4, 3, model="toy")),
        ("measure", lambda: lab.measure(["aaaa"], 8, 4, 3)),
    ):
        asked.clear()
        serve()
        assert asked == [1, 1], (
            f"without parts, {name} runs the Scheduler of this file, which calls your make_room "
            "for each running request: here for the two decodes. Otherwise it would prove "
            f"nothing about your code.\nexpected [1, 1]\ncame     {asked}"
        )


def test_other_victims_cost_more(lab):
    class OldestFirst(mini_vllm.Scheduler):
        def _pop_victim(self):
            return self.running.pop(0)

    parts = EngineParts(scheduler=OldestFirst)
    came = [lab.measure(FOUR, n, 4, 20, parts=parts).steps for n in (8, 12)]
    assert came == [70, 54], (
        "measure must take the scheduler it is given: with the oldest as victim 8 and 12 blocks "
        f"take 70 and 54 steps, against 66 and 49.\nexpected [70, 54]\ncame     {came}"
    )


# --- what it does not cost -----------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_cramped_pool_matches_roomy_pool(lab, caching):
    expected = roomy(8)
    came = lab.run(TWO, 5, 4, 8, model=shipped_model(), enable_prefix_caching=caching)
    assert came == expected, (
        "the shipped model in 4 usable blocks, with an eviction, against 255: a victim computes "
        "its tokens again and comes to the same state, so it says the same.\n"
        f"expected {expected}\ncame     {came}"
    )
    assert [len(tokens) for tokens in came] == [8, 8], "exactly max_tokens outputs each"


def test_a_stale_block_would_be_seen(lab):
    class NeverForgets(BlockPool):
        """The planted bug: a reused block keeps the hash of what it held."""

        def evict(self, block):
            return False

    parts = EngineParts(scheduler=lab.Scheduler, block_pool=NeverForgets)
    came = lab.run(TWO, 5, 4, 8, model=shipped_model(), parts=parts)
    assert came[0] == roomy(8)[0] and came[1] != roomy(8)[1], (
        "with this pool the victim resumes on blocks that meanwhile hold the survivor's K and V. "
        "The comparison of outputs must notice: else it proves nothing about the sound pool. Does "
        f"run hand its parts and its model to the engine?\nroomy    {roomy(8)}\ncame     {came}"
    )
    toy = [lab.run(TWO, n, 4, 8, model="toy", parts=parts) for n in (5, 256)]
    assert toy[0] == toy[1], (
        "the toy model never reads K and V, so it cannot see the same bug; came other tokens"
    )


@pytest.mark.slow
def test_plans_equal_the_engines_own(lab):
    rng = random.Random(4)
    for case in range(40):
        prompts = ["ab" * rng.randint(1, 8) for _ in range(rng.randint(2, 6))]
        settings: dict[str, Any] = {
            "num_blocks": rng.choice((8, 9, 12)),
            "block_size": 4,
            "model": "toy",
            "max_num_batched_tokens": rng.choice((8, 64)),
            "long_prefill_token_threshold": rng.choice((0, 5)),
            "enable_prefix_caching": rng.random() < 0.5,
        }
        both = []
        for scheduler in (mini_vllm.Scheduler, lab.Scheduler):
            engine = LLMEngine(parts=EngineParts(scheduler=scheduler), **settings)
            plans: list[Any] = []
            engine.observers.append(
                lambda plan, to=plans: to.append(
                    (list(plan.num_scheduled_tokens.values()), len(plan.preempted_req_ids))
                )
            )
            results = engine.generate(prompts, SamplingParams(max_tokens=10, ignore_eos=True))
            free = engine.scheduler.kv.block_pool.get_num_free_blocks()
            both.append((plans, [result.outputs[0].token_ids for result in results], free))
        for index, (want, have) in enumerate(zip(both[0][0], both[1][0], strict=False)):
            assert have == want, (
                f"case {case}, {settings}: step {index} as (tokens per request, victims)\n"
                f"expected {want}\ncame     {have}"
            )
        assert both[0] == both[1], f"case {case}: tokens or free blocks differ at the end"

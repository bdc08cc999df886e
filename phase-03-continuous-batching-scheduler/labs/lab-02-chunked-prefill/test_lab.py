"""What lab 03-02 pins: steps by a formula, and chunks that change no token on real K and V."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import mini_vllm
from labkit import shipped_model
from mini_vllm import EngineParts, KVCacheManager, LLMEngine, Request, SamplingParams

TEXTS = [
    "The scheduler gives every running request its tokens first, and a waiting one the rest. " * 2,
    "A block holds",
    "Prefix caching finds the blocks of a prompt that was seen before, from its front on",
]
"""176, 13 and 83 byte tokens."""


@cache
def whole(max_tokens: int) -> list[list[int]]:
    """What the engine's own scheduler says with every prompt in one piece: the reference."""
    engine = LLMEngine(
        num_blocks=256, block_size=4, model=shipped_model(), enable_prefix_caching=False
    )
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [result.outputs[0].token_ids for result in engine.generate(TEXTS, params)]


# --- a formula -----------------------------------------------------------------------------------


STEPS = [
    (4000, 512, 2048, 8, "7 chunks of 512 are 3584, the eighth is the rest"),
    (4096, 512, 2048, 8, "divides exactly: no step is left for nothing"),
    (4097, 512, 8192, 9, "one token more is one step more"),
    (4096, 0, 2048, 2, "no threshold: the budget cuts"),
    (100, 0, 2048, 1, "no threshold and a large budget: one piece"),
    (100, 32, 16, 7, "the budget is below the threshold"),
    (256, 32, 8192, 8, "the threshold is below the budget"),
    (1, 16, 16, 1, "one token"),
    (16, 16, 16, 1, "exactly one chunk"),
    (17, 16, 16, 2, "one token over"),
    (100, -1, 30, 4, "a threshold below 0 is none"),
]


@pytest.mark.parametrize(
    ("prompt_len", "threshold", "budget", "expected", "why"),
    STEPS,
    ids=[case[-1] for case in STEPS],
)
def test_steps_by_hand(lab, prompt_len, threshold, budget, expected, why):
    came = lab.num_prefill_steps(prompt_len, threshold, budget)
    assert came == expected, (
        f"a prompt of {prompt_len}, threshold {threshold}, budget {budget}: {why}.\n"
        f"expected {expected}\ncame     {came}"
    )
    assert type(came) is int, f"steps are counted: expected an int, came {came!r}"


def test_long_prompts_are_counted_exactly(lab):
    came = lab.num_prefill_steps(10**17 + 1, 10**17, 10**18)
    assert came == 2, (
        "10^17 + 1 tokens in chunks of 10^17: one full chunk and one token. A float cannot tell "
        f"those two numbers apart: divide whole numbers.\nexpected 2\ncame     {came}"
    )


def test_out_of_range_is_refused(lab):
    for args in ((0, 16, 16), (-1, 16, 16), (10, 16, 0), (10, 0, -5)):
        for name in ("num_prefill_steps", "chunk_sizes"):
            try:
                came: Any = getattr(lab, name)(*args)
            except ValueError:
                came = ValueError
            assert came is ValueError, (
                f"{name}{args}: no prompt, or a budget with which nothing can ever run, is an "
                f"error of the caller.\nexpected ValueError\ncame     {came}"
            )


def test_chunks_by_hand(lab):
    for args, expected in (
        ((17, 16, 2048), [16, 1]),
        ((100, 32, 16), [16, 16, 16, 16, 16, 16, 4]),
        ((8000, 0, 2046), [2046, 2046, 2046, 1862]),
        ((32, 16, 2048), [16, 16]),
        ((5, 0, 2048), [5]),
    ):
        came = lab.chunk_sizes(*args)
        assert came == expected, (
            f"chunk_sizes(prompt_len, threshold, budget) of {args}: full chunks, then what is left "
            f"of the prompt, and no empty one.\nexpected {expected}\ncame     {came}"
        )


# --- the guard -----------------------------------------------------------------------------------


def request_of(prompt_len: int, computed: int, outputs: int = 0) -> Request:
    request = Request("r", [5] * prompt_len, SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(outputs):
        request.append_output_token(7)
    request.num_computed_tokens = computed
    return request


SAMPLES = [
    (10, 0, 0, 10, True, "the whole prompt in one piece"),
    (10, 0, 0, 4, False, "a first chunk: token 5 of the prompt is known, nobody asks for it"),
    (10, 0, 4, 4, False, "a chunk in the middle"),
    (10, 0, 8, 2, True, "the last chunk samples in its own step"),
    (10, 0, 9, 1, True, "a last chunk of one token is no decode, and samples all the same"),
    (10, 1, 10, 1, True, "a decode: one token lacking, one scheduled"),
    (10, 3, 0, 10, False, "resumed after a preemption: 3 outputs are still to be recomputed"),
    (10, 3, 10, 2, False, "resumed, a chunk that ends among its own outputs"),
    (10, 3, 12, 1, True, "resumed, and where it was"),
]


@pytest.mark.parametrize(
    ("prompt_len", "outputs", "computed", "scheduled", "expected", "why"),
    SAMPLES,
    ids=[case[-1] for case in SAMPLES],
)
def test_who_samples(lab, prompt_len, outputs, computed, scheduled, expected, why):
    came = lab.needs_sample(request_of(prompt_len, computed, outputs), scheduled)
    assert came is expected, (
        f"{prompt_len} prompt tokens and {outputs} outputs, {computed} computed, {scheduled} "
        f"scheduled: {why}.\nexpected {expected}\ncame     {came}"
    )


def test_a_plan_beyond_the_known_tokens_is_refused(lab):
    try:
        came: Any = lab.needs_sample(request_of(10, 8), 3)
    except ValueError:
        came = ValueError
    assert came is ValueError, (
        "8 of 10 tokens computed and 3 scheduled: an eleventh token does not exist. Sampling here "
        "would hide a scheduler that counts wrongly.\n"
        f"expected ValueError\ncame     {came}"
    )


# --- measured ------------------------------------------------------------------------------------


def test_serve_notes_chunks_and_the_first_token(lab):
    came = lab.serve(["x" * 40, "y" * 5], 3, model="toy", long_prefill_token_threshold=16)
    expected = ([[16, 16, 8], [5]], [3, 1])
    assert (came.chunks, came.first_token_step) == expected, (
        "40 tokens in chunks of 16: the first token comes in step 3, and the decodes after it are "
        "no chunks. The short prompt is through in step 1, beside the first chunk.\n"
        f"expected {expected}\ncame     {(came.chunks, came.first_token_step)}"
    )


def test_the_way_back_is_no_chunk(lab, record_property):
    came = lab.serve(
        ["aaaabbbb", "ccccdddd"], 9, model="toy", num_blocks=6, block_size=4,
        enable_prefix_caching=False, long_prefill_token_threshold=4,
    )  # fmt: skip
    assert came.chunks == [[4, 4], [4, 4]], (
        "5 usable blocks do not hold two requests of 16 computed tokens: the second is evicted "
        "with outputs, and computes its prompt a second time. Its first token was said before; "
        "what follows, chunks of 4 or not, is not on the way to it.\n"
        f"expected [[4, 4], [4, 4]]\ncame     {came.chunks}"
    )
    lone = lab.serve(["x" * 100], 2, model="toy", max_num_batched_tokens=16,
                     long_prefill_token_threshold=32)  # fmt: skip
    record_property("measured.steps", lone.first_token_step[0])


def test_the_end_of_text_ends_nothing(lab, monkeypatch):
    seen, add_request = [], mini_vllm.Scheduler.add_request

    def spy(self, request):
        seen.append(request.sampling_params)
        add_request(self, request)

    monkeypatch.setattr(mini_vllm.Scheduler, "add_request", spy)
    lab.serve(["ab", "cd"], 3, model="toy")
    came = [(params.max_tokens, params.ignore_eos, params.temperature) for params in seen]
    assert came == [(3, True, 0.0)] * 2, (
        "exactly max_tokens outputs each, greedy: a model that says EOS early would end a request "
        "before its steps can be compared.\n"
        "expected (max_tokens, ignore_eos, temperature) (3, True, 0.0) for both\n"
        f"came     {came}"
    )


def test_your_guard_is_in_the_engine(lab, monkeypatch):
    asked, needs_sample = [], lab.needs_sample

    def guard(request, num_scheduled):
        asked.append((request.num_computed_tokens, num_scheduled))
        return needs_sample(request, num_scheduled)

    monkeypatch.setattr(lab, "needs_sample", guard)
    lab.serve(["x" * 40], 2, model="toy", long_prefill_token_threshold=16)
    expected = [(0, 16), (16, 16), (32, 8), (40, 1)]
    assert asked == expected, (
        "without parts, serve runs the Scheduler of this file, so that the engine asks your "
        "needs_sample in every step: (computed, scheduled).\n"
        f"expected {expected}\ncame     {asked}"
    )


def test_waiting_counts_as_time(lab):
    came = lab.serve(["x" * 40, "y" * 5], 3, model="toy", max_num_batched_tokens=16)
    expected = ([[16, 16, 8], [5]], [3, 3])
    assert (came.chunks, came.first_token_step) == expected, (
        "the budget of 16 goes to the first prompt for two steps; in the third it leaves 8. The "
        "second prompt has one chunk, and its first token in step 3.\n"
        f"expected {expected}\ncame     {(came.chunks, came.first_token_step)}"
    )


@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 100, 256])
@pytest.mark.parametrize(("threshold", "budget"), [(0, 2048), (16, 2048), (32, 16), (0, 24)])
def test_the_formula_is_what_the_engine_does(lab, prompt_len, threshold, budget):
    engine = LLMEngine(
        model="toy", long_prefill_token_threshold=threshold, max_num_batched_tokens=budget
    )
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    request = engine.requests[engine.add_request([5] * prompt_len, params)]
    sizes: list[int] = []
    engine.observers.append(lambda plan: sizes.append(plan.total_num_scheduled_tokens))
    while request.num_output_tokens == 0:
        engine.step()
    steps = lab.num_prefill_steps(prompt_len, threshold, budget)
    assert steps == len(sizes), (
        f"a prompt of {prompt_len}, threshold {threshold}, budget {budget}: the engine says its "
        f"first token in step {len(sizes)}.\nexpected {len(sizes)}\ncame     {steps}"
    )
    came = lab.chunk_sizes(prompt_len, threshold, budget)
    assert came == sizes, f"and computes these chunks.\nexpected {sizes}\ncame     {came}"
    run = lab.serve(
        [[5] * prompt_len],
        2,
        model="toy",
        long_prefill_token_threshold=threshold,
        max_num_batched_tokens=budget,
    )
    assert (run.chunks, run.first_token_step) == ([sizes], [len(sizes)]), (
        f"serve must see the same.\nexpected {[sizes]}, {[len(sizes)]}\n"
        f"came     {run.chunks}, {run.first_token_step}"
    )


# --- what chunks do not change -------------------------------------------------------------------

CHUNKED = {
    "threshold 10": {"long_prefill_token_threshold": 10},
    "threshold below a block": {"long_prefill_token_threshold": 3},
    "small budget": {"max_num_batched_tokens": 50},
    "with prefix cache": {"long_prefill_token_threshold": 31, "enable_prefix_caching": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHUNKED)
def test_chunking_does_not_change_output(lab, name):
    settings = {"num_blocks": 256, "block_size": 4, "enable_prefix_caching": False, **CHUNKED[name]}
    come = lab.serve(TEXTS, 8, model=shipped_model(), **settings)
    for text, expected, came in zip(TEXTS, whole(8), come.token_ids, strict=True):
        assert came == expected, (
            f"{name}: the shipped model, cut into chunks and in one piece, on {text[:30]!r}... A "
            "chunk computes the same K and V, and only the last one speaks.\n"
            f"expected {expected}\ncame     {came}"
        )
    longest = come.chunks[0]
    assert len(longest) > 1 and sum(longest) == len(TEXTS[0]), (
        "this comparison is about chunks, so the longest prompt must have been cut, and its chunks "
        f"must make up the prompt; came {longest}"
    )


def test_a_chunked_way_back_does_not_change_output(lab):
    evicted = []

    class Counting(lab.Scheduler):
        """Your scheduler, and a list of who was preempted."""

        def schedule(self):
            plan = super().schedule()
            evicted.extend(plan.preempted_req_ids)
            return plan

    texts, settings = ["aaaabbbb", "ccccdddd"], {"model": shipped_model(), "block_size": 4}
    engine = LLMEngine(num_blocks=256, **settings)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    expected = [result.outputs[0].token_ids for result in engine.generate(texts, params)]
    came = lab.serve(
        texts,
        9,
        parts=EngineParts(scheduler=Counting),
        num_blocks=6,
        enable_prefix_caching=False,
        long_prefill_token_threshold=4,
        **settings,
    )
    assert evicted, "this run is here for its preemption; none happened: is parts used?"
    assert came.token_ids == expected, (
        "the second request is evicted with outputs, and computes its 8 prompt tokens and those "
        "outputs again in chunks of 4. The chunk that ends its prompt ends nothing: what it would "
        f"say was said before.\nexpected {expected}\ncame     {came.token_ids}"
    )


class ForgetfulKV(KVCacheManager):
    """The planted bug: a chunk that begins inside a block begins a fresh block instead.

    The head of the fresh block holds whatever was there; the K and V of the tokens before the chunk
    are lost with the old one.
    """

    def get_block_ids(self, request_id):
        return [block.block_id for block in self.get_blocks(request_id)]

    def allocate_slots(self, request, num_new_tokens, new_computed_blocks=None):
        blocks = super().allocate_slots(request, num_new_tokens, new_computed_blocks)
        if num_new_tokens > 1 and request.num_computed_tokens % self.block_size:
            table = self.req_to_blocks[request.request_id]
            index = request.num_computed_tokens // self.block_size
            (table[index],) = self.block_pool.get_new_blocks(1)
        return blocks


@pytest.mark.slow
def test_a_stale_block_would_be_seen(lab):
    parts = EngineParts(scheduler=lab.Scheduler, kv_cache_manager=ForgetfulKV)
    settings = {"num_blocks": 256, "block_size": 4, "enable_prefix_caching": False, "parts": parts}
    come = lab.serve(TEXTS, 8, model=shipped_model(), **settings)
    assert come.token_ids == whole(8), (
        "prompts in one piece never begin inside a block, so the planted bug does not show.\n"
        f"expected {whole(8)}\ncame     {come.token_ids}"
    )
    come = lab.serve(TEXTS, 8, model=shipped_model(), long_prefill_token_threshold=10, **settings)
    came = [have != want for have, want in zip(come.token_ids, whole(8), strict=True)]
    assert came == [True, True, False], (
        "in chunks of 10, and blocks of 4, every second chunk begins inside a block and reads two "
        "stale slots. Two of three outputs change; the third happens to survive. The comparison "
        "must notice, or it proves nothing about the sound cache. Does serve hand its parts and "
        "its settings to the engine?\nexpected outputs changed [True, True, False]\n"
        f"came     {came}"
    )
    toy = [
        lab.serve(TEXTS, 8, model="toy", long_prefill_token_threshold=size, **settings).token_ids
        for size in (0, 10)
    ]
    assert toy[0] == toy[1], (
        "the toy model never reads K and V, so it cannot see the same bug; came other tokens"
    )

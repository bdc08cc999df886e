"""Adapters in one batch: each row is the merged model's, whatever shares the step with it."""

from __future__ import annotations

import functools
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from mini_vllm import LLM, ByteTokenizer, EngineParts, LLMEngine, SamplingParams
from mini_vllm.lora.layers import BASE, LoRALinear, lora_delta, sort_by_slot
from mini_vllm.lora.request import LoRARequest
from mini_vllm.tests import test_interrupts
from mini_vllm.tests.lora_support import (
    adapters,
    alone,
    answers,
    merged,
    tiny,
    watched,
)

TOLERANCE = 1e-10
"""On logits of about 10 in float64; a wrong adapter is off by whole numbers."""
LONG = [(7 * i) % 256 for i in range(150)]
"""Longer than a tile of the transformer's products."""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> list[LoRARequest]:
    return adapters(tmp_path_factory.mktemp("adapters"))


def engine(**knobs) -> LLMEngine:
    return LLMEngine(tiny(), enable_lora=True, **{"max_loras": 6} | knobs)


# ------------------------------------------------------------------ arithmetic


def test_tokens_are_sorted_by_slot_and_keep_their_order_within_one():
    order, slots, counts, starts = sort_by_slot(np.array([0, 0, -1, 1, 1, 0]))
    assert order.tolist() == [2, 0, 1, 5, 3, 4]
    assert slots.tolist() == [BASE, 0, 1]
    assert counts.tolist() == [1, 3, 2]
    assert starts.tolist() == [0, 1, 4, 6]


def test_a_delta_is_the_scaled_product_of_both_matrices():
    x, a, b = np.array([[1.0, 2, 3]]), np.array([[1.0, 1, 1]]), np.array([[1.0], [2]])
    assert lora_delta(x, a, b, 0.5).tolist() == [[3.0, 6.0]]
    assert lora_delta(x, a, b).tolist() == [[6.0, 12.0]]


def test_rows_of_seven_adapters_and_of_none_are_those_of_the_merged_models(made):
    """Every row of logits, float64, chunked prefill, tiles cut by segments."""
    wanted = [made[2], None, made[0], made[5], made[1], made[0], None, made[4], made[6], made[3]]
    prompts = [LONG[i : i + 60 + 9 * i] for i in range(10)]
    mixed, rows = watched(enable_lora=True, max_loras=8, max_num_batched_tokens=200)
    got = answers(mixed, prompts, wanted)
    assert len({tuple(tokens) for tokens in got}) >= 9, "adapters that change nothing prove nothing"
    assert len(rows.rows) == 10 * 6
    for prompt, adapter, tokens in zip(prompts, wanted, got, strict=True):
        single, expected = watched(enable_prefix_caching=False)
        single.model = merged(adapter)
        assert answers(single, [prompt], [None]) == [tokens]
        for row in expected.rows:
            assert min(np.abs(row - other).max() for other in rows.rows) < TOLERANCE


def test_a_batch_of_base_requests_alone_is_the_base_model_bit_for_bit(made):
    plain, rows = watched()
    lora, same = watched(enable_lora=True, max_loras=6)
    answers(lora, [LONG[:9]], [made[0]])  # every slot but one empty, one filled
    same.rows.clear()
    prompts = [LONG[:40], LONG[3:50], LONG[5:9]]
    assert answers(lora, prompts, [None] * 3) == answers(plain, prompts, [None] * 3)
    assert all(np.array_equal(a, b) for a, b in zip(rows.rows, same.rows, strict=True))


def test_a_base_row_never_gets_the_last_slots_delta(made):
    """The real engine's form for processors does, when every slot is filled."""
    full = engine(max_loras=2)
    wanted = [made[0], None, made[1]]
    assert answers(full, [LONG[:20]] * 3, wanted)[1] == alone(LONG[:20], None)


def test_each_linear_multiplies_by_its_weights_once_for_all_rows(made):
    calls = []

    class Counting:
        def __init__(self, base):
            self.base = base

        def __call__(self, x):
            calls.append(len(x))
            return self.base(x)

    lora = engine()
    for linear in lora.feature("lora").model.linears.values():
        linear.base = Counting(linear.base)
    answers(lora, [LONG[:10]] * 6, [None, *made[:5]], max_tokens=1)
    assert calls == [60] * 8, "4 projections in each of 2 layers, all 60 rows in each"


def test_a_layer_does_two_products_for_each_adapter_and_none_for_each_row(made):
    calls = []

    def counting(x, a, b, scaling):
        calls.append(len(x))
        return lora_delta(x, a, b, scaling)

    lora = LLMEngine(
        tiny(),
        parts=EngineParts(rooms={"lora": {"adapter_delta": counting}}),
        enable_lora=True,
        max_loras=2,
    )
    answers(lora, [LONG[:10]] * 6, [made[0], made[3], None] * 2, max_tokens=1)
    targets = {"a1": 4, "a4": 2}  # packed projections that it changes
    assert calls == [20] * 2 * (targets["a1"] + targets["a4"]), "rows of one adapter lie together"


# ------------------------------------------------------------------ what goes together


@functools.cache
def expected(prompt: tuple[int, ...], adapter: LoRARequest | None) -> list[int]:
    return alone(list(prompt), adapter)


def workload(seed: int, made: list[LoRARequest]) -> tuple[dict, list, list]:
    """Knobs, prompts and adapters: few slots, small pools, shared prefixes."""
    rng = random.Random(seed)
    size = rng.choice((2, 4, 8))
    prompts = [LONG[: rng.randint(1, 40)] for _ in range(rng.randint(2, 9))]
    wanted = [rng.choice([None, *made]) for _ in prompts]
    longest = max(len(prompt) for prompt in prompts) + 6
    knobs = {
        "block_size": size,
        "num_blocks": 1 - (-longest // size) + rng.choice((0, 1, 3, 9, 60)),
        "max_num_seqs": rng.choice((2, 3, 8)),
        "max_num_batched_tokens": rng.choice((8, 16, 33, 256)),
        "enable_prefix_caching": rng.random() < 0.7,
        "max_loras": rng.choice((1, 1, 2, 3)),
        "async_scheduling": rng.random() < 0.3,
    }
    knobs["max_cpu_loras"] = knobs["max_loras"] + rng.choice((0, 0, 1, 5))
    if not knobs["async_scheduling"] and rng.random() < 0.4:
        knobs["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1
        }  # fmt: skip
    return knobs, prompts, wanted


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_slots_pools_chunks_caches_and_drafts_change_no_answer(made, seed):
    knobs, prompts, wanted = workload(seed, made)
    got = answers(engine(**knobs), prompts, wanted)
    assert got == [expected(tuple(p), a) for p, a in zip(prompts, wanted, strict=True)], knobs


def test_a_preempted_request_comes_back_under_its_adapter(made):
    tight = engine(num_blocks=12, block_size=4, max_loras=2)
    preempted: list[str] = []
    tight.observers.append(lambda plan: preempted.extend(plan.preempted_req_ids))
    prompts, wanted = [LONG[i : i + 14] for i in range(4)], [made[0], made[1], made[2], None]
    got = answers(tight, prompts, wanted, max_tokens=16)
    assert preempted
    assert got == [alone(p, a, 16) for p, a in zip(prompts, wanted, strict=True)]


# ------------------------------------------------------------------ the prefix cache


def tables(lora: LLMEngine, asked: list[tuple[list[int], dict]]) -> list[list[int]]:
    """Block tables after one step, the first request two steps ahead of the others."""
    ids = []
    for prompt, keys in asked:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        ids.append(lora.add_request(prompt, params, **keys))
        lora.step()
    return [lora.scheduler.kv.get_block_ids(request_id) for request_id in ids]


def test_one_adapter_shares_all_blocks_and_two_share_none(made):
    lora = engine(block_size=4)
    first, second, third, base = tables(
        lora,
        [
            (LONG[:17], {"lora_request": made[0]}),
            (LONG[:17], {"lora_request": made[0]}),
            (LONG[:17], {"lora_request": made[1]}),
            (LONG[:17], {}),
        ],
    )
    assert first[:4] == second[:4], "one adapter, one prompt: every full block"
    assert not set(first) & set(third) and not set(third) & set(base)
    assert not set(first) & set(base)


def test_a_salt_spelled_like_an_adapter_is_another_key(made):
    """Upstream mixes them up in the first block: both are one text in front of its tokens."""
    lora = engine(block_size=4)
    adapter, salted, both = tables(
        lora,
        [
            (LONG[:17], {"lora_request": made[0]}),
            (LONG[:17], {"cache_salt": made[0].lora_name}),
            (LONG[:17], {"lora_request": made[0], "cache_salt": "s"}),
        ],
    )
    assert not set(adapter) & set(salted)
    assert not set(adapter) & set(both)


def test_a_salt_does_not_hide_the_adapter(made):
    lora = engine()
    wish = SamplingParams(max_tokens=6, ignore_eos=True)
    asked = lora.add_request(LONG[:9], wish, lora_request=made[0], cache_salt="s")
    request = lora.requests[asked]
    while not request.is_finished:
        lora.step()
    assert request.output_token_ids == alone(LONG[:9], made[0])


def test_the_model_that_was_given_stays_as_it_was(made):
    model = tiny()
    lora = LLMEngine(model, enable_lora=True)
    answers(lora, [LONG[:9]], [made[0]])
    assert answers(LLMEngine(model), [LONG[:9]], [None]) == [alone(LONG[:9], None)]
    assert not any(isinstance(layer.qkv_proj, LoRALinear) for layer in model.layers)


# ------------------------------------------------------------------ slots


def test_resident_adapters_cost_nothing_and_evicted_ones_are_loaded_again(made):
    lora = engine(max_loras=1, max_cpu_loras=2)
    for adapter in (made[0], made[0], made[1], made[0], made[2], made[0]):
        answers(lora, [LONG[:5]], [adapter], max_tokens=1)
    assert lora.feature("lora").stats() == {
        "hits": 1, "misses": 5, "evictions": 4, "hit_rate": 1 / 6,
        "disk_loads": 3 + 1,  # the third was checked, found no room, and was read when it ran
    }  # fmt: skip
    assert lora.feature("lora").list_adapters() == {1, 3}


def test_by_default_what_leaves_a_slot_is_read_from_disk_again(made):
    lora = engine(max_loras=1)
    for adapter in (made[0], made[1], made[0]):
        answers(lora, [LONG[:5]], [adapter], max_tokens=1)
    assert lora.feature("lora").stats()["disk_loads"] == 2 + 2


def test_a_step_loads_no_adapter_into_the_slot_of_one_it_needs(made):
    lora = engine(max_loras=2)
    answers(lora, [LONG[:5]] * 2, made[:2], max_tokens=1)
    before = lora.feature("lora").stats()["misses"]
    answers(lora, [LONG[:5]] * 2, [made[2], made[0]], max_tokens=1)
    assert lora.feature("lora").stats()["misses"] == before + 1


# ------------------------------------------------------------------ the gate


def test_a_request_without_a_slot_is_passed_over_and_is_no_barrier(made):
    lora = engine(max_loras=1)
    wish = SamplingParams(max_tokens=3, ignore_eos=True)
    a, b, a2, base = (
        lora.add_request(LONG[:4], wish, lora_request=adapter)
        for adapter in (made[0], made[1], made[0], None)
    )
    lora.step()
    assert [request.request_id for request in lora.scheduler.running] == [a, a2, base]
    assert [request.request_id for request in lora.scheduler.skipped] == [b]
    ended = []
    while lora.has_unfinished_requests():
        ended += [request.request_id for request in lora.step()]
    assert ended == [a, a2, base, b]


def test_an_abort_frees_the_slot_and_one_among_the_skipped_leaves_no_trace(made):
    lora = engine(max_loras=1)
    wish = SamplingParams(max_tokens=9, ignore_eos=True)
    a, b, c = (
        lora.add_request(LONG[:4], wish, lora_request=adapter)
        for adapter in (made[0], made[1], made[2])
    )
    lora.step()
    lora.abort_request(b)
    assert [request.request_id for request in lora.scheduler.skipped] == [c]
    lora.abort_request(a)
    lora.step()
    assert [request.request_id for request in lora.scheduler.running] == [c]
    lora.abort_request(c)
    assert not lora.has_unfinished_requests()
    assert lora.scheduler.kv.usage == 0


def test_a_plan_with_more_adapters_than_slots_is_named(made):
    """A scheduler that takes gates and does not ask them."""
    lora = engine(max_loras=1)
    lora.scheduler.gates = ()
    with pytest.raises(RuntimeError, match="the plan has 2 adapters: there are 1 slots"):
        answers(lora, [LONG[:5]] * 2, made[:2])
    assert not lora.requests


# ------------------------------------------------------------------ when something fails


def test_a_stream_is_written_under_its_adapter(made):
    llm = LLM(tiny(), enable_lora=True)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    got = "".join(llm.stream("abc", params, made[0]))
    whole = ByteTokenizer().decode(alone(list(b"abc"), made[0]))
    assert got == whole.removesuffix("\ufffd")  # what ends inside a character is not text


@pytest.mark.parametrize("is_async", [False, True])
def test_an_adapter_that_goes_bad_ends_its_requests_alone(made, tmp_path, is_async):
    copied = Path(shutil.copytree(made[0].lora_path, tmp_path / "copy"))
    gone = LoRARequest("gone", 9, str(copied))
    lora = engine(max_loras=1, async_scheduling=is_async)
    wish = SamplingParams(max_tokens=6, ignore_eos=True)
    answers(lora, [LONG[:5]], [gone], max_tokens=1)
    answers(lora, [LONG[:5]], [made[1]], max_tokens=1)  # takes its slot and its place in memory
    copied.rename(tmp_path / "away")
    kept = lora.requests[lora.add_request(LONG[:5], wish)]
    lora.step()
    lost = [lora.requests[lora.add_request(LONG, wish, lora_request=gone)] for _ in range(2)]
    while not kept.is_finished:
        lora.step()
    assert [request.finish_reason for request in lost] == ["error", "error"]
    assert all("no such folder" in str(request.stop_reason) for request in lost)
    assert (kept.output_token_ids, kept.num_preemptions) == (alone(LONG[:5], None), 0)
    assert lora.scheduler.kv.usage == 0.0 and not lora.requests
    (tmp_path / "away").rename(copied)  # no block that the lost requests did not write is found
    both = answers(lora, [LONG, LONG[:5]], [gone, made[1]])
    assert both == [alone(LONG, gone), alone(LONG[:5], made[1])]


def test_a_slot_that_was_half_filled_is_filled_again(made):
    """The step raises in the middle; what its slot held before must not answer for anybody."""
    lora = engine(max_loras=1, max_cpu_loras=3)
    answers(lora, [LONG[:5]], [made[0]], max_tokens=1)
    set_slot = lora.feature("lora").model.set_slot

    def half(slot, pairs):
        set_slot(slot, dict(list(pairs.items())[:1]))
        lora.feature("lora").model.set_slot = set_slot
        raise KeyboardInterrupt

    lora.feature("lora").model.set_slot = half
    wish = SamplingParams(max_tokens=6, ignore_eos=True)
    second = lora.requests[lora.add_request(LONG[:5], wish, lora_request=made[1])]
    with pytest.raises(KeyboardInterrupt):
        lora.step()
    assert answers(lora, [LONG[:5]], [made[0]]) == [alone(LONG[:5], made[0])]
    while not second.is_finished:
        lora.step()
    assert second.output_token_ids == alone(LONG[:5], made[1])


@pytest.mark.slow
@pytest.mark.parametrize("max_loras", [1, 3])
def test_an_interrupt_anywhere_leaves_an_engine_that_adapts_as_a_fresh_one(made, max_loras):
    """Slots half filled go with the step that did not happen."""
    of_prompt = dict(zip(test_interrupts.PROMPTS, [made[0], made[1], None, made[2]], strict=True))

    def make() -> LLMEngine:
        lora = LLMEngine(tiny(), enable_lora=True, max_loras=max_loras, **test_interrupts.KNOBS)
        process = lora.inputs.process

        def adapted(prompt, *rest, **keys):
            return process(prompt, *rest, **keys | {"lora_request": of_prompt[prompt]})

        lora.inputs.process = adapted
        return lora

    for way in ("generate", "stream"):
        assert test_interrupts.interrupt(make, way, 40) > 20

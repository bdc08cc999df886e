"""Start-up promises room for one request of `max_model_len`; block 0 is not taken off that room.

`_check_enough_kv_cache_memory` and the automatic `max_model_len` compare a request with *all* bytes
of the cache. The pool then keeps block 0 for itself (`vllm/v1/core/block_pool.py:176`
`BlockPool.null_block`). So a pool of exactly the blocks that one request needs has one too few, and
the request waits for ever: on the real scheduler of the pinned tree, with scripted tokens.
"""

from __future__ import annotations

from typing import Any

import pytest

from mini_vllm import KVCacheManager, LLMEngine, SamplingParams

BLOCK_SIZE = 16
NUM_BLOCKS = 4  # cut from memory for 64 tokens; 3 are handed out
LENGTH = NUM_BLOCKS * BLOCK_SIZE  # the max_model_len that start-up accepts


@pytest.fixture
def started() -> Any:
    """`started(max_model_len, num_blocks, auto)`: length and blocks that start-up settles on."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    from conformance import real

    spec = real.FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=_float32()
    )

    def start(max_model_len: int, num_blocks: int, auto: bool = False) -> tuple[int, int]:
        vllm_config = real.make_scheduler(_config(max_model_len, 2)).vllm_config
        vllm_config.model_config.original_max_model_len = -1 if auto else max_model_len
        (cut,) = get_kv_cache_configs(
            vllm_config, [{"layer": spec}], [num_blocks * spec.page_size_bytes]
        )
        return vllm_config.model_config.max_model_len, cut.num_blocks

    return start


def _float32() -> Any:
    import torch

    return torch.float32


def _config(max_model_len: int, num_blocks: int) -> dict[str, Any]:
    return {
        "num_blocks": num_blocks,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 256,
        "long_prefill_token_threshold": 0,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "max_model_len": max_model_len,
        "policy": "fcfs",
    }


def _plans(
    max_model_len: int, num_blocks: int, prompts: list[int], steps: int, max_tokens: int = 64
) -> tuple[list[dict[str, int]], bool]:
    """What the real scheduler plans for `prompts` (lengths) in `steps` steps; is work left then?"""
    from conformance import real

    scheduler = real.make_scheduler(_config(max_model_len, num_blocks))
    requests = {}
    for number, length in enumerate(prompts):
        entry = {
            "request_id": f"r{number}",
            "prompt_token_ids": [number + 1] * length,
            "max_tokens": max_tokens,
            "priority": 0,
            "arrival_time": float(number),
            "ignore_eos": True,
        }
        requests[f"r{number}"] = real.make_request(entry, BLOCK_SIZE, eos_token_id=2)
        scheduler.add_request(requests[f"r{number}"])
    plans = []
    for _ in range(steps):
        plan = scheduler.schedule()
        plans.append(dict(plan.num_scheduled_tokens))
        caught_up = [
            name
            for name in plans[-1]
            if requests[name].num_computed_tokens == requests[name].num_tokens
        ]
        scheduler.update_from_output(plan, real.runner_output(plan, dict.fromkeys(caught_up, 7)))
    return plans, scheduler.has_unfinished_requests()


@pytest.mark.upstream
def test_start_up_accepts_one_block_too_few(started: Any) -> None:
    assert started(LENGTH, NUM_BLOCKS) == (LENGTH, NUM_BLOCKS), "64 tokens in 4 blocks: accepted"
    with pytest.raises(ValueError, match="estimated maximum model length is 64"):
        started(LENGTH + 1, NUM_BLOCKS)  # one token more is refused, and 64 is recommended


@pytest.mark.upstream
def test_the_automatic_length_lands_on_the_gap_whenever_it_shortens(started: Any) -> None:
    for num_blocks in (2, 4, 33):
        length, cut = started(1024, num_blocks, auto=True)
        assert (length, cut) == (num_blocks * BLOCK_SIZE, num_blocks)
    assert started(1024, 65, auto=True) == (1024, 65), "memory to spare: nothing is shortened"


@pytest.mark.upstream
def test_a_prompt_the_input_accepts_is_refused_in_every_step_and_blocks_the_queue() -> None:
    plans, unfinished = _plans(LENGTH, NUM_BLOCKS, [LENGTH - 1, 5], steps=50)
    assert plans == [{}] * 50 and unfinished, "neither the long prompt nor the one behind it"


@pytest.mark.upstream
def test_a_request_that_grows_into_the_gap_evicts_itself_and_stays() -> None:
    _, unfinished = _plans(LENGTH, NUM_BLOCKS, [40], steps=50, max_tokens=9)
    assert not unfinished, "40 + 9 - 1 = 48 slots are there"
    plans, unfinished = _plans(LENGTH, NUM_BLOCKS, [40], steps=50)
    assert plans[:10] == [{"r0": 40}, *[{"r0": 1}] * 8, {}], "48 of 48 slots, then nothing"
    assert plans[10:] == [{}] * 40 and unfinished


@pytest.mark.upstream
@pytest.mark.parametrize("length", range(LENGTH - BLOCK_SIZE + 1, LENGTH + 1))
def test_the_gap_is_there_for_all_lengths_but_those_one_token_into_a_block(length: int) -> None:
    """The last token is never computed, so 49 tokens need the slots of 48: 3 blocks."""
    _, unfinished = _plans(length, NUM_BLOCKS, [length - 1], steps=3)
    assert unfinished == (length % BLOCK_SIZE != 1)


@pytest.mark.upstream
def test_one_block_more_ends_it() -> None:
    plans, unfinished = _plans(LENGTH, NUM_BLOCKS + 1, [LENGTH - 1, 5], steps=10, max_tokens=4)
    assert plans[0] == {"r0": LENGTH - 1} and not unfinished


def test_mini_vllm_counts_the_blocks_that_are_handed_out() -> None:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    assert KVCacheManager(NUM_BLOCKS, BLOCK_SIZE).block_pool.get_num_free_blocks() == 3
    engine = LLMEngine("toy", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=LENGTH)
    with pytest.raises(ValueError, match=r"needs 4 blocks of 16: the pool has 3"):
        engine.add_request([1] * (LENGTH - 1), params)

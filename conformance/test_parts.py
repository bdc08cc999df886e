"""Each real part that was recorded, against the mini engine's, or against its rule in our words.

Where `mini_vllm` has the part (hashing, queue, pool, manager, stop check, sampler) it is replayed.
Where it has none (dispatcher, block sizes, capacity, async plans) the rule stands here, and the
recordings prove that it is the real one.
"""

from __future__ import annotations

import gzip
import itertools
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance import parts, record, recording
from conformance.features.attention import paged_attention as attention
from conformance.features.entrypoints import harmony_vocabulary
from mini_vllm.attention import paged_attention, paged_attention_reference
from mini_vllm.block_pool import ROOT_HASH, BlockPool, KVCacheBlock, hash_block_tokens
from mini_vllm.sampler import _apply_min_p, _apply_top_k, _apply_top_p

Case = dict[str, Any]
NPM = shutil.which("npm")


def test_blocks_hash_equal_exactly_when_the_whole_prefix_and_its_extra_keys_are() -> None:
    num_equal = 0
    for case in parts.load("block_hashing"):
        size = case["block_size"]
        by_hash: dict[str, set[tuple[Any, ...]]] = {}
        by_content: dict[tuple[Any, ...], set[str]] = {}
        for request, hashes in zip(case["requests"], case["hashes"], strict=True):
            tokens = request["token_ids"]
            assert len(hashes) == len(tokens) // size
            for index, value in enumerate(hashes):
                prefix = tuple(tokens[: (index + 1) * size])
                content = (prefix, request["lora"], request["cache_salt"])
                num_equal += value in by_hash
                by_hash.setdefault(value, set()).add(content)
                by_content.setdefault(content, set()).add(value)
        assert all(len(contents) == 1 for contents in by_hash.values())
        assert all(len(values) == 1 for values in by_content.values())
    assert num_equal > 100


def test_mini_hashes_are_equal_where_the_real_ones_are() -> None:
    for case in parts.load("block_hashing"):
        size, pairs = case["block_size"], set()
        for request, hashes in zip(case["requests"], case["hashes"], strict=True):
            if request["lora"] or request["cache_salt"]:
                continue  # mini hashes have no extra keys
            parent = ROOT_HASH
            for index, value in enumerate(hashes):
                tokens = request["token_ids"][index * size : (index + 1) * size]
                parent = hash_block_tokens(parent, tokens)
                pairs.add((parent, value))
        assert len({mini for mini, _ in pairs}) == len(pairs) == len({real for _, real in pairs})


def test_the_free_queue_keeps_the_real_order_under_every_operation() -> None:
    for case in parts.load("free_queue"):
        assert parts.replay_free_queue(case) == ""


def test_the_pool_keeps_the_real_order_references_and_contents() -> None:
    for case in parts.load("block_pool"):
        assert parts.replay_block_pool(case) == ""


@pytest.mark.slow
def test_the_manager_gives_the_real_blocks_and_leaves_the_real_state() -> None:
    for case in parts.load("kv_cache_manager"):
        assert parts.replay_kv_cache_manager(case) == ""


def test_the_sequences_reach_hits_evictions_refusals_and_shared_blocks() -> None:
    pool_ops = [op for case in parts.load("block_pool") for op in case["ops"]]
    assert any(op["result"] == "ValueError" for op in pool_ops)
    assert any(op["op"] == "get_cached_block" and op["result"] is not None for op in pool_ops)
    assert any(
        len(set(op["contents"]) - {None}) < len([c for c in op["contents"] if c]) for op in pool_ops
    )
    manager_ops = [op for case in parts.load("kv_cache_manager") for op in case["ops"]]
    assert any(op["op"] == "admit" and op["result"] is None for op in manager_ops)
    assert any(op["op"] == "extend" and op["result"] is None for op in manager_ops)
    assert any(op["op"] == "lookup" and op["result"] for op in manager_ops)
    assert any(max(op["refs"]) > 1 for op in manager_ops)


@pytest.mark.slow
def test_a_pool_that_frees_in_reverse_is_told_operation_field_and_values() -> None:
    class Reversed(BlockPool):
        def free_blocks(self, ordered_blocks: Any) -> None:
            super().free_blocks(reversed(list(ordered_blocks)))

    said = [parts.replay_block_pool(case, Reversed) for case in parts.load("block_pool")]
    first = next(words for words in said if words)
    assert "free_blocks(" in first
    assert ": free\n  expected  [" in first
    said = [
        parts.replay_kv_cache_manager(case, pool_class=Reversed)
        for case in parts.load("kv_cache_manager")
    ]
    assert any(said)


def test_a_queue_whose_counter_drifts_is_told() -> None:
    from mini_vllm.block_pool import FreeKVCacheBlockQueue

    class Drifting(FreeKVCacheBlockQueue):
        def remove(self, block: KVCacheBlock) -> None:
            super().remove(block)
            self.num_free_blocks += 1

    said = [parts.replay_free_queue(case, Drifting) for case in parts.load("free_queue")]
    assert any("num_free_blocks is" in words for words in said)


@pytest.mark.slow
@pytest.mark.parametrize("attend", [paged_attention, paged_attention_reference])
def test_attention_answers_what_the_real_kernel_answers(attend) -> None:
    """float32; outputs reach 3.6, and two orders of adding leave them about 1e-6 apart."""
    for case in parts.load("paged_attention"):
        inputs = attention.make(case)
        difference = np.abs(attend(*inputs) - attention.output_of(case)).max()
        assert difference < 1e-5, case["what"]


@pytest.mark.slow
def test_every_short_stream_stops_where_the_real_check_stops_it() -> None:
    cases = parts.load("check_stop")
    differ = [words for case in cases if (words := parts.replay_check_stop(case))]
    assert not differ, differ[0]
    assert len(cases) == 39 * 4 * 5 * (2 + 3 + 4 + 5)
    assert {case["reason"] for case in cases} == {"stop", "length", None}


def test_the_sampler_keeps_the_tokens_the_real_one_keeps() -> None:
    cases = parts.load("sampling_masks")
    for case in cases:
        logits = np.array(case["logits"])
        masked = _apply_min_p(logits, case["min_p"])
        masked = _apply_top_p(_apply_top_k(masked, case["top_k"]), case["top_p"])
        assert np.flatnonzero(masked > -np.inf).tolist() == case["kept"], case
    tied = [c for c in cases if 0 < c["top_k"] < len(c["kept"]) and c["top_p"] == 1.0]
    assert tied, "no case keeps more than k tokens because of a tie"


def dispatch(case: Case, num_tokens: int, uniform: bool) -> list[Any]:
    """The rule of `vllm/v1/cudagraph_dispatcher.py:239` `CudagraphDispatcher.dispatch`, no LoRA.

    Pad to the next captured size. A separate decode routine serves uniform batches first; what
    has no full graph falls back to a piecewise one of any number of requests, then to none.
    """
    decode, _, mixed = {
        "NONE": ("NONE", "", "NONE"),
        "PIECEWISE": ("PIECEWISE", "", "PIECEWISE"),
        "FULL": ("FULL", "", "FULL"),
        "FULL_DECODE_ONLY": ("FULL", "separate", "NONE"),
        "FULL_AND_PIECEWISE": ("FULL", "separate", "PIECEWISE"),
    }[case["mode"]]
    eager = ["NONE", num_tokens, None, False]
    if num_tokens > case["capture_sizes"][-1] or case["mode"] == "NONE":
        return eager
    padded = next(size for size in case["capture_sizes"] if size >= num_tokens)
    num_reqs = min(padded, case["max_num_seqs"])
    if decode != mixed and uniform and padded <= case["max_num_seqs"]:
        return ["FULL", padded, num_reqs, True]
    if mixed == "FULL":
        return ["FULL", padded, num_reqs, False]
    return ["PIECEWISE", padded, None, False] if mixed == "PIECEWISE" else eager


def test_batches_are_dispatched_to_the_graphs_of_the_rule() -> None:
    seen = set()
    for case in parts.load("cudagraph_dispatcher"):
        for num_tokens, uniform, *found in case["calls"]:
            assert found == dispatch(case, num_tokens, uniform), (case["mode"], num_tokens, uniform)
            seen.add((case["mode"], uniform, found[0]))
    assert len(seen) >= 12


def test_every_dispatched_descriptor_was_captured() -> None:
    for case in parts.load("cudagraph_dispatcher"):
        for *_, mode, num_tokens, num_reqs, uniform in case["calls"]:
            if mode != "NONE":
                assert [num_tokens, num_reqs, uniform] in case["keys"][mode]


def resolve_block_sizes(case: Case) -> Any:
    """The rule of `vllm/v1/core/kv_cache_utils.py:571` `resolve_kv_cache_block_sizes`."""
    groups = case["groups"]
    if len(groups) == 1:
        return [case["block_size"] * case["dcp"] * case["pcp"]] * 2
    if case["dcp"] > 1 or case["pcp"] > 1:
        return "ValueError"
    scheduler = math.lcm(*groups)
    if not case["caching"] or (case["mamba"] and groups[-1] != case["block_size"]):
        return [scheduler, scheduler]
    hashing = case["hash_block_size"] or math.gcd(*groups)
    return "ValueError" if any(size % hashing for size in groups) else [scheduler, hashing]


def test_block_sizes_of_several_groups_follow_the_rule() -> None:
    cases = parts.load("block_sizes")
    for case in cases:
        assert case["result"] == resolve_block_sizes(case), case
    assert [48, 16] in [case["result"] for case in cases]


def test_capacity_is_memory_over_page_size_and_layers() -> None:
    for case in parts.load("kv_capacity"):
        page = 2 * case["block_size"] * case["num_kv_heads"] * case["head_size"]
        page *= case["dtype_bytes"]
        num_blocks = case["available_memory"] // page // case["num_layers"]
        blocks_per_request = math.ceil(case["max_model_len"] / case["block_size"])
        fits = min(num_blocks * case["block_size"], case["max_model_len"])
        assert case["page_size_bytes"] == page
        assert case["num_blocks"] == num_blocks
        assert case["max_memory_usage_bytes"] == blocks_per_request * page
        assert case["max_concurrency"] == num_blocks / blocks_per_request
        assert case["max_model_len_that_fits"] == fits


def test_async_plans_waste_a_step_on_eos_and_none_on_a_cap_known_ahead() -> None:
    wasted = {"early EOS": 0, "bound": 0}
    for case in parts.load("async_plans"):
        scheduled: dict[str, int] = {}
        for step in case["steps"]:
            for request_id, count in step["num_scheduled_tokens"].items():
                scheduled[request_id] = scheduled.get(request_id, 0) + count
        for request in case["requests"]:
            request_id, prompt = request["request_id"], len(request["prompt_token_ids"])
            said = len(case["outputs"][request_id])
            at_bound = said == request["max_tokens"]
            at_bound = at_bound or prompt + said == case["config"]["max_model_len"]
            extra = 0 if at_bound else 1
            assert scheduled[request_id] == prompt + said - 1 + extra, (request_id, case)
            wasted["bound" if at_bound else "early EOS"] += 1
    assert min(wasted.values()) >= 20


def test_async_plans_count_the_tokens_in_flight_as_placeholders() -> None:
    most = 0
    for case in parts.load("async_plans"):
        for step in case["steps"]:
            for num_tokens, num_computed, placeholders in step["running"].values():
                assert num_computed <= num_tokens + placeholders
                most = max(most, placeholders)
    assert most == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"junk", "damaged gzip"),
        (gzip.compress(b"{", mtime=0), "not JSON"),
        (gzip.compress(b'{"upstream": {"version": "0.9.0"}}', mtime=0), "not a recording of"),
    ],
)
def test_a_part_that_is_no_recording_of_the_pin_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "check_stop.jsonl.gz").write_bytes(content)
    with pytest.raises(recording.RecordingError, match=message):
        parts.load("check_stop", tmp_path)


ELSEWHERE = (
    "attention_selector", "cudagraph_modes", "expert_backends", "moe", "nixl_pair",
    "quantization_layouts", "sampler",
)  # fmt: skip
"""Recorded again by the tests named for them."""


AGAIN = [
    name
    for name, part in record.PARTS.items()
    if part.group == "parts" and part.needs == "upstream" and name not in ELSEWHERE
]


@pytest.mark.upstream
@pytest.mark.parametrize("name", AGAIN)
def test_the_parts_are_what_the_real_code_still_says(name: str) -> None:
    from conformance import real

    if name.startswith("harmony") and not (harmony_vocabulary.VARIABLE in os.environ or NPM):
        pytest.skip("needs npm, which brings harmony's vocabulary")
    real.model_config()
    kept = parts.load(name)
    for index, case in enumerate(itertools.islice(record.lines_of(name), 1, None)):
        assert case == kept[index], index

"""Block tables, hits and allocation: invariants B1-B3, B5-B8, B11-B15 and the shadow cache K1."""

from __future__ import annotations

import pytest

from mini_vllm import EngineParts
from mini_vllm.config import SamplingParams
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.models.toy import ToyModel
from mini_vllm.request import Request
from mini_vllm.tests.support import (
    Moment,
    Scenario,
    ScenarioRequest,
    TinyTokenizer,
    drive,
    for_all,
    for_scenarios,
)
from mini_vllm.tests.watching import (
    Call,
    ShadowModel,
    WatchedKVCacheManager,
    drive_with_shadow,
    kv_state,
    watch_calls,
)


def tables_of(kv: KVCacheManager) -> dict[str, list[int]]:
    return {r: [block.block_id for block in table] for r, table in kv.req_to_blocks.items()}


# ------------------------------------------------------------------ after every call


@pytest.mark.slow
@for_scenarios(60)
def test_b1_b6_the_queue_holds_exactly_the_unreferenced_blocks_after_every_call(scenario: Scenario):
    def watch(call: Call) -> None:
        pool = call.kv.block_pool
        queued = [block.block_id for block in pool.free_queue.get_all_free_blocks()]
        unreferenced = [b.block_id for b in pool.blocks if b.ref_cnt == 0 and not b.is_null]
        assert sorted(queued) == unreferenced
        assert pool.get_num_free_blocks() == len(queued)

    watch_calls(scenario, watch)


@pytest.mark.slow
@for_scenarios(60)
def test_b2_a_table_only_grows_at_its_end_until_it_is_freed(scenario: Scenario):
    def watch(call: Call) -> None:
        request_id, before, after = call.request.request_id, call.before["tables"], call.kv
        if call.name == "free":
            assert call.kv.get_block_ids(request_id) == []
        for owner, table in before.items():
            if call.name == "free" and owner == request_id:
                continue
            grown = after.get_block_ids(owner)
            assert grown[: len(table)] == table
            assert owner == request_id or grown == table, "a call changed somebody else's table"

    watch_calls(scenario, watch)


@pytest.mark.slow
@for_scenarios(60, caching=(True,))
def test_b3_a_block_carries_a_hash_only_once_this_step_fills_it(scenario: Scenario):
    def check(moment: Moment) -> None:
        scheduled = moment.output.num_scheduled_tokens if moment.phase == "scheduled" else {}
        for request in moment.engine.scheduler.running:
            filled = request.num_computed_tokens + scheduled.get(request.request_id, 0)
            for i, block in enumerate(moment.kv.get_blocks(request.request_id)):
                is_full = (i + 1) * scenario.block_size <= filled
                assert (block.block_hash is not None) == is_full

    drive(scenario, check)


@pytest.mark.slow
@for_scenarios(60)
def test_b5_the_null_block_is_in_no_table_and_carries_no_hash(scenario: Scenario):
    def watch(call: Call) -> None:
        null = call.kv.block_pool.null_block
        assert (null.block_id, null.ref_cnt, null.block_hash) == (0, 0, None)
        assert all(0 not in table for table in tables_of(call.kv).values())
        used = sum(block.ref_cnt > 0 for block in call.kv.block_pool.blocks)
        assert abs(call.kv.usage - used / (scenario.num_blocks - 1)) < 1e-12

    watch_calls(scenario, watch)


@pytest.mark.slow
@for_scenarios(60)
def test_b7_ref_cnt_is_the_number_of_live_tables_that_hold_the_block(scenario: Scenario):
    def watch(call: Call) -> None:
        held = [block_id for table in tables_of(call.kv).values() for block_id in table]
        for block in call.kv.block_pool.blocks:
            assert block.ref_cnt == held.count(block.block_id)
        for table in tables_of(call.kv).values():
            assert len(set(table)) == len(table), "a table holds a block twice"

    watch_calls(scenario, watch)


@pytest.mark.slow
@for_scenarios(60)
def test_b8_index_and_hashes_agree_after_every_call(scenario: Scenario):
    def watch(call: Call) -> None:
        pool = call.kv.block_pool
        hashed = {(b.block_hash, b.block_id) for b in pool.blocks if b.block_hash is not None}
        index = pool.cached_block_hash_to_block
        assert hashed == {(block_hash, i) for block_hash, held in index.items() for i in held}
        assert scenario.enable_prefix_caching or not hashed

    watch_calls(scenario, watch)


@pytest.mark.slow
@for_scenarios(60, caching=(False,))
def test_b11_without_caching_no_two_tables_share_a_block(scenario: Scenario):
    def watch(call: Call) -> None:
        held = [block_id for table in tables_of(call.kv).values() for block_id in table]
        assert len(held) == len(set(held))

    watch_calls(scenario, watch)


@pytest.mark.slow
@for_all(
    lambda st: st.lists(st.integers(0, 3), min_size=1, max_size=20).map(tuple),
    lambda st: st.integers(1, 6),
    lambda st: st.integers(1, 8),
    max_examples=150,
)
def test_b11_two_equal_requests_share_hits_only_and_never_their_last_block(
    prompt, block_size, max_tokens
):
    """Blocks that become equal while both requests run stay two blocks."""
    kv = KVCacheManager(200, block_size)
    params = SamplingParams(max_tokens=max_tokens)
    first, second = Request("a", prompt, params), Request("b", prompt, params)
    for request in (first, second):
        hits, num_cached = kv.get_computed_blocks(request)
        request.num_computed_tokens = num_cached
        kv.allocate_slots(request, request.num_tokens - num_cached, hits)
        request.num_computed_tokens = request.num_tokens
    num_shared = (len(prompt) - 1) // block_size
    for token in range(max_tokens):
        a, b = kv.get_block_ids("a"), kv.get_block_ids("b")
        assert a[:num_shared] == b[:num_shared]
        assert not set(a[num_shared:]) & set(b[num_shared:])
        for request in (first, second):
            request.append_output_token(token % 4)
            kv.allocate_slots(request, 1)
            request.num_computed_tokens += 1


@pytest.mark.slow
@for_scenarios(60, caching=(True,))
def test_b12_nobody_writes_into_an_adopted_block(scenario: Scenario):
    num_adopted: dict[str, int] = {}

    def watch(call: Call) -> None:
        if call.name == "free":
            num_adopted.pop(call.request.request_id, None)
        elif call.name == "allocate_slots" and call.result is not None:
            num_adopted.setdefault(call.request.request_id, len(call.adopted))

    def check(moment: Moment) -> None:
        if moment.phase != "scheduled":
            return
        for request in moment.output.scheduled_requests:
            hits = num_adopted[request.request_id] * scenario.block_size
            assert request.num_computed_tokens >= hits

    watch_calls(scenario, watch, check)


@pytest.mark.slow
@for_scenarios(60)
def test_b13_hits_are_whole_blocks_and_never_the_last_token(scenario: Scenario):
    def watch(call: Call) -> None:
        if call.name != "get_computed_blocks":
            return
        blocks, num_cached = call.result
        assert num_cached == len(blocks) * scenario.block_size
        assert num_cached <= call.request.num_tokens - 1
        assert kv_state(call.kv) == call.before, "a lookup changed something"

    watch_calls(scenario, watch)


@pytest.mark.slow
@for_scenarios(90)
def test_b14_a_refused_allocation_changes_nothing(scenario: Scenario):
    def watch(call: Call) -> None:
        if call.name == "allocate_slots" and call.result is None:
            assert kv_state(call.kv) == call.before

    watch_calls(scenario, watch)


def test_b14_a_refusal_with_hits_in_the_free_queue_keeps_the_queue_order():
    """The two hits are free, so they count as consumed: 3 blocks wanted, 2 free, None."""
    kv = KVCacheManager(4, 4)
    first = Request("a", range(8), SamplingParams())
    kv.allocate_slots(first, 8)
    kv.free(first)
    other = Request("b", range(50, 54), SamplingParams())
    kv.allocate_slots(other, 4)  # takes block 3, the only one without a prefix
    again = Request("c", [*range(8), 9], SamplingParams())
    hits, num_cached = kv.get_computed_blocks(again)
    assert num_cached == 8
    before = kv_state(kv)
    again.num_computed_tokens = num_cached
    assert kv.allocate_slots(again, 1, hits) is None
    assert kv_state(kv) == before


@pytest.mark.slow
@for_scenarios(60)
def test_b15_a_table_has_no_block_more_than_its_tokens_need(scenario: Scenario):
    def check(moment: Moment) -> None:
        scheduled = moment.output.num_scheduled_tokens if moment.phase == "scheduled" else {}
        for request in moment.engine.scheduler.running:
            slots = request.num_computed_tokens + scheduled.get(request.request_id, 0)
            table = moment.kv.get_block_ids(request.request_id)
            assert len(table) == -(-slots // scenario.block_size)

    drive(scenario, check)


# ------------------------------------------------------------------ K1


@pytest.mark.slow
@for_scenarios(180)
def test_k1_every_computed_position_reads_back_its_own_prefix(scenario: Scenario):
    drive_with_shadow(scenario)


def test_k1_a_resumed_request_rereads_its_outputs_from_blocks_it_lost_and_found():
    """Preemption frees the blocks with their hashes; resuming adopts them with outputs inside."""
    scenario = _tight_pair()
    engine = scenario.engine()
    hits_of_resumed: list[int] = []
    shadow = ShadowModel(engine.model)
    engine.model = shadow

    def check(moment: Moment) -> None:
        shadow.output = moment.output
        if moment.phase == "scheduled":
            hits_of_resumed.extend(
                moment.output.num_cached_tokens[r] for r in moment.output.scheduled_resumed_req_ids
            )

    requests = drive(scenario, check, engine)
    assert sum(r.num_preemptions for r in requests.values()) >= 1
    assert hits_of_resumed and max(hits_of_resumed) > 0


def _tight_pair() -> Scenario:
    """Two different prompts whose outputs outgrow the pool together."""
    return Scenario(
        (
            ScenarioRequest(0, (1, 2, 3, 4, 5, 6), 12, ignore_eos=True),
            ScenarioRequest(0, (6, 5, 4, 3, 2, 1), 12, ignore_eos=True),
        ),
        block_size=2,
        spare_blocks=4,
        spare_budget=20,
    )


# ------------------------------------------------------------------ worked cases


def test_a_hit_stops_at_the_first_miss():
    kv = KVCacheManager(20, 2)
    donor = Request("a", [1, 2, 3, 4, 5, 6, 7], SamplingParams())
    kv.allocate_slots(donor, 7)
    probe = Request("b", [1, 2, 9, 9, 5, 6, 7], SamplingParams())
    blocks, num_cached = kv.get_computed_blocks(probe)
    assert ([b.block_id for b in blocks], num_cached) == ([1], 2)


def test_a_table_is_freed_tail_first():
    """The end of a sequence is evicted before its start."""
    kv = KVCacheManager(5, 2)
    request = Request("a", range(6), SamplingParams())
    kv.allocate_slots(request, 6)
    kv.free(request)
    queue = kv.block_pool.free_queue.get_all_free_blocks()
    assert [b.block_id for b in queue] == [4, 3, 2, 1]


def test_freeing_a_request_without_blocks_is_a_no_op():
    kv = KVCacheManager(5, 2)
    before = kv_state(kv)
    kv.free(Request("nobody", [1], SamplingParams()))
    assert kv_state(kv) == before


def test_eager_caching_stops_at_the_tokens_that_exist():
    """With 5 of 8 tokens scheduled only one block of 4 is full; never beyond num_tokens."""
    kv = KVCacheManager(9, 4)
    request = Request("a", range(8), SamplingParams())
    kv.allocate_slots(request, 5)
    assert [b.block_hash is not None for b in kv.get_blocks("a")] == [True, False]


def test_admission_requires_room_for_the_whole_sequence():
    """The first chunk of 2 would fit into 2 free blocks of 4, the whole 12 tokens would not."""
    kv = KVCacheManager(3, 4)
    assert not kv.full_sequence_fits(Request("a", range(12), SamplingParams()), [])
    assert kv.full_sequence_fits(Request("b", range(8), SamplingParams()), [])


def test_watching_the_manager_changes_no_decision():
    """The probe of these tests is passive: same tables with and without it."""
    scenario = _tight_pair()
    seen: list[list] = [[], []]
    for log, parts in zip(
        seen, (None, EngineParts(kv_cache_manager=WatchedKVCacheManager)), strict=True
    ):
        engine = scenario.engine(ToyModel(8), TinyTokenizer(), parts)
        drive(scenario, lambda m, log=log: log.append(tables_of(m.kv)), engine)
    assert seen[0] == seen[1]

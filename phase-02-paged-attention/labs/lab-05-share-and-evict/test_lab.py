"""What lab 02-05 pins: who shares, who is evicted, and that a refusal leaves no trace.

Most scenarios run twice: with the engine's own manager, which only your driver can get wrong, and
with yours.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import pytest

import mini_vllm
from conformance import parts
from conformance.replay import first_difference, mini_scheduler
from labkit import same
from mini_vllm import EngineParts, LLMEngine, Request, SamplingParams

RECORDINGS = parts.FOLDER.parent
both = pytest.mark.parametrize("whose", ["engine", "yours"], scope="module")
A = list(range(100, 132))  # 32 tokens: 8 blocks of 4


def manager(lab, whose: str, num_blocks: int, block_size: int = 4, caching: bool = True):
    cls = lab.KVCacheManager if whose == "yours" else mini_vllm.KVCacheManager
    return cls(num_blocks, block_size, caching)


def table(kv, request) -> list[int]:
    return kv.get_block_ids(request.request_id)


def queued(kv) -> list[int]:
    return [block.block_id for block in kv.block_pool.free_queue.get_all_free_blocks()]


def cached_ids(kv) -> list[int]:
    return [block.block_id for block in kv.block_pool.blocks if block.block_hash is not None]


def state(kv) -> tuple:
    """Everything that a refused or read-only call must leave as it was."""
    tables = {
        name: [block.block_id for block in blocks] for name, blocks in kv.req_to_blocks.items()
    }
    refs = [block.ref_cnt for block in kv.block_pool.blocks]
    return queued(kv), refs, cached_ids(kv), tables


@both
def test_first_request_populates_cold_cache(lab, whose):
    kv = manager(lab, whose, 20)
    request, num_cached = lab.prefill(kv, A)
    same(num_cached, 0, "the cache is empty: no token of the first prompt is cached")
    same(
        table(kv, request), [1, 2, 3, 4, 5, 6, 7, 8], "32 tokens in blocks of 4: 8 blocks in order"
    )
    same(lab.ref_counts(kv, request), [1] * 8, "ref_cnt along the table: one owner each")
    same(cached_ids(kv), [1, 2, 3, 4, 5, 6, 7, 8], "all 8 blocks are full, so all have a hash")
    same(request.num_computed_tokens, 32, "num_computed_tokens after the prefill")


@both
def test_identical_prompt_shares_all_but_the_tail_block(lab, whose):
    kv = manager(lab, whose, 20)
    first, _ = lab.prefill(kv, A)
    second, num_cached = lab.prefill(kv, A)
    same(
        num_cached,
        28,
        "the same 32 tokens: 28 cached. Token 32 has to be computed, for its logits, and a hit is "
        "whole blocks",
    )
    same(
        table(kv, second),
        [1, 2, 3, 4, 5, 6, 7, 9],
        "seven blocks of the first request and one of its own, 9: a table of 32 / 4 = 8 blocks",
    )
    same(lab.ref_counts(kv, second), [2, 2, 2, 2, 2, 2, 2, 1], "ref_cnt along B's table")
    same(lab.ref_counts(kv, first), [2, 2, 2, 2, 2, 2, 2, 1], "ref_cnt along A's table")
    same(second.num_computed_tokens, 32, "B's computed tokens: 28 found and 4 computed")
    third, _ = lab.prefill(kv, A)
    same(
        lab.ref_counts(kv, third),
        [3, 3, 3, 3, 3, 3, 3, 1],
        "ref_cnt along C's table: three owners count three, or the second to leave frees the block "
        "under the third",
    )
    assert first.request_id != second.request_id, (
        f"two requests need two ids, or the second grows the table of the first; both are "
        f"{first.request_id!r}"
    )


@both
def test_diverging_prompt_shares_only_the_common_prefix(lab, whose):
    kv = manager(lab, whose, 20)
    lab.prefill(kv, A)
    other, num_cached = lab.prefill(kv, A[:16] + list(range(200, 212)) + A[28:])
    same(num_cached, 16, "16 common tokens, then others: 4 blocks hit")
    same(
        lab.ref_counts(kv, other),
        [2, 2, 2, 2, 1, 1, 1, 1],
        "the last 4 tokens are the same as A's last 4, but what comes before them differs, so "
        "their keys and values differ: no sharing after the first miss",
    )
    same(table(kv, other), [1, 2, 3, 4, 9, 10, 11, 12], "the table of the diverging prompt")


@both
def test_free_order_evicts_tails_before_shared_prefix(lab, whose):
    kv = manager(lab, whose, 10)
    first, _ = lab.prefill(kv, A)
    second, _ = lab.prefill(kv, A)
    same(queued(kv), [], "pool of 10: null block, 8 of A, 1 of B. Nothing is free")
    kv.free(first)
    same(queued(kv), [8], "A is done, and only its tail is free: the other seven are B's as well")
    kv.free(second)
    same(
        queued(kv),
        [8, 9, 7, 6, 5, 4, 3, 2, 1],
        "B is done: its table is freed last block first, so the head of the prefix stands at the "
        "back, where eviction comes last",
    )
    stranger, _ = lab.prefill(kv, list(range(300, 308)))
    same(table(kv, stranger), [8, 9], "a stranger with 8 tokens gets the two tails")
    hits, num_cached = kv.get_computed_blocks(Request("look", A, SamplingParams()))
    same(
        (len(hits), num_cached),
        (7, 28),
        "(blocks, tokens) that a third request with the same prompt would hit: all that B did",
    )
    survivors = []
    for start in range(400, 428, 4):
        lab.prefill(kv, list(range(start, start + 4)))
        hits, _ = kv.get_computed_blocks(Request("look", A, SamplingParams()))
        survivors.append(len(hits))
    same(
        survivors,
        [6, 5, 4, 3, 2, 1, 0],
        "blocks of the prefix that can still be hit, as seven more strangers take one block each: "
        "it shrinks from its end, one by one, and its head goes last",
    )


@both
def test_cached_free_blocks_are_revived_not_recomputed(lab, whose):
    kv = manager(lab, whose, 9)
    first, _ = lab.prefill(kv, A)
    kv.free(first)
    same(kv.usage, 0.0, "usage with nobody running, though all 8 blocks are cached")
    again, num_cached = lab.prefill(kv, A)
    same(num_cached, 28, "seven free blocks are still known: their 28 tokens are not recomputed")
    same(
        table(kv, again),
        [1, 2, 3, 4, 5, 6, 7, 8],
        "the seven come back out of the queue, and block 8, which was in front, is the new tail",
    )
    same(lab.ref_counts(kv, again), [1] * 8, "ref_cnt along the table")
    same(queued(kv), [], "nothing is left in the queue")


@both
def test_caching_disabled_means_no_sharing(lab, whose):
    kv = manager(lab, whose, 20, caching=False)
    first, _ = lab.prefill(kv, A)
    second, num_cached = lab.prefill(kv, A)
    same(num_cached, 0, "cached tokens with caching off")
    same(
        (table(kv, first), table(kv, second)),
        (list(range(1, 9)), list(range(9, 17))),
        "two tables without a common block",
    )
    same(cached_ids(kv), [], "and no block has a hash")


@both
def test_hit_cap_by_length(lab, whose):
    expected = {1: 0, 4: 0, 5: 4, 28: 24, 29: 28, 30: 28, 31: 28, 32: 28, 33: 32, 36: 32, 37: 36}
    got = {}
    for length in expected:
        kv = manager(lab, whose, 30)
        prompt = list(range(length))
        lab.prefill(kv, prompt)
        got[length] = lab.prefill(kv, prompt)[1]
    same(
        got,
        expected,
        "{length: tokens cached when the same prompt comes twice}, blocks of 4: the largest "
        "multiple of 4 below the length",
    )


@both
def test_oom_with_hits_leaves_no_trace(lab, whose):
    kv = manager(lab, whose, 11)
    common = [0] * 4 + [1] * 4 + [2] * 4
    lab.prefill(kv, common)
    longer, num_cached = lab.prefill(kv, common + [3] * 12)
    same(num_cached, 12, "the second prompt begins with the first")
    hits = list(kv.get_blocks(longer.request_id))
    kv.free(longer)
    lab.prefill(kv, [7] * 8)
    same(len(queued(kv)), 5, "free: 10 blocks less 3 resident of the first and 2 of the third")
    before = state(kv)
    with pytest.raises(RuntimeError) as refused:
        lab.prefill(kv, common + [3] * 12 + [4] * 12)
        pytest.fail(
            "3 blocks are missing and 3 hits are free: that takes 6 free blocks, and there are 5\n"
            f"expected RuntimeError\ncame     no error, queue {queued(kv)}"
        )
    same(
        state(kv),
        before,
        f"36 tokens, 24 of them hit ({refused.value}): 3 new blocks are needed, and 3 of the 6 "
        "hits are free and would leave the queue. 6 > 5, so no, and (queue, ref_cnts, hashed, "
        "tables) are as before",
    )
    same([block.ref_cnt for block in hits], [1, 1, 1, 0, 0, 0], "ref_cnt of the six hit blocks")
    same(len(queued(kv)), 5, "free blocks after the refusal")


@both
def test_evict_order_matches_upstream(lab, whose):
    kv = manager(lab, whose, 11, block_size=16)
    first, _ = lab.prefill(kv, list(range(5 * 16 + 7)))
    second, _ = lab.prefill(kv, list(range(5 * 16 + 7, 8 * 16 + 7)))
    same(len(queued(kv)), 1, "6 blocks and 3 blocks of 10: one is free")
    kv.free(first)
    kv.free(second)
    same(
        queued(kv),
        [10, 6, 5, 4, 3, 2, 1, 9, 8, 7],
        "each request's blocks reversed, the requests in the order in which they ended",
    )
    third, num_cached = lab.prefill(kv, list(range(2 * 16 + 3)))
    same((table(kv, third), num_cached), ([1, 2, 10], 32), "(table, cached) of the third")
    same(len(queued(kv)), 7, "free blocks at the end")


@both
def test_decode_growth_returns_empty_list_not_none(lab, whose):
    kv = manager(lab, whose, 4)
    request, _ = lab.prefill(kv, [1, 2, 3, 4, 5, 6])
    got, cached = [], []
    for token in (7, 8, 9):
        got.append([block.block_id for block in lab.decode(kv, request, token)])
        cached.append(cached_ids(kv))
    same(
        got,
        [[], [], [3]],
        "new blocks for tokens 7, 8 and 9, blocks of 4: the last block has room for two, then a "
        "third is needed. [] is a success without a new block, None would be a refusal",
    )
    same(
        cached,
        [[1], [1, 2], [1, 2]],
        "blocks with a hash after tokens 7, 8 and 9: token 8 fills block 2, and it is known when "
        "its slot is asked for, so the block is indexed with it and not a step later",
    )
    same(request.num_computed_tokens, 9, "num_computed_tokens after three more tokens")
    for token in (10, 11, 12):
        lab.decode(kv, request, token)
    before = state(kv)
    with pytest.raises(RuntimeError) as refused:
        got = lab.decode(kv, request, 13)
        pytest.fail(
            "no block is left for the token: allocate_slots says None\n"
            f"expected RuntimeError\ncame     {got!r}"
        )
    same(
        (state(kv), request.num_computed_tokens, request.num_tokens),
        (before, 12, 13),
        f"token 13 needs a fourth block and the pool has three ({refused.value}): the manager and "
        "the counter are as before; the token is known and not computed",
    )


def test_a_refused_prompt_resets_its_counter(lab):
    seen = []

    class Refusing:
        """A manager that finds 8 cached tokens and then has no room."""

        def get_computed_blocks(self, request):
            seen.append(request)
            return ["two", "hits"], 8

        def allocate_slots(self, request, num_new_tokens, new_computed_blocks=None):
            seen.append((request.num_computed_tokens, num_new_tokens, new_computed_blocks))

    with pytest.raises(RuntimeError) as refused:
        got = lab.prefill(Refusing(), list(range(20)))
        pytest.fail(
            f"the manager said None: the blocks do not fit\nexpected RuntimeError\ncame     {got!r}"
        )
    same(
        seen[1],
        (8, 12, ["two", "hits"]),
        "the manager is asked with the counter at 8, for the other 12 tokens, and with the hits",
    )
    same(
        seen[0].num_computed_tokens,
        0,
        f"refused ({refused.value}): the request will be tried again, and must not look as if 8 of "
        "its tokens were computed",
    )


def test_the_hit_ends_at_the_first_miss(lab):
    asked = []
    missing: set[int] = set()

    class Holes(mini_vllm.BlockPool):
        """A pool that has lost the contents of some blocks, and notes each lookup."""

        def get_cached_block(self, block_hash):
            asked.append(block_hash)
            block = super().get_cached_block(block_hash)
            return None if block is not None and block.block_id in missing else block

    kv = lab.KVCacheManager(12, 4, block_pool=Holes)
    same(len(kv.get_computed_blocks(Request("look", A[:17], SamplingParams()))[0]), 0, "no hits")
    same(
        len(asked), 1, "lookups in an empty pool: the first one decides, the rest need not be made"
    )
    lab.prefill(kv, A[:17])
    for lost, expected in (([], [1, 2, 3, 4]), ([3], [1, 2]), ([1], []), ([4], [1, 2, 3])):
        missing.clear()
        missing.update(lost)
        hits, num_cached = kv.get_computed_blocks(Request("look", A[:17], SamplingParams()))
        same(
            ([block.block_id for block in hits], num_cached),
            (expected, 4 * len(expected)),
            f"17 tokens whose blocks of 4 are 1 to 4, of which {lost or 'none'} cannot be found. "
            "After a miss nothing counts: a sequence is read from its start",
        )


def test_a_lookup_changes_nothing(lab):
    kv = lab.KVCacheManager(10, 4)
    first, _ = lab.prefill(kv, A)
    kv.free(first)
    before = state(kv)
    request = Request("look", A, SamplingParams())
    for _ in range(2):
        hits, num_cached = kv.get_computed_blocks(request)
        same((len(hits), num_cached), (7, 28), "(blocks, tokens), each time one asks")
    same(
        state(kv),
        before,
        "(queue, ref_cnts, hashed, tables) after two lookups: the scheduler looks a waiting "
        "request up in every step until it is admitted, so a lookup must not take references",
    )


def test_evictable_hits_cost_free_blocks(lab):
    kv = lab.KVCacheManager(12, 4)
    first, _ = lab.prefill(kv, A)
    second, _ = lab.prefill(kv, A[:16])
    kv.free(first)
    request = Request("new", [*A, 1, 2, 3], SamplingParams())
    hits, _ = kv.get_computed_blocks(request)
    same(
        [block.ref_cnt for block in hits],
        [1, 1, 1, 0, 0, 0, 0, 0],
        "the hits: B still uses three, five are free",
    )
    for num_tokens, given, expected in ((35, hits, 1 + 5), (32, hits, 5), (35, hits[:3], 6)):
        same(
            kv.get_num_blocks_to_allocate("new", num_tokens, given),
            expected,
            f"free blocks that {num_tokens} tokens take with {len(given)} hits: blocks of 4 that "
            "are missing, plus the hits that are free now",
        )
    same(kv.get_num_blocks_to_allocate(second.request_id, 18, []), 1, "16 tokens held, 18 wanted")
    same(
        kv.get_num_blocks_to_allocate(second.request_id, 9, []),
        0,
        "the table has 4 blocks, 9 tokens need 3: nothing is missing, and no block comes back",
    )


def test_hits_are_touched_before_blocks_are_taken(lab):
    kv = lab.KVCacheManager(6, 4)
    first, _ = lab.prefill(kv, A[:16])
    kv.free(first)
    other, _ = lab.prefill(kv, [9] * 4)
    same((table(kv, other), queued(kv)), ([5], [4, 3, 2, 1]), "(table, queue) before the test")
    kv.free(other)
    request, num_cached = lab.prefill(kv, [*A[:16], 1])
    same(
        (table(kv, request), num_cached),
        ([1, 2, 3, 4, 5], 16),
        "block 4 is a hit and stands at the front of the queue. Whoever takes new blocks first "
        "gets it as a new block, and its content is lost while the table counts on it",
    )


def test_slots_beyond_the_known_tokens_are_not_indexed(lab):
    kv = lab.KVCacheManager(10, 4)
    request = Request("draft", [1, 2, 3, 4, 5, 6], SamplingParams())
    new_blocks = kv.allocate_slots(request, 12)
    same([block.block_id for block in new_blocks], [1, 2, 3], "slots for 12 tokens: three blocks")
    same(
        cached_ids(kv),
        [1],
        "6 tokens are known, so one block is full; the others hold drafts that may be rejected",
    )
    with pytest.raises(ValueError) as refused:
        got = kv.allocate_slots(request, 0)
        pytest.fail(f"slots for 0 tokens\nexpected ValueError\ncame     {got!r}")
    same(table(kv, request), [1, 2, 3], f"a call for 0 tokens is a mistake ({refused.value})")
    with pytest.raises(ValueError):
        got = lab.KVCacheManager(10, 4, False).allocate_slots(request, -1)
        pytest.fail(f"slots for -1 tokens\nexpected ValueError\ncame     {got!r}")


def test_free_forgets_the_table(lab):
    kv = lab.KVCacheManager(10, 4)
    request, _ = lab.prefill(kv, A[:10])
    kv.free(request)
    same((table(kv, request), kv.req_to_blocks), ([], {}), "(table, all tables) after free")
    same(queued(kv), [4, 5, 6, 7, 8, 9, 3, 2, 1], "tail first")
    kv.free(request)
    same(queued(kv), [4, 5, 6, 7, 8, 9, 3, 2, 1], "freed once more: it has nothing to give back")
    kv = lab.KVCacheManager(10, 4)
    request = Request("early", A[:8], SamplingParams())
    kv.allocate_slots(request, 8)
    kv.free(request)
    same(
        cached_ids(kv),
        [1, 2],
        "freed before its counter was moved on: free forgets no hash. Whoever withdraws a request "
        "from a step says so with forget_uncomputed",
    )


def test_a_block_is_hashed_once(lab, monkeypatch):
    hashed = []

    def counting(parent_hash, token_ids):
        hashed.append(list(token_ids))
        return mini_vllm.hash_block_tokens(parent_hash, token_ids)

    monkeypatch.setattr(lab, "hash_block_tokens", counting)
    kv = lab.KVCacheManager(20, 4)
    request, _ = lab.prefill(kv, A)
    for token in range(8):
        kv.get_computed_blocks(request)
        lab.decode(kv, request, token)
    same(
        len(hashed),
        10,
        "blocks hashed for 32 + 8 tokens in blocks of 4, looked up and grown 8 times. Hashed anew "
        "at each call, a request of n blocks costs n per token and n x n in its life",
    )
    kv.free(request)
    kv.get_computed_blocks(request)
    same(len(hashed), 10, "blocks hashed once it was preempted and looked up again: none are added")
    off = lab.KVCacheManager(20, 4, enable_caching=False)
    request, _ = lab.prefill(off, A)
    lab.decode(off, request, 1)
    same(len(hashed), 10, "blocks hashed after another request with caching off: none are added")


def test_no_call_lists_the_free_queue(lab, monkeypatch):
    kv = lab.KVCacheManager(40, 4)
    first, _ = lab.prefill(kv, A)
    kv.free(first)
    listed = []

    class Listed(list):
        def __iter__(self):
            listed.append(self)
            return super().__iter__()

    kv.block_pool.blocks = Listed(kv.block_pool.blocks)
    monkeypatch.setattr(
        type(kv.block_pool.free_queue),
        "get_all_free_blocks",
        lambda queue: listed.append(queue) or [],
    )
    request = Request("new", [*A, 1], SamplingParams())
    hits, num_cached = kv.get_computed_blocks(request)
    kv.get_num_blocks_to_allocate("new", 33, hits)
    request.num_computed_tokens = num_cached
    kv.allocate_slots(request, 33 - num_cached, hits)
    kv.free(request)
    same(
        len(listed),
        0,
        "times the free queue or the whole pool was listed for one request: both are as long as "
        "the memory is large. Whether a block is queued is said by its ref_cnt (I1), how many "
        "are by the counter",
    )


def test_what_the_order_of_freeing_is_worth(lab, record_property):
    class HeadFirst(lab.KVCacheManager):
        def free(self, request):
            self.block_pool.free_blocks(self.req_to_blocks.pop(request.request_id, []))

    hit = []
    for manager_class in (lab.KVCacheManager, HeadFirst):
        kv = manager_class(10, 4)
        first, _ = lab.prefill(kv, A)
        kv.free(first)
        for start in (300, 400, 500):
            lab.prefill(kv, list(range(start, start + 4)))
        hit.append(kv.get_computed_blocks(Request("look", A, SamplingParams()))[1])
    same(
        hit,
        [24, 0],
        "[your order, head first]: tokens of the same prompt that hit after three strangers "
        "took a block each. One takes the block nobody used, two take cached ones: the last two of "
        "the prompt, or the first two, without which the other six are of no use",
    )
    record_property("measured.tail_first", hit[0])
    record_property("measured.head_first", hit[1])


def test_the_manager_agrees_with_the_real_one(lab):
    cases = parts.load("kv_cache_manager")
    differ = []
    for number, case in enumerate(cases):
        try:
            said = parts.replay_kv_cache_manager(case, lab.KVCacheManager)
        except Exception as error:
            said = _where_it_broke(case, lab.KVCacheManager, error)
        if said:
            at = int(re.search(r"operation (\d+)", said)[1])
            field = said.splitlines()[0].rpartition(": ")[2]
            field = "exception" if field.startswith("raised") or "raised" in said else field
            differ.append((at, number, f"{case['ops'][at]['op']} {field}", said))
    if not differ:
        return
    first = Counter(where for _, _, where, _ in differ)
    _, number, _, said = min(differ)
    case = cases[number]
    said = said.replace("\n  expected  ", "\nexpected ").replace("\n  got       ", "\ncame     ")
    pytest.fail(
        f"{len(cases) - len(differ)} of {len(cases)} recorded cases agree with the real "
        f"KVCacheManager; they part first in: "
        f"{', '.join(f'{where} {count}' for where, count in first.most_common())}. The shortest:\n"
        f"kv_cache_manager, recorded case {number} (num_blocks={case['num_blocks']}, "
        f"block_size={case['block_size']}, caching={case['enable_caching']}), {said}",
        pytrace=False,
    )


def _where_it_broke(case, manager_class, error: Exception) -> str:
    """The operation that raised `error`: the last one of the shortest prefix that raises."""
    for count in range(len(case["ops"]) + 1):
        try:
            parts.replay_kv_cache_manager(case | {"ops": case["ops"][:count]}, manager_class)
        except Exception:
            break
    op = case["ops"][max(count - 1, 0)]
    return (
        f"operation {max(count - 1, 0)}, {op['op']} r{op['request']} {op['argument'] or ''}: "
        f"raised {type(error).__name__}: {error}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["pressure", "prefix"])
def test_the_real_scheduler_plans_the_same_over_your_manager(lab, profile):
    difference = first_difference(
        RECORDINGS / f"{profile}.jsonl.gz",
        partial(mini_scheduler, kv_cache_manager=lab.KVCacheManager),
        select=lambda entry: entry["seed"] < 400,
    )
    assert difference is None, (
        "a scheduler over your manager decided otherwise than the real one over its own.\n"
        f"workload {difference.seed} of {profile}, step {difference.step}, {difference.field}\n"
        f"expected {difference.expected}\ncame     {difference.got}\n{difference.context}"
    )


def test_the_engine_serves_the_shipped_model_with_your_manager(lab):
    answers = {}
    for whose, engine_parts in (
        ("engine's", EngineParts()),
        ("yours", EngineParts(kv_cache_manager=lab.KVCacheManager)),
    ):
        engine = LLMEngine(num_blocks=12, block_size=8, parts=engine_parts)
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        prompts = ["A cached block is free until", "A cached block is free when", "The queue"] * 2
        results = engine.generate(prompts, params)
        answers[whose] = [result.outputs[0].token_ids for result in results]
    same(answers["yours"], answers["engine's"], "tokens of six requests, with preemptions")

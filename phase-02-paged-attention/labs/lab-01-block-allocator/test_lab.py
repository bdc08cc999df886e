"""What lab 02-01 pins: four invariants, and every recorded operation of the real queue and pool."""

from __future__ import annotations

import random
import re

import pytest

from conformance import parts
from labkit import same
from mini_vllm import EngineParts, LLMEngine, SamplingParams


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


def queued(pool) -> list[int]:
    return ids(pool.free_queue.get_all_free_blocks())


def queue_of(lab, count: int):
    blocks = [lab.KVCacheBlock(block_id) for block_id in range(count)]
    return lab.FreeKVCacheBlockQueue(blocks), blocks


def test_free_queue_fifo_and_count(lab):
    queue, blocks = queue_of(lab, 4)
    same(ids(queue.get_all_free_blocks()), [0, 1, 2, 3], "a new queue holds its blocks in order")
    same([queue.popleft().block_id for _ in range(2)], [0, 1], "popleft takes the front")
    queue.append(blocks[1])
    queue.append(blocks[0])
    same(ids(queue.get_all_free_blocks()), [2, 3, 1, 0], "append puts blocks at the back, in turn")
    same(queue.num_free_blocks, 4, "num_free_blocks after two out and two in")
    same([queue.popleft().block_id for _ in range(4)], [2, 3, 1, 0], "first in, first out")
    same(queue.num_free_blocks, 0, "num_free_blocks of an empty queue")
    with pytest.raises(ValueError) as empty:
        got = queue.popleft()
        pytest.fail(
            "nothing is queued, the front is the tail sentinel\n"
            f"expected ValueError\ncame     {got!r}"
        )
    same(queue.num_free_blocks, 0, f"after the refused popleft ({empty.value})")


@pytest.mark.parametrize("position", [0, 2, 4], ids=["first", "middle", "last"])
def test_free_queue_o1_middle_removal(lab, position):
    queue, blocks = queue_of(lab, 5)
    block = blocks[position]
    queue.remove(block)
    rest = [i for i in range(5) if i != position]
    same(ids(queue.get_all_free_blocks()), rest, f"the order after block {position} left")
    same(queue.num_free_blocks, 4, "num_free_blocks: a removal counts, wherever it happens")
    same(
        (block.prev_free, block.next_free),
        (None, None),
        "links of the removed block: both None says 'not queued'. Left as they are, a second "
        "remove would splice two blocks together that are no neighbours any more",
    )
    with pytest.raises(RuntimeError) as twice:
        queue.remove(block)
        pytest.fail(
            f"block {position} has left the queue: its links are None now, and a second remove is "
            "refused. Else its old neighbours are linked past whatever stands between them now\n"
            "expected RuntimeError\ncame     no error"
        )
    same(ids(queue.get_all_free_blocks()), rest, f"after the refused remove ({twice.value})")
    queue.append(block)
    same(ids(queue.get_all_free_blocks()), [*rest, position], "appended again: at the back")
    queue.remove(block)
    same(ids(queue.get_all_free_blocks()), rest, "and removed again: append sets both of its links")


def test_removal_looks_at_two_neighbours_only(lab):
    looked_at: set[int] = set()

    class Watched(lab.KVCacheBlock):
        def __getattribute__(self, name):
            if name in ("prev_free", "next_free"):
                looked_at.add(object.__getattribute__(self, "block_id"))
            return object.__getattribute__(self, name)

    blocks = [Watched(block_id) for block_id in range(400)]
    queue = lab.FreeKVCacheBlockQueue(blocks)
    looked_at.clear()
    queue.remove(blocks[200])
    walked = looked_at - {199, 200, 201}
    assert not walked, (
        "remove must cost the same in a queue of 10 and of 100,000 blocks: it may look at the "
        "block and at its two neighbours.\nexpected links read of 199, 200, 201\n"
        f"came     also those of {len(walked)} others, such as {sorted(walked)[:3]}"
    )
    same(queue.num_free_blocks, 399, "and the block is gone from the count")


def test_no_operation_walks_through_the_pool(lab, monkeypatch):
    looked_at: set[int] = set()

    class Watched(lab.KVCacheBlock):
        def __getattribute__(self, name):
            if name != "block_id":
                looked_at.add(object.__getattribute__(self, "block_id"))
            return object.__getattribute__(self, name)

    monkeypatch.setattr(lab, "KVCacheBlock", Watched)
    pool = lab.BlockPool(400)
    blocks = pool.get_new_blocks(100)
    pool.cache_full_blocks(blocks, range(100))
    pool.free_blocks(blocks)
    for words, call, at_most in (
        ("get_num_free_blocks()", pool.get_num_free_blocks, 0),
        ("get_usage()", pool.get_usage, 0),
        ("free_queue.popleft()", pool.free_queue.popleft, 4),
        ("free_queue.append(the block)", lambda: pool.free_queue.append(pool.blocks[101]), 4),
        ("get_new_blocks(1)", lambda: pool.get_new_blocks(1), 4),
        ("get_cached_block(50)", lambda: pool.get_cached_block(50), 1),
        ("touch([block 51])", lambda: pool.touch([pool.blocks[51]]), 4),
        ("free_blocks([block 51])", lambda: pool.free_blocks([pool.blocks[51]]), 4),
        ("evict(block 51)", lambda: pool.evict(pool.blocks[51]), 2),
    ):
        looked_at.clear()
        call()
        assert len(looked_at) <= at_most, (
            f"{words} in a pool of 400 blocks: the scheduler calls it in every step, so it must "
            "cost the same in a pool of 400,000. The queue knows its length, its two ends and, of "
            f"each block, the neighbours.\nexpected at most {at_most} blocks looked at\n"
            f"came     {len(looked_at)}"
        )


def test_sentinels_never_leak(lab):
    queue, blocks = queue_of(lab, 2)
    seen = queue.get_all_free_blocks()
    seen += [queue.popleft(), queue.popleft()]
    same(ids(seen), [0, 1, 0, 1], "a caller sees real blocks only, never a sentinel with id -1")
    same(queue.get_all_free_blocks(), [], "an emptied queue holds nothing")
    queue.append(blocks[1])
    same(ids(queue.get_all_free_blocks()), [1], "an emptied queue works on")
    empty, _ = queue_of(lab, 0)
    same(empty.get_all_free_blocks(), [], "a queue made of no blocks")
    with pytest.raises(ValueError) as refused:
        got = empty.popleft()
        pytest.fail(
            f"a queue made of no blocks has no front\nexpected ValueError\ncame     {got!r}"
        )
    assert "-1" not in str(refused.value), "an empty queue has no block -1 to speak of"


def test_prefix_hash_is_chained(lab):
    hashed, root = lab.hash_block_tokens, lab.ROOT_HASH
    same(hashed(root, [1, 2]), hash((root, (1, 2))), "Python's hash of (parent, tuple of tokens)")
    same(hashed(root, (1, 2)), hashed(root, [1, 2]), "a list and a tuple of the same tokens")
    first, other = hashed(root, [1, 2]), hashed(root, [7, 7])
    assert hashed(first, [3, 4]) != hashed(other, [3, 4]), (
        "tokens 3, 4 after 1, 2 and after 7, 7: the keys and values of a position depend on all "
        "tokens before it, so equal tokens after different ones are not the same content"
    )
    assert hashed(root, [1, 2]) != hashed(root, [2, 1]), "the order of the tokens counts"


def test_worked_example(lab):
    pool = lab.BlockPool(6)
    blocks = pool.get_new_blocks(3)
    same(ids(blocks), [1, 2, 3], "new(3): the front of the queue, block 0 being reserved")
    same(queued(pool), [4, 5], "two blocks are left")
    pool.cache_full_blocks(blocks[:2], [111, 222])
    pool.free_blocks(reversed(blocks))
    same(queued(pool), [4, 5, 3, 2, 1], "freed in the order given, at the back")
    found = pool.get_cached_block(222)
    assert found is blocks[1], f"block 2 is free and still cached: a hit; came {found!r}"
    pool.touch([found])
    same(queued(pool), [4, 5, 3, 1], "the hit leaves the middle of the queue")
    same((found.ref_cnt, found.block_hash), (1, 222), "block 2: (ref_cnt, block_hash)")
    same(ids(pool.get_new_blocks(4)), [4, 5, 3, 1], "new(4): all that is left, front first")
    same(
        (pool.get_cached_block(111), pool.get_cached_block(222)),
        (None, found),
        "block 1 was handed out, so 111 is evicted; block 2 is in use, so 222 stays",
    )
    same(pool.get_num_free_blocks(), 0, "free blocks at the end")


def test_null_block_reserved(lab):
    pool = lab.BlockPool(4)
    null = pool.null_block
    same(ids(pool.get_new_blocks(3)), [1, 2, 3], "block 0 is never handed out")
    pool.touch([null])
    pool.free_blocks([null])
    same(
        queued(pool),
        [],
        "touched and freed, the null block must not get into the queue: the next request would be "
        "given the block that every unused table entry points to",
    )
    pool.cache_full_blocks([null], [77])
    same(
        (null.block_hash, pool.get_cached_block(77)),
        (None, None),
        "the null block has no content: it gets no hash and is no hit",
    )


def broken_i1(pool) -> str:
    """What is wrong with I1, in words; "" when it holds in both directions."""
    in_queue = queued(pool)
    for block in pool.blocks:
        should = block.ref_cnt == 0 and not block.is_null
        times = in_queue.count(block.block_id)
        if times != should:
            return f"block {block.block_id} has ref_cnt {block.ref_cnt} and is queued {times} times"
    if pool.get_num_free_blocks() != len(in_queue):
        return f"get_num_free_blocks() is {pool.get_num_free_blocks()}, queued are {len(in_queue)}"
    return ""


def test_alloc_free_round_trip_I1(lab):
    pool = lab.BlockPool(8)
    first = pool.get_new_blocks(4)
    same([block.ref_cnt for block in first], [1, 1, 1, 1], "a block handed out has one owner")
    second = pool.get_new_blocks(3)
    for step, blocks in (("nothing", []), ("the second", second), ("the first", first)):
        pool.free_blocks(blocks)
        said = broken_i1(pool)
        assert not said, (
            f"I1 (queued exactly when no table references it) broke after freeing {step}: {said}. "
            "A queued block in use is handed to a second request, which overwrites the first"
        )
    same(queued(pool), [5, 6, 7, 1, 2, 3, 4], "all blocks are back, in the order of freeing")


def test_alloc_all_then_oom_is_atomic(lab):
    pool = lab.BlockPool(5)
    same(pool.get_new_blocks(0), [], "no blocks asked for: an empty list, not an error")
    blocks = pool.get_new_blocks(4)
    same(len(blocks), 4, "exactly all of the free blocks may be taken")
    pool.free_blocks(blocks[:2])
    before = (queued(pool), [block.ref_cnt for block in pool.blocks])
    with pytest.raises(ValueError) as refused:
        got = pool.get_new_blocks(3)
        pytest.fail(f"three blocks of two free ones\nexpected ValueError\ncame     {got!r}")
    after = (queued(pool), [block.ref_cnt for block in pool.blocks])
    same(
        after,
        before,
        f"3 asked, 2 free ({refused.value}): (queue, ref_cnt of each block) are as before. Blocks "
        "taken before the error belong to nobody and never come back",
    )


def test_no_dedup_I2(lab):
    pool = lab.BlockPool(6)
    mine = pool.get_new_blocks(2)
    pool.cache_full_blocks(mine, [10, 20])
    yours = pool.get_new_blocks(2)
    pool.cache_full_blocks(yours, [10, 20])
    same(
        [block.block_hash for block in (*mine, *yours)],
        [10, 20, 10, 20],
        "two requests computed the same tokens side by side: both keep their own blocks, because "
        "the ids are in their tables already",
    )
    assert pool.get_cached_block(10) is mine[0], "of equal blocks the one cached first is the hit"
    pool.cache_full_blocks(mine, [30, 40])
    same(
        [block.block_hash for block in mine],
        [10, 20],
        "a block that has a hash keeps it: its content cannot change while it is in a table",
    )
    same(pool.get_cached_block(30), None, "and the index learns nothing new")


def test_only_full_blocks_hashed_I3(lab):
    tokens, size = list(range(100, 110)), 4
    pool = lab.BlockPool(6)
    table = pool.get_new_blocks(-(-len(tokens) // size))
    hashes, parent = [], lab.ROOT_HASH
    for start in range(0, len(tokens) - size + 1, size):
        parent = lab.hash_block_tokens(parent, tokens[start : start + size])
        hashes.append(parent)
    with pytest.raises(ValueError) as refused:
        pool.cache_full_blocks(table, hashes)
        pytest.fail(
            f"{len(table)} blocks and {len(hashes)} hashes: 10 tokens fill two blocks of 4, the "
            "third is half written and has no hash (I3), so the caller has miscounted\n"
            "expected ValueError\n"
            f"came     no error, hashes {[block.block_hash for block in table]}"
        )
    same(
        [block.block_hash for block in table],
        [None, None, None],
        f"3 blocks, 2 hashes ({refused.value}): 10 tokens fill two blocks of 4. The third is half "
        "written, and nothing may be noted until the caller has counted again",
    )
    with pytest.raises(ValueError) as refused:
        pool.cache_full_blocks(table[:1], hashes)
        pytest.fail(
            "1 block and 2 hashes: the caller has miscounted here, too\nexpected ValueError\n"
            "came     no error"
        )
    same(
        (table[0].block_hash, dict(pool.cached_block_hash_to_block)),
        (None, {}),
        f"1 block, 2 hashes ({refused.value}): (hash of the block, index) are as before. A refusal "
        "that comes after the first block was noted has changed the pool",
    )
    pool.cache_full_blocks(table[: len(hashes)], hashes)
    same(
        [block.block_hash for block in table],
        [*hashes, None],
        "10 tokens in blocks of 4: two full blocks with hashes, and a third without",
    )


def test_touch_revives_from_middle_I4(lab):
    pool = lab.BlockPool(6)
    blocks = pool.get_new_blocks(5)
    pool.cache_full_blocks(blocks, [1, 2, 3, 4, 5])
    pool.free_blocks(blocks)
    pool.touch([blocks[2]])
    same(
        queued(pool), [1, 2, 4, 5], "block 3, a hit, leaves the middle; the others keep their order"
    )
    same((blocks[2].ref_cnt, blocks[2].block_hash), (1, 3), "block 3: (ref_cnt, block_hash)")
    pool.touch([blocks[2]])
    same(
        queued(pool), [1, 2, 4, 5], "a second owner: it was not queued, so nothing leaves the queue"
    )
    same(blocks[2].ref_cnt, 2, "ref_cnt of a block in two tables")
    pool.get_new_blocks(4)
    assert pool.get_cached_block(3) is blocks[2], (
        "everything else was handed out; block 3 is in use and must still be there. A touched "
        "block left in the queue is given away under its owner"
    )


def test_free_keeps_hash(lab):
    pool = lab.BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, [8, 9])
    pool.free_blocks(blocks)
    same(
        [block.block_hash for block in blocks],
        [8, 9],
        "freeing forgets nothing: the free blocks are the cache. Cleared here, prefix caching "
        "would only work between requests that overlap in time",
    )
    same(
        [pool.get_cached_block(8), pool.get_cached_block(9)],
        blocks,
        "and both can be found by their hashes",
    )


def test_eviction_drops_index_and_hash(lab):
    pool = lab.BlockPool(3)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, [8, 9])
    pool.free_blocks(blocks)
    [again] = pool.get_new_blocks(1)
    same(again.block_id, 1, "the front of the queue is handed out again")
    same(
        (again.block_hash, pool.get_cached_block(8)),
        (None, None),
        "block 1 is about to be overwritten: no hash, no index entry. Otherwise the next request "
        "with prefix 8 reads somebody else's keys and values",
    )
    assert pool.get_cached_block(9) is blocks[1], "block 2 was not handed out and is still cached"
    same(
        dict(pool.cached_block_hash_to_block),
        {9: {2: blocks[1]}},
        "the index holds {hash: {block id: block}} and no empty entries",
    )
    same(
        (pool.evict(blocks[1]), pool.evict(blocks[1])),
        (True, False),
        "evict says whether there was a hash to forget, the first and the second time",
    )
    pool.cache_full_blocks([again], [0])
    same(
        (pool.evict(again), again.block_hash, pool.get_cached_block(0)),
        (True, None, None),
        "(evict(block 1), its hash, the hit for 0): block 1 is in use and its hash is 0. Both are "
        "no reason to keep it: the engine withdraws blocks that are not computed after all, and "
        "0 is a hash like any other; None is 'no hash'",
    )


def test_duplicate_hash_evict_one_keeps_other(lab):
    pool = lab.BlockPool(4)
    one, two, three = pool.get_new_blocks(3)
    pool.cache_full_blocks([one, two, three], [10, 20, 10])
    pool.free_blocks([one])
    pool.get_new_blocks(1)
    assert pool.get_cached_block(10) is three, (
        "blocks 1 and 3 held the same content; block 1 was evicted, block 3 still holds it.\n"
        f"expected block 3\ncame     {pool.get_cached_block(10)!r}"
    )
    pool.free_blocks([three])
    pool.get_new_blocks(1)
    same(pool.get_cached_block(10), None, "both are gone now")
    assert pool.get_cached_block(20) is two, "another content is not concerned"


def test_an_evicted_duplicate_can_be_cached_again(lab):
    pool = lab.BlockPool(3)
    one, two = pool.get_new_blocks(2)
    pool.cache_full_blocks([one, two], [10, 10])
    pool.free_blocks([two])
    pool.get_new_blocks(1)
    same(
        two.block_hash,
        None,
        "block 2 was handed out again; block 1, which stays, is the hit for 10",
    )
    pool.cache_full_blocks([two], [20])
    assert pool.get_cached_block(20) is two, (
        "block 2 has new content and must be found by it. A hash left over from before makes "
        "cache_full_blocks pass the block over, for ever\n"
        f"expected block 2\ncame     {pool.get_cached_block(20)!r}"
    )
    assert pool.get_cached_block(10) is one, "and block 1 keeps its own"


def test_shared_block_freed_only_at_zero(lab):
    pool = lab.BlockPool(4)
    [block] = pool.get_new_blocks(1)
    pool.touch([block])
    pool.free_blocks([block])
    same(
        (block.ref_cnt, queued(pool)),
        (1, [2, 3]),
        "(ref_cnt, queue) after one of two owners left: the other still reads the block",
    )
    pool.free_blocks([block])
    same((block.ref_cnt, queued(pool)), (0, [2, 3, 1]), "(ref_cnt, queue) after the last one left")
    pool.touch([block, block])
    same(
        (block.ref_cnt, queued(pool)),
        (2, [2, 3]),
        "(ref_cnt, queue) after touch([block 1, block 1]): one reference for each place in a table",
    )
    pool.free_blocks([block, block])
    same(
        (block.ref_cnt, queued(pool)),
        (0, [2, 3, 1]),
        "(ref_cnt, queue) after free_blocks([block 1, block 1]): both references are given back, "
        "and the block is queued once",
    )


def test_empty_blocks_are_used_up_before_cached_ones(lab, record_property):
    pool = lab.BlockPool(100)
    blocks = pool.get_new_blocks(40)
    pool.cache_full_blocks(blocks, range(1, 41))
    pool.free_blocks(reversed(blocks))
    pool.get_new_blocks(70)
    found = [value for value in range(1, 41) if pool.get_cached_block(value) is not None]
    same(
        found,
        list(range(1, 30)),
        "99 blocks, 40 of them cached, freed tail first; a stranger takes 70. The 59 that nobody "
        "used stand in front, then 11 cached ones, from the tail. What can still be found:",
    )
    record_property("measured.survivors", len(found))
    record_property(
        "measured.which",
        "the beginning of the prompt" if found[0] == 1 else "the end of the prompt",
    )


def test_double_free_is_refused(lab):
    pool = lab.BlockPool(3)
    [block] = pool.get_new_blocks(1)
    pool.free_blocks([block])
    with pytest.raises(AssertionError) as refused:
        pool.free_blocks([block])
        pytest.fail(
            f"block {block.block_id} has no reference left: somebody frees it twice, and now it "
            "is cheap to say so\nexpected AssertionError\n"
            f"came     no error, ref_cnt {block.ref_cnt}, queue {queued(pool)}"
        )
    same(
        (block.ref_cnt, queued(pool)),
        (0, [2, 1]),
        f"a second free of the same block must be an AssertionError ({refused.value}), and "
        "(ref_cnt, queue) stay. vLLM counts down to -1, and it shows only when the block is handed "
        "out next, far from the mistake",
    )


def test_usage(lab):
    pool = lab.BlockPool(5)
    same(pool.get_usage(), 0.0, "usage of an idle pool: the null block is not in use")
    blocks = pool.get_new_blocks(1)
    same(pool.get_usage(), 0.25, "one of the four blocks that can be handed out")
    blocks += pool.get_new_blocks(3)
    same(pool.get_usage(), 1.0, "all four: full is exactly 1.0, or an alert at 100 % never fires")
    pool.cache_full_blocks(blocks, [1, 2, 3, 4])
    pool.free_blocks(blocks)
    same(pool.get_usage(), 0.0, "full of cached blocks and idle: they are free, so 0.0")


def test_random_walk_keeps_I1(lab):
    rng = random.Random(21)
    for walk in range(20):
        pool = lab.BlockPool(rng.choice((3, 6, 10)))
        held: list = []
        for step in range(60):
            doing = rng.choice(("new", "new", "touch", "free", "free", "cache"))
            free = pool.get_num_free_blocks()
            if doing == "new" and free:
                held += pool.get_new_blocks(rng.randint(1, free))
            elif doing == "touch":
                block = rng.choice(pool.blocks[1:])
                pool.touch([block])
                held.append(block)
            elif doing == "free" and held:
                pool.free_blocks([held.pop(rng.randrange(len(held)))])
            elif doing == "cache" and held:
                pool.cache_full_blocks([rng.choice(held)], [rng.randrange(4)])
            said = broken_i1(pool)
            assert not said, f"walk {walk}, step {step} ({doing}) breaks I1: {said}"
            indexed = {
                (value, block_id)
                for value, holders in pool.cached_block_hash_to_block.items()
                for block_id in holders
            }
            carried = {(b.block_hash, b.block_id) for b in pool.blocks if b.block_hash is not None}
            same(indexed, carried, f"walk {walk}, step {step} ({doing}): index against the blocks")


# What decides, per operation and compared field, when a recording differs.
RULES = {
    ("popleft", "result"): "popleft takes the front, and raises ValueError when nothing is queued",
    ("popleft", "free"): "popleft takes the front and leaves the rest in order",
    ("append", "free"): "append puts the block at the back",
    ("remove", "result"): "remove raises RuntimeError when the block is not queued, else returns",
    ("remove", "free"): "remove takes the block from where it is; the others keep their order",
    ("get_new_blocks", "result"): "blocks come from the front; more than are free is a ValueError",
    ("get_new_blocks", "free"): "blocks leave at the front; a refused call leaves the queue alone",
    ("get_new_blocks", "refs"): "a block handed out has ref_cnt 1; a refused call changes none",
    ("get_new_blocks", "contents"): "a block handed out loses its hash; the others keep theirs",
    ("touch", "free"): "a block without references leaves the queue, the others keep their order",
    ("touch", "refs"): "touch adds one reference to each block",
    ("touch", "contents"): "touch changes no content",
    (
        "free_blocks",
        "free",
    ): "blocks that reach 0 go to the back, in the order given; others do not",
    ("free_blocks", "refs"): "each block given loses one reference",
    ("free_blocks", "contents"): "a freed block keeps its hash",
    ("cache_full_blocks", "contents"): "blocks[i] gets hashes[i], unless it has a hash",
    ("get_cached_block", "result"): "of the blocks that hold the content, the one cached first",
}


def first_difference(replay, part: str, *classes) -> str:
    """Replay every recorded case; "" or the first difference with the rule that decides it."""
    for number, case in enumerate(parts.load(part)):
        try:
            said = replay(case, *classes)
        except Exception as error:
            said = _where_it_broke(replay, case, classes, error)
        if not said:
            continue
        at = int(re.search(r"operation (\d+)", said)[1])
        field = said.splitlines()[0].rpartition(": ")[2]
        rule = RULES.get((case["ops"][at]["op"], field), "")
        told = said.replace("\n  expected  ", "\nexpected ").replace(
            "\n  got       ", "\ncame     "
        )
        start = f"num_blocks={case['num_blocks']}"
        return f"{part}, recorded case {number} ({start}), {told}" + (
            f"\nrule: {rule}" * bool(rule)
        )
    return ""


def _where_it_broke(replay, case, classes, error: Exception) -> str:
    """The operation that raised `error`: the last one of the shortest prefix that raises."""
    for count in range(len(case["ops"]) + 1):
        try:
            replay(case | {"ops": case["ops"][:count]}, *classes)
        except Exception:
            break
    op = case["ops"][max(count - 1, 0)]
    words = f"operation {max(count - 1, 0)}, {op['op']}({op.get('args', op.get('block'))})"
    return f"{words}: raised {type(error).__name__}: {error}"


def test_the_queue_agrees_with_the_real_one(lab):
    said = first_difference(
        parts.replay_free_queue, "free_queue", lab.FreeKVCacheBlockQueue, lab.KVCacheBlock
    )
    assert said == "", f"the real FreeKVCacheBlockQueue did something else.\n{said}"


def test_the_pool_agrees_with_the_real_one(lab):
    said = first_difference(parts.replay_block_pool, "block_pool", lab.BlockPool)
    assert said == "", f"the real BlockPool did something else.\n{said}"


def test_hashes_are_equal_where_the_real_ones_are(lab):
    compared = 0
    for number, case in enumerate(parts.load("block_hashing")):
        size, mine_to_real, real_to_mine = case["block_size"], {}, {}
        for request, hashes in zip(case["requests"], case["hashes"], strict=True):
            if request["lora"] or request["cache_salt"]:
                continue  # the real hash has extra keys for these, yours has none
            parent = lab.ROOT_HASH
            for index, real in enumerate(hashes):
                tokens = request["token_ids"][: (index + 1) * size]
                parent = lab.hash_block_tokens(parent, tokens[index * size :])
                compared += 1
                pair = (
                    mine_to_real.setdefault(parent, real),
                    real_to_mine.setdefault(real, parent),
                )
                assert pair == (real, parent), (
                    f"recorded case {number}: two prefixes, one of them {tokens}. Your hashes are "
                    f"{'equal' if pair[0] != real else 'different'} where the real ones are not. "
                    "Equal exactly when the block and everything before it are equal"
                )
    assert compared > 100, f"only {compared} hashes were compared; the recording holds more"


@pytest.mark.slow
def test_the_engine_serves_the_shipped_model_with_your_pool(lab):
    said = {}
    counts = {"hits": 0, "evictions": 0}

    class Counting(lab.BlockPool):
        def touch(self, blocks):
            blocks = list(blocks)
            counts["hits"] += len(blocks)
            super().touch(blocks)

        def get_new_blocks(self, num_blocks):
            before = sum(block.block_hash is not None for block in self.blocks)
            taken = super().get_new_blocks(num_blocks)
            counts["evictions"] += before - sum(b.block_hash is not None for b in self.blocks)
            return taken

    for whose, engine_parts in (
        ("engine's", EngineParts()),
        ("yours", EngineParts(block_pool=Counting)),
    ):
        engine = LLMEngine(num_blocks=12, block_size=8, parts=engine_parts)
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        starts = [
            "A cached block is free until",
            "A cached block is free when",
            "The free queue is",
        ]
        tables = []
        engine.observers.append(
            lambda plan, kv=engine.scheduler.kv, tables=tables: tables.append(
                [kv.get_block_ids(request.request_id) for request in plan.scheduled_requests]
            )
        )
        results = [engine.generate([prompt], params)[0] for prompt in starts * 3]
        said[whose] = [result.outputs[0].token_ids for result in results], tables
    same(
        said["yours"][1], said["engine's"][1], "block tables of every step, your pool in the engine"
    )
    same(said["yours"][0], said["engine's"][0], "tokens of 9 requests, your pool in the engine")
    assert min(counts.values()) >= 5, (
        "11 blocks and prompts that begin alike: the run must find and evict cached blocks, at "
        f"least 5 of each; came {counts}"
    )

"""What lab 02-02 pins: the waste of reserving, and that of blocks: less than a block each."""

from __future__ import annotations

import random

import pytest


def same(got, expected: tuple[int, int, int], why: str) -> None:
    names = "(admitted, rejected, wasted)"
    triple = (got.admitted, got.rejected, got.wasted)
    assert triple == expected, f"{why}\nexpected {expected}  {names}\ncame     {triple}"


def test_paged_admits_more(lab):
    lens = [32] * 64
    same(
        lab.contiguous_admit(lens, 4096, 512),
        (8, 56, 3840),
        "4096 slots, 512 reserved per request: 8 fit",
    )
    same(
        lab.paged_admit(lens, 4096, 16),
        (64, 0, 0),
        "the same 64 requests in blocks of 16 slots: 2 blocks each, 128 of 256",
    )
    same(
        lab.paged_admit([32] * 500, 4096, 16),
        (128, 372, 0),
        "and the ceiling with more arrivals: 256 blocks / 2 = 128 requests, 16 times as many as 8",
    )


def test_contiguous_waste_exact(lab):
    same(
        lab.contiguous_admit([33] * 64, 4096, 512),
        (8, 56, 3832),
        "each reservation of 512 holds 33 tokens, 479 slots are empty, 8 times",
    )
    same(
        lab.contiguous_admit([1, 512, 200], 1536, 512),
        (3, 0, 823),
        "the waste is max_len - used of each: 511 + 0 + 312",
    )
    same(
        lab.contiguous_admit([10, 20, 30], 1024, 512),
        (2, 1, 994),
        "only admitted requests waste anything: 502 + 492; the third was given nothing",
    )


@pytest.mark.parametrize("used", [1, 15, 16, 17, 31, 32, 33, 512])
def test_paged_waste_exact_and_bounded(lab, used):
    expected = {1: 15, 15: 1, 16: 0, 17: 15, 31: 1, 32: 0, 33: 15, 512: 0}[used]
    same(
        lab.paged_admit([used], 4096, 16),
        (1, 0, expected),
        f"{used} tokens in blocks of 16: only the last block may have room left, so less than 16",
    )


def test_rejections_counted(lab):
    same(lab.contiguous_admit([1] * 5, 1000, 300), (3, 2, 897), "3 reservations of 300 in 1000")
    same(lab.paged_admit([20] * 5, 96, 16), (3, 2, 36), "6 blocks, 2 each: 3 fit")
    same(lab.contiguous_admit([5], 0, 8), (0, 1, 0), "no memory: everybody is rejected")
    same(lab.paged_admit([], 4096, 16), (0, 0, 0), "nobody arrived")


def test_rejected_large_does_not_block_small(lab):
    same(
        lab.paged_admit([40, 1000, 16], 64, 16),
        (2, 1, 8),
        "4 blocks: 40 tokens take 3, 1000 do not fit, 16 take the last. A model of memory, not of "
        "a queue: the one that does not fit holds nobody up",
    )
    got = lab.paged_admit([1000, 16, 16], 64, 16)
    assert got.admitted == 2, (
        f"the one that does not fit comes first and takes nothing; expected 2 admitted, came {got}"
    )


def test_conservation(lab):
    rng = random.Random(5)
    for number in range(200):
        size, blocks = rng.choice((1, 4, 16, 64)), rng.randint(0, 40)
        lens = [rng.randint(1, 200) for _ in range(rng.randint(0, 12))]
        got = lab.paged_admit(lens, blocks * size, size)
        assert got.admitted + got.rejected == len(lens), (
            f"case {number}: {len(lens)} arrivals, but {got}: each is admitted or rejected"
        )
        # An independent account of who fits, block by block.
        left, held, given = blocks, 0, 0
        for used in lens:
            needed = len(range(0, used, size))
            if needed <= left:
                left, held, given = left - needed, held + used, given + needed
        same(
            got,
            (got.admitted, got.rejected, given * size - held),
            f"case {number}: lens {lens}, {blocks} blocks of {size}. Slots given to admitted "
            f"requests ({given} blocks) = tokens held ({held}) + waste",
        )


def test_pool_not_multiple_of_block(lab):
    same(
        lab.paged_admit([16] * 5, 79, 16),
        (4, 1, 0),
        "79 slots are 4 blocks of 16 and a rest of 15 that is no block",
    )
    same(lab.paged_admit([3], 15, 16), (0, 1, 0), "less than one block: nobody fits")


def test_arrivals_are_served_in_their_order(lab):
    lens = [200, 10]
    same(
        lab.contiguous_admit(lens, 512, 512),
        (1, 1, 312),
        "one reservation for two arrivals: who came first gets it, 200 tokens, 312 wasted",
    )
    same(
        lab.paged_admit(lens, 208, 16),
        (1, 1, 8),
        "13 blocks: the first, of 200 tokens, takes them all",
    )
    assert lens == [200, 10], f"the caller's list is the caller's: expected [200, 10], came {lens}"


def test_blocks_of_any_size_are_counted_exactly(lab):
    same(
        lab.paged_admit([20_001], 60_000, 20_000),
        (1, 0, 19_999),
        "20,001 tokens in blocks of 20,000 are two blocks, the second with one token",
    )


def test_what_blocks_are_worth(lab, record_property):
    lens, slots, longest, size = [100] * 500, 16_384, 2048, 16
    reserved = lab.contiguous_admit(lens, slots, longest)
    paged = lab.paged_admit(lens, slots, size)
    same(reserved, (8, 492, 15_584), "16,384 slots, 2,048 reserved per request of 100 tokens")
    same(paged, (146, 354, 1752), "1,024 blocks of 16, 7 per request: 112 slots for 100 tokens")
    record_property("measured.times", paged.admitted / reserved.admitted)
    record_property("measured.wasted", 100 * paged.wasted / (paged.admitted * 7 * size))


def test_exact_fit(lab):
    same(lab.contiguous_admit([512] * 8, 4096, 512), (8, 0, 0), "full to the last slot, no waste")
    same(lab.paged_admit([4096], 4096, 16), (1, 0, 0), "one request of 256 blocks takes them all")
    same(lab.paged_admit([4097], 4096, 16), (0, 1, 0), "one token more needs block 257")
    same(lab.contiguous_admit([7], 512, 512), (1, 0, 505), "the last reservation fits exactly")


def test_block_size_sweep(lab):
    expected = {
        1: (64, 0, 0),
        4: (64, 0, 192),
        16: (64, 0, 960),
        64: (64, 0, 1984),
        256: (16, 48, 3568),
    }
    for size, triple in expected.items():
        same(
            lab.paged_admit([33] * 64, 4096, size),
            triple,
            f"64 requests of 33 tokens, blocks of {size}: small blocks waste little and make long "
            "tables; a block of 256 is nearly a reservation again",
        )


@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        ("contiguous_admit", ([10, 600], 4096, 512), "used_lens"),
        ("contiguous_admit", ([10, 0], 4096, 512), "used_lens"),
        ("contiguous_admit", ([10], 4096, 0), "max_len"),
        ("contiguous_admit", ([10], -1, 512), "total_slots"),
        ("paged_admit", ([10, -3], 4096, 16), "used_lens"),
        ("paged_admit", ([10], 4096, 0), "block_size"),
        ("paged_admit", ([10, 0], 4096, 16), "used_lens"),
        ("paged_admit", ([10], -1, 16), "total_slots"),
    ],
)
def test_bad_arguments_are_refused(lab, function, arguments, named):
    with pytest.raises(ValueError) as refused:
        got = getattr(lab, function)(*arguments)
        pytest.fail(
            f"{function}{arguments}: an argument is out of its range, which would otherwise end as "
            f"a silent miscount\nexpected ValueError\ncame     {got!r}"
        )
    assert named in str(refused.value), (
        f"{function}{arguments}: the ValueError must say which argument is wrong\n"
        f"expected a message with {named}\ncame     {refused.value}"
    )

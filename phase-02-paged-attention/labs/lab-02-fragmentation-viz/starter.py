"""Lab 02-02: how much of the KV cache is wasted, by reservation and by blocks.

An allocation-only model: requests arrive one after the other, nobody leaves, and what counts is who
is let in and how much of what they were given holds no token. One slot is room for the keys and
values of one token. The block arithmetic is that of
`vllm/v1/core/single_type_kv_cache_manager.py:89`
`SingleTypeKVCacheManager.get_num_blocks_to_allocate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmitResult:
    """What became of the arrivals (given).

    Attributes:
        admitted: requests that got memory.
        rejected: requests for which there was none.
        wasted: slots given to admitted requests that hold no token.
    """

    admitted: int
    rejected: int
    wasted: int


def contiguous_admit(used_lens: Sequence[int], total_slots: int, max_len: int) -> AdmitResult:
    """Let requests in, each with one reservation of `max_len` neighbouring slots.

    The length of an answer is not known beforehand and a reservation cannot grow, so everybody
    reserves the longest length there is. Nobody leaves, so the reservations lie side by side, and
    a request is let in as long as `max_len` slots are left. A rejected request takes nothing, and
    those after it are still tried.

    A trace: lengths 10, 20, 30, 1024 slots, reservations of 512. Two are let in and one is not;
    502 + 492 slots are wasted.

    Args:
        used_lens: tokens each request really holds, 1 to `max_len`, in order of arrival; not
            changed.
        total_slots: slots of the cache, 0 or more.
        max_len: slots of a reservation, 1 or more.

    Raises:
        ValueError: an argument out of its range, named in the message.
    """
    raise NotImplementedError


def paged_admit(used_lens: Sequence[int], total_slots: int, block_size: int) -> AdmitResult:
    """Let requests in, each with as many blocks as its tokens need.

    A block is `block_size` slots; what is left over of `total_slots` is no block. Any free block
    will do, wherever it lies. A request that does not fit is rejected, and those after it are
    still tried.

    A trace: lengths 40, 1000, 16, 64 slots, blocks of 16. 40 tokens take 3 blocks, 1000 do not fit,
    16 take the last; 8 slots are wasted.

    Args:
        used_lens: tokens each request holds, 1 or more, in order of arrival; not changed.
        total_slots: slots of the cache, 0 or more.
        block_size: slots of a block, 1 or more.

    Raises:
        ValueError: an argument out of its range, named in the message.
    """
    raise NotImplementedError


def _check_at_least(name: str, value: int, least: int) -> None:
    """Refuse a value below `least` (given)."""
    if value < least:
        raise ValueError(f"{name}: got {value}, need at least {least}")


def report(
    total_slots: int = 4096,
    max_len: int = 512,
    used_len: int = 32,
    block_size: int = 16,
    arrivals: int = 64,
) -> str:
    """Both answers side by side, with a bar of the whole cache (given).

    In the bar `#` holds tokens, `-` was given away and holds none, `.` is free.
    """
    lens = [used_len] * arrivals
    lines = [
        f"{total_slots} slots; {arrivals} requests of {used_len} tokens, at most {max_len} allowed",
        "             admitted  rejected  wasted  useful",
    ]
    for name, got in (
        ("contiguous", contiguous_admit(lens, total_slots, max_len)),
        (f"blocks of {block_size}", paged_admit(lens, total_slots, block_size)),
    ):
        held = got.admitted * used_len
        full, idle = (round(50 * slots / total_slots) for slots in (held, held + got.wasted))
        bar = "#" * full + "-" * (idle - full) + "." * (50 - idle)
        useful = f"{held / total_slots:.2%}"
        lines.append(f"{name:<13}{got.admitted:>8}{got.rejected:>10}{got.wasted:>8}{useful:>8}")
        lines.append(f"[{bar}]")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
    print()
    print(report(used_len=33))

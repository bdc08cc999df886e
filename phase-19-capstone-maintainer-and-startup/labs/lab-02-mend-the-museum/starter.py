"""Lab 19-02: six bugs of the museum, each in a part of the engine that has it.

The parts are in `conformance/museum_parts.py`. Each class overrides one method of its base.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance.museum_parts import (
    SIZE,
    AllAlike,
    FirstChunk,
    KeptHashes,
    OpenDoor,
    StaleEvictions,
    SteppedOver,
)
from mini_vllm.request import Request


class Admission(FirstChunk):
    """37307. Override `fits(request, hits)`.

    What is admitted has room for its whole sequence at that moment: the tokens that it has by now,
    not those that it may still sample. A hit needs no new block, but one that was free leaves the
    free blocks. Example: 4 free blocks of 4, a prompt of 13 and a budget of 4: admitted. With 3
    free blocks: not, although 4 tokens would fit. Recorded from 0.19.0.
    """


class Walk(SteppedOver):
    """49097. Override `place_after(index, victim, was_planned)`.

    `running[index]` asks for a block, `running[victim]` leaves the list. Returned is where the one
    that asks stands afterwards, or, if it is itself the victim, the one that was behind it.
    Example: index 1, victim 0: the place is 0. Index 1, victim 2: it is 1. Recorded from 0.28.0.
    """


class Told(StaleEvictions):
    """52482. Override `get_freed_mm_hashes()`.

    Returned is what was evicted since the last call, in order, and is not in the cache now:
    `self.freed` holds the evictions, `self.cached` what is there. Nothing is told twice. Example: A
    is evicted, then B, and A is allocated again: ['B']. Recorded from 0.28.0.
    """


class HitRate(AllAlike):
    """25780. Override `record(num_tokens, num_hits, preempted)`.

    A look-up of a request that was preempted before is not in `requests`, `queries` and `hits`, and
    not lost: it is in `preempted_requests`, `preempted_queries`, `preempted_hits`. Example: (8, 0,
    False), then (9, 8, True): 0 hits of 8, and apart from them 8 of 9. Recorded from 0.11.1.
    """


class Session(KeptHashes):
    """49377. Override `take_back(num_computed_tokens)`.

    The tokens behind `num_computed_tokens` go, and with them the hash of every block that is not
    full any more; the others stay. Example: 1, 2, 3, 99, of which 3 were computed: three tokens and
    no hash are left. Recorded from 0.32.0.
    """


class Door(OpenDoor):
    """39734. Override `can_be_served(num_prompt_tokens, max_tokens)`.

    True for exactly the requests that end if they are alone. `self.kv.block_pool.num_blocks` blocks
    hold `self.kv.block_size` tokens each, one of them the null block. A token that is sampled last
    is never computed. Example: one usable block of 4: a prompt of 1 with max_tokens 4 ends, with 5
    it does not. No release that was asked mends this: recorded is which requests end at 0.22.1.
    """

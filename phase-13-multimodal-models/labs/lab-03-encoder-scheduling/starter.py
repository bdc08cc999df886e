"""Lab 13-03: a picture is encoded whole, a prompt is computed in chunks.

The encoder of a vision model looks at a picture from both sides, so it runs for all of it or not at
all. A chunk of a prompt may end anywhere. Two ledgers keep them apart: a budget of embeddings per
step, and a cache of embeddings that outlives the step. What holds:

- E1: a chunk covers an embedding only if it is cached or its encoder runs in this step.
- E2: what runs in a step costs at most the budget, all requests together; what is cached is free.
- E3: a chunk that reaches a picture which cannot be encoded now ends before it, and no later
  picture is looked at.
- E4: between those bounds a chunk is as long as it may be.

Sources: `vllm/v1/core/sched/scheduler.py:1096` `Scheduler._try_schedule_encoder_inputs`,
`vllm/v1/core/sched/scheduler.py:1667` `Scheduler._free_encoder_inputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from mini_vllm.multimodal.inputs import PlaceholderRange
from mini_vllm.plan import Gate


class ChunkPlan(NamedTuple):
    """What one chunk may compute (given)."""

    num_new_tokens: int
    encode: tuple[int, ...]
    """Indices of the pictures whose encoder runs, in order."""
    budget_left: int


def plan_chunk(
    num_computed: int,
    num_new_tokens: int,
    ranges: Sequence[PlaceholderRange],
    encoder_budget: int,
    cached: AbstractSet[int],
) -> ChunkPlan:
    """How far a chunk may go that begins at `num_computed`, and what is encoded for it.

    Here the cache has room for everything, and every token of a picture takes an embedding. Nothing
    that is given changes.

    A trace: pictures A at 50 to 150 and B at 180 to 280; 300 tokens from 0 with a budget of 150:
    180 tokens, A runs, 50 are left.

    Args:
        ranges: of the prompt's pictures, in order and apart.
        encoder_budget: embeddings that this step may still compute.
        cached: indices of the pictures whose embeddings are there.

    Raises:
        ValueError: a negative number.
    """
    raise NotImplementedError


class EncoderGate(Gate):
    """What the scheduler asks about pictures: a budget of embeddings per step, and a cache.

    `EncoderGate(encoder_compute_budget, encoder_cache_size, disable_chunked_mm_input=False,
    encoder_cache_manager=EncoderCacheManager)` holds `cache = encoder_cache_manager(size)`, which
    keeps the counts: what it answers is right, and it is asked only as much as is needed, since
    `can_allocate` evicts. Besides the moments of `Gate`, whose numbers are tokens, it has:

    - `planned()`: of the plan just made, by request the indices of the pictures whose encoder runs
      (no entry where none does), and what was evicted since the last call.
    - `computed(plan)`: the plan was updated. What its requests have behind their counters is
      released, request by request in the plan's order, and where a request ended in this update
      (`FINISHED_STOPPED`, `FINISHED_LENGTH`), all that it holds comes right after its own.
    - `restart()`: nothing is cached and nothing planned.

    What the recordings show beside E1 to E4:

    - A picture's size is its embeddings (`mm_position.get_num_embeds()`); a mask may make them
      fewer than its tokens. A chunk that covers no embedding of a picture does not run its encoder.
    - Several pictures of one request are allocated together, when the request enters the plan;
      until then `can_allocate` is told what was promised before (`num_embeds_to_schedule`).
    - Of several places of a picture in one chunk the first is encoded and the others do nothing.
    - With `disable_chunked_mm_input` a chunk that begins before a picture does not end inside it.
    - Who finds no blocks holds no reference, though what was evicted for it stays evicted. Who is
      preempted neither; if its encoder was to run in this step, the budget of it is free again.
    - A request that leaves aborted or preempted gives up its references at once.
    """

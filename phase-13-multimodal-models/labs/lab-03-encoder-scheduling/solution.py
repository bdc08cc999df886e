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

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from mini_vllm.multimodal.encoder_cache_manager import EncoderCacheManager
from mini_vllm.multimodal.inputs import PlaceholderRange, mm_features
from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.request import Request, RequestStatus


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
    if min(num_computed, num_new_tokens, encoder_budget) < 0:
        raise ValueError(f"{num_computed}, {num_new_tokens}, {encoder_budget}: need at least 0")
    encode = []
    for index, place in enumerate(ranges):
        if place.offset >= num_computed + num_new_tokens:
            break
        if place.end <= num_computed or index in cached:
            continue
        if place.length > encoder_budget:
            num_new_tokens = max(0, place.offset - num_computed)
            break
        encoder_budget -= place.length
        encode.append(index)
    return ChunkPlan(num_new_tokens, tuple(encode), encoder_budget)


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

    def __init__(
        self,
        encoder_compute_budget: int,
        encoder_cache_size: int,
        disable_chunked_mm_input: bool = False,
        encoder_cache_manager: Callable[[int], EncoderCacheManager] = EncoderCacheManager,
    ) -> None:
        """Both sizes in embeddings."""
        self.compute_budget = encoder_compute_budget
        self.keeps_whole = disable_chunked_mm_input
        self.cache = encoder_cache_manager(encoder_cache_size)
        self.restart()

    def restart(self) -> None:
        """Nothing is cached and nothing planned."""
        self.cache.reset()
        self.budget = self.compute_budget
        self.inputs: dict[str, list[int]] = {}
        self.wanted: dict[str, tuple[list[int], int]] = {}
        self.ended: dict[str, Request] = {}

    def begins(self, plan: SchedulerOutput) -> None:
        """The step's budget is whole."""
        for request in self.ended.values():
            self.cache.free(request)
        self.budget = self.compute_budget
        self.inputs, self.wanted, self.ended = {}, {}, {}

    def limit(self, request: Request, start: int, num_new: int) -> int:
        """At most this many tokens; what it takes to compute them is noted for `scheduled`."""
        features = mm_features(request)
        if num_new <= 0 or not features:
            return num_new
        budget, promised = self.budget, 0
        encode: list[int] = []
        seen: set[str] = set()
        for index, feature in enumerate(features):
            place, end = feature.mm_position, start + num_new
            if place.offset >= end:
                break
            if place.end <= start or feature.identifier in seen:
                continue
            if self.cache.check_and_update_cache(request, index):
                continue
            splits = self.keeps_whole and start < place.offset and end < place.end
            if splits or not self.cache.can_allocate(request, index, budget, promised):
                num_new = max(0, place.offset - start)
                break
            first = max(0, start - place.offset)
            last = min(place.length, end - place.offset)
            low, high = place.get_embeds_indices_in_range(first, last)
            if low == high:
                continue
            size = place.get_num_embeds()
            budget, promised = budget - size, promised + size
            seen.add(feature.identifier)
            encode.append(index)
        self.wanted[request.request_id] = encode, budget
        return num_new

    def refused(self, request: Request) -> None:
        """No blocks: it holds nothing."""
        self.cache.free(request)

    def scheduled(self, request: Request, num_new: int, plan: SchedulerOutput) -> None:
        """What was noted is allocated and enters the plan."""
        encode, budget = self.wanted.pop(request.request_id, ([], self.budget))
        if encode:
            for index in encode:
                self.cache.allocate(request, index)
            self.inputs[request.request_id] = encode
            self.budget = budget

    def leaves(self, request: Request) -> bool:
        """Its references go, at once or when the update is over; a victim's budget comes back."""
        features = mm_features(request)
        if request.status == RequestStatus.RUNNING:
            for index in self.inputs.pop(request.request_id, ()):
                self.budget += features[index].mm_position.get_num_embeds()
        if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH):
            self.ended[request.request_id] = request
        else:
            self.cache.free(request)
        return False

    def planned(self) -> tuple[Mapping[str, list[int]], list[str]]:
        """Whose encoder runs, and what was evicted."""
        return dict(self.inputs), self.cache.get_freed_mm_hashes()

    def computed(self, plan: SchedulerOutput) -> None:
        """What is behind the counters is released, in the plan's order."""
        for request in plan.scheduled_requests:
            ended = self.ended.pop(request.request_id, None)
            if request.is_finished and ended is None:
                continue
            features = mm_features(request)
            for index in list(self.cache.get_cached_input_ids(request)):
                if features[index].mm_position.end <= request.num_computed_tokens:
                    self.cache.free_encoder_input(request, index)
            if ended is not None:
                self.cache.free(ended)

"""What the scheduler asks about pictures: how far may this chunk go, and whose encoder runs?

Promises: one item is one run of the encoder, whole or not at all; a chunk that reaches a picture
which cannot be encoded now ends before it; the budget of a step is shared by all its requests.
Decides as `vllm/v1/core/sched/scheduler.py:1096` `Scheduler._try_schedule_encoder_inputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mini_vllm.multimodal.encoder_cache_manager import EncoderCacheManager
from mini_vllm.multimodal.inputs import mm_features
from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.request import Request, RequestStatus

if TYPE_CHECKING:
    from mini_vllm.ec_transfer.base import ECConnectorBase


class ScheduledInputs(NamedTuple):
    """What the chunk of one request needs: its pictures to encode, its length, the budget left."""

    encoder_inputs: list[int]
    num_new_tokens: int
    encoder_compute_budget: int
    duplicate_encoder_inputs: list[int]
    """Further places of the pictures to encode, where nothing is done at the pin."""
    external_load_encoder_input: Sequence[int] = ()
    """Pictures whose rows come from outside: room is taken for them, and no budget."""


class EncoderGate(Gate):
    """A budget of embeddings per step, and the counts of the encoder cache."""

    def __init__(
        self,
        encoder_compute_budget: int,
        encoder_cache_size: int,
        disable_chunked_mm_input: bool = False,
        encoder_cache_manager: Callable[[int], EncoderCacheManager] = EncoderCacheManager,
    ) -> None:
        """Both sizes in embeddings, each at least the largest picture's.

        Args:
            encoder_compute_budget: what a step may encode.
            encoder_cache_size: what the cache holds.
            disable_chunked_mm_input: no chunk ends inside a picture that it does not begin with.
            encoder_cache_manager: keeps the counts.
        """
        self.max_num_encoder_input_tokens = encoder_compute_budget
        self.disable_chunked_mm_input = disable_chunked_mm_input
        self.cache = encoder_cache_manager(encoder_cache_size)
        self.ec_connector: ECConnectorBase | None = None
        """What may have the rows before an encoder is planned."""
        self.scheduled_encoder_inputs: dict[str, list[int]] = {}
        """Of the step that is being planned: by request the pictures whose encoder runs."""
        self.free_encoder_mm_hashes: list[str] = []
        """What was evicted since the plan before: the worker drops it."""
        self._budget = 0
        self._granted: dict[str, ScheduledInputs] = {}
        self._ended: dict[str, Request] = {}  # in the update under way

    # ------------------------------------------------------------------ moments of the scheduler

    def begins(self, plan: SchedulerOutput) -> None:
        """The step's budget is whole."""
        self._release_ended()
        self._budget = self.max_num_encoder_input_tokens
        self.scheduled_encoder_inputs, self._granted = {}, {}

    def limit(self, request: Request, start: int, num_new: int) -> int:
        """How far the chunk may go; what it grants is booked by `scheduled`."""
        if num_new <= 0 or not mm_features(request):
            return num_new
        granted = self._try_schedule_encoder_inputs(request, start, num_new)
        self._granted[request.request_id] = granted
        return granted.num_new_tokens

    def refused(self, request: Request) -> None:
        """No blocks: it references nothing. What was evicted for it stays evicted."""
        if mm_features(request):
            self.cache.free(request)

    def scheduled(self, request: Request, num_new: int, plan: SchedulerOutput) -> None:
        """Its encoder runs in this step, or its rows are loaded."""
        granted = self._granted.pop(request.request_id, None)
        if granted and (granted.encoder_inputs or granted.external_load_encoder_input):
            self._allocate(request, granted)

    def _allocate(self, request: Request, granted: ScheduledInputs) -> None:
        """Take room in the cache and in the budget, and enter the plan."""
        for input_id in (*granted.encoder_inputs, *granted.external_load_encoder_input):
            self.cache.allocate(request, input_id)
            if self.ec_connector is not None:
                self.ec_connector.update_state_after_alloc(request, input_id)
        if granted.encoder_inputs:
            self.scheduled_encoder_inputs[request.request_id] = granted.encoder_inputs
        self._budget = granted.encoder_compute_budget

    def leaves(self, request: Request) -> bool:
        """A victim gives its pictures up, and the budget of those that were to run for it.

        Whether a victim had been planned or not, at the pin the counts of the cache keep what it
        was to encode: `conformance/features/multimodal/README.md` has what follows from that.
        """
        features = mm_features(request)
        if not features:
            return False
        if request.status == RequestStatus.RUNNING:
            for input_id in self.scheduled_encoder_inputs.pop(request.request_id, ()):
                self._budget += features[input_id].mm_position.get_num_embeds()
        if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH):
            self._ended[request.request_id] = request  # its turn comes in `computed`
        else:
            self.cache.free(request)
        return False

    # ------------------------------------------------------------------ moments of the engine

    def planned(self) -> tuple[Mapping[str, list[int]], list[str]]:
        """Of the plan just made: whose encoder runs, and what the worker drops before."""
        self.free_encoder_mm_hashes = self.cache.get_freed_mm_hashes()
        return dict(self.scheduled_encoder_inputs), self.free_encoder_mm_hashes

    def computed(self, plan: SchedulerOutput) -> None:
        """A plan was updated: release the pictures that are behind its requests' counters.

        In the plan's order, with those that ended in their places, as
        `vllm/v1/core/sched/scheduler.py:1667` `Scheduler._free_encoder_inputs` and the end of a
        request come one after another there: who is released first is evicted first.
        """
        for request in plan.scheduled_requests:
            if not mm_features(request):
                continue
            ended = self._ended.pop(request.request_id, None)
            if request.is_finished and ended is None:
                continue  # aborted, or ended by an earlier plan
            self._release_computed(request)
            if ended is not None:
                self.cache.free(ended)

    def restart(self) -> None:
        """Nothing is cached and nothing under way."""
        self.cache.reset()
        self.scheduled_encoder_inputs, self._granted, self._ended = {}, {}, {}

    def _release_computed(self, request: Request) -> None:
        features = mm_features(request)
        for input_id in list(self.cache.get_cached_input_ids(request)):
            if features[input_id].mm_position.end <= request.num_computed_tokens:
                self.cache.free_encoder_input(request, input_id)

    def _release_ended(self) -> None:
        """Whatever no plan's update has taken."""
        for request in self._ended.values():
            self.cache.free(request)
        self._ended = {}

    # ------------------------------------------------------------------ the decision

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> ScheduledInputs:
        """Which pictures the tokens `num_computed_tokens` on need, and how many tokens remain."""
        budget, num_embeds_to_schedule = self._budget, 0
        inputs, duplicates, hashes = list[int](), list[int](), set[str]()
        external = list[int]()
        for input_id, feature in enumerate(mm_features(request)):
            position, mm_hash = feature.mm_position, feature.identifier
            end = num_computed_tokens + num_new_tokens
            if position.offset >= end:
                break  # it begins behind the chunk, and so do those that follow
            if position.end <= num_computed_tokens:
                continue  # its K and V are there
            if mm_hash in hashes:
                duplicates.append(input_id)
                continue
            if self.cache.check_and_update_cache(request, input_id):
                continue
            is_cut = num_computed_tokens < position.offset and end < position.end
            if (self.disable_chunked_mm_input and is_cut) or not self.cache.can_allocate(
                request, input_id, budget, num_embeds_to_schedule
            ):
                num_new_tokens = max(0, position.offset - num_computed_tokens)
                break
            first = max(0, num_computed_tokens - position.offset)
            last = min(position.length, end - position.offset)
            rows = position.get_embeds_indices_in_range(first, last)
            if rows[0] == rows[1]:
                continue  # the chunk covers only tokens of it that take no embedding
            num_embeds = position.get_num_embeds()
            num_embeds_to_schedule += num_embeds
            hashes.add(mm_hash)
            if self.ec_connector is not None and self.ec_connector.has_cache_item(mm_hash):
                external.append(input_id)
                continue
            budget -= num_embeds
            inputs.append(input_id)
        return ScheduledInputs(inputs, num_new_tokens, budget, duplicates, external)

"""Six parts of the engine, each with one wrong rule that a release of vLLM had.

Lab 19-02 inherits from them and mends them. The engine itself has none of the four that the pin has
not, and keeps those that the pin has: it decides as the pin does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mini_vllm.async_scheduler import AsyncScheduler
from mini_vllm.block_pool import hash_block_tokens, root_hash
from mini_vllm.kv_cache import PrefixCacheStats
from mini_vllm.multimodal.encoder_cache_manager import EncoderCacheManager
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.scheduler import Scheduler

SIZE = 4
"""Tokens of a block."""


class FirstChunk(Scheduler):
    """37307: a waiting request is admitted when its first chunk fits."""

    def fits(self, request: Request, hits: Sequence[Any]) -> bool:
        """Whether a waiting request may be admitted; `hits` are blocks that it finds cached."""
        return True

    def _allocate(
        self, request: Request, num_new: int, hits: Any, external: Any, was_loaded: bool
    ) -> bool:
        if not self.fits(request, hits):
            return False
        return self.kv.allocate_slots(request, num_new, hits) is not None


class SteppedOver(AsyncScheduler):
    """49097: after a preemption the walk over the running requests steps over one of them."""

    def place_after(self, index: int, victim: int, was_planned: bool) -> int:
        """Where the walk stands once the victim has left the list."""
        return index - 1 if was_planned else index

    def _schedule_running(self, plan: SchedulerOutput, budget: int, index: int = 0) -> int:
        running, scheduled = self.running, plan.num_scheduled_tokens
        while index < len(running) and budget > 0:
            request = running[index]
            room = self._limit - 1 - request.num_computed_tokens
            num_new = self._clamp_new_tokens(self._num_wanted(request), min(budget, room))
            if num_new <= 0:
                index += 1
                continue
            while self.kv.allocate_slots(request, num_new) is None:
                before = list(running)
                victim = self._pop_victim()
                was_planned = victim.request_id in scheduled
                if was_planned:
                    budget += self._withdraw(victim, plan)
                index = self.place_after(index, before.index(victim), was_planned)
                self._preempt(victim)
                plan.preempted_req_ids.append(victim.request_id)
                if victim is request:
                    return budget
            scheduled[request.request_id] = num_new
            plan.scheduled_requests.append(request)
            self._note(request, num_new, plan)
            budget, index = budget - num_new, index + 1
        return budget


class StaleEvictions(EncoderCacheManager):
    """52482: the worker is told to drop a picture that was allocated again."""

    def get_freed_mm_hashes(self) -> list[str]:
        """What was evicted since the last call: what the worker must drop."""
        freed, self.freed = self.freed, []
        return freed


class AllAlike(PrefixCacheStats):
    """25780: a request that was preempted finds its own blocks, and the hit rate counts them."""

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Count one look-up of `num_tokens` tokens that found `num_hits`."""
        self.requests += 1
        self.queries += num_tokens
        self.hits += num_hits


class KeptHashes:
    """49377: a streaming session takes its last token back, and keeps the hash that had it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.block_hashes: list[int] = []
        """Of the full blocks, each chained to the one before."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Further tokens; the blocks that they fill are hashed."""
        self.tokens += tokens
        while (start := len(self.block_hashes) * SIZE) + SIZE <= len(self.tokens):
            parent = self.block_hashes[-1] if start else root_hash(())
            self.block_hashes.append(hash_block_tokens(parent, self.tokens[start : start + SIZE]))

    def take_back(self, num_computed_tokens: int) -> None:
        """Forget the tokens behind those that were computed."""
        del self.tokens[num_computed_tokens:]


class OpenDoor(Scheduler):
    """39734: what can never be served is accepted, and waits for ever."""

    def can_be_served(self, num_prompt_tokens: int, max_tokens: int) -> bool:
        """Whether a request of this size, alone on the server, comes to its end."""
        return num_prompt_tokens + max_tokens <= (self.max_model_len or self._limit)

    def add_request(self, request: Request) -> None:
        """Queue it. Raises ValueError where it can never be served."""
        size = request.num_prompt_tokens, request.sampling_params.max_tokens
        if not self.can_be_served(*size):
            raise ValueError(f"{request.request_id}: prompt and max_tokens {size} never fit")
        super().add_request(request)

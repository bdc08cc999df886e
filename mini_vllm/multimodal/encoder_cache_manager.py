"""Which pictures' rows are kept, who still needs them, and which are given up for others.

Promises: the same calls give the same answers, the same free and freeable counts and the same
evictions as the real one; only what no request references is evicted, the longest released first.
Mirrors `vllm/v1/core/encoder_cache_manager.py:17` `EncoderCacheManager`. It counts: the rows
themselves are in `encoder_runner.py`.
"""

from __future__ import annotations

from collections import OrderedDict

from mini_vllm.multimodal.inputs import mm_features
from mini_vllm.request import Request


class EncoderCacheManager:
    """Counts of a cache of `cache_size` embeddings, by identifier."""

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.num_free_slots = self.cache_size
        """Embeddings that fit without evicting anything."""
        self.num_freeable_slots = self.cache_size
        """Embeddings that fit if everything unreferenced is evicted."""
        self.cached: dict[str, set[str]] = {}
        """By identifier the requests that reference it; an empty set may be evicted."""
        self.freeable: OrderedDict[str, int] = OrderedDict()
        """Unreferenced ones and their sizes, the longest released first."""
        self.freed: list[str] = []
        """Evicted since the last `get_freed_mm_hashes`, in order."""

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        """Whether the rows of a request's picture are there; if so, the request references them."""
        mm_hash = mm_features(request)[input_id].identifier
        if mm_hash not in self.cached:
            return False
        if not self.cached[mm_hash]:
            self.num_freeable_slots -= self.freeable.pop(mm_hash)
        self.cached[mm_hash].add(request.request_id)
        return True

    def can_allocate(
        self,
        request: Request,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        """Whether a picture may be encoded in this step. Not a mere question: it evicts to make
        room, also for an admission that fails later.

        Args:
            request, input_id: which picture.
            encoder_compute_budget: embeddings that this step may still compute.
            num_embeds_to_schedule: those of the same request already found to fit, not allocated.
        """
        num_embeds = mm_features(request)[input_id].mm_position.get_num_embeds()
        if num_embeds > encoder_compute_budget:
            return False
        num_embeds += num_embeds_to_schedule
        if num_embeds <= self.num_free_slots:
            return True
        if num_embeds > self.num_freeable_slots:
            return False
        while num_embeds > self.num_free_slots:
            mm_hash, size = self.freeable.popitem(last=False)
            del self.cached[mm_hash]
            self.freed.append(mm_hash)
            self.num_free_slots += size
        return True

    def allocate(self, request: Request, input_id: int) -> None:
        """Take room for a picture that `can_allocate` has granted; the request references it."""
        feature = mm_features(request)[input_id]
        num_embeds = feature.mm_position.get_num_embeds()
        assert num_embeds <= self.num_free_slots <= self.num_freeable_slots
        self.cached.setdefault(feature.identifier, set()).add(request.request_id)
        self.num_free_slots -= num_embeds
        self.num_freeable_slots -= num_embeds

    def get_cached_input_ids(self, request: Request) -> set[int]:
        """The request's pictures whose rows are there, referenced or not."""
        features = mm_features(request)
        return {i for i, feature in enumerate(features) if feature.identifier in self.cached}

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """The request needs a picture no more. Its rows stay until their room is needed.

        The reference is the request's, not that of a place in its prompt: where a picture stands
        in two places, the first that is computed releases both (54284, no longer so in 0.29.0).
        """
        feature = mm_features(request)[input_id]
        holders = self.cached.get(feature.identifier)
        if not holders:
            return
        holders.discard(request.request_id)
        if not holders:
            size = feature.mm_position.get_num_embeds()
            self.freeable[feature.identifier] = size
            self.num_freeable_slots += size

    def free(self, request: Request) -> None:
        """The request ends, or starts over: it needs none of its pictures."""
        for input_id in list(self.get_cached_input_ids(request)):  # releasing may change it
            self.free_encoder_input(request, input_id)

    def get_freed_mm_hashes(self) -> list[str]:
        """What was evicted since the last call: what the worker must drop."""
        freed, self.freed = self.freed, []
        return freed

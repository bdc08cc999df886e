"""What later releases changed in the counts of the encoder cache: three rules.

Places are those of each release's own archive; the pin has none of these lines.
"""

from __future__ import annotations

from mini_vllm.multimodal.encoder_cache_manager import EncoderCacheManager
from mini_vllm.multimodal.gate import EncoderGate, ScheduledInputs
from mini_vllm.multimodal.inputs import mm_features
from mini_vllm.request import Request


class ReferencesNoted(EncoderCacheManager):
    """A request's references are those that it took, picture by picture.

    The pin goes through all its pictures whose rows are cached, for any request.
    `vllm/v1/core/encoder_cache_manager.py`, lines 213-215 of 0.27.1
    `EncoderCacheManager.get_cached_input_ids`.
    """

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.request_cached_ids: dict[str, set[int]] = {}
        """By request the pictures that it references."""

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        """As at the pin; noted."""
        found = super().check_and_update_cache(request, input_id)
        if found:
            self._note(request, input_id)
        return found

    def allocate(self, request: Request, input_id: int) -> None:
        """As at the pin; noted."""
        super().allocate(request, input_id)
        self._note(request, input_id)

    def get_cached_input_ids(self, request: Request) -> set[int]:
        """Those it references; the set itself, in whose order they are released."""
        return self.request_cached_ids.get(request.request_id, set())

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """As at the pin; the note goes."""
        noted = self.request_cached_ids.get(request.request_id, set())
        noted.discard(input_id)
        if not noted:
            self.request_cached_ids.pop(request.request_id, None)
        super().free_encoder_input(request, input_id)

    def _note(self, request: Request, input_id: int) -> None:
        self.request_cached_ids.setdefault(request.request_id, set()).add(input_id)


class AllocatedAgainStays(ReferencesNoted):
    """What was evicted and allocated again in one pass is not among what the worker drops.

    At the pin it is both. `vllm/v1/core/encoder_cache_manager.py`, lines 263-275 of 0.28.0
    `EncoderCacheManager.get_freed_mm_hashes`; PR 52482.
    """

    def get_freed_mm_hashes(self) -> list[str]:
        """As at the pin, without what is cached."""
        return [mm_hash for mm_hash in super().get_freed_mm_hashes() if mm_hash not in self.cached]


class HeldByPlace(AllocatedAgainStays):
    """A picture in two places of a prompt is held until the last of them is computed.

    At the pin the first place releases it, and another request may have it evicted before the
    second. `vllm/v1/core/encoder_cache_manager.py`, lines 246-282 of 0.32.0
    `EncoderCacheManager.free_encoder_input`; PR 54284.
    """

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """As the release before, unless another place of the same picture is referenced."""
        features = mm_features(request)
        mm_hash = features[input_id].identifier
        noted = self.request_cached_ids.get(request.request_id, set())
        if any(features[i].identifier == mm_hash for i in noted if i != input_id):
            noted.discard(input_id)
            return
        super().free_encoder_input(request, input_id)


class DuplicatesReferenced(EncoderGate):
    """Places of a picture that a chunk covers besides the one that is encoded are referenced, too.

    What `HeldByPlace` counts. `vllm/v1/core/sched/scheduler.py`, lines 1899-1901 of 0.32.0
    `Scheduler._try_schedule_encoder_inputs`; PR 54284.
    """

    def _allocate(self, request: Request, granted: ScheduledInputs) -> None:
        super()._allocate(request, granted)
        for input_id in granted.duplicate_encoder_inputs:
            self.cache.check_and_update_cache(request, input_id)

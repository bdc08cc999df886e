"""Lab 13-06: a picture's rows may go when nobody can need them any more.

The encoder's cache counts who references a picture, and gives up what nobody references when room
is needed. Three reports about one question, who can still need it:

- G1: a picture in two places of a prompt is needed until the last of them is computed (54284).
- G2: what the worker is told to drop is not what the same pass has allocated anew (52482).
- G3: a place is behind a request only when no token that is still in doubt can move the counter
  back in front of its end (45347).

Sources: `vllm/v1/core/encoder_cache_manager.py:17` `EncoderCacheManager`,
`vllm/v1/core/sched/scheduler.py:1667` `Scheduler._free_encoder_inputs`, which have none of the
three; 0.33.0 has them.
"""

from __future__ import annotations

from collections.abc import Sequence

from mini_vllm.multimodal.encoder_cache_manager import EncoderCacheManager
from mini_vllm.multimodal.inputs import PlaceholderRange, mm_features
from mini_vllm.request import Request


class Mended(EncoderCacheManager):
    """The pin's cache, with G1 and G2 kept. What it inherits is the pin's, decision by decision.

    Calls come as a scheduler makes them: for each place that a chunk reaches
    `check_and_update_cache`, else `can_allocate` and `allocate`; `free_encoder_input` once for each
    place that is computed; `free` when a request ends or starts over; `get_freed_mm_hashes` at the
    end of a pass, for the worker. What holds besides:

    - A picture that no place needs stays, freeable, in the order in which pictures came free.
    - A request gives up what it took, place by place, and nothing that another request took.
    - `free` gives up the places of a request in ascending order.
    """

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.places: dict[str, set[int]] = {}

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        """As at the pin; the place is noted."""
        found = super().check_and_update_cache(request, input_id)
        if found:
            self.places.setdefault(request.request_id, set()).add(input_id)
        return found

    def allocate(self, request: Request, input_id: int) -> None:
        """As at the pin; the place is noted."""
        super().allocate(request, input_id)
        self.places.setdefault(request.request_id, set()).add(input_id)

    def get_cached_input_ids(self, request: Request) -> set[int]:
        """The places that the request has taken and not given up."""
        return self.places.get(request.request_id, set())

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """The place needs its picture no more; the last of a picture's gives up the reference."""
        places = self.places.get(request.request_id, set())
        if input_id not in places:
            return
        places.discard(input_id)
        features = mm_features(request)
        mm_hash = features[input_id].identifier
        if not any(features[i].identifier == mm_hash for i in places):
            super().free_encoder_input(request, input_id)
        if not places:
            del self.places[request.request_id]

    def get_freed_mm_hashes(self) -> list[str]:
        """What was evicted and is not there again."""
        return [mm_hash for mm_hash in super().get_freed_mm_hashes() if mm_hash not in self.cached]


def releasable(
    places: Sequence[PlaceholderRange], num_computed_tokens: int, num_output_placeholders: int
) -> list[int]:
    """Which places of a request may be given up (G3).

    Args:
        places: in order and apart.
        num_computed_tokens: the request's counter. It counts what is planned and not known yet.
        num_output_placeholders: how many tokens of that are in doubt: drafts of plans in flight,
            and the token that such a plan samples.
    """
    certain = num_computed_tokens - num_output_placeholders
    return [index for index, place in enumerate(places) if place.end <= certain]

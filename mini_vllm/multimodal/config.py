"""How many pictures, and the budgets of their encoder.

Promises: vLLM's names and defaults. Mirrors `vllm/config/multimodal.py:74` `MultiModalConfig`, the
three fields that `vllm/config/scheduler.py:26` `SchedulerConfig` has for encoders, and
`vllm/v1/core/encoder_cache_manager.py:269` `compute_mm_encoder_budget`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mini_vllm.checks import flag, whole
from mini_vllm.config import SchedulerConfig

MOST_ITEMS = 999
"""Where no limit is given: `vllm/config/multimodal.py:322`
`MultiModalConfig.get_limit_per_prompt`."""


@dataclass(frozen=True, slots=True)
class MultiModalConfig:
    """What an engine takes whose model sees."""

    limit_mm_per_prompt: Mapping[str, int] | None = None
    """Most items of a prompt by modality; there is "image"."""
    disable_chunked_mm_input: bool = False
    """A chunk that begins in front of a picture does not end inside it. One that begins with the
    picture may: `vllm/v1/core/sched/scheduler.py:1191` `Scheduler._try_schedule_encoder_inputs`.
    """
    max_num_encoder_input_tokens: int | None = None
    """Embeddings that a step may compute; None: `max_num_batched_tokens`, which upstream takes and
    lets no argument change."""
    encoder_cache_size: int | None = None
    """Embeddings that are kept; None: the same."""

    def __post_init__(self) -> None:
        limits = self.limit_mm_per_prompt
        if limits is not None:
            if not isinstance(limits, Mapping) or set(limits) - {"image"}:
                raise ValueError(f"limit_mm_per_prompt={limits!r}: need {{'image': a number}}")
            for count in limits.values():
                whole("limit_mm_per_prompt['image']", count, 0)
        flag("disable_chunked_mm_input", self.disable_chunked_mm_input)

    @property
    def most_images(self) -> int:
        """Of a prompt."""
        return (self.limit_mm_per_prompt or {}).get("image", MOST_ITEMS)

    def encoder_budget(self, scheduler: SchedulerConfig, largest: int) -> tuple[int, int]:
        """What a step may compute and what is kept, in embeddings.

        Args:
            scheduler: whose budget of tokens is the default of both.
            largest: embeddings of the largest picture.

        Raises:
            ValueError: a picture could never be encoded or kept, or never be in one chunk whole.
        """
        budget, sizes = scheduler.max_num_batched_tokens, []
        for name in ("max_num_encoder_input_tokens", "encoder_cache_size"):
            given = getattr(self, name)
            if given is not None:
                need = f"at least {largest}, the embeddings of a picture, or None"
                whole(name, given, largest, need=need)
            sizes.append(max(budget, largest) if given is None else int(given))
        if self.disable_chunked_mm_input and budget < largest:
            raise ValueError(
                f"max_num_batched_tokens={budget}: need at least {largest}, the tokens of a "
                "picture, with disable_chunked_mm_input=True"
            )
        return sizes[0], sizes[1]

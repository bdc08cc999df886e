"""Which adapter a request wants.

Promises: the id keys slots, the name keys cached blocks; two requests are equal when their names
are. Mirrors `vllm/lora/request.py:8` `LoRARequest`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mini_vllm.config import whole
from mini_vllm.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class LoRARequest:
    """An adapter by name, number and folder. A request without one is served by the base model.

    Raises:
        ValueError: an empty name or path, or an id below 1: 0 stands for "none" in some tables.
    """

    lora_name: str
    lora_int_id: int
    """1 or more, one for each name."""
    lora_path: str
    """A folder in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`."""

    def __post_init__(self) -> None:
        for field in ("lora_name", "lora_path"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{field}={value!r}: need a non-empty text")
        whole("lora_int_id", self.lora_int_id, 1)

    def __eq__(self, other: object) -> bool:
        """Whether it is an adapter of the same name."""
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        """Of the name, and of no plain text: a cache salt spelled like it is another key."""
        return hash(("adapter", self.lora_name))


def adapter_of(request: Request) -> LoRARequest | None:
    """The adapter of an engine's request: the first of what its blocks' hashes depend on.

    Upstream puts the name in front of a salt, too: `vllm/v1/core/kv_cache_utils.py:532`
    `generate_block_hash_extra_keys`.
    """
    first = request.extra_keys[0] if request.extra_keys else None
    return first if isinstance(first, LoRARequest) else None

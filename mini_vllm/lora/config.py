"""How many adapters, how large, and how many of them are kept in memory.

Promises: vLLM's names, defaults and bounds. Mirrors `vllm/config/lora.py:30` `LoRAConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mini_vllm.checks import flag
from mini_vllm.config import whole
from mini_vllm.models.transformer import ModelConfig

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""`vllm/config/lora.py:26` `MaxLoRARanks`"""


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """What `LLM(enable_lora=True, ...)` takes."""

    max_loras: int = 1
    """Slots: most adapters in one step."""
    max_lora_rank: int = 16
    """Largest rank of an adapter."""
    max_cpu_loras: int | None = None
    """Adapters kept in memory, `max_loras` by default; the rest is read from disk again."""
    fully_sharded_loras: bool = False
    """Whether tensor ranks cut both A and B, and not only the one that is cut as the weight is."""

    def __post_init__(self) -> None:
        whole("max_loras", self.max_loras, 1)
        if self.max_lora_rank not in MAX_LORA_RANKS or isinstance(self.max_lora_rank, bool):
            ranks = ", ".join(map(str, MAX_LORA_RANKS))
            raise ValueError(f"max_lora_rank={self.max_lora_rank!r}: need one of {ranks}")
        if self.max_cpu_loras is None:
            object.__setattr__(self, "max_cpu_loras", self.max_loras)
        need = f"at least max_loras={self.max_loras}, or None"
        whole("max_cpu_loras", self.max_cpu_loras, self.max_loras, need=need)
        flag("fully_sharded_loras", self.fully_sharded_loras)

    def check_model(self, model: ModelConfig, tensor_parallel_size: int = 1) -> None:
        """Refuse a model whose layers cannot be adapted, or not on so many ranks.

        Raises:
            ValueError: a quantized checkpoint; or `fully_sharded_loras` on one rank, with experts,
                or with sizes that ranks cannot share (`vllm/distributed/utils.py:60` `divide`).
        """
        if model.quant_config is not None:
            raise ValueError("enable_lora=True: need a checkpoint without quantization_config")
        if not self.fully_sharded_loras:
            return
        if tensor_parallel_size == 1:
            raise ValueError("fully_sharded_loras=True: need tensor_parallel_size of 2 or more")
        if model.moe is not None:
            raise ValueError("fully_sharded_loras=True: need a model without experts")
        sizes = {"max_lora_rank": self.max_lora_rank, "hidden_size": model.hidden_size}
        for name, size in sizes.items():
            if size % tensor_parallel_size:
                raise ValueError(
                    f"fully_sharded_loras=True with tensor_parallel_size={tensor_parallel_size}: "
                    f"need a divisor of {name}={size}"
                )

    @property
    def capacity(self) -> int:
        """Adapters kept in memory."""
        return self.max_cpu_loras or self.max_loras

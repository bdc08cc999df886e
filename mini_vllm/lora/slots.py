"""Which adapter stands in which slot: a fixed number of slots, the least recently used makes room.

Promises: an adapter keeps its slot while it is resident, slots are numbered from 0 and reused.
Mirrors `vllm/lora/model_manager.py:1163` `LRUCacheLoRAModelManager`.
"""

from __future__ import annotations

from collections import OrderedDict

from mini_vllm.config import whole


class AdapterSlotCache:
    """An LRU cache of `max_loras` slots; what stands in them is the layers' matter."""

    def __init__(self, max_loras: int) -> None:
        """Raises ValueError when `max_loras` is below 1."""
        self.max_loras = whole("max_loras", max_loras, 1)
        self._slots: OrderedDict[int, int] = OrderedDict()  # adapter id to slot, coldest first
        self._counts = {"hits": 0, "misses": 0, "evictions": 0}

    def ensure(self, adapter_id: int) -> str:
        """Make an adapter resident and the most recently used.

        Returns:
            "hit", "load" into a free slot, or "evict+load" into that of the coldest.

        Raises:
            ValueError: the id is below 1.
        """
        whole("adapter_id", adapter_id, 1)
        if adapter_id in self._slots:
            self._slots.move_to_end(adapter_id)
            self._counts["hits"] += 1
            return "hit"
        self._counts["misses"] += 1
        if len(self._slots) < self.max_loras:
            taken = set(self._slots.values())
            self._slots[adapter_id] = min(set(range(self.max_loras)) - taken)
            return "load"
        _, slot = self._slots.popitem(last=False)
        self._slots[adapter_id] = slot
        self._counts["evictions"] += 1
        return "evict+load"

    def resident(self) -> list[int]:
        """Adapter ids, coldest first."""
        return list(self._slots)

    def slot_of(self, adapter_id: int) -> int:
        """The slot of a resident adapter. Raises KeyError for another."""
        return self._slots[adapter_id]

    def stats(self) -> dict[str, float]:
        """`hits`, `misses`, `evictions`, and `hit_rate`, 0.0 before the first call."""
        calls = self._counts["hits"] + self._counts["misses"]
        return {**self._counts, "hit_rate": self._counts["hits"] / calls if calls else 0.0}

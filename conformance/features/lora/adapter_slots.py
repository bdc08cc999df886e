"""Record what stands in which slot of the real v0.22.1, and what is kept in memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Case = dict[str, Any]

ABOUT = (
    '`{"max_loras", "max_cpu_loras", "steps": [{"adapters", "slots", "active", "memory", '
    '"loaded", "error"}]}`. `adapters`: ids that a step needs, in the order they are asked for. '
    "Afterwards: the id in each slot (None: free), the ids in slots and those in memory, coldest "
    "first, the ids read from disk in this step, and the name of the exception, or None."
)


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    from vllm.config import LoRAConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRALRUCache, LRUCacheLoRAModelManager
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    rng = random.Random(12)
    for number in range(120):
        max_loras = rng.choice((1, 2, 3, 4))
        max_cpu_loras = max_loras + rng.choice((0, 0, 1, 2, 5))
        num_adapters = rng.choice((max_loras, max_loras + 1, max_loras + 2, 12))
        # The real managers without a model behind them: no module is wrapped, loading is counted.
        manager = LRUCacheLoRAModelManager.__new__(LRUCacheLoRAModelManager)
        manager.lora_config = LoRAConfig(max_loras=max_loras, max_cpu_loras=max_cpu_loras)
        manager.lora_index_to_id, manager.modules = [None] * max_loras, {}
        manager._registered_adapters = LoRALRUCache(max_cpu_loras, manager.deactivate_adapter)
        manager._active_adapters = LoRALRUCache(max_loras, manager._deactivate_adapter)
        manager._add_adapter = lambda lora, held=manager: held._registered_adapters.put(
            lora.id, lora
        )
        loaded: list[int] = []
        worker = LRUCacheWorkerLoRAManager.__new__(LRUCacheWorkerLoRAManager)
        worker._adapter_manager = manager
        worker._load_adapter = lambda asked, into=loaded: (
            into.append(asked.lora_int_id) or LoRAModel(asked.lora_int_id, 8, {})
        )
        steps: list[dict[str, Any]] = []
        for _ in range(30):
            most = max_loras + (number % 6 == 0 and rng.random() < 0.2)
            count = min(num_adapters, rng.randint(0, most))
            wanted = rng.sample(range(1, num_adapters + 1), count)
            loaded.clear()
            error = None
            try:
                worker._apply_adapters([LoRARequest(f"lora{i}", i, "none") for i in wanted])
            except RuntimeError as raised:
                error = type(raised).__name__
            steps.append(
                {
                    "adapters": wanted,
                    "slots": list(manager.lora_index_to_id),
                    "active": list(manager._active_adapters.order),
                    "memory": list(manager._registered_adapters.order),
                    "loaded": list(loaded),
                    "error": error,
                }
            )
        yield {"max_loras": max_loras, "max_cpu_loras": max_cpu_loras, "steps": steps}

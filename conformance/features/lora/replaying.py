"""A replay with adapters: `max_loras` in the configuration, `lora` in an arrival."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from conformance.features import Find, Replayed


class Adapters(Replayed):
    """A gate for the slots; blocks that are kept apart by adapter."""

    name = "lora"
    fields = ("skipped_waiting",)
    gate = ("lora.gate", "AdapterGate")
    gate_takes = ("max_loras",)

    def is_on(self, config: Mapping[str, Any]) -> bool:
        return "max_loras" in config

    def request(
        self, add: Mapping[str, Any], make: Callable[..., Any], find: Find
    ) -> Callable[..., Any]:
        if not (adapter := add.get("lora", 0)):
            return make
        asked = find("lora.request", "LoRARequest")(f"lora{adapter}", adapter, "none")
        return functools.partial(make, extra_keys=(asked,))

    def observe(self, scheduler: Any, plan: Any) -> Mapping[str, Any]:
        return {"skipped_waiting": [r.request_id for r in getattr(scheduler, "skipped", ())]}


FEATURE = Adapters()

"""A replay of plans ahead of their tokens: `async_scheduling` in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.features import Replayed


class AsyncScheduling(Replayed):
    """Two plans in flight, and placeholders for what is to come."""

    name = "async_scheduling"
    fields = ("num_output_placeholders", "sampled_token_ids")
    scheduler = ("async_scheduler", "AsyncScheduler")
    fills_up = True

    def is_on(self, config: Mapping[str, Any]) -> bool:
        return bool(config.get("async_scheduling"))

    def depth(self, config: Mapping[str, Any]) -> int:
        return 2 if self.is_on(config) else 1

    def observe(self, scheduler: Any, plan: Any) -> Mapping[str, Any]:
        counts = {
            request_id: getattr(request, "num_output_placeholders", 0)
            for request_id, request in scheduler.requests.items()
        }
        return {"num_output_placeholders": {r: count for r, count in counts.items() if count}}


FEATURE = AsyncScheduling()

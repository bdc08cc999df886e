"""A replay of drafts: `speculative` in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.features import Replayed, nonempty


class Drafts(Replayed):
    """Drafts that requests hold, and those that are planned."""

    name = "spec_decode"
    fields = ("spec_token_ids", "scheduled_spec_decode_tokens", "sampled_token_ids")

    def is_on(self, config: Mapping[str, Any]) -> bool:
        return "speculative" in config

    def knobs(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return config["speculative"]

    def before(self, scheduler: Any) -> Mapping[str, Any]:
        requests = getattr(scheduler, "requests", {}).items()
        held = {request_id: getattr(each, "spec_token_ids", ()) for request_id, each in requests}
        return {"spec_token_ids": nonempty(held)}

    def observe(self, scheduler: Any, plan: Any) -> Mapping[str, Any]:
        return {"scheduled_spec_decode_tokens": nonempty(getattr(plan, "spec_token_ids", {}))}


FEATURE = Drafts()

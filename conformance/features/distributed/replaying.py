"""A replay of several batches in flight: `pipeline_parallel_size` in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.features import Replayed


class Pipeline(Replayed):
    """As many plans in flight as there are stages."""

    name = "distributed"
    fields = ("sampled_token_ids",)
    scheduler = ("distributed.pipeline", "PipelineScheduler")

    def is_on(self, config: Mapping[str, Any]) -> bool:
        return self.depth(config) > 1

    def depth(self, config: Mapping[str, Any]) -> int:
        return config.get("pipeline_parallel_size", 1)


FEATURE = Pipeline()

"""Record a kept workload once more: the recorder that its keys name, on any real scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from conformance import recording, workloads
from conformance.features.core import recorder as scheduler
from conformance.features.distributed import recorder as pipeline
from conformance.features.kv_transfer import kv_events
from conformance.features.kv_transfer import recorder as connectors
from conformance.features.lora import recorder as lora
from conformance.features.multimodal import recorder as pictures
from conformance.features.spec_decode import recorder as spec
from conformance.features.structured_output import recorder as grammar
from conformance.recorders import hybrid
from conformance.recorders.source import Real


def record(kept: recording.Recording, real: Real | None = None) -> recording.Recording:
    """The workload of `kept["seed"]`, made by the recorder that made `kept`.

    Args:
        kept: a recording of one of the files in `recordings/`.
        real: where the real classes come from; None: the installed package.
    """
    config, seed = kept["config"], kept["seed"]
    is_async = bool(config.get("async_scheduling"))
    if "kv_events" in kept["steps"][0]:
        return next(kv_events.record([seed], real))
    if "kv_load_failure_policy" in config:
        return next(connectors.record_failures([seed], real))
    if "finished_recving" in kept["steps"][0]:
        return next((connectors.record_async if is_async else connectors.record)([seed], real))
    if "grammar_rows" in kept["steps"][0]:
        return next(grammar.record([seed], real))
    if "encoder_cache_size" in config:
        recorded = pictures.record_async if is_async else pictures.record
        if "ec_has" in config:
            recorded = pictures.record_ec
        if seed in pictures.DENSE_SEEDS:
            recorded = pictures.record_dense
        return next(recorded([seed], real))
    if "kv_groups" in config:
        return next(_of_groups(config)([seed], real))
    if "max_loras" in config:
        return next((lora.record_async if is_async else lora.record)([seed], real))
    if "pipeline_parallel_size" in config:
        return next(pipeline.record([seed], real))
    if "speculative" in config:
        return next((spec.record_async if is_async else spec.record)([seed], real))
    made = scheduler.record_async if is_async else scheduler.record
    return made(workloads.generate(seed), real)


def _of_groups(config: Mapping[str, Any]) -> Callable[..., Iterator[recording.Recording]]:
    """What records the file that a workload with these groups is in."""
    if "speculative" in config:
        return hybrid.record_drafts
    if any("mode" in group for group in config["kv_groups"]):
        return hybrid.record_aligned
    has_states = any(group["kind"] == "mamba" for group in config["kv_groups"])
    return hybrid.record_states if has_states else hybrid.record

"""Loaded by vLLM's worker processes: `worker_extension_cls="shard_report.Report"`.

Adds a method that tells what a rank holds. Weights are counted when they have been loaded, before a
build for processors repacks them: afterwards their parameters are empty there.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.model_executor.layers import linear

LOADED: dict[str, tuple[list[int], int]] = {}
"""Shape and bytes of each linear weight, by the layer's name."""

BREAK = "SHARD_REPORT_BREAK"
"""Set, it makes the cut of K and V wrong."""

_plain = linear.UnquantizedLinearMethod.process_weights_after_loading


def _noted(self: Any, layer: Any) -> None:
    if getattr(layer, "prefix", "") and layer.weight.numel():
        weight = layer.weight
        LOADED[layer.prefix] = (list(weight.shape), weight.numel() * weight.element_size())
    _plain(self, layer)


linear.UnquantizedLinearMethod.process_weights_after_loading = _noted  # type: ignore[method-assign]


_made = linear.QKVParallelLinear.__init__


def _both_the_first_head(self: Any, *given: Any, **more: Any) -> None:
    """A wrong cut, as a control: every rank loads K and V of the first rank."""
    _made(self, *given, **more)
    self.num_kv_head_replicas = self.tp_size


if os.environ.get(BREAK):
    linear.QKVParallelLinear.__init__ = _both_the_first_head  # type: ignore[method-assign]


class Report:
    """What is added to a worker."""

    def shard_report(self) -> dict[str, Any]:
        """Process, rank, stage and its layers, bytes of weights, shapes, KV bytes of a token."""
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

        others = {
            name: parameter.numel() * parameter.element_size()
            for name, parameter in self.model_runner.model.named_parameters()  # type: ignore[attr-defined]
            if name.removesuffix(".weight") not in LOADED
        }
        specs = self.get_kv_cache_spec().values()  # type: ignore[attr-defined]
        return {
            "pid": os.getpid(),
            "rank": get_tensor_model_parallel_rank(),
            "stage": get_pp_group().rank_in_group,
            "layers": sorted({int(name.split(".layers.")[1].split(".")[0]) for name in LOADED}),
            "weight_bytes": sum(size for _, size in LOADED.values()) + sum(others.values()),
            "shapes": {n: shape for n, (shape, _) in LOADED.items() if ".layers.0." in f".{n}"},
            "kv_bytes_per_token": sum(spec.page_size_bytes // spec.block_size for spec in specs),
        }

"""Loaded by each worker process of vLLM where it runs on several ranks: `worker_extension_cls`.

The form for processors packs its weights once they are loaded and empties the parameters, so what a
rank holds is noted before that: `vllm/model_executor/model_loader/base_loader.py:43`
`BaseModelLoader.load_model`.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.model_loader import base_loader

_held: dict[str, list[Any]] = {}
_process = base_loader.process_weights_after_loading


def _noting(model: Any, *arguments: Any) -> None:
    for name, weight in model.named_parameters():
        _held[name] = [list(weight.shape), float(weight.double().sum())]
    _process(model, *arguments)


base_loader.process_weights_after_loading = _noting


class RankReport:
    """What one rank holds. vLLM's worker class gets this method."""

    def report(self) -> dict[str, Any]:
        """Its ranks, and of every parameter the shape and the sum in float64."""
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

        return {
            "tp_rank": get_tensor_model_parallel_rank(),
            "pp_rank": get_pp_group().rank_in_group,
            "weights": _held,
        }

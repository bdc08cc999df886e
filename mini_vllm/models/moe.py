"""A layer of experts: a router picks a few for each token, their products run expert by expert.

Promises: the scores are a softmax over all experts, of equal ones the lower id wins, and every
(token, expert) pair is computed once, in one product for each expert that any token chose. Mirrors
`vllm/model_executor/layers/fused_moe/router/fused_topk_router.py:69` `fused_topk` and
`vllm/model_executor/layers/fused_moe/fused_moe.py:1664` `fused_experts_impl`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mini_vllm.models.mlp import Mlp, silu_and_mul

_MANY_PAIRS = 256
ExpertsFn = Callable[[np.ndarray, Sequence[Mlp], np.ndarray, np.ndarray], np.ndarray]
"""x [num_tokens, hidden_size], experts by id, `topk_ids` and `topk_weights` [num_tokens, k]; an
expert is called with rows [n, hidden_size] and returns as many."""
RoutingObserver = Callable[[int, np.ndarray], None]
"""Called with a layer's number and `topk_ids` [num_tokens, k] of one step."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """What `config.json` says about experts. `names` are those of the tensors in the checkpoint."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """Of one expert; dense layers have `ModelConfig.intermediate_size`."""
    norm_topk_prob: bool
    """Whether the chosen weights are divided by their sum."""
    mlp_only_layers: frozenset[int] = frozenset()
    decoder_sparse_step: int = 1
    names: tuple[str, str, str, str] = ("mlp", "gate_proj", "up_proj", "down_proj")
    """The block, and its gate, up and down matrices; Mixtral's: `block_sparse_moe`, w1, w3, w2."""
    held: tuple[int, ...] | None = None
    """Ids of the experts whose weights are in this process; None: all of them."""

    @property
    def ids_here(self) -> Sequence[int]:
        """Ids of the experts to build."""
        return range(self.num_experts) if self.held is None else self.held

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has experts: every `decoder_sparse_step`-th does.

        `vllm/model_executor/models/qwen3_moe.py:397` `Qwen3MoeDecoderLayer.__init__`
        """
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


def route(logits: np.ndarray, top_k: int, renormalize: bool) -> tuple[np.ndarray, np.ndarray]:
    """Softmax over all experts, the `top_k` largest, and their weights.

    Args:
        logits: [num_tokens, num_experts], finite.
        top_k: 1 to num_experts.
        renormalize: divide each token's weights by their sum.

    Returns:
        `topk_ids` int64 [num_tokens, top_k] by falling score, of equal scores the lower id first,
        and `topk_weights` of the same shape in the dtype of `logits`.

    Raises:
        ValueError: `logits` is not two-dimensional, or `top_k` is out of range.
    """
    if np.ndim(logits) != 2:
        raise ValueError(f"logits of shape {np.shape(logits)}: need [num_tokens, num_experts]")
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k={top_k}: need 1 to {logits.shape[1]}, the number of experts")
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)
    topk_ids = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]  # [num_tokens, top_k]
    topk_weights = np.take_along_axis(scores, topk_ids, axis=1)
    if renormalize:
        topk_weights = topk_weights / topk_weights.sum(axis=1, keepdims=True)
    return topk_ids, topk_weights


def moe_forward_grouped(
    x: np.ndarray, experts: Sequence[Mlp], topk_ids: np.ndarray, topk_weights: np.ndarray
) -> np.ndarray:
    """Each token's chosen experts, weighted and summed: two products for each expert chosen.

    Pair p belongs to token p // k. Sorted by expert, the pairs of one expert lie together; each
    result goes into the row of its pair, so the end is a sum over slots and not a scatter. With few
    pairs calls cost most, so the activation runs once for all; with many, an expert's rows stay in
    a core's cache from the gather to the result.

    Args:
        x: [num_tokens, hidden_size].
        experts: by expert id.
        topk_ids: int [num_tokens, k]; topk_weights: the same shape.

    Returns:
        [num_tokens, hidden_size] in the dtype of `x`.
    """
    num_tokens, top_k = topk_ids.shape
    flat = topk_ids.reshape(-1)  # [num_tokens * k]
    order = np.argsort(flat, kind="stable")
    ends = np.cumsum(np.bincount(flat, minlength=len(experts))).tolist()
    chosen = [
        (expert, start, end)
        for expert, start, end in zip(experts, [0, *ends], ends, strict=False)
        if end > start
    ]
    weights = topk_weights.reshape(-1, 1)[order].astype(x.dtype, copy=False)
    if flat.size > _MANY_PAIRS:
        pairs = np.empty((flat.size, x.shape[1]), dtype=x.dtype)
        for expert, start, end in chosen:
            mine = order[start:end]
            pairs[mine] = expert(x[mine // top_k]) * weights[start:end]
    else:
        pairs = x[order // top_k]  # one expert's rows after the other's
        inner = silu_and_mul(
            np.concatenate([expert.gate_up_proj(pairs[start:end]) for expert, start, end in chosen])
        )
        for expert, start, end in chosen:
            pairs[order[start:end]] = expert.down_proj(inner[start:end]) * weights[start:end]
    by_slot = pairs.reshape(num_tokens, top_k, -1).swapaxes(0, 1)  # [k, num_tokens, hidden_size]
    out = by_slot[0].copy()
    for slot in range(1, top_k):
        out += by_slot[slot]
    return out


class SparseMlp:
    """Router and experts of one layer, in the place of its MLP."""

    def __init__(
        self,
        config: MoeConfig,
        layer: int,
        gate: Callable[[np.ndarray], np.ndarray],
        experts: Sequence[Mlp],
        forward: ExpertsFn = moe_forward_grouped,
    ) -> None:
        """Args: gate, [num_tokens, hidden_size] to logits [num_tokens, num_experts]; the experts;
        and what computes them: a replacement for `moe_forward_grouped`."""
        self.config = config
        self.layer = layer
        self.gate = gate
        self.experts = experts
        self.forward = forward
        self.observers: list[RoutingObserver] = []

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[num_tokens, hidden_size] to the same."""
        config = self.config
        topk_ids, topk_weights = route(
            self.gate(x), config.num_experts_per_tok, config.norm_topk_prob
        )
        for observer in self.observers:
            observer(self.layer, topk_ids)
        return self.forward(x, self.experts, topk_ids, topk_weights)


def sparse_layers(model: Any) -> list[SparseMlp]:
    """The layers of experts of a model, from the first; none of a dense or foreign one."""
    blocks = [getattr(layer, "experts", None) for layer in getattr(model, "layers", ())]
    return [block for block in blocks if isinstance(block, SparseMlp)]


@contextmanager
def observing_routing(model: Any, observer: RoutingObserver) -> Iterator[None]:
    """Call `observer` with the choices of every layer of experts inside the block."""
    layers = sparse_layers(model)
    for layer in layers:
        layer.observers.append(observer)
    try:
        yield
    finally:
        for layer in layers:
            layer.observers.remove(observer)


class ExpertLoads:
    """An observer that counts: `loads[layer][expert]` is how many tokens chose that expert."""

    def __init__(self, model: Any) -> None:
        self._sizes = {block.layer: block.config.num_experts for block in sparse_layers(model)}
        self.loads: dict[int, np.ndarray] = {}
        self.clear()

    def clear(self) -> None:
        """Begin again with zeros, int64 [num_experts] for each layer of experts."""
        self.loads = {layer: np.zeros(size, np.int64) for layer, size in self._sizes.items()}

    def __call__(self, layer: int, topk_ids: np.ndarray) -> None:
        self.loads[layer] += np.bincount(topk_ids.reshape(-1), minlength=self._sizes[layer])

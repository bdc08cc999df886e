"""The layers that know of other ranks; all others are the model's own, only smaller.

Promises: a row-parallel layer and the embedding end with one all-reduce each, the head with one
all-gather; nothing else of a dense model talks. Mirrors `vllm/model_executor/layers/linear.py:1392`
`RowParallelLinear`, `vllm/model_executor/layers/vocab_parallel_embedding.py:192`
`VocabParallelEmbedding` and `vllm/model_executor/layers/logits_processor.py:20` `LogitsProcessor`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mini_vllm.distributed.collectives import Communicator
from mini_vllm.distributed.config import padded_vocab
from mini_vllm.models.mlp import Mlp
from mini_vllm.models.moe import moe_forward_grouped
from mini_vllm.models.transformer import Linear, LinearFactory, LinearLike

ROW_PARALLEL = ("self_attn.o_proj", "mlp.down_proj")
"""Layers whose inputs are spread over the ranks."""


class RowParallelLinear:
    """y = sum over ranks of x_r @ weight_r.T, + bias once."""

    def __init__(
        self, weight: np.ndarray, bias: np.ndarray | None, name: str, group: Communicator
    ) -> None:
        """Args: weight [out, in / ranks]; bias [out] or None, added by the first rank alone, for
        otherwise the sum would hold it once per rank; name; who adds up."""
        self.name, self.group = name, group
        self.linear: LinearLike = Linear(weight, bias if group.rank == 0 else None, name)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[num_tokens, in / ranks] to [num_tokens, out]."""
        return self.group.all_reduce(self.linear(x), self.name)


def linear_factory(group: Communicator) -> LinearFactory:
    """What builds a rank's projections from its parts of their weights.

    The matrices of experts are added up once for the whole layer, not here.
    """

    def make(weight: np.ndarray, bias: np.ndarray | None, name: str) -> LinearLike:
        if name.endswith(ROW_PARALLEL):
            return RowParallelLinear(weight, bias, name, group)
        return Linear(weight, bias, name)

    return make


class VocabParallelEmbedding:
    """Each rank looks up the tokens of its slice of the vocabulary; the others are zeros."""

    def __init__(self, weight: np.ndarray, vocab_size: int, group: Communicator) -> None:
        """Args: the rank's rows [at most padded / ranks, hidden_size]; all tokens; who adds up."""
        self.weight, self.group = weight, group
        self.start = min(group.rank * (padded_vocab(vocab_size) // group.size), vocab_size)

    def __call__(self, token_ids: np.ndarray) -> np.ndarray:
        """[num_tokens] to [num_tokens, hidden_size]."""
        local = token_ids - self.start
        here = (local >= 0) & (local < len(self.weight))
        rows = np.zeros((len(token_ids), self.weight.shape[1]), self.weight.dtype)
        rows[here] = self.weight[local[here]]
        return self.group.all_reduce(rows, "model.embed_tokens")


class VocabParallelHead:
    """Each rank computes the logits of its slice of the vocabulary; all get all of them."""

    def __init__(self, weight: np.ndarray, vocab_size: int, group: Communicator) -> None:
        """Args: as `VocabParallelEmbedding`. Padding rows are zeros, and cut off at the end."""
        size = padded_vocab(vocab_size) // group.size if group.size > 1 else vocab_size
        padded = np.zeros((size, weight.shape[1]), weight.dtype)
        padded[: len(weight)] = weight
        self.linear = Linear(padded, None, "lm_head")
        self.vocab_size, self.group = vocab_size, group

    def __call__(self, hidden: np.ndarray) -> np.ndarray:
        """[num_rows, hidden_size] to logits [num_rows, vocab_size]."""
        parts = self.group.all_gather(self.linear(hidden), "lm_head")
        return np.concatenate(parts, axis=1)[:, : self.vocab_size]


class TensorParallelExperts:
    """Every rank has a part of every expert: one all-reduce for the whole layer."""

    def __init__(self, group: Communicator, name: str) -> None:
        self.group, self.name = group, name

    def __call__(
        self, x: np.ndarray, experts: Sequence[Mlp], topk_ids: np.ndarray, topk_weights: np.ndarray
    ) -> np.ndarray:
        """As `moe_forward_grouped`."""
        partial = moe_forward_grouped(x, experts, topk_ids, topk_weights)
        return self.group.all_reduce(partial, self.name)

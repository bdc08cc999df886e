"""One rank's part of a model: some layers of it, and of those a share of every matrix.

Promises R6: it is the same decoder as in one process, built from smaller weights and a few layers
that talk; between stages goes one array, the residual stream, whole from each tensor-parallel rank
to its like (the real engine sends a share each and gathers:
`vllm/distributed/parallel_state.py:819` `GroupCoordinator._should_use_all_gather`). Mirrors
`vllm/model_executor/models/llama.py:350` `LlamaModel` and
`vllm/v1/worker/gpu_worker.py:781` `Worker.execute_model`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mini_vllm.attention import paged_attention
from mini_vllm.batch import ForwardBatch
from mini_vllm.distributed.collectives import CommStats, Communicator
from mini_vllm.distributed.config import ParallelConfig, local_config
from mini_vllm.distributed.context import ContextParallelAttention, local_batch
from mini_vllm.distributed.experts import ExpertParallel
from mini_vllm.distributed.layers import (
    TensorParallelExperts,
    VocabParallelEmbedding,
    VocabParallelHead,
    linear_factory,
)
from mini_vllm.distributed.shards import RankWeights, WeightSource
from mini_vllm.distributed.transport import Transport
from mini_vllm.models.moe import sparse_layers
from mini_vllm.models.transformer import (
    build_layers,
    head_name,
    rms_norm,
    rope_frequencies,
    run_layers,
)


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank loads."""

    parallel: ParallelConfig
    source: WeightSource
    num_blocks: int
    block_size: int
    """Tokens per block on one rank; a block of the scheduler holds `decode_context_parallel_size`
    times as many."""
    dtype: str


class RankModel:
    """The layers, the caches and the connections of one rank."""

    def __init__(self, spec: RankSpec, transport: Transport, stats: CommStats) -> None:
        """Read this rank's parts and allocate the K and V of its layers and heads.

        Raises:
            ValueError: a checkpoint that cannot be loaded, or no memory for the cache.
        """
        self.place = place = spec.parallel.place(transport.rank)
        self.config = config = spec.source.config
        self.dtype = np.dtype(spec.dtype)
        self.tp = Communicator(transport, place.group("tp"), stats)
        self.pp = Communicator(transport, place.group("pp"), stats)
        self.dcp = Communicator(transport, place.group("dcp"), stats)
        self.weights = RankWeights(spec.source, place)
        mine = local_config(config, place)
        self.indices = indices = place.layers(config.num_hidden_layers)
        self.layers = build_layers(
            mine, self.weights, self._cast, linear_factory(self.tp),
            indices=indices, token_tile=sys.maxsize,
        )  # fmt: skip
        self._frequencies = rope_frequencies(config)
        for block in sparse_layers(self):
            name = f"model.layers.{block.layer}.mlp.experts"
            block.forward = (
                ExpertParallel(self.tp, name, block.config.num_experts)
                if place.expert_parallel
                else TensorParallelExperts(self.tp, name)
            )
        self.attention = (
            ContextParallelAttention(self.dcp, indices) if place.dcp_size > 1 else paged_attention
        )
        vocab = config.vocab_size
        if place.is_first_stage:
            rows = self._cast(self.weights["model.embed_tokens.weight"])
            self.embed: Callable[[np.ndarray], np.ndarray]
            self.embed = VocabParallelEmbedding(rows, vocab, self.tp)
        if place.is_last_stage:
            self.norm = self._cast(self.weights["model.norm.weight"])
            rows = self._cast(self.weights[head_name(config)])
            self.head: Callable[[np.ndarray], np.ndarray]
            self.head = VocabParallelHead(rows, vocab, self.tp)
        heads = mine.num_key_value_heads, mine.head_dim
        shape = (len(indices), 2, spec.num_blocks, spec.block_size, *heads)
        self.kv_cache = _cache(shape, self.dtype)

    def _cast(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array, dtype=self.dtype)

    def forward(self, batch: ForwardBatch) -> np.ndarray | None:
        """Run this rank's part of one step.

        Returns:
            Logits [num_rows, vocab_size] on every rank of the last stage, None on others.
        """
        place = self.place
        if place.dcp_size > 1:
            batch = local_batch(batch, place.dcp_rank, place.dcp_size)
        batch.kv_cache = self.kv_cache
        if place.is_first_stage:
            hidden = self.embed(batch.token_ids)  # [num_tokens, hidden_size]
        else:
            shape = len(batch.token_ids), self.config.hidden_size
            hidden = self.pp.recv(shape, self.dtype, place.pp_rank - 1, "hidden_states")
        run_layers(self.layers, hidden, batch, self.attention, self._frequencies)
        if not place.is_last_stage:
            self.pp.send(hidden, place.pp_rank + 1, "hidden_states")
            return None
        last = hidden[batch.logits_indices]  # [num_rows, hidden_size]
        return self.head(rms_norm(last, self.norm, self.config.rms_norm_eps))


def _cache(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    try:
        return np.zeros(shape, dtype)
    except MemoryError:
        size = np.prod(shape, dtype=float) * dtype.itemsize / 2**30
        raise ValueError(
            f"num_blocks={shape[2]}: a KV cache of {size:,.1f} GiB does not fit, need fewer blocks"
        ) from None

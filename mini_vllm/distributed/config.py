"""How a model is split, and which sizes it can be split by.

Promises: vLLM's names and rules; sizes that do not divide are refused with the sizes that would,
before any process is started. Mirrors `vllm/config/parallel.py:108` `ParallelConfig` and
`vllm/config/model.py:1191` `ModelConfig.verify_with_parallel_config`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mini_vllm.checks import number, whole
from mini_vllm.distributed.groups import Place, experts_of
from mini_vllm.models.transformer import VOCAB_PADDING, ModelConfig

TRANSPORTS = ("shared_memory", "sockets")
MOST_RANKS = 16
"""Processes of one engine. A slip of the finger should not start a thousand."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """What `LLM(tensor_parallel_size=2, ...)` takes."""

    tensor_parallel_size: int = 1
    """Ranks that share every layer: a part of each matrix and of the heads."""
    pipeline_parallel_size: int = 1
    """Stages that share the layers; as many batches are in flight."""
    enable_expert_parallel: bool = False
    """Whole experts per tensor-parallel rank instead of a part of each."""
    decode_context_parallel_size: int = 1
    """Tensor-parallel ranks that share the K and V of a sequence where they would hold copies."""
    rank_transport: str = "shared_memory"
    """"shared_memory" or "sockets": what the bytes between ranks go through."""
    rank_timeout_s: float = 60.0
    """Seconds that a rank waits for another, and the engine for a step."""

    def __post_init__(self) -> None:
        tp = whole("tensor_parallel_size", self.tensor_parallel_size, 1, MOST_RANKS)
        pp = whole("pipeline_parallel_size", self.pipeline_parallel_size, 1, MOST_RANKS)
        if tp * pp > MOST_RANKS:
            raise ValueError(
                f"tensor_parallel_size={tp} times pipeline_parallel_size={pp}: need at most "
                f"{MOST_RANKS} ranks"
            )
        if not isinstance(self.enable_expert_parallel, bool):
            raise ValueError(f"enable_expert_parallel={self.enable_expert_parallel!r}: need a bool")
        dcp = whole("decode_context_parallel_size", self.decode_context_parallel_size, 1)
        if tp % dcp:
            raise ValueError(
                f"decode_context_parallel_size={dcp}: need a divisor of tensor_parallel_size={tp}: "
                f"{_listed(d for d in range(1, tp + 1) if tp % d == 0)}"
            )
        if self.rank_transport not in TRANSPORTS:
            raise ValueError(
                f"rank_transport={self.rank_transport!r}: need one of {', '.join(TRANSPORTS)}"
            )
        if number("rank_timeout_s", self.rank_timeout_s) <= 0:
            raise ValueError(f"rank_timeout_s={self.rank_timeout_s!r}: need more than 0")

    @property
    def world_size(self) -> int:
        """Processes. `vllm/config/parallel.py:766` `ParallelConfig.world_size`"""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def output_rank(self) -> int:
        """Who answers: the first tensor-parallel rank of the last stage.

        `vllm/v1/executor/multiproc_executor.py:480` `MultiprocExecutor._get_output_rank`
        """
        return self.world_size - self.tensor_parallel_size

    @property
    def max_concurrent_batches(self) -> int:
        """Batches in flight: `vllm/v1/executor/multiproc_executor.py:475`
        `MultiprocExecutor.max_concurrent_batches` without `async_scheduling`."""
        return self.pipeline_parallel_size

    def place(self, rank: int) -> Place:
        """A rank's coordinates."""
        return Place.of(
            rank, self.tensor_parallel_size, self.pipeline_parallel_size,
            self.decode_context_parallel_size, self.enable_expert_parallel,
        )  # fmt: skip

    def check_model(self, config: ModelConfig) -> None:
        """Refuse a model that cannot be split so.

        Raises:
            ValueError: a size does not divide what it must; those that would are named.
        """
        tp, pp, dcp = (
            self.tensor_parallel_size, self.pipeline_parallel_size,
            self.decode_context_parallel_size,
        )  # fmt: skip
        if why := why_not(config, tp, self.enable_expert_parallel):
            good = [
                size for size in range(1, config.num_attention_heads + 1)
                if not why_not(config, size, self.enable_expert_parallel)
            ]  # fmt: skip
            raise ValueError(f"tensor_parallel_size={tp}: {why}; need one of {_listed(good)}")
        if pp > config.num_hidden_layers:
            raise ValueError(
                f"pipeline_parallel_size={pp}: need 1 to {config.num_hidden_layers}, the number of "
                "layers"
            )
        if self.enable_expert_parallel and config.moe is None:
            raise ValueError("enable_expert_parallel=True: the model has no experts, need False")
        if dcp > 1:
            self._check_context(config, tp, dcp)

    @staticmethod
    def _check_context(config: ModelConfig, tp: int, dcp: int) -> None:
        """K and V can be spread over as many ranks as would otherwise hold copies of them.

        The real check (`vllm/config/model.py:1216` `ModelConfig.verify_with_parallel_config`) asks
        for at most as many; the ranks of a group must besides all have the same KV head.
        """
        kv = config.num_key_value_heads
        copies = tp // kv if tp > kv else 1
        if copies % dcp:
            raise ValueError(
                f"decode_context_parallel_size={dcp}: with tensor_parallel_size={tp} and {kv} KV "
                f"heads each is held {copies} time(s); need one of "
                f"{_listed(d for d in range(1, copies + 1) if copies % d == 0)}"
            )


def why_not(config: ModelConfig, tp: int, expert_parallel: bool = False) -> str:
    """What `tp` ranks cannot share of a model; empty when they can."""
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    if heads % tp:
        return f"does not divide num_attention_heads={heads}"
    if kv % tp and tp % kv:
        return f"neither divides num_key_value_heads={kv} nor is a multiple of it"
    has_dense = config.moe is None or not all(
        config.moe.is_sparse(layer) for layer in range(config.num_hidden_layers)
    )
    if has_dense and config.intermediate_size % tp:
        return f"does not divide intermediate_size={config.intermediate_size}"
    if config.moe is not None and not expert_parallel and config.moe.intermediate_size % tp:
        return f"does not divide moe_intermediate_size={config.moe.intermediate_size}"
    if config.moe is not None and expert_parallel and tp > config.moe.num_experts:
        return f"is more than num_experts={config.moe.num_experts}"
    if padded_vocab(config.vocab_size) % tp:
        return f"does not divide the padded vocabulary, {padded_vocab(config.vocab_size)}"
    return ""


def padded_vocab(vocab_size: int) -> int:
    """The vocabulary up to a multiple of 64, so that usual numbers of ranks divide it."""
    return -(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING


def local_config(config: ModelConfig, place: Place) -> ModelConfig:
    """The sizes of one rank's part: its heads, its columns, its experts.

    Where there are fewer KV heads than ranks each rank has one, and some have the same:
    `vllm/model_executor/layers/linear.py:975` `QKVParallelLinear`.
    """
    tp, moe = place.tp_size, config.moe
    if moe is not None and place.expert_parallel:
        moe = replace(moe, held=tuple(experts_of(moe.num_experts, place.tp_rank, tp)))
    elif moe is not None:
        moe = replace(moe, intermediate_size=moe.intermediate_size // tp)
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // tp,
        num_key_value_heads=max(1, config.num_key_value_heads // tp),
        intermediate_size=config.intermediate_size // tp,
        moe=moe,
    )


def _listed(sizes: object) -> str:
    return ", ".join(map(str, sizes))  # type: ignore[call-overload]

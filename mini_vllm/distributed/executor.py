"""The engine's side of the ranks: a model whose forward pass happens in other processes.

Promises R4: the engine plans, samples and decides alone; each step's batch goes to every rank
once, and one rank answers with the logits. Mirrors `vllm/v1/executor/multiproc_executor.py:306`
`MultiprocExecutor.execute_model` and `vllm/v1/executor/multiproc_executor.py:480`
`MultiprocExecutor._get_output_rank`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mini_vllm.batch import ForwardBatch, Model
from mini_vllm.config import EngineConfig
from mini_vllm.distributed.collectives import CommStats
from mini_vllm.distributed.config import ParallelConfig
from mini_vllm.distributed.model import RankSpec
from mini_vllm.distributed.pipeline import PipelineScheduler, StagedExecutor
from mini_vllm.distributed.pool import RankPool
from mini_vllm.distributed.shards import FolderSource, PartSource, WeightSource
from mini_vllm.distributed.worker import BATCH_FIELDS, Worker
from mini_vllm.feature import Feature
from mini_vllm.models.families import architecture_of
from mini_vllm.models.files import read_json
from mini_vllm.models.loader import load_checkpoint, resolve
from mini_vllm.models.registry import LoadedModel, eos_of
from mini_vllm.models.transformer import ModelConfig
from mini_vllm.parts import EngineParts
from mini_vllm.tokenizer import ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    from mini_vllm.features import EngineSetup

PARTS_INSIDE = ("models", "spec_decode", "lora")
"""Rooms whose parts would have to; all others work in the engine's process."""


class Ranks(Feature):
    """A `Model` in other processes. It owns them unless the caller gave a pool."""

    name = "distributed"

    def __init__(self, pool: RankPool, spec: RankSpec, owns_pool: bool) -> None:
        """Load the model into the ranks.

        Raises:
            ValueError: what a rank refuses to load.
            RankError: a rank is gone.
        """
        self.pool, self.spec, self.owns_pool = pool, spec, owns_pool
        self.parallel = spec.parallel
        self.loaded: list[dict[str, Any]] = pool.rpc("load", spec)[: self.parallel.world_size]
        """By rank: process id, numbers of weights, shape of the K and V, layers."""

    @property
    def depth(self) -> int:
        """Batches in flight when all stages are busy."""
        return self.parallel.max_concurrent_batches

    def submit(self, batch: ForwardBatch) -> int:
        """Tell the ranks to run a batch; the number to ask the result by.

        Raises:
            RankError: a rank is gone.
        """
        fields = tuple(getattr(batch, name) for name in BATCH_FIELDS)
        return self.pool.call("execute", fields, answers=[self.parallel.output_rank])

    def collect(self, number: int) -> np.ndarray:
        """The logits of a batch, when they are there.

        Raises:
            RankError: a rank is gone, or late.
        """
        try:
            return self.pool.result(number)[self.parallel.output_rank]
        except BaseException:
            self.discard_batches()
            raise

    def discard_batches(self) -> None:
        """Give up what is in flight: the ranks finish it, and its results are not looked at."""
        self.pool.forget()

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """Logits [num_rows, vocab_size], as of any model."""
        return self.collect(self.submit(batch))

    def comm_stats(self) -> list[CommStats]:
        """By rank, what it sent to other ranks in the last step."""
        return self.pool.rpc("comm_stats")[: self.parallel.world_size]

    def collective_rpc(
        self, method: str | Callable[..., Any], args: Sequence[Any] = ()
    ) -> list[Any]:
        """Call something in every rank; the answers by rank.

        Args:
            method: a method of `worker.Worker` by name, or a function that is called with the
                rank's worker; the ranks import it from its module.
            args: its further arguments.

        Raises:
            ValueError: no such method.
            RankError: it raised, or a rank is gone; all have been ended.
        """
        if not callable(method) and (str(method)[:1] == "_" or not hasattr(Worker, str(method))):
            raise ValueError(f"method={method!r}: need a function, or a method of Worker")
        call = ("run", method, *args) if callable(method) else (method, *args)
        return self.pool.rpc(*call)[: self.parallel.world_size]

    def close(self) -> None:
        """End the ranks, if they are the engine's own."""
        if self.owns_pool:
            self.pool.close()


def open_room(arguments: Mapping[str, Any], setup: EngineSetup) -> Ranks | None:
    """Start ranks and have them load the model, unless one process is enough.

    Args:
        arguments: those of `ParallelConfig`, and `rank_pool`, a `RankPool` of the caller's to run
            on.
        setup: its model is a shipped one, a folder, a hub id, or a `WeightSource`.

    Raises:
        ValueError: sizes that do not divide the model; a model, part or argument that does not go
            with ranks; `async_scheduling` with stages.
        RankError: a rank did not start.
    """
    settings = dict(arguments)
    pool = settings.pop("rank_pool", None)
    parallel = ParallelConfig(**settings)
    if parallel.world_size == 1 and pool is None:
        if parallel.enable_expert_parallel:
            raise ValueError("enable_expert_parallel=True: need tensor_parallel_size of 2 or more")
        return None
    _check_others(parallel, setup, pool)
    source, loaded = _describe(setup.model, setup.tokenizer, setup.config)
    parallel.check_model(source.config)
    if setup.arguments.get("enable_lora"):
        _check_adapters(parallel, setup, source.config)
    if (cut := setup.parts.of_room("distributed", "shards")) is not None:
        source = PartSource(source, parallel.tensor_parallel_size, parallel.place, cut)
    config = setup.config.with_max_model_len(source.config.max_position_embeddings)
    cache, dcp = config.cache, parallel.decode_context_parallel_size
    spec = RankSpec(
        parallel, source, cache.num_blocks, cache.block_size, np.dtype(config.dtype).name
    )
    owns_pool = pool is None
    pool = pool or RankPool(parallel.world_size, parallel.rank_transport, parallel.rank_timeout_s)
    try:
        ranks = Ranks(pool, spec, owns_pool)
    except BaseException:
        if owns_pool:
            pool.close()
        raise
    setup.config = replace(config, cache=replace(cache, block_size=cache.block_size * dcp))
    setup.loaded = loaded(ranks)
    if ranks.depth > 1:
        setup.parts = replace(setup.parts, scheduler=PipelineScheduler)
        setup.executor = functools.partial(StagedExecutor, ranks=ranks, depth=ranks.depth)
    return ranks


def _check_others(parallel: ParallelConfig, setup: EngineSetup, pool: RankPool | None) -> None:
    """Refuse what does not work with ranks, by name."""
    parts, standard = setup.parts, EngineParts()
    ours = f"tensor_parallel_size={parallel.tensor_parallel_size}"
    if parallel.pipeline_parallel_size > 1:
        ours = f"pipeline_parallel_size={parallel.pipeline_parallel_size}"
    _check_drafts(setup, ours)
    for name in ("speculative_config", "enable_lora"):
        if setup.arguments.get(name):
            _check_tensor_ranks_alone(name, parallel, setup)
    inside = [n for n in ("attention", "linear") if getattr(parts, n) != getattr(standard, n)]
    inside += [name for room in PARTS_INSIDE for name in parts.rooms.get(room, ())]
    if inside:
        raise ValueError(
            f"parts.{inside[0]}: need the standard one with {ours}; it would have to work in "
            "other processes"
        )
    if parallel.pipeline_parallel_size > 1:
        if setup.config.scheduler.async_scheduling:
            raise ValueError(
                f"async_scheduling=True: need False with {ours}, whose stages are kept busy by "
                "other batches"
            )
        if parts.scheduler is not standard.scheduler:
            raise ValueError(f"parts.scheduler: need the standard scheduler with {ours}")
    if pool is not None:
        if not isinstance(pool, RankPool):
            raise ValueError(f"rank_pool={pool!r}: need a RankPool")
        if pool.world_size < parallel.world_size:
            raise ValueError(
                f"rank_pool: has {pool.world_size} ranks, need at least {parallel.world_size}"
            )


def _check_drafts(setup: EngineSetup, ours: str) -> None:
    """A lookup and a draft model work in the engine's process; MTP reads the target's states."""
    if not (given := setup.arguments.get("speculative_config")):
        return
    from mini_vllm.spec_decode.config import SpeculativeConfig

    method = SpeculativeConfig.of(given).method
    if method not in ("ngram", "draft_model"):
        raise ValueError(
            f"speculative_config of method={method!r} with {ours}: need 'ngram' or 'draft_model'"
        )


def _check_adapters(parallel: ParallelConfig, setup: EngineSetup, config: ModelConfig) -> None:
    """What the adapters' room would refuse after the ranks have started."""
    from mini_vllm.lora.config import LoRAConfig

    names = {field.name for field in fields(LoRAConfig)} & setup.arguments.keys()
    adapters = LoRAConfig(**{name: setup.arguments[name] for name in names})
    adapters.check_model(config, parallel.tensor_parallel_size)


def _check_tensor_ranks_alone(name: str, parallel: ParallelConfig, setup: EngineSetup) -> None:
    """Refuse, beside tensor ranks and the argument `name`, what was not compared with both."""
    others = (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size > 1),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size > 1),
        ("async_scheduling", setup.config.scheduler.async_scheduling),
        ("enable_expert_parallel", parallel.enable_expert_parallel and name == "enable_lora"),
        ("speculative_config", setup.arguments.get("speculative_config") and name == "enable_lora"),
    )
    for other, is_set in others:
        if is_set:
            raise ValueError(f"{other} with {name}: need tensor_parallel_size alone")


def _describe(
    model: Any, tokenizer: Tokenizer | None, config: EngineConfig
) -> tuple[WeightSource, Callable[[Model], LoadedModel]]:
    """Where the ranks read the weights, and everything else about the model."""
    if isinstance(model, str | Path) and str(model) != "toy":
        if architecture_of(read_json(resolve(model) / "config.json")) is not None:
            raise ValueError(
                f"model={str(model)!r}: ranks need a model with one kind of KV cache in all layers"
            )
        checkpoint = load_checkpoint(model, read=lambda folder, config: {})
        eos = checkpoint.eos_token_ids or eos_of(checkpoint.tokenizer)
        source: WeightSource = FolderSource(checkpoint.folder, checkpoint.config)
        tokens, template = tokenizer or checkpoint.tokenizer, checkpoint.chat_template
    elif hasattr(model, "read") and hasattr(model, "config"):
        source, tokens, template = model, tokenizer or ByteTokenizer(), None
        eos = eos_of(tokens)
    else:
        raise ValueError(
            f"model={model!r}: ranks need byte-llama, byte-moe, a folder or a hub id, which each "
            "of them can read"
        )
    vocab, longest = source.config.vocab_size, source.config.max_position_embeddings

    def loaded(ranks: Model) -> LoadedModel:
        return LoadedModel(ranks, tokens, eos, vocab, (), config.dtype, longest, template)

    return source, loaded

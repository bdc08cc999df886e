"""What the tests of ranks share: tiny models that every rank can make, ranks, a workload.

Promises: a model's weights depend on its seed and the tensors' names alone, so a rank that makes
its part of them makes the same numbers. Imports no pytest: ranks import this module too.
"""

from __future__ import annotations

import functools
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.batch import ForwardBatch
from mini_vllm.distributed.layers import RowParallelLinear
from mini_vllm.distributed.pool import RankPool
from mini_vllm.distributed.shards import Part
from mini_vllm.distributed.worker import Worker
from mini_vllm.models.config import expected_shapes
from mini_vllm.models.moe import MoeConfig
from mini_vllm.models.transformer import ModelConfig, Transformer
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request

DENSE = ModelConfig(61, 32, 48, 4, 4, 2, 8, 512)
"""Two KV heads: two ranks have one each, four have copies. The vocabulary is padded to 64."""
ALL_BIASES = ModelConfig(
    70, 32, 48, 4, 8, 8, 8, 512,
    tie_word_embeddings=False, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True,
)  # fmt: skip
"""As many KV heads as heads, a head of its own, norms of Q and K, and a bias everywhere."""
MOE = ModelConfig(
    61, 32, 48, 4, 4, 1, 8, 512,
    moe=MoeConfig(6, 2, 16, True, mlp_only_layers=frozenset({1})),
)  # fmt: skip
"""Six experts, which two ranks share evenly and four do not; a dense layer among the others."""

TOLERANCE = 1e-11
"""On float64 logits of size 1 to 10. A sum of n products has an error of at most n u times the sum
of their sizes, u = 1.1e-16, in whatever order it is taken; n is at most 64 here, and some thirty
such sums follow each other, so 1e-13 is what to expect. A wrong part is off by 0.1 and more."""


@dataclass(frozen=True)
class RandomSource:
    """A `WeightSource` of random numbers."""

    config: ModelConfig
    seed: int = 0

    def read(self, name: str, part: Part) -> np.ndarray:
        """float64; norms are near 1, biases as large as the weights."""
        shape = expected_shapes(self.config)[name]
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        if "norm" in name:
            return rng.uniform(0.5, 1.5, shape)[part]
        return rng.normal(0, 1.5 / np.sqrt(shape[-1]) if len(shape) > 1 else 0.5, shape)[part]

    def transformer(self, dtype: str = "float64") -> Transformer:
        """The whole model in this process."""
        names = expected_shapes(self.config)
        return Transformer(self.config, {n: self.read(n, ()) for n in names}, dtype)


_POOLS: dict[str, RankPool] = {}


def pool(transport: str = "shared_memory") -> RankPool:
    """Four ranks that all tests of this process use in turn; new ones if a test broke them."""
    if transport not in _POOLS or not _POOLS[transport].is_alive:
        _POOLS[transport] = RankPool(4, transport, timeout_s=20.0)
    return _POOLS[transport]


# ------------------------------------------------------------------ workloads

PREFIX = [5, 9, 2, 44, 17, 30, 8, 21, 13]
PROMPTS = [
    [*PREFIX, 1, 2, 3], [7] * 23, [*PREFIX, 1, 2, 4, 50], [11, 12], [*PREFIX, 60, *PREFIX, 3],
    [33, 7, 19, 20, 21, 22, 9],
]  # fmt: skip
KNOBS: dict[str, Any] = {
    "dtype": "float64", "max_num_batched_tokens": 11, "max_num_seqs": 4,
}  # fmt: skip
"""Prompts are cut into chunks, and share a prefix."""
NUM_TOKENS = 52
"""Room in the cache: four requests of the workload do not fit, so some are preempted."""


@dataclass
class Answers:
    """What an engine made of the workload."""

    tokens: list[list[int]] = field(default_factory=list)
    rows: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """Logits by prompt and position."""
    preempted: int = 0
    hits: int = 0
    chunks: int = 0
    in_flight: int = 0
    """Most plans in flight."""

    def distance(self, other: Answers) -> float:
        """The largest difference of two logits of the same row."""
        assert self.rows.keys() == other.rows.keys()
        return max(float(np.abs(row - other.rows[key]).max()) for key, row in self.rows.items())


def answer(engine: LLMEngine, max_tokens: int = 9, **params: Any) -> Answers:
    """Serve the workload."""
    got = Answers()

    def capture(request: Request, row: np.ndarray) -> np.ndarray:
        number = PROMPTS.index(list(request.all_token_ids[: request.num_prompt_tokens]))
        got.rows[number, request.num_tokens] = row.copy()
        return row

    def watch(plan: SchedulerOutput) -> None:
        got.preempted += len(plan.preempted_req_ids)
        got.hits += sum(plan.num_cached_tokens.values())
        got.chunks += sum(
            request.request_id not in plan.sampling_req_ids for request in plan.scheduled_requests
        )
        if engine.executor.batch_queue_size > 1:
            got.in_flight = max(got.in_flight, 1 + len(engine.executor.batch_queue))

    engine.logits_processors.append(capture)
    engine.observers.append(watch)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
    outputs = engine.generate(PROMPTS, sampling)
    engine.logits_processors.remove(capture)
    engine.observers.remove(watch)
    got.tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return got


def ranked(source: Any, transport: str = "shared_memory", **knobs: Any) -> LLMEngine:
    """An engine on the tests' ranks; its cache holds `NUM_TOKENS` tokens however it is split."""
    dcp = knobs.get("decode_context_parallel_size", 1)
    sizes = {"block_size": 4 // dcp, "num_blocks": 1 + NUM_TOKENS // 4}
    return LLMEngine(source, rank_pool=pool(transport), **{**KNOBS, **sizes, **knobs})


@functools.cache
def alone(source: RandomSource, **knobs: Any) -> Answers:
    """What one process answers."""
    sizes = {"block_size": 4, "num_blocks": 1 + NUM_TOKENS // 4}
    dtype = {**KNOBS, **knobs}["dtype"]
    return answer(LLMEngine(source.transformer(dtype), **{**KNOBS, **sizes, **knobs}))


# ------------------------------------------------------------------ one batch


def batch_of(prompts: list[list[int]], block_size: int = 4) -> ForwardBatch:
    """The whole of some prompts at once, each in blocks of its own."""
    lengths = np.array([len(p) for p in prompts])
    widest = -(-int(lengths.max()) // block_size)
    tables = 1 + np.arange(len(prompts) * widest).reshape(len(prompts), widest)
    positions = np.concatenate([np.arange(n) for n in lengths])
    owner = np.repeat(np.arange(len(prompts)), lengths)
    ends = np.cumsum(lengths)
    return ForwardBatch(
        token_ids=np.concatenate([np.array(p) for p in prompts]),
        positions=positions,
        slot_mapping=tables[owner, positions // block_size] * block_size + positions % block_size,
        query_start_loc=np.concatenate([[0], ends]),
        seq_lens=lengths,
        block_tables=tables,
        logits_indices=ends - 1,
        block_size=block_size,
    )


# ------------------------------------------------------------------ run in a rank


def row_parallel(
    worker: Worker, weight: np.ndarray, bias: np.ndarray, x: np.ndarray, size: int
) -> np.ndarray | None:
    """Its part of a row-parallel layer over the first `size` ranks."""
    if worker.transport.rank >= size:
        return None
    group, width = worker.group(size), x.shape[1] // size
    mine = slice(group.rank * width, (group.rank + 1) * width)
    return RowParallelLinear(weight[:, mine], bias, "o_proj", group)(x[:, mine])


def place_of(worker: Worker) -> tuple[int, int]:
    """The rank's number, and how many it shares its layers with."""
    assert worker.model is not None
    return worker.transport.rank, worker.model.tp.size


def numbers(rank: int, shape: tuple[int, ...], dtype: str = "float64") -> np.ndarray:
    """What a rank brings: other numbers on each."""
    return np.random.default_rng(rank).normal(size=shape).astype(dtype)


def collective(worker: Worker, size: int, operation: str, shape: tuple[int, ...]) -> Any:
    """One operation over the first `size` ranks, and the counters; None on the others."""
    worker.stats.take()
    if worker.transport.rank >= size:
        return None
    group = worker.group(size)
    x = numbers(group.rank, shape)
    if operation == "all_to_all":
        parts = [x[bounds] for bounds in pieces(group.rank, size, shape[0])]
        lengths = [len(x[pieces(rank, size, shape[0])[group.rank]]) for rank in range(size)]
        result: Any = group.all_to_all(parts, lengths, "layer")
    elif operation == "all_gather_uneven":
        mine = x[: group.rank + 1]
        result = group.all_gather(mine, "layer", list(range(1, size + 1)))
    elif operation == "ring":
        group.send(x, (group.rank + 1) % size, "layer")
        result = group.recv(shape, x.dtype, (group.rank - 1) % size, "layer")
    elif operation == "broadcast":
        result = group.broadcast(x, 2, "layer")
    else:
        result = getattr(group, operation)(x, name="layer")
    return result, worker.stats.take()


def pieces(rank: int, size: int, length: int) -> list[slice]:
    """An uneven way to cut `length` rows into one piece for each rank, some of them empty."""
    cuts = sorted([0, length, *np.random.default_rng(rank).integers(0, length + 1, size - 1)])
    return [slice(int(a), int(b)) for a, b in pairwise(cuts)]


def fail(worker: Worker, rank: int, how: str) -> None:
    """Rank `rank` does not do what the others do."""
    group = worker.group(3)
    if worker.transport.rank == rank:
        if how == "raises":
            raise ZeroDivisionError("a bug in a layer")
        if how == "exits":
            os._exit(3)
        time.sleep(60.0)  # hangs
    group.all_reduce(np.ones(8))


@contextmanager
def running(make: Callable[[], RankPool]) -> Iterator[RankPool]:
    """Ranks of a test's own."""
    made = make()
    try:
        yield made
    finally:
        made.close()

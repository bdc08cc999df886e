"""The collectives over both transports: what they compute, and what they send."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mini_vllm.distributed.bytes_moved import (
    all_gather_bytes,
    all_reduce_bytes,
    reduce_scatter_bytes,
    ring_all_reduce_bytes,
    ring_time_s,
    step_bytes,
)
from mini_vllm.distributed.collectives import bounds
from mini_vllm.distributed.config import ParallelConfig
from mini_vllm.distributed.pool import RankPool
from mini_vllm.tests.ranks_support import (
    DENSE,
    MOE,
    PROMPTS,
    RandomSource,
    batch_of,
    collective,
    numbers,
    pieces,
    pool,
    ranked,
    running,
)

SHAPE = (11, 5)
LARGE = (300, 301)
"""Larger than a ring of shared memory and than a socket's buffers."""

both = pytest.mark.parametrize(
    "transport", ["shared_memory", pytest.param("sockets", marks=pytest.mark.slow)]
)
sizes = pytest.mark.parametrize("size", [1, 2, 3, 4])


def ran(transport: str, size: int, operation: str, shape=SHAPE) -> list:
    return pool(transport).rpc("run", collective, size, operation, shape)[:size]


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    """Two ranks that talk over sockets."""
    with running(lambda: RankPool(2, "sockets", timeout_s=20.0)) as ranks:
        yield ranks


def brought(size: int, shape=SHAPE) -> list[np.ndarray]:
    return [numbers(rank, shape) for rank in range(size)]


@pytest.mark.slow
@both
@sizes
@pytest.mark.parametrize("shape", [SHAPE, LARGE, (3,), (0, 4)], ids=str)
def test_all_reduce_adds_in_the_order_of_the_ranks_and_gives_all_the_same_bits(
    transport, size, shape
):
    first, *others = brought(size, shape)
    for x in others:
        first = first + x
    for rank, (total, stats) in enumerate(ran(transport, size, "all_reduce", shape)):
        assert np.array_equal(total, first)
        expected = all_reduce_bytes(first.size, 8, size, rank)
        assert stats.total_bytes() == expected and stats.total_calls("all_reduce") == (size > 1)


@pytest.mark.slow
@both
@sizes
def test_all_gather_gives_all_of_everybody_in_the_order_of_the_ranks(transport, size):
    for got, stats in ran(transport, size, "all_gather"):
        assert all(map(np.array_equal, got, brought(size)))
        assert stats.total_bytes() == all_gather_bytes(11 * 5 * 8, size)


@both
def test_all_gather_takes_parts_of_unequal_length(transport):
    expected = [x[: rank + 1] for rank, x in enumerate(brought(4))]
    for got, _ in ran(transport, 4, "all_gather_uneven"):
        assert all(map(np.array_equal, got, expected))


@both
@sizes
def test_reduce_scatter_gives_each_its_rows_of_the_sum(transport, size):
    total = sum(brought(size)[1:], brought(size)[0])
    parts = bounds(11, size)
    for rank, (got, stats) in enumerate(ran(transport, size, "reduce_scatter")):
        assert np.array_equal(got, total[parts[rank]])
        counts = [part.stop - part.start for part in parts]
        assert stats.total_bytes() == reduce_scatter_bytes(counts, 40, rank)


@both
@sizes
def test_all_to_all_gives_each_its_pieces_even_empty_ones(transport, size):
    cut = [[x[piece] for piece in pieces(r, size, 11)] for r, x in enumerate(brought(size))]
    for rank, (got, stats) in enumerate(ran(transport, size, "all_to_all")):
        assert all(map(np.array_equal, got, [cut[other][rank] for other in range(size)]))
        others = sum(piece.nbytes for to, piece in enumerate(cut[rank]) if to != rank)
        assert stats.total_bytes() == others


@both
def test_broadcast_copies_the_root(transport):
    for got, stats in ran(transport, 4, "broadcast"):
        assert np.array_equal(got, numbers(2, SHAPE))
        assert stats.total_bytes() in (0, 3 * got.nbytes)


@both
def test_what_is_sent_arrives_in_order_and_once(transport):
    for rank, (got, _) in enumerate(ran(transport, 4, "ring")):
        assert np.array_equal(got, numbers((rank - 1) % 4, SHAPE))


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "all_to_all"])
def test_two_ranks_with_sockets_between_them_agree_with_two_that_share_memory(operation, two):
    for (got, stats), (expected, theirs) in zip(
        two.rpc("run", collective, 2, operation, LARGE),
        ran("shared_memory", 2, operation, LARGE),
        strict=True,
    ):
        assert all(map(np.array_equal, got, expected))
        assert stats.total_bytes() == theirs.total_bytes() > 0


def test_a_rank_sends_what_a_ring_would_where_the_parts_are_even():
    """2(N - 1)/N S, and in total over the ranks always 2(N - 1) S."""
    for size in (2, 4, 8):
        assert all_reduce_bytes(64, 4, size, 0) == ring_all_reduce_bytes(64 * 4, size)
    for size in (2, 3, 4, 7):
        assert sum(all_reduce_bytes(45, 4, size, r) for r in range(size)) == 2 * (size - 1) * 180
    assert all_reduce_bytes(45, 4, 1, 0) == 0


def test_the_model_of_a_ring_charges_each_hop_and_each_byte():
    assert ring_time_s(8192, 2, 3e-6, 300e9) == pytest.approx(6.0273e-6, rel=1e-4)
    assert ring_time_s(8192, 1, 3e-6, 300e9) == 0


SPLITS = [
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 4},
    {"pipeline_parallel_size": 4},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_step_sends_two_all_reduces_per_layer_the_embedding_and_the_logits(split):
    engine = ranked(RandomSource(DENSE), num_blocks=64, **split)
    batch = batch_of(PROMPTS)
    engine.model.forward(batch)
    num_tokens, num_rows = len(batch.token_ids), len(batch.logits_indices)
    parallel = ParallelConfig(**split)
    for rank, stats in enumerate(engine.feature("distributed").comm_stats()):
        expected = step_bytes(DENSE, parallel, num_tokens, num_rows, 8, rank)
        per_layer = [n for (op, name), n in stats.bytes_sent.items() if ".layers." in name]
        assert sum(per_layer) == expected["layers"]
        assert stats.total_bytes() == sum(expected.values())
        layers = len(parallel.place(rank).layers(4))
        if parallel.tensor_parallel_size > 1:
            assert stats.total_calls("all_reduce", ".o_proj") == layers
            assert stats.total_calls("all_reduce", ".down_proj") == layers
            assert stats.total_calls("all_gather") == (rank >= parallel.output_rank)


def test_experts_move_each_choice_of_another_ranks_expert_there_and_back():
    """In total, over the layers and ranks: one row of activations for each such (token, expert)
    pair to the expert, one back, and each token's sum once to every other rank."""
    engine = ranked(
        RandomSource(MOE), num_blocks=64, tensor_parallel_size=4, enable_expert_parallel=True
    )
    batch = batch_of(PROMPTS)
    engine.model.forward(batch)
    num_tokens, row = len(batch.token_ids), MOE.hidden_size * 8
    all_stats = engine.feature("distributed").comm_stats()
    for layer in (0, 2, 3):
        name = f"model.layers.{layer}.mlp.experts"

        def sent(operation: str, kind: str, name: str = name) -> int:
            key = operation, f"{name}.{kind}"
            return sum(stats.bytes_sent[key] for stats in all_stats)

        assert sent("all_to_all", "dispatch") == sent("all_to_all", "combine") > 0
        assert sent("all_to_all", "dispatch") <= num_tokens * 2 * row
        assert sent("all_gather", "gather") == num_tokens * row * 3
    assert all(stats.total_calls("all_reduce", "experts") == 0 for stats in all_stats)

"""What the collectives send, by arithmetic: the formulas that the counters must equal.

Promises: exact, for any number of ranks and any shape; the formulas of the textbooks are these
where the parts are even. See `collectives.py` for what is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from mini_vllm.distributed.collectives import bounds
from mini_vllm.distributed.config import ParallelConfig, padded_vocab
from mini_vllm.models.transformer import ModelConfig


def all_reduce_bytes(num_items: int, item_bytes: int, num_ranks: int, rank: int) -> int:
    """Bytes that one rank sends to add up `num_items` numbers.

    2(N - 1)/N of the array where N divides it, as in a ring: N - 1 parts that others add up, and
    N - 1 times the sum of its own part.
    """
    if num_ranks <= 2:
        return num_items * item_bytes * (num_ranks - 1)
    part = bounds(num_items, num_ranks)[rank]
    own = part.stop - part.start
    return (num_items - own + (num_ranks - 1) * own) * item_bytes


def all_gather_bytes(num_bytes: int, num_ranks: int) -> int:
    """Bytes that one rank sends so that all have its `num_bytes`: one copy for each other."""
    return num_bytes * (num_ranks - 1)


def reduce_scatter_bytes(row_counts: Sequence[int], row_bytes: int, rank: int) -> int:
    """Bytes that one rank sends: everything but the part that it adds up itself."""
    return (sum(row_counts) - row_counts[rank]) * row_bytes


def step_bytes(
    config: ModelConfig,
    parallel: ParallelConfig,
    num_tokens: int,
    num_rows: int,
    item_bytes: int,
    rank: int,
) -> dict[str, int]:
    """Bytes that one rank of a dense model, without context parallelism, sends in one step.

    Returns:
        `embedding`, `layers` (two all-reduces each), `logits` (one gather) and `stages` (the
        residual stream to the next stage): 0 for what this rank has no part in.
    """
    place = parallel.place(rank)
    tp, layers = place.tp_size, len(place.layers(config.num_hidden_layers))
    activations = num_tokens * config.hidden_size
    one = all_reduce_bytes(activations, item_bytes, tp, place.tp_rank)
    logits = num_rows * (padded_vocab(config.vocab_size) // tp) * item_bytes
    return {
        "embedding": one if place.is_first_stage else 0,
        "layers": 2 * layers * one,
        "logits": all_gather_bytes(logits, tp) if place.is_last_stage else 0,
        "stages": 0 if place.is_last_stage else activations * item_bytes,
    }


def ring_all_reduce_bytes(num_bytes: int, num_ranks: int) -> float:
    """2(N - 1)/N S, what every rank of a ring sends: `all_reduce_bytes` on average."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


def ring_time_s(num_bytes: int, num_ranks: int, latency_s: float, bytes_per_s: float) -> float:
    """2(N - 1) a + 2(N - 1)/N S/B: an all-reduce in a ring, each hop after the other.

    It knows of no computation that goes on meanwhile, of no other traffic, and of no time to add
    up, to call and to wake.
    """
    hops = 2 * (num_ranks - 1)
    return hops * latency_s + ring_all_reduce_bytes(num_bytes, num_ranks) / bytes_per_s

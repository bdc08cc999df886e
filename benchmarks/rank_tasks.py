"""What `bench_ranks.py` runs in the ranks, which import it from here."""

from __future__ import annotations

import time

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.distributed.worker import Worker


def one_way_s(worker: Worker, num_bytes: int, repeats: int) -> list[float]:
    """Half the time of each of `repeats` round trips of `num_bytes` between ranks 0 and 1."""
    rank = worker.transport.rank
    if rank > 1:
        return []
    group, x, times = worker.group(2), np.zeros(num_bytes, np.uint8), []
    for _ in range(repeats + 3):
        began = time.perf_counter()
        if rank == 0:
            group.send(x, 1)
        group.recv(x.shape, x.dtype, 1 - rank)
        if rank == 1:
            group.send(x, 0)
        times.append((time.perf_counter() - began) / 2)
    return times[3:]


def all_reduce_s(worker: Worker, size: int, num_bytes: int, repeats: int) -> list[float]:
    """The time of each of `repeats` all-reduces of `num_bytes` of float32 over `size` ranks."""
    if worker.transport.rank >= size:
        return []
    group, x, times = worker.group(size), np.zeros(num_bytes // 4, np.float32), []
    for _ in range(repeats + 3):
        began = time.perf_counter()
        group.all_reduce(x)
        times.append(time.perf_counter() - began)
    return times[3:]


def decode_batch(
    num_reqs: int, context: int, num_new: int = 1, block_size: int = 16
) -> ForwardBatch:
    """Requests with `context` tokens in the cache and `num_new` to compute, one row each."""
    width = -(-(context + num_new) // block_size)
    tables = 1 + np.arange(num_reqs * width).reshape(num_reqs, width)
    positions = np.tile(np.arange(context, context + num_new), num_reqs)
    owner = np.repeat(np.arange(num_reqs), num_new)
    return ForwardBatch(
        token_ids=np.arange(num_reqs * num_new) % 256,
        positions=positions,
        slot_mapping=tables[owner, positions // block_size] * block_size + positions % block_size,
        query_start_loc=np.arange(num_reqs + 1) * num_new,
        seq_lens=np.full(num_reqs, context + num_new),
        block_tables=tables,
        logits_indices=np.arange(1, num_reqs + 1) * num_new - 1,
        block_size=block_size,
    )


def step_s(worker: Worker, sizes: tuple[int, int, int], repeats: int) -> list[float]:
    """The time of each of `repeats` steps of the loaded model, in a rank; `sizes` are those of
    `decode_batch`."""
    times: list[float] = []
    for _ in range(repeats + 2 if worker.model is not None else 0):
        batch = decode_batch(*sizes)
        began = time.perf_counter()
        assert worker.model is not None
        worker.stats.take()
        worker.model.forward(batch)
        times.append(time.perf_counter() - began)
    return times[2:]

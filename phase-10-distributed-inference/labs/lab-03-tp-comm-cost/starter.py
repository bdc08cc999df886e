"""Lab 10-03: what tensor parallelism pays for its sums: bytes, hops, and which of them counts.

N ranks add up a payload of S bytes. A link carries B bytes a second in each direction, and whatever
is sent arrives a latency later. What holds:

- C1: nothing is sent where there is one rank.
- C2: on a ring every rank sends 2 (N - 1) / N of the payload, in 2 (N - 1) steps.
- C3: a time is its steps times the latency, and its bytes over the bandwidth.
- C4: a small payload pays for steps, a large one for bytes.
- C5: vLLM decides by size, by the number of ranks and by their links, as the pin does.

Sources: `vllm/distributed/device_communicators/custom_all_reduce.py:232`
`CustomAllreduce.should_custom_ar`, `csrc/custom_all_reduce.cuh:582` `REDUCE_CASE`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

LINKS = {
    "NVLink": (300e9, 3e-6),
    "PCIe": (25e9, 10e-6),
    "InfiniBand": (25e9, 5e-6),
    "Ethernet": (1.25e9, 50e-6),
}
"""Bytes a second in each direction, seconds a hop: inputs of a model, not measured (given)."""


class Ring:
    """Wires from each rank to the next, and from the last to the first (given). It counts."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.steps = 0
        self.sent = [0] * num_ranks
        """Bytes by rank."""

    def step(self, messages: Sequence[np.ndarray]) -> list[np.ndarray]:
        """All ranks send at the same time, rank r to rank r + 1.

        Args:
            messages: what each rank sends, by rank.

        Returns:
            What each rank has received, by rank.
        """
        if len(messages) != self.num_ranks:
            raise ValueError(f"messages: need {self.num_ranks}; came {len(messages)}")
        self.steps += 1
        for rank, message in enumerate(messages):
            self.sent[rank] += message.nbytes
        return [np.array(messages[rank - 1]) for rank in range(self.num_ranks)]


def check(num_ranks: int, bandwidth: float = 1.0, **amounts: float) -> None:
    """A ValueError for no rank, no bandwidth, or an amount below 0 (given)."""
    if num_ranks < 1 or bandwidth <= 0:
        raise ValueError(f"num_ranks={num_ranks}, bandwidth={bandwidth}: need more than 0")
    for name, amount in amounts.items():
        if amount < 0:
            raise ValueError(f"{name}={amount}: need 0 or more")


def allreduce_payload_bytes(num_tokens: int, hidden_size: int, dtype_bytes: int = 2) -> int:
    """Bytes of the activations that one all-reduce adds up: a row of hidden_size for each token.

    Raises:
        ValueError: an amount below 0.
    """
    raise NotImplementedError


def ring_allreduce_traffic_per_rank(payload_bytes: float, num_ranks: int) -> float:
    """Bytes that each rank sends on a ring (C1, C2).

    A trace: 8,000 bytes on 2 ranks: 8,000; on 8: 14,000.

    Raises:
        ValueError: no rank, or a payload below 0.
    """
    raise NotImplementedError


def ring_all_reduce(parts: Sequence[np.ndarray], ring: Ring) -> list[np.ndarray]:
    """Add up one array of each rank, over the wires of a ring and nothing else (C2).

    Each array is as many chunks as there are ranks. Half of the steps bring every rank the whole
    sum of one chunk, the other half bring everybody all of them.

    A trace: ranks with [1, 2] and [10, 20]: one step in which each sends a number, one in which
    each sends a sum; both have [11, 22].

    Args:
        parts: what each rank has, by rank: 1-D, one length, divisible by the number of ranks.
        ring: counts steps and bytes.

    Returns:
        What each rank has in the end, by rank: the sum, in an array of its own.

    Raises:
        ValueError: not one array for each rank of the ring, lengths that differ or do not divide.
    """
    raise NotImplementedError


def allreduce_time_s(
    payload_bytes: float, num_ranks: int, bandwidth: float, latency_s: float
) -> float:
    """Seconds of an all-reduce on a ring (C1 to C3).

    A trace: 8,192 bytes on 2 ranks of NVLink, 300e9 and 3e-6: 6.027 microseconds.

    Raises:
        ValueError: no rank, no bandwidth, an amount below 0.
    """
    raise NotImplementedError


def direct_allreduce_time_s(
    payload_bytes: float, num_ranks: int, bandwidth: float, latency_s: float, shots: int
) -> float:
    """Seconds of an all-reduce among ranks that read one another's memory (C1, C3).

    One shot: a rank reads all of what the others have and adds it up. Two shots: it does so for its
    share only, then reads the other shares' sums. Before a shot the ranks wait for one another: a
    latency for that, and one for the reading.

    A trace: 8,192 bytes on 8 ranks of NVLink: 6.191 microseconds in one shot, 12.048 in two.

    Raises:
        ValueError: as `allreduce_time_s`, or shots that are neither 1 nor 2.
    """
    raise NotImplementedError


def one_shot_limit_bytes(num_ranks: int, bandwidth: float, latency_s: float) -> float:
    """The payload up to which one shot is no slower than two; infinite where that is always so.

    A trace: NVLink: infinite for 2 ranks, 1.2e6 for 4, 342,857 for 8.

    Raises:
        ValueError: as `allreduce_time_s`.
    """
    raise NotImplementedError


def crossover_bytes(num_ranks: int, bandwidth: float, latency_s: float) -> float:
    """The payload for which a ring spends as long on its hops as on its bytes (C4).

    Raises:
        ValueError: as `allreduce_time_s`.
    """
    raise NotImplementedError


def tp_comm_time_per_step(
    num_layers: int,
    num_tokens: int,
    hidden_size: int,
    num_ranks: int,
    bandwidth: float,
    latency_s: float,
    dtype_bytes: int = 2,
    allreduces_per_layer: int = 2,
) -> float:
    """Seconds that a model's layers spend in all-reduces on a ring, in one step.

    A trace: 32 layers, one token of 4,096 in 2 bytes, 2 ranks of NVLink: 0.3857 milliseconds.

    Raises:
        ValueError: no rank, no bandwidth, an amount below 0.
    """
    raise NotImplementedError


def comm_fraction(comm_time_s: float, compute_time_s: float) -> float:
    """Share of a step that is spent in communication, when nothing overlaps; 0.0 for no step.

    Raises:
        ValueError: a time below 0.
    """
    raise NotImplementedError


def custom_all_reduce(
    num_bytes: int, num_ranks: int, fully_connected: bool, max_size: int = 8 * 1024 * 1024
) -> str | None:
    """Which of its own kernels vLLM uses for a contiguous tensor, in one node (C5).

    It wants 2, 4, 6 or 8 ranks, whole packets of 16 bytes and less than max_size. With more than 2
    ranks it wants a link between each two. Two ranks do it in one shot. More do so below 512 KiB
    (up to 4 ranks) or below 256 KiB (up to 8), and in two shots from there on.

    A trace: 8 ranks: 262,128 bytes "one-shot", 262,144 "two-shot", 262,148 None.

    Args:
        num_bytes: of the tensor.
        fully_connected: whether each two ranks have a link of their own.
        max_size: the size of the buffers; a tensor is smaller.

    Returns:
        "one-shot", "two-shot", or None: it is left to the next in line, at last to NCCL.
    """
    raise NotImplementedError


def all_to_all_bytes(top_k: int, hidden_size: int, num_ranks: int, dtype_bytes: int = 2) -> float:
    """Bytes that one token sends to its experts on other ranks, if all experts are as likely.

    The token sends a row of hidden_size to each of top_k experts, which lie on the ranks in equal
    shares; after them as much comes back.

    A trace: top 2 of 4,096 on 8 ranks: 14,336.

    Raises:
        ValueError: no rank, an amount below 0.
    """
    raise NotImplementedError


def expert_traffic(
    expert_ids: np.ndarray, num_experts: int, row_bytes: int, once_per_rank: bool = False
) -> np.ndarray:
    """Bytes that go from each rank to each other when tokens are sent to their experts.

    Expert e lies on rank e // (num_experts / ranks). What stays on its rank is not sent.

    A trace: ids [[[0, 1]], [[0, 3]]], 4 experts on 2 ranks, rows of 10: [[0, 0], [10, 0]]. With ids
    [[[2, 3]], [[0, 3]]]: [[0, 20], [10, 0]], and once per rank [[0, 10], [10, 0]].

    Args:
        expert_ids: [ranks, tokens, top_k]: experts of each rank's tokens.
        row_bytes: of one token.
        once_per_rank: a token with several experts on one rank is sent there once.

    Returns:
        [ranks, ranks] int64: from, to.

    Raises:
        ValueError: experts that do not divide, or an id that is none of them.
    """
    raise NotImplementedError

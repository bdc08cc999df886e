"""Collectives over a group of ranks, written once for every transport.

Promises R1 and R3: sums are taken in the order of the ranks, ((x0 + x1) + x2) + ..., so that every
rank gets the same bits; a group of one moves nothing; every byte that leaves a rank is counted.
Mirrors
`vllm/distributed/parallel_state.py:290` `GroupCoordinator`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from mini_vllm.distributed.transport import Buffer, Transport


@dataclass(slots=True)
class CommStats:
    """What one rank has sent, by operation and the name of the layer that asked for it."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes_sent: Counter[tuple[str, str]] = field(default_factory=Counter)

    def record(self, operation: str, name: str, num_bytes: int) -> None:
        """Count one call that sends `num_bytes`."""
        self.calls[operation, name] += 1
        self.bytes_sent[operation, name] += num_bytes

    def take(self) -> CommStats:
        """The counts since the last call, which begin again at zero: those of a step."""
        taken = CommStats(self.calls, self.bytes_sent)
        self.calls, self.bytes_sent = Counter(), Counter()
        return taken

    def total_calls(self, operation: str, ending: str = "") -> int:
        """Calls of one operation by layers whose names end so."""
        return sum(
            n for (op, name), n in self.calls.items() if op == operation and name.endswith(ending)
        )

    def total_bytes(self, operation: str | None = None) -> int:
        """Bytes sent by one operation, or by all."""
        return sum(n for (op, _), n in self.bytes_sent.items() if operation in (None, op))


def bounds(size: int, num_parts: int) -> list[slice]:
    """`size` items in contiguous parts, the first `size % num_parts` of them one longer."""
    short, longer = divmod(size, num_parts)
    starts = [part * short + min(part, longer) for part in range(num_parts + 1)]
    return [slice(a, b) for a, b in pairwise(starts)]


class Communicator:
    """Some of the ranks, in order, that work together on one axis of the split.

    Every operation must be called by all of them, in the same order, with arrays of matching
    shapes; `name` says in the counters which layer asked.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], stats: CommStats) -> None:
        """Args: the transport of a rank that is one of `ranks`; where to count."""
        self.transport = transport
        self.ranks = list(ranks)
        self.rank = self.ranks.index(transport.rank)
        """Our place in the group, 0 to size - 1; not our number in the world."""
        self.size = len(self.ranks)
        self.stats = stats

    # ------------------------------------------------------------------ sums

    def all_reduce(self, x: np.ndarray, name: str = "") -> np.ndarray:
        """The sum of all ranks' `x`, on every rank: a new array of its shape.

        Two ranks swap their arrays. More ranks do it in two rounds: each adds up one part of all
        arrays and then gives the sum to the others. Either way a rank sends 2(N - 1)/N of its
        array, as a ring does, in one or two rounds instead of the ring's 2(N - 1).
        """
        if self.size == 1:
            return x
        flat = np.ascontiguousarray(x).reshape(-1)
        if self.size == 2:
            other = np.empty_like(flat)
            peer = 1 - self.rank
            self._exchange("all_reduce", name, {peer: flat}, {peer: other})
            pair = (flat, other) if self.rank == 0 else (other, flat)
            return (pair[0] + pair[1]).reshape(x.shape)
        parts = bounds(flat.size, self.size)
        mine = self._sum_of_part(flat, parts, name)
        total = np.empty_like(flat)
        total[parts[self.rank]] = mine
        peers = self._peers()
        self._exchange(
            "all_reduce", name, dict.fromkeys(peers, mine), {p: total[parts[p]] for p in peers},
            first=False,
        )  # fmt: skip
        return total.reshape(x.shape)

    def reduce_scatter(self, x: np.ndarray, name: str = "") -> np.ndarray:
        """Our part of the sum of all ranks' `x`: rows `bounds(len(x), size)[rank]` of it."""
        if self.size == 1:
            return x
        flat = np.ascontiguousarray(x).reshape(-1)
        width = flat.size // len(x) if len(x) else 0
        parts = [slice(p.start * width, p.stop * width) for p in bounds(len(x), self.size)]
        mine = self._sum_of_part(flat, parts, name, "reduce_scatter")
        return mine.reshape(-1, *x.shape[1:])

    def _sum_of_part(
        self, flat: np.ndarray, parts: list[slice], name: str, operation: str = "all_reduce"
    ) -> np.ndarray:
        """All ranks' parts of our number, added up in the order of the ranks."""
        own = flat[parts[self.rank]]
        addends = {rank: np.empty_like(own) for rank in self._peers()}
        outgoing = {rank: flat[parts[rank]] for rank in self._peers()}
        self._exchange(operation, name, outgoing, addends)
        addends[self.rank] = own
        total = addends[0].copy()
        for rank in range(1, self.size):
            total += addends[rank]
        return total

    # ------------------------------------------------------------------ copies

    def all_gather(
        self, x: np.ndarray, name: str = "", lengths: Sequence[int] | None = None
    ) -> list[np.ndarray]:
        """All ranks' `x`, in the order of the ranks.

        Args:
            x: ours.
            name: of the layer, for the counters.
            lengths: `len(x)` on each rank, where they differ.
        """
        if self.size == 1:
            return [x]
        x = np.ascontiguousarray(x)
        lengths = [len(x)] * self.size if lengths is None else lengths
        arrays = [np.empty((length, *x.shape[1:]), x.dtype) for length in lengths]
        arrays[self.rank] = x
        peers = self._peers()
        self._exchange(
            "all_gather", name, dict.fromkeys(peers, x), {rank: arrays[rank] for rank in peers}
        )
        return arrays

    def all_to_all(
        self, parts: Sequence[np.ndarray], lengths: Sequence[int], name: str = ""
    ) -> list[np.ndarray]:
        """Give `parts[j]` to rank j and take what each has for us.

        Args:
            parts: one array for each rank; they differ in their first axis only.
            lengths: rows that come from each rank.
            name: of the layer, for the counters.
        """
        shape, dtype = parts[0].shape[1:], parts[0].dtype
        arrays = [np.empty((length, *shape), dtype) for length in lengths]
        arrays[self.rank] = parts[self.rank]
        if self.size > 1:
            outgoing = {rank: np.ascontiguousarray(parts[rank]) for rank in self._peers()}
            incoming = {rank: arrays[rank] for rank in self._peers()}
            self._exchange("all_to_all", name, outgoing, incoming)
        return arrays

    def broadcast(self, x: np.ndarray, root: int, name: str = "") -> np.ndarray:
        """The array of group rank `root`, on every rank; the others give one of its shape."""
        if self.size == 1:
            return x
        if self.rank == root:
            x = np.ascontiguousarray(x)
            self._exchange("broadcast", name, dict.fromkeys(self._peers(), x), {})
            return x
        copy = np.empty(x.shape, x.dtype)
        self._exchange("broadcast", name, {}, {root: copy})
        return copy

    # ------------------------------------------------------------------ point to point

    def send(self, x: np.ndarray, to: int, name: str = "") -> None:
        """Give an array to group rank `to`, which calls `recv`."""
        self._exchange("send", name, {to: np.ascontiguousarray(x)}, {})

    def recv(
        self, shape: tuple[int, ...], dtype: np.dtype, source: int, name: str = ""
    ) -> np.ndarray:
        """Take an array of known shape from group rank `source`."""
        x = np.empty(shape, dtype)
        self._exchange("recv", name, {}, {source: x})
        return x

    # ------------------------------------------------------------------ within

    def _peers(self) -> list[int]:
        """The others of the group, by group rank, each beginning with the one after itself."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def _exchange(
        self,
        operation: str,
        name: str,
        outgoing: dict[int, np.ndarray],
        incoming: dict[int, np.ndarray],
        first: bool = True,
    ) -> None:
        num_bytes = sum(x.nbytes for x in outgoing.values())
        if first:
            self.stats.record(operation, name, num_bytes)
        else:
            self.stats.bytes_sent[operation, name] += num_bytes
        self.transport.exchange(
            {self.ranks[rank]: _view(x) for rank, x in outgoing.items()},
            {self.ranks[rank]: _view(x) for rank, x in incoming.items()},
        )


def _view(x: np.ndarray) -> Buffer:
    """The bytes of a contiguous array."""
    return x.reshape(-1).view(np.uint8).data

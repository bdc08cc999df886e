"""When ranks end: which of them was the first, and why.

Promises R7: the rank named is one that failed by itself; else one that ended without a word; else
one that others waited for and that does not say that it waits itself. Stands where
`vllm/v1/executor/multiproc_executor.py:102` `MultiprocExecutor` watches its workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

LAST_WORDS = ("gone", "lost", "late", "failed")
"""Kinds of messages after which a rank ends: its pipe has closed; a peer's connection has; a peer
did not move in time; it raised."""
Message = tuple[str, int, Any]
"""Of a rank: the kind, the number of the call, the content."""


class RankError(RuntimeError):
    """A rank died, failed, or did not answer; the others have been ended."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} {why}")
        self.rank = rank


def next_message(pipe: Connection) -> Message:
    """The next message of a rank, or that there will be none."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return "gone", -1, None


def first_cause(said: Mapping[int, Message], how_it_ended: Callable[[int], str]) -> RankError:
    """From the last words of some ranks to the one that was first.

    Args:
        said: last words, by rank.
        how_it_ended: of a rank that said nothing, what became of its process.
    """
    for rank, (kind, _, content) in said.items():
        if kind == "failed":
            why, trace = content
            error = RankError(rank, f"failed: {why}")
            error.add_note(trace)
            return error
    for rank, (kind, _, _) in said.items():
        if kind == "gone":
            return RankError(rank, how_it_ended(rank))
    blamed = [
        (peer, rank, content[1]) for rank, (*_, content) in said.items() for peer in content[0]
    ]
    peer, rank, why = next((entry for entry in blamed if entry[0] not in said), blamed[0])
    return RankError(peer, f"does not respond (rank {rank}: {why})")

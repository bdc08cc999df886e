"""What an engine tells of its prefix index, in batches with numbers, and what a listener missed.

Promises: every change is in exactly one batch, in order; a listener that was away gets what it
missed, if it is still kept, and hears of it if it is not. Mirrors
`vllm/distributed/kv_events.py:49` `BlockStored` and the buffer of its `ZmqEventPublisher`; what
carries the batches is not part of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mini_vllm.block_pool import BlockPool, KVEvent
from mini_vllm.checks import whole


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks entered the index, each behind the one before it."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    """What the first of them stands behind; None at the start of a sequence."""
    token_ids: tuple[int, ...]
    block_size: int
    medium: str = "GPU"


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks left the index; other blocks of the same hash may still be in it."""

    block_hashes: tuple[int, ...]
    medium: str = "GPU"


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The index is empty."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """The changes of one step."""

    number: int
    """From 0 on, without a gap."""
    events: tuple[KVCacheEvent, ...]


class MissedEventsError(LookupError):
    """Batches that are not kept any more: what is known of the index is void."""


class KVEventPublisher:
    """Collects what a pool tells, and keeps the last batches for who was away."""

    def __init__(self, pool: BlockPool, block_size: int, buffer_steps: int = 10_000) -> None:
        """Listen to a pool.

        Args:
            pool: its `on_event` is taken.
            block_size: tokens per block, for `BlockStored`.
            buffer_steps: batches that are kept, as
                `vllm/config/kv_events.py:31` `KVEventsConfig.buffer_steps`.

        Raises:
            ValueError: `buffer_steps` below 1.
        """
        self.block_size = block_size
        self._events: list[KVCacheEvent] = []
        self._kept: deque[KVEventBatch] = deque(maxlen=whole("buffer_steps", buffer_steps, 1))
        self._next = 0
        pool.on_event = self._note

    def _note(self, event: KVEvent) -> None:
        if event.kind == "stored":
            self._events.append(
                BlockStored(
                    event.block_hashes, event.parent_block_hash, event.token_ids, self.block_size
                )
            )
        elif event.kind == "removed":
            self._events.append(BlockRemoved(event.block_hashes))
        else:
            self._events.append(AllBlocksCleared())

    def publish(self) -> KVEventBatch | None:
        """The changes since the last call as one batch, None where there are none."""
        if not self._events:
            return None
        batch = KVEventBatch(self._next, tuple(self._events))
        self._events, self._next = [], self._next + 1
        self._kept.append(batch)
        return batch

    def replay(self, first: int) -> Sequence[KVEventBatch]:
        """The batches from number `first` on.

        Raises:
            MissedEventsError: some of them are not kept any more.
        """
        if first < self._next and (not self._kept or self._kept[0].number > first):
            oldest = self._kept[0].number if self._kept else self._next
            raise MissedEventsError(
                f"batches {first} to {oldest - 1} were dropped: the buffer begins at {oldest}"
            )
        return [batch for batch in self._kept if batch.number >= first]

"""Which of several engines gets a prompt: the one that has its prefix, the idlest, or a balance.

Promises: what it knows of an engine's cache is what that engine has told, so it may be stale, and a
gap in the batches is noticed; a wrong guess costs time and never an answer. Upstream leaves this to
routers such as those of llm-d and Dynamo, and gives them `vllm/distributed/kv_events.py:49`
`BlockStored` to build on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mini_vllm.block_pool import ROOT_HASH, hash_block_tokens
from mini_vllm.checks import number, whole
from mini_vllm.kv_transfer.events import (
    AllBlocksCleared,
    BlockRemoved,
    KVEventBatch,
    MissedEventsError,
)

POLICIES = ("load", "prefix", "both")


class PrefixIndex:
    """Which block hashes one engine holds, as far as it has told."""

    def __init__(self) -> None:
        self.next_number = 0
        """The batch that comes next."""
        self._held: Counter[int] = Counter()  # several blocks may hold one hash

    def apply(self, batch: KVEventBatch) -> None:
        """Take one batch. One that was taken before is ignored.

        Raises:
            MissedEventsError: batches between are missing; nothing has changed.
        """
        if batch.number < self.next_number:
            return
        if batch.number > self.next_number:
            raise MissedEventsError(
                f"batch {batch.number} came, need {self.next_number}: ask for a replay"
            )
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._held.clear()
            elif isinstance(event, BlockRemoved):
                self._held.subtract(event.block_hashes)
            else:
                self._held.update(event.block_hashes)
        self._held = +self._held
        self.next_number += 1

    def forget(self, next_number: int) -> None:
        """Nothing is known, and the batch `next_number` comes next."""
        self._held.clear()
        self.next_number = next_number

    def num_hits(self, block_hashes: Sequence[int]) -> int:
        """How many of these, from the first on, it holds."""
        for count, block_hash in enumerate(block_hashes):
            if not self._held[block_hash]:
                return count
        return len(block_hashes)

    def __len__(self) -> int:
        return len(self._held)


def block_hashes(token_ids: Sequence[int], block_size: int) -> list[int]:
    """The hashes of a prompt's full blocks, as an engine without salts and adapters has them."""
    hashes, parent = list[int](), ROOT_HASH
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block_tokens(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine, and the address it is known by."""

    engine: int
    num_hits: int
    """Blocks of the prompt that it has told to hold."""
    cost: float


class Router:
    """Chooses an engine for each prompt, and counts what it has sent and not seen end."""

    def __init__(
        self, num_engines: int, block_size: int, policy: str = "both", load_weight: float = 1.0
    ) -> None:
        """Nothing is known of any engine.

        Args:
            num_engines: how many there are.
            block_size: theirs.
            policy: "load" looks at blocks of prompts under way alone, "prefix" at hits alone (the
                idler one among equals), "both" at the blocks that must be computed and waited for.
            load_weight: under "both", what a block under way costs; one to compute costs 1.

        Raises:
            ValueError: a number out of range, or an unknown policy.
        """
        whole("num_engines", num_engines, 1)
        whole("block_size", block_size, 1)
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}: need one of {', '.join(POLICIES)}")
        if number("load_weight", load_weight) < 0:
            raise ValueError(f"load_weight={load_weight!r}: need at least 0")
        self.block_size, self.policy, self.load_weight = block_size, policy, load_weight
        self.indexes = [PrefixIndex() for _ in range(num_engines)]
        self.loads = [0] * num_engines
        """Blocks to compute of the prompts that each engine has under way."""
        self._sent: dict[str, tuple[int, int]] = {}

    def choose(self, token_ids: Sequence[int]) -> Choice:
        """The engine for a prompt; the first among equals. Changes nothing.

        Raises:
            ValueError: a prompt without tokens.
        """
        if not len(token_ids):
            raise ValueError("token_ids=[]: need at least one token")
        hashes = block_hashes(token_ids, self.block_size)
        total = -(-len(token_ids) // self.block_size)
        choices = []
        for engine, index in enumerate(self.indexes):
            hits = min(index.num_hits(hashes), total - 1)  # the last token is always computed
            load = self.loads[engine]
            cost = float(load)
            if self.policy == "prefix":
                cost = -float(hits)
            elif self.policy == "both":
                cost = total - hits + self.load_weight * load
            choices.append(Choice(engine, hits, cost))
        return min(choices, key=lambda c: (c.cost, self.loads[c.engine], c.engine))

    def send(self, request_id: str, token_ids: Sequence[int]) -> Choice:
        """Choose, and count the prompt as under way.

        Raises:
            ValueError: a prompt of this id is under way.
        """
        if request_id in self._sent:
            raise ValueError(f"request_id={request_id!r}: a request with this id has not finished")
        choice = self.choose(token_ids)
        blocks = -(-len(token_ids) // self.block_size) - choice.num_hits
        self.loads[choice.engine] += blocks
        self._sent[request_id] = choice.engine, blocks
        return choice

    def finished(self, request_id: str) -> None:
        """A prompt is not under way any more; an unknown id is a no-op."""
        engine, blocks = self._sent.pop(request_id, (0, 0))
        self.loads[engine] -= blocks

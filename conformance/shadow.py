"""Shadow KV: does every scheduled request read back its own prefix from the blocks it holds?

Works on a recording, so on the real scheduler as on the mini one. Each computed position leaves
the fingerprint of its whole prefix in its slot (block, offset); in every step each scheduled
request's earlier positions must still hold its own. A slot that does not was never computed, or
was overwritten: attention would read somebody else's K and V, or none (invariant K1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conformance.recording import Recording


@dataclass(frozen=True, slots=True)
class Stale:
    """A position that a request reads although its slot does not hold that prefix."""

    step: int
    request_id: str
    position: int
    block_id: int


def stale_reads(entry: Recording) -> list[Stale]:
    """Every stale read of a workload, by step; empty when the cache is sound.

    Within a step, all scheduled tokens are written before any is read, as attention does.
    """
    size = entry["config"]["block_size"]
    tokens: dict[str, list[int]] = {
        add["request_id"]: list(add["prompt_token_ids"])
        for event in entry["events"]
        for add in event.get("add", ())
    }
    num_said = dict.fromkeys(tokens, 0)
    slots: dict[tuple[int, int], int] = {}
    found: list[Stale] = []
    for index, step in enumerate(entry["steps"]):
        scheduled: dict[str, int] = step["num_scheduled_tokens"]
        prefixes = {request_id: _fingerprints(tokens[request_id]) for request_id in scheduled}
        for request_id, count in scheduled.items():
            end, table = step["num_computed_tokens"][request_id], step["block_ids"][request_id]
            for position in range(end - count, end):
                slots[table[position // size], position % size] = prefixes[request_id][position]
        for request_id, count in scheduled.items():
            end, table = step["num_computed_tokens"][request_id], step["block_ids"][request_id]
            for position in range(end - count):
                block_id = table[position // size]
                if slots.get((block_id, position % size)) != prefixes[request_id][position]:
                    found.append(Stale(index, request_id, position, block_id))
            if end == len(tokens[request_id]):  # caught up: the script gives the next token
                said: list[Any] = entry["outputs"][request_id]
                if num_said[request_id] < len(said):
                    tokens[request_id].append(said[num_said[request_id]])
                    num_said[request_id] += 1
    return found


def _fingerprints(token_ids: list[int]) -> list[int]:
    """One value per position, equal where and only where the whole prefix is."""
    values, value = [], 0
    for token in token_ids:
        value = hash((value, token))
        values.append(value)
    return values

"""A fleet of engines in counted tokens, for lab 15-05: what a router's choices cost.

Promises: every engine is alike, computes one prompt after the other at a steady rate, and keeps the
blocks that it used last; nothing is random and no clock is read. `python fleet.py FOLDER` writes
the two samples, in the format of Mooncake's traces.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mini_vllm.kv_transfer.events import BlockRemoved, BlockStored, KVEventBatch
from mini_vllm.kv_transfer.router import Router, block_hashes
from mini_vllm.simulate.traces import MOONCAKE_BLOCK, read_trace


@dataclass(frozen=True, slots=True)
class Arrival:
    """One prompt: when it comes, the hashes of its blocks of 512 tokens, its tokens."""

    time_s: float
    hash_ids: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """What an engine last told of itself; between two reports nothing of it changes."""

    time_s: float
    held: frozenset[int]
    """Hashes of the blocks that it keeps."""
    queued_tokens: float
    """Tokens that it has still to compute."""


class Routes(Protocol):
    """What routes: asked once per prompt, in the order of arrival."""

    def choose(self, arrival: Arrival, reports: Sequence[Report]) -> int:
        """The engine that gets it."""
        ...


@dataclass(slots=True)
class Engine:
    """One engine."""

    cache_blocks: int
    tokens_per_s: float
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Least recently used first."""
    busy_until: float = 0.0

    def queued(self, now: float) -> float:
        """Tokens that it has still to compute."""
        return max(0.0, self.busy_until - now) * self.tokens_per_s

    def serve(self, arrival: Arrival) -> int:
        """Take a prompt; the tokens that must be computed for it. The last token always is."""
        hits = 0
        for block in arrival.hash_ids:
            if block not in self.held:
                break
            hits += 1
        computed = max(1, arrival.num_tokens - hits * MOONCAKE_BLOCK)
        for block in reversed(arrival.hash_ids):  # a prefix outlives what is behind it
            self.held.pop(block, None)
            self.held[block] = None
        while len(self.held) > self.cache_blocks:
            self.held.popitem(last=False)
        self.busy_until = max(self.busy_until, arrival.time_s) + computed / self.tokens_per_s
        return computed


@dataclass(frozen=True, slots=True)
class Score:
    """What a way to route came to."""

    computed: int
    """Prompt tokens that were computed; all the others were found."""
    worst_queue: float
    """Most tokens that stood before a prompt when it came."""
    sent: tuple[int, ...]
    """Prompts of each engine."""


def play(
    arrivals: Iterable[Arrival], routes: Routes, num_engines: int = 4, cache_blocks: int = 300,
    tokens_per_s: float = 8_000.0, report_every_s: float = 2.0,
) -> Score:  # fmt: skip
    """Send every prompt where `routes` says.

    Raises:
        ValueError: a choice that is no engine.
    """
    engines = [Engine(cache_blocks, tokens_per_s) for _ in range(num_engines)]
    reports = [Report(0.0, frozenset(), 0.0) for _ in engines]
    computed, worst, sent, due = 0, 0.0, [0] * num_engines, report_every_s
    for arrival in arrivals:
        if arrival.time_s >= due:
            now = arrival.time_s // report_every_s * report_every_s
            reports = [Report(now, frozenset(e.held), e.queued(now)) for e in engines]
            due = now + report_every_s
        choice = routes.choose(arrival, tuple(reports))
        if not isinstance(choice, int) or not 0 <= choice < num_engines:
            raise ValueError(f"choose returned {choice!r}: need 0 to {num_engines - 1}")
        worst = max(worst, engines[choice].queued(arrival.time_s))
        computed += engines[choice].serve(arrival)
        sent[choice] += 1
    return Score(computed, worst, tuple(sent))


# ------------------------------------------------------------------ peers


class Peer:
    """`mini_vllm.kv_transfer.router.Router` as it stands: block events that come at once, and its
    own count of what it has sent and not seen end. A block of the trace is one token to it."""

    def __init__(
        self, policy: str, num_engines: int = 4, cache_blocks: int = 300,
        tokens_per_s: float = 8_000.0,
    ) -> None:  # fmt: skip
        self.router = Router(num_engines, 1, policy)
        self.engines = [Engine(cache_blocks, tokens_per_s) for _ in range(num_engines)]
        self.ends: list[tuple[float, str]] = []
        self.hashes: list[dict[int, int]] = [{} for _ in range(num_engines)]
        self.count = 0

    def choose(self, arrival: Arrival, reports: Sequence[Report]) -> int:
        for end, name in [each for each in self.ends if each[0] <= arrival.time_s]:
            self.router.finished(name)
            self.ends.remove((end, name))
        self.count += 1
        choice = self.router.send(str(self.count), arrival.hash_ids).engine
        engine, known = self.engines[choice], self.hashes[choice]
        engine.serve(arrival)
        self.ends.append((engine.busy_until, str(self.count)))
        events: list[Any] = []
        pairs = zip(arrival.hash_ids, block_hashes(arrival.hash_ids, 1), strict=True)
        for block, chained in pairs:
            if block not in known:
                known[block] = chained
                events.append(BlockStored((chained,), None, (block,), 1))
        for block in [b for b in known if b not in engine.held]:
            events.append(BlockRemoved((known.pop(block),)))
        index = self.router.indexes[choice]
        index.apply(KVEventBatch(index.next_number, tuple(events)))
        return choice


# ------------------------------------------------------------------ traces


def load(path: Path, limit: int | None = None) -> list[Arrival]:
    """The arrivals of a trace in Mooncake's format, gzipped or not."""
    found = []
    for request in read_trace(path, "mooncake", limit=limit):
        ids = tuple(request.hash_ids or ())
        found.append(Arrival(request.arrival, ids, request.prompt_len))
    return found


def rows(kind: str, seed: int = 1505) -> Iterator[dict[str, Any]]:
    """A trace of ours. "chat": conversations that grow, and come back. "hot": nine in ten prompts
    begin with the same long text, and go on alone."""
    rng, fresh, now = random.Random(f"{kind} {seed}"), iter(range(10_000_000)), 0.0
    shared = [next(fresh) for _ in range(24)]
    talks: list[list[int]] = []
    for _ in range(600):
        now += rng.expovariate(2.6 if kind == "chat" else 6.0)
        if kind == "hot":
            begin = shared if rng.random() < 0.9 else []
            ids = [*begin, *(next(fresh) for _ in range(rng.randint(2, 6)))]
        else:
            if not talks or rng.random() < 0.12:
                talks.append([next(fresh) for _ in range(rng.randint(4, 24))])
            ids = rng.choice(talks[-24:])
            ids += [next(fresh) for _ in range(rng.randint(1, 3))]
        length = len(ids) * MOONCAKE_BLOCK - rng.randint(0, MOONCAKE_BLOCK - 1)
        yield {
            "timestamp": round(1000 * now), "input_length": length,
            "output_length": rng.randint(16, 400), "hash_ids": list(ids),
        }  # fmt: skip


def write(folder: Path) -> None:
    """Both samples."""
    for kind in ("chat", "hot"):
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows(kind))
        data = gzip.compress(text.encode(), 9, mtime=0)
        (folder / f"{kind}.jsonl.gz").write_bytes(data)


if __name__ == "__main__":
    write(Path(sys.argv[1]))

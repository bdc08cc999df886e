"""Eviction policies on a chat workload: what the order of the free queue is worth.

`python phase-02-paged-attention/experiments/measure_eviction.py` generates multi-turn chats (system
prompts shared between sessions, growing histories, pauses to think) and serves them through
mini_vllm's own `KVCacheManager`. Only the order in which free blocks are handed out differs. It
prints token-weighted hit rates with confidence intervals and writes `eviction.json` into `--out`.
No time is measured, so the same seeds give the same file on any machine.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.modules import sibling
from mini_vllm.block_pool import ROOT_HASH, BlockPool, KVCacheBlock, hash_block_tokens
from mini_vllm.config import SamplingParams
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.request import Request

_measure_churn = sibling(__file__, "measure_churn")
T975, interval = _measure_churn.T975, _measure_churn.interval

HERE = Path(__file__).resolve().parent


BLOCK_SIZE = 16


# ------------------------------------------------------------------ the workload


@dataclass(frozen=True, slots=True)
class Workload:
    """How chats arrive and what they are like. Lengths are tokens, times are seconds.

    `prefill` and `decode` are the time per token; a pair is (mu, sigma) of a log-normal.
    """

    sessions: int = 250
    arrivals_per_second: float = 0.1
    system_prompts: int = 8
    system_length: tuple[int, int] = (150, 600)
    turns: float = 5.0
    question: tuple[float, float] = (4.0, 0.8)
    answer: tuple[float, float] = (4.8, 0.7)
    pause: tuple[float, float] = (3.3, 1.0)
    longest: int = 4096
    prefill: float = 0.0005
    decode: float = 0.03
    warm_up: float = 0.2


@dataclass(slots=True)
class Turn:
    """One request of a session: its tokens, answer included, and how many of them are prompt."""

    tokens: list[int]
    num_prompt: int
    pause: float
    hashes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Session:
    """One chat: when it begins, and its turns."""

    start: float
    turns: list[Turn]


def chats(workload: Workload, seed: int) -> list[Session]:
    """The sessions of one seed, equal for every policy. Every message has tokens of its own."""
    rng = random.Random(seed)
    fresh = itertools.count(1)

    def message(length: int) -> list[int]:
        return list(itertools.islice(fresh, max(1, length)))

    systems = [
        message(rng.randint(*workload.system_length)) for _ in range(workload.system_prompts)
    ]
    weights = [1 / (rank + 1) for rank in range(workload.system_prompts)]
    sessions, clock = [], 0.0
    for _ in range(workload.sessions):
        clock += rng.expovariate(workload.arrivals_per_second)
        history, turns = list(rng.choices(systems, weights)[0]), []
        while True:
            history = history + message(int(rng.lognormvariate(*workload.question)))
            num_prompt = len(history)
            history = history + message(int(rng.lognormvariate(*workload.answer)))
            pause = rng.lognormvariate(*workload.pause)
            if len(history) > workload.longest:
                break
            turns.append(Turn(history, num_prompt, pause, block_hashes(history)))
            if rng.random() < 1 / workload.turns:
                break
        if turns:
            sessions.append(Session(clock, turns))
    return sessions


def block_hashes(tokens: Sequence[int]) -> list[int]:
    """Chained hash of each full block, as the manager computes them; done once per turn here."""
    hashes, parent = [], ROOT_HASH
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = hash_block_tokens(parent, tokens[start : start + BLOCK_SIZE])
        hashes.append(parent)
    return hashes


# ------------------------------------------------------------------ the policies


class ForwardFree(BlockPool):
    """A request's blocks go back head first."""

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        super().free_blocks(reversed(list(ordered_blocks)))


class RandomQueue:
    """A bag of free blocks; `popleft` takes any."""

    def __init__(self, blocks: Sequence[KVCacheBlock], seed: int = 0) -> None:
        self._blocks = list(blocks)
        self._places = {block.block_id: place for place, block in enumerate(self._blocks)}
        self._rng = random.Random(seed)

    @property
    def num_free_blocks(self) -> int:
        return len(self._blocks)

    def append(self, block: KVCacheBlock) -> None:
        self._places[block.block_id] = len(self._blocks)
        self._blocks.append(block)

    def remove(self, block: KVCacheBlock) -> None:
        place, last = self._places.pop(block.block_id), self._blocks.pop()
        if last is not block:
            self._blocks[place] = last
            self._places[last.block_id] = place

    def popleft(self) -> KVCacheBlock:
        block = self._blocks[self._rng.randrange(len(self._blocks))]
        self.remove(block)
        return block


class RandomPool(BlockPool):
    """Evicts any free block."""

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        super().__init__(num_blocks, enable_caching)
        self.free_queue: Any = RandomQueue(self.blocks[1:])


class StampQueue:
    """Free blocks by a stamp; `popleft` takes the smallest."""

    def __init__(self, blocks: Sequence[KVCacheBlock], stamps: list[tuple[int, int]]) -> None:
        self._stamps = stamps
        self._heap = [(stamps[block.block_id], block.block_id, block) for block in blocks]
        heapq.heapify(self._heap)
        self._queued = {block.block_id for block in blocks}

    @property
    def num_free_blocks(self) -> int:
        return len(self._queued)

    def append(self, block: KVCacheBlock) -> None:
        self._queued.add(block.block_id)
        heapq.heappush(self._heap, (self._stamps[block.block_id], block.block_id, block))

    def remove(self, block: KVCacheBlock) -> None:
        self._queued.remove(block.block_id)  # its entry is skipped when it comes to the front

    def popleft(self) -> KVCacheBlock:
        while True:
            stamp, block_id, block = heapq.heappop(self._heap)
            if block_id in self._queued and stamp == self._stamps[block_id]:
                self._queued.remove(block_id)
                return block


class LruPool(BlockPool):
    """Evicts the free block whose last lookup or allocation is longest ago.

    The textbook's LRU: an access is a hit or a write. The blocks of one admission are stamped in
    table order, so the head is older than the tail by a hair.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        super().__init__(num_blocks, enable_caching)
        self.stamps = [(0, block_id) for block_id in range(num_blocks)]
        self.free_queue: Any = StampQueue(self.blocks[1:], self.stamps)
        self._clock = itertools.count(1)

    def _stamp(self) -> tuple[int, int]:
        return next(self._clock), 0

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(blocks)
        super().touch(blocks)
        for block in blocks:
            self.stamps[block.block_id] = self._stamp()

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        blocks = super().get_new_blocks(num_blocks)
        for block in blocks:
            self.stamps[block.block_id] = self._stamp()
        return blocks


class LruTailFirstPool(LruPool):
    """LRU by admission; of blocks admitted together, the later one in the table goes first.

    An admission is a `touch` and the `get_new_blocks` after it.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        super().__init__(num_blocks, enable_caching)
        self._admission = 0
        self._position = itertools.count()
        self._touched = False

    def _stamp(self) -> tuple[int, int]:
        return self._admission, -next(self._position)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._begin()
        self._touched = True
        super().touch(blocks)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if not self._touched:
            self._begin()
        self._touched = False
        return super().get_new_blocks(num_blocks)

    def _begin(self) -> None:
        self._admission += 1
        self._position = itertools.count()


POLICIES: dict[str, Callable[[int, bool], BlockPool]] = {
    "reverse free": BlockPool,
    "LRU, tail first": LruTailFirstPool,
    "LRU": LruPool,
    "forward free": ForwardFree,
    "random": RandomPool,
}
"""vLLM's own first. `UNLIMITED` is not a policy but the bound: nothing is ever evicted."""
UNLIMITED = "no eviction"


# ------------------------------------------------------------------ the server


def serve(
    sessions: Sequence[Session],
    workload: Workload,
    pool: Callable[[int, bool], BlockPool],
    num_blocks: int,
) -> dict[str, float]:
    """Serve all chats over `num_blocks` blocks; hits per prompt token after the warm-up.

    A turn is admitted when its blocks fit, first come, first served; it holds them for the time
    of its prefill and decode, and the next turn of the chat follows a pause later.

    Raises:
        RuntimeError: a turn does not fit into the empty pool.
    """
    kv = KVCacheManager(num_blocks, BLOCK_SIZE, block_pool=pool)
    params = SamplingParams(max_tokens=1)
    order = itertools.count()
    events: list[tuple[float, int, str, Any]] = [
        (session.start, next(order), "ask", (session, 0)) for session in sessions
    ]
    heapq.heapify(events)
    waiting: deque[tuple[Session, int]] = deque()
    asked = hit = waited = turns = 0
    measured_from = sessions[int(len(sessions) * workload.warm_up)].start
    running = 0
    while events:
        now, _, kind, what = heapq.heappop(events)
        if kind == "ask":
            waiting.append(what)
        else:
            request, session, number = what
            kv.free(request)
            running -= 1
            if number + 1 < len(session.turns):
                after = now + session.turns[number].pause
                heapq.heappush(events, (after, next(order), "ask", (session, number + 1)))
        while waiting:
            session, number = waiting[0]
            turn = session.turns[number]
            request = Request(f"{next(order)}", turn.tokens[: turn.num_prompt], params)
            request.block_hashes = turn.hashes[: turn.num_prompt // BLOCK_SIZE]
            hits, num_cached = kv.get_computed_blocks(request)
            request.num_computed_tokens = num_cached
            # The answer is known here, so its slots are taken at once and indexed with it.
            request.all_token_ids, request.num_tokens = turn.tokens, len(turn.tokens)
            request.block_hashes = list(turn.hashes)
            if kv.allocate_slots(request, len(turn.tokens) - num_cached, hits) is None:
                if not running:
                    raise RuntimeError(f"{len(turn.tokens)} tokens do not fit an empty pool")
                waited += 1
                break
            waiting.popleft()
            running += 1
            if session.start >= measured_from:
                asked, hit, turns = asked + turn.num_prompt, hit + num_cached, turns + 1
            took = workload.prefill * (turn.num_prompt - num_cached)
            took += workload.decode * (len(turn.tokens) - turn.num_prompt)
            heapq.heappush(events, (now + took, next(order), "end", (request, session, number)))
    return {"hit_rate": hit / asked, "turns": turns, "prompt_tokens": asked, "refusals": waited}


def measure(workload: Workload, pool_sizes: Sequence[int], seeds: int) -> dict[str, Any]:
    """Every policy at every pool size under every seed, as JSON."""
    result: dict[str, Any] = {
        "workload": {name: getattr(workload, name) for name in Workload.__slots__},
        "block_size": BLOCK_SIZE,
        "pool_sizes": list(pool_sizes),
        "seeds": seeds,
        "hit_rate": {name: {str(size): [] for size in pool_sizes} for name in POLICIES},
        UNLIMITED: [],
        "turns": [],
    }
    for seed in range(seeds):
        sessions = chats(workload, seed)
        every = sum(-(-len(turn.tokens) // BLOCK_SIZE) for s in sessions for turn in s.turns) + 1
        bound = serve(sessions, workload, BlockPool, every)
        result[UNLIMITED].append(round(bound["hit_rate"], 6))
        result["turns"].append(bound["turns"])
        for name, pool in POLICIES.items():
            for size in pool_sizes:
                rate = serve(sessions, workload, pool, size)["hit_rate"]
                result["hit_rate"][name][str(size)].append(round(rate, 6))
    return json.loads(json.dumps(result))


def table(measurement: dict[str, Any]) -> str:
    """Mean hit rates with 95 % confidence intervals, and the loss against reverse free.

    The loss is taken seed by seed: all policies serve the same chats, so most of the spread
    between seeds cancels.
    """
    sizes = [str(size) for size in measurement["pool_sizes"]]
    lines = ["hit rate, % of prompt tokens", f"{'blocks':<17}" + "".join(f"{s:>16}" for s in sizes)]
    base = measurement["hit_rate"]["reverse free"]
    for name, rates in measurement["hit_rate"].items():
        cells = []
        for size in sizes:
            mean, half = interval([100 * rate for rate in rates[size]])
            cells.append(f"{mean:.1f} ± {half:.1f}")
        lines.append(f"{name:<17}" + "".join(f"{cell:>16}" for cell in cells))
    mean, half = interval([100 * rate for rate in measurement[UNLIMITED]])
    lines.append(f"{UNLIMITED:<17}" + f"{f'{mean:.1f} ± {half:.1f}':>16}" + " at any size")
    lines += ["", "difference to reverse free, paired, in percentage points"]
    for name, rates in measurement["hit_rate"].items():
        if name == "reverse free":
            continue
        cells = []
        for size in sizes:
            pairs = zip(rates[size], base[size], strict=True)
            mean, half = interval([100 * (rate - other) for rate, other in pairs])
            cells.append(f"{mean:+.2f} ± {half:.2f}")
        lines.append(f"{name:<17}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Eviction policies on multi-turn chats.")
    parser.add_argument("--sessions", type=int, default=Workload().sessions)
    parser.add_argument("--pool-sizes", type=int, nargs="+", default=[600, 900, 1200, 1600, 2200])
    parser.add_argument("--seeds", type=int, default=12, choices=[n + 1 for n in T975])
    parser.add_argument("--out", type=Path, default=Path("my-eviction"), help="folder to write to")
    args = parser.parse_args(argv)
    if args.sessions < 5:
        parser.error("--sessions needs at least 5")
    measurement = measure(Workload(sessions=args.sessions), args.pool_sizes, args.seeds)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "eviction.json").write_text(json.dumps(measurement) + "\n", encoding="utf-8")
    print(table(measurement))


if __name__ == "__main__":
    main()

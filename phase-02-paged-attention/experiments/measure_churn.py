"""Fragmentation under churn: four ways to give out the same memory, while requests come and go.

`python phase-02-paged-attention/experiments/measure_churn.py` simulates a full server: requests
arrive at random (Poisson) and wait in line, prompts and answers have log-normal lengths, and each
running request gains one token per step. It prints a table and writes `churn.json` into `--out`.
The blocks are handed out by mini_vllm's own `BlockPool`; the other allocators stand here. No time
is measured, so the same seeds give the same file on any machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mini_vllm.block_pool import BlockPool, KVCacheBlock

ROOT = Path(__file__).resolve().parents[2]


T975 = {2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 11: 2.201, 15: 2.131, 19: 2.093}
"""97.5 % quantile of Student's t by degrees of freedom, for the confidence intervals."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One experiment. Lengths are tokens, times are steps of the engine."""

    slots: int = 16384
    block_size: int = 16
    max_len: int = 2048
    arrivals_per_step: float = 0.4
    prompt: tuple[float, float] = (4.6, 1.0)
    output: tuple[float, float] = (5.0, 0.8)
    steps: int = 4000
    warm_up: int = 1000
    every: int = 10


@dataclass(slots=True)
class Job:
    """One request: how long it is in the end, and how far it has come."""

    prompt: int
    total: int
    tokens: int = 0
    place: Any = None


class Allocator(Protocol):
    """Memory of a fixed number of slots. A place is whatever the allocator needs to find it."""

    def admit(self, job: Job) -> bool:
        """Make room for `job.tokens` tokens, and whatever the scheme reserves; False if none."""

    def grow(self, job: Job) -> bool:
        """Make room for one token more; False if there is none."""

    def release(self, job: Job) -> None:
        """Take the place back."""

    def needed(self, job: Job) -> int:
        """Slots that `admit` would take."""

    def holes(self) -> list[int]:
        """Lengths of the free pieces that are not next to each other, in slots."""

    def given(self) -> int:
        """Slots given away."""


class FirstFit:
    """Contiguous pieces, each put into the first hole that is large enough.

    `reserve` is the size of every piece, or 0 for the exact final length: an oracle, since nobody
    knows it beforehand.
    """

    def __init__(self, slots: int, reserve: int = 0) -> None:
        self.slots, self.reserve = slots, reserve
        self.free = [(0, slots)]  # (start, length), by start, never adjacent

    def needed(self, job: Job) -> int:
        return self.reserve or job.total

    def admit(self, job: Job) -> bool:
        size = self.needed(job)
        for index, (start, length) in enumerate(self.free):
            if length >= size:
                rest = [(start + size, length - size)] if length > size else []
                self.free[index : index + 1] = rest
                job.place = (start, size)
                return True
        return False

    def grow(self, job: Job) -> bool:
        return True  # reserved already

    def release(self, job: Job) -> None:
        pieces = sorted([*self.free, job.place])
        merged = [pieces[0]]
        for start, length in pieces[1:]:
            last_start, last_length = merged[-1]
            if last_start + last_length == start:
                merged[-1] = (last_start, last_length + length)
            else:
                merged.append((start, length))
        self.free, job.place = merged, None

    def holes(self) -> list[int]:
        return [length for _, length in self.free]

    def given(self) -> int:
        return self.slots - sum(self.holes())


class Buddy:
    """Pieces of 2^k slots at multiples of 2^k; a freed piece joins its equal neighbour.

    The piece is the final length rounded up to a power of two: the length is known to within a
    factor of two.
    """

    def __init__(self, slots: int) -> None:
        if slots & (slots - 1):
            raise ValueError(f"slots={slots}: need a power of two")
        self.slots = slots
        self.free: dict[int, set[int]] = {slots: {0}}  # size -> starts

    def needed(self, job: Job) -> int:
        return 1 << (job.total - 1).bit_length()

    def admit(self, job: Job) -> bool:
        wanted = self.needed(job)
        fitting = [size for size, starts in self.free.items() if starts and size >= wanted]
        if not fitting:
            return False
        size = min(fitting)
        start = min(self.free[size])
        self.free[size].remove(start)
        while size > wanted:
            size //= 2
            self.free.setdefault(size, set()).add(start + size)
        job.place = (start, size)
        return True

    def grow(self, job: Job) -> bool:
        return True

    def release(self, job: Job) -> None:
        start, size = job.place
        while size < self.slots and (start ^ size) in self.free.get(size, ()):
            self.free[size].remove(start ^ size)
            start, size = start & ~size, size * 2
        self.free.setdefault(size, set()).add(start)
        job.place = None

    def holes(self) -> list[int]:
        return [size for size, starts in self.free.items() for _ in starts]

    def given(self) -> int:
        return self.slots - sum(self.holes())


class Paged:
    """Blocks on demand from mini_vllm's pool, prefix caching off."""

    def __init__(self, slots: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(slots // block_size + 1, enable_caching=False)

    def needed(self, job: Job) -> int:
        return -(-job.tokens // self.block_size) * self.block_size

    def admit(self, job: Job) -> bool:
        count = self.needed(job) // self.block_size
        if count > self.pool.get_num_free_blocks():
            return False
        job.place = self.pool.get_new_blocks(count)
        return True

    def grow(self, job: Job) -> bool:
        place: list[KVCacheBlock] = job.place
        if job.tokens < len(place) * self.block_size:
            return True
        if self.pool.get_num_free_blocks() == 0:
            return False
        place += self.pool.get_new_blocks(1)
        return True

    def release(self, job: Job) -> None:
        self.pool.free_blocks(reversed(job.place))
        job.place = None

    def holes(self) -> list[int]:
        ids = sorted(block.block_id for block in self.pool.free_queue.get_all_free_blocks())
        runs: list[int] = []
        previous = -1
        for block_id in ids:
            if block_id == previous + 1:
                runs[-1] += self.block_size
            else:
                runs.append(self.block_size)
            previous = block_id
        return runs

    def given(self) -> int:
        used = len(self.pool.blocks) - 1 - self.pool.get_num_free_blocks()
        return used * self.block_size


def allocators(settings: Settings) -> dict[str, Allocator]:
    """The four schemes, by the name the table and the figures use."""
    return {
        "reserve max_len": FirstFit(settings.slots, settings.max_len),
        "buddy, 2^k": Buddy(settings.slots),
        "exact, first fit": FirstFit(settings.slots),
        "blocks": Paged(settings.slots, settings.block_size),
    }


def jobs(settings: Settings, seed: int) -> list[list[Job]]:
    """The arrivals of each step; equal for every allocator of one seed."""
    rng = random.Random(seed)
    arriving: list[list[Job]] = [[] for _ in range(settings.steps)]
    clock = rng.expovariate(settings.arrivals_per_step)
    while clock < settings.steps:
        prompt = min(settings.max_len // 2, max(1, int(rng.lognormvariate(*settings.prompt))))
        output = max(1, int(rng.lognormvariate(*settings.output)))
        total = min(settings.max_len, prompt + output)
        arriving[int(clock)].append(Job(prompt, total, tokens=prompt))
        clock += rng.expovariate(settings.arrivals_per_step)
    return arriving


@dataclass(slots=True)
class Tally:
    """Sums over the steps after the warm-up, and a sample of the course."""

    running: list[int] = field(default_factory=list)
    useful: list[float] = field(default_factory=list)
    given: list[float] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    blocked: int = 0
    blocked_by_holes: int = 0
    finished: int = 0
    preemptions: int = 0
    recomputed: int = 0


def simulate(memory: Allocator, settings: Settings, seed: int) -> dict[str, Any]:
    """One allocator under one seed: first come, first served, and the head of the line blocks."""
    waiting: deque[Job] = deque()
    running: list[Job] = []
    tally = Tally()
    series: dict[str, list[float]] = {"useful": [], "free": [], "largest": []}
    for step, arriving in enumerate(jobs(settings, seed)):
        measured = step >= settings.warm_up
        waiting += arriving
        while waiting and memory.admit(waiting[0]):
            running.append(waiting.popleft())
        if waiting and measured:
            tally.blocked += 1
            free = settings.slots - memory.given()
            tally.blocked_by_holes += memory.needed(waiting[0]) <= free
        for job in list(running):
            if job.place is None:
                continue  # preempted for an earlier one in this very step
            while not memory.grow(job):
                victim = running.pop()  # the one that came last, as the real scheduler does
                memory.release(victim)
                tally.preemptions += measured
                tally.recomputed += victim.tokens * measured
                waiting.appendleft(victim)
                if victim is job:
                    break
            if job.place is None:
                continue
            job.tokens += 1
            if job.tokens >= job.total:
                memory.release(job)
                running.remove(job)
                tally.finished += measured
        if not measured:
            continue
        holes = memory.holes()
        live = sum(job.tokens for job in running)
        numbers = {
            "useful": live / settings.slots,
            "free": sum(holes) / settings.slots,
            "largest": max(holes, default=0) / settings.slots,
        }
        tally.running.append(len(running))
        tally.given.append(memory.given() / settings.slots)
        for name, value in numbers.items():
            getattr(tally, name).append(value)
            if step % settings.every == 0:
                series[name].append(round(value, 4))
    count = len(tally.running)
    return {
        "running": statistics.fmean(tally.running),
        "useful": statistics.fmean(tally.useful),
        "given": statistics.fmean(tally.given),
        "free": statistics.fmean(tally.free),
        "largest": statistics.fmean(tally.largest),
        "finished": tally.finished,
        "blocked_by_holes": tally.blocked_by_holes / max(1, tally.blocked),
        "blocked": tally.blocked / count,
        "preemptions": tally.preemptions,
        "recomputed": tally.recomputed,
        "series": series,
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % confidence interval over independent seeds.

    Raises:
        ValueError: a number of values whose quantile is not in `T975`.
    """
    if len(values) - 1 not in T975:
        raise ValueError(f"{len(values)} values: need one of {[n + 1 for n in T975]}")
    spread = statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), T975[len(values) - 1] * spread


def measure(settings: Settings, seeds: int) -> dict[str, Any]:
    """Every allocator under every seed, as JSON; the course is kept for seed 0 only."""
    result: dict[str, Any] = {
        "settings": {name: getattr(settings, name) for name in Settings.__slots__},
        "seeds": seeds,
        "series": {},
        "runs": {},
    }
    for name in allocators(settings):
        runs = [simulate(allocators(settings)[name], settings, seed) for seed in range(seeds)]
        courses = [run.pop("series") for run in runs]
        result["series"][name] = courses[0]
        result["runs"][name] = [{k: round(v, 5) for k, v in run.items()} for run in runs]
    return json.loads(json.dumps(result))


def table(measurement: dict[str, Any]) -> str:
    """Means over the seeds, with 95 % confidence intervals where they are of interest."""
    lines = [
        f"{'':<17}{'running':>14}{'useful':>16}{'given':>8}{'largest hole':>14}"
        f"{'stuck on holes':>16}{'finished':>10}"
    ]
    for name, runs in measurement["runs"].items():
        mean = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
        running, wide = interval([run["running"] for run in runs])
        useful, high = interval([run["useful"] for run in runs])
        lines.append(
            f"{name:<17}{f'{running:.1f} ± {wide:.1f}':>14}{f'{useful:.1%} ± {high:.1%}':>16}"
            f"{mean['given']:>8.1%}{mean['largest']:>14.1%}{mean['blocked_by_holes']:>16.1%}"
            f"{mean['finished']:>10.0f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Four allocators under the same arrivals.")
    parser.add_argument("--steps", type=int, default=Settings().steps)
    parser.add_argument("--warm-up", type=int, default=Settings().warm_up)
    parser.add_argument("--seeds", type=int, default=10, choices=[n + 1 for n in T975])
    parser.add_argument("--out", type=Path, default=Path("my-churn"), help="folder to write to")
    args = parser.parse_args(argv)
    if not 0 <= args.warm_up < args.steps:
        parser.error("--warm-up needs to be at least 0 and less than --steps")
    measurement = measure(Settings(steps=args.steps, warm_up=args.warm_up), args.seeds)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "churn.json").write_text(json.dumps(measurement) + "\n", encoding="utf-8")
    print(table(measurement))


if __name__ == "__main__":
    main()

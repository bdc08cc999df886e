"""The free queue as a linked list, a deque and an OrderedDict: time, memory, objects.

`python phase-02-paged-attention/experiments/measure_free_queue.py` times what a pool does with its
queue and counts what each structure costs per queued block. It prints a table and writes
`free-queue.json` into `--out`. The times are this machine's.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import sys
import time
import tracemalloc
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from course.machine import describe
from mini_vllm.block_pool import FreeKVCacheBlockQueue, KVCacheBlock

ROOT = Path(__file__).resolve().parents[2]


BATCH = 64
"""Blocks per batch: a prompt of 1,024 tokens in blocks of 16."""


class Linked(FreeKVCacheBlockQueue):
    """The engine's queue, with the batch operations of the real one, in one pass each."""

    def popleft_n(self, count: int) -> list[KVCacheBlock]:
        """Take `count` from the front; one update of the counter, one link to mend."""
        taken, block = [], self._head.next_free
        for _ in range(count):
            taken.append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        self._head.next_free, block.prev_free = block, self._head
        self.num_free_blocks -= count
        return taken

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put `blocks` at the back."""
        last = self._tail.prev_free
        for block in blocks:
            last.next_free, block.prev_free = block, last
            last = block
        last.next_free, self._tail.prev_free = self._tail, last
        self.num_free_blocks += len(blocks)


class Deque:
    """Ids in a deque, the blocks in a list beside it."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.queue = deque(block.block_id for block in blocks)
        self.blocks = blocks

    def remove(self, block: KVCacheBlock) -> None:
        self.queue.remove(block.block_id)

    def append(self, block: KVCacheBlock) -> None:
        self.queue.append(block.block_id)

    def popleft(self) -> KVCacheBlock:
        return self.blocks[self.queue.popleft()]

    def popleft_n(self, count: int) -> list[KVCacheBlock]:
        pop, blocks = self.queue.popleft, self.blocks
        return [blocks[pop()] for _ in range(count)]

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.queue.extend([block.block_id for block in blocks])


class Ordered:
    """Block by id, in order; `OrderedDict` keeps a linked list of its own, written in C."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.queue = OrderedDict((block.block_id, block) for block in blocks)

    def remove(self, block: KVCacheBlock) -> None:
        del self.queue[block.block_id]

    def append(self, block: KVCacheBlock) -> None:
        self.queue[block.block_id] = block

    def popleft(self) -> KVCacheBlock:
        return self.queue.popitem(last=False)[1]

    def popleft_n(self, count: int) -> list[KVCacheBlock]:
        pop = self.queue.popitem
        return [pop(last=False)[1] for _ in range(count)]

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.queue.update([(block.block_id, block) for block in blocks])


STRUCTURES: dict[str, Callable[[Sequence[KVCacheBlock]], Any]] = {
    "linked list": Linked,
    "deque": Deque,
    "OrderedDict": Ordered,
}


def revive(queue: Any, picked: Sequence[KVCacheBlock]) -> None:
    """A hit on a free block, and its release: out of the middle, in at the back."""
    for block in picked:
        queue.remove(block)
        queue.append(block)


def reuse(queue: Any, picked: Sequence[KVCacheBlock]) -> None:
    """One block out at the front, in at the back."""
    for _ in picked:
        queue.append(queue.popleft())


def batch(queue: Any, picked: Sequence[KVCacheBlock]) -> None:
    """A prompt's blocks out at the front, all of them in at the back."""
    for _ in range(len(picked) // BATCH):
        queue.append_n(queue.popleft_n(BATCH))


OPERATIONS = {"revive": revive, "reuse": reuse, "batch": batch}


def seconds_per_block(
    structure: str, operation: str, num_blocks: int, count: int, repeats: int
) -> list[float]:
    """Seconds per block, one value per repeat, without collections of garbage in between."""
    blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
    queue, run = STRUCTURES[structure](blocks), OPERATIONS[operation]
    if operation == "batch":
        count = max(1, count // BATCH) * BATCH
    picked = random.Random(count).choices(blocks, k=count)
    times = []
    gc.disable()
    try:
        for _ in range(repeats):
            start = time.perf_counter()
            run(queue, picked)
            times.append((time.perf_counter() - start) / count)
    finally:
        gc.enable()
    return times


def cost_of_queueing(structure: str, num_blocks: int) -> dict[str, float]:
    """Bytes and memory requests for a full queue, per block, beside the blocks themselves.

    An intrusive list pays with two fields of each block: they are counted.
    """
    blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
    make = STRUCTURES[structure]
    make(blocks[:2])  # whatever is set up once
    gc.collect()
    tracemalloc.start()
    before = sys.getallocatedblocks()
    queue = make(blocks)
    objects = sys.getallocatedblocks() - before
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    links = 16 * num_blocks if structure == "linked list" else 0  # two pointers per block
    del queue
    return {"bytes": (held + links) / num_blocks, "objects": objects / num_blocks}


def measure(sizes: Sequence[int], count: int, repeats: int) -> dict[str, Any]:
    """All structures, operations and sizes, as JSON. The deque's search is done less often."""
    rows = []
    for num_blocks in sizes:
        for name in STRUCTURES:
            row: dict[str, Any] = {"structure": name, "num_blocks": num_blocks}
            for operation in OPERATIONS:
                slow = name == "deque" and operation == "revive"
                times = seconds_per_block(
                    name, operation, num_blocks, max(20, count // 50) if slow else count, repeats
                )
                row[operation] = {
                    "min": min(times), "median": statistics.median(times), "max": max(times),
                }  # fmt: skip
            rows.append(row | cost_of_queueing(name, num_blocks))
    return {
        "machine": describe(),
        "python": platform.python_version(),
        "batch": BATCH,
        "repeats": repeats,
        "rows": rows,
    }


def table(measurement: dict[str, Any]) -> str:
    """Fastest time per block in ns, and what a queued block costs."""
    lines = [
        f"{'':>22}{'ns per block (best of repeats)':^36}   per queued block",
        f"{'blocks':>8}  {'structure':<12}{'revive':>12}{'reuse':>12}"
        f"{'batch of ' + str(measurement['batch']):>12}{'bytes':>12}{'objects':>10}",
    ]
    for row in measurement["rows"]:
        times = "".join(f"{row[name]['min'] * 1e9:>12.0f}" for name in OPERATIONS)
        lines.append(
            f"{row['num_blocks']:>8}  {row['structure']:<12}{times}"
            f"{row['bytes']:>12.0f}{row['objects']:>10.2f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Three structures for the free queue.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--count", type=int, default=20_000, help="operations per repeat")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("my-free-queue"), help="folder")
    args = parser.parse_args(argv)
    if min(args.sizes) < 2 * BATCH or args.count < 1 or args.repeats < 1:
        parser.error(f"--sizes need at least {2 * BATCH}, --count and --repeats at least 1")
    measurement = measure(args.sizes, args.count, args.repeats)
    args.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(measurement) + "\n"
    (args.out / "free-queue.json").write_text(text, encoding="utf-8")
    print(f"{measurement['machine']['cpu']}, Python {measurement['python']}")
    print(table(measurement))


if __name__ == "__main__":
    main()

"""How often attention reads a block, counted: over query tiles, over chunks, over query heads.

`python phase-04-attention-backends/experiments/measure_traffic.py` runs lab 04-03's reference
solution on caches that count, prints tables and writes `traffic.json` into `--out`. No time is
measured, so every machine gives the same file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from course.files import load_module

PHASE = Path(__file__).resolve().parents[1]
TILES = (1, 4, 16, 64, 128, 256)
CHUNKS = (1, 16, 64, 256, 512, 2048)


def lab_03() -> ModuleType:
    """The reference solution of lab 04-03."""
    return load_module(PHASE / "labs" / "lab-03-causal-prefill-attention" / "solution.py")


class CountingCache:
    """A K or V cache of one head that counts block reads and refuses to hand out more than one.

    An access is `cache[block, low:high]`, the rows of one block. Whoever wants a full row of
    scores has to keep what it read; whoever wants several blocks at once gets a TypeError.
    """

    def __init__(self, cache: np.ndarray) -> None:
        """Args: cache [num_blocks, block_size, d]."""
        self._cache, self.shape = cache, cache.shape
        self.reads = np.zeros(len(cache), dtype=np.int64)
        self.rows = 0

    def __getitem__(self, key: tuple[int, slice]) -> np.ndarray:
        block, rows = key
        if not isinstance(rows, slice):
            raise TypeError(f"{key}: need cache[block, low:high]")
        out = self._cache[int(block), rows]  # [rows, d]
        self.reads[block] += 1
        self.rows += len(out)
        return out


def sequence(
    num_tokens: int, block_size: int, d: int = 8
) -> tuple[np.ndarray, Any, Any, list[int]]:
    """Queries and counting caches of one sequence, blocks in random order."""
    rng = np.random.default_rng(num_tokens)
    num_blocks = -(-num_tokens // block_size)
    k_cache, v_cache = (
        CountingCache(rng.standard_normal((num_blocks, block_size, d))) for _ in range(2)
    )
    return rng.standard_normal((num_tokens, d)), k_cache, v_cache, rng.permutation(
        num_blocks
    ).tolist()  # fmt: skip


def count(num_tokens: int, block_size: int, tile: int, chunk: int) -> dict[str, int]:
    """Reads of K while a prompt is prefilled in chunks, in tiles of query rows."""
    lab = lab_03()
    Q, k_cache, v_cache, table = sequence(num_tokens, block_size)
    for start in range(0, num_tokens, chunk):
        rows = Q[start : start + chunk]
        lab.paged_causal_prefill_attention(rows, k_cache, v_cache, table, start, tile=tile)
    assert (k_cache.reads == v_cache.reads).all(), "K and V are read together"
    return {
        "tile": tile,
        "chunk": chunk,
        "block_reads": int(k_cache.reads.sum()),
        "rows": k_cache.rows,
        "reads_of_first_block": int(k_cache.reads[table[0]]),
        "reads_of_last_block": int(k_cache.reads[table[-1]]),
    }


def predicted(num_tokens: int, block_size: int, tile: int, chunk: int) -> int:
    """The same from arithmetic: each tile reads every block up to its own last position."""
    total = 0
    for start in range(0, num_tokens, chunk):
        end = min(start + chunk, num_tokens)
        for row in range(start, end, tile):
            total += -(-min(row + tile, end) // block_size)
    return total


def heads(context: int, block_size: int, group: int, rows: int) -> list[dict[str, Any]]:
    """Block reads for one group of query heads on one KV head: each for itself, and packed.

    A tile has `rows` rows. Unpacked, they are tokens of one query head; packed, tokens times
    `group` heads.
    """
    found = []
    for phase, start in (("decode, one token", context - 1), ("prefill, all tokens", 0)):
        alone = packed = 0
        for row in range(start, context, rows):
            alone += group * -(-min(row + rows, context) // block_size)
        tokens = max(1, rows // group)
        for row in range(start, context, tokens):
            packed += -(-min(row + tokens, context) // block_size)
        found.append({"phase": phase, "each head alone": alone, "packed": packed})
    return found


def measure(num_tokens: int, block_size: int) -> dict[str, Any]:
    """All counts."""
    return {
        "num_tokens": num_tokens,
        "block_size": block_size,
        "tiles": [count(num_tokens, block_size, tile, num_tokens) for tile in TILES],
        "chunks": [count(num_tokens, block_size, 64, min(c, num_tokens)) for c in CHUNKS],
        "heads": heads(num_tokens, block_size, 4, 16),
    }


def table(saved: dict[str, Any]) -> str:
    """The counts as text. FLOP per byte is for 2-byte K and V: 2 x rows FLOP on 2 bytes."""
    n, size = saved["num_tokens"], saved["block_size"]
    lines = [
        f"prefill of {n} tokens, blocks of {size}, one head: block reads of K (V has as many)",
        "  tile  block reads  per block: first, last  pairs per row read",
    ]
    pairs = n * (n + 1) // 2
    for row in saved["tiles"]:
        lines.append(
            f"  {row['tile']:>4}  {row['block_reads']:>11,}  {row['reads_of_first_block']:>16,}"
            f"  {row['reads_of_last_block']:>4}  {pairs / row['rows']:>14.1f}"
        )
    lines.append("in chunks, tile 64")
    lines += [f"  chunk {r['chunk']:>4}  {r['block_reads']:>11,}" for r in saved["chunks"]]
    lines.append("4 query heads on one KV head, tiles of 16 rows (arithmetic)")
    for row in saved["heads"]:
        lines.append(
            f"  {row['phase']:<20} each head alone {row['each head alone']:>7,}"
            f"   packed {row['packed']:>7,}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description="Count block reads of paged attention.")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("my-traffic"))
    arguments = parser.parse_args(argv)
    saved = measure(arguments.tokens, arguments.block_size)
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(saved, indent=1) + "\n"
    (arguments.out / "traffic.json").write_text(text, encoding="utf-8")
    print(table(saved))


if __name__ == "__main__":
    main()

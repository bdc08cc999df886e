"""Every tile of a grid on this GPU, per number of tokens: how `reference.py` was found.

    python -m course.challenges.gpu.tile.sweep --out sweep.json --workers 12

Compiling takes most of the time, so that many processes compile first, into Triton's cache; then
one process times one tile after another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from pathlib import Path
from typing import Any

from course.challenges.gpu import pinned
from course.challenges.gpu.race import (
    EXPERTS,
    HIDDEN,
    ROOT,
    TOP_K,
    WIDTH,
    Layer,
    Tile,
    milliseconds,
    replayed,
)

HEIGHTS = {1: (16,), 8: (16,), 64: (16,), 256: (16, 32), 1024: (32, 64, 128), 4096: (64, 128)}
"""Heights worth a try: about the rows that an expert has, tokens * 8 / 128."""


def grid(tokens: int) -> list[dict[str, int]]:
    """The tiles tried for a number of tokens."""
    few = tokens <= 256
    return [
        dict(zip(Tile.FIELDS, each, strict=True))
        for each in itertools.product(
            HEIGHTS[tokens],
            (32, 64, 128) if few else (64, 128, 256),
            (64, 128, 256) if few else (32, 64, 128),
            (1,) if few else (1, 16),
            (4,) if few else (4, 8),
            (3, 4, 5) if few else (3, 4),
        )
    ]


def layer_of(tree: Path, tokens: int) -> Layer:
    return Layer(tree, "cuda", tokens, EXPERTS, HIDDEN, WIDTH, TOP_K)


def compile_some(tree: Path, work: list[tuple[int, dict[str, int]]]) -> None:
    """Run each once. A tile that does not fit the card's shared memory is left out later."""
    layers: dict[int, Layer] = {}
    for tokens, tile in work:
        layer = layers.setdefault(tokens, layer_of(tree, tokens))
        try:
            layer.products(tile)()
        except Exception as error:
            print(tokens, tile, type(error).__name__, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m course.challenges.gpu.tile.sweep")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--tree", type=Path, default=ROOT / "upstream")
    arguments = parser.parse_args()
    work = [(tokens, tile) for tokens in Tile.TOKENS for tile in grid(tokens)]
    context = multiprocessing.get_context("spawn")
    started = [
        context.Process(
            target=compile_some, args=(arguments.tree, work[place :: arguments.workers])
        )
        for place in range(arguments.workers)
    ]
    for each in started:
        each.start()
    for each in started:
        each.join()
    import torch

    found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "rows": []}
    for tokens in Tile.TOKENS:
        layer = layer_of(arguments.tree, tokens)
        card = found["card"]
        theirs = pinned.tile_of(arguments.tree, tokens, EXPERTS, WIDTH, HIDDEN, TOP_K, card)
        rows: list[tuple[float, dict[str, int]]] = []
        for tile in [theirs, *grid(tokens)]:
            try:
                rows.append((1e3 * milliseconds(replayed(layer.products(tile))), tile))
            except Exception as error:
                print(tokens, tile, type(error).__name__, flush=True)
        best = sorted(rows[1:], key=lambda row: row[0])[:5]
        print(tokens, "vLLM", rows[0], "best", best[0], flush=True)
        found["rows"].append({"tokens": tokens, "vllm": rows[0], "best": best})
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

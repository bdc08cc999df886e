"""What ranks send and what it costs: transports, all-reduces, steps of the shipped model.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.bench_ranks --write

First the transport alone: a is half the round trip of 64 bytes, B the slope between round trips of
1 and 4 MiB, both medians. Then all-reduces, beside 2(N - 1) a + 2(N - 1)/N S/B of a ring. Then
whole steps, one process and two ranks in turn, beside half of the one process's time and what the
model says of two all-reduces a layer, the embedding's, and the logits; and one process whose
products use two threads. Bytes are those counted in the ranks, and compared with the formulas of
`mini_vllm/distributed/bytes_moved.py`.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import numpy as np

from benchmarks import rank_tasks
from benchmarks.rank_tasks import decode_batch
from benchmarks.report import README, Paired, machine
from labkit.tables import markdown_table, write_section
from mini_vllm import LLMEngine
from mini_vllm.distributed.bytes_moved import ring_time_s, step_bytes
from mini_vllm.distributed.collectives import CommStats
from mini_vllm.distributed.pool import RankPool
from mini_vllm.models.loader import SHIPPED_MODEL, load_checkpoint
from mini_vllm.models.transformer import ModelConfig

TRANSPORTS = ("shared_memory", "sockets")
STEPS = {
    "decode, batch 1": (1, 128, 1), "decode, batch 8": (8, 128, 1),
    "decode, batch 64": (64, 128, 1), "prefill, 512 tokens": (4, 0, 128),
}  # fmt: skip
"""Requests, tokens in the cache and new tokens of each."""
KNOBS: dict[str, Any] = {"num_blocks": 700, "block_size": 16}


def wires(pools: dict[str, RankPool], repeats: int) -> dict[str, tuple[float, float]]:
    """Seconds per hop and bytes per second of each transport."""
    found = {}
    for name, pool in pools.items():
        median = {
            size: statistics.median(pool.rpc("run", rank_tasks.one_way_s, size, repeats)[0])
            for size in (64, 1 << 20, 4 << 20)
        }
        found[name] = median[64], 3 * (1 << 20) / (median[4 << 20] - median[1 << 20])
    return found


def reduces(
    pools: dict[str, RankPool], measured: dict[str, tuple[float, float]], repeats: int
) -> list[list[str]]:
    """Rows of the table of all-reduces."""
    rows = []
    for name, pool in pools.items():
        for size in (2, 4):
            for num_bytes in (1 << 10, 64 << 10, 1 << 20):
                times = pool.rpc("run", rank_tasks.all_reduce_s, size, num_bytes, repeats)[:size]
                slowest = statistics.median(max(each) for each in zip(*times, strict=True))
                model = ring_time_s(num_bytes, size, *measured[name])
                rows.append(
                    [name.replace("_", " "), str(size), f"{num_bytes:,}", f"{slowest * 1e6:,.0f}",
                     f"{model * 1e6:,.0f}", f"{slowest / model:.1f}"]
                )  # fmt: skip
                print(" | ".join(rows[-1]), flush=True)
    return rows


def steps(
    pools: dict[str, RankPool],
    threads: RankPool,
    measured: dict[str, tuple[float, float]],
    repeats: int,
) -> list[list[str]]:
    """Rows of the table of steps; `threads` is one process with two of them."""
    config = load_checkpoint(SHIPPED_MODEL, read=lambda folder, config: {}).config
    rows = []
    for name, pool in pools.items():
        for what, sizes in STEPS.items():
            timing, threaded = Paired([], []), []
            for _ in range(repeats):  # in turn: a slow moment of the machine hits both
                alone = LLMEngine("byte-llama", rank_pool=pool, **KNOBS)
                timing.theirs.append(_median(pool, sizes, alone))
                two = LLMEngine("byte-llama", rank_pool=pool, tensor_parallel_size=2, **KNOBS)
                timing.ours.append(_median(pool, sizes, two))
                both = LLMEngine("byte-llama", rank_pool=threads, **KNOBS)
                threaded.append(_median(threads, sizes, both))
            two.model.forward(decode_batch(*sizes))
            ranks = two.feature("distributed")
            assert ranks is not None
            sent = _counted(ranks.comm_stats(), config, ranks.parallel, sizes)
            ours, theirs = statistics.median(timing.ours), statistics.median(timing.theirs)
            said = theirs / 2 + _comm_s(config, sizes, *measured[name])
            rows.append(
                [what, name.replace("_", " "), f"{sent['layer']:,}", f"{sent['step']:,}",
                 f"{theirs * 1e3:.2f}", f"{ours * 1e3:.2f}", f"{said * 1e3:.2f}",
                 timing.ratio_text(), f"{statistics.median(threaded) * 1e3:.2f}"]
            )  # fmt: skip
            print(" | ".join(rows[-1]), flush=True)
    return rows


def _median(pool: RankPool, sizes: tuple[int, int, int], engine: LLMEngine) -> float:
    """Of the slowest rank's steps."""
    assert engine.feature("distributed") is not None
    times = pool.rpc("run", rank_tasks.step_s, sizes, 9)[
        : engine.feature("distributed").parallel.world_size
    ]
    return statistics.median(max(each) for each in zip(*times, strict=True))


def _counted(
    stats: list[CommStats], config: ModelConfig, parallel: Any, sizes: tuple[int, int, int]
) -> dict[str, int]:
    """Bytes that rank 0 sent, per layer and in all; they must be those of the formula."""
    num_reqs, _, num_new = sizes
    of_layers = [n for (_, name), n in stats[0].bytes_sent.items() if ".layers.0." in name]
    expected = step_bytes(config, parallel, num_reqs * num_new, num_reqs, 4, 0)
    assert stats[0].total_bytes() == sum(expected.values())
    assert sum(of_layers) * config.num_hidden_layers == expected["layers"]
    return {"layer": sum(of_layers), "step": stats[0].total_bytes()}


def _comm_s(
    config: ModelConfig, sizes: tuple[int, int, int], latency_s: float, bytes_per_s: float
) -> float:
    """Seconds that a step's collectives take by the model, two ranks."""
    num_reqs, _, num_new = sizes
    payload = num_reqs * num_new * config.hidden_size * 4
    reduces = (2 * config.num_hidden_layers + 1) * ring_time_s(payload, 2, latency_s, bytes_per_s)
    return reduces + latency_s + num_reqs * 160 * 4 / bytes_per_s


def main() -> None:
    """Measure, print, and write the tables into the README if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="update benchmarks/README.md")
    args = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = "2"
    threads = RankPool(1)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    pools = {name: RankPool(4, name) for name in TRANSPORTS}
    measured = wires(pools, 40)
    for name, (latency, speed) in measured.items():
        print(f"{name}: a = {latency * 1e6:.0f} µs, B = {speed / 1e9:.2f} GB/s", flush=True)
    of_reduces = reduces(pools, measured, 40)
    of_steps = steps(pools, threads, measured, args.repeats)
    for pool in (*pools.values(), threads):
        pool.close()
    said = "; ".join(
        f"{name.replace('_', ' ')}: a = {latency * 1e6:.0f} µs, B = {speed / 1e9:.2f} GB/s"
        for name, (latency, speed) in measured.items()
    )
    header = ["transport", "ranks", "bytes", "measured, µs", "ring model, µs", "measured / model"]
    text = f"Measured on the transports alone: {said}.\n\n" + markdown_table(header, of_reduces)
    header = [
        "step", "transport", "bytes a layer", "bytes a step", "one process, ms", "two ranks, ms",
        "half + model, ms", "speed-up, median (min-max)", "one process, two threads, ms",
    ]  # fmt: skip
    text += "\n\n" + markdown_table(header, of_steps)
    text += (
        f"\n\nBytes are what one rank sends. Shipped model, float32, context 128; medians of 40 "
        f"all-reduces, and of {args.repeats} pairs of 9 steps each. {machine()}, numpy "
        f"{np.__version__}."
    )
    if args.write:
        write_section("ranks", text, README)


if __name__ == "__main__":
    main()

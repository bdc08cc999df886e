"""How long a trace takes to be simulated, in processor time, since the machine may be shared.

    python -m benchmarks.bench_simulate TRACE [--limit 1000] [--block-size 512] [--rounds 5]

Promises: reading the trace is in it, imports are not; what the simulation came to is printed
beside the times, so that two states of the code can be seen to do the same.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from mini_vllm.config import EngineConfig
from mini_vllm.simulate.cost import load_cost
from mini_vllm.simulate.simulator import Simulated, Simulator
from mini_vllm.simulate.traces import read_trace

TOKENS = 204_800
"""Of the cache, whatever the size of a block."""


def once(trace: Path, limit: int, block_size: int) -> tuple[float, Simulated]:
    """Processor seconds of one simulation, and what it came to."""
    config = EngineConfig.of({
        "block_size": block_size, "num_blocks": TOKENS // block_size,
        "max_num_batched_tokens": 8192, "max_num_seqs": 256,
    })  # fmt: skip
    began = time.process_time()
    simulator = Simulator(config, load_cost("step=6e-3,tokens=1e-5"))
    found = simulator.run(read_trace(trace, limit=limit))
    return time.process_time() - began, found


def main() -> None:
    """Print the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    told = parser.parse_args()
    rounds = [once(told.trace, told.limit, told.block_size) for _ in range(told.rounds)]
    seconds, found = sorted(each for each, _ in rounds), rounds[0][1]
    print(f"{len(found.outcomes):,} requests, {found.num_steps:,} steps, {found.duration:.3f} s, "
          f"{found.hits:,} tokens found, {found.preemptions} preemptions")  # fmt: skip
    print(f"processor time {seconds[0]:.2f} to {seconds[-1]:.2f} s in {len(rounds)} rounds")


if __name__ == "__main__":
    main()

"""Ranks as processes on this machine: weights in files, a sum in shared memory.

Given; nothing to write here. `run(file, ...)` starts one process for each rank, lets each load its
shard with the functions of a lab file, and drives some steps. What a process reads of a weight is
counted where it is read. No upstream counterpart: `vllm/v1/executor/multiproc_executor.py:539`
`WorkerProc` does this with GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
DEADLINE = 10.0
"""Seconds after which a rank that waits for another gives up."""
WAITS = "waits for a rank that does not come"
FAILED = -1
"""In place of a rank's count of barriers: it will not come."""


class Stored:
    """A weight [out, in] in a file. Nothing of it is in memory but what is asked for; it counts."""

    def __init__(self, path: Path) -> None:
        self._whole = np.load(path, mmap_mode="r")
        self.shape: tuple[int, int] = self._whole.shape
        self.bytes_read = 0

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop - 1, as an array in memory."""
        return self._read(np.array(self._whole[start:stop]))

    def columns(self, start: int, stop: int) -> np.ndarray:
        """Columns start to stop - 1, as an array in memory."""
        return self._read(np.array(self._whole[:, start:stop]))

    def _read(self, part: np.ndarray) -> np.ndarray:
        self.bytes_read += part.nbytes
        return part


class Barrier:
    """A place where every rank waits until all have come; callable. In shared memory."""

    def __init__(self, counters: np.ndarray, rank: int) -> None:
        self._counters, self._rank = counters, rank
        self.waits = 0

    def __call__(self) -> None:
        self.waits += 1
        self._counters[self._rank] = self.waits  # nobody else writes this one
        until = time.monotonic() + DEADLINE
        while self._counters.min() < self.waits:
            if FAILED in self._counters or time.monotonic() > until:
                raise SystemExit(f"rank {self._rank} {WAITS}")
            time.sleep(0.0002)


def run(
    file: Path, xs: Sequence[np.ndarray], w1: np.ndarray, w2: np.ndarray, world: int = 2
) -> list[dict[str, Any]]:
    """Steps of an MLP on `world` processes, each with the functions of the lab file.

    Args:
        xs: the input of each step, [n, in], all of one shape.
        w1, w2: [hidden, in] and [out, hidden], written to files first.

    Returns:
        By rank: "pid", "bytes_read" of both weights, "waits", and "ys", the outputs of the steps.

    Raises:
        RuntimeError: a process failed; its last line is the message.
    """
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        for name, array in (("w1", w1), ("w2", w2), ("xs", np.array(xs))):
            np.save(folder / f"{name}.npy", array)
        np.save(folder / "slots.npy", np.zeros((world, len(xs[0]), len(w2))))
        np.save(folder / "counters.npy", np.zeros(world, np.int64))
        command = [sys.executable, __file__, str(file), home, str(world)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        children = [
            subprocess.Popen(
                [*command, str(rank)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        said = [_heard(child) for child in children]
    errors = [error.strip() for out, error in said if not out]
    if errors:  # who waited in vain says less than who failed
        error = min(errors, key=lambda text: WAITS in text)
        raise RuntimeError((error.splitlines() or ["a process ended without a word"])[-1])
    return [json.loads(out.splitlines()[-1]) for out, _ in said]  # a lab file may print too


def _heard(child: subprocess.Popen[str]) -> tuple[str, str]:
    """What a process printed; "" in place of its report where it failed or took too long."""
    try:
        out, error = child.communicate(timeout=3 * DEADLINE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return "", f"a process was still busy after {3 * DEADLINE:g} s"
    return ("" if child.returncode else out), error


def one_rank(file: str, home: str, world: int, rank: int) -> dict[str, Any]:
    """In the process of a rank: load the shard, do the steps, tell."""
    from labkit.modules import load_module

    lab, folder = load_module(file), Path(home)
    w1, w2 = Stored(folder / "w1.npy"), Stored(folder / "w2.npy")
    slots = np.load(folder / "slots.npy", mmap_mode="r+")
    counters = np.load(folder / "counters.npy", mmap_mode="r+")
    barrier = Barrier(counters, rank)
    try:
        shard = lab.load_shard(w1, w2, rank, world)
        ys = [
            lab.rank_mlp(x, *shard, lambda part: lab.shared_all_reduce(part, slots, rank, barrier))
            for x in np.load(folder / "xs.npy")
        ]
    except BaseException:
        counters[rank] = FAILED
        raise
    return {
        "pid": os.getpid(),
        "bytes_read": w1.bytes_read + w2.bytes_read,
        "waits": barrier.waits,
        "ys": [y.tolist() for y in ys],
    }


if __name__ == "__main__":
    print(json.dumps(one_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))

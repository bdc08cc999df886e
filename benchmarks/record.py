"""The engine's own record: tokens per second of processor time, commit by commit.

    python -m benchmarks.record --write

There is one release so far, 0.1.0, so the rows are commits, each with what it brought. All of them
run on this machine, in turn, each from its own files at that commit (`git archive`) and each in a
process of its own. What is timed is one batch of greedy requests on the shipped model, on one
thread, by the processor's clock: other work on the machine does not count. The best of the turns
stands in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from benchmarks.report import README, machine
from labkit.tables import markdown_table, write_section

ROOT = Path(__file__).parents[1]
COMMITS = {
    "6aec91df": "the first engine that was measured",
    "cbbf9064": "rooms, and asynchronous scheduling",
    "d8839567": "before the loop was rebuilt",
    "255de468": "the loop rebuilt",
    "d94e70d1": "cache groups, pictures, connectors",
    "HEAD": "this checkout",
}
BATCHES = (1, 8, 64)
TURNS = 3
PROMPT, OUTPUT = 64, 32

CHILD = """
import gc, inspect, json, random, sys, time
from mini_vllm import LLMEngine, SamplingParams

folder, batches, prompt, output = json.loads(sys.argv[1])
if "enable_caching" in inspect.signature(LLMEngine).parameters:  # the first engine's names
    engine = LLMEngine(1600, model=folder, enable_caching=False)
else:
    engine = LLMEngine(folder, num_blocks=1600, enable_prefix_caching=False)
rng = random.Random(0)
found = {}
for batch in batches:
    prompts = [rng.choices(range(32, 127), k=prompt) for _ in range(batch)]
    params = [SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)] * batch
    engine.generate(prompts, params)
    gc.collect()
    times = []
    for _ in range(3 if batch > 8 else 9):
        began = time.process_time()
        engine.generate(prompts, params)
        times.append(time.process_time() - began)
    found[batch] = batch * output / min(times)
print(json.dumps(found))
"""


def unpacked(commit: str, folder: Path) -> Path:
    """The files of a commit that the engine needs; this checkout itself for "HEAD"."""
    if commit == "HEAD":
        return ROOT
    where = folder / commit
    packed = subprocess.run(
        ["git", "archive", commit, "mini_vllm"],
        cwd=ROOT, check=True, capture_output=True,
    ).stdout  # fmt: skip
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(where, filter="data")
    return where


def measured(where: Path) -> dict[int, float]:
    """Tokens per second of processor time of one process, by batch."""
    work = json.dumps([str(ROOT / "models" / "byte-llama"), BATCHES, PROMPT, OUTPUT])
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, work],
        cwd=where, check=True, capture_output=True, text=True,
        env=os.environ | {
            "PYTHONPATH": str(where), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
        },
    )  # fmt: skip
    return {int(batch): value for batch, value in json.loads(ran.stdout).items()}


def dated(commit: str) -> str:
    shown = ["git", "log", "-1", "--format=%h, %ad", "--date=short", commit]
    return subprocess.run(
        shown, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record")
    parser.add_argument("--write", action="store_true", help="into benchmarks/README.md")
    parser.add_argument("--turns", type=int, default=TURNS)
    arguments = parser.parse_args(argv)
    best: dict[str, dict[int, float]] = {commit: {} for commit in COMMITS}
    with tempfile.TemporaryDirectory() as folder:
        places = {commit: unpacked(commit, Path(folder)) for commit in COMMITS}
        for turn in range(arguments.turns):
            for commit, where in places.items():
                for batch, value in measured(where).items():
                    best[commit][batch] = max(best[commit].get(batch, 0.0), value)
            print(f"turn {turn + 1} of {arguments.turns}", flush=True)
    header = ["commit", "what it brought", *(f"batch {batch}, tokens/s" for batch in BATCHES)]
    rows = [
        [dated(commit), COMMITS[commit], *(f"{best[commit][batch]:,.0f}" for batch in BATCHES)]
        for commit in COMMITS
    ]
    table = markdown_table(header, rows)
    print(table)
    if arguments.write:
        write_section("record", f"{table}\n\n{machine()}, one thread.", README)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What vLLM's own `SpecDecodingLogging` says of drawn runs: writes recorded.json.

    PYTHONPATH=upstream python phase-08*/labs/lab-02*/record.py

Equal runs give equal lines, so it writes the same file again. Needs torch, as the pinned tree does.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FILE = HERE / "recorded.json"
LINES = 120


def drawn() -> list[dict[str, Any]]:
    """Cases of k, seconds and runs, each run as [drafted, accepted, how often]."""
    rng = random.Random("08-02")
    found = []
    for _ in range(LINES):
        k = rng.choice((1, 2, 3, 4, 5, 8))
        alpha = rng.choice((0.2, 0.5, 0.8, 0.95))
        counts: dict[tuple[int, int], int] = {}
        for _ in range(rng.choice((7, 7, 40, 150, 400))):
            drafted = rng.choice((k, k, k, rng.randint(0, k), 0))
            accepted = 0
            while accepted < drafted and rng.random() < alpha:
                accepted += 1
            counts[drafted, accepted] = counts.get((drafted, accepted), 0) + 1
        runs = [[*run, count] for run, count in sorted(counts.items())]
        found.append({"k": k, "seconds": rng.choice((0.5, 2.0, 10.0)), "runs": runs})
    return found


def line_of(case: dict[str, Any]) -> str:
    """The line that the pinned tree's classes log of a case."""
    from vllm.v1.spec_decode import metrics

    stats = metrics.SpecDecodingStats.new(case["k"])
    for drafted, accepted, count in case["runs"]:
        for _ in range(count if drafted else 0):
            stats.observe_draft(drafted, accepted)
    logging = metrics.SpecDecodingLogging()
    logging.observe(stats)
    logging.last_log_time = 0.0
    said: list[str] = []
    clock = metrics.time.monotonic
    metrics.time.monotonic = lambda: case["seconds"]
    try:
        logging.log(lambda form, *values: said.append(form % values))
    finally:
        metrics.time.monotonic = clock
    return said[0]


def main() -> None:
    """Record every case."""
    cases = [{**case, "line": line_of(case)} for case in drawn()]
    rows = ",\n ".join(json.dumps(case) for case in cases)
    FILE.write_text(f'{{"upstream": "0.22.1", "cases": [\n {rows}\n]}}\n', encoding="utf-8")
    print(f"{FILE.name}: {len(cases)} lines")


if __name__ == "__main__":
    main()

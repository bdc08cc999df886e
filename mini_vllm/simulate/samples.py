"""Small traces in the formats of the large ones, drawn here: for tests, pages and a first try.

    python -m mini_vllm.simulate.samples FOLDER

Conversations of a few turns that share a system prompt, at a Poisson rate. Nothing of a real trace
is in them but the format. Where the real files are is said in `traces.py`.
"""

from __future__ import annotations

import csv
import json
import random
import sys
from datetime import datetime, timedelta
from pathlib import Path

from mini_vllm.simulate.traces import MOONCAKE_BLOCK

FOLDER = Path(__file__).parent / "sample_traces"
SYSTEM = 2 * MOONCAKE_BLOCK
"""Tokens of the prompt that all conversations share."""


def conversations(num_requests: int, seed: int) -> list[tuple[int, int, int, list[int]]]:
    """(milliseconds, prompt tokens, output tokens, ids of 512-token blocks), by arrival."""
    draw, blocks = random.Random(seed), 0
    shared = list(range(SYSTEM // MOONCAKE_BLOCK))
    blocks = len(shared)
    found: list[tuple[int, int, int, list[int]]] = []
    at = 0.0
    while len(found) < num_requests:
        at += draw.expovariate(1.0) * 1000
        length, ids, turn_at = SYSTEM, list(shared), at
        for _ in range(draw.randint(1, 4)):
            said = draw.randint(40, 1200)
            full = (length // MOONCAKE_BLOCK) if length % MOONCAKE_BLOCK else len(ids)
            ids, length = ids[:full], length + said
            missing = -(-length // MOONCAKE_BLOCK) - len(ids)
            ids += range(blocks, blocks + missing)
            blocks += missing
            output = draw.randint(8, 300)
            found.append((round(turn_at), length, output, list(ids)))
            length += output
            turn_at += draw.uniform(2_000, 20_000)
    return sorted(found[:num_requests])


def write_samples(folder: Path) -> None:
    """One file per format; the same requests where the format can say them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = conversations(120, seed=18)
    with (folder / "mooncake.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for at, prompt, output, ids in rows:
            row = {"timestamp": at, "input_length": prompt, "output_length": output}
            file.write(json.dumps({**row, "hash_ids": ids}) + "\n")
    began = datetime(2025, 1, 1)
    with (folder / "azure.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        for at, prompt, output, _ in rows:
            stamp = (began + timedelta(milliseconds=at)).isoformat(" ", "microseconds")
            table.writerow((f"{stamp}0", prompt, output))
    with (folder / "burstgpt.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow((
            "Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type",
        ))  # fmt: skip
        for at, prompt, output, _ in rows:
            table.writerow((at / 1000, "a", prompt, output, prompt + output, "Conversation log"))
    bench = {
        "duration": rows[-1][0] / 1000, "completed": len(rows),
        "input_lens": [row[1] for row in rows], "output_lens": [row[2] for row in rows],
        "start_times": [100.0 + row[0] / 1000 for row in rows],
    }  # fmt: skip
    (folder / "bench.json").write_text(json.dumps(bench) + "\n", encoding="utf-8")
    talk = [
        {"id": str(number), "conversations": [
            {"from": "human", "value": "q" * (prompt % 90 + 1)},
            {"from": "gpt", "value": "a" * (output % 50 + 1)},
        ]}
        for number, (_, prompt, output, _) in enumerate(rows[:20])
    ]  # fmt: skip
    (folder / "sharegpt.json").write_text(json.dumps(talk) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_samples(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)

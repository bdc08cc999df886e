"""The tables of this folder's README, from the results beside it.

python -m benchmarks.gpu.tables --write
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.models import experts_touched, step_floor_ms
from labkit.tables import markdown_table, write_section

HERE = Path(__file__).parent
README = HERE / "README.md"
KERNELS = ("course v2", "FA3", "vLLM Triton")


def load(name: str) -> dict[str, Any]:
    """A file of results."""
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


def kernels(found: dict[str, Any]) -> str:
    """Microseconds and shares of a copy's bandwidth, per shape and kernel."""
    header = ["requests x tokens", "MB", *(f"{name}, µs" for name in KERNELS)]
    rows = [
        [
            f"{row['batch']} x {row['context']:,}",
            f"{row['must_bytes'] / 1e6:,.1f}",
            *(f"{row[name]['us']:.1f} ({row[name]['share_of_copy']:.1%})" for name in KERNELS),
        ]
        for row in found["rows"]
    ]
    return markdown_table(header, rows)


def replayed(found: dict[str, Any]) -> str:
    """Microseconds replayed from a CUDA graph, and shares, of the kernels that a file has."""
    names = [name for name in KERNELS if name in found["rows"][0]]
    rows = [
        [
            f"{row['batch']} x {row['context']:,}",
            *(f"{row[name]['graph_us']:.1f} ({row[name]['graph_share']:.1%})" for name in names),
        ]
        for row in found["rows"]
    ]
    return markdown_table(["requests x tokens", *(f"{name}, µs" for name in names)], rows)


def decode(found: dict[str, Any], copy: float) -> str:
    """Milliseconds of a decode step per arm and batch, beside the reading of the weights."""
    arms = found["arms"]
    batches = sorted({int(batch) for arm in arms.values() for batch in arm["decode_ms"]})
    names = list(arms)
    rows = []
    for batch in batches:
        cells = []
        for name in names:
            times = arms[name]["decode_ms"].get(str(batch))
            cells.append(f"{statistics.median(times):.2f}" if times else "")
        rows.append([str(batch), *cells, *_floors(arms, batch, copy)])
    header = ["batch", *names, "bf16: weights alone", "moe: weights alone, experts"]
    return markdown_table(header, rows)


def _floors(arms: dict[str, Any], batch: int, copy: float) -> list[str]:
    from benchmarks.gpu.models import LLAMA, MOE

    moe = step_floor_ms(MOE, batch, copy)
    return [
        f"{step_floor_ms(LLAMA, batch, copy):.2f}",
        f"{moe:.2f}, {experts_touched(MOE, batch):.0f}" if "moe" in arms else "",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.tables")
    parser.add_argument("--write", action="store_true", help="into the README")
    arguments = parser.parse_args(argv)
    found = load("kernels")
    tables = {
        "kernels": kernels(found),
        "h200": replayed(load("kernels_h200")),
        "decode": decode(load("models"), found["copy_bytes_per_s"]),
    }
    for name, table in tables.items():
        if arguments.write:
            write_section(name, "\n" + table, README)
        else:
            print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

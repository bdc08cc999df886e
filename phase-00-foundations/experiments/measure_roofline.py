"""Your own roofline: time W @ X for a growing number of columns and compare with the prediction.

`python phase-00-foundations/experiments/measure_roofline.py` prints a table and writes
`measured/roofline.json` and `roofline.svg` into `--out`. W stands for a model's weights and the
columns of X for the tokens of one step, so the flat part of the curve is decode and the slope is
prefill. The prediction is lab 00-04's: a step takes as long as the slower of reading W and doing
the arithmetic. The functions are pure and their inputs and outputs are JSON.
`OPENBLAS_NUM_THREADS=1` in front measures one thread, which is steadier on a busy machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from course.machine import describe
from course.truth.figures import BLUE, GREY, ORANGE, PURPLE, Svg
from course.truth.plots import Axes, written

HERE = Path(__file__).resolve().parent


COLUMNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
FLOAT_BYTES = 4


def predict_seconds(size: int, columns: int, peak_flops: float, mem_bw: float) -> float:
    """The roofline's time for one `[size, size] @ [size, columns]` product in float32.

    The slower of reading W once (4 size^2 bytes) and 2 size^2 columns FLOP.
    """
    return max(FLOAT_BYTES * size**2 / mem_bw, 2 * size**2 * columns / peak_flops)


def summarise(measurement: dict[str, Any]) -> dict[str, Any]:
    """Ridge point, predicted times and the measured knee of a saved measurement.

    Args:
        measurement: the JSON this script writes: `size`, `peak_flops`, `mem_bw` and `points`, a
            list of `{"columns", "seconds"}`.

    Returns:
        `ridge` in FLOP per byte; `ridge_columns`, the columns at which the prediction turns;
        `plateau_seconds`, the median time of 2 to 8 columns; `measured_columns`, where that plateau
        meets the measured peak; and `points` with `predicted_seconds` and `ratio` (measured over
        predicted) added.
    """
    size, peak = measurement["size"], measurement["peak_flops"]
    bandwidth = measurement["mem_bw"]
    points = []
    for point in measurement["points"]:
        predicted = predict_seconds(size, point["columns"], peak, bandwidth)
        points.append(
            {**point, "predicted_seconds": predicted, "ratio": point["seconds"] / predicted}
        )
    few = [p["seconds"] for p in points if 2 <= p["columns"] <= 8] or [points[0]["seconds"]]
    plateau = statistics.median(few)
    ridge = peak / bandwidth
    return {
        "ridge": ridge,
        "ridge_columns": ridge * FLOAT_BYTES / 2,
        "plateau_seconds": plateau,
        "measured_columns": plateau * peak / (2 * size**2),
        "points": points,
    }


def measure(size: int, copies: int, repeats: int, columns: Sequence[int]) -> dict[str, Any]:
    """Time the products on this machine.

    Args:
        size: W is [size, size] float32.
        copies: how many different W are used in turn, so that no cache keeps them between products.
        repeats: rounds over all copies; the best time counts, since noise only ever adds.
        columns: numbers of columns of X.
    """
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((size, size), dtype=np.float32) for _ in range(copies)]
    inputs = [rng.standard_normal((size, n), dtype=np.float32) for n in (*columns, 1024)]
    outputs = [np.empty_like(x) for x in inputs]
    best, stream = [float("inf")] * len(inputs), float("inf")
    for _ in range(repeats):  # rounds outside: a busy second then spoils one round, not one point
        for i, (x, out) in enumerate(zip(inputs, outputs, strict=True)):
            for w in weights:  # never the same W twice in a row: it would come from a cache
                best[i] = min(best[i], _seconds(functools.partial(np.matmul, w, x, out=out)))
        stream = min(stream, *[_seconds(w.sum) for w in weights])
    flops = [2 * size**2 * x.shape[1] for x in inputs]
    return {
        "machine": describe(),
        "threads": int(os.environ.get("OPENBLAS_NUM_THREADS", describe()["cores"])),
        "numpy": np.__version__,
        "size": size,
        "copies": copies,
        "mem_bw": FLOAT_BYTES * size**2 / min(stream, best[0]),
        "peak_flops": max(f / t for f, t in zip(flops, best, strict=True)),
        "points": [{"columns": n, "seconds": t} for n, t in zip(columns, best[:-1], strict=True)],
    }


def _seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def figure(measurement: dict[str, Any]) -> str:
    """Predicted and measured seconds over columns, as SVG."""
    summary = summarise(measurement)
    points = [(p["columns"], p["seconds"] * 1e3) for p in summary["points"]]
    predicted = [(p["columns"], p["predicted_seconds"] * 1e3) for p in summary["points"]]
    low = min(y for _, y in points + predicted) / 1.6
    high = max(y for _, y in points + predicted) * 1.6
    machine = measurement["machine"]
    size = measurement["size"]
    svg = Svg(
        720,
        420,
        f"Time of a {size} x {size} product over the number of columns, predicted and measured",
        "Both axes logarithmic. The prediction is flat while reading the matrix takes longer than "
        "the arithmetic, then proportional to the columns.",
    )
    axes = Axes(svg, (70, 58, 610, 290), (1, 256), (low, high), log_x=True, log_y=True)
    y_ticks = {
        value: f"{value:g}"
        for exponent in range(-3, 5)
        for value in (10.0**exponent, 3 * 10.0**exponent)
        if low <= value <= high
    }
    axes.frame(
        "columns of X (tokens in the step)",
        "milliseconds per product",
        [2**i for i in range(9)],
        y_ticks,
    )
    knee = summary["ridge_columns"]
    if 1 <= knee <= 256:
        corner = predict_seconds(size, 1, measurement["peak_flops"], measurement["mem_bw"]) * 1e3
        predicted = sorted([*predicted, (knee, corner)])
        axes.curve([(knee, low), (knee, corner)], PURPLE, width=1.2, dash="3 3")
        axes.label(knee, low, f"predicted ridge: {knee:.1f} columns", PURPLE, dy=-8)
    axes.curve(predicted, GREY, dash="6 4")
    axes.curve(points, BLUE)
    axes.dots(points, BLUE)
    axes.label(*points[len(points) // 2], "measured", BLUE, dx=-6, dy=-12, anchor="end")
    axes.label(*predicted[-4], "roofline", GREY, dx=10, dy=16)
    svg.text(
        70,
        24,
        f"{machine['cpu']}, {measurement['threads']} thread(s), numpy {measurement['numpy']}",
        size=12,
    )
    svg.text(
        680,
        24,
        f"{measurement['mem_bw'] / 1e9:.1f} GB/s, {measurement['peak_flops'] / 1e9:.0f} GFLOP/s, "
        f"ridge {summary['ridge']:.1f}",
        size=12,
        anchor="end",
        fill=ORANGE,
    )
    return svg.render()


def table(measurement: dict[str, Any]) -> str:
    """The measurement as text."""
    summary = summarise(measurement)
    rows = [
        f"bandwidth {measurement['mem_bw'] / 1e9:.1f} GB/s, "
        f"peak {measurement['peak_flops'] / 1e9:.1f} GFLOP/s, "
        f"ridge {summary['ridge']:.1f} FLOP per byte = {summary['ridge_columns']:.1f} columns",
        f"few columns take {summary['plateau_seconds'] * 1e3:.2f} ms, which is the arithmetic of "
        f"{summary['measured_columns']:.1f} columns",
        "columns   measured  predicted  measured/predicted  GFLOP/s",
    ]
    size = measurement["size"]
    for p in summary["points"]:
        rate = 2 * size**2 * p["columns"] / p["seconds"] / 1e9
        rows.append(
            f"{p['columns']:>7} {p['seconds'] * 1e3:>7.2f} ms "
            f"{p['predicted_seconds'] * 1e3:>7.2f} ms {p['ratio']:>19.2f} {rate:>8.1f}"
        )
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON and the figure."""
    parser = argparse.ArgumentParser(description="Measure this machine's roofline with numpy.")
    parser.add_argument("--size", type=int, default=4096, help="W is size x size (default 4096)")
    parser.add_argument("--copies", type=int, default=6, help="different W used in turn")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; the best time counts")
    parser.add_argument("--out", type=Path, default=Path("my-roofline"), help="folder to write to")
    args = parser.parse_args(argv)
    if min(args.size, args.copies, args.repeats) < 1:
        parser.error("--size, --copies and --repeats need at least 1")
    measurement = measure(args.size, args.copies, args.repeats, COLUMNS)
    args.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(measurement, indent=1) + "\n"
    (args.out / "roofline.json").write_text(text, encoding="utf-8")
    print(f"{measurement['machine']['cpu']}, {measurement['threads']} thread(s)")
    print(table(measurement))
    print(f"wrote {args.out / 'roofline.json'}")
    print(written(args.out / "roofline.svg", lambda: figure(measurement)))


if __name__ == "__main__":
    main()

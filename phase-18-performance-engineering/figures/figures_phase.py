"""The figures of phase 18; `course figures 18` draws them.

`knee` and `trade` are runs of the simulator on the shipped sample trace, with the two prices that
lab 18-04 fits on an H100 and none for keys. No upstream counterpart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from course.truth.figures import BLUE, GREY, ORANGE, Svg
from course.truth.plots import Axes
from mini_vllm.config import EngineConfig
from mini_vllm.simulate.cost import LinearCost
from mini_vllm.simulate.report import bench_json
from mini_vllm.simulate.samples import FOLDER
from mini_vllm.simulate.simulator import Simulator
from mini_vllm.simulate.traces import TraceRequest, read_trace

COST = LinearCost({"step": 6.46e-3, "tokens": 2.12e-5}, "lab 18-04's prices, none for keys")
RATES = (4, 6, 8, 10, 12, 14, 16, 18)
BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
KNEE_BUDGET = 2048
TRADE_RATE = 10
LIMIT = 800


@functools.cache
def served(rate: float, budget: int) -> dict[str, Any]:
    """The report of the sample trace, four times over and evenly spaced, without a cache."""
    requests = 4 * list(read_trace(FOLDER / "mooncake.jsonl"))
    spaced = [
        TraceRequest(place / rate, each.prompt_len, each.output_len, each.hash_ids, each.hash_block)
        for place, each in enumerate(requests)
    ]
    config = {
        "num_blocks": 8000, "max_num_batched_tokens": budget, "max_num_seqs": 128,
        "async_scheduling": True, "enable_prefix_caching": False,
    }  # fmt: skip
    return bench_json(Simulator(EngineConfig.of(config), COST).run(spaced))


def curve(name: str, rates: Sequence[float]) -> list[tuple[float, float]]:
    """A value of the report, by rate."""
    return [(rate, served(rate, KNEE_BUDGET)[name]) for rate in rates]


def knee() -> str:
    """TTFT by offered load: flat, and then not."""
    p50, p99 = curve("p50_ttft_ms", RATES), curve("p99_ttft_ms", RATES)
    top = 100 * (int(max(value for _, value in p99) / 100) + 1)
    svg = Svg(
        780, 300, "Time to first token by offered load",
        "; ".join(f"{rate} requests/s: P50 {a:.0f} ms, P99 {b:.0f} ms"
                  for (rate, a), (_, b) in zip(p50, p99, strict=True)),
    )  # fmt: skip
    axes = Axes(svg, (70, 30, 560, 216), (RATES[0] - 0.5, RATES[-1] + 0.5), (0, top))
    axes.frame("requests per second offered", "TTFT, ms", RATES)
    axes.rule(y=LIMIT)
    axes.label(RATES[0] - 0.4, LIMIT, f"limit {LIMIT} ms", fill=GREY, dy=-6)
    for points, colour, name in ((p99, ORANGE, "P99"), (p50, BLUE, "P50")):
        axes.curve(points, colour, width=2.5)
        axes.dots(points, colour)
        axes.label(points[-1][0], points[-1][1], name, fill=colour, dx=10)
    return svg.render()


def trade() -> str:
    """Gap between tokens against time to first token, one point per budget."""
    points = [
        (served(TRADE_RATE, budget)["p99_ttft_ms"], served(TRADE_RATE, budget)["p99_itl_ms"])
        for budget in BUDGETS
    ]
    svg = Svg(
        780, 300, f"What a budget trades, at {TRADE_RATE} requests per second",
        "; ".join(f"budget {budget}: TTFT P99 {x:.0f} ms, ITL P99 {y:.1f} ms"
                  for budget, (x, y) in zip(BUDGETS, points, strict=True)),
    )  # fmt: skip
    top = 20 * (int(max(y for _, y in points) / 20) + 2)
    axes = Axes(svg, (70, 30, 560, 216), (100, 20_000), (0, top), log_x=True)
    ticks = {each: f"{each:,}" for each in (100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)}
    axes.frame("TTFT P99, ms", "ITL P99, ms", ticks)
    axes.curve(points, GREY, width=1)
    axes.dots(points, BLUE, radius=5)
    for budget, (x, y) in zip(BUDGETS, points, strict=True):
        axes.label(x, y, f"{budget:,}", dx=10, dy=4 if budget == 4096 else -8)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {"knee.svg": knee, "trade.svg": trade}

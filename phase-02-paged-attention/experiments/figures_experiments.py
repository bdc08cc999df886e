"""Figures of the experiments, from `measured/`, and of labs 02-01, 02-02 and 02-05.

Each function returns an SVG text and
reads nothing but the committed measurements and mini_vllm. No upstream counterpart.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from course.truth.figures import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, Svg
from course.truth.plots import Axes
from labkit.modules import sibling
from mini_vllm.config import SamplingParams
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.request import Request

_measure_churn = sibling(__file__, "measure_churn")
interval = _measure_churn.interval

HERE = Path(__file__).resolve().parent


def measured(name: str) -> dict[str, Any]:
    """A committed measurement."""
    return json.loads((HERE / "measured" / name).read_text(encoding="utf-8"))


# ------------------------------------------------------------------ churn


def churn_holes() -> str:
    """Free memory and the largest hole over time, one panel per allocator."""
    data = measured("churn.json")
    settings = data["settings"]
    low, high, every = settings["warm_up"], settings["steps"], settings["every"]
    svg = Svg(
        780,
        490, "Four allocators under the same arrivals: what is useful, and the largest hole",
        "Over 3,000 steps. Reserving max_len keeps about a sixth of memory useful. The buddy "
        "allocator and first fit leave 10 to 15 percent free, in holes that stay far below it. "
        "Blocks keep nearly everything useful, and no hole is ever needed.",
    )  # fmt: skip
    for index, (name, series) in enumerate(data["series"].items()):
        left, top = 60 + (index % 2) * 370, 66 + (index // 2) * 230
        axes = Axes(svg, (left, top, 320, 130), (low, high), (0, 1))
        axes.frame(
            "engine step" if index > 1 else "",
            "share of the memory",
            range(low, high + 1, 1000),
            {y / 100: f"{y} %" for y in (0, 50, 100)},
        )
        svg.text(left + 320, top - 10, name, anchor="end", bold=True)
        for key, color, words in (
            ("useful", BLUE, "holds tokens"),
            ("free", GREY, "free, all holes together"),
            ("largest", RED, "largest hole"),
        ):
            points = [(low + i * every, value) for i, value in enumerate(series[key])]
            axes.curve(points, color, width=1.6, name=words)
        mean = statistics.fmean(series["useful"])
        dy = 24 if mean > 0.9 else -22 if mean < 0.3 else -34
        axes.label(low, mean, f"useful {mean:.0%}", BLUE, dy=dy)
        if index == 0:
            axes.legend(60, 16, columns=3)
    return svg.render()


def churn_running() -> str:
    """Mean running requests and useful memory per allocator, with confidence intervals."""
    data = measured("churn.json")["runs"]
    svg = Svg(
        780, 250, "Requests running at once, by allocator, in the same memory",
        "; ".join(
            f"{name}: {statistics.fmean(r['running'] for r in runs):.1f} running, "
            f"{statistics.fmean(r['useful'] for r in runs):.0%} of the memory useful"
            for name, runs in data.items()
        ) + ".",
    )  # fmt: skip
    axes = Axes(svg, (150, 30, 480, 160), (0, 60), (len(data) - 0.5, -0.5))
    axes.frame("requests running, mean over steps", "", None, dict(enumerate(data)))
    for row, runs in enumerate(data.values()):
        mean, half = interval([run["running"] for run in runs])
        useful = statistics.fmean(run["useful"] for run in runs)
        color = (GREY, PURPLE, ORANGE, BLUE)[row]
        axes.bars([(row, mean)], color, width=0.7, opacity=0.6, lying=True)
        axes.spans([(row, mean - half, mean + half)], INK, lying=True, width=2)
        axes.label(mean + half, row, f"{mean:.1f} ± {half:.1f}, {useful:.0%} useful", dx=8)
    svg.text(764, 242, "95 % confidence intervals over seeds", anchor="end", css="soft", size=11)
    return svg.render()


# ------------------------------------------------------------------ eviction

POLICY_COLORS = {
    "reverse free": BLUE,
    "LRU, tail first": GREEN,
    "LRU": ORANGE,
    "forward free": PURPLE,
    "random": RED,
}


def eviction_hit_rate() -> str:
    """Hit rate over pool size, one line per policy."""
    data = measured("eviction.json")
    sizes = data["pool_sizes"]
    svg = Svg(
        780, 380, "Hit rate on multi-turn chats over the size of the pool, by eviction policy",
        "Reverse free and LRU with the tail first lie on one line, from 40 to 89 percent. LRU and "
        "forward free lie together a little below. Random eviction stays between 19 and 30.",
    )  # fmt: skip
    axes = Axes(svg, (60, 40, 520, 270), (sizes[0] - 100, sizes[-1] + 100), (0, 100))
    axes.frame(
        f"blocks of {data['block_size']} tokens in the pool",
        "hit rate, % of prompt tokens",
        sizes,
        range(0, 101, 20),
    )
    bound = statistics.fmean(data["no eviction"]) * 100
    axes.rule(y=bound, width=2)
    axes.label(sizes[-1] + 100, bound, f"no eviction {bound:.0f} %", GREY, dx=10, dy=-2)
    ends = {"reverse free": 9, "LRU, tail first": 26, "LRU": 43, "forward free": 60, "random": 4}
    for name, rates in data["hit_rate"].items():
        color = POLICY_COLORS[name]
        found = [(size, *interval([100 * rate for rate in rates[str(size)]])) for size in sizes]
        points = [(size, mean) for size, mean, _ in found]
        axes.spans([(size, mean - half, mean + half) for size, mean, half in found], color)
        axes.curve(points, color, dash="6 4" if name in ("LRU, tail first", "LRU") else None)
        axes.dots(points, color, radius=3)
        words = f"{name} {points[-1][1]:.1f} %"
        axes.label(sizes[-1] + 100, points[-1][1], words, color, dx=10, dy=ends[name])
    svg.text(
        764, 370, f"bars: 95 % confidence intervals over {data['seeds']} seeds",
        anchor="end", css="soft", size=11,
    )  # fmt: skip
    return svg.render()


def eviction_loss() -> str:
    """Paired difference to reverse free, without random."""
    data = measured("eviction.json")
    sizes, base = data["pool_sizes"], data["hit_rate"]["reverse free"]
    names = [name for name in data["hit_rate"] if name not in ("reverse free", "random")]
    svg = Svg(
        780, 330, "What another order costs, in points of hit rate, by pool size",
        "LRU with the tail first does not differ from reverse free. LRU and forward free lose "
        "about 4 points in the smallest pool and less in larger ones; the intervals exclude zero.",
    )  # fmt: skip
    axes = Axes(svg, (60, 40, 700, 200), (-0.5, len(sizes) - 0.5), (-5, 1))
    axes.frame(
        f"blocks of {data['block_size']} tokens in the pool",
        "difference to reverse free, percentage points, same chats",
        {i: f"{size:,}" for i, size in enumerate(sizes)},
        {y: f"{y:+d}" if y else "0" for y in range(-5, 2)},
    )
    axes.rule(y=0, stroke=INK, width=1.4, dash=None)
    for index, name in enumerate(names):
        color, found = POLICY_COLORS[name], []
        for column, size in enumerate(sizes):
            pairs = zip(data["hit_rate"][name][str(size)], base[str(size)], strict=True)
            mean, half = interval([100 * (rate - other) for rate, other in pairs])
            found.append((column + (index - 1) * 0.18, mean, half))
        axes.spans([(x, mean - half, mean + half) for x, mean, half in found], color, width=2)
        said = zip(sizes, found, strict=True)
        tips = [f"{name}, {size}: {mean:+.2f} ± {half:.2f}" for size, (_, mean, half) in said]
        axes.dots([(x, mean) for x, mean, _ in found], color, radius=4.5, tips=tips, name=name)
    axes.legend(60, 292, columns=3)
    svg.text(764, 322, "bars: 95 % confidence intervals", anchor="end", css="soft", size=11)
    return svg.render()


# ------------------------------------------------------------------ the free queue


def free_queue_times() -> str:
    """Time per block of three operations over the length of the queue, one panel each."""
    data = measured("free-queue.json")
    sizes = sorted({row["num_blocks"] for row in data["rows"]})
    svg = Svg(
        780, 340, "Nanoseconds per block of three structures for the free queue",
        "Out of the middle: the linked list and OrderedDict stay flat, the deque grows with the "
        "queue. One at the ends: the deque wins. In batches the linked list and the deque are "
        "level, OrderedDict takes several times as long.",
    )  # fmt: skip
    colors = {"linked list": BLUE, "deque": ORANGE, "OrderedDict": GREEN}
    titles = {
        "revive": "revive: out of the middle",
        "reuse": "reuse: one at the ends",
        "batch": f"batch: {data['batch']} at the ends",
    }
    for index, (name, title) in enumerate(titles.items()):
        left = 62 + index * 244
        axes = Axes(
            svg, (left, 70, 190, 190), (sizes[0] / 1.5, sizes[-1] * 1.5), (20, 1e6),
            log_x=True, log_y=True,
        )  # fmt: skip
        axes.frame(
            "blocks in the queue",
            "",
            sizes,
            {100.0: "100 ns", 1e3: "1 µs", 1e4: "10 µs", 1e5: "100 µs"},
        )
        svg.text(left + 190, 60, title, anchor="end", bold=True, size=12)
        for structure, color in colors.items():
            points = [
                (row["num_blocks"], row[name]["min"] * 1e9)
                for row in data["rows"]
                if row["structure"] == structure
            ]
            at_last = next(
                row["bytes"] for row in data["rows"]
                if row["structure"] == structure and row["num_blocks"] == sizes[-1]
            )  # fmt: skip
            words = f"{structure}, {at_last:.0f} bytes per block"
            axes.curve(points, color, width=2.2, name=words)
            axes.dots(points, color, radius=3.5)
        if index == 0:
            axes.legend(62, 12, columns=3)
    words = f"{data['machine']['cpu']}, Python {data['python']}, best of {data['repeats']} runs"
    svg.text(764, 330, words, anchor="end", css="soft", size=11)
    return svg.render()


# ------------------------------------------------------------------ the labs


def chain(svg: Svg, y: float, ids: Sequence[int], gone: int | None = None) -> None:
    """The free queue as boxes with links, sentinels at both ends."""
    step, width = 104, 64
    names = ["head", *map(str, ids), "tail"]
    places = [28 + step * index for index in range(len(names))]
    for x, name in zip(places, names, strict=True):
        out = name == str(gone)
        color = GREY if name in ("head", "tail") else RED if out else BLUE
        svg.rect(x, y, width, 40, fill=color, opacity=0.12 if out else 0.22, stroke=color, radius=6)
        words = name if name in ("head", "tail") else f"block {name}"
        svg.text(x + width / 2, y + 25, words, anchor="middle", size=12.5, bold=not out)
    kept = [x for x, name in zip(places, names, strict=True) if name != str(gone)]
    for left, right in itertools.pairwise(kept):
        if right - left > step:  # over the block that left
            top, bottom = y - 16, y + 56
            for row, edge in ((top, y), (bottom, y + 40)):
                svg.line(left + 48, edge, left + 48, row, stroke=BLUE, width=2)
                svg.line(left + 48, row, right + 16, row, stroke=BLUE, width=2)
                svg.line(right + 16, row, right + 16, edge, stroke=BLUE, width=2)
            svg.line(right + 16, top, right + 16, y - 1, stroke=BLUE, width=2, arrow=True)
            svg.line(left + 48, bottom, left + 48, y + 41, stroke=BLUE, width=2, arrow=True)
        else:
            svg.line(left + width + 2, y + 14, right - 3, y + 14, width=1.6, arrow=True)
            svg.line(right - 3, y + 27, left + width + 2, y + 27, width=1.6, arrow=True)


def lab_01_remove() -> str:
    """A removal from the middle of the queue."""
    svg = Svg(
        780, 270, "Taking block 2 out of the free queue changes two links and clears two",
        "Above, the queue head, 4, 5, 3, 2, 1, tail, each linked to both neighbours. Below, block "
        "2 has no links any more, and blocks 3 and 1 are linked to each other.",
    )  # fmt: skip
    svg.text(28, 24, "before: next_free to the right, prev_free to the left", size=12.5)
    chain(svg, 40, [4, 5, 3, 2, 1])
    svg.text(28, 132, "after remove(block 2)", size=12.5)
    chain(svg, 166, [4, 5, 3, 2, 1], gone=2)
    svg.text(28, 258, "block 2: both links None. Two neighbours looked at, whatever the length.",
             css="soft", size=12)  # fmt: skip
    return svg.render()


def lab_02_reserve() -> str:
    """The cache as reservations and as blocks, to scale."""
    svg = Svg(
        780, 300, "4096 slots as eight reservations, and as 256 blocks of 16",
        "Above, eight reservations of 512 slots with 32 used in each; 56 more requests are turned "
        "away. Below, 64 requests of 32 tokens hold 128 blocks, and 128 blocks are free.",
    )  # fmt: skip
    svg.text(20, 24, "8 reservations of 512: full, 56 of 64 requests rejected", bold=True)
    for index in range(8):
        x = 20 + index * 92.5
        svg.rect(x, 36, 90, 70, fill=ORANGE, opacity=0.15, stroke=ORANGE)
        svg.rect(x, 36, 90 * 32 / 512, 70, fill=BLUE, opacity=0.8)
    svg.text(760, 124, "blue: 32 slots used; pale: 480 reserved", anchor="end", css="soft", size=12)
    svg.text(20, 160, "256 blocks of 16: all 64 requests in, half of the cache free", bold=True)
    for block in range(256):
        x, y = 20 + block % 64 * 11.56, 172 + block // 64 * 24
        taken = block < 128
        svg.rect(
            x, y, 10.4, 21, fill=BLUE if taken else GREY, opacity=0.8 if taken else 0.15,
            tip=f"block {block}" + (f", request {block // 2 + 1}" if taken else ", free"),
        )  # fmt: skip
    svg.text(760, 288, "two blocks per request", anchor="end", css="soft", size=12)
    return svg.render()


def lab_05_share() -> str:
    """Two tables over one pool, and the queue after both requests have left."""
    kv = KVCacheManager(10, 4)
    requests = []
    for name in "AB":
        request = Request(name, list(range(100, 132)), SamplingParams())
        hits, request.num_computed_tokens = kv.get_computed_blocks(request)
        assert kv.allocate_slots(request, 32 - request.num_computed_tokens, hits) is not None
        requests.append(request)
    tables = {request.request_id: kv.get_block_ids(request.request_id) for request in requests}
    refs = {block.block_id: block.ref_cnt for block in kv.block_pool.blocks}
    for request in requests:
        kv.free(request)
    queue = [block.block_id for block in kv.block_pool.free_queue.get_all_free_blocks()]
    svg = Svg(
        780, 330, "Two requests with the same 32 tokens share seven blocks",
        f"The table of A is {tables['A']}, the table of B {tables['B']}. Blocks 1 to 7 have two "
        f"references. After A and B are freed the queue is {queue}.",
    )  # fmt: skip

    def column(block_id: int) -> float:
        return 100 + (block_id - 1) * 74

    for name, y, color in (("A", 30, BLUE), ("B", 196, ORANGE)):
        svg.text(20, y + 22, f"table of {name}", fill=color, bold=True)
        for block_id in tables[name]:
            x = column(block_id)
            svg.rect(x + 10, y, 42, 32, fill=color, opacity=0.3, radius=4)
            svg.text(x + 31, y + 21, str(block_id), anchor="middle")
            if name == "A":
                svg.line(x + 31, y + 34, x + 31, 93, stroke=color, width=1.6, arrow=True)
            else:
                svg.line(x + 31, y - 2, x + 31, 159, stroke=color, width=1.6, arrow=True)
    svg.text(20, 130, "blocks", bold=True)
    for block_id in range(1, 10):
        x, shared = column(block_id), refs[block_id] == 2
        color = GREEN if shared else GREY
        svg.rect(x, 96, 62, 60, fill=color, opacity=0.3, stroke=color, radius=6)
        svg.text(x + 31, 120, f"block {block_id}", anchor="middle", size=12)
        svg.text(x + 31, 142, f"ref {refs[block_id]}", anchor="middle", size=13, bold=True)
    svg.text(20, 276, "free A, then B: the free queue, evicted from the left", size=12.5)
    for place, block_id in enumerate(queue):
        x, y = column(place + 1), 288
        color = GREY if block_id in (8, 9) else GREEN
        svg.rect(x, y, 62, 30, fill=color, opacity=0.3, stroke=color, radius=6)
        svg.text(x + 31, y + 20, str(block_id), anchor="middle", bold=True)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "churn-holes.svg": churn_holes,
    "churn-running.svg": churn_running,
    "eviction-hit-rate.svg": eviction_hit_rate,
    "eviction-loss.svg": eviction_loss,
    "free-queue-times.svg": free_queue_times,
    "lab-01-remove.svg": lab_01_remove,
    "lab-02-reserve.svg": lab_02_reserve,
    "lab-05-share.svg": lab_05_share,
}

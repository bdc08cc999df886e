"""The figures of phase 10; `course figures` draws them.

`step-bytes` and `in-flight` show traces of `mini_vllm` on the shipped model, run here with ranks as
processes; `routing` is the recording of the real server beside our balancer's choices; `grid` is
what `rank_groups` says; the rest is drawn. No upstream counterpart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from conformance import recording
from conformance.features.distributed.texts import KEPT
from course.site.widgets import shard_matrix
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from course.truth.plots import Axes
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.distributed.balancer import LoadBalancer
from mini_vllm.distributed.collectives import CommStats
from mini_vllm.distributed.groups import rank_groups

COLORS = (BLUE, ORANGE, GREEN, PURPLE)
ASKED = {
    "a": "The scheduler plans a step. It gives each request some tokens.",
    "b": "A block",
    "c": "def f(x):",
    "d": "The KV cache holds keys and values of each token",
}
STAGES, BUDGET = 4, 64

# ------------------------------------------------------------------ from traces


@functools.cache
def last_step() -> CommStats:
    """What rank 0 of two sends in a decode step of four requests."""
    engine = LLMEngine(dtype="float64", tensor_parallel_size=2)
    for prompt in ("The scheduler plans a step", "A block", "def f(x):", "The KV cache"):
        engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.feature("distributed") is not None
    stats = engine.feature("distributed").comm_stats()[0]
    engine.close()
    return stats


def step_bytes() -> str:
    """Bytes of a step by the layer that sent them, in the order of the layers."""
    stats = last_step()
    rows = [(op, name, sent) for (op, name), sent in stats.bytes_sent.items()]
    total, reduces = stats.total_bytes(), stats.total_calls("all_reduce")
    svg = Svg(
        780, 430, "What one of two ranks sends in a decode step of four requests",
        f"{reduces} all-reduces of 8,192 bytes, one after the embedding and two in each of four "
        f"layers, and one all-gather of the logits: {total:,} bytes.",
    )  # fmt: skip
    axes = Axes(svg, (210, 40, 500, 330), (0, 10_000), (len(rows) - 0.4, -0.6))
    names = {row: name.removeprefix("model.") for row, (_, name, _) in enumerate(rows)}
    axes.frame("bytes sent by rank 0 (float64)", "", {0: "0", 4096: "4,096", 8192: "8,192"}, names)
    for operation, color, words in (
        ("all_reduce", BLUE, "all-reduce"),
        ("all_gather", ORANGE, "all-gather"),
    ):
        places = [(row, sent) for row, (op, _, sent) in enumerate(rows) if op == operation]
        tips = [f"{words}: {sent:,} bytes" for _, sent in places]
        axes.bars(places, color, lying=True, width=0.7, tips=tips)
    svg.rect(210, 16, 14, 14, fill=BLUE, opacity=0.75)
    svg.text(230, 28, f"all-reduce, {reduces} times", size=13)
    svg.rect(390, 16, 14, 14, fill=ORANGE, opacity=0.75)
    svg.text(410, 28, "all-gather, once", size=13)
    svg.text(540, 28, f"together {total:,} bytes", size=13, bold=True)
    return svg.render()


@functools.cache
def plans() -> list[tuple[dict[str, int], int]]:
    """Of each call of `step` with four stages: tokens planned by request, and batches in flight."""
    engine = LLMEngine(
        dtype="float64", pipeline_parallel_size=STAGES, max_num_batched_tokens=BUDGET
    )
    made: list[dict[str, int]] = []
    engine.observers.append(lambda plan: made.append(dict(plan.num_scheduled_tokens)))
    for name, prompt in ASKED.items():
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        engine.add_request(prompt, params, request_id=name)
    found: list[tuple[dict[str, int], int]] = []
    while engine.has_unfinished_requests():
        before = sum(bool(plan.scheduled_requests) for plan, _ in engine.executor.batch_queue)
        engine.step()
        found.append((made[-1], before + bool(made[-1])))
    engine.close()
    return found


def in_flight() -> str:
    """Plans of four stages: what is in each batch, and how many batches are under way."""
    steps = [each for each in plans() if each[0]]
    most = max(busy for _, busy in steps)
    svg = Svg(
        780, 268, "Four stages, four requests: which batches there are",
        f"Prompts of {', '.join(str(len(p)) for p in ASKED.values())} tokens, {BUDGET} tokens a "
        f"step. After the prompts two batches take turns: request a, and b, c, d together. At most "
        f"{most} of {STAGES} stages have a batch.",
    )  # fmt: skip
    width = 640 / len(steps)
    svg.text(16, 28, "batch", size=12, css="soft")
    svg.text(16, 236, "in flight", size=12, css="soft")
    for place, (planned, busy) in enumerate(steps):
        x = 110 + place * width
        svg.text(x + width / 2 - 2, 28, str(place + 1), anchor="middle", size=12, css="soft")
        for row, name in enumerate(ASKED):
            if name in planned:
                svg.cell(x, 42 + row * 40, width - 4, str(planned[name]), COLORS[row])
        for stage in range(STAGES):
            fill, opacity = (GREEN, 0.6) if stage < busy else (GREY, 0.18)
            svg.rect(x + stage * (width - 6) / 4, 222, width / 4 - 4, 18, fill=fill,
                     opacity=opacity, radius=2)  # fmt: skip
    for row, (name, prompt) in enumerate(ASKED.items()):
        svg.text(16, 60 + row * 40, f"{name}: {len(prompt)}", size=14, bold=True)
    svg.text(
        110, 258, "numbers: tokens of the request in the batch; below: stages with a batch, of "
        "four", size=12, css="soft",
    )  # fmt: skip
    return svg.render()


def routing() -> str:
    """Eight short requests beside eight long ones: the real server, and ours when told."""
    line = recording.first(KEPT / "ranks-dp2.jsonl.gz")
    short = [now - then for now, then in zip(line["short"], line["before"], strict=True)]
    long = [now - then for now, then in zip(line["long"], line["short"], strict=True)]
    assert sum(short) == 8 and sorted(long) == [0, 8]
    told = LoadBalancer(2)
    told.update([[0, 8], [0, 0]])
    ours = [told.choose() for _ in range(8)]
    rows = (
        ("recorded, a dense model", short, RED),
        ("our balancer, told once before", [ours.count(0), ours.count(1)], BLUE),
        ("told before each choice", [0, 8], GREEN),
    )
    for _ in range(8):
        told.update([[0, 8], [0, 0]])
        assert told.choose() == 1
    svg = Svg(
        780, 250, "Where eight short requests went while rank 0 ran eight long ones",
        f"On the real server {short[0]} to busy rank 0 and {short[1]} to rank 1. Told of the "
        f"queues once ours sends {ours.count(0)} and {ours.count(1)}; told each time, 0 and 8.",
    )  # fmt: skip
    svg.text(330, 28, "rank 0, with 8 long requests", size=12, css="soft")
    svg.text(560, 28, "rank 1, idle", size=12, css="soft")
    for row, (words, counts, color) in enumerate(rows):
        y = 48 + row * 64
        svg.text(16, y + 24, words, size=14, bold=row == 0)
        for rank, count in enumerate(counts):
            x = 330 + rank * 230
            for place in range(count):
                svg.rect(x + place * 20, y + 6, 17, 26, fill=color, opacity=0.55, radius=3)
            svg.text(x + count * 20 + 6, y + 25, str(count), size=14, bold=True)
    return svg.render()


# ------------------------------------------------------------------ drawn


def _cut(name: str) -> list[tuple[float, float, float, float, int, str]]:
    """The pieces of a square of 116 pixels: left, top, width, height, rank, words."""
    if name == "PP":
        return [(0, 29 * row, 116, 29, row // 2, f"layer {row}") for row in range(4)]
    if name == "TP":
        return [(58 * r, 29 * row, 58, 29, r, "half") for row in range(4) for r in (0, 1)]
    if name == "EP":
        return [(29 * (e % 4), 29 * (e // 4), 29, 29, e // 8, str(e)) for e in range(16)]
    if name == "CP":
        return [(14.5 * t, 0, 14.5, 116, t % 2, str(t)) for t in range(8)]
    return [(58 * rank, 0, 58, 116, rank, "all") for rank in (0, 1)]


def axes() -> str:
    """One block of work, cut five ways."""
    svg = Svg(
        780, 252, "Five ways to cut the same work",
        "Layers: pipeline parallelism. The width of every matrix: tensor parallelism. Experts: "
        "expert parallelism. Tokens of a sequence: context parallelism. Requests: data "
        "parallelism, with whole copies.",
    )  # fmt: skip
    kinds = (
        ("PP", "layers", "one hand-over"), ("TP", "width of a layer", "2 sums a layer"),
        ("EP", "experts", "tokens travel"), ("CP", "tokens of one text", "partial attention"),
        ("DP", "requests", "copies, no talk"),
    )  # fmt: skip
    for place, (name, axis, price) in enumerate(kinds):
        x, y = 24 + place * 152.0, 60.0
        svg.text(x + 58, 30, name, anchor="middle", size=17, bold=True)
        svg.text(x + 58, 48, axis, anchor="middle", size=12, css="soft")
        for left, top, width, height, owner, words in _cut(name):
            svg.rect(x + left, y + top, width - 3, height - 3, fill=COLORS[owner], opacity=0.5,
                     radius=3)  # fmt: skip
            middle = x + left + (width - 3) / 2
            svg.text(middle, y + top + height / 2 + 3, words, size=11, anchor="middle")
        svg.text(x + 58, 204, price, anchor="middle", size=12)
    svg.rect(24, 226, 14, 14, fill=BLUE, opacity=0.5)
    svg.text(44, 238, "rank 0", size=12)
    svg.rect(110, 226, 14, 14, fill=ORANGE, opacity=0.5)
    svg.text(130, 238, "rank 1", size=12)
    return svg.render()


def cuts() -> str:
    """The worked example of the two cuts, as the widget computes it."""
    svg = Svg(
        780, 250, "One matrix, two ranks, two cuts",
        "By rows of W each rank has two finished outputs; by columns each has an addend of all "
        "four, and the sum is y.",
    )  # fmt: skip
    weight, x = shard_matrix.WEIGHT.astype(int), shard_matrix.INPUT[0].astype(int)
    for place, kind in enumerate(shard_matrix.CUTS):
        film, left = shard_matrix.cut(kind, (0, 1)), 16 + place * 392.0
        owner, by_rows = film["owner"], kind == "outputs"
        words = "by rows of W: column-parallel" if by_rows else "by columns of W: row-parallel"
        svg.text(left, 22, words, size=14, bold=True)
        svg.text(left, 64, "x", size=13)
        svg.text(left, 126, "W", size=13)
        for c in range(4):
            color = GREY if by_rows else COLORS[owner[c]]
            svg.cell(left + 24 + c * 38, 46, 34, str(x[c]), color)
            for r in range(4):
                color = COLORS[owner[r if by_rows else c]]
                svg.cell(left + 24 + c * 38, 92 + r * 32, 34, str(weight[r, c]), color)
        svg.text(left + 206, 64, "outputs" if by_rows else "addends", size=13)
        for rank, part in enumerate(film["parts"]):
            for i, value in enumerate(part):
                at = i + (2 * rank if by_rows else 0)
                svg.cell(left + 206 + at * 38, 92 + rank * 32, 34, str(value), COLORS[rank])
        svg.text(left + 206, 182, "side by side" if by_rows else "added up", size=13)
        for i, value in enumerate(film["together"]):
            color = COLORS[i // 2] if by_rows else GREY
            svg.cell(left + 206 + i * 38, 192, 34, str(value), color)
    return svg.render()


def collectives() -> str:
    """Four collectives among three ranks, with numbers."""
    kinds = (
        ("all-reduce", [[1, 2, 3], [10, 20, 30], [100, 200, 300]], [[111, 222, 333]] * 3),
        ("all-gather", [[1], [10], [100]], [[1, 10, 100]] * 3),
        ("reduce-scatter", [[1, 2, 3], [10, 20, 30], [100, 200, 300]], [[111], [222], [333]]),
        (
            "all-to-all",
            [[1, 2, 3], [10, 20, 30], [100, 200, 300]],
            [[1, 10, 100], [2, 20, 200], [3, 30, 300]],
        ),
    )
    svg = Svg(
        780, 330, "Four collectives among three ranks",
        "All-reduce: everybody has the sum. All-gather: everybody has everybody's part. "
        "Reduce-scatter: each has one part of the sum. All-to-all: piece j goes to rank j.",
    )  # fmt: skip
    for place, (name, before, after) in enumerate(kinds):
        left, top = 20 + place % 2 * 390, 10 + place // 2 * 164
        svg.text(left, top + 14, name, size=15, bold=True)
        for rank in range(3):
            y = top + 26 + rank * 40
            for column, value in enumerate(before[rank]):
                svg.cell(left + column * 50, y, 46, str(value), COLORS[rank])
            for column, value in enumerate(after[rank]):
                summed = name in ("all-reduce", "reduce-scatter")
                color = GREY if summed else COLORS[column]
                svg.cell(left + 200 + column * 50, y, 46, str(value), color)
        svg.line(left + 156, top + 79, left + 190, top + 79, arrow=True)
    return svg.render()


def processes() -> str:
    """Who is a process when a model has four tensor-parallel ranks."""
    svg = Svg(
        780, 330, "vLLM with four tensor-parallel ranks: six processes",
        "An API server, an engine core with the only scheduler, and four workers. The plan is "
        "written once into shared memory; the sums of layers run among the workers; rank 0 "
        "answers.",
    )  # fmt: skip
    svg.box(16, 120, 130, 70, ["API server", "text, HTTP"], fill=GREY)
    svg.box(210, 100, 150, 110, ["EngineCore", "the scheduler", "one block pool"], fill=GREEN)
    svg.line(150, 155, 204, 155, arrow=True)
    for rank in range(4):
        y = 16 + rank * 76
        svg.box(560, y, 200, 60, [f"Worker_TP{rank}", "a quarter of each matrix"], fill=BLUE)
        svg.line(366, 160, 552, y + 40, arrow=True)
    svg.text(372, 272, "the plan, once, by", size=12)
    svg.text(372, 288, "shared memory", size=12)
    svg.line(556, 30, 366, 112, stroke=ORANGE, width=2, arrow=True)
    svg.text(390, 60, "token ids", size=12, fill=ORANGE, bold=True)
    for rank in range(3):
        svg.line(660, 77 + rank * 76, 660, 91 + rank * 76, stroke=PURPLE, width=4)
    svg.text(16, 306, "purple: sums inside the layers, among workers alone", size=12, css="soft")
    return svg.render()


def grid() -> str:
    """The groups of eight ranks with DP, PP and TP of 2."""
    groups = rank_groups(8, 2, 2, 2)
    svg = Svg(
        780, 330, "Eight ranks, DP 2, PP 2, TP 2: who is in a group with whom",
        "; ".join(f"{kind.upper()} {groups[kind]}" for kind in ("tp", "pp", "dp", "ep")) + ".",
    )  # fmt: skip
    for place, kind in enumerate(("tp", "pp", "dp", "ep")):
        left, top = 20 + place % 2 * 390, 16 + place // 2 * 160
        svg.text(left, top + 12, f"{kind.upper()} groups", size=15, bold=True)
        owner = {rank: i for i, ranks in enumerate(groups[kind]) for rank in ranks}
        for rank in range(8):
            x = left + (rank % 4) * 70 + (16 if rank % 4 >= 2 else 0)
            y = top + 28 + rank // 4 * 44
            svg.cell(x, y, 62, str(rank), COLORS[owner[rank]])
        svg.text(left, top + 130, f"{len(groups[kind])} groups of {len(groups[kind][0])}", size=12,
                 css="soft")  # fmt: skip
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "axes.svg": axes,
    "cuts.svg": cuts,
    "collectives.svg": collectives,
    "step-bytes.svg": step_bytes,
    "in-flight.svg": in_flight,
    "processes.svg": processes,
    "routing.svg": routing,
    "grid.svg": grid,
}

"""The figures of phase 01.

What shows engine behaviour comes from traces of mini_vllm; `overlap.svg` is a simulation whose
durations are chosen, and says so. No upstream counterpart.
"""

from __future__ import annotations

from typing import Any

from course.truth.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SERIES,
    Svg,
)
from course.truth.plots import Axes
from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine
from mini_vllm.observe.trace import StepRecord, traced_steps


def fixed_length(max_tokens: int) -> SamplingParams:
    """Greedy, exactly `max_tokens` outputs."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def traced(
    prompts: list[str], max_tokens: list[int], **engine_kwargs: Any
) -> tuple[list[str], list[StepRecord]]:
    """Request ids in prompt order, and one record per step of the toy engine."""
    engine = LLMEngine(model="toy", **engine_kwargs)
    ids = [
        engine.add_request(prompt, fixed_length(length))
        for prompt, length in zip(prompts, max_tokens, strict=True)
    ]
    return ids, list(traced_steps(engine))


# ------------------------------------------------------------------ drawings without data


def request_path() -> str:
    """A request's way from prompt to text, with the type it has at each hop."""
    svg = Svg(
        780,
        470,
        "The path of a request from prompt to text",
        "A prompt enters one of two front doors, is turned into an EngineCoreRequest, crosses into "
        "the engine core, becomes a Request, goes round the loop of schedule, execute, sample and "
        "update once per step, and leaves as EngineCoreOutput, which the output processor turns "
        "into the RequestOutput the caller sees.",
    )
    svg.rect(16, 30, 226, 424, css="paper", radius=8)
    svg.text(129, 50, "front end", anchor="middle", bold=True)
    svg.rect(330, 30, 434, 424, css="paper", radius=8)
    svg.text(547, 50, "engine core", anchor="middle", bold=True)

    svg.box(36, 66, 186, 50, ["LLM or AsyncLLM", "prompt + SamplingParams"], fill=GREY)
    svg.box(36, 148, 186, 50, ["input processor", "validate, clone, name"], fill=GREY)
    svg.line(129, 118, 129, 145, width=1.6, arrow=True)
    svg.box(36, 316, 186, 50, ["output processor", "detokenize, stop strings"], fill=GREY)
    svg.box(36, 394, 186, 46, ["caller", "RequestOutput"], fill=GREY)
    svg.line(129, 368, 129, 391, width=1.6, arrow=True)

    svg.box(350, 148, 124, 50, ["Request", "WAITING"], fill=PURPLE)
    svg.line(224, 173, 346, 173, width=1.6, arrow=True)
    svg.text(286, 164, "EngineCore", anchor="middle", size=11, css="ink")
    svg.text(286, 188, "Request", anchor="middle", size=11, css="ink")
    svg.line(346, 341, 226, 341, width=1.6, arrow=True)
    svg.text(286, 332, "EngineCore", anchor="middle", size=11, css="ink")
    svg.text(286, 356, "Outputs", anchor="middle", size=11, css="ink")
    svg.line(286, 72, 286, 146, css="soft-line", dash="4 4")
    svg.line(286, 198, 286, 316, css="soft-line", dash="4 4")
    svg.line(286, 366, 286, 446, css="soft-line", dash="4 4")
    svg.text(286, 62, "process", anchor="middle", size=11, css="soft")
    svg.text(286, 48, "another", anchor="middle", size=11, css="soft")

    stages = [
        (530, 100, "1  schedule", "phases 02, 03", BLUE),
        (600, 200, "2  execute_model", "phases 04-07 ...", ORANGE),
        (530, 300, "3  sample_tokens", "phases 08, 09, 12", GREEN),
        (350, 300, "4  update", "phase 03", RED),
    ]
    for x, y, name, note, color in stages:
        width = 124 if x == 350 else 148
        svg.box(x, y, width, 54, [name, note], fill=color)
    svg.line(474, 166, 527, 140, width=1.6, arrow=True)
    svg.line(640, 156, 660, 197, width=1.6, arrow=True)
    svg.text(664, 180, "SchedulerOutput", size=11)
    svg.line(668, 256, 640, 297, width=1.6, arrow=True)
    svg.text(668, 284, "logits", size=11)
    svg.line(528, 327, 477, 327, width=1.6, arrow=True)
    svg.text(503, 375, "ModelRunnerOutput", size=11, anchor="middle")
    svg.line(430, 298, 534, 158, width=1.6, arrow=True)
    svg.text(462, 232, "next step", size=11, anchor="end")
    svg.text(547, 430, "once round = one step = at most one token budget", anchor="middle", size=12)
    return svg.render()


def processes() -> str:
    """Which process holds what, offline and served."""
    svg = Svg(
        780,
        500,
        "The processes of offline and served vLLM",
        "Offline with one GPU there are two processes: your script with the LLM front end, and the "
        "engine core, which also holds the worker. Served with tensor parallel size 4 there are "
        "six: one API server, one engine core, four workers.",
    )

    def process(x: float, y: float, width: float, height: float, name: str) -> None:
        svg.rect(x, y, width, height, css="paper", radius=8, stroke=GREY)
        svg.text(x + 10, y + 18, name, size=12, bold=True)

    svg.text(16, 22, "Offline: LLM(model=...), one GPU", bold=True, size=14)
    svg.text(764, 22, "2 processes", anchor="end", bold=True, size=14)
    process(16, 34, 218, 158, "your script")
    svg.box(30, 62, 190, 34, ["LLM, LLMEngine"], fill=GREY, size=12)
    svg.box(30, 104, 190, 34, ["output processor"], fill=GREY, size=12)
    svg.box(30, 146, 190, 34, ["SyncMPClient"], fill=PURPLE, size=12)
    process(352, 34, 412, 158, "EngineCore")
    svg.box(366, 62, 112, 34, ["input thread"], fill=PURPLE, size=12)
    svg.box(366, 146, 112, 34, ["output thread"], fill=PURPLE, size=12)
    svg.box(490, 62, 118, 118, ["busy loop", "scheduler", "KV manager"], fill=BLUE, size=12)
    svg.box(
        620,
        62,
        132,
        118,
        ["UniProcExecutor", "Worker", "ModelRunner", "one GPU"],
        fill=ORANGE,
        size=12,
    )
    svg.line(236, 79, 362, 79, width=1.6, arrow=True)
    svg.line(362, 163, 238, 163, width=1.6, arrow=True)
    svg.text(293, 72, "EngineCoreRequest", anchor="middle", size=11)
    svg.text(293, 98, "ZMQ, msgpack", anchor="middle", size=11, css="soft")
    svg.text(293, 156, "EngineCoreOutputs", anchor="middle", size=11)

    svg.text(16, 232, "Served: vllm serve -tp=4", bold=True, size=14)
    svg.text(764, 232, "1 + 1 + 4 = 6 processes", anchor="end", bold=True, size=14)
    process(16, 244, 218, 242, "API server")
    svg.box(30, 272, 190, 40, ["HTTP, JSON, SSE"], fill=GREY, size=12)
    svg.box(30, 322, 190, 40, ["tokenize, AsyncLLM"], fill=GREY, size=12)
    svg.box(30, 372, 190, 40, ["output processor"], fill=GREY, size=12)
    svg.box(30, 432, 190, 40, ["AsyncMPClient"], fill=PURPLE, size=12)
    process(352, 244, 236, 242, "EngineCore")
    svg.box(366, 272, 208, 34, ["input thread"], fill=PURPLE, size=12)
    svg.box(366, 316, 208, 54, ["busy loop", "scheduler, KV manager"], fill=BLUE, size=12)
    svg.box(366, 380, 208, 40, ["MultiprocExecutor"], fill=ORANGE, size=12)
    svg.box(366, 438, 208, 34, ["output thread"], fill=PURPLE, size=12)
    svg.line(236, 289, 362, 289, width=1.6, arrow=True)
    svg.line(362, 455, 238, 455, width=1.6, arrow=True)
    svg.text(293, 282, "EngineCoreRequest", anchor="middle", size=11)
    svg.text(293, 308, "ZMQ, msgpack", anchor="middle", size=11, css="soft")
    svg.text(293, 448, "EngineCoreOutputs", anchor="middle", size=11)
    for rank in range(4):
        y = 244 + rank * 62
        process(640, y, 124, 56, f"worker {rank}")
        svg.text(650, y + 42, "ModelRunner, GPU", size=11, css="soft")
        svg.line(576, 400, 637, y + 28, css="soft-line", arrow=True)
    return svg.render()


def states() -> str:
    """The life of a request as a state machine."""
    svg = Svg(
        780,
        350,
        "The states of a request",
        "WAITING leads to RUNNING when a request is admitted; RUNNING leads to PREEMPTED when its "
        "blocks are taken, and PREEMPTED straight back to RUNNING; RUNNING leads to the finished "
        "states; an abort can come from any state that is not finished. vLLM has three further "
        "waiting states.",
    )
    svg.box(40, 90, 150, 54, ["WAITING", "no KV blocks"], fill=GREY)
    svg.box(300, 90, 150, 54, ["RUNNING", "holds KV blocks"], fill=BLUE)
    svg.box(300, 240, 150, 62, ["PREEMPTED", "blocks freed,", "computed = 0"], fill=ORANGE)
    svg.line(192, 117, 297, 117, width=1.6, arrow=True)
    svg.text(244, 108, "admitted", anchor="middle", size=12)
    svg.line(350, 146, 350, 237, width=1.6, arrow=True)
    svg.text(342, 196, "blocks taken", anchor="end", size=12)
    svg.line(405, 237, 405, 148, width=1.6, arrow=True)
    svg.text(413, 196, "re-admitted", size=12)
    finished = [
        (24, "FINISHED_STOPPED", "EOS or stop id: stop", GREEN),
        (88, "FINISHED_LENGTH_CAPPED", "cap: length", GREEN),
        (152, "FINISHED_ABORTED", "caller: abort", RED),
        (216, "FINISHED_ERROR", "error (HTTP 500)", RED),
        (280, "FINISHED_REPETITION", "repetition", GREY),
    ]
    for y, name, note, color in finished:
        svg.box(560, y, 204, 50, [name, note], fill=color, size=12)
    for y in (49, 113, 177):
        svg.line(452, 117, 557, y, width=1.4, arrow=True)
    svg.line(452, 117, 557, 241, css="soft-line", dash="4 3", arrow=True)
    svg.line(452, 117, 557, 305, css="soft-line", dash="4 3", arrow=True)
    svg.text(115, 60, "new request", anchor="middle", size=12)
    svg.line(115, 66, 115, 87, width=1.6, arrow=True)
    svg.box(
        24,
        180,
        190,
        82,
        ["also waiting, in vLLM", "grammar compiling", "KV arriving", "more input"],
        fill=GREY,
        size=11.5,
    )
    svg.line(115, 178, 115, 148, width=1.4, arrow=True)
    svg.text(24, 300, "An abort is possible from every", size=12, css="soft")
    svg.text(24, 317, "state on the left, too.", size=12, css="soft")
    svg.text(24, 340, "finished = status > PREEMPTED", size=12, css="ink mono")
    return svg.render()


# ------------------------------------------------------------------ from traces


def racing() -> str:
    """The two counters of a request that is preempted and comes back."""
    prompts = ["request A", "request B!"]
    ids, steps = traced(
        prompts,
        [8, 8],
        num_blocks=7,
        block_size=4,
        max_num_batched_tokens=8,
        enable_prefix_caching=False,
    )
    name, num_tokens, computed = ids[1], len(prompts[1]), 0
    rows: list[tuple[int, int, str]] = []
    for record in steps:
        if name in record.preempted:
            computed, state = 0, "PREEMPTED"
        elif name in record.num_scheduled_tokens:
            computed = record.num_computed_tokens[name] + record.num_scheduled_tokens[name]
            num_tokens += name in record.sampled
            state = "FINISHED" if name in record.finished else "RUNNING"
        else:
            state = "PREEMPTED" if rows and rows[-1][2] == "PREEMPTED" else "WAITING"
        rows.append((num_tokens, computed, state))
    svg = Svg(
        780,
        380,
        "Two counters of one request, with a preemption in the middle",
        "num_tokens rises from 10 to 18. num_computed_tokens waits at 0 in step 1, reaches 7, then "
        "10, runs one behind, falls back to 0 in step 6 when the request is preempted, stays there "
        "until step 9, catches up in two steps and runs one behind until the end.",
    )
    axes = Axes(svg, (56, 60, 690, 220), (0, len(rows)), (0, 20))
    axes.frame(
        "after step",
        "tokens of request B",
        {i + 0.5: str(i + 1) for i in range(len(rows))},
        (0, 5, 10, 15, 20),
    )
    axes.bars(
        [(i + 0.5, known - done) for i, (known, done, _) in enumerate(rows)], ORANGE,
        base=[done for _, done, _ in rows], opacity=0.18,
        tips=[f"after step {i}: {d} of {k} computed" for i, (k, d, _) in enumerate(rows, 1)],
    )  # fmt: skip
    known_line, done_line = [row[0] for row in rows], [row[1] for row in rows]
    for values, color in ((known_line, PURPLE), (done_line, BLUE)):
        points: list[tuple[float, float]] = []
        for i, value in enumerate(values):
            points += [(i, value), (i + 1, value)]
        axes.curve(points, color, width=2.5)
    axes.label(0.1, 10, "num_tokens", PURPLE, dy=-8)
    axes.label(6.1, 0, "num_computed_tokens", BLUE, dy=-8)
    colors = {"WAITING": GREY, "RUNNING": BLUE, "PREEMPTED": ORANGE, "FINISHED": GREEN}
    start = 0
    for i in range(1, len(rows) + 1):
        if i < len(rows) and rows[i][2] == rows[start][2]:
            continue
        state = rows[start][2]
        x, width = axes.x(start), axes.x(i) - axes.x(start)
        svg.rect(x + 1, 334, width - 2, 24, fill=colors[state], opacity=0.3, radius=4, tip=state)
        words = state if width > 80 else {"WAITING": "WAIT", "FINISHED": "DONE"}.get(state, state)
        svg.text(x + width / 2, 350, words, size=10.5, anchor="middle", bold=True)
        start = i
    svg.text(746, 30, "shaded: the gap, work still to do", anchor="end", css="soft", size=12)
    svg.text(56, 30, "6 usable blocks of 4 tokens, budget 8, A runs beside it", css="soft", size=12)
    return svg.render()


def batch_timeline() -> str:
    """Tokens per request and step of two requests under a budget of 8."""
    prompts = ["hello world", "goodbye"]
    ids, steps = traced(prompts, [4, 4], max_num_batched_tokens=8)
    svg = Svg(
        780,
        240,
        "Two requests share six steps under a budget of 8 tokens",
        "Request A, 11 prompt tokens, gets 8, 3, 1, 1, 1 tokens; request B, 7 prompt tokens, gets "
        "nothing in step 1, then 5, 2, 1, 1, 1. The steps compute 8, 8, 3, 2, 2 and 1 tokens.",
    )
    left, width, height = 130, 100, 52
    for column, record in enumerate(steps):
        x = left + column * width
        svg.text(x + width / 2, 28, f"step {column + 1}", anchor="middle", css="soft", size=12)
        for row, name in enumerate(ids):
            y = 42 + row * (height + 8)
            count = record.num_scheduled_tokens.get(name, 0)
            svg.rect(x + 2, y, width - 4, height, css="paper", radius=5)
            if not count:
                gone = any(name in earlier.finished for earlier in steps[:column])
                words = "gone" if gone else "waits"
                svg.text(x + width / 2, y + 31, words, anchor="middle", css="soft", size=12)
                continue
            prompt = max(0, min(count, len(prompts[row]) - record.num_computed_tokens[name]))
            svg.rect(
                x + 2, y, (width - 4) * count / 8, height, fill=(BLUE, ORANGE)[row],
                opacity=0.8 if prompt else 0.4, radius=5, tip=f"{count} token(s)",
            )  # fmt: skip
            words = f"{count} prompt" if prompt else "1 decode"
            svg.text(x + width / 2, y + 31, words, anchor="middle", size=12, bold=True)
        total = sum(record.num_scheduled_tokens.values())
        svg.text(x + width / 2, 184, str(total), anchor="middle", bold=True)
    for row, words in enumerate(("A, 11 + 4", "B, 7 + 4")):
        svg.text(left - 12, 42 + row * (height + 8) + 31, words, anchor="end", bold=True)
    svg.text(left - 12, 184, "tokens", anchor="end")
    svg.text(
        left,
        216,
        "strong: prompt tokens, pale: decode, width: share of the budget",
        css="soft",
        size=12,
    )
    return svg.render()


def slots() -> str:
    """Four slots over the steps, static batching above, continuous batching below."""
    outputs = [2, 2, 2, 16, 2, 2, 2, 16]
    ids, steps = traced(["abcde"] * 8, outputs, max_num_seqs=4)
    static: list[list[int | None]] = []
    for first in (0, 4):
        batch = outputs[first : first + 4]
        for step in range(max(batch)):
            static.append([first + i if step < batch[i] else None for i in range(4)])
    continuous: list[list[int | None]] = []
    holders: list[int | None] = [None] * 4
    for record in steps:
        here = [ids.index(name) for name in record.num_scheduled_tokens]
        holders = [who if who in here else None for who in holders]
        for who in here:
            if who not in holders:
                holders[holders.index(None)] = who
        continuous.append(list(holders))
    svg = Svg(
        780,
        360,
        "Eight requests through four slots, static and continuous",
        f"Static batching takes {len(static)} steps, because each batch lasts as long as its "
        f"longest member; continuous batching takes {len(continuous)}, because a freed slot is "
        "filled in the next step.",
    )
    for top, name, grid in ((30, "static", static), (200, "continuous", continuous)):
        used = sum(who is not None for row in grid for who in row)
        total = 4 * len(grid)
        svg.text(20, top + 4, name, bold=True)
        svg.text(
            760,
            top + 4,
            f"{len(grid)} steps, {used} of {total} slot-steps used: {used / total:.0%}",
            anchor="end",
            size=12,
        )
        for step, row in enumerate(grid):
            for slot, holder in enumerate(row):
                x, y = 20 + step * 23, top + 16 + slot * 30
                if holder is None:
                    svg.rect(x, y, 21, 26, css="paper", radius=3)
                    continue
                color = SERIES[holder % 4] if holder % 4 != 3 else (RED if holder == 3 else PURPLE)
                svg.rect(
                    x, y, 21, 26, fill=color, opacity=0.55, radius=3, tip=f"request {holder + 1}"
                )
                svg.text(x + 10.5, y + 17, str(holder + 1), anchor="middle", size=11)
    svg.text(20, 350, "one column is one step; the number is the request", css="soft", size=12)
    return svg.render()


# ------------------------------------------------------------------ a simulation


def lanes(depth: int, plan: float, run: float, book: float, steps: int) -> list[tuple]:
    """Bars (lane, step, start, end) of an engine that keeps up to `depth` steps in flight."""
    bars: list[tuple] = []
    clock = gpu_free = 0.0
    flying: list[tuple[int, float]] = []
    planned = done = 0
    while done < steps:
        if planned < steps and len(flying) < depth:
            planned += 1
            bars.append(("plan", planned, clock, clock + plan))
            clock += plan
            start = max(clock, gpu_free)
            gpu_free = start + run
            bars.append(("run", planned, start, gpu_free))
            flying.append((planned, gpu_free))
            if len(flying) < depth and planned < steps:
                continue
        step, ready = flying.pop(0)
        clock = max(clock, ready)
        bars.append(("update", step, clock, clock + book))
        clock += book
        done += 1
    return bars


def overlap() -> str:
    """One step in flight and two, on a time axis."""
    plan, run, book, steps = 2.0, 6.0, 1.0, 4
    svg = Svg(
        780,
        330,
        "The textbook step and the two-deep queue on a time axis",
        "With one step in flight the GPU idles while the CPU updates and plans: a step takes 9 "
        "units. With two in flight the next step is planned while the GPU computes, and a step "
        "takes 6 units.",
    )
    scale = 700 / (steps * (plan + run + book))
    colors = {"plan": BLUE, "run": ORANGE, "update": RED}
    for top, depth, name in (
        (34, 1, "step: one in flight"),
        (184, 2, "step_with_batch_queue: two in flight"),
    ):
        bars = lanes(depth, plan, run, book, steps)
        svg.text(60, top, name, bold=True)
        for lane, y in (("CPU", top + 14), ("GPU", top + 56)):
            svg.text(50, y + 21, lane, anchor="end", size=12, css="soft")
            svg.rect(60, y, 700, 34, css="paper", radius=4)
        for kind, step, start, end in bars:
            y = top + (56 if kind == "run" else 14)
            svg.rect(
                60 + start * scale + 0.5, y, (end - start) * scale - 1, 34, fill=colors[kind],
                opacity=0.55, radius=3, tip=f"{kind} {step}: {start:g} to {end:g}",
            )  # fmt: skip
            words = f"run {step}" if kind == "run" else str(step)
            svg.text(
                60 + (start + end) / 2 * scale, y + 22, words, anchor="middle", size=11.5, bold=True
            )
        last = max(bar[3] for bar in bars)
        svg.text(60, top + 112, f"{steps} steps in {last:g} units", size=12)
    svg.text(
        760,
        322,
        "durations chosen: plan 2 (blue), run 6, update 1 (red)",
        anchor="end",
        css="soft",
        size=12,
    )
    return svg.render()


FIGURES = {
    "request-path.svg": request_path,
    "processes.svg": processes,
    "states.svg": states,
    "racing.svg": racing,
    "batch-timeline.svg": batch_timeline,
    "slots.svg": slots,
    "overlap.svg": overlap,
}

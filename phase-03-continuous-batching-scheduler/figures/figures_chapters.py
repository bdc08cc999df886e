"""Figures of the chapters of phase 03.

What shows engine behaviour is drawn from a run of `mini_vllm` made here, most of it through
`course.site.gantt`. Diagrams of upstream's structure (`queues`, `seam`, `victims`) are drawn by
hand. No upstream counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from course.site import gantt
from course.site.gantt import Arrival
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SERIES, Svg
from course.truth.plots import Axes
from mini_vllm import EngineParts, LLMEngine, Scheduler, SchedulerOutput
from mini_vllm.config import SamplingParams
from mini_vllm.observe.trace import StepRecord, traced_steps


def exactly(num_tokens: int) -> SamplingParams:
    """Greedy, `num_tokens` outputs, EOS ignored."""
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


# ------------------------------------------------------------------ 1, 2: one run


def engine_timeline() -> str:
    """The run that the book's widget steps through."""
    return gantt.draw(gantt.engine_timeline())


def gap() -> str:
    """Both counters of request E of the same run."""
    data = gantt.engine_timeline()
    request = next(row for row in data["requests"] if row["id"] == "E")
    known, computed = [], []
    for cell in request["cells"]:
        now = 0 if cell["kind"] in ("waiting", "preempted") else cell["computed"] + cell["tokens"]
        computed.append((cell["step"], now))
        known.append((cell["step"], cell["known"] + cell["sampled"]))
    title = "One request, two counters: E of the run above"
    words = (
        "num_tokens stays at 54 while E waits and prefills, rises to 55 with the first output, "
        "stays there while E is preempted, then rises by one per step to 68. num_computed_tokens "
        "is 0 while E waits, climbs to 24, 48 and 54, falls to 0, jumps to 55, and stays one "
        "behind."
    )
    svg = Svg(780, 372, title, words)
    svg.text(12, 22, title, bold=True)
    first, last = known[0][0], known[-1][0]
    axes = Axes(svg, (60, 58, 690, 250), (first - 0.5, last + 0.5), (0, 76))
    axes.frame(
        "step",
        "tokens, after the step",
        range(first, last + 1),
        (0, 24, 48, 54, 68),
    )
    for line, color in ((known, ORANGE), (computed, BLUE)):
        stairs = []
        for step, value in line:
            stairs += [(step - 0.5, value), (step + 0.5, value)]
        axes.curve(stairs, color, width=2.5)
    axes.label(first - 0.4, known[0][1], "num_tokens", ORANGE, dx=0, dy=-8)
    axes.label(first - 0.4, 0, "num_computed_tokens", BLUE, dx=0, dy=-8)
    notes = (
        (9.2, 13, "waits: no slot", "middle"),
        (9.2, 38, "chunks of 24, 24, 6", "middle"),
        (16, 66, "preempted", "middle"),
        (18.6, 30, "back: 40 from the cache,", "start"),
        (18.6, 22, "15 computed, a gap like any other", "start"),
        (24.5, 50, "decode: the gap is 1", "middle"),
    )
    for step, value, note, anchor in notes:
        axes.label(step, value, note, dx=0, anchor=anchor)
    return svg.render()


# ------------------------------------------------------------------ 3: static and continuous


class StaticBatches(Scheduler):
    """Admits only when nobody runs: a batch lasts until its last member ends. Not upstream's."""

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        if not output.scheduled_requests:
            super()._schedule_waiting(output, budget)


JOBS = (4, 13, 44, 15, 9, 30, 6, 21)


def run_jobs(scheduler: type[Scheduler]) -> list[StepRecord]:
    """Eight jobs of `JOBS` outputs on three slots."""
    engine = LLMEngine(model="toy", max_num_seqs=3, parts=EngineParts(scheduler=scheduler))
    for number, length in enumerate(JOBS):
        engine.add_request("abcde", exactly(length), request_id=str(number))
    return list(traced_steps(engine))


def static_continuous() -> str:
    """Who holds which slot in which step, under both rules."""
    title = "The same eight jobs on three slots"
    runs = {"static": run_jobs(StaticBatches), "continuous": run_jobs(Scheduler)}
    words = []
    svg = Svg(780, 304, title)
    svg.text(12, 22, title, bold=True)
    left, width = 64, 780 - 64 - 14
    longest = max(len(steps) for steps in runs.values())
    for panel, (name, steps) in enumerate(runs.items()):
        top = 52 + panel * 122
        used = sum(len(step.num_scheduled_tokens) for step in steps)
        share = used / (3 * len(steps))
        said = f"{name}: {len(steps)} steps, {share:.1%} of the slots in use"
        words.append(said)
        svg.text(left, top - 8, said, size=12, css="soft")
        slots: list[str | None] = [None] * 3
        start: dict[str, int] = {}
        for slot in range(3):
            svg.text(
                left - 8, top + slot * 30 + 18, f"slot {slot}", size=11, anchor="end", css="soft"
            )
            svg.rect(left, top + slot * 30 + 2, len(steps) / longest * width, 24, css="paper")
        for step in steps:
            for job in step.new:
                slots[slots.index(None)] = job
                start[job] = step.step
            for job in step.finished:
                slot = slots.index(job)
                x = left + start[job] / longest * width
                wide = (step.step + 1 - start[job]) / longest * width
                color = SERIES[int(job) % 5]
                tip = f"job {job}, {JOBS[int(job)]} tokens: steps {start[job]} to {step.step}"
                svg.rect(
                    x + 0.5,
                    top + slot * 30 + 2,
                    wide - 1,
                    24,
                    fill=color,
                    opacity=0.6,
                    radius=3,
                    tip=tip,
                )
                svg.text(
                    x + wide / 2,
                    top + slot * 30 + 18,
                    str(JOBS[int(job)]),
                    size=11,
                    anchor="middle",
                )
                slots[slot] = None
    for tick in range(0, longest + 1, 10):
        x = left + tick / longest * width
        svg.text(x, 276, str(tick), size=11, anchor="middle", css="soft")
    svg.text(
        left + width / 2,
        296,
        "step; the number in a bar is the job's length in tokens",
        size=12,
        anchor="middle",
    )
    svg.description = ". ".join(words) + ". Grey is a slot that computes nothing."
    return svg.render()


# ------------------------------------------------------------------ 5: chunks


FIXED_MS, TOKEN_MS = 5.0, 0.03
"""Chosen cost of a step in the figures: reading the weights, and each token."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One setting of the chunk figure: its words, and what each step cost."""

    words: str
    steps: list[StepRecord]

    def milliseconds(self) -> list[float]:
        """Duration of each step under the chosen cost."""
        return [FIXED_MS + TOKEN_MS * sum(s.num_scheduled_tokens.values()) for s in self.steps]


def run_long(budget: int, threshold: int) -> list[StepRecord]:
    """Two decoding streams; a prompt of 8,000 tokens arrives after their first token."""
    engine = LLMEngine(
        model="toy",
        num_blocks=1024,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
    )
    for name in "AB":
        engine.add_request([ord(name)] * 20, exactly(30), request_id=name)
    steps = traced_steps(engine)
    next(steps)
    engine.add_request([7] * 8000, exactly(4), request_id="L")
    return list(steps)


def chunk_time() -> str:
    """Steps on a time axis: chunks trade one long stall for many short ones."""
    lanes = [
        Lane("budget 16,384", run_long(16_384, 0)),
        Lane("budget 2,048", run_long(2_048, 0)),
        Lane("threshold 512", run_long(2_048, 512)),
    ]
    title = "A prompt of 8,000 tokens joins two streams"
    svg = Svg(780, 330, title)
    svg.text(12, 22, title, bold=True)
    svg.text(
        12,
        40,
        f"time of a step: {FIXED_MS:g} ms + {TOKEN_MS:g} ms per token (chosen)",
        size=11,
        css="soft",
    )
    left, width, end = 112, 780 - 112 - 30, 350.0
    said = []
    for row, lane in enumerate(lanes):
        top, now = 66 + row * 74, 0.0
        gaps, first = [], None
        svg.text(left - 10, top + 20, lane.words, size=12, anchor="end")
        for record, duration in zip(lane.steps, lane.milliseconds(), strict=True):
            if now + duration > end:
                break
            tokens = record.num_scheduled_tokens
            x, wide = left + now / end * width, duration / end * width
            color = BLUE if tokens.get("L", 0) > 1 else GREEN
            tip = f"step {record.step}: {tokens}, {duration:.1f} ms"
            svg.rect(
                x + 0.4, top, max(wide - 0.8, 0.6), 26, fill=color, opacity=0.6, radius=2, tip=tip
            )
            now += duration
            gaps.append(duration)
            mark = left + now / end * width
            svg.line(mark, top + 28, mark, top + 36, stroke=GREEN, width=1.5)
            if first is None and "L" in record.sampled:
                first = now
                svg.line(mark, top - 5, mark, top + 36, stroke=ORANGE, width=2)
        worst = max(gaps)
        text = f"longest gap of A and B {worst:.0f} ms, first token of L after {first:.0f} ms"
        svg.text(left, top + 52, text, size=11, css="soft")
        said.append(f"{lane.words}: {text}")
    for ms in range(0, int(end) + 1, 50):
        svg.text(left + ms / end * width, 292, f"{ms} ms", size=11, anchor="middle", css="soft")
    x = float(left)
    for color, words in (
        (BLUE, "step with a chunk of L"),
        (GREEN, "step without; tick: A and B get a token"),
        (ORANGE, "L's first token"),
    ):
        svg.rect(x, 306, 14, 11, fill=color, opacity=0.7, radius=2)
        svg.text(x + 19, 316, words, size=11, css="soft")
        x += 36 + 6.1 * len(words)
    svg.description = ". ".join(said) + "."
    return svg.render()


def doc_chat() -> str:
    """A chat that arrives one step after a long document, with and without a threshold."""
    charts = []
    for threshold in (0, 1848):
        engine = LLMEngine(
            model="toy",
            num_blocks=2048,
            max_num_batched_tokens=2048,
            long_prefill_token_threshold=threshold,
        )
        arrivals = [
            Arrival("doc", (1,) * 16_000, 5),
            Arrival("chat", (2,) * 200, 6, step=1),
        ]
        words = "off" if threshold == 0 else f"{threshold:,}"
        data = gantt.record(engine, arrivals, f"Budget 2,048, long_prefill_token_threshold {words}")
        charts.append((data, gantt.draw(data, totals=("scheduled", "waiting"))))
    said = " ".join(f"{data['title']}: {gantt.describe(data)}" for data, _ in charts)
    return stacked(
        "A chat behind a document of 16,000 tokens", said, [chart for _, chart in charts]
    )


def stacked(title: str, description: str, charts: Sequence[str]) -> str:
    """Several documents one above the other."""
    top, parts = 0.0, []
    for chart in charts:
        height = float(chart.split('height="', 1)[1].split('"', 1)[0])
        parts.append(chart.replace("<svg ", f'<svg x="0" y="{top:g}" ', 1))
        top += height
    svg = Svg(780, top, title, description)
    for part in parts:
        svg.raw(part.rstrip("\n"))
    return svg.render()


# ------------------------------------------------------------------ 7: preemption


def three_requests(lengths: Mapping[str, int]) -> dict[str, Any]:
    """A, B and C in 12 usable blocks of 4 tokens, caching off, 8 outputs each."""
    engine = LLMEngine(num_blocks=13, block_size=4, model="toy", enable_prefix_caching=False)
    arrivals = [Arrival(name, name * length, 8) for name, length in lengths.items()]
    title = "A, B, C: 16 prompt tokens, 8 outputs each; 12 usable blocks of 4"
    return gantt.record(engine, arrivals, title)


def preempt_timeline() -> str:
    """The whole run in which A's block costs C its place."""
    return gantt.draw(three_requests({"A": 16, "B": 16, "C": 16}))


def preempt_cases() -> str:
    """Who asks and who is evicted: somebody else, and the requester itself."""
    title = "The victim is the last of running, whoever asks"
    cases = (
        ("A asks, C is the victim", {"A": 16, "B": 16, "C": 16}, "A"),
        ("C asks, and is the victim itself", {"A": 13, "B": 14, "C": 16}, "C"),
    )
    colors = {"A": BLUE, "B": ORANGE, "C": PURPLE}
    svg = Svg(780, 296, title)
    svg.text(12, 22, title, bold=True)
    said = []
    for column, (words, lengths, asker) in enumerate(cases):
        data = three_requests(lengths)
        left = 16 + column * 388
        svg.text(left, 52, words, size=13, bold=True)
        said.append(f"{words}.")
        for row, step in enumerate((0, 1)):
            top = 74 + row * 122
            owners: dict[int, str] = {}
            running: list[str] = []
            waiting: list[str] = []
            for request in data["requests"]:
                cell = request["cells"][step]
                for block in cell["blocks"]:
                    owners[block] = request["id"]
                (waiting if cell["kind"] in ("waiting", "preempted") else running).append(
                    request["id"]
                )
            when = "after step 0" if step == 0 else "after schedule() of step 1"
            svg.text(left, top, when, size=11, css="soft")
            for block in range(1, 13):
                owner = owners.get(block)
                x = left + (block - 1) * 29
                if owner:
                    svg.rect(
                        x,
                        top + 8,
                        26,
                        26,
                        fill=colors[owner],
                        opacity=0.6,
                        radius=3,
                        tip=f"block {block}: {owner}",
                    )
                    svg.text(x + 13, top + 26, owner, size=12, anchor="middle")
                else:
                    svg.rect(x, top + 8, 26, 26, css="paper", radius=3, tip=f"block {block}: free")
            lists = f"running [{', '.join(running)}], waiting [{', '.join(waiting)}], "
            lists += f"free {12 - len(owners)}"
            svg.text(left, top + 52, lists, size=12)
            said.append(f"{when}: {lists}.")
        svg.text(left, 162, f"step 1: {asker} needs a block, none is free", size=12, fill=RED)
    svg.line(390, 44, 390, 258, css="grid-line")
    svg.text(
        12,
        288,
        "A square is a block of 4 tokens. A freed block may be taken in the same step.",
        size=11,
        css="soft",
    )
    svg.description = " ".join(said)
    return svg.render()


# ------------------------------------------------------------------ deep dive


def queues() -> str:
    """Where a request of each status stands, upstream."""
    title = "Twelve statuses, three containers"
    svg = Svg(
        780,
        372,
        title,
        "waiting holds WAITING and PREEMPTED. skipped_waiting holds the three WAITING_FOR states "
        "and requests put aside by a limit such as LoRA. running holds RUNNING. Admission leads "
        "from waiting and skipped_waiting to running, preemption back to the front of waiting. Six "
        "finished states are in no queue.",
    )
    svg.text(12, 22, title, bold=True)
    svg.box(16, 46, 226, 92, ["waiting", "WAITING", "PREEMPTED, at the front"], fill=BLUE)
    svg.box(
        16,
        190,
        226,
        128,
        [
            "skipped_waiting",
            "WAITING_FOR_",
            "STRUCTURED_OUTPUT_GRAMMAR",
            "REMOTE_KVS",
            "STREAMING_REQ",
        ],
        fill=PURPLE,
    )
    svg.box(318, 96, 160, 92, ["running", "RUNNING", "in order of admission"], fill=GREEN)
    svg.box(
        548,
        46,
        216,
        190,
        [
            "in no queue, forgotten",
            "FINISHED_STOPPED",
            "FINISHED_LENGTH_CAPPED",
            "FINISHED_ABORTED",
            "FINISHED_IGNORED (never set)",
            "FINISHED_ERROR",
            "FINISHED_REPETITION",
        ],
        fill=GREY,
    )
    svg.line(242, 112, 316, 128, arrow=True)
    svg.text(270, 108, "admit", size=11, anchor="middle", css="soft")
    svg.line(242, 230, 316, 176, arrow=True)
    svg.text(292, 222, "promoted, then", size=11, css="soft")
    svg.text(292, 236, "admitted", size=11, css="soft")
    svg.polyline([(398, 96), (398, 60), (248, 60)], RED, width=1.5, dash="5 4")
    svg.line(256, 60, 244, 60, stroke=RED, width=1.5, arrow=True)
    svg.text(322, 54, "preempt", size=11, anchor="middle", fill=RED)
    svg.line(478, 142, 546, 142, arrow=True)
    svg.text(512, 134, "end", size=11, anchor="middle", css="soft")
    svg.line(130, 138, 130, 188, arrow=True)
    svg.text(138, 168, "head not ready: put aside", size=11, css="soft")
    svg.text(
        16,
        346,
        "Under FCFS the loop looks at skipped_waiting first, then at waiting. An abort leads from",
        size=11,
        css="soft",
    )
    svg.text(
        16,
        361,
        "everywhere to FINISHED_ABORTED. The order is logic: what is above PREEMPTED has finished.",
        size=11,
        css="soft",
    )
    return svg.render()


def seam() -> str:
    """The one interface between policy and memory."""
    title = "Policy above, memory below, one call between them"
    svg = Svg(
        780,
        330,
        title,
        "The scheduler asks allocate_slots. Blocks come back: commit. None comes back: in the "
        "running phase a victim is preempted through free and the call is repeated; in the waiting "
        "phase admission ends. The KV cache manager knows blocks and hashes and nothing of queues.",
    )
    svg.text(12, 22, title, bold=True)
    svg.box(40, 44, 300, 74, ["running phase", "cursor, budget, victims"], fill=GREEN)
    svg.box(440, 44, 300, 74, ["waiting phase", "queue order, slots, budget"], fill=BLUE)
    svg.box(
        40,
        226,
        700,
        62,
        ["KVCacheManager", "tables, free queue, index; knows no queue and no policy"],
        fill=PURPLE,
    )
    svg.line(90, 118, 90, 224, arrow=True)
    svg.text(98, 152, "allocate_slots(r, n)", size=12, css="ink mono")
    svg.line(58, 226, 58, 120, arrow=True, stroke=GREEN)
    svg.text(52, 206, "blocks", size=11, anchor="end", fill=GREEN)
    svg.line(262, 226, 262, 120, arrow=True, stroke=RED)
    svg.text(270, 206, "None", size=11, fill=RED)
    svg.line(318, 118, 318, 224, arrow=True, stroke=RED)
    svg.text(326, 152, "free(victim),", size=12, css="ink mono")
    svg.text(326, 168, "then ask again", size=11, css="soft")
    svg.line(490, 118, 490, 224, arrow=True)
    svg.text(498, 146, "get_computed_blocks(r)", size=12, css="ink mono")
    svg.text(498, 163, "allocate_slots(r, n, hits)", size=12, css="ink mono")
    svg.line(458, 226, 458, 120, arrow=True, stroke=GREEN)
    svg.text(452, 206, "blocks", size=11, anchor="end", fill=GREEN)
    svg.line(690, 226, 690, 120, arrow=True, stroke=RED)
    svg.text(682, 206, "None: admit nobody more", size=11, anchor="end", fill=RED)
    svg.text(
        40,
        314,
        "None is an answer and not an error: the call has changed nothing, so it may be repeated.",
        size=11,
        css="soft",
    )
    return svg.render()


def victims() -> str:
    """Where a victim stands relative to the cursor, under each policy."""
    title = "Where the victim stands decides what must be undone"
    svg = Svg(
        780,
        292,
        title,
        "Under FCFS the victim is the last of running, behind the cursor or at it: it has no entry "
        "in the plan. Under priority the victim may stand before the cursor: its entry is taken "
        "out of the plan, its tokens are refunded and the cursor moves back by one.",
    )
    svg.text(12, 22, title, bold=True)

    def row(
        top: float, names: Sequence[str], cursor: int, victim: int, plan: Mapping[int, str]
    ) -> None:
        for place, name in enumerate(names):
            x = 120 + place * 96
            color = (
                RED
                if place == victim
                else ORANGE
                if place == cursor
                else GREEN
                if place in plan
                else GREY
            )
            svg.rect(x, top, 84, 38, fill=color, opacity=0.2, stroke=color, radius=5)
            svg.text(
                x + 42, top + 17, name, size=12, anchor="middle", bold=place in (cursor, victim)
            )
            svg.text(
                x + 42,
                top + 31,
                plan.get(place, "no plan yet"),
                size=10,
                anchor="middle",
                css="soft",
            )
        x = 120 + cursor * 96 + 42
        svg.line(x, top + 62, x, top + 41, arrow=True)
        svg.text(x, top + 76, "cursor: needs a block", size=11, anchor="middle", css="soft")

    svg.text(12, 70, "FCFS", bold=True)
    row(50, ["r0", "r1", "r2", "r3", "r4"], 2, 4, {0: "1 token", 1: "1 token"})
    svg.text(612, 66, "victim: the last.", size=12, fill=RED)
    svg.text(612, 83, "Nothing to undo.", size=12)
    svg.text(12, 186, "priority", bold=True)
    row(166, ["r0", "r1: worst", "r2", "r3", "r4"], 2, 1, {0: "1 token", 1: "8 tokens"})
    svg.text(612, 176, "victim: the largest", size=12, fill=RED)
    svg.text(612, 192, "(priority, arrival).", size=12, fill=RED)
    svg.text(612, 210, "Take out its entry,", size=12)
    svg.text(612, 226, "refund 8 tokens,", size=12)
    svg.text(612, 242, "cursor 2 becomes 1.", size=12)
    svg.text(
        12,
        278,
        "Its blocks are freed with hashes of content that this step was to compute, and will not.",
        size=11,
        css="soft",
    )
    return svg.render()


def priority_stall() -> str:
    """An urgent request gets nothing in step 8, because a less urgent one evicted itself."""
    engine = LLMEngine(
        num_blocks=10, block_size=4, model="toy", enable_prefix_caching=False, policy="priority"
    )
    arrivals = [
        Arrival("X", "x" * 4, 12, priority=0),
        Arrival("A", "a" * 5, 10, priority=5),
        Arrival("U", "u" * 4, 8, step=1, priority=0),
    ]
    title = "Policy priority: X and U have priority 0, A has 5; 9 usable blocks of 4"
    return gantt.draw(gantt.record(engine, arrivals, title))


def batch_size() -> str:
    """Exercise 12: throughput and step time over batch size, under the chosen cost."""
    title = "Past saturation you buy throughput with latency"
    sizes = [1, *range(8, 1025, 8)]
    svg = Svg(
        780,
        330,
        title,
        "Tokens per second over batch size bend towards 20,000; the time of a step rises in a "
        "straight line from 10 ms to 61 ms. 25 ms are reached at 300 requests with 12,000 tokens "
        "per second.",
    )
    svg.text(12, 22, title, bold=True)
    plots = (
        (
            "tokens per second",
            {value: f"{value:,.0f}" for value in (0.0, 5e3, 10e3, 15e3, 20e3)},
            20_000.0,
            [(b, b / (10 + 0.05 * b) * 1000) for b in sizes],
            BLUE,
        ),
        (
            "milliseconds per step: ITL",
            {value: f"{value:.0f}" for value in (0.0, 25.0, 50.0, 75.0)},
            75.0,
            [(b, 10 + 0.05 * b) for b in sizes],
            ORANGE,
        ),
    )
    for column, (name, ticks, high, points, color) in enumerate(plots):
        axes = Axes(svg, (66 + column * 382, 62, 310, 210), (0, 1024), (0, high))
        axes.frame("requests in the batch", name, (0, 256, 512, 1024), ticks)
        axes.curve(points, color, width=2.5)
        at = 12_000.0 if column == 0 else 25.0
        axes.curve([(300, 0), (300, at), (0, at)], GREY, dash="4 4", width=1)
        axes.dots([(300, at)], color)
        words = "300 requests: 12,000 tokens/s" if column == 0 else "25 ms at 300 requests"
        axes.label(300, at, words, dx=10, dy=16)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "engine-timeline.svg": engine_timeline,
    "gap.svg": gap,
    "static-continuous.svg": static_continuous,
    "chunk-time.svg": chunk_time,
    "doc-chat.svg": doc_chat,
    "preempt-timeline.svg": preempt_timeline,
    "preempt-cases.svg": preempt_cases,
    "queues.svg": queues,
    "seam.svg": seam,
    "victims.svg": victims,
    "priority-stall.svg": priority_stall,
    "batch-size.svg": batch_size,
}

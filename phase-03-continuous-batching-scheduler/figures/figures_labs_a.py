"""Figures of labs 03-01, 03-04, 03-06 and of the priority hazard.

What shows engine behaviour is drawn from runs of mini_vllm. No upstream counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance import hazard, replay
from course.files import load_module
from course.site import gantt
from course.site.gantt import Arrival
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from course.truth.plots import Axes
from mini_vllm import EngineParts, LLMEngine, Scheduler, SchedulerOutput
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.request import Request

policies = load_module(Path(__file__).resolve().parents[1] / "experiments" / "policies.py")

# ------------------------------------------------------------------ lab 03-01


def two_phases() -> str:
    """One step: running requests, then waiting ones, and where each limit is enforced."""
    svg = Svg(
        780,
        330,
        "One step of the scheduler: two phases, three limits",
        "The token budget flows first through the running requests, in order, then to the front of "
        "the waiting queue. Memory may refuse in both phases: a running request then preempts the "
        "last one, a waiting one stops the admissions. Slots are checked at admission only.",
    )
    svg.rect(16, 34, 330, 112, fill=BLUE, opacity=0.18, stroke=BLUE, radius=6)
    svg.text(181, 60, "RUNNING, in order", anchor="middle", bold=True)
    svg.text(
        181, 84, "n = min(lacking, threshold, budget)", anchor="middle", css="ink mono", size=12
    )
    svg.text(181, 106, "0: pass over, look at the next", anchor="middle", size=12, css="soft")
    svg.text(181, 128, "else allocate, commit, budget -= n", anchor="middle", size=12, css="soft")
    svg.rect(434, 34, 330, 112, fill=GREEN, opacity=0.18, stroke=GREEN, radius=6)
    svg.text(599, 60, "WAITING, the front only", anchor="middle", bold=True)
    svg.text(
        599, 84, "n = min(lacking, threshold, budget)", anchor="middle", css="ink mono", size=12
    )
    svg.text(
        599, 106, "allocate, move to the end of running,", anchor="middle", size=12, css="soft"
    )
    svg.text(599, 128, "commit, budget -= n", anchor="middle", size=12, css="soft")
    svg.line(350, 90, 430, 90, width=2, arrow=True)
    svg.text(390, 80, "budget left", anchor="middle", size=11)
    svg.text(390, 108, "nobody", anchor="middle", size=11, css="soft")
    svg.text(390, 122, "preempted", anchor="middle", size=11, css="soft")

    svg.text(16, 186, "memory", bold=True, size=12)
    running = ["refused: evict the last, ask again", "itself the victim: the phase ends"]
    svg.box(90, 166, 256, 56, running, fill=RED, size=12)
    waiting = ["refused: stop", "the front stays, nobody behind it is tried"]
    svg.box(434, 166, 330, 56, waiting, fill=ORANGE, size=12)
    svg.text(16, 250, "budget", bold=True, size=12)
    svg.box(90, 232, 674, 34, ["0 left: the step is full, for both phases"], fill=GREY, size=12)
    svg.text(16, 294, "slots", bold=True, size=12)
    svg.box(434, 276, 330, 34, ["len(running) = max_num_seqs: stop"], fill=GREY, size=12)
    svg.text(218, 297, "not checked: who runs has a slot", anchor="middle", size=12, css="soft")
    svg.line(181, 148, 181, 163, arrow=True)
    svg.line(599, 148, 599, 163, arrow=True)
    return svg.render()


def three_prompts() -> str:
    """The worked example of lab 03-01."""
    engine = LLMEngine(
        model="toy", block_size=4, max_num_batched_tokens=10, enable_prefix_caching=False
    )
    arrivals = [Arrival(name, name * 8, 2) for name in "abc"]
    return gantt.draw(gantt.record(engine, arrivals, "Three prompts of 8 tokens, budget 10"))


# ------------------------------------------------------------------ lab 03-04


def eviction() -> str:
    """The worked example of lab 03-04: two prompts in four blocks."""
    engine = LLMEngine(model="toy", num_blocks=5, block_size=4, enable_prefix_caching=False)
    arrivals = [Arrival("a", "aaaabbbb", 8), Arrival("b", "ccccdddd", 8)]
    title = "Two prompts of 8 tokens, 8 outputs each, in 4 usable blocks of 4"
    return gantt.draw(gantt.record(engine, arrivals, title))


def pool_sweep() -> str:
    """Steps and wasted tokens over the size of the pool, for three ways to live with little."""
    prompts = [letter * 8 for letter in "abcd"]
    sizes = range(8, 35)
    ways = {
        "newest first, as vLLM": (EngineParts(), BLUE, None),
        "oldest first": (EngineParts(scheduler=policies.OldestFirst), ORANGE, "5 3"),
        "reserve up front": (EngineParts(kv_cache_manager=policies.ReservingKV), PURPLE, "2 3"),
    }
    curves: dict[str, list[tuple[int, int, int]]] = {}
    for name, (parts, _, _) in ways.items():
        for num_blocks in sizes:
            engine = LLMEngine(
                num_blocks=num_blocks,
                block_size=4,
                model="toy",
                enable_prefix_caching=False,
                parts=parts,
            )
            arrivals = [Arrival(prompt[0], prompt, 20) for prompt in prompts]
            data = gantt.record(engine, arrivals)
            scheduled = sum(total["scheduled"] for total in data["totals"])
            point = (num_blocks, data["steps"], scheduled - 4 * (8 + 20 - 1))
            curves.setdefault(name, []).append(point)
    svg = Svg(
        780,
        330,
        "Steps and wasted tokens over the size of the pool",
        "Four prompts of 8 tokens with 20 outputs each. "
        + " ".join(
            f"{name}: {line[0][1]} steps at 8 blocks, {line[8][1]} at 16, {line[-1][1]} at 34; "
            f"wasted tokens {line[0][2]}, at most {max(point[2] for point in line)}, "
            f"{line[-1][2]}."
            for name, line in curves.items()
        ),
    )
    ticks = (8, 12, 16, 22, 29, 34)
    for left, column, label, top, marks in (
        (50, 1, "steps until all are done", 90, (0, 20, 40, 60, 80)),
        (440, 2, "tokens computed again", 90, (0, 20, 40, 60, 80)),
    ):
        axes = Axes(svg, (left, 48, 310, 190), (8, 34), (0, top))
        axes.frame("blocks in the pool", label, ticks, marks)
        for name, (_, color, dash) in ways.items():
            points = [(p[0], p[column]) for p in curves[name]]
            axes.curve(points, color, dash=dash, width=2.5, name=name)
        if column == 1:
            axes.legend(50, 296, columns=3)
    return svg.render()


# ------------------------------------------------------------------ lab 03-06

EIGHT = ["S" * 64 + digit for digit in "01234567"]
"""Eight prompts of 65 tokens with 64 in common: the workload of lab 03-06."""


def shared_prefix(threshold: int) -> str:
    """The eight prompts, all at once, with or without chunks."""
    engine = LLMEngine(model="toy", block_size=4, long_prefill_token_threshold=threshold)
    arrivals = [Arrival(f"r{digit}", prompt, 4) for digit, prompt in enumerate(EIGHT)]
    data = gantt.record(engine, arrivals)
    total = sum(step["scheduled"] for step in data["totals"])
    how = f"threshold {threshold}" if threshold else "no threshold"
    data["title"] = f"Eight prompts of 65 tokens, 64 in common, {how}: {total} tokens"
    return gantt.draw(data, totals=("scheduled", "hits"))


class HeadFirst(KVCacheManager):
    """Frees a table from its head, so that a prefix is evicted before what extends it."""

    def free(self, request: Request) -> None:
        table = self.req_to_blocks.pop(request.request_id, None)
        self._num_cached.pop(request.request_id, None)
        if table:
            self.block_pool.free_blocks(table)


def followers_cost(num_blocks: int, parts: EngineParts, strangers: bool) -> int:
    """Tokens the eight compute one after the other, with a stranger of 32 between two of them."""
    engine = LLMEngine(num_blocks=num_blocks, block_size=4, model="toy", parts=parts)
    total = 0
    for number, prompt in enumerate(EIGHT):
        data = gantt.record(engine, [Arrival(f"r{number}", prompt, 4)])
        total += sum(step["scheduled"] for step in data["totals"])
        if strangers:
            gantt.record(engine, [Arrival(f"x{number}", chr(97 + number) * 32, 4)])
    return total


def eviction_cliff() -> str:
    """Tokens of the eight over the pool's size, alone and with strangers in between."""
    svg = Svg(
        780,
        330,
        "The cost of eight followers over the size of the pool",
        "One request after the other. Alone they cost 96 tokens from the smallest pool on. With a "
        "stranger of 32 tokens after each, the cost falls block by block from 320 at 18 blocks to "
        "96 at 26. If tables were freed head first it would stay at 544 up to 26 blocks.",
    )
    sizes = range(18, 33)
    ways = (
        ("alone", EngineParts(), False, GREEN, "2 3"),
        ("with strangers, tail freed first (as vLLM)", EngineParts(), True, BLUE, None),
        ("with strangers, head freed first", EngineParts(kv_cache_manager=HeadFirst), True, RED,
         "5 3"),
    )  # fmt: skip
    axes = Axes(svg, (60, 40, 690, 190), (18, 32), (0, 600))
    axes.frame(
        "blocks in the pool",
        "tokens computed for the eight",
        [n for n in sizes if n % 2 == 0],
        (0, 96, 200, 320, 400, 544),
    )
    for name, parts, strangers, color, dash in ways:
        points = [(n, followers_cost(n, parts, strangers)) for n in sizes]
        axes.curve(points, color, dash=dash, width=2.5, name=name)
    axes.legend(60, 296, columns=3)
    return svg.render()


# ------------------------------------------------------------------ the priority hazard


def hazard_steps(fixed: bool) -> list[dict[str, Any]]:
    """The recorded workload on the mini engine: per step, plan, tables and the state of blocks.

    `indexed` holds the blocks with a hash after `schedule()`, `written` those of which a slot was
    written in this step or before.
    """
    indexed: list[set[int]] = []

    class Watched(Scheduler):
        def schedule(self) -> SchedulerOutput:
            plan = super().schedule()
            blocks = self.kv.block_pool.blocks
            indexed.append({block.block_id for block in blocks if block.block_hash is not None})
            return plan

    def build(config: Any) -> Scheduler:
        return replay.mini_scheduler({**config, "forget_withdrawn_blocks": fixed}, Watched)

    steps: list[dict[str, Any]] = []
    written: set[int] = set()
    for number, step in enumerate(replay.run(hazard.WORKLOAD, build)["steps"]):
        for name, count in step["num_scheduled_tokens"].items():
            end, table = step["num_computed_tokens"][name], step["block_ids"][name]
            written |= {table[position // 4] for position in range(end - count, end)}
        steps.append({**step, "indexed": indexed[number], "written": set(written)})
    return steps


def hazard_blocks() -> str:
    """Seven blocks over the steps of the hazard, and step 3 again with the fix."""
    svg = Svg(
        780,
        412,
        "Which block holds what while the hazard happens",
        "In step 2 low is withdrawn; its blocks 6 and 7 were indexed for a chunk that is never "
        "computed. high takes 7, block 6 stays indexed and unwritten. In step 3 low adopts block 6 "
        "for positions 16 to 19. With the fix block 6 has left the index, and low computes it.",
    )
    rows = [(f"step {n}", step) for n, step in enumerate(hazard_steps(False)[:4])]
    rows.append(("step 3, fixed", hazard_steps(True)[3]))
    left, width, height = 190, 82, 52
    for block in range(1, 8):
        x = left + (block - 0.5) * width
        svg.text(x, 26, f"block {block}", anchor="middle", size=12, css="soft")
    for row, (label, step) in enumerate(rows):
        y = 36 + row * (height + 12) + (14 if label.endswith("fixed") else 0)
        svg.text(12, y + 20, label, bold=True)
        plan = ", ".join(f"{name} {count}" for name, count in step["num_scheduled_tokens"].items())
        svg.text(12, y + 38, plan, size=12, css="soft")
        if step["preempted"]:
            svg.text(94, y + 20, "low withdrawn", size=12, fill=RED)
        for block in range(1, 8):
            x = left + (block - 1) * width
            holders = [
                (name, table.index(block))
                for name, table in step["block_ids"].items()
                if block in table
            ]
            stale = block in step["indexed"] and block not in step["written"]
            color = GREY
            words = ["free", "cached" if block in step["indexed"] else ""]
            if holders:
                (name, place), *_ = holders
                color = BLUE if name == "low" else ORANGE
                words = [name, f"{place * 4} to {place * 4 + 3}"]
            if stale:
                words = [name, "never written"] if holders else ["free, cached", "never written"]
            svg.rect(
                x + 3, y, width - 6, height, fill=color, opacity=0.3 if holders else 0.08,
                stroke=RED if stale else color, radius=5,
            )  # fmt: skip
            if stale:
                svg.rect(x + 5, y + 2, width - 10, height - 4, stroke=RED, radius=4)
            svg.text(x + width / 2, y + 22, words[0], anchor="middle", size=12, bold=bool(holders))
            svg.text(x + width / 2, y + 39, words[1], anchor="middle", size=10.5, css="soft")
    svg.text(12, 398, "blue: low, orange: high; red: in the index, but nobody wrote it", size=12)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-01-two-phases.svg": two_phases,
    "lab-01-three-prompts.svg": three_prompts,
    "lab-04-eviction.svg": eviction,
    "lab-04-pool-sweep.svg": pool_sweep,
    "lab-06-shared-prefix.svg": lambda: shared_prefix(0),
    "lab-06-chunks.svg": lambda: shared_prefix(16),
    "lab-06-eviction-cliff.svg": eviction_cliff,
    "hazard-blocks.svg": hazard_blocks,
}

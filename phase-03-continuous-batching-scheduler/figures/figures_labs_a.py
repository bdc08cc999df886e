"""Figures of labs 03-01, 03-04, 03-06 and of the priority hazard; `make.py` writes them.

What shows engine behaviour is drawn from runs of mini_vllm. No upstream counterpart.
"""

from __future__ import annotations

from collections.abc import Callable

from course import gantt
from course.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Axes, Svg
from course.gantt import Arrival
from mini_vllm.engine import EngineParts, LLMEngine
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.scheduler import Scheduler

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
    engine = LLMEngine(model="toy", block_size=4, max_num_batched_tokens=10, enable_caching=False)
    arrivals = [Arrival(name, name * 8, 2) for name in "abc"]
    return gantt.draw(gantt.record(engine, arrivals, "Three prompts of 8 tokens, budget 10"))


# ------------------------------------------------------------------ lab 03-04


def eviction() -> str:
    """The worked example of lab 03-04: two prompts in four blocks."""
    engine = LLMEngine(model="toy", num_blocks=5, block_size=4, enable_caching=False)
    arrivals = [Arrival("a", "aaaabbbb", 8), Arrival("b", "ccccdddd", 8)]
    title = "Two prompts of 8 tokens, 8 outputs each, in 4 usable blocks of 4"
    return gantt.draw(gantt.record(engine, arrivals, title))


class OldestFirst(Scheduler):
    """Evicts the request that has run longest; the engine's refund takes care of the plan."""

    def _pop_victim(self):
        return self.running.pop(0)


class ReservingKV(KVCacheManager):
    """Admits only what can run to its cap beside all caps admitted before it: never preempts."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reserved: dict[str, int] = {}

    def full_sequence_fits(self, request, new_computed_blocks):
        longest = request.num_prompt_tokens + request.sampling_params.max_tokens - 1
        needed = -(-longest // self.block_size)
        fits = sum(self.reserved.values()) + needed <= len(self.block_pool.blocks) - 1
        if fits:
            self.reserved[request.request_id] = needed
        return fits

    def free(self, request):
        super().free(request)
        self.reserved.pop(request.request_id, None)


def pool_sweep() -> str:
    """Steps and wasted tokens over the size of the pool, for three ways to live with little."""
    prompts = [letter * 8 for letter in "abcd"]
    sizes = range(8, 35)
    ways = {
        "newest first, as vLLM": (EngineParts(), BLUE, None),
        "oldest first": (EngineParts(scheduler=OldestFirst), ORANGE, "5 3"),
        "reserve up front": (EngineParts(kv_cache_manager=ReservingKV), PURPLE, "2 3"),
    }
    curves: dict[str, list[tuple[int, int, int]]] = {}
    for name, (parts, _, _) in ways.items():
        for num_blocks in sizes:
            engine = LLMEngine(num_blocks, 4, model="toy", enable_caching=False, parts=parts)
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
    ticks = {value: str(value) for value in (8, 12, 16, 22, 29, 34)}
    for left, column, label, top, marks in (
        (50, 1, "steps until all are done", 90, (0, 20, 40, 60, 80)),
        (440, 2, "tokens computed again", 90, (0, 20, 40, 60, 80)),
    ):
        axes = Axes(svg, (left, 48, 310, 190), (8, 34), (0, top))
        axes.frame("blocks in the pool", label, ticks, {value: str(value) for value in marks})
        for name, (_, color, dash) in ways.items():
            axes.curve([(p[0], p[column]) for p in curves[name]], color, dash=dash, width=2.5)
    x = 50.0
    for name, (_, color, dash) in ways.items():
        svg.line(x, 304, x + 28, 304, stroke=color, width=2.5, dash=dash)
        svg.text(x + 36, 308, name, size=12)
        x += 36 + 7 * len(name) + 24
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-01-two-phases.svg": two_phases,
    "lab-01-three-prompts.svg": three_prompts,
    "lab-04-eviction.svg": eviction,
    "lab-04-pool-sweep.svg": pool_sweep,
}

"""Figures of labs 03-01, 03-04, 03-06 and of the priority hazard; `make.py` writes them.

What shows engine behaviour is drawn from runs of mini_vllm. No upstream counterpart.
"""

from __future__ import annotations

from collections.abc import Callable

from course import gantt
from course.figures import BLUE, GREEN, GREY, ORANGE, RED, Svg
from course.gantt import Arrival
from mini_vllm.engine import LLMEngine

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


FIGURES: dict[str, Callable[[], str]] = {
    "lab-01-two-phases.svg": two_phases,
    "lab-01-three-prompts.svg": three_prompts,
}

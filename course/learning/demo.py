"""`course demo`: three prompts with a shared prefix, one batch, shown as it happens.

Everything on the screen comes from the engine's own trace. Promises: no network, a few seconds,
readable in a pipe.
"""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from course import terminal
from course.learning.labs import CourseError
from course.learning.tracing import name_of
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.observe.trace import StepRecord, traced_steps

SHARED = (
    "The scheduler decides, at every step, how many tokens of which request run next. "
    "It keeps two queues. "
)
"""The beginning all three prompts have; what the prefix cache can share of it is whole blocks."""

ENDINGS = (
    "The waiting queue holds",
    "The running queue holds",
    "A request is preempted when",
)
SEEDS = (4, 2, 0)
TEMPERATURE = 0.5
MAX_TOKENS = 48
BLOCK_SIZE = 16
BUDGET = 64
"""Token budget of a step: less than the first prompt, so that its prefill comes in chunks."""

PACE = 0.05
"""Seconds a step stays on a terminal at least: the engine is quicker than the eye."""

CELLS = {"prefill": ("#", "blue"), "cached": ("=", "green"), "decode": ("o", "yellow")}


@dataclass(slots=True)
class Timeline:
    """What each request did in each step, and the text it has so far."""

    prompts: dict[str, str]
    cells: dict[str, list[str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    scheduled: int = 0
    cached: int = 0
    steps: int = 0

    def add(self, record: StepRecord, engine: LLMEngine, outputs: dict[str, list[int]]) -> None:
        """Take one step in."""
        for request_id in self.prompts:
            count = record.num_scheduled_tokens.get(request_id, 0)
            hits = record.num_cached_tokens.get(request_id, 0)
            kind = " "
            if count:
                prompt = len(engine.tokenizer.encode(self.prompts[request_id]))
                computed = record.num_computed_tokens[request_id]
                kind = "cached" if hits else "prefill" if computed < prompt else "decode"
            self.cells.setdefault(request_id, []).append(kind)
            if request_id in record.sampled:
                outputs[request_id].append(record.sampled[request_id])
                self.texts[request_id] = engine.tokenizer.decode(outputs[request_id])
            self.scheduled += count
            self.cached += hits
        self.steps += 1

    def render(self, width: int) -> Group:
        """The batch as a chart: a row per request, a column per step, then the texts."""
        lines = []
        for request_id, kinds in self.cells.items():
            line = Text(f"  {request_id}  ")
            for kind in kinds[-(width - 8) :]:
                mark, style = CELLS.get(kind, (" ", ""))
                line.append(mark, style)
            lines.append(line)
        lines.append(Text(""))
        for request_id in self.prompts:
            text = re.sub(r"\s+", " ", terminal.printable(self.texts.get(request_id, "")))
            line = Text(f"  {request_id}  ")
            line.append(f"...{ENDINGS[ord(request_id) - ord('A')]}", "dim")
            line.append(text)
            line.no_wrap, line.overflow = True, "ellipsis"
            lines.append(line)
        return Group(*lines)


def run(console: Console, model: str) -> None:
    """Run the demo on `model` and say what was to be seen."""
    try:
        engine = LLMEngine(
            model=model, num_blocks=64, block_size=BLOCK_SIZE, max_num_batched_tokens=BUDGET
        )
    except (ValueError, OSError) as error:
        raise CourseError(f"The model {model!r} could not be loaded: {error}") from None
    prompts = {name_of(number): SHARED + ending for number, ending in enumerate(ENDINGS)}
    outputs: dict[str, list[int]] = {}
    for request_id, prompt in prompts.items():
        engine.add_request(
            prompt,
            SamplingParams(
                temperature=TEMPERATURE,
                seed=SEEDS[len(outputs)],
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
            ),
            request_id=request_id,
        )
        outputs[request_id] = []
    terminal.say(console, "Three prompts with the same beginning, in one batch:", "bold")
    terminal.say(console, f'  "{SHARED.strip()} ..."\n', "dim")
    timeline = Timeline(prompts)
    live = Live(console=console, refresh_per_second=20) if console.is_terminal else None
    with live or nullcontext():
        for record in traced_steps(engine):
            timeline.add(record, engine, outputs)
            if live is not None:
                live.update(timeline.render(console.width))
                time.sleep(PACE)
            elif record.new or record.finished or record.step < 4:
                _say_step(console, record)
    if live is None:
        console.print(timeline.render(console.width))
    explain(console, timeline, engine)


def _say_step(console: Console, record: StepRecord) -> None:
    """One step in words, for a pipe."""
    events = f", {record.events_text()}" if record.events_text() else ""
    did = f"{record.scheduled_text()}, {record.free_blocks} blocks free{events}"
    terminal.say(console, f"  step {record.step:>2}: {did}")


def explain(console: Console, timeline: Timeline, engine: LLMEngine) -> None:
    """What the marks mean and what the numbers say."""
    prompt_tokens = sum(len(engine.tokenizer.encode(p)) for p in timeline.prompts.values())
    console.print()
    terminal.say(
        console, "  # prefill: computes its prompt, in chunks of the step's budget", "blue"
    )
    terminal.say(
        console, "  = prefill that began with blocks another request had computed", "green"
    )
    terminal.say(console, "  o decode: one new token per step, together with the others", "yellow")
    console.print()
    terminal.say(
        console,
        f"{timeline.steps} steps, {timeline.scheduled} tokens computed. The three prompts have "
        f"{prompt_tokens} tokens; {timeline.cached} of them came from the prefix cache "
        f"({timeline.cached // BLOCK_SIZE} blocks of {BLOCK_SIZE}).",
    )
    terminal.say(
        console, "Every decision above is the one vLLM 0.22.1 makes; the course shows why."
    )
    terminal.say(console, "\nBegin: course", "cyan")

"""`course run`, `trace`, `bench` and `serve`: an engine, with the learner's parts or without.

Promises: a part that fails is said as theirs, with its line; after a command each part is named
with its calls, and one without any is not called theirs in the engine.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from course import terminal
from course.learning import mine
from course.learning.engine_options import EngineOptions
from course.learning.labs import CourseError, Lab
from course.learning.learner import run_starter
from course.learning.progress import PASSED, Progress

if TYPE_CHECKING:
    from mini_vllm import LLM, EngineParts
    from mini_vllm.observe.bench import BenchResult

PROMPT_LEN, OUTPUT_LEN = (16, 96), (8, 48)
"""Of the requests of `course bench`, in tokens."""


def generate(
    console: Console,
    opened: Callable[[], tuple[Path, list[Lab], Progress]],
    prompt: str,
    use_mine: bool,
    max_tokens: int,
    temperature: float,
    seed: int,
    options: EngineOptions,
    drafts: int | None = None,
) -> None:
    """Continue `prompt` on the terminal, as it is generated; then say whose parts ran.

    Without `drafts` none are made, or 4 per step where a drafter or a verifier is the learner's
    and the options go with drafts.

    Raises:
        CourseError: the engine refuses what is asked for, or a part of theirs fails.
    """
    from mini_vllm import LLM, SamplingParams
    from mini_vllm.structured_output import StructuredOutputsParams

    own = _own(console, opened) if use_mine else Own({}, {})
    if drafts is None:
        drafts = 4 if {"drafter", "verifier"} & own.owners.keys() and options.may_draft else 0
    options = replace(options, drafts=drafts)
    began = time.perf_counter()
    count = 0
    llm = None
    with own.failing():
        lora = options.lora_request()
        own.rest(console, options)
        llm = LLM(options.model, parts=own.parts, **options.arguments())
        regex = options.regex
        asked = StructuredOutputsParams(regex=regex) if regex is not None else None
        params = SamplingParams(
            temperature=temperature, max_tokens=max_tokens, seed=seed, structured_outputs=asked
        )
        console.print(Text(prompt, style="dim"), end="", soft_wrap=True)
        with llm:
            for piece in llm.stream(prompt, params, lora):
                count += len(piece.encode("utf-8"))
                console.print(Text(terminal.printable(piece)), end="", soft_wrap=True)
        console.print()
    seconds = time.perf_counter() - began
    console.print()
    if use_mine:
        own.say(console)
    if llm.llm_engine.feature("spec_decode") is not None:
        stats = llm.llm_engine.feature("spec_decode").stats
        words = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens accepted"
        terminal.say(console, f"{words} in {stats.num_drafts} runs with drafts.")
    if (graphs := llm.llm_engine.feature("compilation")) is not None:
        steps = ", ".join(f"{mode} {n}" for mode, n in sorted(graphs.steps().items()))
        on_graphs, without = graphs.launches()
        words = (
            f"{graphs.mode}: steps by mode: {steps}; {graphs.model.num_padded} rows of padding; "
        )
        terminal.say(console, f"{words}{on_graphs:,} launches, {without:,} without graphs.")
    terminal.say(console, f"{count} bytes in {seconds:.1f} s, loading included.", "dim")


def generate_real(
    console: Console,
    opened: Callable[[], tuple[Path, list[Lab], Progress]],
    prompt: str,
    max_tokens: int,
) -> None:
    """Continue `prompt` by the real engine, with the learner's passing parts as its scheduler.

    Raises:
        CourseError: the engine does not answer, or a part of theirs fails.
    """
    from course.learning import real

    root, labs, progress = opened()
    _, owners = own_parts(console, root, labs, progress)
    real.generate(console, root, owners, prompt, max_tokens)


def serve(
    console: Console,
    opened: Callable[[], tuple[Path, list[Lab], Progress]],
    use_mine: bool,
    port: int,
    options: EngineOptions,
) -> None:
    """Serve a model on this machine until Ctrl-C; say how to ask, and then whose parts were called.

    With an adapter, clients ask for it by its name in the place of the model's.
    """
    from mini_vllm import LLM

    try:
        from mini_vllm.entrypoints.async_llm import EngineDead
        from mini_vllm.entrypoints.openai import launch
    except ImportError as error:
        raise CourseError(
            f"serve: {error.name} is not installed; bring the extra 'serve': "
            "uv run --extra serve course serve"
        ) from None
    own = _own(console, opened) if use_mine else Own({}, {})
    with own.failing():
        lora = options.lora_request()
        own.rest(console, options)
        llm = LLM(options.model, parts=own.parts, **options.arguments())
        modules = {} if lora is None else {lora.lora_name: lora.lora_path}
        served = launch.serve_engine(
            llm.llm_engine, model=options.model, tool_call_parser="hermes", lora_modules=modules
        )
    if use_mine:
        given = ", ".join(f"{part} from {own.owners[part].id}" for part in own.given)
        terminal.say(console, f"Given to the engine: {given or 'no part of yours'}")
    name = served.name if lora is None else lora.lora_name
    body = f'{{"model": "{name}", "prompt": "The scheduler", "max_tokens": 24}}'
    ask = f"curl http://127.0.0.1:{port or 'PORT'}/v1/completions"
    terminal.say(console, f"{ask} -H 'Content-Type: application/json' -d '{body}'")
    try:
        launch.run(served, port=port)
    except EngineDead as error:
        raise CourseError(own.why(error)) from None
    finally:
        llm.close()
        if use_mine:
            own.say(console)


def trace(
    console: Console,
    opened: Callable[[], tuple[Path, list[Lab], Progress]],
    use_mine: bool,
    prompts: list[str],
    max_tokens: int,
    ignore_eos: bool,
    config: dict[str, Any],
    options: EngineOptions,
    save: Path,
) -> None:
    """Run prompts together and show what every step did; then say whose parts were called.

    Raises:
        CourseError: the engine refuses what is asked for, or a part of theirs fails.
    """
    from course.learning import tracing

    own = _own(console, opened) if use_mine else Own({}, {})
    with own.failing():
        lora = options.lora_request()
        own.rest(console, options)
        arguments = {**config, "model": options.model, **options.arguments()}
        data = tracing.collect(prompts, max_tokens, ignore_eos, arguments, own.parts, lora)
    tracing.show(console, data, save)
    if use_mine:
        own.say(console)


def bench(
    console: Console,
    opened: Callable[[], tuple[Path, list[Lab], Progress]],
    use_mine: bool,
    requests: int,
    seed: int,
    options: EngineOptions,
) -> None:
    """Serve a workload to its end and say its steps and speed, then the same by the course's parts.

    Raises:
        CourseError: the engine refuses what is asked for, or a part of theirs fails.
    """
    from mini_vllm import LLM

    own = _own(console, opened) if use_mine else Own({}, {})
    with own.failing():
        lora = options.lora_request()
        own.rest(console, options)
        ran = []
        for parts in [own.parts, mine.engine_parts({})][: 1 + use_mine]:
            with LLM(options.model, parts=parts, **options.arguments()) as llm:
                ran.append(measure(llm, requests, seed, lora))
    for whose, result in zip(("this engine", "the course's"), ran, strict=False):
        say_bench(console, whose, result)
    if use_mine:
        own.say(console)


def measure(llm: LLM, requests: int, seed: int, lora: Any) -> BenchResult:
    """Serve the workload of `course bench` to its end.

    Raises:
        CourseError: a request ended in an error.
    """
    from mini_vllm.observe.bench import Workload, run_workload

    workload = Workload(requests, PROMPT_LEN, OUTPUT_LEN, seed=seed)
    result = run_workload(llm.llm_engine, workload, lora_request=lora)
    if result.errors:
        raise CourseError(f"bench: {next(iter(result.errors.values()))}")
    return result


def say_bench(console: Console, whose: str, result: BenchResult) -> None:
    """Steps and tokens, which are the same on every machine, and this machine's times."""
    ttft, itl = (statistics.median(times) * 1e3 for times in (result.ttft, result.itl))
    rate = result.output_tokens / result.duration
    terminal.say(
        console,
        f"  {whose:<13} {result.num_steps} steps, {result.output_tokens:,} tokens at {rate:,.0f} "
        f"per second, TTFT {ttft:.0f} ms, ITL {itl:.1f} ms (medians)",
    )


def own_parts(
    console: Console, root: Path, labs: list[Lab], progress: Progress
) -> tuple[dict[str, Any], dict[str, Lab]]:
    """The learner's passing parts; files edited since their last grading are graded first."""
    from course.learning.progress import CHANGED

    for lab in labs:
        if lab.manifest.part and progress.state(lab) == CHANGED:
            terminal.say(console, f"Grading {lab.id}, edited since it was last graded.", "dim")
            report = run_starter(root, lab)
            with contextlib.suppress(OSError):  # it counts for this run all the same
                progress.record(lab, report)
    try:
        return mine.parts_of(
            labs, lambda lab: progress.state(lab) == PASSED, lambda lab: lab.starter
        )
    except CourseError:
        raise
    except Exception as error:
        raise CourseError(
            f"The engine cannot load one of your parts: {type(error).__name__}: {error}"
        ) from None


def _own(console: Console, opened: Callable[[], tuple[Path, list[Lab], Progress]]) -> Own:
    """The learner's parts, counting their calls from now on."""
    return Own(*own_parts(console, *opened()))


class Own:
    """A learner's parts for one command: what the engine is given, and what it called."""

    def __init__(self, supplied: dict[str, Any], owners: dict[str, Lab]) -> None:
        self.given, self.owners = dict(supplied), owners
        self.calls = mine.counted(self.given)

    @property
    def parts(self) -> EngineParts:
        """As the engine takes them."""
        return mine.engine_parts(self.given)

    def rest(self, console: Console, options: EngineOptions) -> None:
        """Leave out what does not go with the options, and say so."""
        for told in options.rest(self.given, self.owners):
            terminal.say(console, told)

    def failing(self) -> contextlib.AbstractContextManager[None]:
        """See `failing`."""
        return failing(self.owners)

    def why(self, death: Exception) -> str:
        """Why an engine on a thread has ended: of its error nothing but the text is left there."""
        reason = str(death).partition("the engine has ended: ")[2]
        error = self.calls.error
        if error is None or f"{type(error).__name__}: {error}" != reason:
            kind, _, text = reason.partition(": ")
            error = RuntimeError(text) if kind == "RuntimeError" else None
        return (mine.own_failure(error, self.owners) if error else "") or str(death)

    def say(self, console: Console) -> None:
        """Each part of the engine, and whose it was; a part of theirs that was not called is not
        called theirs in the engine."""
        for part in mine.part_names():
            if part not in self.owners:
                terminal.say(console, f"  {part:<18} the course's", "dim")
            elif part not in self.given:
                terminal.say(console, f"  {part:<18} yours, rests here", "yellow")
            elif not self.calls[part]:
                told = f"  {part:<18} yours, not called here: {mine.command(part)}"
                terminal.say(console, told, "yellow")
            else:
                calls = terminal.counted(self.calls[part], "call")
                told = f"  {part:<18} yours, from lab {self.owners[part].id}: {calls}"
                terminal.say(console, told, "green")
        if not self.owners:
            terminal.say(console, "You have not passed a lab that supplies a part yet.")


@contextlib.contextmanager
def failing(owners: dict[str, Lab]) -> Iterator[None]:
    """Say an error in one of the parts as theirs, and what the engine refuses in its words.

    Raises:
        CourseError: in place of both.
    """
    try:
        yield
    except CourseError:
        raise
    except Exception as error:
        if told := mine.own_failure(error, owners):
            raise CourseError(told) from None
        if isinstance(error, ValueError):
            raise CourseError(str(error)) from None
        raise

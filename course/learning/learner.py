"""The learner's commands: grade, watch, hint, reset, solution, run, serve, bench.

Promises: nothing of the learner's is lost (a reset keeps a copy); a result is kept only for the
text it is a result of, and shown where it cannot be kept; Ctrl-C leaves the last state.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from course import terminal
from course.files import write_atomically
from course.learning import exchange, grading, manifest, mine, predictions, show, starters
from course.learning.engine_options import EngineOptions
from course.learning.labs import CourseError, Lab
from course.learning.progress import FOLDER, PASSED, Progress, digest_of

if TYPE_CHECKING:
    from mini_vllm import LLM, EngineParts
    from mini_vllm.observe.bench import BenchResult

PROMPT_LEN, OUTPUT_LEN = (16, 96), (8, 48)
"""Of the requests of `course bench`, in tokens."""


def grade(
    console: Console,
    root: Path,
    labs: list[Lab],
    progress: Progress,
    lab: Lab,
    time_limit: float,
) -> bool:
    """Grade the learner's file of one lab, keep the result, show it; whether it passed."""
    if not lab.starter.is_file():
        raise CourseError(
            f"{terminal.relative(lab.starter, root)} is gone. Put it back: course reset {lab.id}"
        )
    working = (
        console.status(f"Grading {lab.id} ...") if console.is_terminal else contextlib.nullcontext()
    )
    answers, problems = predictions.committed(lab.folder, lab.manifest.predictions)
    with working:
        report = run_starter(root, lab, time_limit)
    show.graded(console, root, lab, report)
    measured = {n: v for result in report.passed for n, v in result.measured.items()}
    show.predicted(console, lab, answers, problems, measured)
    if not report.digest:
        terminal.say(
            console,
            f"{lab.starter.name} or its tests were saved while they ran: nothing was kept.\n"
            f"Once more: course check {lab.id}",
            "yellow",
        )
        return False
    try:
        keep(progress, lab, report)
    except OSError as error:
        terminal.say(
            console, f"The result cannot be kept ({error}): your progress is as it was.", "red"
        )
    if report.ok:
        built = list(dict.fromkeys(name.partition(".")[0] for name in lab.manifest.yours))
        following = progress.next_lab(labs, after=lab)
        show.congratulate(console, root, lab, report, built, following, lab.manifest.part or "")
    return report.ok


def keep(progress: Progress, lab: Lab, report: grading.Report) -> None:
    """Keep a result, and what was predicted beside what was measured.

    Raises:
        OSError: it cannot be kept.
    """
    answers, _ = predictions.committed(lab.folder, lab.manifest.predictions)
    measured = {n: v for result in report.passed for n, v in result.measured.items()}
    both = answers.keys() & measured.keys()
    progress.record(lab, report, {name: (answers[name], measured[name]) for name in both})


def run_starter(
    root: Path,
    lab: Lab,
    time_limit: float = grading.TIME_LIMIT,
    follow: Callable[[list[dict[str, Any]]], bool] | None = None,
) -> grading.Report:
    """The learner's file against the lab's tests, in a child process.

    The report's digest is that of the files, "" when one of them was saved meanwhile: nobody can
    tell then which text was graded. `follow` is that of `grading.run`.
    """
    before = digest_of(lab)
    try:
        expected = lab.test_names()
    except (SyntaxError, ValueError, OSError):  # the run says what is wrong with them
        expected = []
    report = grading.run(
        root,
        lab.test_file,
        impl="starter",
        expected=expected,
        time_limit=time_limit,
        memory=grading.MEMORY_LIMIT if lab.manifest.tag == "CPU-OK" else 0,
        follow=follow,
    )
    report.digest = before if digest_of(lab) == before else ""
    return report


def watch(
    console: Console,
    root: Path,
    labs: list[Lab],
    progress: Progress,
    fixed: Lab | None,
    time_limit: float,
) -> None:
    """Grade now and after every save, until Ctrl-C.

    Without a `fixed` lab it follows the learner: a saved file of any lab is graded next.
    """
    from course.learning.progress import current_lab

    lab = fixed or current_lab(root, progress)
    watched = [fixed] if fixed else labs
    try:
        while lab is not None:
            if console.is_terminal:
                console.clear()
            graded = {each.id: _text(each) for each in watched}
            try:
                grade(console, root, labs, progress, lab, time_limit)
            except CourseError as error:  # an editor may put the file aside before it is back
                terminal.say(console, str(error), "red")
            terminal.say(console, "\nWaiting for a save (Ctrl-C to stop).", "dim")
            lab = _next_saved(watched, graded)
    except KeyboardInterrupt:
        terminal.say(console, "\nStopped. Your progress is kept.")


def _text(lab: Lab) -> bytes | None:
    """The learner's file; None while there is none."""
    try:
        return lab.starter.read_bytes()
    except OSError:
        return None


def _next_saved(labs: list[Lab], graded: dict[str, bytes | None]) -> Lab | None:
    """Wait until a lab's starter is saved, or is not what was graded; None when watching ended.

    What was saved before the watching began, as during a grading, has no event: the texts tell.
    """
    import watchfiles

    def changed() -> Lab | None:
        texts = ((lab, _text(lab)) for lab in labs)
        return next((lab for lab, text in texts if text not in (None, graded[lab.id])), None)

    if lab := changed():
        return lab
    files = {str(lab.starter.resolve()): lab for lab in labs}
    folders = [lab.folder for lab in labs]
    for changes in watchfiles.watch(
        *folders, recursive=False, raise_interrupt=True, yield_on_timeout=True, rust_timeout=1000
    ):
        saved = [files.get(str(Path(path).resolve())) for _, path in sorted(changes)]
        if found := next((lab for lab in saved if lab and lab.starter.is_file()), None):
            return found
        if lab := changed():
            return lab
    return None


def hint(console: Console, progress: Progress, lab: Lab, test: str | None) -> None:
    """Unfold one more hint of `test`, or of the test that failed last, for how it failed."""
    names = lab.test_names()
    hints = lab.manifest.hints
    entry = progress.entry(lab)
    if test is None:
        if progress.state(lab) == PASSED:
            terminal.say(
                console, f"Lab {lab.id} is passed; no hint is needed. --test names a test."
            )
            return
        test = entry.first_failing if entry.first_failing in names else names[0]
    if test not in hints:
        raise CourseError(
            f"Lab {lab.id} has no hints for {test!r}. Its tests are:\n  " + "\n  ".join(names)
        )
    fit = manifest.fitting(hints[test], entry.failure if test == entry.first_failing else "")
    fields = sorted({each.field for each in fit if each.field})
    key = f"{test} ({', '.join(fields)})" if fields else test
    try:
        unfolded = progress.unfold(lab, key, len(fit))
    except OSError as error:  # the next command would begin with the first again
        unfolded = len(fit)
        terminal.say(
            console, f"What was unfolded cannot be kept ({error}): here are all.", "yellow"
        )
    show.hint(console, lab, key, [each.text for each in fit], unfolded)


def reset(console: Console, root: Path, progress: Progress, lab: Lab, yes: bool) -> None:
    """Put the pristine starter back, after keeping a copy of what is there."""
    name = terminal.relative(lab.starter, root)
    if starters.is_current(lab):
        terminal.say(console, f"{name} is the pristine starter already.")
        return
    if not yes and sys.stdin.isatty() and not typer.confirm(f"Replace {name}?"):
        terminal.say(console, "Nothing was changed.")
        return
    replace_starter(console, root, lab)
    terminal.say(console, f"{name} is the pristine starter again.")
    try:
        progress.fold(lab)
    except OSError as error:
        terminal.say(console, f"Its last result is still in your progress ({error}).", "yellow")


def replace_starter(console: Console, root: Path, lab: Lab) -> None:
    """Write the generated starter, after keeping a copy of what is there."""
    text = starters.required(lab)
    if lab.starter.is_file():
        stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        copy = root / FOLDER / "backup" / f"{lab.id}-{stamp}.py"
        try:
            write_atomically(copy, lab.starter.read_bytes())
        except OSError as error:
            name = terminal.relative(lab.starter, root)
            raise CourseError(
                f"Nothing was changed: your {name} could not be kept ({error})."
            ) from None
        terminal.say(console, f"Your file is kept as {terminal.relative(copy, root)}")
    write_atomically(lab.starter, text)


def import_file(console: Console, root: Path, labs: list[Lab], file: Path) -> None:
    """Take over what was done in the book, and say what is where now.

    Raises:
        CourseError: the file does not fit, or cannot be taken over; nothing is changed then.
    """
    taken = exchange.take(root, labs, exchange.read(file))
    for name in taken.written:
        kept = taken.kept.get(name)
        where = f"; your file is kept as {terminal.relative(kept, root)}" if kept else ""
        terminal.say(console, f"{name}: starter.py is the one of the book{where}")
    if taken.same:
        terminal.say(console, f"The same already: {', '.join(taken.same)}", "dim")
    if taken.unknown:
        terminal.say(console, f"Not in this course, left out: {', '.join(taken.unknown)}", "yellow")
    if taken.answers:
        terminal.say(console, f"{taken.answers} answers are in the quiz: course quiz")
    if taken.predictions:
        told = terminal.counted(taken.predictions, "prediction")
        terminal.say(console, f"{told} committed, each in its lab's {predictions.FILE}")
    for name in taken.hunts:
        kept = taken.kept.get(f"hunt {name}")
        where = f"; what you wrote is kept as {terminal.relative(kept, root)}" if kept else ""
        terminal.say(console, f"Hunt {name} goes on here: course hunt {name} --check{where}")
    if taken.tries:
        told = terminal.counted(taken.tries, "try", "tries")
        terminal.say(console, f"{told} at challenges taken: course challenge")
    if taken.written:
        terminal.say(console, "Graded here they count: course check --all", "cyan")
    elif not (taken.answers or taken.predictions or taken.hunts or taken.tries):
        terminal.say(console, "Nothing in it is new here.")


def export_file(
    console: Console, root: Path, labs: list[Lab], progress: Progress, file: Path, force: bool
) -> None:
    """Write what is done here to a file for the book.

    Raises:
        CourseError: there is such a file already.
    """
    if file.exists() and not force:
        raise CourseError(f"{file} is there already. Replace it: course export {file} --force")
    text = exchange.document(root, labs, progress)
    write_atomically(file, text)
    data = json.loads(text)
    told = terminal.counted(len(data["edits"]), "lab")
    more = [
        terminal.counted(len(data["predictions"]), "prediction"),
        terminal.counted(len(data["hunts"]), "hunt"),
        terminal.counted(
            sum(len(each["tries"]) for each in data["tries"].values()), "try", "tries"
        ),
    ]
    more = [words for words in more if not words.startswith("0 ")]
    told = " and ".join([", ".join([told, *more[:-1]]), *more[-1:]])
    terminal.say(console, f"{told} in {file}. To take it into the book: Import, below any lab.")


def solution(console: Console, progress: Progress, lab: Lab, diff: bool, yes: bool) -> None:
    """Show the reference, or how it differs from the learner's file."""
    if progress.state(lab) != PASSED and not yes:
        question = f"You have not passed {lab.id} yet. Show its reference all the same?"
        if not sys.stdin.isatty():
            raise CourseError(f"{question} Then add --yes. A hint instead: course hint {lab.id}")
        if not typer.confirm(question):
            terminal.say(console, f"A hint instead: course hint {lab.id}")
            return
    if diff:
        show.diff(console, lab)
    else:
        show.code(console, lab.solution)


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
            f"serve: needs the extra 'serve' ({error.name} is not here): "
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
        told = mine.own_failure(own.calls.error, own.owners) if own.calls.error else ""
        raise CourseError(told or str(error)) from None
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
        raise CourseError(f"A part could not be loaded: {type(error).__name__}: {error}") from None


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
            terminal.say(console, "None of the labs that supply a part is passed yet.")


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

"""What each learner's subcommand of `course` takes, and nothing else."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from course import processes, terminal
from course.learning import show
from course.learning.labs import CourseError, Lab, find_labs, find_root, pick

if TYPE_CHECKING:
    from course.learning.progress import Progress

app = typer.Typer(
    name="course",
    help="Learn the internals of vLLM by rebuilding them. Without a command: where you are.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
gpu_app = typer.Typer(help="Run a lab on a GPU and keep what came out.", rich_markup_mode=None)
engine_app = typer.Typer(
    help="The real engine, vLLM, in an environment of its own.", rich_markup_mode=None
)
museum_app = typer.Typer(
    help="Bugs of vLLM, shown by the code of the release that had them.",
    rich_markup_mode=None, invoke_without_command=True,
)  # fmt: skip
app.add_typer(gpu_app, name="gpu")
app.add_typer(museum_app, name="museum")
app.add_typer(engine_app, name="engine")

LabName = Annotated[str, typer.Argument(metavar="LAB", help="02-01, 2-1, a path, part of a name")]
MaybeLab = Annotated[
    str | None, typer.Argument(metavar="[LAB]", help="default: the lab you stand in, or the next")
]


def _seconds(value: float) -> float:
    """A time limit as it can be used.

    Raises:
        CourseError: it is not a number above 0, or more than a day.
    """
    try:
        return processes.seconds("--time-limit", value)
    except ValueError as error:
        raise CourseError(str(error)) from None


TimeLimit = Annotated[float, typer.Option(help="seconds a lab's tests may run", callback=_seconds)]
MaxTokens = Annotated[int, typer.Option(help="tokens to generate per prompt")]
ModelName = Annotated[str, typer.Option(help="the shipped model, a folder, a hub id, or toy")]
Mine = Annotated[bool, typer.Option("--mine", help="with your own parts in the engine")]
Adapter = Annotated[str | None, typer.Option(help="shout, quote, code, or a folder")]
Graphs = Annotated[str | None, typer.Option("--cudagraph-mode", help="steps on graphs, counted")]
Ranks = Annotated[int, typer.Option("--tensor-parallel-size", min=1, help="processes that share")]


def course_root() -> Path:
    start = os.environ.get("COURSE_ROOT")
    return find_root(Path(start) if start else None)


def opened() -> tuple[Path, list[Lab], Progress]:
    from course.learning.progress import Progress

    root = course_root()
    return root, find_labs(root), Progress(root)


def _choose(root: Path, labs: list[Lab], progress: Progress, name: str | None) -> Lab:
    from course.learning.progress import current_lab

    if name is not None:
        return pick(labs, name)
    lab = current_lab(root, progress)
    if lab is None:
        raise CourseError("Every lab is passed. Name one to work on it again: course check 02-01")
    return lab


# ------------------------------------------------------------------ learner


@app.callback(invoke_without_command=True)
def dashboard(
    context: typer.Context,
    spine: Annotated[bool, typer.Option("--spine", help="only the short way through")] = False,
) -> None:
    """Where you are: progress per phase, the time left, the next lab."""
    if context.invoked_subcommand is None:
        root, labs, progress = opened()
        tell = show.spine if spine else show.dashboard
        tell(terminal.make_console(), root, labs, progress)
    elif spine:
        raise CourseError("--spine goes with no command: course --spine")


@app.command()
def demo(model: ModelName = "byte-llama") -> None:
    """Three prompts with a shared prefix through the engine, step by step."""
    # One small batch: a second BLAS thread gains nothing, and waits on a busy machine.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from course.learning import demo as module

    module.run(terminal.make_console(), model)


@app.command()
def first() -> None:
    """A scheduler of ten lines with one wrong: mend it, a minute's work, nothing to read before."""
    from course.learning import first as module

    raise typer.Exit(0 if module.run(terminal.make_console(), course_root()) else 1)


@app.command()
def check(
    lab: MaybeLab = None,
    all_: Annotated[bool, typer.Option("--all", help="every lab you have touched")] = False,
    time_limit: TimeLimit = 60.0,
) -> None:
    """Grade a lab and show the first thing to mend."""
    from course.learning import learner
    from course.learning.progress import NEW

    root, labs, progress = opened()
    console = terminal.make_console()
    if all_:
        chosen = [each for each in labs if progress.state(each) != NEW]
        if not chosen:
            terminal.say(console, "No lab has been touched yet. Begin with: course")
    else:
        chosen = [_choose(root, labs, progress, lab)]
    results = [learner.grade(console, root, labs, progress, each, time_limit) for each in chosen]
    raise typer.Exit(0 if all(results) else 1)


@app.command()
def watch(lab: MaybeLab = None, time_limit: TimeLimit = 60.0) -> None:
    """Grade on every save; without a LAB, whichever lab you save."""
    from course.learning import learner

    root, labs, progress = opened()
    learner.watch(
        terminal.make_console(), root, labs, progress, pick(labs, lab) if lab else None, time_limit
    )


@app.command()
def hint(
    lab: MaybeLab = None,
    test: Annotated[str | None, typer.Option(help="default: the first failing test")] = None,
) -> None:
    """Unfold one more hint for the first failing test."""
    from course.learning import learner

    root, labs, progress = opened()
    learner.hint(terminal.make_console(), progress, _choose(root, labs, progress, lab), test)


@app.command()
def predict(lab: MaybeLab = None) -> None:
    """Commit what you expect a lab to measure, before it is measured."""
    from course.learning import asking

    root, labs, progress = opened()
    asking.predict(terminal.make_console(), progress, _choose(root, labs, progress, lab))


@app.command()
def quiz(
    phase: Annotated[
        str | None, typer.Argument(metavar="[PHASE]", help="03; default: those you began")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="every question, due or not")] = False,
    count: Annotated[int, typer.Option(help="the most questions to ask")] = 10,
    interview: Annotated[bool, typer.Option("--interview", help="sit a staff loop")] = False,
    seed: Annotated[int | None, typer.Option(help="with --interview: which loop")] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="MATRIX", help="with --interview: one of before")
    ] = None,
) -> None:
    """Ask what the pages asked; what was wrong comes back first, what was right later."""
    from course.learning import asking

    if interview:
        from course.learning import interview as loops

        if phase is not None or every:
            raise CourseError("--interview asks over all phases: give no phase and no --all")
        raise typer.Exit(loops.run(terminal.make_console(), course_root(), seed, compare))
    if seed is not None or compare is not None:
        raise CourseError("--seed and --compare belong to --interview")
    raise typer.Exit(asking.run_quiz(terminal.make_console(), course_root(), phase, count, every))


@app.command()
def exercise(
    name: Annotated[
        str | None, typer.Argument(metavar="[EXERCISE]", help="02-bu-07; default: list them")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="begin anew; yours is kept")] = False,
) -> None:
    """Answer an exercise with code: begin its file, then grade it."""
    from course.learning import asking

    raise typer.Exit(asking.run_exercise(terminal.make_console(), course_root(), name, again))


@app.command()
def read(phase: Annotated[str, typer.Argument(metavar="PHASE", help="03")]) -> None:
    """Ask where vLLM decides it: a phase's reading lab, answered with path:line."""
    from course.learning import asking

    raise typer.Exit(asking.run_reading(terminal.make_console(), course_root(), phase))


@app.command()
def hunt(
    lab: Annotated[
        str | None, typer.Argument(metavar="[LAB]", help="default: what is open, or due again")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="grade what you mended or wrote")] = False,
    level: Annotated[
        int | None,
        typer.Option(help="1 shows a failing test, 2 only calls; 3 asks for tests of your own"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed draws the same line")] = None,
) -> None:
    """Find the one wrong line in a lab's reference, or write the test that tells it."""
    from course.learning import hunting

    if check and (level is not None or seed is not None):
        raise CourseError(
            "--level and --seed begin a hunt, and --check grades the one that is open"
        )
    root, labs, progress = opened()
    chosen = pick(labs, lab) if lab else hunting.choose(root, labs, progress)
    console = terminal.make_console()
    if check:
        raise typer.Exit(0 if hunting.check(console, root, chosen) else 1)
    hunting.start(console, root, chosen, level, seed)


@app.command()
def challenge(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="default: list all")] = None,
    check: Annotated[bool, typer.Option("--check", help="score your answer")] = False,
    note: Annotated[str, typer.Option(help="with --check: the idea of this try")] = "",
    seed: Annotated[str, typer.Option(help="with --check: draw these fresh workloads again")] = "",
    share: Annotated[Path | None, typer.Option(help="write your best try to a file")] = None,
    verify: Annotated[Path | None, typer.Option(help="score a shared file again")] = None,
) -> None:
    """Beat a number: problems of the engine with a score that is counted, not clocked."""
    from course.challenges import ledger, shown
    from course.challenges.gpu import shown as races

    console = terminal.make_console()
    given = [word for word, is_given in (
        ("--check", check), ("--share", share is not None), ("--verify", verify is not None)
    ) if is_given]  # fmt: skip
    if len(given) > 1:
        raise CourseError(f"{' and '.join(given)}: one of them at a time")
    if (note or seed) and not check:
        raise CourseError("--note and --seed go with --check")
    if verify is not None:
        raise typer.Exit(0 if shown.verify(console, verify) else 1)
    if name is None:
        if check or share is not None:
            raise CourseError("Name a challenge: course challenge queue --check")
        shown.listing(console, course_root())
        races.listing(console, course_root())
        return
    if name in races.TITLES:
        if share is not None or seed:
            raise CourseError(f"{name} is clocked on your card: it has no --seed and no --share")
        race = races.load(name)
        if check:
            raise typer.Exit(0 if races.check(console, course_root(), race, note) else 1)
        races.contract(console, course_root(), race)
        return
    chosen = shown.pick(name)
    if check:
        raise typer.Exit(0 if shown.check(console, course_root(), chosen, note, seed) else 1)
    if share is not None:
        found = ledger.share(course_root(), chosen, share)
        terminal.say(console, f"{share}: {found.score:,} {chosen.meter.UNIT}")
        return
    shown.contract(console, course_root(), chosen)


@app.command()
def incident(
    name: Annotated[str | None, typer.Argument(metavar="[DAY]", help="default: list all")] = None,
    cause: Annotated[str, typer.Option(help="hold this cause against what was recorded")] = "",
    set_: Annotated[
        str, typer.Option("--set", metavar="KNOB=VALUE", help="replay the day with one knob turned")
    ] = "",
) -> None:
    """Diagnose a bad day of a served engine from its log, metrics and trace, and mend it."""
    from course.incidents import shown

    console, root = terminal.make_console(), course_root()
    if cause and set_:
        raise CourseError("--cause and --set: one of them at a time")
    if name is None:
        if cause or set_:
            raise CourseError("Name a day: course incident monday --cause NAME")
        shown.listing(console, root)
        return
    day = shown.pick(name)
    if cause:
        raise typer.Exit(0 if shown.diagnose(console, root, day, cause) else 1)
    if set_:
        raise typer.Exit(0 if shown.turn(console, root, day, set_) else 1)
    shown.told(console, root, day)


@app.command()
def reset(
    lab: LabName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Put the pristine starter back; your file is kept in .course/backup."""
    from course.learning import learner

    root, labs, progress = opened()
    learner.reset(terminal.make_console(), root, progress, pick(labs, lab), yes)


@app.command()
def solution(
    lab: LabName,
    diff: Annotated[bool, typer.Option("--diff", help="against your own file")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Show the reference of a lab."""
    from course.learning import learner

    _, labs, progress = opened()
    learner.solution(terminal.make_console(), progress, pick(labs, lab), diff, yes)


@app.command("run")
def generate(
    prompt: Annotated[str | None, typer.Argument(help="the text to continue")] = None,
    mine: Mine = False,
    real: Annotated[bool, typer.Option("--real", help="--mine, in the real engine")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="as course serve")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="of --serve; 0: a free one")] = 8000,
    max_tokens: MaxTokens = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    seed: Annotated[int, typer.Option(help="of the random draws")] = 0,
    model: ModelName = "byte-llama",
    drafts: Annotated[
        int | None, typer.Option(help="n-gram drafts per step; by default 4 with a part for them")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="a pattern that the output matches")] = None,
    adapter: Adapter = None,
    tensor_parallel_size: Ranks = 1,
    cudagraph_mode: Graphs = None,
) -> None:
    """Continue a prompt, or serve clients, with the engine's parts or with your own."""
    from course.learning import engine_commands
    from course.learning.engine_options import EngineOptions
    from course.learning.labs import CourseError

    options = EngineOptions(model, adapter, tensor_parallel_size, cudagraph_mode, regex=regex)
    if serve:
        if regex is not None or adapter is not None:
            raise CourseError("run --serve: --regex and --adapter belong to each client's request")
        if real:
            raise CourseError("run --serve: --real continues one prompt")
        engine_commands.serve(terminal.make_console(), opened, mine, port, options)
        return
    if prompt is None:
        raise CourseError("run: need a prompt, or --serve")
    if real:
        if not mine:
            raise CourseError("run --real: goes with --mine; it puts your scheduler there")
        others = {
            "--drafts": bool(drafts), "--regex": regex is not None,
            "--adapter": adapter is not None, "--temperature": temperature != 0,
            f"--model {model}": model != "byte-llama",
            "--tensor-parallel-size": tensor_parallel_size != 1,
            "--cudagraph-mode": cudagraph_mode is not None,
        }  # fmt: skip
        if refused := [name for name, is_asked in others.items() if is_asked]:
            raise CourseError(f"run --real: {', '.join(refused)}: not served there")
        engine_commands.generate_real(terminal.make_console(), opened, prompt, max_tokens)
        return
    engine_commands.generate(
        terminal.make_console(), opened, prompt, mine, max_tokens, temperature, seed, options,
        drafts,
    )  # fmt: skip


@app.command("serve")
def serve_command(
    mine: Mine = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one")] = 8000,
    model: ModelName = "byte-llama",
    adapter: Adapter = None,
    tensor_parallel_size: Ranks = 1,
    cudagraph_mode: Graphs = None,
) -> None:
    """Serve clients behind OpenAI's API, with the engine's parts or with your own."""
    from course.learning import engine_commands
    from course.learning.engine_options import EngineOptions

    options = EngineOptions(model, adapter, tensor_parallel_size, cudagraph_mode)
    engine_commands.serve(terminal.make_console(), opened, mine, port, options)


@app.command("bench")
def bench_command(
    mine: Mine = False,
    requests: Annotated[int, typer.Option(min=1, help="all at once, of random lengths")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="of the lengths and the prompts")] = 0,
    model: ModelName = "byte-llama",
    adapter: Adapter = None,
    tensor_parallel_size: Ranks = 1,
    cudagraph_mode: Graphs = None,
) -> None:
    """Serve a workload and say its steps and speed; with --mine beside the course's engine."""
    from course.learning import engine_commands
    from course.learning.engine_options import EngineOptions

    options = EngineOptions(model, adapter, tensor_parallel_size, cudagraph_mode)
    engine_commands.bench(terminal.make_console(), opened, mine, requests, seed, options)


@app.command("mine")
def mine_command(
    out: Annotated[Path | None, typer.Option(help="write it as a package, here")] = None,
) -> None:
    """The engine that your passed labs make: whose each part is, and how it decides."""
    from course.learning import engine_commands, own_engine

    root, labs, progress = opened()
    console = terminal.make_console()
    parts, owners = engine_commands.own_parts(console, root, labs, progress)
    if out is None:
        with engine_commands.failing(owners):
            own_engine.show(console, root, parts, owners, labs)
    else:
        package = own_engine.write(root, out, parts, owners)
        terminal.say(console, f"{package}: {terminal.counted(len(owners), 'part')} of yours")
        terminal.say(console, f'cd {out} && python -m {package.name} "The scheduler"', "cyan")


@app.command()
def trace(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="one or more texts")],
    max_tokens: MaxTokens = 8,
    num_blocks: Annotated[int, typer.Option(help="KV blocks, block 0 included")] = 256,
    block_size: Annotated[int, typer.Option(help="tokens per block")] = 16,
    max_num_seqs: Annotated[int, typer.Option(help="requests running at once")] = 128,
    max_num_batched_tokens: Annotated[int, typer.Option(help="token budget of a step")] = 2048,
    long_prefill_token_threshold: Annotated[int, typer.Option(help="0 is off")] = 0,
    prefix_caching: Annotated[bool, typer.Option(help="share equal prefixes")] = True,
    ignore_eos: Annotated[bool, typer.Option(help="do not stop at the end token")] = False,
    save: Annotated[Path | None, typer.Option(help="default: .course/trace.json")] = None,
    model: ModelName = "byte-llama",
    mine: Mine = False,
    adapter: Adapter = None,
    tensor_parallel_size: Ranks = 1,
    cudagraph_mode: Graphs = None,
) -> None:
    """Run prompts together and show what every step did; also saved as JSON."""
    from course.learning import engine_commands
    from course.learning.engine_options import EngineOptions

    config = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "long_prefill_token_threshold": long_prefill_token_threshold,
        "enable_prefix_caching": prefix_caching,
    }
    target = save or course_root() / ".course" / "trace.json"
    options = EngineOptions(model, adapter, tensor_parallel_size, cudagraph_mode)
    engine_commands.trace(
        terminal.make_console(), opened, mine, prompts, max_tokens, ignore_eos, config, options,
        target,
    )  # fmt: skip


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="exported in the book, or by course export")],
) -> None:
    """Take over what was done in the book's pages; a file that gives way is kept."""
    from course.learning import learner

    root, labs, _ = opened()
    learner.import_file(terminal.make_console(), root, labs, file)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="such as course-progress.json")],
    force: Annotated[bool, typer.Option("--force", help="replace the file")] = False,
) -> None:
    """Write what you did, from labs to incidents, to a file that the book can import."""
    from course.learning import learner

    root, labs, progress = opened()
    learner.export_file(terminal.make_console(), root, labs, progress, file, force)


@app.command()
def doctor() -> None:
    """What this machine has, what each missing piece would enable, and how to get it."""
    from course import doctor as module

    raise typer.Exit(module.run(terminal.make_console(), course_root()))


@app.command("ask")
def ask_command(
    workload: Annotated[str, typer.Argument(help="a seed, FILE or FILE:SEED")],
    release: Annotated[str, typer.Option(help="which vLLM is asked")] = "0.22.1",
    scheduler: Annotated[str, typer.Option(help="yours: FILE.py:CLASS")] = "",
    kv_cache_manager: Annotated[str, typer.Option(help="yours: FILE.py:CLASS")] = "",
    block_pool: Annotated[str, typer.Option(help="yours: FILE.py:CLASS")] = "",
) -> None:
    """vLLM's own scheduler beside this one, step by step, on one workload."""
    from argparse import ArgumentTypeError

    from conformance.replay import load_part
    from course.decisions import beside

    named = {
        "scheduler": scheduler, "kv_cache_manager": kv_cache_manager, "block_pool": block_pool,
    }  # fmt: skip
    try:
        parts = {name: load_part(where) for name, where in named.items() if where}
    except ArgumentTypeError as error:
        raise CourseError(str(error)) from None
    raise typer.Exit(beside(terminal.make_console(), workload, release, parts))


@app.command()
def replay(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="a file, or the folder, of vllm-flight-recorder")
    ],
) -> None:
    """Drive the mini engine through the recording of a vLLM server; compare every decision."""
    from conformance import flight

    raise typer.Exit(flight.main([str(file)]))


@app.command("why")
def why_command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="of vllm-flight-recorder, or a recording")
    ],
    request: Annotated[
        str | None, typer.Argument(metavar="[REQUEST]", help="its id; default: all, a line each")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(metavar="OTHER", help="the request it was expected to hit")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="of a file with several workloads")] = None,
) -> None:
    """Why a request waited, was preempted, missed the cache or got so few tokens, by step."""
    from conformance import why

    raise typer.Exit(why.run(file, request, prefix, seed))


@museum_app.callback()
def museum(context: typer.Context) -> None:
    """What is exhibited, by the invariant that breaks."""
    if context.invoked_subcommand is None:
        from course import museum as module

        module.tour(terminal.make_console())


@museum_app.command("run")
def museum_run(
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="of the issue, such as 49097")],
    release: Annotated[
        str, typer.Option(help="default: one that has it, and the first that has not")
    ] = "",
    reveal: Annotated[bool, typer.Option("--reveal", help="cause and mend, too")] = False,
) -> None:
    """Show a bug on a release's own code; the cause stays covered until you ask."""
    from course import museum as module

    raise typer.Exit(module.run(terminal.make_console(), number, release, reveal))


@gpu_app.command("run")
def gpu_run(
    lab: Annotated[str | None, typer.Argument(metavar="[LAB]", help="default: all")] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARG...]", help="passed on to run.py")
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="every lab, what gives most for its time first; default")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="leave what this device has captured already")
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="on vLLM's CPU build, no GPU")] = False,
    name: Annotated[
        str | None, typer.Option(help="of the capture, captured/NAME.json; default run, or cpu")
    ] = None,
    force: Annotated[bool, typer.Option(help="replace a capture of other hardware")] = False,
    time_limit: Annotated[float, typer.Option(help="seconds per run", callback=_seconds)] = 1800.0,
) -> None:
    """Run a lab's run.py and keep its output, with its provenance, in captured/."""
    from course.learning import gpu

    if lab and all_:
        raise CourseError(f"--all and {lab}: give one of them.")
    root, labs, _ = opened()
    chosen = pick(labs, lab) if lab else None
    raise typer.Exit(
        gpu.run(
            terminal.make_console(), root, labs, chosen, name, arguments or [], force, time_limit,
            cpu, resume,
        )
    )  # fmt: skip


@engine_app.command("install")
def engine_install(
    into: Annotated[Path | None, typer.Option(help="a folder; default .venv-engine")] = None,
    python: Annotated[
        str | None, typer.Option(help="an interpreter, 3.10 to 3.14; default: this one")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Install the real engine for this machine, or go on installing; says first what it costs."""
    from course import engine

    raise typer.Exit(engine.install(terminal.make_console(), course_root(), into, python, yes))


@engine_app.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def engine_run(
    arguments: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARG]...", help="as after python; -m works too")
    ],
) -> None:
    """Run a script where the real engine is installed."""
    from course import engine

    raise typer.Exit(engine.run(course_root(), arguments))


@engine_app.command("status")
def engine_status() -> None:
    """What is installed, and whether it was seen working."""
    from course import engine

    raise typer.Exit(engine.status(terminal.make_console(), course_root()))


def run() -> None:
    """Run the command line; what a user can mend ends in one message and exit status 2."""
    try:
        app()
    except CourseError as error:
        terminal.say(terminal.make_console(stderr=True), str(error), "red")
        sys.exit(2)
    except OSError as error:  # a full disk, a folder that may not be written
        terminal.say(terminal.make_console(stderr=True), f"{type(error).__name__}: {error}", "red")
        sys.exit(2)

"""Fixtures of the whole repository: `lab`, `gpu_device`, `browser`, and what skips where.

`LAB_IMPL=solution` (the default) or `LAB_IMPL=starter` chooses which file beside a lab's
`test_lab.py` is graded. The whole suite runs on all processors where pytest-xdist is installed, and
without what is `slow` (studies, experiments, long searches): `-m slow` runs that, and so does
naming a file, a test or a lab's folder; another folder has the tests that the suite has of it. With
`LAB_IMPL=starter` no test of a lab is left out. A test marked `gpu`, `torch`, `upstream` or
`engine` skips itself, with the reason, where the thing it needs is missing; `--require=NAME` turns
that skip into an error.
"""

from __future__ import annotations

import concurrent.futures.thread
import functools
import importlib.util
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from course.files import load_module

IMPLEMENTATIONS = ("solution", "starter")

# The tests multiply small matrices, where a second BLAS thread gains nothing, and where two that
# spin for each other on a busy machine cost seconds. Read when numpy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


LATE_THREADS_MS = "LATE_THREADS_MS"
"""Environment variable: every background thread, and all work of a pool, begins up to so many
milliseconds late. A test that then fails counts on a thread to be quick."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        action="append",
        default=[],
        choices=sorted(CAPABILITIES),
        help="fail at once when this capability is missing, instead of skipping its tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    chosen = os.environ.get("LAB_IMPL", "solution")
    if chosen not in IMPLEMENTATIONS:
        raise pytest.UsageError(
            f"LAB_IMPL={chosen!r} is not accepted: use LAB_IMPL=solution (the default) "
            "or LAB_IMPL=starter"
        )
    for name in config.getoption("--require"):
        reason = CAPABILITIES[name]()
        if reason:
            raise pytest.UsageError(f"--require={name}: {reason}")
    if worker := _worker(config):
        # On a first run each then compiles other files, and reads what the others have compiled.
        number, count = worker
        place = number * len(config.args) // count
        config.args[:] = config.args[place:] + config.args[:place]


@pytest.fixture(autouse=True, scope="session")
def late_threads() -> Iterator[None]:
    """Delay threads at random, if `LATE_THREADS_MS` asks for it; another delay in each run."""
    most = float(os.environ.get(LATE_THREADS_MS, 0)) / 1e3
    if most <= 0:
        yield
        return

    def late(run: Any) -> Any:
        @functools.wraps(run)
        def later(self: Any) -> None:
            time.sleep(random.SystemRandom().uniform(0, most))
            run(self)

        return later

    with pytest.MonkeyPatch.context() as patch:
        for kind in (threading.Thread, concurrent.futures.thread._WorkItem):
            patch.setattr(kind, "run", late(kind.run))
        yield


def _worker(config: pytest.Config) -> tuple[int, int] | None:
    """Which of how many processes of xdist this is."""
    told = getattr(config, "workerinput", None)
    return (int(told["workerid"].removeprefix("gw")), told["workercount"]) if told else None


def _is_whole_suite(config: pytest.Config) -> bool:
    """Whether no file, folder or test was named: then it is worth starting more processes."""
    named = [str(argument).partition("::")[0] for argument in config.invocation_params.args]
    return not any(Path(name).exists() for name in named if not name.startswith("-"))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    options = config.option
    if not config.pluginmanager.hasplugin("xdist"):
        return
    if (
        "PYTEST_XDIST_WORKER" not in os.environ  # a worker, or a run that a test has started
        and _is_whole_suite(config)
        and not options.markexpr.startswith("browser")  # one built site for all of them
        and options.numprocesses is None
        and not (options.collectonly or options.usepdb)
    ):
        # One more than processors: a fifth of the time tests wait for a process of theirs.
        options.numprocesses = min(8, (os.cpu_count() or 1) + 1)  # xdist itself does the rest
    if options.numprocesses and options.dist == "no" and "slow" not in options.markexpr:
        options.dist = "loadfile"  # a file's fixtures, models and scenarios are then made once


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _worker(config):
        items.sort(key=lambda item: item.path)  # in all of them the same
    for item in items:
        if {"experiments", "studies"} & set(item.path.parts):
            item.add_marker(pytest.mark.slow)
    if "slow" not in config.getoption("markexpr"):
        wanted = _named_alone(config)
        slow = {
            item
            for item in items
            if item.get_closest_marker("slow")
            and not wanted & {item.path, item.path.parent}
            and not (_is_graded() and "labs" in item.path.parts)
        }
        if slow:
            config.hook.pytest_deselected(items=list(slow))
            items[:] = [item for item in items if item not in slow]


def _is_graded() -> bool:
    """Whether a learner's own files are: then no test of a lab is left out."""
    return os.environ.get("LAB_IMPL") == "starter"


def _named_alone(config: pytest.Config) -> set[Path]:
    """The files and the labs' folders named on the command line: all of their tests are wanted."""
    here = config.invocation_params.dir
    words = [str(word).partition("::")[0] for word in config.invocation_params.args]
    paths = [here, *(here / word for word in words if not word.startswith("-"))]
    return {p.resolve() for p in paths if p.is_file() or (p / "lab.yaml").is_file()}


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("engine") and "engine" not in item.config.getoption("markexpr"):
        pytest.skip("starts the real engine for minutes: runs when asked for by -m engine")
    for name, missing in CAPABILITIES.items():
        if item.get_closest_marker(name) and (reason := missing()):
            pytest.skip(reason)


# What a machine may lack. Each probe returns "" when the thing is there, else the reason.


@functools.cache
def _no_torch() -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed (pip install -e '.[torch]')"
    return ""


@functools.cache
def _no_gpu() -> str:
    if _no_torch():
        return "no CUDA GPU: " + _no_torch()
    import torch

    return "" if torch.cuda.is_available() else "no CUDA GPU: torch sees none"


@functools.cache
def _no_upstream() -> str:
    try:
        import vllm.v1.core.sched.scheduler  # noqa: F401
    except Exception as error:  # the real package raises more than ImportError on a bare machine
        return (
            "the pinned vLLM tree is not importable "
            f"({type(error).__name__}: {error}); see conformance/README.md"
        )
    return ""


@functools.cache
def _no_engine() -> str:
    from labkit import environment

    if environment.look(environment.folder(Path(__file__).parent)) is None:
        return "the real engine is not installed (course engine install)"
    return ""


CAPABILITIES = {
    "gpu": _no_gpu,
    "torch": _no_torch,
    "upstream": _no_upstream,
    "engine": _no_engine,
}


@pytest.fixture(scope="session")
def gpu_device() -> Any:
    """The first CUDA device as `torch.device`; skips, with the reason, where there is none."""
    if reason := _no_gpu():
        pytest.skip(reason)
    import torch

    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Chromium, one per process: playwright starts no second loop beside a running one.

    The shell has the browser's engine and no windows: a page opens in a fifth of the time.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("needs chromium on the PATH")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def usual_signals() -> Iterator[None]:
    """Signals as a terminal starts a program with; `nohup` and `&` in a script ignore some."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    if hasattr(signal, "SIGHUP"):
        usual[signal.SIGHUP] = signal.SIG_DFL
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The graded module: `solution.py` or `starter.py` beside the test file.

    Loaded once per test file, by path, under a name of its own, so that two labs never see
    each other's modules. A file that cannot be loaded fails the test with its own error only.
    """
    default = request.path.parent / f"{os.environ.get('LAB_IMPL', 'solution')}.py"
    path = Path(getattr(request, "param", default))
    if not path.is_file():
        pytest.fail(f"there is no file {path}", pytrace=False)
    name = f"_lab_{path.parent.name}_{path.stem}".replace("-", "_")
    try:
        module = load_module(path, name)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        pytest.fail(_import_failure(path, error), pytrace=False)
    yield module
    sys.modules.pop(name, None)


def _import_failure(path: Path, error: BaseException) -> str:
    """One error in a learner's file, without the frames that are not theirs."""
    shown = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in shown.stack if Path(frame.filename) == path]
    where = f", line {frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError) and error.lineno:
        where = f", line {error.lineno}"
    told = "".join(shown.format_exception_only()).rstrip().splitlines()
    text = "\n".join(line for line in told if not line.startswith('  File "'))
    if frames and frames[-1].line:
        text = f"    {frames[-1].line}\n{text}"
    return f"{path.name}{where} cannot be loaded:\n{text}"

"""The worker's Python: grade a lab, run a page's block, call a function of the course.

Promises: a call answers with JSON and never raises; each grading imports the course's modules
anew and leaves those that were there as they were; the blocks of a page share one dict of globals.
Called by `book/play/worker.js`; nothing here needs a browser.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import linecache
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from course.play import limits

Emit = Callable[[str], None]
"""Hears one event, as JSON."""

OWN = ("course.play", "course.learning.runner")
"""Stay loaded from one grading to the next."""
LONGEST_OUTPUT = 1 << 20
"""Characters a block may print; more is cut off."""
QUIET = ("cacheprovider", "debugging", "faulthandler")

_root = Path("/course")
_folders: dict[str, Path] = {}
_originals: dict[str, dict[str, str]] = {}
_pages: dict[str, ModuleType] = {}


def begin(root: str) -> None:
    """Make ready, once: `root` is where the course lies, and the working directory."""
    global _root
    limits.apply()
    _root = Path(root)
    os.chdir(_root)
    instead = str(_root / "course" / "play" / "instead")
    if instead not in sys.path and importlib.util.find_spec("safetensors") is None:
        sys.path.append(instead)


def keep(lab: str, folder: str) -> None:
    """Remember a lab's folder, relative to the root, and what its files say."""
    _folders[lab] = _root / folder
    _originals[lab] = {
        name: (_root / folder / name).read_text(encoding="utf-8")
        for name in ("starter.py", "solution.py")
    }


def call(kind: str, payload: str, emit: Emit) -> str:
    """Do what a message asks for.

    Args:
        kind: "ready", "grade", "block" or "python".
        payload: its arguments, as JSON.
        emit: hears events while it runs.

    Returns:
        JSON of `{"result": ...}` or `{"error": text}`.
    """
    kinds: dict[str, Callable[..., Any]] = {
        "ready": ready, "grade": grade, "block": block, "python": python
    }  # fmt: skip
    try:
        if kind not in kinds:
            raise ValueError(f"kind={kind!r}: need one of {', '.join(kinds)}")
        return json.dumps({"result": kinds[kind](emit, **json.loads(payload))})
    except BaseException as error:
        return json.dumps({"error": _in_a_line(error)})


# ------------------------------------------------------------------ grading


def ready(emit: Emit, engine: bool = False) -> None:
    """Import what stays loaded from one grading to the next, before a grading asks for it.

    Args:
        engine: import the engine as well. Each grading imports it anew, and finds there what it
            imports of Python and numpy.
    """
    wanted = (
        ("mini_vllm", "numpy.random") if engine else ("pytest", "course.learning.runner", "numpy")
    )
    for name in wanted:
        importlib.import_module(name)


def grade(
    emit: Emit,
    lab: str,
    files: dict[str, str] | None = None,
    impl: str = "starter",
    tests: Sequence[str] | None = None,
    timeLimit: float | None = None,
    skip: dict[str, str] | None = None,
    hunt: str | None = None,
) -> dict[str, Any]:
    """Run a lab's tests on its files; events are those of `course.learning.runner.Recorder`.

    Args:
        lab: its id, "02-01".
        files: the text of starter.py or solution.py where it is not the shipped one.
        impl: which of the two is graded.
        tests: test functions to run; None for all.
        timeLimit: seconds; the page that started the worker keeps the clock.
        skip: test functions that cannot run in a page, and why.
        hunt: the reader's own tests: they run instead, on the reference and every wrong solution.

    Returns:
        `status`, pytest's own exit status; `seconds`; and, where the tests could not be run,
        `output`, what pytest said.
    """
    import pytest

    from course.learning.runner import UNUSED, Recorder

    if impl not in ("starter", "solution"):
        raise ValueError(f"impl={impl!r}: need starter or solution")
    folder, texts = _folders[lab], {**_originals[lab], **(files or {})}
    if unknown := sorted(texts.keys() - _originals[lab].keys()):
        raise ValueError(f"files names {unknown[0]!r}: need starter.py or solution.py")
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    test_file = folder / "test_lab.py"
    variants: dict[str, dict[str, Any]] = {}
    if hunt is not None:
        from course.play import hunting

        test_file, variants = hunting.variants(folder, lab, hunt)
    out = io.StringIO()
    began = time.perf_counter()
    with _apart(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        os.environ["LAB_IMPL"] = impl
        status = pytest.main(
            [
                *([f"{test_file}::{name}" for name in tests] if tests else [str(test_file)]),
                "-q",
                *(f"-pno:{name}" for name in (*QUIET, *UNUSED)),
                "--no-header",
                "--tb=no",
                f"--rootdir={_root}",
                f"--config-file={_root / 'pyproject.toml'}",
            ],
            plugins=[Recorder(_Lines(emit), variants), _Skips(skip or {})],
        )
    for file in (*([test_file] if variants else ()), *(each["file"] for each in variants.values())):
        Path(file).unlink(missing_ok=True)
    result = {"status": int(status), "seconds": time.perf_counter() - began}
    return result if status in (0, 1) else {**result, "output": out.getvalue()[-4000:]}


class _Skips:
    """A plugin of pytest: the named tests are skipped, each with its reason."""

    def __init__(self, reasons: dict[str, str]) -> None:
        self.reasons = reasons

    def pytest_runtest_setup(self, item: Any) -> None:
        import pytest

        if reason := self.reasons.get(getattr(item, "originalname", item.name)):
            pytest.skip(reason)


class _Lines(io.StringIO):
    """What a `Recorder` writes to: each line is an event."""

    def __init__(self, emit: Emit) -> None:
        super().__init__()
        self.emit = emit

    def write(self, text: str) -> int:
        self.emit(text)
        return len(text)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Modules of the course are imported anew inside, and what was there is there again after."""
    before = _of_course()
    environment, path, folder = dict(os.environ), list(sys.path), Path.cwd()
    hooks, filters = list(sys.meta_path), warnings.filters[:]
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in _of_course():
            del sys.modules[name]
        sys.modules.update(before)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:], sys.meta_path[:] = path, hooks
        warnings.filters[:] = filters  # type: ignore[index]
        linecache.clearcache()
        gc.collect()


def _of_course() -> dict[str, ModuleType]:
    """The loaded modules that are the course's, a lab's or a test's, and none of `OWN`."""
    return {name: module for name, module in sys.modules.items() if _is_course(name, module)}


def _is_course(name: str, module: ModuleType | None) -> bool:
    if f"{name}.".startswith(tuple(f"{own}." for own in OWN)):
        return False
    if name.startswith(("_lab_", "_loaded", "phase-")):  # the last: packages that pytest makes up
        return True
    return str(getattr(module, "__file__", "")).startswith(f"{_root}{os.sep}")


# ------------------------------------------------------------------ blocks of a page


def block(emit: Emit, page: str, index: int, code: str) -> dict[str, Any]:
    """Run a block of a page in the state that the page's blocks share.

    What is printed is told as it comes, by events `{"event": "out", "text"}`.

    Returns:
        `text`, everything printed; `error`, the traceback from the block's own frames on, or None.
    """
    module = _pages.setdefault(page, ModuleType("__main__"))
    name = f"block {index}"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    out = _Streaming(emit)
    ours, sys.modules["__main__"] = sys.modules["__main__"], module
    error = None
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # this Python is newer than a reader's
        try:
            exec(compile(code, name, "exec"), module.__dict__)
        except BaseException as failure:
            error = _traceback(failure, name)
        finally:
            sys.modules["__main__"] = ours
    out.flush()
    return {"text": "".join(out.parts), "error": error}


class _Streaming(io.TextIOBase):
    """A standard output that is told line by line while it is written, up to a bound."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.parts: list[str] = []
        self.left = LONGEST_OUTPUT
        self.waiting = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if len(text) > self.left:
            raise OSError(f"more than {LONGEST_OUTPUT:,} characters were printed")
        self.left -= len(text)
        self.parts.append(text)
        lines, newline, rest = (self.waiting + text).rpartition("\n")
        self._tell(lines + newline)
        self.waiting = rest
        return len(text)

    def flush(self) -> None:
        self._tell(self.waiting)
        self.waiting = ""

    def _tell(self, text: str) -> None:
        if text:
            self.emit(json.dumps({"event": "out", "text": text}))


def _traceback(failure: BaseException, name: str) -> str:
    """A traceback that begins in the block called `name`."""
    trace = failure.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    shown = failure.with_traceback(trace)
    return "".join(traceback.format_exception(type(shown), shown, trace)).rstrip()


# ------------------------------------------------------------------ functions of the course


def python(
    emit: Emit,
    module: str,
    function: str,
    arguments: dict[str, Any] | None = None,
    timeLimit: float | None = None,
) -> Any:
    """Call a public function of a module of the course with JSON arguments; its JSON result.

    Args:
        timeLimit: seconds; the page that started the worker keeps the clock.
    """
    package = module.partition(".")[0]
    if package not in ("course", "mini_vllm", "labkit", "conformance") or function[:1] == "_":
        raise ValueError(f"{module}.{function}: need a public function of the course")
    return getattr(importlib.import_module(module), function)(**(arguments or {}))


def _in_a_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()

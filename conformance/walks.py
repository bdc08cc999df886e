"""A function of vLLM's, line by line: which lines ran on a workload, and what each name held.

Promises: lines and values are those of a run of the pinned tree's own code, under `sys.settrace`:
of a recorded workload on its scheduler core, or of one function on arguments that the walk gives.
A value is kept where it is short and plain, or where it is a request or blocks, by their ids.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from conformance import recording
from conformance.real_core import core_of
from conformance.real_core.places import tree_of
from conformance.recorders import again

RECORDINGS = Path(__file__).parent / "recordings"
MOST_EVENTS, MOST_CALLS, MOST_TEXT = 150, 4000, 96
"""Lines of a walk; calls that are looked at for one; characters of a value."""

Values = dict[str, str]

_HASHES: dict[bytes, str] = {}
"""Those that a walk has shown, by what they are called: in the order in which they came."""


@dataclass(frozen=True, slots=True)
class Walk:
    """One function on one workload."""

    path: str
    symbol: str
    said: str
    """What happens in it, in a sentence."""
    profile: str = ""
    """The recording whose workload is run; "" where `call` runs the function alone."""
    number: int = 0
    """Which workload of the file, from 0."""
    state: Mapping[str, str] = field(default_factory=dict)
    """More to show, by name: expressions of the function's own names."""
    call: Callable[[Callable[..., Any]], Any] | None = None
    """Calls the function, which is given; with `names` for what it does not define itself."""
    names: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Walked:
    """What was recorded: at each event the line that comes next, and all values before it."""

    events: list[tuple[int, Values]] = field(default_factory=list)
    returns: str = ""

    @property
    def lines(self) -> set[int]:
        return {line for line, _ in self.events}


def record(walk: Walk) -> Walked:
    """Run it; of several calls the first that goes through the most lines and returns something.

    Raises:
        ValueError: the function did not run, or went through more than `MOST_EVENTS` lines.
    """
    _HASHES.clear()
    calls: list[Walked] = []
    codes: set[CodeType] = set()
    last = walk.symbol.rpartition(".")[2]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_name != last or not code.co_filename.endswith(walk.path):
            return None
        if code.co_qualname != walk.symbol or len(calls) >= MOST_CALLS:
            return None
        codes.add(code)
        made = Walked()
        calls.append(made)

        def line(inner: FrameType, what: str, result: Any) -> Any:
            if what == "line" and len(made.events) <= MOST_EVENTS:
                made.events.append((inner.f_lineno, _values(inner, walk)))
            elif what == "return":
                made.events.append((0, _values(inner, walk)))
                made.returns = brief(result) or type(result).__name__
            return line

        return line

    run = _runner(walk)
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    calls = [made for made in calls if len(made.events) <= MOST_EVENTS]
    if not calls:
        raise ValueError(f"{walk.path} {walk.symbol}: no call of at most {MOST_EVENTS} lines")
    dull = ("None", "0", "False", "[]")
    chosen = max(calls, key=lambda made: (len(made.lines), made.returns not in dull))
    return _renumbered(chosen)


def _renumbered(made: Walked) -> Walked:
    """With the hashes called by the order in which this one call shows them."""
    seen: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        return seen.setdefault(match[0], f"hash {len(seen) + 1}")

    def mended(text: str) -> str:
        return re.sub(r"hash \d+", name, text)

    events = [
        (line, {key: mended(text) for key, text in values.items()}) for line, values in made.events
    ]
    return Walked(events, mended(made.returns))


def _runner(walk: Walk) -> Callable[[], Any]:
    if walk.call is not None:
        function, call = lifted(walk.path, walk.symbol, walk.names), walk.call
        return lambda: call(function)
    path = RECORDINGS / f"{walk.profile}.jsonl.gz"
    kept = next(entry for n, entry in enumerate(recording.read(path)) if n == walk.number)
    core = core_of()
    return lambda: again.record(kept, core)


def lifted(path: str, symbol: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of the pinned tree on its own, its lines and its qualified name as there.

    Args:
        names: what its module would give it.
    """
    file = tree_of(recording.UPSTREAM["version"]) / path
    module = ast.parse(file.read_text(encoding="utf-8"))
    body: list[ast.stmt] = module.body
    for name in symbol.split("."):
        found = next(n for n in body if getattr(n, "name", "") == name)
        body = getattr(found, "body", [])
    assert isinstance(found, ast.FunctionDef)
    found.decorator_list = []
    found.returns = None
    for argument in (*found.args.args, *found.args.kwonlyargs):
        argument.annotation = None
    outer = symbol.rpartition(".")[0]
    wrapped: ast.stmt = found
    if outer:  # in a class of that name, for the qualified name
        wrapped = ast.ClassDef(outer, [], [], [found], [])
        ast.copy_location(wrapped, found)
    space = dict(names)
    exec(compile(ast.Module([wrapped], []), str(file), "exec"), space)
    holder = space[outer] if outer else space[symbol]
    return getattr(holder, symbol.rpartition(".")[2]) if outer else holder


def _values(frame: FrameType, walk: Walk) -> Values:
    found = {}
    for name, value in frame.f_locals.items():
        if text := brief(value):
            found[name] = text
    for name, of in walk.state.items():
        with contextlib.suppress(Exception):  # what it reads is not there yet
            found[name] = brief(eval(of, frame.f_globals, dict(frame.f_locals)))
    return {name: text for name, text in found.items() if text and "timestamp" not in name}


def brief(value: Any) -> str:
    """A value in few signs; "" for what has no short form."""
    text = _brief(value)
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "\u2026"


def _brief(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value.name)
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, bytes):  # a hash, whose seed is another one in each process
        return _HASHES.setdefault(value, f"hash {len(_HASHES) + 1}")
    if isinstance(value, set | frozenset):
        inner = [_brief(each) for each in sorted(value, key=str)]
        return "{" + ", ".join(inner) + "}" if all(inner) and inner else "{}" if not value else ""
    if isinstance(value, np.ndarray):
        return _brief(value.tolist()) if value.size <= 24 else ""
    if isinstance(value, np.generic):
        return _brief(value.item())
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple | deque):
        inner = [_brief(each) for each in list(value)[:40]]
        return f"[{', '.join(inner)}]" if all(inner) else ""
    if isinstance(value, dict):
        pairs = [(_brief(key), _brief(each)) for key, each in list(value.items())[:20]]
        plain = all(key and each for key, each in pairs)
        return "{" + ", ".join(f"{key}: {each}" for key, each in pairs) + "}" if plain else ""
    held = getattr(value, "__dict__", {}) or {
        name: getattr(value, name)
        for name in getattr(value, "__slots__", ())
        if hasattr(value, name)
    }
    if "request_id" in held:
        return str(held["request_id"])
    if "block_id" in held:
        return f"block {held['block_id']}"
    if is_dataclass(value) and not isinstance(value, type):
        pairs = [(name, _brief(each)) for name, each in held.items()]
        if pairs and len(pairs) < 8 and all(text for _, text in pairs):
            return f"{type(value).__name__}({', '.join(f'{n}={text}' for n, text in pairs)})"
    return ""

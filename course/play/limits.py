"""What a page's Python lacks, put right before anything else is imported.

Promises: nothing is changed where it is not missing; a text of JSON too deep for the small stack of
a page raises RecursionError, as elsewhere, and does not end Python; `asyncio.run` waits in place,
without sockets and threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.abc
import importlib.machinery
import json
import re
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

DEEPEST = 900
"""Levels of JSON that are read: CPython's own bound, less what the caller is in already."""

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]')


def apply() -> None:
    """Do it; only in a page."""
    if sys.platform != "emscripten":
        return
    if not hasattr(time, "thread_time"):
        time.thread_time = time.process_time  # there is one thread
    _bound_json()
    _without_processes()
    concurrent.futures.ThreadPoolExecutor = InPlaceExecutor  # type: ignore[misc]
    sys.meta_path.insert(0, QuickProducts())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        asyncio.set_event_loop_policy(InPlacePolicy())
        asyncio._set_running_loop(None)  # the page's own, which never waits in place


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise OSError("a page is one process without sockets: run this on your machine")


def _without_processes() -> None:
    """Let `multiprocessing` be imported; a second process, or a socket, fails when it is used."""
    missing: dict[str, dict[str, Any]] = {
        "_posixshmem": {"shm_open": _refused, "shm_unlink": _refused},
        "_multiprocessing": {
            "sem_unlink": _refused,
            "SemLock": type("SemLock", (), {"__new__": _refused}),
        },
    }
    for name, parts in missing.items():
        sys.modules.setdefault(name, ModuleType(name)).__dict__.update(parts)
    for method in ("bind", "connect", "connect_ex", "listen"):
        setattr(socket.socket, method, _refused)


def _bound_json() -> None:
    usual = json.JSONDecoder.raw_decode

    def bounded(self: json.JSONDecoder, s: str, idx: int = 0) -> tuple[Any, int]:
        if depth_of(s, idx) > DEEPEST:
            raise RecursionError("maximum recursion depth exceeded while decoding JSON")
        return usual(self, s, idx)

    json.JSONDecoder.raw_decode = bounded  # type: ignore[method-assign]


def depth_of(text: str, start: int = 0) -> int:
    """How deep the value of JSON that begins at `start` is nested, if that can be too deep.

    Returns:
        its depth, or 0 where there are too few brackets to matter.
    """
    if text.count("[", start) + text.count("{", start) <= DEEPEST:
        return 0
    depth = deepest = 0
    for found in _BRACKETS.finditer(text, start):
        mark = found[0]
        if mark in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in "]}":
            depth -= 1
            if depth <= 0:
                break
    return deepest


class _Waiting:
    """In the place of a selector: there is nothing to hear of, so it only lets time pass."""

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError(
                "every task of the event loop waits, and nothing on a page can wake one of them"
            )
        if timeout > 0:
            time.sleep(timeout)
        return []


class InPlaceLoop(asyncio.BaseEventLoop):
    """asyncio's own loop, without sockets, processes and threads."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Waiting()

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class InPlacePolicy(asyncio.DefaultEventLoopPolicy):
    """New loops wait in place."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return InPlaceLoop()


class InPlaceExecutor(concurrent.futures.Executor):
    """In the place of a pool of threads: what is submitted is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        done.set_running_or_notify_cancel()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


class QuickProducts(importlib.abc.MetaPathFinder):
    """The products of the model's layers by `einsum`: numpy has no BLAS in a page.

    There `x @ w` is a plain loop down the columns; `einsum` goes along the rows, and takes 0.4 of
    the time for 20 tokens of byte-llama's layers, measured in Node.
    """

    module = "mini_vllm.models.transformer"

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.loader:
            usual = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                usual(module)
                module.Linear.__call__ = product

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def product(self: Any, x: np.ndarray) -> np.ndarray:
    """`Linear.__call__`: [num_tokens, in_features] to [num_tokens, out_features]."""
    import numpy as np  # not before something needs it: a page begins the sooner

    y = np.einsum("ik,kj->ij", x, self.weight)
    if self.bias is not None:
        y += self.bias
    return y

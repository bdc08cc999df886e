"""Coroutines that wait for nothing, run without an event loop: thousands are compared in a test."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """What it returns.

    Raises:
        RuntimeError: it waits for something.
    """
    try:
        coroutine.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    coroutine.close()
    raise RuntimeError("the coroutine waits for something")

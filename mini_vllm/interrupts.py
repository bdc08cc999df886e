"""Ctrl-C waits until the state is whole.

Promises: inside `held_back()` a SIGINT is noted and delivered at the end; outside the main thread,
where Python delivers none, nothing happens. Mirrors the deferral around
`vllm/v1/engine/core.py:1093` `EngineCoreProc.run_engine_core`'s signal handling.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Deliver a SIGINT of this block after it."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    noted: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: noted.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if noted:
            handler(*noted[0])

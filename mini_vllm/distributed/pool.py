"""The ranks as processes: started, called, watched, ended.

Promises R7: the first rank that dies, fails or does not answer is named, and all others end within
two seconds; when the pool is closed, collected or its process ends, no rank and no shared memory is
left. Mirrors `vllm/v1/executor/multiproc_executor.py:102` `MultiprocExecutor`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import secrets
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from mini_vllm.checks import whole
from mini_vllm.distributed import worker
from mini_vllm.distributed.autopsy import (
    LAST_WORDS,
    Message,
    RankError,
    first_cause,
    next_message,
)
from mini_vllm.distributed.config import MOST_RANKS, TRANSPORTS
from mini_vllm.distributed.transport import shared_memory_ends
from mini_vllm.interrupts import held_back

_START_S = 120.0
_GRACE_S = 0.5
"""How long the others may still say what they waited for, once a rank is gone."""


_PIPE_BYTES = 1 << 12
"""What a pipe surely holds."""


class RankPool:
    """Processes that are connected with each other and wait for calls."""

    def __init__(
        self, world_size: int, transport: str = "shared_memory", timeout_s: float = 60.0
    ) -> None:
        """Start them; returns when all are connected.

        Args:
            world_size: how many.
            transport: "shared_memory" or "sockets".
            timeout_s: how long a rank waits for another.

        Raises:
            ValueError: a size or a transport that there is not.
            RankError: a rank did not start.
        """
        whole("world_size", world_size, 1, MOST_RANKS)
        if transport not in TRANSPORTS:
            raise ValueError(f"transport={transport!r}: need one of {', '.join(TRANSPORTS)}")
        self.world_size, self.transport, self.timeout_s = world_size, transport, timeout_s
        self._ranks = _Ranks(world_size, transport, timeout_s)
        self._finalizer = weakref.finalize(self, _Ranks.end, self._ranks)
        with held_back():
            self._ranks.start()
        try:
            self._ranks.connect()
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the ranks still take calls."""
        return self._finalizer.alive and self._ranks.failure is None

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid or 0 for process in self._ranks.processes]

    @property
    def bytes_told(self) -> int:
        """Bytes written to the ranks' pipes so far, calls and their arguments."""
        return self._ranks.bytes_told

    def call(self, method: str, *args: Any, answers: Sequence[int] | None = None) -> int:
        """Tell every rank to do something; the number of the call.

        Args:
            method: of `worker.Worker`.
            args: its arguments; pickled once, sent to each.
            answers: the ranks that shall answer; None: all.

        Raises:
            RankError: the ranks have ended.
        """
        return self._ranks.call(method, args, None if answers is None else list(answers))

    def result(self, number: int, timeout_s: float | None = None) -> dict[int, Any]:
        """The answers to a call, by rank.

        Raises:
            RankError: a rank is gone or late; all have been ended.
            ValueError: a rank refused what it was told to load.
        """
        return self._ranks.result(number, timeout_s or self.timeout_s + 2 * _GRACE_S)

    def forget(self) -> None:
        """Give up all calls under way: the ranks make them, the answers are dropped."""
        self._ranks.forget()

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method in every rank; all answers, by rank."""
        answers = self.result(self.call(method, *args))
        return [answers[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End all ranks; calling it again does nothing."""
        self._finalizer()


class _Ranks:
    """What the pool owns. It must not refer to the pool, or that would never be collected."""

    def __init__(self, world_size: int, transport: str, timeout_s: float) -> None:
        self.world_size, self.transport, self.timeout_s = world_size, transport, timeout_s
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.bytes_told = 0
        self.failure: RankError | None = None
        self._segment: Any = None
        self._number = self._telling = 0
        self._wanted: dict[int, list[int]] = {}
        self._answers: dict[int, dict[int, Any]] = {}
        self._inbox: queue.SimpleQueue[tuple[int, Message] | None] = queue.SimpleQueue()
        self._wake_r, self._wake_w = os.pipe()
        self._ending = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._listener: threading.Thread | None = None

    # ------------------------------------------------------------------ start

    def start(self) -> None:
        """Start the processes; their ends of pipes and sockets are closed here."""
        context = multiprocessing.get_context("spawn")
        ends: list[Any] = [None] * self.world_size
        if self.transport == "shared_memory":
            self._segment, ends = shared_memory_ends(self.world_size)
        secret = secrets.token_bytes(16)
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # or N ranks use N times all cores
        try:
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=worker.main,
                    args=(rank, theirs, ends[rank], secret, self.timeout_s),
                    name=f"rank {rank}",
                    daemon=True,
                )
                self.pipes.append(ours)
                self.processes.append(process)
                with without_main():
                    process.start()
                theirs.close()
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            for end in ends:
                for sock in end.socks.values() if end is not None else ():
                    sock.close()
        self._listener = threading.Thread(target=self._listen, daemon=True, name="ranks")
        self._listener.start()

    def connect(self) -> None:
        """Wait until every rank has reached every other."""
        deadline = time.monotonic() + _START_S
        if self.transport == "sockets":
            ports = self._gather("port", deadline)
            for pipe in self.pipes:
                pipe.send([ports[rank] for rank in range(self.world_size)])
        self._gather("ready", deadline)
        if self._segment is not None:
            self._segment.close()
            self._segment.unlink()
            self._segment = None

    def _gather(self, kind: str, deadline: float) -> dict[int, Any]:
        got: dict[int, Any] = {}
        while len(got) < self.world_size:
            rank, (said, number, content) = self._next(deadline)
            if said == kind:
                got[rank] = number if kind == "ready" else content
        return got

    # ------------------------------------------------------------------ calls

    def call(self, method: str, args: tuple[Any, ...], answers: list[int] | None) -> int:
        """See `RankPool.call`. A Ctrl-C waits: half a message would be the end of a pipe."""
        if self.failure is not None:
            raise self.failure
        if self._ending:
            raise RuntimeError("RankPool.call: this pool is closed; open a new one")
        with held_back():
            self._number += 1
            number = self._number
            message = pickle.dumps((number, method, args, answers), protocol=5)
            self._wanted[number] = list(range(self.world_size)) if answers is None else answers
            self._answers[number] = {}
            watch = threading.Timer(self.timeout_s, self._not_taken)
            if len(message) > _PIPE_BYTES:  # then a rank that does not read keeps us here
                watch.start()
            for rank, pipe in enumerate(self.pipes):
                self._telling = rank
                try:
                    pipe.send_bytes(message)
                except (OSError, TypeError):  # the latter where it was closed meanwhile
                    break  # the listener has seen it, or will
                self.bytes_told += len(message)
            watch.cancel()
        return number

    def _not_taken(self) -> None:
        """A rank has not read what it was told."""
        self._fail(RankError(self._telling, "does not take what it is told"))

    def result(self, number: int, timeout_s: float) -> dict[int, Any]:
        """See `RankPool.result`."""
        deadline = time.monotonic() + timeout_s
        refused = ""
        while len(self._answers[number]) < len(self._wanted[number]):
            rank, (kind, of, content) = self._next(deadline)
            if of in self._answers:  # or it was given up
                self._answers[of][rank] = content
                if kind == "refused":
                    refused = content
        del self._wanted[number]
        answers = self._answers.pop(number)
        if refused:
            raise ValueError(refused)
        return answers

    def forget(self) -> None:
        """See `RankPool.forget`."""
        self._wanted.clear()
        self._answers.clear()

    def _next(self, deadline: float) -> tuple[int, Message]:
        """The next message of any rank."""
        while True:
            if self.failure is not None:
                raise self.failure
            try:
                message = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self._give_up()
                continue
            if message is not None:
                return message

    def _give_up(self) -> None:
        """No rank has answered in time or complained: name the one that is stuck."""
        with held_back():
            stuck = next((rank for wanted in self._wanted.values() for rank in wanted), 0)
            self._fail(RankError(stuck, "did not answer in time"))

    # ------------------------------------------------------------------ watching

    def _listen(self) -> None:
        """Pass messages on; when a rank is gone, find out which was first, and end all."""
        open_pipes = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while not self._ending:
            for ready in wait([*open_pipes, self._wake_r]):
                if not isinstance(ready, Connection) or self._ending:
                    return
                rank, message = open_pipes[ready], next_message(ready)
                if message[0] in LAST_WORDS:
                    self._autopsy(rank, message, open_pipes)
                    return
                self._inbox.put((rank, message))

    def _autopsy(self, rank: int, message: Any, open_pipes: dict[Connection, int]) -> None:
        """From the first sign that something is wrong to the rank that was first."""
        said = {rank: message}
        deadline = time.monotonic() + _GRACE_S
        waiting = {pipe: r for pipe, r in open_pipes.items() if r != rank}
        if message[0] in ("gone", "failed"):
            waiting.clear()
        while waiting and (left := deadline - time.monotonic()) > 0 and not self._ending:
            for ready in wait([*waiting, self._wake_r], timeout=left):
                if not isinstance(ready, Connection):
                    return
                message = next_message(ready)
                if message[0] in LAST_WORDS:
                    said.setdefault(waiting.pop(ready), message)
                if message[0] in ("gone", "failed"):
                    waiting.clear()
                    break
        self._fail(first_cause(said, self._how_it_ended))

    def _how_it_ended(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(timeout=1.0)
        code = process.exitcode
        if code is not None and code < 0:
            return f"(pid {process.pid}) was killed by {signal.Signals(-code).name}"
        return f"(pid {process.pid}) ended with exit code {code}"

    def _fail(self, failure: RankError) -> None:
        self.failure = self.failure or failure
        self.end()

    def end(self) -> None:
        """End every process, the gentle way first, and free what is shared."""
        with self._lock:
            first, self._ending = not self._ending, True
        if not first:
            if self._listener is not threading.current_thread():
                self._ended.wait()
            return
        os.write(self._wake_w, b"x")
        if self._listener is not None and self._listener is not threading.current_thread():
            self._listener.join()
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + (0.0 if self.failure is not None else 0.5)
        for process in self.processes:
            if process.pid is not None:
                process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            if process.pid is not None and process.is_alive():
                process.kill()
        for process in self.processes:
            if process.pid is not None:
                process.join()
        if self._segment is not None:
            self._segment.close()
            self._segment.unlink()
            self._segment = None
        os.close(self._wake_r)
        os.close(self._wake_w)
        self._inbox.put(None)
        self._ended.set()


@contextmanager
def without_main() -> Iterator[None]:
    """Start a process that does not import the program's main module, as spawned ones do.

    Ranks need nothing of it, so a script may start them without `if __name__ == "__main__":`.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main

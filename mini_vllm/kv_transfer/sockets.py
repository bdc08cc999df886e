"""Messages over TCP on this machine: a thread that answers, and threads that read.

Promises: every wait has an end, every queue a length, and `close` leaves neither thread nor socket;
a peer that is not ours, speaks another version, sends too much or has another model is refused, and
`refusals` says by which error. The addresses are loopback ones: nothing here is encrypted, and
no peer proves who it is.
"""

from __future__ import annotations

import ipaddress
import math
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from mini_vllm.kv_transfer.transfers import Load
from mini_vllm.kv_transfer.wire import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    EndedEarlyError,
    IncompatibleError,
    Kind,
    Message,
    WireError,
    decode,
    encode,
    length_of,
)

MOST_CONTROL = 1 << 16
"""Bytes of a message that a producer takes: they are all short."""
_TICK_S = 0.2
"""How often a thread that waits looks whether it is to end."""
_LATER_S = 0.001
"""How often it looks whether a layer is computed."""


def check_host(host: Any) -> str:
    """Raises ValueError unless it is an address of this machine alone."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ValueError(f"host={host!r}: need a loopback address, such as 127.0.0.1")
    return str(host)


class Stream:
    """Messages on a connected socket, each whole by its time, however few bytes a packet has."""

    def __init__(
        self, sock: socket.socket, most: int = MAX_PAYLOAD, timeout_s: float = math.inf,
        deadline: float = math.inf,
    ) -> None:  # fmt: skip
        """Wrap a socket.

        Args:
            most: bytes of a payload.
            timeout_s: seconds that one message may take.
            deadline: `time.monotonic` by which all of them must have come or gone.
        """
        self.sock, self.most, self.timeout_s, self.deadline = sock, most, timeout_s, deadline

    def send(self, message: Message) -> None:
        """Send all of it. Raises OSError, or WireError if it is too long."""
        self._wait_until(self._end(), "a message has not gone")
        self.sock.sendall(encode(message))

    def receive(self) -> Message:
        """The next message, all of it. Raises WireError by what is wrong, or OSError."""
        end = self._end()
        header = self._read(HEADER_BYTES, end)
        payload = self._read(length_of(header, self.most), end)
        return decode(header, payload)

    def _end(self) -> float:
        return min(self.deadline, time.monotonic() + self.timeout_s)

    def _wait_until(self, end: float, what: str) -> None:
        """No call of the socket takes longer than this. Raises TimeoutError: it is too late."""
        if end < math.inf:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{what} before the deadline")
            self.sock.settimeout(left)

    def _read(self, count: int, end: float) -> bytes:
        """`count` bytes, or fewer where the stream ends."""
        parts, missing = [], count
        while missing:
            self._wait_until(end, f"{missing} of {count} bytes had not come")
            part = self.sock.recv(min(missing, 1 << 20))
            if not part:
                break
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


class Answers(Protocol):
    """What a listener answers from: an `Outbox`, or another kind of shelf."""

    @property
    def fingerprint(self) -> Any:
        """Its `check` refuses peers, its `as_dict` is said to them."""
        ...

    def answer(self, message: Message) -> Iterator[Message | None]:
        """What a peer is answered; None: the rest is not there yet. Raises WireError at what is
        not a question."""
        ...


class SocketTransport:
    """A listener for those who read here, and connections to those we read from."""

    def __init__(self, outbox: Answers, extra: Mapping[str, Any]) -> None:
        """Listen.

        Args:
            outbox: what peers may read.
            extra: `host`, `port` (0: a free one), `load_timeout_s`, `max_transfers`.

        Raises:
            ValueError: a host that is not loopback, or a port that is taken.
        """
        host, port = check_host(extra["host"]), extra["port"]
        self.outbox, self.timeout_s = outbox, extra["load_timeout_s"]
        self.refusals: deque[str] = deque(maxlen=100)
        """Why peers were refused, the last ones."""
        self._closed = threading.Event()
        self._news: queue.Queue[tuple[int, Message | Exception]] = queue.Queue(maxsize=256)
        self._wanted: set[int] = set()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(extra["max_transfers"] + 1)  # a consumer's DONE as well
        self._readers = ThreadPoolExecutor(extra["max_transfers"], "kv-read")
        self._done = ThreadPoolExecutor(1, "kv-done")
        self._answering: list[threading.Thread] = []
        try:
            self._listener = socket.create_server((host, port), backlog=16)
        except OSError as error:
            raise ValueError(f"port={port!r}: cannot listen on {host}: {error}") from error
        self._listener.settimeout(_TICK_S)
        self._accepting = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._accepting.start()

    def address(self) -> Mapping[str, Any]:
        host, port = self._listener.getsockname()[:2]
        return {"remote_host": host, "remote_port": port}

    # ------------------------------------------------------------------ the consumer's side

    def read(self, number: int, load: Load) -> None:
        self._wanted.add(number)
        self._readers.submit(self._read, number, load)

    def done(self, remote: Mapping[str, Any], number: int | None = None) -> None:
        if number is not None:
            self._wanted.discard(number)
        if not self._closed.is_set():
            self._done.submit(self._say_done, remote)

    def poll(self) -> Iterable[tuple[int, Message | Exception]]:
        with suppress(queue.Empty):
            while True:
                yield self._news.get_nowait()

    def wait(self, seconds: float) -> None:
        with self._news.not_empty:
            if not self._news.queue:
                self._news.not_empty.wait(seconds)

    def forget(self) -> None:
        self._wanted = set()
        for _ in self.poll():
            pass

    def _read(self, number: int, load: Load) -> None:
        """Ask for one load and hand its messages over."""
        if number not in self._wanted:
            return  # it has ended while every reader was busy
        remote = load.remote
        try:
            with self._connect(remote) as stream:
                stream.send(Message(Kind.READ, {
                    "request_id": remote["remote_request_id"], "first": load.first,
                    "prompt_hash": remote["prompt_hash"],
                }))  # fmt: skip
                message = stream.receive()
                while self._tell(number, message) and message.kind == Kind.LAYER:
                    message = stream.receive()
        except (WireError, OSError) as error:
            self._tell(number, error)

    def _tell(self, number: int, news: Message | Exception) -> bool:
        """Hand something over as soon as there is room; whether it is still wanted."""
        while not self._closed.is_set() and number in self._wanted:
            with suppress(queue.Full):
                self._news.put((number, news), timeout=_TICK_S)
                return True
        return False

    def _say_done(self, remote: Mapping[str, Any]) -> None:
        with suppress(WireError, OSError), self._connect(remote) as stream:  # else its lease ends
            stream.send(Message(Kind.DONE, {"request_id": remote["remote_request_id"]}))
            stream.sock.shutdown(socket.SHUT_WR)
            stream.sock.recv(1)

    def _connect(self, remote: Mapping[str, Any]) -> _Connection:
        """A peer that has said who it is. Raises WireError, OSError."""
        try:
            host = check_host(remote["remote_host"])
        except ValueError as error:
            raise WireError(str(error)) from error
        deadline = time.monotonic() + self.timeout_s
        sock = socket.create_connection((host, remote["remote_port"]), timeout=self.timeout_s)
        connection = _Connection(self, Stream(sock, deadline=deadline))
        try:
            self._greet(connection.stream)
            theirs = connection.stream.receive()
            if theirs.kind == Kind.GONE:
                raise IncompatibleError(str(theirs.fields.get("why")))
            self._check(theirs)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, stream: Stream) -> None:
        stream.send(Message(Kind.HELLO, self.outbox.fingerprint.as_dict()))

    def _check(self, hello: Message) -> None:
        if hello.kind != Kind.HELLO:
            raise WireError(f"the peer sent {hello.kind.name}: need HELLO first")
        self.outbox.fingerprint.check(hello.fields)

    # ------------------------------------------------------------------ the producer's side

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed; or no file is left for another peer, for now
                self._closed.wait(_TICK_S)
                continue
            self._answering = [thread for thread in self._answering if thread.is_alive()]
            if not self._slots.acquire(blocking=False):
                self.refusals.append("TooManyPeers: every slot answers another")
                sock.close()
                continue
            thread = threading.Thread(target=self._answer, args=(sock,), daemon=True)
            self._answering.append(thread)
            thread.start()

    def _answer(self, sock: socket.socket) -> None:
        """Serve one peer until it has nothing more to ask."""
        try:
            stream = Stream(sock, MOST_CONTROL, self.timeout_s)
            with _Connection(self, stream):
                hello = stream.receive()
                try:
                    self._check(hello)
                except IncompatibleError as error:
                    stream.send(Message(Kind.GONE, {"why": f"{error}"}))
                    raise
                self._greet(stream)
                while not self._closed.is_set():
                    for answer in self.outbox.answer(stream.receive()):
                        if answer is not None:
                            stream.send(answer)
                        elif self._closed.wait(_LATER_S):
                            return
        except EndedEarlyError as error:
            if not str(error).startswith("the stream ended before"):
                self.refusals.append(f"EndedEarlyError: {error}")
        except WireError as error:
            self.refusals.append(f"{type(error).__name__}: {error}")
        except OSError:
            pass  # the peer is gone
        finally:
            self._slots.release()

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Close every socket and end every thread."""
        self._closed.set()
        self._listener.close()
        with self._lock:
            for sock in self._open:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._readers.shutdown(cancel_futures=True)
        self._done.shutdown(cancel_futures=True)
        self._accepting.join()
        for thread in self._answering:
            thread.join()


class _Connection:
    """A socket that `close` of its transport ends."""

    def __init__(self, transport: SocketTransport, stream: Stream) -> None:
        self.transport, self.stream, self.sock = transport, stream, stream.sock
        with transport._lock:
            transport._open.add(self.sock)
        if transport._closed.is_set():
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Stream:
        return self.stream

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with self.transport._lock:
            self.transport._open.discard(self.sock)
        self.sock.close()

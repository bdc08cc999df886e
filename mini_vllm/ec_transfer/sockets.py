"""Rows from an encoder process, over a loopback socket.

    consumer -> producer: HELLO, HAS a picture        producer: HELD, or GONE
    consumer -> producer: HELLO, READ a picture       producer: ROWS, or GONE

Promises: an exchange ends at a deadline, however slowly its peer sends, and a peer that failed is
not asked again for a while. What is not ours, of another model, too long, damaged or of another
picture is refused before it is used. A producer keeps `ec_buffer_size` bytes and drops the oldest.
The messages and the listener are those of `kv_transfer`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mini_vllm.checks import number, whole
from mini_vllm.ec_transfer.base import (
    ECConnectorBase,
    ECConnectorRole,
    LoadError,
    MMMeta,
    RowsOf,
)
from mini_vllm.ec_transfer.config import ECTransferConfig
from mini_vllm.kv_transfer.sockets import SocketTransport, Stream, check_host
from mini_vllm.kv_transfer.wire import IncompatibleError, Kind, Message, WireError

EXTRA = {"ask_timeout_s": 1.0, "load_timeout_s": 10.0, "retry_s": 1.0, "max_transfers": 8}
"""What `ec_connector_extra_config` may hold, and its defaults: the deadlines of HAS and of READ,
how long a peer that failed is left alone, and how many peers a producer answers at once."""
_MORE = 1 << 12
"""Bytes of a message beside its rows."""


@dataclass(frozen=True, slots=True)
class EncoderFingerprint:
    """What two engines must share for one to use the rows of the other."""

    encoder: str
    """A hash of the weights of tower and projector."""
    dtype: str
    hidden_size: int

    def check(self, theirs: Any) -> None:
        """Raises IncompatibleError that names the first difference."""
        for name, mine in self.as_dict().items():
            other = theirs.get(name) if isinstance(theirs, Mapping) else None
            if other != mine:
                raise IncompatibleError(f"the peer's {name} is {other!r}: need {mine!r}")

    def as_dict(self) -> dict[str, Any]:
        """For a HELLO."""
        return asdict(self)


class Shelf:
    """Rows that a producer keeps, and its answers; called by the listener's threads."""

    def __init__(self, fingerprint: EncoderFingerprint, most_bytes: float) -> None:
        self.fingerprint, self.most_bytes = fingerprint, most_bytes
        self._rows: OrderedDict[str, np.ndarray] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def put(self, mm_hash: str, rows: np.ndarray) -> None:
        """Keep rows, and drop the oldest where they are too many."""
        with self._lock:
            before = self._rows.pop(mm_hash, None)
            self._num_bytes += rows.nbytes - (0 if before is None else before.nbytes)
            self._rows[mm_hash] = rows
            while self._num_bytes > self.most_bytes:
                self._num_bytes -= self._rows.popitem(last=False)[1].nbytes

    def answer(self, message: Message) -> Iterator[Message]:
        """What a peer is answered. Raises WireError at what is not a question."""
        if message.kind not in (Kind.HAS, Kind.READ):
            raise WireError(f"the peer sent {message.kind.name}: need HAS or READ")
        mm_hash = message.fields.get("mm_hash")
        if not isinstance(mm_hash, str):
            raise WireError(f"mm_hash={mm_hash!r}: need a text")
        with self._lock:
            rows = self._rows.get(mm_hash)
        if rows is None:
            yield Message(Kind.GONE, {"mm_hash": mm_hash, "why": "no such rows"})
        elif message.kind == Kind.HAS:
            yield Message(Kind.HELD, {"mm_hash": mm_hash})
        else:
            fields = {"mm_hash": mm_hash, "dtype": rows.dtype.name, "shape": list(rows.shape)}
            yield Message(Kind.ROWS, fields, rows.tobytes())


def exchange(
    address: tuple[str, int],
    fingerprint: EncoderFingerprint,
    question: Message,
    timeout_s: float,
    most: int,
) -> Message:
    """One question and its answer, on a connection of its own.

    Args:
        address: of the producer, a loopback one.
        fingerprint: what both must share.
        question: HAS or READ.
        timeout_s: seconds until it has failed, all in all.
        most: bytes that the answer's payload may have.

    Raises:
        WireError: by what is wrong with the peer; OSError: it is not there, or too slow.
    """
    deadline = time.monotonic() + timeout_s
    with socket.create_connection(address, timeout=timeout_s) as sock:
        stream = Stream(sock, most, deadline=deadline)
        stream.send(Message(Kind.HELLO, fingerprint.as_dict()))
        stream.send(question)
        hello = stream.receive()
        if hello.kind == Kind.GONE:
            raise IncompatibleError(str(hello.fields.get("why")))
        if hello.kind != Kind.HELLO:
            raise WireError(f"the peer sent {hello.kind.name}: need HELLO first")
        fingerprint.check(hello.fields)
        answer = stream.receive()
    if answer.fields.get("mm_hash") != question.fields["mm_hash"]:
        raise WireError(
            f"the peer answered about mm_hash={answer.fields.get('mm_hash')!r}: need "
            f"{question.fields['mm_hash']!r}, which was asked for"
        )
    return answer


class ECSocketConnector(ECConnectorBase):
    """Either half: a producer's worker listens, a consumer's halves ask."""

    def __init__(
        self,
        config: ECTransferConfig,
        role: ECConnectorRole,
        rows_of: RowsOf,
        fingerprint: EncoderFingerprint,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """One half.

        Args:
            config: whose `ec_connector_extra_config` holds some of `EXTRA`.
            role: which half.
            rows_of: what rows look like here.
            fingerprint: what a peer must share.
            clock: of `retry_s`.

        Raises:
            ValueError: an engine that is producer and consumer at once, an address that is not
                loopback, a port that is taken, or a consumer without one.
        """
        super().__init__(config, role, rows_of)
        self.extra = config.extra(EXTRA)
        for name in ("ask_timeout_s", "load_timeout_s", "retry_s"):
            if number(name, self.extra[name]) < 0:
                raise ValueError(f"{name}={self.extra[name]!r}: need at least 0 seconds")
        whole("max_transfers", self.extra["max_transfers"], 1)
        if config.ec_role == "ec_both":
            raise ValueError("ec_role='ec_both': need ec_producer or ec_consumer over a socket")
        if config.is_ec_consumer and not config.ec_port:
            raise ValueError("ec_port=0: need the port at which the producer listens")
        self._address = check_host(config.ec_ip), config.ec_port
        self.fingerprint, self.clock = fingerprint, clock
        self._asks_again_at = -float("inf")
        self.shelf: Shelf | None = None
        self.transport: SocketTransport | None = None
        if role is ECConnectorRole.WORKER and self.is_producer:
            self.shelf = Shelf(fingerprint, config.ec_buffer_size)
            listening = {
                "host": config.ec_ip, "port": config.ec_port,
                "load_timeout_s": self.extra["load_timeout_s"],
                "max_transfers": self.extra["max_transfers"],
            }  # fmt: skip
            self.transport = SocketTransport(self.shelf, listening)

    # ------------------------------------------------------------------ the consumer

    def has_cache_item(self, identifier: str) -> bool:
        if not self.is_consumer or self.clock() < self._asks_again_at:
            return False
        try:
            answer = self._ask(Kind.HAS, identifier, self.extra["ask_timeout_s"], _MORE)
        except (WireError, OSError) as error:
            self.failures.append(f"{identifier}: {type(error).__name__}: {error}")
            self._asks_again_at = self.clock() + self.extra["retry_s"]
            return False
        return answer.kind == Kind.HELD

    def load(self, mm_data: MMMeta) -> np.ndarray:
        dtype, width = self.rows_of.dtype, self.rows_of.hidden_size
        num_bytes = mm_data.num_token * width * dtype.itemsize
        limit = self.extra["load_timeout_s"]
        try:
            answer = self._ask(Kind.READ, mm_data.mm_hash, limit, num_bytes + _MORE)
        except (WireError, OSError) as error:
            raise LoadError(f"{type(error).__name__}: {error}") from error
        fields = answer.fields
        if answer.kind != Kind.ROWS:
            raise LoadError(f"the producer answered {answer.kind.name}: {fields.get('why')}")
        if fields.get("dtype") != dtype.name or fields.get("shape") != [mm_data.num_token, width]:
            came = f"{fields.get('dtype')} {fields.get('shape')}"
            raise LoadError(
                f"the producer sent rows of {came}: need {dtype.name} {[mm_data.num_token, width]}"
            )
        if len(answer.data) != num_bytes:
            raise LoadError(f"the producer sent rows of {len(answer.data)} bytes: need {num_bytes}")
        return np.frombuffer(answer.data, dtype).reshape(mm_data.num_token, width)

    def _ask(self, kind: Kind, mm_hash: str, timeout_s: float, most: int) -> Message:
        question = Message(kind, {"mm_hash": mm_hash})
        return exchange(self._address, self.fingerprint, question, timeout_s, most)

    # ------------------------------------------------------------------ the producer

    def save(self, mm_hash: str, rows: np.ndarray) -> None:
        assert self.shelf is not None
        self.shelf.put(mm_hash, rows)

    def address(self) -> tuple[str, int] | None:
        if self.transport is None:
            return None
        at = self.transport.address()
        return at["remote_host"], at["remote_port"]

    def shutdown(self) -> None:
        if self.transport is not None:
            self.transport.close()

"""Bytes between two processes: through shared memory, or through a socket.

Promises: one primitive, `Transport.exchange`, moves everything it is given in both directions at
once, so that ranks which all send first do not wait for each other; it sleeps while nothing moves,
it ends at its deadline, and it notices at once that a peer is gone. Stands where
`vllm/distributed/device_communicators/pynccl.py:60` `PyNcclCommunicator` stands.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping
from multiprocessing.shared_memory import SharedMemory
from typing import Protocol

Buffer = bytes | bytearray | memoryview

_NOTE = struct.Struct("<i")


class PeerLostError(ConnectionError):
    """The process at the other end is gone."""

    def __init__(self, peer: int) -> None:
        super().__init__(f"the connection to rank {peer} is closed")
        self.peer = peer


class PeerLateError(TimeoutError):
    """Peers that neither sent nor took what they should have within the deadline."""

    def __init__(self, peers: set[int], timeout_s: float) -> None:
        ranks = ", ".join(map(str, sorted(peers)))
        super().__init__(f"waited {timeout_s:g} s for rank {ranks}")
        self.peers = peers


class Channel(Protocol):
    """Both directions to one peer. Neither method waits; both raise ConnectionError at its end."""

    sock: socket.socket

    def push(self, data: memoryview) -> int:
        """Take a beginning of `data`; how many bytes, 0 when there is no room."""
        ...

    def pull(self, into: memoryview) -> int:
        """Fill a beginning of `into`; how many bytes, 0 when there is nothing yet."""
        ...

    def awaited(self, pushes: bool, pulls: bool) -> int:
        """What `select.poll` shall wake for."""
        ...

    def close(self) -> None: ...


class SocketChannel:
    """The bytes themselves go through a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock

    def push(self, data: memoryview) -> int:
        """See `Channel`."""
        try:
            return self.sock.send(data)
        except BlockingIOError:
            return 0

    def pull(self, into: memoryview) -> int:
        """See `Channel`."""
        try:
            count = self.sock.recv_into(into)
        except BlockingIOError:
            return 0
        if count == 0:
            raise ConnectionResetError
        return count

    def awaited(self, pushes: bool, pulls: bool) -> int:
        """See `Channel`."""
        return (select.POLLOUT if pushes else 0) | (select.POLLIN if pulls else 0)

    def close(self) -> None:
        """Close the socket; the peer sees the end of its stream."""
        self.sock.close()


class SharedMemoryChannel:
    """The bytes go through a ring in shared memory; a stream socket carries notes about them.

    A note is one number: n > 0, "n bytes more are in the ring towards you", or n < 0, "I have
    taken -n bytes out of the ring from you". The call that sends a note comes after the copy it
    tells of and the call that receives it before the copy it allows, so neither side needs a lock,
    and waiting for a note is waiting for a file descriptor. A peer that dies closes its socket.
    """

    def __init__(self, sock: socket.socket, outgoing: memoryview, incoming: memoryview) -> None:
        """Args: a connected socket; the rings, of equal size, that we write and read."""
        sock.setblocking(False)
        self.sock = sock
        self._outgoing, self._incoming = outgoing, incoming
        self._size = len(outgoing)
        self._room = self._size  # bytes of the outgoing ring that are free
        self._ready = 0  # bytes of the incoming ring that are written
        self._write_at = self._read_at = 0
        self._heard = b""
        self._unsent = bytearray()
        self._closed = False

    def push(self, data: memoryview) -> int:
        """See `Channel`."""
        self._hear()
        if self._closed:
            raise ConnectionResetError
        count = min(len(data), self._room, self._size - self._write_at)
        if count:
            self._outgoing[self._write_at : self._write_at + count] = data[:count]
            self._write_at = (self._write_at + count) % self._size
            self._room -= count
            self._say(count)
        return count

    def pull(self, into: memoryview) -> int:
        """See `Channel`."""
        if self._ready == 0:
            self._hear()
            if self._ready == 0 and self._closed:
                raise ConnectionResetError
        count = min(len(into), self._ready, self._size - self._read_at)
        if count:
            into[:count] = self._incoming[self._read_at : self._read_at + count]
            self._read_at = (self._read_at + count) % self._size
            self._ready -= count
            self._say(-count)
        return count

    def awaited(self, pushes: bool, pulls: bool) -> int:
        """See `Channel`."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def close(self) -> None:
        """Close the socket and let go of the rings."""
        self.sock.close()
        self._outgoing.release()
        self._incoming.release()

    def _say(self, count: int) -> None:
        self._unsent += _NOTE.pack(count)
        self._flush()

    def _flush(self) -> None:
        try:
            del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:  # what it wrote before it went can still be read
            self._closed = True

    def _hear(self) -> None:
        if self._unsent:
            self._flush()
        try:
            data = self.sock.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._closed = True
            return
        notes = self._heard + data
        whole = len(notes) - len(notes) % _NOTE.size
        self._heard = notes[whole:]
        for (count,) in _NOTE.iter_unpack(notes[:whole]):
            if count > 0:
                self._ready += count
            else:
                self._room -= count


class Transport:
    """One rank's channels to all others."""

    def __init__(self, rank: int, channels: Mapping[int, Channel], timeout_s: float = 60.0) -> None:
        """Args: our rank; a channel to each peer; how long one exchange may take, in seconds."""
        self.rank = rank
        self.channels = dict(channels)
        self.timeout_s = timeout_s
        self.segment: SharedMemory | None = None

    def exchange(self, outgoing: Mapping[int, Buffer], incoming: Mapping[int, Buffer]) -> None:
        """Send `outgoing[peer]` to each peer and fill `incoming[peer]` from each.

        The peer's exchange must expect and hold as many bytes: there are no messages, only bytes
        in order, as with the real thing.

        Raises:
            PeerLostError: a peer ended; PeerLateError: it did not move within the deadline.
        """
        sends = {peer: memoryview(data).cast("B") for peer, data in outgoing.items()}
        recvs = {peer: memoryview(data).cast("B") for peer, data in incoming.items()}
        deadline = 0.0
        while True:
            moved = self._advance(sends, push=True) + self._advance(recvs, push=False)
            if not sends and not recvs:
                return
            if moved:
                continue
            now = time.monotonic()
            deadline = deadline or now + self.timeout_s
            if now >= deadline:
                raise PeerLateError({*sends, *recvs}, self.timeout_s)
            self._sleep(sends, recvs, deadline - now)

    def _advance(self, views: dict[int, memoryview], push: bool) -> int:
        """Move what can be moved now; views that are done leave the dictionary."""
        moved = 0
        for peer, view in list(views.items()):
            channel = self.channels[peer]
            try:
                count = (channel.push(view) if push else channel.pull(view)) if len(view) else 0
            except ConnectionError:
                raise PeerLostError(peer) from None
            moved += count
            if count == len(view):
                del views[peer]
            else:
                views[peer] = view[count:]
        return moved

    def _sleep(
        self, sends: Mapping[int, memoryview], recvs: Mapping[int, memoryview], seconds: float
    ) -> None:
        poll = select.poll()
        for peer in {*sends, *recvs}:
            channel = self.channels[peer]
            poll.register(channel.sock, channel.awaited(peer in sends, peer in recvs))
        poll.poll(max(1.0, seconds * 1000))

    def close(self) -> None:
        """Close every channel; peers that wait for us notice."""
        for channel in self.channels.values():
            channel.close()
        if self.segment is not None:
            self.segment.close()


# ------------------------------------------------------------------ connecting

RING_BYTES = 1 << 18
SEGMENT_PREFIX = "mini-vllm"
"""Of the names of segments; the number of the process that made one follows."""


class SharedMemoryEnd:
    """What one rank is given to reach the others through one shared segment."""

    def __init__(self, name: str, socks: dict[int, socket.socket], ring_bytes: int) -> None:
        self.name, self.socks, self.ring_bytes = name, socks, ring_bytes

    def connect(self, rank: int, timeout_s: float) -> Transport:
        """Attach to the segment; it stays when its name goes."""
        segment = SharedMemory(self.name)
        world = len(self.socks) + 1

        def ring(writer: int, reader: int) -> memoryview:
            at = (writer * world + reader) * self.ring_bytes
            assert segment.buf is not None
            return segment.buf[at : at + self.ring_bytes]

        channels = {
            peer: SharedMemoryChannel(sock, ring(rank, peer), ring(peer, rank))
            for peer, sock in self.socks.items()
        }
        transport = Transport(rank, channels, timeout_s)
        transport.segment = segment
        return transport


def shared_memory_ends(
    world_size: int, ring_bytes: int = RING_BYTES
) -> tuple[SharedMemory, list[SharedMemoryEnd]]:
    """A segment with a ring for each ordered pair of ranks, and each rank's end of it.

    The caller unlinks the segment as soon as all have connected: then nothing is left of it,
    however they end.
    """
    name = f"{SEGMENT_PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"
    segment = SharedMemory(name, create=True, size=max(1, world_size**2 * ring_bytes))
    socks: list[dict[int, socket.socket]] = [{} for _ in range(world_size)]
    for low in range(world_size):
        for high in range(low + 1, world_size):
            socks[low][high], socks[high][low] = socket.socketpair()
    return segment, [SharedMemoryEnd(segment.name, mine, ring_bytes) for mine in socks]


def listen() -> socket.socket:
    """A listening socket on a free port of this machine alone."""
    server = socket.create_server(("127.0.0.1", 0))
    return server


def connect_sockets(
    rank: int, server: socket.socket, ports: list[int], secret: bytes, timeout_s: float
) -> Transport:
    """Call every lower rank and take the call of every higher one.

    A caller says the secret of this group of ranks and its own number; others are hung up on.

    Raises:
        PeerLateError: a rank did not call within the deadline.
    """
    deadline = time.monotonic() + timeout_s
    channels: dict[int, Channel] = {}
    for peer in range(rank):
        sock = socket.create_connection(("127.0.0.1", ports[peer]), timeout_s)
        sock.sendall(secret + _NOTE.pack(rank))
        channels[peer] = _quick(sock)
    with server:
        while len(channels) < len(ports) - 1:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                sock, _ = server.accept()
                sock.settimeout(1.0)
                said = sock.recv(len(secret) + _NOTE.size, socket.MSG_WAITALL)
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
                missing = set(range(len(ports))) - {rank, *channels}
                raise PeerLateError(missing, timeout_s) from None
            if said[:-4] != secret:
                sock.close()
                continue
            channels[_NOTE.unpack(said[-4:])[0]] = _quick(sock)
    return Transport(rank, channels, timeout_s)


def _quick(sock: socket.socket) -> SocketChannel:
    """Small messages leave at once instead of waiting for company."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return SocketChannel(sock)

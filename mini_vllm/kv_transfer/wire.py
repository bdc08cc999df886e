"""Messages between two engines: framed, of bounded length, and checked.

    magic  version  kind   length  crc32    payload
    4 B    2 B      2 B    4 B     4 B      length bytes

Promises: what does not begin with our magic, speaks another version, is longer than agreed, ends
early or has a bit changed is refused by an error of its own, before a byte of it is used. Upstream
leaves this to ZMQ and NIXL; `vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py:74`
`compute_nixl_compatibility_hash` is its check of what two engines must share.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

MAGIC = b"mvKV"
VERSION = 1
MAX_PAYLOAD = 64 << 20
"""Bytes of one payload: a layer of 4,096 tokens of an 8B model is 16 MiB in bfloat16."""
_HEADER = struct.Struct("!4sHHII")
_LENGTH = struct.Struct("!I")
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1
    """Who the sender is, and what its K and V look like; the first in either direction."""
    READ = 2
    """Please send the K and V of a request."""
    LAYER = 3
    """Those of one layer."""
    END = 4
    """That was the last layer."""
    GONE = 5
    """There are no such K and V here, and why."""
    DONE = 6
    """They are not needed any more: free them."""
    HAS = 7
    """Are the rows of a picture there? READ then asks for them (`mini_vllm/ec_transfer/`)."""
    HELD = 8
    """They are."""
    ROWS = 9
    """The rows of one picture."""


class WireError(ConnectionError):
    """A peer, or what is between, does not keep to the protocol."""


class NotOurPeerError(WireError):
    """What came does not begin as our messages do."""


class VersionError(WireError):
    """A peer of another version."""


class TooLongError(WireError):
    """A message longer than agreed."""


class ChecksumError(WireError):
    """A message whose bytes were changed on the way."""


class EndedEarlyError(WireError):
    """The stream ended within a message, or before it."""


class IncompatibleError(WireError):
    """A peer whose K and V are not of this model."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message: its fields and, of a LAYER, its numbers."""

    kind: Kind
    fields: Mapping[str, Any]
    data: bytes = b""


def encode(message: Message) -> bytes:
    """A message as bytes. Raises TooLongError."""
    head = json.dumps(message.fields, separators=(",", ":")).encode()
    payload = _LENGTH.pack(len(head)) + head + message.data
    if len(payload) > MAX_PAYLOAD:
        raise TooLongError(f"a message of {len(payload):,} bytes: need at most {MAX_PAYLOAD:,}")
    start = _HEADER.pack(MAGIC, VERSION, message.kind, len(payload), 0)[:-4]
    crc = zlib.crc32(payload, zlib.crc32(start))
    return start + struct.pack("!I", crc) + payload


def length_of(header: bytes, most: int = MAX_PAYLOAD) -> int:
    """How many bytes of payload follow a header. Raises WireError by what is wrong with it."""
    if not header:
        raise EndedEarlyError("the stream ended before a message")
    if header[:4] != MAGIC[: len(header[:4])]:
        raise NotOurPeerError(f"a message that begins with {header[:4]!r}: need {MAGIC!r}")
    if len(header) < HEADER_BYTES:
        raise EndedEarlyError(
            f"the stream ended after {len(header)} bytes of a header of {HEADER_BYTES}"
        )
    _, version, _, length, _ = _HEADER.unpack(header)
    if version != VERSION:
        raise VersionError(f"a peer of version {version}: need {VERSION}")
    if length > most:
        raise TooLongError(f"a message of {length:,} bytes: need at most {most:,}")
    return int(length)


def decode(header: bytes, payload: bytes) -> Message:
    """The message of a header and all of its payload. Raises WireError by what is wrong."""
    length = length_of(header)
    if len(payload) < length:
        raise EndedEarlyError(
            f"the stream ended after {len(payload)} bytes of a message of {length}"
        )
    *_, kind, _, crc = _HEADER.unpack(header)
    if zlib.crc32(payload, zlib.crc32(header[:-4])) != crc:
        raise ChecksumError(
            f"a message of {length} bytes: its checksum differs, so the bytes are not those sent"
        )
    try:
        (size,) = _LENGTH.unpack_from(payload)
        fields = json.loads(payload[4 : 4 + size])
        known = Kind(kind)
    except (ValueError, RecursionError, struct.error) as error:
        raise WireError(f"a message of unknown kind, or without JSON fields: {error}") from error
    if not isinstance(fields, dict):
        raise WireError(f"the message's fields are a {type(fields).__name__}: need an object")
    return Message(known, fields, bytes(payload[4 + size :]))


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What two engines must share for one to read the K and V of the other.

    The block size is not part of it: tokens travel in their order, not in blocks.
    """

    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def check(self, theirs: Any) -> None:
        """Raises IncompatibleError that names the first difference."""
        for name in self.__slots__:
            mine = getattr(self, name)
            other = theirs.get(name) if isinstance(theirs, Mapping) else None
            if other != mine:
                raise IncompatibleError(f"the peer's {name} is {other!r}: need {mine!r}")

    def as_dict(self) -> dict[str, Any]:
        """For a HELLO."""
        return {name: getattr(self, name) for name in self.__slots__}


def layer_messages(
    request_id: str, layer: int, kv: np.ndarray, most_bytes: int = MAX_PAYLOAD // 2, begin: int = 0
) -> Iterator[Message]:
    """K and V [2, num_tokens, num_kv_heads, head_dim] of one layer, in as few messages as fit.

    `begin` tokens of the layer that were asked for have been sent before.
    """
    per_token = 2 * kv[0, 0].nbytes
    step = max(1, most_bytes // per_token)
    for first in range(0, kv.shape[1], step):
        part = np.ascontiguousarray(kv[:, first : first + step])
        fields = {
            "request_id": request_id, "layer": layer, "first": begin + first,
            "num_tokens": part.shape[1],
        }  # fmt: skip
        yield Message(Kind.LAYER, fields, part.tobytes())


def layer_of(
    message: Message, fingerprint: Fingerprint, first: int, most: int
) -> tuple[int, np.ndarray]:
    """The number of a layer, and K and V of its next tokens.

    Args:
        message: a LAYER.
        fingerprint: what was agreed.
        first: the tokens of this layer that have come.
        most: the tokens of a layer that were asked for.

    Raises:
        WireError: it is not what comes next.
    """
    layer, count = message.fields.get("layer"), message.fields.get("num_tokens")
    if type(layer) is not int or not 0 <= layer < fingerprint.num_layers:
        raise WireError(f"layer={layer!r}: need 0 to {fingerprint.num_layers - 1}")
    if message.fields.get("first") != first or type(count) is not int or count < 1:
        came = message.fields.get("first")
        raise WireError(f"layer {layer}: {count!r} tokens from {came!r} on, need them from {first}")
    if first + count > most:
        raise TooLongError(f"layer {layer}: {first + count} tokens, asked for {most}")
    shape = 2, count, fingerprint.num_kv_heads, fingerprint.head_dim
    dtype = np.dtype(fingerprint.dtype)
    if len(message.data) != int(np.prod(shape)) * dtype.itemsize:
        raise WireError(f"layer {layer}: {len(message.data)} bytes do not make {shape} {dtype}")
    return layer, np.frombuffer(message.data, dtype).reshape(shape)

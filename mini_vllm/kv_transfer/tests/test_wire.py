"""Messages: what is not one of ours is refused by name before a byte of it is used."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from mini_vllm.kv_transfer import wire
from mini_vllm.kv_transfer.wire import Fingerprint, Kind, Message

FINGERPRINT = Fingerprint("m", "float32", 2, 1, 4)


def split(data: bytes) -> tuple[bytes, bytes]:
    return data[: wire.HEADER_BYTES], data[wire.HEADER_BYTES :]


def hello() -> bytearray:
    return bytearray(wire.encode(Message(Kind.HELLO, FINGERPRINT.as_dict(), b"xyz")))


def test_a_message_comes_back_as_it_went():
    message = wire.decode(*split(bytes(hello())))
    assert message == Message(Kind.HELLO, FINGERPRINT.as_dict(), b"xyz")


def test_every_flipped_bit_is_noticed():
    data = hello()
    for bit in range(len(data) * 8):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(wire.WireError):
            wire.decode(*split(bytes(wrong)))


def test_every_cut_is_noticed():
    data = bytes(hello())
    for length in range(len(data)):
        with pytest.raises(wire.EndedEarlyError):
            wire.decode(*split(data[:length]))


@pytest.mark.parametrize(
    ("at", "what", "error", "said"),
    [
        (0, b"GET ", wire.NotOurPeerError, "b'GET '"),
        (4, struct.pack("!H", 2), wire.VersionError, "version 2: need 1"),
        (8, struct.pack("!I", 1 << 31), wire.TooLongError, "2,147,483,648 bytes"),
        (12, b"\0\0\0\0", wire.ChecksumError, "its checksum differs"),
    ],
)
def test_what_is_not_ours_is_refused_by_name(at, what, error, said):
    data = hello()
    data[at : at + len(what)] = what
    with pytest.raises(error, match=said):
        wire.decode(*split(bytes(data)))


def test_a_whole_message_that_says_nothing_is_refused():
    deep = b"[" * 60_000  # more than the interpreter nests
    nested = struct.pack("!I", len(deep)) + deep
    for payload in (b"", b"\0\0\0\2[]", b"\0\0\0\3not", nested):
        start = struct.pack("!4sHHI", wire.MAGIC, wire.VERSION, 1, len(payload))
        crc = wire.zlib.crc32(payload, wire.zlib.crc32(start))
        with pytest.raises(wire.WireError):
            wire.decode(start + struct.pack("!I", crc), payload)


def test_a_layer_comes_back_in_as_few_messages_as_fit():
    kv = np.random.default_rng(0).normal(size=(2, 7, 1, 4)).astype(np.float32)
    for most, count in ((1 << 20, 1), (64, 4)):
        messages = list(wire.layer_messages("r", 1, kv, most))
        assert len(messages) == count
        parts, first = [], 0
        for message in messages:
            layer, part = wire.layer_of(message, FINGERPRINT, first, 7)
            assert layer == 1
            parts.append(part)
            first += part.shape[1]
        assert np.array_equal(np.concatenate(parts, axis=1), kv)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"layer": 2}, wire.WireError),
        ({"layer": "0"}, wire.WireError),
        ({"first": 3}, wire.WireError),
        ({"num_tokens": 0}, wire.WireError),
        ({"num_tokens": 9}, wire.TooLongError),
        ({"num_tokens": 6}, wire.WireError),
    ],
)
def test_a_layer_that_is_not_what_comes_next_is_refused(changed, error):
    kv = np.zeros((2, 7, 1, 4), np.float32)
    [message] = wire.layer_messages("r", 0, kv)
    message = Message(message.kind, {**message.fields, **changed}, message.data)
    with pytest.raises(error):
        wire.layer_of(message, FINGERPRINT, 0, 7)


def test_a_peer_of_another_model_is_refused_by_what_differs():
    for name, other in (("model", "n"), ("dtype", "float64"), ("num_layers", 3), ("head_dim", 8)):
        with pytest.raises(wire.IncompatibleError, match=f"the peer's {name} is {other!r}"):
            FINGERPRINT.check({**FINGERPRINT.as_dict(), name: other})
    with pytest.raises(wire.IncompatibleError):
        FINGERPRINT.check("hello")


def test_random_bytes_are_never_a_message():
    rng = random.Random(0)
    for _ in range(300):
        with pytest.raises(wire.WireError):
            wire.decode(*split(rng.randbytes(rng.randint(0, 60))))

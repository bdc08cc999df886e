"""Encoders that die, lie or dawdle: the decoder encodes, and says by name why it had to."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
from contextlib import suppress

import numpy as np
import pytest

from mini_vllm.ec_transfer.processes import EncodeDecode
from mini_vllm.ec_transfer.sockets import EncoderFingerprint, Shelf
from mini_vllm.ec_transfer.tests.conftest import PARAMS, PROMPTS, answers, config, room_of
from mini_vllm.ec_transfer.tests.test_outputs import ONE
from mini_vllm.kv_transfer import wire
from mini_vllm.kv_transfer.processes import kill
from mini_vllm.kv_transfer.sockets import Stream
from mini_vllm.kv_transfer.wire import Kind, Message, encode
from mini_vllm.tests.multimodal_support import write_llava


class Liar:
    """A producer that answers each question with what `answer(question)` gives, bytes by bytes."""

    def __init__(self, fingerprint, answer):
        self.fingerprint, self.answer = fingerprint, answer
        self.closed = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    @property
    def port(self):
        return self.listener.getsockname()[1]

    def _serve(self):
        while True:
            sock, _ = self.listener.accept()
            if self.closed.is_set():
                sock.close()
                return
            with sock, suppress(OSError, wire.WireError):
                stream = Stream(sock)
                stream.receive()
                question = stream.receive()
                for data in self.answer(self.fingerprint, question):
                    if data is None:  # until the consumer has had enough
                        while sock.recv(1 << 16):
                            pass
                    else:
                        sock.sendall(data)

    def close(self):
        self.closed.set()
        socket.create_connection(("127.0.0.1", self.port)).close()
        self.thread.join()
        self.listener.close()


@pytest.fixture
def liar(engine):
    """Gives the consumer of a producer that answers as it is said, and both are closed."""
    opened = []

    def make(answer, **extra):
        opened.append(Liar({}, answer))
        made = engine(config("ec_consumer", ec_port=opened[-1].port, **{"retry_s": 0.0, **extra}))
        opened[-1].fingerprint = room_of(made).ec_transfer.worker_half.fingerprint.as_dict()
        return made

    yield make
    for each in opened:
        each.close()


def honest(fingerprint, question):
    """HELLO, and that the rows are there."""
    yield encode(Message(Kind.HELLO, fingerprint))
    yield encode(Message(Kind.HELD, {"mm_hash": question.fields["mm_hash"]}))


def lying(make):
    """An answer that is honest about HAS, and about READ gives `make(rows message)`."""

    def answer(fingerprint, question):
        if question.kind == Kind.HAS:
            yield from honest(fingerprint, question)
            return
        shape = [4, fingerprint["hidden_size"]]
        rows = np.zeros(shape, fingerprint["dtype"])
        fields = {**question.fields, "dtype": fingerprint["dtype"], "shape": shape}
        yield encode(Message(Kind.HELLO, fingerprint))
        yield from make(fields, rows)

    return answer


def message(fields, rows, **changed):
    return encode(Message(Kind.ROWS, {**fields, **changed}, rows.tobytes()))


def _damaged(fields, rows):
    data = bytearray(message(fields, rows))
    data[-1] ^= 1
    yield bytes(data)


def _too_large(fields, rows):
    data = bytearray(message(fields, rows))
    data[8:12] = struct.pack("!I", 1 << 30)
    yield bytes(data)


LIES = {
    "another picture": (
        lambda f, r: [message(f, r, mm_hash="another")],
        "WireError: the peer answered about mm_hash='another': need",
    ),
    "another shape": (
        lambda f, r: [message(f, r[:2], shape=[2, 16])],
        "the producer sent rows of float64 [2, 16]: need float64 [4, 16]",
    ),
    "a shape that its bytes do not make": (
        lambda f, r: [message(f, r[:2])],
        "the producer sent rows of 256 bytes: need 512",
    ),
    "another dtype": (
        lambda f, r: [message(f, r.astype("f4"), dtype="float32")],
        "the producer sent rows of float32 [4, 16]: need float64 [4, 16]",
    ),
    "too large": (_too_large, "TooLongError: a message of 1,073,741,824 bytes: need at most"),
    "damaged": (_damaged, "ChecksumError: a message of"),
    "garbage": (
        lambda f, r: [b"HTTP/1.1 200 OK\r\n\r\n"],
        "NotOurPeerError: a message that begins",
    ),
    "half, then it dies": (
        lambda f, r: [message(f, r)[:200]],
        "EndedEarlyError: ",
    ),
    "gone meanwhile": (
        lambda f, r: [encode(Message(Kind.GONE, {**f, "why": "no such rows"}))],
        "the producer answered GONE: no such rows",
    ),
    "half, and no more": (
        lambda f, r: [message(f, r)[:200], None],
        "TimeoutError: ",
    ),
    "no word": (lambda f, r: [None], "TimeoutError: "),
}


QUICK = ("another picture", "garbage", "no word")
"""The others are slow in sum."""


@pytest.mark.parametrize(
    "lie", [pytest.param(lie, marks=() if lie in QUICK else pytest.mark.slow) for lie in LIES]
)
def test_rows_that_are_not_what_was_promised_are_refused_and_encoded_here(lie, liar, alone):
    make, reason = LIES[lie]
    consumer = liar(lying(make), load_timeout_s=0.05 if "Timeout" in reason else 20.0)
    assert answers(consumer) == alone
    half, found = room_of(consumer).ec_transfer.worker_half, room_of(consumer).stats()
    assert found["ec_failed_loads"] == found["encoder_runs"] == 3 and not found["ec_loads"]
    assert all(why.split(": ", 1)[1].startswith(reason) for why in half.failures), half.failures


@pytest.mark.slow
def test_a_producer_of_another_tower_is_refused_by_both(engine, tmp_path, alone):
    from mini_vllm import LLMEngine

    other = LLMEngine(
        write_llava(tmp_path / "other", seed=1), dtype="float64",
        ec_transfer_config=config("ec_producer", ec_port=0),
    )  # fmt: skip
    try:
        transfer = room_of(other).ec_transfer
        consumer = engine(config("ec_consumer", ec_port=transfer.address[1], retry_s=1e9))
        answers(other, params=ONE)
        assert answers(consumer) == alone
        (why,) = room_of(consumer).ec_transfer.scheduler_half.failures
        assert "IncompatibleError: the peer's encoder is" in why
        transport = transfer.worker_half.transport
        for thread in transport._answering:
            thread.join()  # it may hear of it later than we do
        assert "the peer's encoder is" in transport.refusals[-1]
    finally:
        other.close()


def test_a_producer_that_is_not_there_is_asked_once_and_then_left_alone(engine, alone):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    consumer = engine(config("ec_consumer", ec_port=port, retry_s=1e9))
    assert answers(consumer) == alone
    (why,) = room_of(consumer).ec_transfer.scheduler_half.failures
    assert "ConnectionRefusedError" in why and room_of(consumer).stats()["encoder_runs"] == 3


def test_a_producer_that_says_nothing_holds_a_step_up_until_the_deadline_and_no_longer(liar, alone):
    consumer = liar(lambda fingerprint, question: [None], ask_timeout_s=0.05, retry_s=1e9)
    assert answers(consumer) == alone
    (why,) = room_of(consumer).ec_transfer.scheduler_half.failures
    assert (
        "TimeoutError: 20 of 20 bytes had not come before the deadline" in why or "timed out" in why
    )


def test_a_producer_keeps_so_many_bytes_and_drops_the_oldest():
    rows = np.zeros((4, 16))
    shelf = Shelf(EncoderFingerprint("e", "float64", 16), 2 * rows.nbytes)
    for name in "abc":
        shelf.put(name, rows)
    shelf.put("b", rows)
    shelf.put("d", rows)

    def said(name):
        return next(shelf.answer(Message(Kind.HAS, {"mm_hash": name}))).kind

    assert [said(name) for name in "abcd"] == [Kind.GONE, Kind.HELD, Kind.GONE, Kind.HELD]


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (Message(Kind.LAYER, {}), "WireError: the peer sent LAYER: need HAS or READ"),
        (Message(Kind.HAS, {"mm_hash": 3}), "WireError: mm_hash=3: need a text"),
        (b"GET / HTTP/1.1\r\n\r\n", "NotOurPeerError: "),
    ],
)
def test_a_producer_refuses_what_is_not_a_question(sent, why, engine):
    producer = engine(config("ec_producer", ec_port=0))
    half = room_of(producer).ec_transfer.worker_half
    hello = encode(Message(Kind.HELLO, half.fingerprint.as_dict()))
    with socket.create_connection(half.address(), timeout=20) as sock:
        sock.sendall(hello + (sent if isinstance(sent, bytes) else encode(sent)))
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
    for thread in half.transport._answering:
        thread.join()
    assert half.transport.refusals[-1].startswith(why)


FILES = {
    "another shape": lambda path, np_save: np_save({"ec_cache": np.zeros((2, 16))}, path),
    "another dtype": lambda path, np_save: np_save({"ec_cache": np.zeros((4, 16), "f4")}, path),
    "another name": lambda path, np_save: np_save({"rows": np.zeros((4, 16))}, path),
    "half": lambda path, np_save: path.write_bytes(path.read_bytes()[:99]),
    "garbage": lambda path, np_save: path.write_bytes(json.dumps({"a": 1}).encode()),
    "a header larger than the file": lambda path, np_save: path.write_bytes(b"\xff" * 64),
}


@pytest.mark.parametrize(
    "damage", [pytest.param(d, marks=() if d == "half" else pytest.mark.slow) for d in FILES]
)
def test_a_file_that_is_not_what_was_promised_is_refused_and_encoded_here(
    damage, engine, alone, tmp_path
):
    from safetensors.numpy import save_file

    more = {"connector": "ECExampleConnector", "shared_storage_path": str(tmp_path)}
    answers(engine(config("ec_producer", **more)), params=ONE)
    for path in tmp_path.glob("*/*.safetensors"):
        FILES[damage](path, save_file)
    consumer = engine(config("ec_consumer", **more))
    assert answers(consumer) == alone
    assert room_of(consumer).stats()["ec_failed_loads"] == 3


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "/etc", "a\0b", "x" * 300])
def test_a_pictures_name_leads_nowhere_outside(name, engine, tmp_path):
    consumer = engine(
        config("ec_consumer", "ECExampleConnector", shared_storage_path=str(tmp_path))
    )
    with pytest.raises(ValueError, match="mm_hash="):
        room_of(consumer).ec_transfer.scheduler_half.has_cache_item(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (3, "ec_transfer_config=3: need"),
        ({"ec_role": "ec_both"}, "lacks ec_connector"),
        (config("kv_both"), "ec_role='kv_both': need one of ec_producer"),
        (config("ec_consumer", "ECMooncakeConnector"), "need one of ECExampleConnector, ECSocket"),
        (config("ec_both"), "ec_role='ec_both': need ec_producer or ec_consumer over a socket"),
        (config("ec_consumer", ec_port=0), "ec_port=0: need the port"),
        (config("ec_consumer", ec_ip="10.0.0.1"), "host='10.0.0.1': need a loopback address"),
        (config("ec_consumer", ec_rank=0), "holds 'ec_rank': need some of"),
        (config("ec_consumer", colour=1), "ec_connector_extra_config holds 'colour'"),
        (config("ec_consumer", retry_s=-1), "retry_s=-1: need at least 0"),
        (config("ec_producer", ec_port=0, max_transfers=0), "max_transfers=0: need at least 1"),
    ],
)
def test_a_config_that_is_not_one_is_refused_by_name(given, why, engine):
    with pytest.raises(ValueError, match=why):
        engine(given)


@pytest.mark.parametrize(
    "knob",
    [
        {"enable_lora": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        {"release": "0.27.1"}, {"structured_outputs_config": {"backend": "auto"}},
    ],
)  # fmt: skip
def test_what_was_not_compared_with_a_connector_is_refused_by_name(knob, engine):
    with pytest.raises(ValueError) as refused:
        engine(config("ec_consumer"), **knob)
    assert any(word in str(refused.value) for word in (*knob, "0.27.1")), refused.value


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_are_refused_with_pictures_and_so_with_a_connector(ranks, engine):
    with pytest.raises(ValueError, match="ranks cannot load a multimodal model"):
        engine(config("ec_consumer"), **{ranks: 2})


def test_a_model_without_pictures_takes_no_connector():
    from mini_vllm import LLMEngine

    with pytest.raises(ValueError, match=r"ec_transfer_config=.*need a multimodal model"):
        LLMEngine("byte-llama", ec_transfer_config=config("ec_consumer"))


@pytest.mark.slow
def test_two_processes_say_what_one_engine_says_when_the_encoder_stands_still_and_when_it_dies(
    folder, alone
):
    extra = {"ask_timeout_s": 0.2, "retry_s": 0.0}
    with EncodeDecode(folder, dtype="float64", extra=extra) as pair:
        processes = [of.process for of in pair.engines.values()]

        def said():
            return [answer.token_ids for answer in pair.generate(PROMPTS, PARAMS)]

        assert said() == alone and pair.num_fallbacks == 0
        encoder = pair.engines["ec_producer"]
        os.kill(encoder.process.pid, signal.SIGSTOP)
        pair.encode_timeout_s = 0.1
        assert said() == alone and pair.num_fallbacks == 3
        kill(encoder)
        assert said() == alone and pair.num_fallbacks == 6
    assert not any(process.is_alive() for process in processes)


@pytest.mark.slow
def test_an_encoder_that_does_not_even_read_its_prompts_is_ended(folder, alone):
    from mini_vllm.tests.multimodal_support import picture, prompt

    large = [prompt(picture(9, 700, 700), "?")]  # larger than the pipe
    with EncodeDecode(folder, dtype="float64", encode_timeout_s=0.1) as pair:
        encoder = pair.engines["ec_producer"].process
        os.kill(encoder.pid, signal.SIGSTOP)
        pair.generate(large, PARAMS)
        assert not encoder.is_alive() and pair.num_fallbacks == 1
        assert [answer.token_ids for answer in pair.generate(PROMPTS, PARAMS)] == alone

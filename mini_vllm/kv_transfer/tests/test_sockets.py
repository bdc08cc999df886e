"""K and V over a loopback socket: the same tokens, and peers that are not ours."""

from __future__ import annotations

import itertools
import multiprocessing
import socket
import struct
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from mini_vllm import LLM, SamplingParams
from mini_vllm.kv_transfer import sockets, wire
from mini_vllm.kv_transfer.processes import PrefillDecode, kill
from mini_vllm.kv_transfer.sockets import MOST_CONTROL, Stream
from mini_vllm.kv_transfer.tests.support import alone, engine, transfer_of
from mini_vllm.kv_transfer.wire import Fingerprint, Kind, Message

PROMPT = (1, 2, 3, 4, 5, 6, 1, 2, 3)
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def made(role, policy="fail", **extra):
    return engine(
        kv_transfer_config={
            "kv_connector": "SocketConnector", "kv_role": role, "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"load_timeout_s": 20.0, **extra},
        }
    )  # fmt: skip


@pytest.fixture
def engines():
    """What makes engines, and closes them: not a thread is left."""
    before, opened = set(threading.enumerate()), []

    def make(role, policy="fail", **extra):
        opened.append(made(role, policy, **extra))
        return opened[-1]

    yield make
    for of in opened:
        of.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)  # it may end a little later than the connector that it served
        assert not thread.is_alive(), thread.name


def offered(producer, prompt=PROMPT):
    """The parameters of a prompt that the producer has computed."""
    name = producer.add_request(list(prompt), ONE, kv_transfer_params={"do_remote_decode": True})
    while (params := transfer_of(producer).take_kv_transfer_params(name)) is None:
        producer.step()
    return params


def decoded(consumer, params, prompt=PROMPT, *others):
    """The request, when it has ended and nothing is left to do."""
    name = consumer.add_request(
        list(prompt), SamplingParams(max_tokens=4, ignore_eos=True), kv_transfer_params=params
    )
    request = consumer.requests[name]
    while any(of.has_unfinished_requests() for of in (consumer, *others)):
        for of in (consumer, *others):
            if of.has_unfinished_requests():
                of.step()
    return request


def test_the_consumer_says_what_one_engine_says(engines):
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    request = decoded(consumer, offered(producer), PROMPT, producer)
    assert request.output_token_ids == alone(PROMPT, 4)
    assert transfer_of(consumer).stats()["num_external_tokens"] == 9
    assert producer.scheduler.kv.usage == consumer.scheduler.kv.usage == 0.0


def test_the_consumer_reads_while_the_producer_computes(engines):
    """It is asked before the producer has computed a token, and waits for each chunk."""
    producer = engines("kv_producer", stream=True)
    consumer = engines("kv_consumer", stream=True)
    name = producer.add_request(list(PROMPT), ONE, kv_transfer_params={"do_remote_decode": True})
    params = transfer_of(producer).take_kv_transfer_params(name)
    request = decoded(consumer, params, PROMPT, producer)
    assert request.output_token_ids == alone(PROMPT, 4)
    assert transfer_of(consumer).stats()["num_external_tokens"] == 9
    assert producer.scheduler.kv.usage == consumer.scheduler.kv.usage == 0.0
    assert transfer_of(producer).take_kv_transfer_params(name) is None


def connected(producer):
    at = transfer_of(producer).worker_half.transport.address()
    return socket.create_connection((at["remote_host"], at["remote_port"]), timeout=20)


def refusal(producer, sent: bytes) -> str:
    """Why a peer that sends this is refused: its connection is closed, then it is said."""
    transport = transfer_of(producer).worker_half.transport
    with connected(producer) as sock:
        sock.sendall(sent)
        with suppress(OSError):  # it was closed with bytes of ours unread
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
    for thread in transport._answering:
        thread.join()
    return transport.refusals[-1]


def test_peers_that_are_not_ours_are_refused_by_name(engines):
    producer = engines("kv_producer")
    mine = transfer_of(producer).worker_half.outbox.fingerprint
    hello = wire.encode(Message(Kind.HELLO, mine.as_dict()))
    assert refusal(producer, b"GET / HTTP/1.1\r\n\r\n").startswith("NotOurPeerError")
    old = bytearray(hello)
    old[5] = 9
    assert refusal(producer, bytes(old)) == "VersionError: a peer of version 9: need 1"
    long = bytearray(hello)
    long[8:12] = struct.pack("!I", MOST_CONTROL + 1)
    assert refusal(producer, bytes(long)).startswith("TooLongError: a message of 65,537 bytes")
    other = Message(Kind.HELLO, {**mine.as_dict(), "head_dim": 128})
    assert "the peer's head_dim is 128: need 4" in refusal(producer, wire.encode(other))
    damaged = bytearray(hello)
    damaged[-1] ^= 1
    assert refusal(producer, bytes(damaged)).startswith("ChecksumError")
    assert refusal(producer, hello[:20]).startswith("EndedEarlyError")
    read = wire.encode(Message(Kind.READ, {}))
    assert refusal(producer, read) == "WireError: the peer sent READ: need HELLO first"
    assert refusal(producer, hello + hello) == "WireError: the peer sent HELLO: need READ or DONE"


@pytest.fixture
def impostor():
    """A listener that answers as it is told, once."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads = []

    def answer(*data: bytes):
        def run():
            sock, _ = listener.accept()
            with sock, suppress(OSError):
                sock.settimeout(20)
                for part in data:
                    sock.sendall(part)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        return listener.getsockname()[1]

    yield answer
    listener.close()
    for thread in threads:
        thread.join(20)


@pytest.mark.parametrize("fault", ["http", "version", "flood", "model", "corrupt", "early", "more"])
def test_a_producer_that_is_not_ours_costs_the_load_and_says_why(engines, impostor, fault):
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    params = offered(producer)
    mine = transfer_of(producer).worker_half.outbox.fingerprint
    hello = bytearray(wire.encode(Message(Kind.HELLO, mine.as_dict())))
    rest = b""
    if fault == "http":
        hello = bytearray(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    elif fault == "version":
        hello[5] = 3
    elif fault == "flood":
        hello[8:12] = b"\xff" * 4
    elif fault == "model":
        other = Fingerprint("of another", "float64", 3, 1, 4)
        hello = bytearray(wire.encode(Message(Kind.HELLO, other.as_dict())))
    elif fault == "more":
        name = {"request_id": params["remote_request_id"], "layer": 0, "first": 0}
        rest = wire.encode(Message(Kind.LAYER, {**name, "num_tokens": 5000}, b"\0" * 100))
    else:
        rest = wire.encode(Message(Kind.END, {"request_id": params["remote_request_id"]}))
        rest = rest[:-1] + b"!" if fault == "corrupt" else rest
    said = {
        "http": "NotOurPeerError", "version": "VersionError", "flood": "TooLongError",
        "model": "IncompatibleError: the peer's model", "corrupt": "ChecksumError",
        "early": "the peer sent 0 tokens, need 9",
        "more": "TooLongError: layer 0: 5000 tokens, asked for 9",
    }  # fmt: skip
    request = decoded(consumer, {**params, "remote_port": impostor(bytes(hello), rest)})
    assert request.finish_reason == "error" and said[fault] in str(request.stop_reason)
    assert consumer.scheduler.kv.usage == 0.0


@pytest.mark.slow
def test_a_producer_that_is_gone_costs_the_load_alone(engines):
    producer, consumer = engines("kv_producer"), engines("kv_consumer", "recompute")
    params = offered(producer)
    producer.close()
    assert decoded(consumer, params).output_token_ids == alone(PROMPT, 4)
    assert transfer_of(consumer).num_failed_loads == 1


def test_only_addresses_of_this_machine_are_listened_on_or_read_from(engines):
    with pytest.raises(ValueError, match=r"host='0\.0\.0\.0': need a loopback address"):
        made("kv_producer", host="0.0.0.0")
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    params = {**offered(producer), "remote_host": "192.0.2.1"}
    request = decoded(consumer, params)
    assert "host='192.0.2.1': need a loopback address" in str(request.stop_reason)


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"port": 70_000}, "port=70000: need 0 to 65535"),
        ({"port": "http"}, "port='http': need an int"),
        ({"stream": 1}, "stream=1: need True or False"),
        ({"max_transfers": 0}, "max_transfers=0: need at least 1"),
        ({"load_timeout_s": -1}, "load_timeout_s=-1: need more than 0 seconds"),
        ({"load_timeout_s": "soon"}, "load_timeout_s='soon': need a finite number"),
        ({"lease_s": None}, "lease_s=None: need a finite number"),
    ],
)
def test_a_config_out_of_range_is_refused_by_name(extra, why):
    with pytest.raises(ValueError, match=why):
        made("kv_both", **extra)


@pytest.mark.parametrize("port", [-1, 0, 70_000])
def test_a_port_that_is_none_is_refused_at_the_door(engines, port):
    params = {**offered(engines("kv_producer")), "remote_port": port}
    consumer = engines("kv_consumer")
    with pytest.raises(ValueError, match=rf"remote_port'\]={port}: need 1 to 65535"):
        decoded(consumer, params)
    assert not consumer.has_unfinished_requests()


class Once:
    """A listener whose next peer finds no file left."""

    def __init__(self, listener):
        self.listener, self.has_failed = listener, threading.Event()

    def __getattr__(self, name):
        return getattr(self.listener, name)

    def accept(self):
        if not self.has_failed.is_set():
            self.has_failed.set()
            raise OSError(24, "Too many open files")
        return self.listener.accept()


@pytest.mark.slow
def test_a_listener_that_could_not_accept_once_goes_on(engines):
    producer = engines("kv_producer")
    transport = transfer_of(producer).worker_half.transport
    transport._listener = Once(transport._listener)
    assert transport._listener.has_failed.wait(20)
    assert refusal(producer, b"GET / HTTP/1.1\r\n\r\n").startswith("NotOurPeerError")


class Dripping:
    """A socket that has a byte, whenever it is asked, of a message that never ends."""

    num_bytes = 0

    def settimeout(self, seconds):
        assert seconds > 0

    def recv(self, count):
        self.num_bytes += 1
        return (wire.MAGIC + b"\0\1\0\1\0\0\xff\xff\0\0\0\0")[self.num_bytes - 1 :][:1] or b"."


@pytest.mark.parametrize("limit", [{"timeout_s": 40.0}, {"deadline": 40.0}])
def test_a_peer_that_drips_has_as_long_as_any_other(monkeypatch, limit):
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr(sockets, "time", clock)
    dripping = Dripping()
    with pytest.raises(TimeoutError, match=r"of 65535 bytes had not come before the deadline"):
        Stream(dripping, **limit).receive()
    assert wire.HEADER_BYTES < dripping.num_bytes < 40


def test_a_stream_that_is_cut_between_two_messages_ends_early():
    one, other = socket.socketpair()
    with one, other:
        Stream(one).send(Message(Kind.DONE, {}))
        one.shutdown(socket.SHUT_WR)
        stream = Stream(other)
        assert stream.receive().kind == Kind.DONE
        with pytest.raises(wire.EndedEarlyError, match="before a message"):
            stream.receive()


# ------------------------------------------------------------------ two processes


@pytest.mark.slow
def test_a_pair_that_cannot_be_made_says_why_and_leaves_no_process(capfd):
    others = {child.pid for child in multiprocessing.active_children()}
    with pytest.raises(ValueError, match="num_blocks=-1: need"):
        PrefillDecode("byte-llama", num_blocks=-1)
    assert "Traceback" not in capfd.readouterr().err
    assert {child.pid for child in multiprocessing.active_children()} <= others


TEXTS = ["hello world, how are", "hello world, who is", "a", "the quick brown fox jumps over it"]


@pytest.mark.slow
def test_two_processes_say_what_one_engine_says_and_a_dead_producer_costs_time_alone():
    others = {child.pid for child in multiprocessing.active_children()}  # of other tests' engines
    params = SamplingParams(max_tokens=8)
    expected = [o.outputs[0].token_ids for o in LLM("byte-llama").generate(TEXTS, params)]
    with PrefillDecode("byte-llama", num_blocks=64) as pair:
        assert [a.token_ids for a in pair.generate(TEXTS, params)] == expected
        assert pair.num_fallbacks == 0
        kill(pair.engines["kv_producer"])
        assert [a.token_ids for a in pair.generate(TEXTS, params)] == expected
        assert pair.num_fallbacks == len(TEXTS)
    assert {child.pid for child in multiprocessing.active_children()} <= others

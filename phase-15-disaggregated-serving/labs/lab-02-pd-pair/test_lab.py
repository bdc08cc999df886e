"""What lab 15-02 pins: bodies, the order of two legs, and what a pair must report.

`recordings/nixl.json`: both legs on v0.22.1's own scheduler with its half of the NIXL connector,
and lines that its statistics print (`conformance/features/kv_transfer/nixl.py`).
"""

from __future__ import annotations

import copy
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from labkit import same

HERE = Path(__file__).parent
CHAT = {
    "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64,
    "min_tokens": 8, "stream": True, "stream_options": {"include_usage": True}, "seed": 3,
}  # fmt: skip
ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


@cache
def recorded():
    """Legs by name, and lines."""
    return json.loads((HERE / "recordings" / "nixl.json").read_text())


def params():
    return recorded()["legs"]["prefill 40"]["params"]


class Fake:
    """Both engines as a `send`: what they were asked, in order, and what they say."""

    def __init__(self, lab, prefill, pieces=(b"data: a\n\n", b"data: b\n\n", b"data: [DONE]\n\n")):
        self.lab, self.prefill, self.pieces, self.log, self.ids = lab, prefill, pieces, [], []
        self.bodies = {}

    def __call__(self, url, body, request_id):
        self.ids.append(request_id)
        self.bodies[url] = copy.deepcopy(body)
        self.log.append(f"{url} asked")
        if url == "P":
            if isinstance(self.prefill, Exception):
                raise self.prefill
            yield self.prefill[:7]
            yield self.prefill[7:]
        else:
            for number, piece in enumerate(self.pieces):
                self.log.append(f"piece {number}")
                yield piece
        self.log.append(f"{url} done")


def answered(**more):
    return json.dumps({"choices": [{"text": "x"}], **more}).encode()


def test_prefill_body_exact(lab):
    """A P that streams, or makes 64 tokens, or refuses min_tokens above max_tokens."""
    expected = {
        "model": "m", "messages": CHAT["messages"], "max_tokens": 1, "stream": False, "seed": 3,
        "kv_transfer_params": ASKED,
    }  # fmt: skip
    same(lab.prefill_body(CHAT), expected, "what P is sent for a chat (X1)")
    other = {"prompt": "p", "max_completion_tokens": 9, "min_completion_tokens": 2}
    same(
        lab.prefill_body(other),
        {"prompt": "p", "max_completion_tokens": 1, "max_tokens": 1, "stream": False,
         "kv_transfer_params": ASKED},
        "a client that bounds its tokens by the other name",
    )  # fmt: skip
    again = {"prompt": "p", "kv_transfer_params": {"do_remote_prefill": True}}
    same(
        lab.prefill_body(again)["kv_transfer_params"], ASKED,
        "a client that sends another engine's parameters: P computes the prompt (X1)",
    )  # fmt: skip


def test_decode_body_exact(lab):
    """max_tokens=1 left on D's leg: an answer of one token."""
    given = {"choices": [], "kv_transfer_params": params()}
    same(
        lab.decode_body(CHAT, given), {**CHAT, "kv_transfer_params": params()},
        "what D is sent: the client's own body and what P gave (X2)",
    )  # fmt: skip
    for nothing in ({"choices": []}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}):
        same(lab.decode_body(CHAT, nothing), CHAT, f"P gave {nothing}: D prefills (X4)")
    bare = {"prompt": "p"}
    same(lab.decode_body(bare, {}), bare, "a client that left all else to D (X2)")


def test_nothing_that_was_handed_in_changes(lab):
    """One dict for both legs: D gets what P was sent, or a client's retry does."""
    body, given = copy.deepcopy(CHAT), {"kv_transfer_params": params()}
    kept = copy.deepcopy(given)
    first, second = lab.prefill_body(body), lab.decode_body(body, given)
    first["messages"][0]["content"] = second["messages"][0]["content"] = "changed"
    second["kv_transfer_params"]["remote_block_ids"][0].append(9)
    same((body, given), (CHAT, kept), "the client's body and P's answer (X5)")
    first["kv_transfer_params"]["remote_host"] = "changed"
    same(lab.prefill_body(body)["kv_transfer_params"], ASKED, "what P is asked for the next one")


def test_p_strictly_before_d(lab):
    """D asked while P computes: there is nothing to read yet."""
    fake = Fake(lab, answered(kv_transfer_params=params()))
    came = list(lab.route(CHAT, "P", "D", fake))
    same(fake.log[:3], ["P asked", "P done", "D asked"], "order of the legs (X3)")
    same(b"".join(came), b"".join(fake.pieces), "what the client gets is D's answer alone")
    same(fake.bodies["D"], {**CHAT, "kv_transfer_params": params()}, "D's body")


def test_pieces_pass_as_they_come(lab):
    """A proxy that waits for the whole answer: its first token comes with the last."""
    fake = Fake(lab, answered(kv_transfer_params=params()))
    came = lab.route(CHAT, "P", "D", fake)
    first = next(iter(came))
    same((first, fake.log[-1]), (b"data: a\n\n", "piece 0"), "after the client's first piece")


def test_one_request_id_for_both_legs(lab):
    """An id per leg: the logs of two engines that nobody can join."""
    fake = Fake(lab, answered())
    for _ in range(2):
        list(lab.route(CHAT, "P", "D", fake))
    same(fake.ids[0] == fake.ids[1], True, "P's and D's id of one request")
    same(fake.ids[2] != fake.ids[0], True, "another request has another")


@pytest.mark.parametrize("how", ["unreachable", "no params", "no JSON", "no object"])
def test_a_prefiller_that_fails_costs_no_request(lab, how):
    """A missing prefiller taken for an error: D could have served."""
    said = {"no params": answered(), "no JSON": b"<html>busy</html>", "no object": b'"too busy"'}
    fake = Fake(lab, said.get(how) or lab.LegFailed("refused"))
    came = list(lab.route(CHAT, "P", "D", fake))
    same((came, fake.bodies["D"]), (list(fake.pieces), CHAT), f"P: {how}. D's answer and body (X4)")


def test_a_decoder_that_fails_is_an_error(lab):
    """An empty answer in the place of an error."""

    def send(url, body, request_id):
        if url == "D":
            raise lab.LegFailed("D is gone")
        yield answered()

    with pytest.raises(lab.LegFailed):
        list(lab.route(CHAT, "P", "D", send))


def test_blocks_and_bytes(lab, record_property):
    """A last block that is begun and does not travel."""
    same(lab.blocks_and_bytes(2031, 16, 12_288), (127, 24_969_216), "2,031 tokens of a 0.5B")
    for name, of in recorded()["legs"].items():
        if name.startswith("prefill"):
            tokens, held = int(name.split()[1]), len(of["held"])
            came = lab.blocks_and_bytes(tokens, 16, 10)
            same(came, (held, held * 160), f"blocks that vLLM holds after {name}")
    record_property("measured.mib", lab.blocks_and_bytes(2031, 16, 12_288)[1] / 2**20)


def test_what_the_decoder_reads_and_computes(lab, record_property):
    """A decoder that reads what it has, or that computes nothing of a prompt it has whole."""
    legs = recorded()["legs"]
    for name, tokens, cached in (
        ("decode 40", 40, 0), ("decode 40, warm", 40, 32), ("decode 1", 1, 0),
        ("decode 15", 15, 0), ("decode 16", 16, 0), ("decode 17", 17, 0),
    ):  # fmt: skip
        of = legs[name]
        expected = len(of["read"][0]), of["plans"][-1]["d"]
        same(lab.decode_leg(tokens, cached, 16), expected, f"{name}: blocks read, tokens computed")
    record_property("measured.computed", legs["decode 40"]["plans"][-1]["d"])


def test_lines_of_the_log(lab):
    """MB that are MiB, and a parser that dies on the lines between."""
    for each in recorded()["lines"]:
        line = f"(EngineCore pid=7) INFO 01-01 00:00:00 [metrics.py:103] {each['text']}"
        came = lab.parse_transfer_line(line)
        assert isinstance(came, dict), f"{line}\nexpected a dict of numbers; came {came!r}"
        sizes = [size for _, _, size, _ in each["transfers"]]
        same(came.get("Num successful transfers"), float(len(sizes)), line)
        if sizes:
            mib = round(sum(sizes) / len(sizes) / 2**20, 3)
            same(came.get("Avg MB per transfer"), mib, f"its MB is 2^20 bytes: {line}")
        same(len(came), 8, f"names in {line}")
    for other in ("", "INFO 01-01 [loggers.py:1] Avg prompt throughput: 3.0 tokens/s"):
        same(lab.parse_transfer_line(other), None, f"another line: {other!r}")


def test_two_servers_on_loopback(lab):
    """Bodies that only a test's own function understands: two HTTP servers hear the legs."""
    heard, lock = [], threading.Lock()

    def server(name, pieces, dies=False):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    heard.append((name, self.headers["X-Request-Id"], body))
                self.send_response(200)
                self.end_headers()
                for piece in pieces:
                    self.wfile.write(piece)
                if dies:  # a reset, and not an end
                    linger = struct.pack("ii", 1, 0)
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    self.connection.close()

            def log_message(self, *words):
                pass

        made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        return made, f"http://127.0.0.1:{made.server_address[1]}/v1/completions"

    p, p_url = server("P", [answered(kv_transfer_params=params())])
    d, d_url = server("D", [b"data: a\n\n", b"data: [DONE]\n\n"])
    dying, dying_url = server("P", [b'{"choices"'], dies=True)
    try:
        came = b"".join(lab.route(CHAT, p_url, d_url))
        p.shutdown()
        p.server_close()
        again = b"".join(lab.route(CHAT, p_url, d_url))  # nobody listens any more
        broken = b"".join(lab.route(CHAT, dying_url, d_url))
    finally:
        for each in (p, d, dying):
            each.shutdown()
            each.server_close()
    whole = b"data: a\n\ndata: [DONE]\n\n"
    same((came, again, broken), (whole,) * 3, "what the client got, three times")
    same([name for name, _, _ in heard], ["P", "D", "D", "P", "D"], "who was asked, in order")
    same(heard[0][1] == heard[1][1] != heard[2][1], True, "request ids")
    for _, _, body in (heard[2], heard[4]):
        same(body, CHAT, "no prefiller, or one that dies in its answer: D gets the client's body")


def test_run_predicts_without_a_gpu(lab):
    """A run script that nobody has started before the GPU is rented."""
    command = [sys.executable, str(HERE / "run.py"), "--predict", "--file", lab.__file__]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[2],)))}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert ran.returncode == 0, f"expected 0; came {ran.returncode}\n{ran.stderr[-600:]}"
    assert "24,969,216" in ran.stdout, f"expected the bytes of 2,031 tokens; came\n{ran.stdout}"


@pytest.mark.upstream
def test_the_legs_are_what_the_pinned_scheduler_does(lab):
    """A file that says what the release does not."""
    from conformance.features.kv_transfer import nixl, nixl_pair

    assert nixl.record() == recorded(), "both legs, recorded anew"
    same(nixl_pair.ASKS, lab.prefill_body(CHAT)["kv_transfer_params"], "what P is asked")

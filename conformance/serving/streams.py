"""The bytes of streamed chats, of vLLM's server and of this one, whole and killed on the way.

    course engine run -m conformance.record streams              # the real engine

Where `recorded.py` keeps events, this keeps bytes: what a client reads from its socket. Two servers
are started, asked, and killed while they answer: vLLM's once by its engine, once by itself. What
the openai package makes of each stream, and of each that `breaks.py` breaks, is kept beside it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conformance import recording
from conformance.serving import breaks
from conformance.serving.battery import BASE, KEY, MAX_MODEL_LEN, MESSAGES, MODEL, Ask, asks
from conformance.serving.recorded import ROOT, TEMPLATE, flags, nameless, send

KEPT = Path(__file__).parents[1] / "recordings" / "engine" / "streams.jsonl.gz"
CHAT = "/v1/chat/completions"
AFTER = 5
"""Events that a client has heard when a server is killed."""

ABOUT = (
    '`{"name", "server", "asked", "text"}`, of a whole one also `"at_once"`: the choices of the '
    'same request without a stream; then `{"name", "broken", "openai"}`, what the openai package '
    "gives of it. How events are cut, and after how many a server died, is a matter of time."
)
SEPARATORS = "one\u2028two\u2029three\u0085four\u000cfive"
"""Ends of lines for `str.splitlines`, and not for a stream."""
STREAMED = (
    "chat, streamed", "chat, two completions, streamed", "chat, a stop text, streamed",
    "chat, several turns, streamed", "chat, one call, streamed", "chat, text and a call, streamed",
    "chat, two calls, streamed", "chat, a call cut off, streamed",
    "chat, a call that is no JSON, streamed", "chat, a call with other letters, streamed",
    "chat, a named tool, streamed", "chat, a tool required, streamed",
    "chat, usage in every chunk", "chat, streamed without usage",
)  # fmt: skip
"""Requests of the battery whose bytes are kept."""
BROKEN_OF = (
    "chat, streamed", "chat, two completions, streamed", "chat, two calls, streamed",
    "chat, streamed without usage",
)  # fmt: skip
"""Those that are broken."""


def chats() -> list[Ask]:
    """What is asked, all of it streamed."""
    known = {ask.name: ask for ask in asks()}
    body = {
        **BASE, "messages": MESSAGES, "max_tokens": 40, "stream": True,
        "structured_outputs": {"choice": [SEPARATORS]},
    }  # fmt: skip
    return [*(known[name] for name in STREAMED), Ask("chat, separators, streamed", CHAT, body)]


def at_once(ask: Ask) -> Ask:
    """The same without a stream."""
    left = {k: v for k, v in ask.body.items() if k not in ("stream", "stream_options")}
    return Ask(ask.name, ask.path, left)


def nameless_bytes(data: bytes) -> str:
    """A stream as text, ids and times of its events named as in `recorded.py`."""
    text = data.decode()
    text = re.sub(r'"created":\d+', '"created":0', text)
    named = nameless(text)
    assert isinstance(named, str)
    return named


def read(port: int, ask: Ask, kill: int | None = None) -> bytes:
    """The bytes of a streamed answer; with `kill` that process is killed after some events."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    data = b""
    try:
        connection.request("POST", ask.path, ask.content(), headers)
        answer = connection.getresponse()
        assert answer.status == 200, f"{ask.name}: {answer.status} {answer.read()!r}"
        try:
            while piece := answer.read1(1 << 16):
                data += piece
                if kill is not None and data.count(b"\n\n") >= AFTER:
                    os.kill(kill, signal.SIGKILL)
                    kill = None
        except (http.client.IncompleteRead, ConnectionResetError) as error:
            data += getattr(error, "partial", b"")
    finally:
        connection.close()
    return data


def core_of(server: int) -> int:
    """The process of the engine that a server of vLLM started."""
    for children in Path(f"/proc/{server}/task").glob("*/children"):
        for child in children.read_text().split():
            if b"EngineCore" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise SystemExit(f"the server {server} has no process of an engine")


@contextmanager
def started(kind: str) -> Iterator[tuple[int, int]]:
    """A server, "vllm" or "mini": its port and its process. It may die inside."""
    from conformance import serve_stream

    port = serve_stream.free_port()
    if kind == "vllm":
        command = ["vllm.entrypoints.cli.main", "serve", f"models/{MODEL}", *flags(port)]
    else:
        plain = (
            f"serve {MODEL} --port {port} --max-model-len {MAX_MODEL_LEN} --api-key {KEY} "
            f"--tool-call-parser hermes --served-model-name {MODEL} --disable-any-whitespace"
        )
        command = ["mini_vllm.entrypoints.cli", *plain.split(), "--chat-template", str(TEMPLATE)]
    server = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT)
    try:
        serve_stream.wait_for(server, f"http://127.0.0.1:{port}")
        yield port, server.pid
    finally:
        if server.poll() is None:
            serve_stream.end(server)


def heard_by_openai(data: bytes) -> dict[str, Any]:
    """What the openai package's client gives of these bytes: its chunks, and what it raises."""
    import httpx
    import openai

    kind = {"content-type": "text/event-stream"}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, headers=kind, content=data))
    client = openai.OpenAI(
        api_key=KEY, base_url="http://127.0.0.1/v1", max_retries=0,
        http_client=httpx.Client(transport=transport),
    )  # fmt: skip
    chunks, raised = 0, None
    try:
        for _ in client.chat.completions.create(model=MODEL, messages=[], stream=True):
            chunks += 1
    except Exception as error:
        raised = type(error).__name__
    return {"chunks": chunks, "raises": raised}


def of_server(kind: str) -> Iterator[dict[str, Any]]:
    """Every stream of one server, the last of them killed."""
    long = {**BASE, "messages": MESSAGES, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with started(kind) as (port, process):
        for ask in chats():
            whole = nameless(send(port, at_once(ask))["body"]["choices"])
            text = nameless_bytes(read(port, ask))
            yield {
                "name": ask.name, "server": kind, "asked": ask.body, "text": text,
                "at_once": whole,
            }  # fmt: skip
        ask = Ask("chat, the server dies", CHAT, long)
        if kind == "vllm":
            ask = Ask("chat, the engine dies", CHAT, long)
            process = core_of(process)
        text = nameless_bytes(read(port, ask, kill=process))
        yield {"name": ask.name, "server": kind, "asked": long, "text": text}
    if kind == "vllm":
        with started(kind) as (port, process):
            ask = Ask("chat, the server dies", CHAT, long)
            text = nameless_bytes(read(port, ask, kill=process))
            yield {"name": ask.name, "server": kind, "asked": long, "text": text}


def error_block(text: str) -> bytes:
    """The error event of a stream whose engine died."""
    (found,) = (b for b in breaks.blocks(text.encode()) if b.startswith(b'data: {"error"'))
    return found


def recorded() -> Iterator[dict[str, Any]]:
    """Every stream of both servers, and what the openai package gives of each."""
    import openai

    from conformance.real_engine import provenance

    os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    yield {"machine": provenance("float32") | {"openai": openai.__version__}}
    found = [line for kind in ("vllm", "mini") for line in of_server(kind)]
    yield from found
    real = {line["name"]: line["text"] for line in found if line["server"] == "vllm"}
    for name, text in real.items():
        yield {"name": name, "broken": None, "openai": heard_by_openai(text.encode())}
    error = error_block(real["chat, the engine dies"])
    for name in BROKEN_OF:
        for rule, data in breaks.broken(real[name].encode(), error).items():
            yield {"name": name, "broken": rule, "openai": heard_by_openai(data)}


def kept(server: str = "vllm") -> dict[str, dict[str, Any]]:
    """The recorded streams of a server, "vllm" or "mini", by the request's name."""
    return {line["name"]: line for line in recording.lines(KEPT) if line.get("server") == server}


def openai_heard() -> list[dict[str, Any]]:
    """What the openai package gave of each stream, whole and broken."""
    return [line for line in recording.lines(KEPT) if "openai" in line]


def main() -> int:
    """Print the lines; for looking at them."""
    for line in recorded():
        print(json.dumps(line))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

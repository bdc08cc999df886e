"""What vLLM's server answers to `battery.asks()`: recorded, and how two answers are compared.

    course engine run -m conformance.record serving              # the real engine

An answer is a status, a content type, and a body: an object, a text, or the events of a stream in
their order. Ids, times and the fingerprint are named instead of kept (`nameless`).
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conformance import recording
from conformance.serving.battery import KEY, MAX_MODEL_LEN, MODEL, Ask, asks

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).parents[1] / "recordings" / "engine" / "serving.jsonl.gz"
TEMPLATE = Path(__file__).with_name("template.jinja")
ADAPTERS = ("code", "quote", "shout")

ABOUT = (
    '`{"name", "status", "type", "body"}` of each request of `battery.py`, in its order; of a '
    'stream `"events"` instead of a body. Ids, times and fingerprints are named, not kept.'
)

_IDS = (
    (r"\bchatcmpl-tool-[0-9a-f]{8,}", "chatcmpl-tool-ID"),
    (r"\bchatcmpl-(?!tool-)[0-9a-f]{8,}", "chatcmpl-ID"),
    (r"\bcmpl-[0-9a-f]{8,}", "cmpl-ID"),
    (r"\bmodelperm-[0-9a-f]{8,}", "modelperm-ID"),
    (r"\b(resp|msg|rs|fc|call)_[0-9a-f]{8,}", r"\1_ID"),
    (r"^[0-9a-f]{16,32}$", "ID"),
    (r"\n\n  File \".*", ""),  # the place in the server's own code, on its own disk
    (r"\[\d\d:\d\d:\d\d\] /project/.*", "WHAT THE LIBRARY SAYS"),
    (r"\b(?:mini-)?vllm-[0-9][0-9A-Za-z.+]*-[0-9a-f]{8}", "FINGERPRINT"),
)


def nameless(value: Any) -> Any:
    """The same with ids, times and fingerprints named."""
    if isinstance(value, dict):
        named = {key: nameless(item) for key, item in value.items()}
        for name in ("created", "created_at"):
            if isinstance(named.get(name), int):
                named[name] = "TIME"
        return named
    if isinstance(value, list):
        return [nameless(item) for item in value]
    if isinstance(value, str):
        for pattern, name in _IDS:
            value = re.sub(pattern, name, value, flags=re.DOTALL)
    return value


def parsed(content: bytes) -> Any:
    """A body as an object, or as text."""
    text = content.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


def send(port: int, ask: Ask, timeout: float = 120.0) -> dict[str, Any]:
    """One answer of the server at `port` of this machine, as it is kept."""
    headers = {"Content-Type": "application/json"} if ask.method == "POST" else {}
    headers |= ask.headers
    if ask.key is not None:
        headers["Authorization"] = f"Bearer {ask.key}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(ask.method, ask.path, ask.content(), headers)
        answer = connection.getresponse()
        kind = (answer.getheader("Content-Type") or "").split(";")[0]
        content = answer.read()
    finally:
        connection.close()
    found = {"name": ask.name, "status": answer.status, "type": kind}
    if kind == "text/event-stream":
        blocks = content.decode().split("\n\n")
        return found | {"events": [nameless(_event(block)) for block in blocks if block]}
    return found | {"body": nameless(parsed(content))}


def _event(block: str) -> Any:
    """The data of one event; of a named one, as `/v1/messages` sends them, with its name."""
    if not block.startswith("event: "):
        return parsed(block.removeprefix("data: ").encode())
    name, _, data = block.removeprefix("event: ").partition("\ndata: ")
    return {"event": name, "data": parsed(data.encode())}


def flags(port: int) -> list[str]:
    """How vLLM's server is started, in the folder of the repository."""
    modules = [f"{name}=models/adapters/{name}" for name in ADAPTERS]
    grammars = {"backend": "xgrammar", "disable_any_whitespace": True}
    plain = (
        f"--host 127.0.0.1 --port {port} --max-model-len {MAX_MODEL_LEN} --dtype float32 "
        f"--enforce-eager --gpu-memory-utilization 0.1 --served-model-name {MODEL} "
        "--enable-auto-tool-choice --tool-call-parser hermes --enable-lora --max-loras 4 "
        "--max-cpu-loras 4 --max-lora-rank 8 --worker-extension-cls "
        f"conformance.features.lora.worker.NoPinning --api-key {KEY}"
    )
    return [
        *plain.split(), "--chat-template", str(TEMPLATE.relative_to(ROOT)), "--lora-modules",
        *modules, "--structured-outputs-config", json.dumps(grammars),
    ]  # fmt: skip


@contextmanager
def real_server(**variables: str) -> Iterator[int]:
    """vLLM's server, with these environment variables; its port."""
    from conformance import serve_stream

    env = os.environ | {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"} | variables
    port = serve_stream.free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    server = subprocess.Popen([*command, f"models/{MODEL}", *flags(port)], cwd=ROOT, env=env)
    try:
        serve_stream.wait_for(server, f"http://127.0.0.1:{port}")
        yield port
    finally:
        serve_stream.end(server)


def recorded() -> Iterator[dict[str, Any]]:
    """Every answer of the real server, one after the other."""
    from conformance.real_engine import provenance

    yield {"machine": provenance("float32")}
    with real_server() as port:
        for ask in asks():
            yield send(port, ask)


def kept(path: Path = KEPT) -> dict[str, dict[str, Any]]:
    """The recorded answers by the request's name."""
    return {line["name"]: line for line in recording.lines(path) if "name" in line}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the answers of a server that listens already: `python -m ... PORT`."""
    (port,) = sys.argv[1:] if argv is None else argv
    for ask in asks():
        print(json.dumps(send(int(port), ask)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`vllm serve` on the shipped model: answers as they stream, and the server's own counters.

    python -m conformance.serve_stream            # in the environment of the real engine

Prints one line of JSON, as `labkit.processes.answer` does: per prompt what arrived, piece by
piece, and the counters that moved. The server listens on this machine only and ends with this
program.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit import processes

MODEL = Path(__file__).resolve().parents[1] / "models" / "byte-llama"
NAME = "byte-llama"
PROMPTS = ("The KV cache is divided into", "The scheduler")
MAX_TOKENS = 24
COUNTERS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
)
START_UP = 300.0
"""Seconds the server may take to start."""


def serve(port: int, *more: str) -> subprocess.Popen[bytes]:
    """Start the server, with `more` flags; what it says goes where this program's output goes."""
    flags = f"--host 127.0.0.1 --port {port} --max-model-len 256 --enforce-eager --dtype float32"
    flags += f" --gpu-memory-utilization 0.1 --served-model-name {NAME} --no-use-tqdm-on-load"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL)]
    return subprocess.Popen([*command, *flags.split(), *more])


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def end(server: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, and wait for it."""
    server.terminate()
    server.wait(60)


def wait_for(server: subprocess.Popen[bytes], url: str) -> None:
    """Until the server answers.

    Raises:
        SystemExit: it ended, or `START_UP` seconds went by.
    """
    end = time.monotonic() + START_UP
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    raise SystemExit(f"no server at {url}; its exit status: {server.poll()}")


def stream(url: str, prompt: str) -> dict[str, Any]:
    """One completion as it arrives: "pieces" of text, "finish_reason", "usage", "done"."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    post = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    heard: dict[str, Any] = {"pieces": [], "finish_reason": None, "usage": None, "done": False}
    with urllib.request.urlopen(post, timeout=120) as answer:
        for data in events(answer):
            if data == "[DONE]":
                heard["done"] = True
                continue
            event = json.loads(data)
            for choice in event["choices"]:
                heard["pieces"].append(choice["text"])
                heard["finish_reason"] = choice["finish_reason"] or heard["finish_reason"]
            heard["usage"] = event.get("usage") or heard["usage"]
    return heard


def events(answer: Any) -> Iterator[str]:
    """The data of each server-sent event."""
    for raw in answer:
        line = raw.decode().rstrip("\n")
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def counters(url: str) -> dict[str, float]:
    """The server's counters of `COUNTERS`, each summed over its labels."""
    found = dict.fromkeys(COUNTERS, 0.0)
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        for line in answer.read().decode().splitlines():
            name = line.split("{", 1)[0]
            if name in found:
                found[name] += float(line.rsplit(" ", 1)[1])
    return found


def main() -> int:
    """Serve, ask each prompt, count, end the server."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = serve(port)
    try:
        wait_for(server, url)
        before = counters(url)
        answers = {prompt: stream(url, prompt) for prompt in PROMPTS}
        after = counters(url)
    finally:
        end(server)
    spent = {name: after[name] - before[name] for name in COUNTERS}
    processes.answer({"answers": answers, "counters": spent})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

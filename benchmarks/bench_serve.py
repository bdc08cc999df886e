"""64 clients that stream at once, from our server and from vLLM's CPU build, one after the other.

    python -m benchmarks.bench_serve --seconds 60                 # ours
    course engine run -m benchmarks.bench_serve --real --seconds 60

Every client asks again as soon as its answer has ended. Reported: tokens per second, the gap
between two pieces of one stream (median, 99th percentile, longest), the time to the first piece,
requests answered by the client that got fewest and most, and the server's resident memory after a
quarter of the time and at the end. The clients run in this process, on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.serve_stream import end, free_port, wait_for

ROOT = Path(__file__).resolve().parents[1]
MODEL = "byte-llama"
PROMPT_LEN, MAX_TOKENS = 48, 64


@dataclass(slots=True)
class Heard:
    """What all clients heard."""

    gaps: list[float] = field(default_factory=list)
    """Seconds between two pieces of one stream."""
    first: list[float] = field(default_factory=list)
    """Seconds to the first piece."""
    answers: dict[int, int] = field(default_factory=dict)
    """Answers by client."""
    tokens: int = 0


def command(real: bool, port: int) -> list[str]:
    """How a server is started: float32, 64 requests at once, 512 tokens of context."""
    model = f"models/{MODEL}"
    if not real:
        flags = f"--port {port} --max-model-len 512 --num-blocks 2200 --max-num-seqs 64"
        return [sys.executable, "-m", "mini_vllm.entrypoints.cli", "serve", model, *flags.split()]
    flags = f"--host 127.0.0.1 --port {port} --max-model-len 512 --max-num-seqs 64 --enforce-eager"
    flags += " --dtype float32 --gpu-memory-utilization 0.1 --disable-uvicorn-access-log"
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *flags.split()]


async def client(number: int, port: int, until: float, heard: Heard) -> None:
    """One client: asks, reads to the end, asks again."""
    text = (ROOT / "GLOSSARY.md").read_text(encoding="utf-8")
    asked = 0
    while time.monotonic() < until:
        start = (101 * number + 977 * asked) % (len(text) - PROMPT_LEN)
        body: dict[str, Any] = {
            "model": f"models/{MODEL}",
            "prompt": text[start : start + PROMPT_LEN],
        }
        body |= {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began = last = time.monotonic()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + content)
        pieces, ended = 0, False
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if ended := line.startswith(b"data: [DONE]"):
                heard.answers[number] = heard.answers.get(number, 0) + 1
                heard.tokens += MAX_TOKENS
                break
            now = time.monotonic()
            (heard.gaps if pieces else heard.first).append(now - (last if pieces else began))
            last, pieces = now, pieces + 1
        writer.close()
        if not ended:
            raise RuntimeError(f"client {number}, request {asked}: the stream ended early")
        asked += 1


def resident(pid: int) -> float:
    """MiB of a process and its children."""
    pids, total = [pid], 0
    for each in pids:
        try:
            pids += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1])
        except OSError:
            continue
    return total * os.sysconf("SC_PAGE_SIZE") / 2**20


async def load(port: int, pid: int, num_clients: int, seconds: float) -> dict[str, Any]:
    """Let the clients run for so long; what they heard, in numbers."""
    heard = Heard()
    begin = time.monotonic()
    clients = [
        asyncio.create_task(client(number, port, begin + seconds, heard))
        for number in range(num_clients)
    ]
    await asyncio.sleep(seconds / 4)
    early = resident(pid)
    await asyncio.gather(*clients)
    took = time.monotonic() - begin
    counts = [heard.answers.get(number, 0) for number in range(num_clients)]
    gaps = sorted(heard.gaps)
    return {
        "tokens_per_second": round(heard.tokens / took),
        "gap_ms": [round(1e3 * g, 1) for g in (statistics.median(gaps), gaps[int(0.99 * len(gaps))],
                                               gaps[-1])],
        "first_ms": [round(1e3 * f, 1) for f in (statistics.median(heard.first), max(heard.first))],
        "answers": [min(counts), max(counts)],
        "resident_mib": [round(early), round(resident(pid))],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_serve")
    parser.add_argument("--real", action="store_true", help="vLLM's server instead of ours")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args(argv)
    os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    port = free_port()
    server = subprocess.Popen(command(arguments.real, port), cwd=ROOT)
    try:
        wait_for(server, f"http://127.0.0.1:{port}")
        asyncio.run(load(port, server.pid, 8, 3.0))  # first calls are slower
        found = asyncio.run(load(port, server.pid, arguments.clients, arguments.seconds))
    finally:
        end(server)
    print(json.dumps({"server": "vllm" if arguments.real else "mini-vllm"} | found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

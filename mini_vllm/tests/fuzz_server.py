"""Requests that no client would send: bodies, headers and raw bytes, the same for the same seed.

    python -m mini_vllm.tests.fuzz_server 5000     # a server of its own, and another client

By hand it prints statuses, the other client's delays without and with the fuzz, and the memory.
"""

from __future__ import annotations

import copy
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, 1e-320, "",
    "a", "é" * 40, "\ud800", "\x00", "1", "nan", [], [[]], [None], [1, "a"], {}, {"a": 1}, [[1]],
    [2], {"type": "text"}, {"type": "object"}, [{"role": "user", "content": "hi"}], ["a", "b"],
    "(", ".*", {"regex": "a+"}, {"choice": ["a", "b"]}, {"json": {}},
    {"regex": "(a|b){3}", "choice": None},
    {"include_usage": True}, [TOOL], "auto", "required", "none", [256], [-1],
    {"97": 5}, {"x": None}, float("nan"), [[1]] * 2000, "a," * 3000, {"regex": "a" * 20_000},
    [{"function": "x"}], [{"type": []}], [[[[[[]]]]]],
)  # fmt: skip
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "stream", "stream_options", "logprobs",
    "top_logprobs", "prompt_logprobs", "echo", "suffix", "logit_bias", "allowed_token_ids",
    "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "structured_outputs", "response_format", "tools", "tool_choice", "use_beam_search", "priority",
    "request_id", "cache_salt", "truncate_prompt_tokens", "truncation_side", "bad_words",
    "length_penalty", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
    "return_token_ids", "parallel_tool_calls", "include_stop_str_in_output", "user", "tokens",
    "prompt_embeds", "chat_template",
)  # fmt: skip
BASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "The", "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [1]}),
    ("/v1/completions/render", {"prompt": "a"}),
)
HEADERS = (
    b"Content-Length: -5", b"Content-Length: 99999999999", b": a",
    b"Content-Length: 1\r\nContent-Length: 2",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Expect: 100-continue",
    b"X-Request-Id: \xe9\xff", b"X-Request-Id: " + b"a" * 5000, b"X: " + b"a" * 70_000, b"X",
    b"Content-Type: text/plain", b"Content-Type: \xff", b"Host: ", b"Connection: upgrade",
    b"Upgrade: websocket", b"Authorization: Bearer \x00", b"Connection: close", b"X\x00: a",
)  # fmt: skip


def bodies(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Paths and bodies."""
    rng = random.Random(seed)
    for _ in range(count):
        path, base = rng.choice(BASES)
        body = copy.deepcopy(base)
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            body[rng.choice(FIELDS)] = rng.choice(JUNK)
        content = json.dumps(body).encode()
        if rng.random() < 0.05:
            content = content[: rng.randrange(len(content))]
        if rng.random() < 0.03:
            content = rng.randbytes(20)
        yield path, content


def raw(count: int, seed: int) -> Iterator[bytes]:
    """Whole requests as bytes: odd headers, broken lines, some cut, some changed, some twice."""
    rng = random.Random(seed)
    for path, content in bodies(count, seed):
        lines = [b"POST %s HTTP/1.1" % path.encode(), b"Host: x", b"Content-Type: application/json"]
        if rng.random() < 0.7:
            lines.append(b"Content-Length: %d" % len(content))
        lines += rng.sample(HEADERS, rng.choice((0, 1, 1, 2)))
        sent = bytearray(b"\r\n".join(lines) + b"\r\n\r\n" + content)
        for _ in range(rng.choice((0, 0, 1, 5))):
            sent[rng.randrange(len(sent))] = rng.randrange(256)
        kind = rng.random()
        if kind < 0.2:
            sent = sent[: rng.randrange(len(sent))]
        elif kind < 0.3:
            sent = sent * 3
        elif kind < 0.35:
            sent = bytearray(rng.randbytes(300))
        yield bytes(sent)


def send_raw(port: int, content: bytes, wait_s: float = 0.05) -> bytes:
    """What a server says to the bytes within a short while, before this client leaves."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.settimeout(wait_s)
        try:
            client.sendall(content)
            return client.recv(65536)
        except OSError:
            return b""


# ---------------------------------------------------------------------- by hand


def _statuses(port: int, count: int, seed: int, seen: Counter[str]) -> None:
    for number, (path, content) in enumerate(bodies(count, seed)):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("POST", path, content, {"Content-Type": "application/json"})
            if number % 7:
                answer = connection.getresponse()
                answer.read()
                seen[str(answer.status)] += 1
            else:
                seen["left"] += 1
        except (OSError, http.client.HTTPException) as error:
            seen[type(error).__name__] += 1
        finally:
            connection.close()


def _raws(port: int, count: int, seed: int, seen: Counter[str]) -> None:
    for content in raw(count, seed):
        seen[f"raw {send_raw(port, content)[9:12].decode('latin-1')}"] += 1


def _delays(port: int, busy: Callable[[], bool]) -> list[float]:
    """Seconds of one short completion after the other while `busy`."""
    body = json.dumps({"prompt": "The scheduler", "max_tokens": 4, "temperature": 0})
    found = []
    while busy():
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, kind)
        connection.getresponse().read()
        connection.close()
        found.append(time.perf_counter() - began)
    return found


def main() -> None:
    """Fuzz a server of its own: `COUNT` bodies on four connections, as many raw requests on two."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = open("build/fuzz_server.log", "w", encoding="utf-8")  # noqa: SIM115
    command = [sys.executable, "-m", "mini_vllm.entrypoints.cli", "serve", "--port", str(port)]
    server = subprocess.Popen([*command, "--max-model-len", "128"], stdout=log, stderr=log)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        end = time.monotonic() + 10
        alone = _delays(port, lambda: time.monotonic() < end)
        seen: Counter[str] = Counter()
        each = [(_statuses, count // 8, seed) for seed in range(4)]
        each += [(_raws, count // 4, seed) for seed in (9, 10)]
        threads = [threading.Thread(target=f, args=(port, n, s, seen)) for f, n, s in each]
        for thread in threads:
            thread.start()
        beside = _delays(port, lambda: any(thread.is_alive() for thread in threads))
        print(f"{sum(seen.values())} requests: {dict(sorted(seen.items()))}")
        for name, delays in (("alone", alone), ("beside", beside)):
            cut = statistics.quantiles(delays, n=100)
            print(
                f"another client, {name}: {len(delays)} requests, median {1e3 * cut[49]:.0f} ms, "
                f"p99 {1e3 * cut[98]:.0f} ms, most {1e3 * max(delays):.0f} ms"
            )
        for pid in (server.pid, *map(int, _children(server.pid))):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            print(pid, *(line for line in lines if line.startswith("VmHWM")))
    finally:
        server.terminate()
        server.wait(30)
    log.close()
    print("tracebacks:", Path("build/fuzz_server.log").read_text().count("Traceback"))


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


if __name__ == "__main__":
    os.makedirs("build", exist_ok=True)
    main()

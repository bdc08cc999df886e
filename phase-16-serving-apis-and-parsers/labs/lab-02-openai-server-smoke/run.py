"""A real `vllm serve`, asked as a client asks: streams, tools, misbehaviour, a client that leaves.

    course gpu run 16-02                       vLLM 0.22.1 on a GPU, the shipped model
    course gpu run 16-02 --cpu                 vLLM's CPU build
    course gpu run 16-02 -- --model Qwen/Qwen2.5-0.5B-Instruct       a model that knows tools
    python run.py --predict                    what must come, without vLLM

The server is a process of its own, listens on this machine only, and ends with the run. Needs
vllm==0.22.1; without it the run says so and ends.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance import serve_stream
from conformance.serving.battery import MESSAGES, WEATHER
from conformance.serving.recorded import TEMPLATE
from labkit import processes, versions
from labkit.modules import load_module

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parents[2] / "models" / "byte-llama"
CONTEXT = 512
LONG = [{"role": "user", "content": "w" * 600}]
ROWS: dict[str, dict[str, Any]] = {
    "more tokens than the context": {"max_tokens": 99999},
    "a prompt too long": {"messages": LONG},
    "an unknown model": {"model": "nope"},
    "temperature -1": {"temperature": -1},
    "no messages": {"messages": None},
    "a tool that is not offered": {
        "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}},
    },
    "an unknown model, too hot": {"model": "nope", "temperature": -1},
    "an unknown model, tools chosen without tools": {"model": "nope", "tool_choice": "auto"},
    "too long and too hot": {"messages": LONG, "temperature": -1},
    "too many tokens and a prompt too long": {"messages": LONG, "max_tokens": 99999},
    "too hot, top_p of two, no tokens": {"temperature": -1, "top_p": 2, "max_tokens": 0},
    "top_p of two, no tokens": {"top_p": 2, "max_tokens": 0},
}  # fmt: skip
"""Requests that are refused; the last six break two rules and more."""


def body(name: str, **more: Any) -> dict[str, Any]:
    """A chat; what is None is left out."""
    asked = {"model": name, "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **more}
    return {key: value for key, value in asked.items() if value is not None}


# --- the client, in the process that holds the server ---------------------------------------------


def send(port: int, path: str, asked: Any = None, stop_after: int = 0) -> tuple[int, list[bytes]]:
    """Status and lines of an answer; with `stop_after` the client leaves after so many events."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    lines: list[bytes] = []
    try:
        content = None if asked is None else json.dumps(asked).encode()
        headers = {"Content-Type": "application/json"}
        connection.request("GET" if asked is None else "POST", path, content, headers)
        answer = connection.getresponse()
        for line in answer:
            lines.append(line)
            if stop_after and sum(kept.startswith(b"data:") for kept in lines) >= stop_after:
                break
        return answer.status, lines
    finally:
        connection.close()


def gauge(port: int, name: str) -> float:
    """One metric of the server, the sum over its labels."""
    _, lines = send(port, "/metrics")
    found = [line.decode() for line in lines if line.startswith(f"{name}{{".encode())]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def left(port: int, name: str) -> dict[str, Any]:
    """A client that leaves a long stream after four events, and what the cache held."""
    used = "vllm:kv_cache_usage_perc"
    before = gauge(port, "vllm:generation_tokens_total")
    asked = body(name, stream=True, max_tokens=400, ignore_eos=True)
    send(port, "/v1/chat/completions", asked, stop_after=4)
    limit = time.monotonic() + 60
    while (running := gauge(port, "vllm:num_requests_running")) and time.monotonic() < limit:
        time.sleep(0.05)
    made = gauge(port, "vllm:generation_tokens_total") - before
    return {"running": running, "cache": gauge(port, used), "tokens": made}


def timed(port: int, name: str) -> dict[str, float]:
    """Milliseconds of the template alone, of the first event, and of the server's own measure."""
    first = "vllm:time_to_first_token_seconds"
    asked = body(name, stream=True)
    start = time.perf_counter()
    send(port, "/v1/chat/completions/render", body(name))
    rendered = time.perf_counter()
    summed, count = gauge(port, f"{first}_sum"), gauge(port, f"{first}_count")
    began = time.perf_counter()
    send(port, "/v1/chat/completions", asked, stop_after=1)
    heard = time.perf_counter()
    time.sleep(0.5)
    more = gauge(port, f"{first}_count") - count
    own = (gauge(port, f"{first}_sum") - summed) / more
    return {"render": 1e3 * (rendered - start), "first": 1e3 * (heard - began), "metric": 1e3 * own}


def drive(arguments: argparse.Namespace) -> None:
    """Start the server, ask it everything, give what came, end it."""
    port, name = serve_stream.free_port(), arguments.name
    os.environ |= {"TORCH_COMPILE_DISABLE": "1"} if versions.on_cpu() else {}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", arguments.model]
    flags = (
        f"--host 127.0.0.1 --port {port} --max-model-len {CONTEXT} --served-model-name {name} "
        f"--gpu-memory-utilization {arguments.util} --enable-auto-tool-choice --tool-call-parser "
        "hermes --enable-log-requests --enforce-eager"
    )
    if versions.on_cpu():
        flags += " --dtype float32"
    if arguments.model == str(SHIPPED):
        flags += f" --chat-template {TEMPLATE}"
    grammars = {"backend": "xgrammar", "disable_any_whitespace": True}  # else it may only indent
    command += [*flags.split(), "--structured-outputs-config", json.dumps(grammars)]
    server = subprocess.Popen(command)
    chat = "/v1/chat/completions"
    try:
        serve_stream.wait_for(server, f"http://127.0.0.1:{port}")
        processes.tell("the server is up")
        came: dict[str, Any] = {"rows": {}, "tools": {}}
        plain = {"stream": True, "stream_options": {"include_usage": True}}
        for kind, more in (("whole", {}), ("stream", plain)):
            came[kind] = [line.decode() for line in send(port, chat, body(name, **more))[1]]
        named = {"type": "function", "function": {"name": "get_weather"}}
        for choice in ("auto", "required", named):
            asked = body(name, tools=[WEATHER], tool_choice=choice, max_tokens=120, **plain)
            words = choice if isinstance(choice, str) else "named"
            came["tools"][words] = [line.decode() for line in send(port, chat, asked)[1]]
        processes.tell("streams are heard")
        for row, more in ROWS.items():
            status, lines = send(port, chat, body(name, **more))
            came["rows"][row] = [status, json.loads(b"".join(lines))]
        came["left"] = left(port, name)
        came["times"] = timed(port, name)
    finally:
        serve_stream.end(server)
    processes.answer(came)


# --- what must come -------------------------------------------------------------------------------


def verdict(name: str, want: Any, came: Any) -> bool:
    """One line for an expectation; whether it holds."""
    print(f"{'as predicted' if want == came else 'NOT AS PREDICTED'}: {name}: {came}")
    if want != came:
        print(f"    expected {want}")
    return bool(want == came)


def predicted(lab: ModuleType, name: str) -> dict[str, tuple[int, str | None] | None]:
    """What your `predict_error` says of each row."""

    def tokens(request: dict[str, Any]) -> int:
        return sum(len(message["content"]) for message in request["messages"]) + 17

    server = lab.Server([name], CONTEXT, tokens)
    return {row: lab.predict_error(body(name, **more), server) for row, more in ROWS.items()}


def lines_of(text: list[str]) -> list[bytes]:
    return [line.encode() for line in text]


def judge(lab: ModuleType, arguments: argparse.Namespace, ran: processes.Ran) -> bool:
    """Everything that came, beside what must."""
    came = ran.needed()
    events = lab.parse_sse(lines_of(came["stream"]))
    deltas = [part["delta"].get("content") for e in events[:-1] for part in e["choices"]]
    print("content of each chunk:", deltas)
    right = verdict("the first chunk has a role and no text", "", deltas[0])
    (whole,) = json.loads("".join(came["whole"]))["choices"]
    reply = lab.assemble(events)
    right &= verdict("joined, as at once", whole["message"]["content"], reply.content)
    for choice, text in came["tools"].items():
        reply = lab.assemble(lab.parse_sse(lines_of(text)))
        calls = [[call["name"], call["arguments"]] for call in reply.tool_calls]
        print(f"tool_choice {choice}: {reply.finish_reason}, {calls or repr(reply.content)}")
        if choice != "auto":  # a small model may answer in text
            right &= verdict(
                f"{choice}: it calls", ["get_weather"], [call[0] for call in calls[:1]]
            )
    for row, want in predicted(lab, arguments.name).items():
        status, answer = came["rows"][row]
        error = answer.get("error") or {}
        right &= verdict(row, list(want) if want else None, [status, error.get("param")])
        print("   ", str(error.get("message")).splitlines()[0][:90])
    gone = came["left"]
    right &= verdict("a client leaves: requests still running", 0.0, gone["running"])
    right &= verdict("and the cache that is used", 0.0, gone["cache"])
    print(f"tokens made for it: {gone['tokens']:.0f} of 400")
    for words in ("Aborted request(s) ", "aborted."):
        right &= verdict(f"the log says {words!r}", True, words in ran.text)
    times = ", ".join(f"{name} {value:.1f}" for name, value in came["times"].items())
    print(f"milliseconds: {times}")
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description="A client of a real vllm serve.")
    parser.add_argument("--model", default=str(SHIPPED))
    parser.add_argument("--name", default="served", help="under which the server has it")
    parser.add_argument("--util", type=float, default=0.1, help="share of the memory")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--predict", action="store_true", help="say what must come, and end")
    parser.add_argument("--drive", action="store_true", help="the server, in this process")
    arguments = parser.parse_args()
    if arguments.drive:
        drive(arguments)
        return 0
    lab = load_module(Path(arguments.file))
    if arguments.predict:
        for row, want in predicted(lab, arguments.name).items():
            print(f"{row}: {want}")
        return 0
    versions.need_vllm("--predict, or the tests")
    print("starting a server", flush=True)
    command = [__file__, "--drive", "--model", arguments.model, "--name", arguments.name]
    env = {**os.environ}
    if versions.on_cpu():
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    ran = processes.start([*command, "--util", str(arguments.util)], env=env)
    right = judge(lab, arguments, ran)
    print("all as predicted" if right else "something is not as predicted; see above")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A real `vllm serve` and your client: streams, tools, a client that leaves, an engine that dies.

    course gpu run 16-02                       vLLM 0.22.1 on a GPU, the shipped model
    course gpu run 16-02 --cpu                 vLLM's CPU build
    course gpu run 16-02 -- --model Qwen/Qwen2.5-0.5B-Instruct       a model that knows tools
    python run.py --file starter.py            your client, in vLLM's environment

The server is a process of its own, listens on this machine only, and ends with the run. Needs
vllm==0.22.1; without it the run says so and ends.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance import serve_stream
from conformance.serving import streams
from conformance.serving.battery import MESSAGES, WEATHER
from conformance.serving.recorded import TEMPLATE
from labkit import processes, versions
from labkit.modules import load_module

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parents[2] / "models" / "byte-llama"
CONTEXT = 512


def body(name: str, **more: Any) -> dict[str, Any]:
    """A chat; what is None is left out."""
    asked = {"model": name, "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **more}
    return {key: value for key, value in asked.items() if value is not None}


# --- the client, in the process that holds the server ---------------------------------------------


def send(
    port: int, path: str, asked: Any = None, stop_after: int = 0, kill: int = 0
) -> tuple[int, list[bytes]]:
    """Status and lines of an answer.

    With `stop_after` the client leaves after so many events; with `kill` it stays, and the process
    of that id is killed.
    """
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
                if not kill:
                    break
                os.kill(kill, signal.SIGKILL)
                stop_after = 0
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
        came: dict[str, Any] = {"tools": {}}
        plain = {"stream": True, "stream_options": {"include_usage": True}}
        for kind, more in (("whole", {}), ("stream", plain)):
            came[kind] = [line.decode() for line in send(port, chat, body(name, **more))[1]]
        named = {"type": "function", "function": {"name": "get_weather"}}
        for choice in ("auto", "required", named):
            asked = body(name, tools=[WEATHER], tool_choice=choice, max_tokens=120, **plain)
            words = choice if isinstance(choice, str) else "named"
            came["tools"][words] = [line.decode() for line in send(port, chat, asked)[1]]
        processes.tell("streams are heard")
        came["left"] = left(port, name)
        came["times"] = timed(port, name)
        long = body(name, stream=True, max_tokens=400, ignore_eos=True)
        core = streams.core_of(server.pid)
        came["killed"] = [line.decode() for line in send(port, chat, long, 5, core)[1]]
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


def heard(lab: ModuleType, text: list[str]) -> Any:
    """Your client, fed line by line, and closed."""
    client = lab.Client()
    for line in text:
        client.feed(line.encode())
    client.close()
    return client


def judge(lab: ModuleType, arguments: argparse.Namespace, ran: processes.Ran) -> bool:
    """Everything that came, beside what must."""
    came = ran.needed()
    blocks = "".join(came["stream"]).split("\n\n")
    events = [json.loads(text.removeprefix("data: ")) for text in blocks if text.endswith("}")]
    deltas = [part["delta"].get("content") for e in events for part in e["choices"]]
    print("content of each chunk:", deltas)
    right = verdict("the first chunk has a role and no text", "", deltas[0])
    (whole,) = json.loads("".join(came["whole"]))["choices"]
    answer = heard(lab, came["stream"]).answer()
    right &= verdict("the stream is", "whole", answer.state)
    right &= verdict("joined, as at once", whole["message"]["content"], answer.choices[0].content)
    for choice, text in came["tools"].items():
        client = heard(lab, text)
        reply, calls = client.answer().choices[0], client.calls()
        print(f"tool_choice {choice}: {reply.finish_reason}, to run {calls or repr(reply.content)}")
        if choice != "auto":  # a small model may answer in text
            names = [call[1] for call in calls[:1]]
            right &= verdict(f"{choice}: it calls", ["get_weather"], names)
    gone = came["left"]
    right &= verdict("a client leaves: requests still running", 0.0, gone["running"])
    right &= verdict("and the cache that is used", 0.0, gone["cache"])
    print(f"tokens made for it: {gone['tokens']:.0f} of 400")
    for words in ("Aborted request(s) ", "aborted."):
        right &= verdict(f"the log says {words!r}", True, words in ran.text)
    answer = heard(lab, came["killed"]).answer()
    right &= verdict("the engine is killed: the stream is", "failed", answer.state)
    print(f"after {answer.choices[0].content!r}: {(answer.error or {}).get('message')}")
    times = ", ".join(f"{name} {value:.1f}" for name, value in came["times"].items())
    print(f"milliseconds: {times}")
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description="A client of a real vllm serve.")
    parser.add_argument("--model", default=str(SHIPPED))
    parser.add_argument("--name", default="served", help="under which the server has it")
    parser.add_argument("--util", type=float, default=0.1, help="share of the memory")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--drive", action="store_true", help="the server, in this process")
    arguments = parser.parse_args()
    if arguments.drive:
        drive(arguments)
        return 0
    lab = load_module(Path(arguments.file))
    versions.need_vllm("the tests")
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

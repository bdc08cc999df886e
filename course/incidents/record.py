"""Record the bad days of `course incident`: a real `vllm serve`, its log, /metrics and trace.

    course engine run -m course.incidents.record [DAY ...]

Writes `days/DAY/`: `server.log`, vLLM's own lines; `metrics.txt`, what GET /metrics said at three
or more moments; `trace.jsonl.gz`, what `vllm-flight-recorder` wrote inside the server; and
`requests.jsonl`, what the clients sent, with token ids, since the trace has none. Needs
vllm==0.22.1 (the build for processors will do). Promises: no line and no number is written by hand;
what is left out of a file is left out by the rules below. Clients send by what they heard before,
not by a clock, so that a busy machine changes the times and hardly the order. The rules that a day
must keep (one cause is left, the limit is missed before and kept after one knob) are
`test_incidents.py`'s.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance import serve_stream

ROOT = Path(__file__).resolve().parents[2]
DAYS = Path(__file__).parent / "days"
RECORDER = ROOT / "vllm-flight-recorder"
TEXT = (ROOT / "conformance" / "prompts.txt").read_bytes()
"""Prompts are pieces of it, a token per byte."""
FLAGS = (
    "--dtype float32 --max-model-len 512 --disable-uvicorn-access-log --no-use-tqdm-on-load "
    "--no-async-scheduling --enable-logging-iteration-details --served-model-name served"
)
KEPT_LINES = re.compile(
    r"non-default args|GPU KV cache size|Maximum concurrency|Application startup complete"
)
"""Lines of the log that are kept of the time before the server answers."""
KEPT_METRICS = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:request_success_total", "vllm:iteration_tokens_total_sum",
    "vllm:iteration_tokens_total_count", "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count", "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_sum", "vllm:request_queue_time_seconds_count",
    "vllm:cache_config_info", "vllm:lora_requests_info",
)  # fmt: skip
"""Names of /metrics that are kept."""


@dataclass(slots=True)
class Sent:
    """A request of a client."""

    prompt: list[int]
    outputs: int
    after: tuple[int, int] | None = None
    """Sent when request k has said n pieces of its answer; None: at once."""
    priority: int = 0
    adapter: str = ""


@dataclass(slots=True)
class Day:
    """One bad day: how the server was started, and what came."""

    flags: str
    sent: list[Sent] = field(default_factory=list)
    looks: tuple[tuple[int, int], ...] = ()
    """Moments of /metrics between the first and the last, as `Sent.after`."""
    taken: int = 0

    def add(self, prompt: int, outputs: int, begins: Sequence[int] = (), **more: Any) -> None:
        """A request whose prompt begins as told, and then with a letter that no other has there."""
        own = list(TEXT[self.taken : self.taken + prompt - len(begins) - 1])
        self.taken += len(own)
        own = [48 + len(self.sent), *own]
        self.sent.append(Sent([*begins, *own], outputs, **more))


def monday() -> Day:
    """A prompt that needs more blocks than are free stands first, and short ones behind it."""
    day = Day("--block-size 16 --num-gpu-blocks-override 41 --max-num-seqs 8 "
              "--max-num-batched-tokens 512", looks=((0, 20),))  # fmt: skip
    day.add(220, 70)
    day.add(480, 8, after=(0, 4), priority=5)
    for turn in range(4):
        day.add(20 + 5 * turn, 4, after=(0, 8 + 2 * turn))
    return day


def tuesday() -> Day:
    """Long prompts come beside an answer that streams."""
    day = Day("--block-size 16 --num-gpu-blocks-override 400 --max-num-seqs 8 "
              "--max-num-batched-tokens 1024", looks=((0, 8), (0, 28)))  # fmt: skip
    day.add(24, 60)
    for turn in range(4):
        day.add(300 + 50 * turn, 3, after=(0, 10 + 8 * turn))
    return day


def wednesday() -> Day:
    """More requests run than the cache holds to their end."""
    day = Day("--block-size 16 --num-gpu-blocks-override 26 --max-model-len 256 --max-num-seqs 8 "
              "--max-num-batched-tokens 512", looks=((0, 10), (0, 30)))  # fmt: skip
    for turn in range(7):
        day.add(50 + turn, 40 + 3 * turn)
    return day


def thursday() -> Day:
    """One adapter may be in a step, and requests ask for two."""
    day = Day("--block-size 16 --num-gpu-blocks-override 400 --max-num-seqs 8 "
              "--max-num-batched-tokens 512 --enable-lora --max-loras 1 --max-cpu-loras 2 "
              "--max-lora-rank 8 --worker-extension-cls conformance.features.lora.worker.NoPinning "
              "--lora-modules shout=models/adapters/shout quote=models/adapters/quote",
              looks=((0, 12),))  # fmt: skip
    day.add(40, 50, adapter="shout")
    day.add(30, 6, after=(0, 4), adapter="quote")
    for turn in range(3):
        day.add(30 + 9 * turn, 20, after=(0, 6 + 8 * turn), adapter="shout")
    return day


def friday() -> Day:
    """Two requests may run at once, and nine come together."""
    day = Day("--block-size 16 --num-gpu-blocks-override 400 --max-num-seqs 2 "
              "--max-num-batched-tokens 512", looks=((0, 10), (3, 10)))  # fmt: skip
    for turn in range(9):
        day.add(30 + 4 * turn, 24)
    return day


def saturday() -> Day:
    """A step has room for few tokens, and long prompts come together."""
    day = Day("--block-size 16 --num-gpu-blocks-override 400 --max-num-seqs 8 "
              "--max-num-batched-tokens 24", looks=((0, 4), (2, 2)))  # fmt: skip
    for turn in range(7):
        day.add(180 + 10 * turn, 8)
    return day


def sunday() -> Day:
    """The system prompt gets a clock: from then on prompts begin alike with less than a block."""
    day = Day("--block-size 64 --num-gpu-blocks-override 100 --max-num-seqs 8 "
              "--max-num-batched-tokens 512", looks=((4, 1),))  # fmt: skip
    system = list(TEXT[-200:])
    for turn in range(10):
        begins = system
        if turn > 4:
            clock = f"{7 + turn:02d}:{13 * turn % 60:02d}".encode()
            begins = [*system[:52], *clock, *system[52:]]
        day.add(len(begins) + 24, 4, begins, after=(turn - 1, 2) if turn else None)
    return day


ALL = {
    each.__name__: each for each in (monday, tuesday, wednesday, thursday, friday, saturday, sunday)
}


class Recording:
    """The flight recorder in the server, with each line on the disk at once: a day is short."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        recorder: Any = importlib.import_module("vllm_flight_recorder")  # on the server's path
        recorder.FLUSH_S = -1.0
        return recorder.Recording(*args, **kwargs)


class Heard:
    """Counts what each request has said, and wakes who waits for it."""

    def __init__(self, count: int) -> None:
        self.pieces = [0] * count
        self.changed = threading.Condition()

    def one_more(self, number: int) -> None:
        with self.changed:
            self.pieces[number] += 1
            self.changed.notify_all()

    def wait(self, moment: tuple[int, int] | None) -> None:
        """Until a request has said so many pieces. Raises TimeoutError after five minutes."""
        if moment is None:
            return
        number, pieces = moment
        with self.changed:
            if not self.changed.wait_for(lambda: self.pieces[number] >= pieces, 300):
                raise TimeoutError(f"request {number} never said {pieces} pieces")


def ask(url: str, number: int, sent: Sent, heard: Heard) -> None:
    """Send one request when its time has come, and listen to its end."""
    heard.wait(sent.after)
    body = {
        "model": sent.adapter or "served", "prompt": sent.prompt, "max_tokens": sent.outputs,
        "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
        "priority": sent.priority,
    }  # fmt: skip
    post = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Request-Id": f"r{number}"},
    )  # fmt: skip
    with urllib.request.urlopen(post, timeout=300) as answer:
        for _ in serve_stream.events(answer):
            heard.one_more(number)


def looked(url: str, moment: str) -> str:
    """What /metrics says now, the kept names."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    kept = [line for line in lines if line.split("{", 1)[0].split(" ", 1)[0] in KEPT_METRICS]
    return "\n".join([f"# GET /metrics, {moment}", *kept, ""])


def serve(day: Day, said: Path, flights: Path) -> list[str]:
    """Serve a day; what /metrics said, moment by moment."""
    port = serve_stream.free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "models/byte-llama",
        "--host", "127.0.0.1", "--port", str(port), *FLAGS.split(), *day.flags.split(),
        "--scheduler-cls", "course.incidents.record.Recording",
    ]  # fmt: skip
    env = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOG_STATS_INTERVAL": "0.2",
        "PYTHONPATH": f"{RECORDER}:{ROOT}", "VLLM_FLIGHT_RECORDER_DIR": str(flights),
    }  # fmt: skip
    heard = Heard(len(day.sent))
    with said.open("w") as log:
        server = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            serve_stream.wait_for(server, url)
            metrics = [looked(url, "before the first request")]
            clients = [
                threading.Thread(target=ask, args=(url, number, sent, heard), daemon=True)
                for number, sent in enumerate(day.sent)
            ]
            for number, client in enumerate(clients):
                client.start()
                if number + 1 < len(clients) and day.sent[number + 1].after is None:
                    client.join(0.05)  # those that come at once come in order
            for number, pieces in day.looks:
                heard.wait((number, pieces))
                metrics.append(looked(url, f"when r{number} had said {pieces} tokens"))
            for client in clients:
                client.join(300)
            metrics.append(looked(url, "after the last answer"))
        finally:
            serve_stream.end(server)
    return metrics


def kept_log(text: str) -> Iterator[str]:
    """The lines of the log that are kept: those of `KEPT_LINES`, and all while it answers."""
    answers = False
    for line in text.splitlines():
        if "Shutting down" in line or "shutdown" in line.lower():
            return
        if KEPT_LINES.search(line) or (answers and " INFO " in line):
            yield re.sub(r"'port': \d+", "'port': 8000", line)
        answers = answers or "Application startup complete" in line


def record(name: str) -> None:
    """One day, into `days/NAME`."""
    day, folder = ALL[name](), DAYS / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        said, flights = Path(scratch, "server.log"), Path(scratch, "flights")
        try:
            metrics = serve(day, said, flights)
        except BaseException:
            lines = said.read_text(encoding="utf-8").splitlines()
            print("\n".join([line for line in lines if "Error" in line][:20] or lines[-20:]))
            raise
        (path,) = flights.glob("*.jsonl")
        with gzip.GzipFile(folder / "trace.jsonl.gz", "wb", mtime=0) as file:
            file.write(path.read_bytes())
        log = kept_log(said.read_text(encoding="utf-8"))
        (folder / "server.log").write_text("\n".join(log) + "\n", encoding="utf-8")
    (folder / "metrics.txt").write_text("\n".join(metrics), encoding="utf-8")
    asked = [
        {"request": f"r{number}", "prompt_token_ids": sent.prompt, "max_tokens": sent.outputs}
        | ({"priority": sent.priority} if sent.priority else {})
        | ({"adapter": sent.adapter} if sent.adapter else {})
        for number, sent in enumerate(day.sent)
    ]
    text = "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in asked)
    (folder / "requests.jsonl").write_text(text, encoding="utf-8")
    print(f"{name}: {len(day.sent)} requests, {len(metrics)} looks at /metrics")


def main() -> int:
    """Record the days that are named, or all."""
    names = sys.argv[1:] or list(ALL)
    if unknown := [name for name in names if name not in ALL]:
        raise SystemExit(f"no day {', '.join(unknown)}: one of {', '.join(ALL)}")
    for name in names:
        record(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Record the sample that the page of recordings opens: a real `vllm serve` under load.

    course engine run -m conformance.sample_server FOLDER

Or with the Python of an environment that holds another release; `0.27.1/` holds one of the
build for processors of that release.

`vllm-flight-recorder` writes it, in the environment of the real engine: 24 prompts that begin
alike in threes, in 60 blocks of 16 tokens, so that requests wait for the budget and for blocks, hit
the cache, and are preempted. The sample that is kept has 138 steps in 5.1 s. FOLDER gets the
recording, packed, and `start.log`, what the server said. Prompts are token ids drawn by a seed; the
recording has none of them.

With `--poorer` the same server runs with its own scheduler, and FOLDER gets what the stat logger
counted and the lines of the iteration log: `poorer/` holds both.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conformance import serve_stream
from labkit.plugins import put_on_path

ROOT = Path(__file__).resolve().parents[1]
RECORDER = ROOT / "vllm-flight-recorder"
NAME = "sample.0000.jsonl.gz"
"""Kept in `conformance/flight_sample`."""
SEED, CLIENTS, PROMPTS, GAP = 20260, 24, 24, 0.03
"""GAP: seconds between two arrivals."""
FLAGS = (
    "--dtype float32 --max-model-len 512 --block-size 16 --num-gpu-blocks-override 60 "
    "--max-num-seqs 8 --max-num-batched-tokens 256 --disable-uvicorn-access-log "
    "--served-model-name served"
)


def prompts() -> list[tuple[list[int], int]]:
    """Token ids and outputs of each request."""
    draw = random.Random(SEED)
    stems = [[draw.randrange(256) for _ in range(112)] for _ in range(PROMPTS // 3)]
    return [
        (stems[k // 3] + [draw.randrange(256) for _ in range(draw.randint(12, 60))],
         draw.randint(24, 72))
        for k in range(PROMPTS)
    ]  # fmt: skip


def ask(port: int, number: int, prompt: list[int], outputs: int) -> None:
    """One request, some time after the first."""
    time.sleep(number * GAP)
    body = {
        "model": "served", "prompt": prompt, "max_tokens": outputs, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()


def serve(flags: list[str], env: dict[str, str], said: Path) -> None:
    """Serve, and ask for all the prompts."""
    port = serve_stream.free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve",
        str(ROOT / "models" / "byte-llama"), "--host", "127.0.0.1", "--port", str(port), *flags,
    ]  # fmt: skip
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"} | env
    with said.open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            serve_stream.wait_for(server, f"http://127.0.0.1:{port}")
            with ThreadPoolExecutor(CLIENTS) as pool:
                asked = [pool.submit(ask, port, k, *each) for k, each in enumerate(prompts())]
                for each in asked:
                    each.result()
        finally:
            serve_stream.end(server)


def record(target: Path, more: list[str]) -> None:
    """The sample, packed."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"PYTHONPATH": str(RECORDER), "VLLM_FLIGHT_RECORDER_DIR": folder}
        flags = [*FLAGS.split(), "--scheduler-cls", "vllm_flight_recorder.Recording", *more]
        serve(flags, env, target / "start.log")
        (path,) = Path(folder).glob("*.jsonl")
        with gzip.GzipFile(target / NAME, "wb", mtime=0) as file:
            file.write(path.read_bytes())


def record_poorer(target: Path, more: list[str]) -> None:
    """What is there without the flag: counts, and lines of the log."""
    with tempfile.TemporaryDirectory() as folder:
        put_on_path(RECORDER, Path(folder) / "metadata")
        counts, log = Path(folder) / "counts", Path(folder) / "server.log"
        flags = [*FLAGS.split(), "--enable-logging-iteration-details", *more]
        serve(flags, {"VLLM_FLIGHT_RECORDER_COUNTS": str(counts)}, log)
        (path,) = counts.glob("*.jsonl")
        (target / "counts.jsonl").write_bytes(path.read_bytes())
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = "".join(line for line in lines if "Iteration(" in line)
        (target / "iterations.log").write_text(kept, encoding="utf-8")


def main() -> int:
    """Serve, ask, and keep what was recorded."""
    target, more = Path(sys.argv[1]), sys.argv[2:]
    target.mkdir(parents=True, exist_ok=True)
    if "--poorer" in more:
        record_poorer(target, [flag for flag in more if flag != "--poorer"])
    else:
        record(target, more)
    return 0


if __name__ == "__main__":
    sys.exit(main())

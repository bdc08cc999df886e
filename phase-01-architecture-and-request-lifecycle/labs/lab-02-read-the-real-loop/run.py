"""Read the real loop: vLLM 0.22.1 on models/byte-llama, its log lines and its plans.

    course gpu run 01-02                  # a CUDA GPU and vllm==0.22.1
    course gpu run 01-02 --cpu            # no GPU: vLLM's CPU build
    python run.py --part probe --prompt "The KV cache"

Each part is a process of its own; without `--part` all of them run, one after the other.

    logs         one request, the engine in a child process, its log lines
    probe        the engine in this process, `schedule` wrapped as in lab 01-04
    probe-async  the same, asked for async scheduling
    pair         lab 01-04's two prompts under a budget of 8
    break        a cache that is too small for one request
    serve        the API server: one streamed answer as it arrives, and some of its metrics

What `run.py` says itself is a line of JSON. The rest is vLLM's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit import versions

MODEL = Path(__file__).resolve().parents[3] / "models" / "byte-llama"
MAX_MODEL_LEN = 256
START_UP = 300.0
"""Seconds the API server may take to start."""

LEVELS: dict[str, dict[str, str]] = {
    "logs": {
        "config.vllm": "INFO",
        "v1.core": "INFO",
        "v1.engine.core": "DEBUG",
        "v1.metrics": "DEBUG",
        "v1.worker": "INFO",
    },
    "probe": {},
    "probe-async": {"config.vllm": "INFO"},
    "pair": {"v1.worker.gpu_model_runner": "DEBUG"},
    # The worker that the refusing core leaves behind is no news.
    "break": {
        "v1.worker.cpu_worker": "INFO",
        "v1.worker.gpu_worker": "INFO",
        "v1.executor.multiproc_executor": "CRITICAL",
    },
    "serve": {"v1.core": "INFO", "v1.metrics": "INFO"},
}
"""Who may speak in which part; everyone else only at ERROR. A start-up has some sixty lines."""

METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting{",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_count",
    "vllm:iteration_tokens_total_sum",
    'vllm:request_success_total{engine="0",finished_reason="length"',
)


def say(**what: Any) -> None:
    """Print a line of JSON at once, so that it keeps its place among other processes' lines."""
    print(json.dumps(what), flush=True)


def quieten(levels: Mapping[str, str], folder: Path) -> None:
    """Let only some loggers speak, in this process and in its children; the format is vLLM's.

    Source: `vllm/logger.py:156` `_configure_vllm_root_logger`.
    """
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "vllm": {
                "class": "vllm.logging_utils.NewLineFormatter",
                "format": "%(levelname)s %(asctime)s [%(fileinfo)s:%(lineno)d] %(message)s",
                "datefmt": "%m-%d %H:%M:%S",
            }
        },
        "handlers": {
            "vllm": {
                "class": "logging.StreamHandler",
                "formatter": "vllm",
                "stream": "ext://sys.stdout",
            }
        },
        "loggers": {
            "vllm": {"handlers": ["vllm"], "level": "ERROR", "propagate": False},
            **{f"vllm.{name}": {"level": level} for name, level in levels.items()},
        },
    }
    path = folder / "logging.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(path)
    os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"  # directories before the file name
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    os.environ["PYTHONWARNINGS"] = "ignore"
    if sys.platform == "linux":
        # Sockets without a file. DEBUG lines name them, and whose machine it is does not matter.
        os.environ["VLLM_RPC_BASE_PATH"] = "@vllm"


def engine(**settings: Any) -> Any:
    """An `LLM` on the shipped model, with 0.4 of a GPU's memory or 0.2 of the machine's.

    On a CPU it is not compiled: that takes longer than all the steps.
    """
    from vllm import LLM
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    share = {} if "kv_cache_memory_bytes" in settings else {"gpu_memory_utilization": 0.4}
    if on_cpu:
        settings["enforce_eager"] = True
        share = dict.fromkeys(share, 0.2)
    common = {"model": str(MODEL), "max_model_len": MAX_MODEL_LEN, "use_tqdm_on_load": False}
    return LLM(**{**common, **share, **settings})


def generate(llm: Any, prompts: list[str], max_tokens: int) -> list[Any]:
    """Greedy, exactly `max_tokens` tokens for each prompt."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return llm.generate(prompts, params, use_tqdm=False)


def run_logs(prompt: str, max_tokens: int) -> None:
    """The log lines of one request, the engine in a child process."""
    llm = engine(
        enable_logging_iteration_details=True, async_scheduling=False, disable_log_stats=False
    )
    cache = llm.llm_engine.vllm_config.cache_config
    say(num_blocks=cache.num_gpu_blocks, block_size=cache.block_size, max_model_len=MAX_MODEL_LEN)
    (output,) = generate(llm, [prompt], max_tokens)
    said = output.outputs[0]
    say(id=output.request_id, text=said.text, finish_reason=said.finish_reason)
    llm.llm_engine.do_log_stats()  # what a server prints every ten seconds


def run_probe(prompts: list[str], max_tokens: int, **settings: Any) -> None:
    """The engine core in this process: each plan as it is made, empty ones left out."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm = engine(enforce_eager=True, enable_prefix_caching=False, **settings)
    core = llm.llm_engine.engine_core.engine_core
    say(
        asked=settings,
        scheduler=type(core.scheduler).__name__,
        step_fn=core.step_fn.__name__,
        async_scheduling=core.vllm_config.scheduler_config.async_scheduling,
    )
    schedule, steps = core.scheduler.schedule, 0

    def watched() -> Any:
        nonlocal steps
        plan = schedule()
        if plan.num_scheduled_tokens:
            steps += 1
            say(step=steps, scheduled=dict(plan.num_scheduled_tokens))
        return plan

    core.scheduler.schedule = watched
    for output in generate(llm, prompts, max_tokens):
        said = output.outputs[0]
        say(
            id=output.request_id,
            text=said.text,
            token_ids=list(said.token_ids),
            finish_reason=said.finish_reason,
        )
    llm.llm_engine.engine_core.shutdown()


def run_break() -> None:
    """Ask for a cache that cannot hold one request of the model's length."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the error arrives as it is
    expected = "To serve at least one request with the model's max seq len"
    try:
        engine(max_model_len=1024, kv_cache_memory_bytes=2**20)
    except ValueError as error:
        if expected not in str(error):
            raise
        say(refused=str(error))
        return
    raise SystemExit(f"the engine started although one request does not fit: expected {expected!r}")


def run_serve(prompt: str) -> None:
    """`vllm serve` on a free port of this machine: an answer of four tokens, line by line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--host 127.0.0.1 --port {port} --max-model-len {MAX_MODEL_LEN} --enforce-eager"
    flags += " --gpu-memory-utilization 0.2 --served-model-name byte-llama --no-use-tqdm-on-load"
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL), *flags.split()],
        env={**os.environ, "VLLM_LOG_STATS_INTERVAL": "1"},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(server, f"{url}/health")
        body = {"model": "byte-llama", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        post = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        say(post="/v1/completions", body=body)
        with urllib.request.urlopen(post, timeout=60) as answer:
            for line in answer:
                print(line.decode(), end="", flush=True)
        say(get="/metrics")
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(METRICS):
                    print(line, flush=True)
        time.sleep(1.5)  # for the periodic line, here of every second
    finally:
        server.terminate()
        server.wait(60)


def wait_for(server: subprocess.Popen[bytes], url: str) -> None:
    """Until the server answers.

    Raises:
        RuntimeError: it ended, or `START_UP` seconds went by.
    """
    end = time.monotonic() + START_UP
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    raise RuntimeError(f"no server at {url}; its exit status: {server.poll()}")


def run_part(part: str, prompt: str, max_tokens: int) -> None:
    if part == "logs":
        run_logs(prompt, max_tokens)
    elif part == "pair":
        small = {"max_num_batched_tokens": 8, "max_num_seqs": 2}
        run_probe(["hello world", "goodbye"], 4, async_scheduling=False, **small)
    elif part == "break":
        run_break()
    elif part == "serve":
        run_serve(prompt)
    else:
        run_probe([prompt], max_tokens, async_scheduling=part == "probe-async")


def main() -> None:
    parser = argparse.ArgumentParser(description="Read the real loop of vLLM 0.22.1.")
    parser.add_argument("--part", choices=tuple(LEVELS))
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()
    if arguments.part:
        with tempfile.TemporaryDirectory() as folder:
            quieten(LEVELS[arguments.part], Path(folder))
            run_part(arguments.part, arguments.prompt, arguments.max_tokens)
        return
    versions.need_vllm("the tests")
    for part in LEVELS:
        print(f"=== {part}", flush=True)
        command = [sys.executable, __file__, "--part", part, "--prompt", arguments.prompt]
        subprocess.run([*command, "--max-tokens", str(arguments.max_tokens)], check=True)


if __name__ == "__main__":
    main()

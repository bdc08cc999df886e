"""A start of vLLM's CPU build, line by line, and what its final configuration says.

    course gpu run 17-02 --cpu

Prints those lines of the log that hold one of `WORDS`, in their order and without their times, then
what a caller sees: the answers of one prompt and of eight, with the seconds they took.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

MODEL = Path(__file__).resolve().parents[3] / "models" / "byte-llama"
GIB = 1
WORDS = (
    "Automatically detected platform", "Chunked prefill is enabled", "Asynchronous scheduling is",
    "OpenMP thread binding", "KV cache layout for", "Warming up", "for KV cache on node",
    "KV cache size:", "Maximum concurrency", "Final IR op priority", "custom scheduler class",
)  # fmt: skip
PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(DEBUG|INFO|WARNING) [\d: -]+\[")
"""Of a line of the log; the process's number and the time are of one run."""


def child() -> None:
    """In a process of its own, whose every line is heard."""
    import vllm

    llm = vllm.LLM(
        model=str(MODEL), dtype="float32", max_model_len=256, enforce_eager=True,
        use_tqdm_on_load=False,
    )  # fmt: skip
    config = llm.llm_engine.vllm_config
    print("FINAL block_size", config.cache_config.block_size)
    print("FINAL async_scheduling", config.scheduler_config.async_scheduling)
    print("FINAL executor", config.parallel_config.distributed_executor_backend)
    print("FINAL worker", config.parallel_config.worker_cls)
    print("FINAL num_gpu_blocks", config.cache_config.num_gpu_blocks)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    for prompts in (["The KV cache is"], ["The KV cache is"] * 8):
        began = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(result.outputs[0].token_ids) for result in results)
        print(f"FINAL {len(prompts)} at once: {tokens} tokens in {seconds:.2f} s")
    print("FINAL text", repr(results[0].outputs[0].text))


def main(argv: list[str] | None = None) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args(argv).child:
        child()
        return 0
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_CPU_KVCACHE_SPACE": str(GIB)}
    ran = subprocess.Popen(
        [sys.executable, __file__, "--child"], env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert ran.stdout
    for line in ran.stdout:
        if line.startswith("FINAL "):
            print(line.removeprefix("FINAL "), end="", flush=True)
        elif any(word in line for word in WORDS):
            print(PREFIX.sub(r"\1 [", line), end="", flush=True)
    return ran.wait()


if __name__ == "__main__":
    sys.exit(main())

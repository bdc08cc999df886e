"""Read the real loop: vLLM 0.22.1 on models/byte-llama, its log lines and its plans.

Three parts, each in a process of its own: `logs` (engine in a child process, the iteration lines
on), `probe` (engine in this process, `schedule` wrapped as in lab 01-04), `break` (a cache that is
too small for one request). Without a name all three run. Needs vllm==0.22.1 and a CUDA GPU:

    course gpu run 01-02
    python run.py --part probe --prompt "The KV cache"
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parents[3] / "models" / "byte-llama"
PARTS = ("logs", "probe", "break")


def probe(prompts: list[Any], max_tokens: int, **engine_kwargs: Any) -> dict[str, Any]:
    """Run prompts with the engine core in this process; what each step scheduled.

    Returns:
        "ids" in order of first appearance, "rows" (tokens per id and step, empty plans left out),
        "token_ids" and "finish_reasons" per prompt.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    settings = {
        "model": str(MODEL), "max_model_len": 256, "gpu_memory_utilization": 0.4,
        "enforce_eager": True, "enable_prefix_caching": False, "async_scheduling": False,
    }  # fmt: skip
    llm = LLM(**{**settings, **engine_kwargs})
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, rows = scheduler.schedule, []

    def watched() -> Any:
        plan = schedule()
        if plan.num_scheduled_tokens:
            rows.append(dict(plan.num_scheduled_tokens))
        return plan

    scheduler.schedule = watched
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    return {
        "ids": list(dict.fromkeys(name for row in rows for name in row)),
        "rows": rows,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "finish_reasons": [output.outputs[0].finish_reason for output in outputs],
    }


def run_logs(prompt: str, max_tokens: int) -> None:
    """Part A: the log lines of one request, the engine in a child process."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(MODEL),
        max_model_len=256,
        gpu_memory_utilization=0.4,
        enable_logging_iteration_details=True,
        async_scheduling=False,
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    print("text:", repr(output.outputs[0].text))
    print("finish_reason:", output.outputs[0].finish_reason)


def run_probe(prompt: str, max_tokens: int, async_scheduling: bool) -> None:
    """Part B: the plans of one request, and lab 01-04's two prompts under a budget of 8."""
    alone = probe([prompt], max_tokens, async_scheduling=async_scheduling)
    print(json.dumps({"async_scheduling": async_scheduling, "alone": alone}))


def run_pair() -> None:
    """Part B, second half: lab 01-04's two prompts under a budget of 8."""
    pair = probe(["hello world", "goodbye"], 4, max_num_batched_tokens=8, max_num_seqs=2)
    print(json.dumps({"pair": pair}))


def run_break() -> None:
    """Part D: ask for a cache that cannot hold one request of the model's length."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the error arrives as it is
    from vllm import LLM

    expected = "To serve at least one request with the model's max seq len"
    try:
        LLM(model=str(MODEL), max_model_len=1024, kv_cache_memory_bytes=2**20)
    except ValueError as error:
        if expected not in str(error):
            raise
        print("refused:", error)
        return
    raise SystemExit(f"the engine started although one request does not fit: expected {expected!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Read the real loop of vLLM 0.22.1.")
    parser.add_argument("--part", choices=(*PARTS, "probe-async", "pair"))
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()
    if arguments.part is None:
        for part in ("logs", "probe", "probe-async", "pair", "break"):
            print(f"=== {part}", flush=True)
            command = [sys.executable, __file__, "--part", part, "--prompt", arguments.prompt]
            command += ["--max-tokens", str(arguments.max_tokens)]
            environment = {**os.environ, "VLLM_LOGGING_COLOR": "0"}
            if part == "logs":
                environment["VLLM_LOGGING_LEVEL"] = "DEBUG"
            subprocess.run(command, env=environment, check=True)
    elif arguments.part == "logs":
        run_logs(arguments.prompt, arguments.max_tokens)
    elif arguments.part == "pair":
        run_pair()
    elif arguments.part == "break":
        run_break()
    else:
        run_probe(arguments.prompt, arguments.max_tokens, arguments.part == "probe-async")


if __name__ == "__main__":
    main()

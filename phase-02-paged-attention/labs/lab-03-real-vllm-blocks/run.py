"""The KV cache of a real vLLM 0.22.1: predict each run, start it, compare.

    course gpu run 02-03
    python run.py --model facebook/opt-125m --max-model-len 2048 --long 1025
    python run.py --one --util 0.5             one engine only, in this process

Each run is a process of its own, so that no memory of the one before is left. The first gives the
fixed cost; the second is predicted from it. Then three prompts: short, long, and long with prefix
caching off. Needs vllm==0.22.1 and a CUDA GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[2] / "models" / "byte-llama"
NUM_PROMPTS = 8
MARK = "RESULT "


def one_run(arguments: argparse.Namespace) -> None:
    """Start an engine, generate from equal prompts, print what it says of its cache."""
    # The wheel may install other loggers' levels; the lines read here are INFO.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=arguments.model,
        gpu_memory_utilization=arguments.util,
        max_model_len=arguments.max_model_len,
        enable_prefix_caching=not arguments.no_caching,
        disable_log_stats=False,
    )
    config = llm.llm_engine.vllm_config
    # Any ids will do; equal prompts are what counts. Small ones exist in every vocabulary.
    token_ids = [5 + i % 90 for i in range(arguments.prompt_tokens)]
    outputs = llm.generate(
        [{"prompt_token_ids": token_ids}] * NUM_PROMPTS,
        SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0, ignore_eos=True),
    )
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    import torch

    model = config.model_config
    parallel = config.parallel_config
    result = {
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "shape": [
            model.get_num_layers(parallel),
            model.get_num_kv_heads(parallel),
            model.get_head_size(),
            torch.tensor([], dtype=model.dtype).element_size(),
        ],
        "total_bytes": torch.cuda.mem_get_info()[1],
        "num_cached_tokens": [output.num_cached_tokens for output in outputs],
        "queries": metrics["vllm:prefix_cache_queries"].value,
        "hits": metrics["vllm:prefix_cache_hits"].value,
        "usage": metrics["vllm:kv_cache_usage_perc"].value,
    }
    print(MARK + json.dumps(result), flush=True)


def start(arguments: argparse.Namespace, *more: str) -> tuple[dict[str, Any], list[str]]:
    """Run `one_run` in a process of its own; its result and all its lines."""
    command = [sys.executable, __file__, "--one", "--model", arguments.model]
    command += ["--max-model-len", str(arguments.max_model_len), *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.splitlines()
    results = [line for line in lines if line.startswith(MARK)]
    if done.returncode or not results:
        raise SystemExit("\n".join([*lines[-30:], f"the run failed: {' '.join(command)}"]))
    wanted = ("KV cache", "Maximum concurrency", "attention backend", "Prefix cache hit rate")
    for line in lines:
        if any(words in line for words in wanted) and not line.startswith(MARK):
            print("  |", line)
    return json.loads(results[-1].removeprefix(MARK)), lines


def load_lab(file: str) -> ModuleType:
    """A lab file as a module."""
    spec = importlib.util.spec_from_file_location("lab_02_03", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["lab_02_03"] = module
    spec.loader.exec_module(module)
    return module


def capacity(lab: ModuleType, arguments: argparse.Namespace) -> None:
    """Two settings of gpu_memory_utilization, the second predicted from the first."""
    low, high = arguments.utils
    print(f"=== gpu_memory_utilization {low}")
    first, lines = start(arguments, "--util", str(low))
    startup = lab.read_startup(lines)
    size = lab.bytes_per_block(*first["shape"], first["block_size"])
    back = lab.blocks_of_log(startup.tokens, startup.max_model_len, first["block_size"])
    print(f"shape {first['shape']}, block size {first['block_size']}: {size:,} bytes a block")
    print(f"blocks: {first['num_gpu_blocks']:,} in the engine, {back:,} behind the printed tokens")
    expected = lab.predict_second_run(
        first["total_bytes"], startup, low, high, first["shape"], first["block_size"]
    )
    print(f"=== gpu_memory_utilization {high}; predicted: {expected}")
    second, _ = start(arguments, "--util", str(high))
    error = second["num_gpu_blocks"] / expected.num_blocks - 1
    print(f"blocks: {second['num_gpu_blocks']:,} in the engine, {error:+.3%} from the prediction")


def caching(lab: ModuleType, arguments: argparse.Namespace) -> None:
    """Eight equal prompts: short, long, and long without prefix caching."""
    util = str(arguments.utils[0])
    for length, off in ((arguments.short, False), (arguments.long, False), (arguments.long, True)):
        more = ["--no-caching"] if off else []
        print(f"=== {NUM_PROMPTS} equal prompts of {length} tokens, prefix caching {not off}")
        run, _ = start(arguments, "--util", util, "--prompt-tokens", str(length), *more)
        expected = 0.0 if off else lab.hit_rate(NUM_PROMPTS, length, run["block_size"])
        rate = run["hits"] / run["queries"] if run["queries"] else 0.0
        print(f"cached tokens per prompt: {run['num_cached_tokens']}")
        print(
            f"hit rate: {rate:.2%} = {run['hits']} / {run['queries']}; predicted {expected:.2%}; "
            f"usage at the end {run['usage']:.2%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="The KV cache of a real vLLM.")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--utils", type=float, nargs=2, default=[0.5, 0.9])
    parser.add_argument("--short", type=int, default=6, help="tokens of the short prompt")
    parser.add_argument("--long", type=int, default=897, help="tokens of the long prompt")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--one", action="store_true", help="one engine, in this process")
    parser.add_argument("--util", type=float, default=0.5, help="with --one")
    parser.add_argument("--prompt-tokens", type=int, default=6, help="with --one")
    parser.add_argument("--no-caching", action="store_true", help="with --one")
    arguments = parser.parse_args()
    if arguments.one:
        return one_run(arguments)
    lab = load_lab(arguments.file)
    capacity(lab, arguments)
    caching(lab, arguments)


if __name__ == "__main__":
    main()

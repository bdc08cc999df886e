"""The KV cache of a real vLLM 0.22.1: predict each run, start it, compare.

    course gpu run 02-03
    course gpu run 02-03 --cpu                 vLLM's CPU build: main memory, blocks of 128
    python run.py --model facebook/opt-125m --max-model-len 2048 --long 1025
    python run.py --one --util 0.5             one engine only, in this process

Five engines, each a process of its own, so that no memory of the one before is left. The first
gives the fixed cost; the second has another share of the memory, the last another block size, and
both are predicted from the first. Each also gets eight equal prompts, in one of them with prefix
caching off. Needs vllm==0.22.1.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from labkit import processes, versions
from labkit.modules import load_module

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[2] / "models" / "byte-llama"
NUM_PROMPTS = 8
SHOWN = (
    "KV cache",  # on a GPU and on a CPU, at start-up and later
    "Maximum concurrency",
    "attention backend",
)


# --- one engine -----------------------------------------------------------------------------------


def total_memory() -> int:
    """Bytes that `gpu_memory_utilization` is a share of: of the GPU, or of main memory.

    On a CPU it is the memory of the node that the worker is bound to, as
    `vllm/v1/worker/cpu_worker.py:30` `CPUWorker.__init__` asks for it.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

        return get_memory_node_info(get_allowed_cpu_list()[0].numa_node).total_memory
    import torch

    return torch.cuda.mem_get_info()[1]


def one_run(arguments: argparse.Namespace) -> None:
    """Start an engine, generate from equal prompts, print what it says of its cache."""
    # The wheel may install other loggers' levels; the lines read here are INFO.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    more = {"block_size": arguments.block_size} if arguments.block_size else {}
    llm = LLM(
        model=arguments.model,
        gpu_memory_utilization=arguments.util,
        max_model_len=arguments.max_model_len,
        enable_prefix_caching=not arguments.no_caching,
        enforce_eager=current_platform.is_cpu(),  # to compile takes longer than this run
        disable_log_stats=False,
        **more,
    )
    engine = llm.llm_engine
    config = engine.vllm_config
    # Any ids will do; equal prompts are what counts. Small ones exist in every vocabulary.
    token_ids = [5 + i % 90 for i in range(arguments.prompt_tokens)]
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0, ignore_eos=True)
    for number in range(NUM_PROMPTS):
        engine.add_request(str(number), {"prompt_token_ids": token_ids}, params)
    cached, usage = {}, 0.0
    while engine.has_unfinished_requests():
        for output in engine.step():
            cached[int(output.request_id)] = output.num_cached_tokens
        now = gauges(llm)
        if not usage and now["vllm:num_requests_running"] == NUM_PROMPTS:
            usage = now["vllm:kv_cache_usage_perc"]
            engine.do_log_stats()  # the periodic line, while all of them run
    end = gauges(llm)
    model, parallel = config.model_config, config.parallel_config
    result = {
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "shape": [
            model.get_num_layers(parallel),
            model.get_num_kv_heads(parallel),
            model.get_head_size(),
            model.dtype.itemsize,
        ],
        "total_bytes": total_memory(),
        "num_cached_tokens": [cached[number] for number in range(NUM_PROMPTS)],
        "queries": int(end["vllm:prefix_cache_queries"]),
        "hits": int(end["vllm:prefix_cache_hits"]),
        "usage": usage,
        "usage_at_the_end": end["vllm:kv_cache_usage_perc"],
    }
    processes.answer(result)


def gauges(llm: Any) -> dict[str, float]:
    """The engine's metrics that are one number."""
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


# --- all of them ----------------------------------------------------------------------------------


class Started(NamedTuple):
    """An engine that ran, and its log."""

    result: dict[str, Any]
    lines: list[str]

    @property
    def blocks(self) -> int:
        return self.result["num_gpu_blocks"]


def start(arguments: argparse.Namespace, *more: str) -> Started:
    """Run `one_run` in a process of its own; shows its lines about the KV cache."""
    command = [__file__, "--one", "--model", arguments.model]
    command += ["--max-model-len", str(arguments.max_model_len)]
    command += ["--max-tokens", str(arguments.max_tokens), *more]
    ran = processes.start(command, show=SHOWN)
    return Started(ran.needed(), ran.lines)


def show_capacity(lab: ModuleType, run: Started) -> None:
    """Blocks in the engine, and behind its log."""
    startup, size = lab.read_startup(run.lines), run.result["block_size"]
    block = lab.bytes_per_block(*run.result["shape"], size)
    back = lab.blocks_of_log(startup.tokens, startup.max_model_len, size)
    print(
        f"shape {run.result['shape']}, blocks of {size} tokens, {block:,} bytes each; "
        f"share of {run.result['total_bytes']:,} bytes"
    )
    print(f"blocks: {run.blocks:,} in the engine, {back:,} behind the printed tokens")


def show_error(expected: int, run: Started) -> None:
    """How far a predicted number of blocks was off."""
    off = run.blocks - expected
    print(f"blocks: {expected:,} predicted, {run.blocks:,} came: {off:+,}, {off / expected:+.3%}")


def show_hits(lab: ModuleType, run: Started, length: int, caching: bool = True) -> None:
    """Hits of eight equal prompts beside the prediction."""
    result = run.result
    each = lab.cached_tokens(length, result["block_size"]) if caching else 0
    expected = lab.hit_rate(NUM_PROMPTS, length, result["block_size"]) if caching else 0.0
    rate = result["hits"] / result["queries"] if result["queries"] else 0.0
    print(f"{NUM_PROMPTS} prompts of {length} tokens: predicted 0 cached, then {each} each")
    print(f"cached tokens per prompt: {result['num_cached_tokens']}")
    print(
        f"hit rate: {expected:.2%} predicted, {rate:.2%} = {result['hits']} / {result['queries']}"
    )
    in_use = result["usage"] * (run.blocks - 1)  # the null block does not count
    print(f"usage: {in_use:.0f} blocks with all of them running, ", end="")
    print(f"{result['usage_at_the_end']:.0%} at the end")


def main() -> None:
    parser = argparse.ArgumentParser(description="The KV cache of a real vLLM.")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--utils", type=float, nargs=2, help="0.5 and 0.9; on a CPU 0.1 and 0.2")
    parser.add_argument("--short", type=int, default=6, help="tokens of the short prompt")
    parser.add_argument("--middle", type=int, default=100, help="tokens of the middle prompt")
    parser.add_argument("--long", type=int, default=897, help="tokens of the long prompt")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--one", action="store_true", help="one engine, in this process")
    parser.add_argument("--util", type=float, default=0.5, help="with --one")
    parser.add_argument("--prompt-tokens", type=int, default=6, help="with --one")
    parser.add_argument("--no-caching", action="store_true", help="with --one")
    parser.add_argument("--block-size", type=int, help="with --one; default: the engine's own")
    arguments = parser.parse_args()
    if arguments.one:
        return one_run(arguments)
    versions.need_vllm("the tests")
    on_cpu = versions.on_cpu()
    low, high = arguments.utils or ((0.1, 0.2) if on_cpu else (0.5, 0.9))
    lab = load_module(arguments.file)

    def begin(title: str, util: float, length: int, *more: str) -> Started:
        print(f"=== {title}", flush=True)
        run = start(arguments, "--util", str(util), "--prompt-tokens", str(length), *more)
        show_capacity(lab, run)
        show_hits(lab, run, length, caching="--no-caching" not in more)
        return run

    short, middle, long = arguments.short, arguments.middle, arguments.long
    first = begin(f"gpu_memory_utilization {low}, short prompts", low, short)
    startup, total = lab.read_startup(first.lines), first.result["total_bytes"]
    shape, own = first.result["shape"], first.result["block_size"]

    plan = lab.predict_second_run(total, startup, low, high, shape, own)
    print(f"predicted for {high}: {plan}")
    second = begin(f"gpu_memory_utilization {high}, long prompts", high, long)
    show_error(plan.num_blocks, second)
    print(f"ratio of the shares {high / low:.3f}, of the blocks {second.blocks / first.blocks:.3f}")

    begin(f"gpu_memory_utilization {low}, long prompts, caching off", low, long, "--no-caching")
    begin(f"gpu_memory_utilization {low}, middle prompts", low, middle)

    other = 128 if own == 16 else 16
    plan = lab.predict_second_run(total, startup, low, low, shape, other)
    print(f"predicted for blocks of {other}: {plan}")
    title = f"gpu_memory_utilization {low}, middle prompts, blocks of {other}"
    show_error(plan.num_blocks, begin(title, low, middle, "--block-size", str(other)))


if __name__ == "__main__":
    main()

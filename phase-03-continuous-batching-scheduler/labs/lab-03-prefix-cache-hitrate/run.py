"""Prefix-cache hits of a real vLLM 0.22.1: predict them, run it four times, compare.

    course gpu run 03-03
    course gpu run 03-03 --cpu                 vLLM's CPU build: the same scheduler and meters
    python run.py --model Qwen/Qwen2.5-0.5B-Instruct --shared 3000 --max-model-len 4096
    python run.py --dummy                      no weights, no tokenizer: the counters are the same
    python run.py --one --no-caching           one engine only, in this process

The cache is on in blocks of 16, on in blocks of 128, off, and on in a pool too small for all
prompts. Each arm is a process of its own. It warms up with a stranger's prompt. Then it empties the
cache and sends all prompts for one token each, `--repeats` times, and once more for `--max-tokens`.
The `/metrics` page is read around each, the cache usage between steps. Needs vllm==0.22.1.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit import processes, versions
from labkit.modules import load_module

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[2] / "models" / "byte-llama"
METERS = (
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:prompt_tokens_by_source",
    "vllm:num_preemptions",
)


def make_prompts(num_prompts: int, shared: int, unique: int) -> list[list[int]]:
    """Token ids with `shared` leading tokens in common and tails that differ at once.

    Small ids, which exist in every vocabulary.
    """
    head = [7 + i % 83 for i in range(shared)]
    tails = ([100 + (number + i) % 90 for i in range(unique)] for number in range(num_prompts))
    return [[*head, *tail] for tail in tails]


# --- one arm -------------------------------------------------------------------------------------


def read_page() -> list[str]:
    """The lines of the `/metrics` page that hold the counters of `METERS`."""
    import prometheus_client

    page = prometheus_client.generate_latest().decode().splitlines()
    return [line for line in page if line.startswith(tuple(f"{name}_total" for name in METERS))]


def read_usage(llm: Any) -> float:
    """The cache usage gauge, a share of 1."""
    usage = [m.value for m in llm.get_metrics() if m.name == "vllm:kv_cache_usage_perc"]
    return max(usage)


def one_run(arguments: argparse.Namespace) -> None:
    """One engine; prints what its meters say."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    # The scheduler in this process: all prompts are in its queue before its first step. In a
    # process of its own it would begin with those that have arrived by then.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    more: dict[str, Any] = {}
    if arguments.dummy:
        more |= {"load_format": "dummy", "skip_tokenizer_init": True}
    if arguments.block_size:
        more["block_size"] = arguments.block_size
    if arguments.blocks:
        more["num_gpu_blocks_override"] = arguments.blocks
    llm = LLM(
        model=arguments.model,
        served_model_name=Path(arguments.model).name,  # a label of the metrics
        gpu_memory_utilization=arguments.util,
        max_model_len=arguments.max_model_len,
        max_num_batched_tokens=arguments.budget,
        enable_prefix_caching=not arguments.no_caching,
        async_scheduling=False,  # one step after the other, as in the mini engine
        enforce_eager=current_platform.is_cpu(),  # to compile takes longer than this run
        disable_log_stats=False,  # LLM switches statistics off unless told otherwise
        **more,
    )
    prompts = make_prompts(arguments.prompts, arguments.shared, arguments.unique)
    inputs = [{"prompt_token_ids": ids} for ids in prompts]

    def params(max_tokens: int) -> Any:
        return SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=not arguments.dummy
        )

    llm.generate([{"prompt_token_ids": [5] * len(prompts[0])}], params(4), use_tqdm=False)
    seconds: list[float] = []
    for _ in range(arguments.repeats):
        llm.reset_prefix_cache()
        pages, start = [read_page()], time.perf_counter()
        outputs = llm.generate(inputs, params(1), use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        pages.append(read_page())

    llm.reset_prefix_cache()
    engine, peak = llm.llm_engine, 0.0
    for number, prompt in enumerate(inputs):
        engine.add_request(f"peak-{number}", prompt, params(arguments.max_tokens))
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        peak = max(peak, read_usage(llm))
    pages.append(read_page())
    engine.do_log_stats()  # the periodic line, now
    cache = engine.vllm_config.cache_config
    result = {
        "block_size": cache.block_size,
        "num_blocks": cache.num_gpu_blocks,
        "prompts": prompts,
        "each": [output.num_cached_tokens for output in outputs],
        "pages": pages,
        "seconds": sorted(seconds),
        "peak_blocks": round(peak * (cache.num_gpu_blocks - 1)),  # the null block does not count
        "token_ids": [tokens[name] for name in sorted(tokens, key=lambda n: int(n.split("-")[1]))],
    }
    processes.answer(result)


# --- all arms ------------------------------------------------------------------------------------


def start(arguments: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Run `one_run` in a process of its own; its result. Shows the periodic log line."""
    command = [__file__, "--one", "--model", arguments.model]
    names = ("max_model_len", "prompts", "shared", "unique", "max_tokens", "repeats")
    for name in (*names, "budget", "util"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    command += ["--dummy"] if arguments.dummy else []
    command += more  # the last one given of an option counts
    return processes.start(command, show=("Prefix cache hit rate",)).needed()


def peak_blocks(lengths: Sequence[int], cached: Sequence[int], size: int, max_tokens: int) -> int:
    """Blocks in use when all prompts run: those of each, less those it found.

    Seen between steps: when the last token is sampled its request is gone, and the one before has
    its slot in the step that follows. So `max_tokens - 2` answer tokens have slots.
    """
    need = (-(-(length + max_tokens - 2) // size) for length in lengths)
    return sum(need) - sum(cached) // size


def predict_waiting(
    prompts: Sequence[list[int]], num_blocks: int, size: int, max_tokens: int, budget: int
) -> tuple[int, int, int, int]:
    """Queries, hits, lookups and evictions in a pool that is too small, from the mini engine.

    It decides as the real scheduler does, so it waits, evicts and looks up in the same steps. A
    lookup of a request that was evicted is left out, as in the real counters.
    """
    from mini_vllm import EngineParts, KVCacheManager, LLMEngine, Request, SamplingParams

    seen: list[tuple[int, int]] = []

    class Watched(KVCacheManager):
        def get_computed_blocks(self, request: Request) -> tuple[list[Any], int]:
            blocks, cached = super().get_computed_blocks(request)
            if request.num_preemptions == 0:
                seen.append((request.num_tokens, cached))
            return blocks, cached

    engine = LLMEngine(
        num_blocks=num_blocks, block_size=size, max_num_batched_tokens=budget, model="toy",
        parts=EngineParts(kv_cache_manager=Watched))  # fmt: skip
    evicted: list[str] = []
    engine.observers.append(lambda plan: evicted.extend(plan.preempted_req_ids))
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    return sum(q for q, _ in seen), sum(h for _, h in seen), len(seen), len(evicted)


def show_counters(lab: ModuleType, pages: Sequence[Sequence[str]]) -> Any:
    """Two readings of the page, and what the learner's functions make of them."""
    for name, page in zip(("before", "after"), pages, strict=True):
        for line in page:
            print(f"  {name:<6} |", line)
    before, after = (lab.read_page("\n".join(page)) for page in pages)
    return lab.spent(before, after)


def arm(
    lab: ModuleType, arguments: argparse.Namespace, title: str, size: int, caching: bool
) -> tuple[dict[str, Any], Any]:
    """Predict an arm with room for all, run it, print both."""
    prompts = make_prompts(arguments.prompts, arguments.shared, arguments.unique)
    queries, hits, computed = lab.predict_hits(prompts, size) if caching else (0, 0, 0)
    computed = computed if caching else sum(map(len, prompts))
    cached = lab.predict_each(prompts, size) if caching else [0] * len(prompts)
    peak = peak_blocks([len(p) for p in prompts], cached, size, arguments.max_tokens)
    print(f"=== {title}", flush=True)
    print(f"predicted: queries {queries}, hits {hits}, computed {computed}; peak {peak} blocks")
    run = start(arguments, *(["--no-caching"] * (not caching)), "--block-size", str(size))
    spent = show_counters(lab, run["pages"][:2])
    print(
        f"measured:  queries {spent.queries}, hits {spent.hits}, computed {spent.computed}; "
        f"peak {run['peak_blocks']} blocks of {run['num_blocks'] - 1:,}"
    )
    print(f"cached tokens per request: {run['each']}")
    fast, middle, slow = (run["seconds"][at] for at in (0, len(run["seconds"]) // 2, -1))
    print(
        f"hit rate {lab.hit_rate(spent):.2%}; all first tokens after {middle:.3f} s, the median of "
        f"{len(run['seconds'])} ({fast:.3f} to {slow:.3f})"
    )
    return {**run, "median": middle}, spent


def waiting_arm(lab: ModuleType, arguments: argparse.Namespace, size: int) -> None:
    """A pool in which most requests wait: the same prompts, looked up again and again."""
    prompts = make_prompts(arguments.prompts, arguments.shared, arguments.unique)
    longest = max(map(len, prompts)) + arguments.max_tokens
    per_request = -(-longest // size)
    blocks = per_request + 5  # the null block, and two blocks for each of two more prompts
    queries, hits, lookups, evictions = predict_waiting(
        prompts, blocks, size, arguments.max_tokens, arguments.budget
    )
    honest = lab.predict_hits(prompts, size)
    print(f"=== caching on, blocks of {size}, a pool of {blocks - 1} for {len(prompts)} prompts")
    print(
        f"predicted by the mini engine: queries {queries}, hits {hits}, in {lookups} lookups; "
        f"surplus {queries - honest[0]}, evictions {evictions}"
    )
    run = start(
        arguments, "--block-size", str(size), "--blocks", str(blocks),
        "--max-model-len", str(per_request * size),
    )  # fmt: skip
    spent = show_counters(lab, run["pages"][1:])
    print(
        f"measured:  queries {spent.queries}, hits {spent.hits}, computed {spent.computed}; "
        f"peak {run['peak_blocks']} blocks of {run['num_blocks'] - 1:,}"
    )
    print(
        f"surplus {spent.queries - spent.computed - spent.cached}; "
        f"the meters' hit rate {lab.hit_rate(spent):.2%}, "
        f"of the prompts' tokens {spent.cached / (spent.cached + spent.computed):.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefix-cache hits of a real vLLM.")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--shared", type=int, default=430, help="leading tokens in common")
    parser.add_argument("--unique", type=int, default=15, help="tokens of each prompt's own")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5, help="of the timed run; its median")
    parser.add_argument("--budget", type=int, default=4096, help="max_num_batched_tokens")
    parser.add_argument("--util", type=float, help="gpu_memory_utilization; 0.5, on a CPU 0.1")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--dummy", action="store_true", help="random weights, no tokenizer")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--one", action="store_true", help="one engine, in this process")
    parser.add_argument("--no-caching", action="store_true", help="with --one")
    parser.add_argument("--block-size", type=int, help="with --one; default: the engine's own")
    parser.add_argument("--blocks", type=int, help="with --one: a pool of so many blocks")
    arguments = parser.parse_args()
    versions.need_vllm("the tests")
    if arguments.util is None:
        arguments.util = 0.1 if versions.on_cpu() else 0.5
    if arguments.one:
        return one_run(arguments)
    lab = load_module(arguments.file)
    sizes = arguments.block_sizes
    arms = [arm(lab, arguments, f"caching on, blocks of {size}", size, True) for size in sizes]
    off = arm(lab, arguments, f"caching off, blocks of {sizes[0]}", sizes[0], False)
    waiting_arm(lab, arguments, sizes[0])
    print("=== on and off")
    for size, (run, spent) in zip(sizes, arms, strict=True):
        equal = sum(a == b for a, b in zip(run["token_ids"], off[0]["token_ids"], strict=True))
        print(
            f"blocks of {size}, off / on: computed tokens {off[1].computed / spent.computed:.2f}, "
            f"wall clock {off[0]['median'] / run['median']:.2f}; "
            f"equal answers {equal} of {len(run['token_ids'])}"
        )


if __name__ == "__main__":
    main()

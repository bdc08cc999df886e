"""Prefix-cache hits of a real vLLM 0.22.1: predict them, run with the cache on and off, compare.

    course gpu run 03-03
    python run.py --model Qwen/Qwen2.5-0.5B-Instruct --shared 3000 --max-model-len 4096
    python run.py --dummy                      no weights, no tokenizer: the counters are the same
    python run.py --one --no-caching           one engine only, in this process

Each arm is a process of its own. It warms up with a stranger's prompt, empties the cache, sends
all prompts for one token each (time to first token, counters), empties it again, and sends them for
`--max-tokens` with the cache usage polled between steps. Needs vllm==0.22.1 and a CUDA GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[2] / "models" / "byte-llama"
MARK = "RESULT "


def make_prompts(num_prompts: int, shared: int, unique: int) -> list[list[int]]:
    """Token ids with `shared` leading tokens in common and tails that differ at once.

    Small ids, which exist in every vocabulary.
    """
    head = [7 + i % 83 for i in range(shared)]
    tails = ([100 + (number + i) % 90 for i in range(unique)] for number in range(num_prompts))
    return [[*head, *tail] for tail in tails]


def read(llm: Any) -> dict[str, float]:
    """The four counters and the usage gauge, from the engine's own metrics."""
    values = {"queries": 0.0, "hits": 0.0, "computed": 0.0, "cached": 0.0, "usage": 0.0}
    sources = {"local_compute": "computed", "local_cache_hit": "cached"}
    for metric in llm.get_metrics():
        if metric.name in ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits"):
            values[metric.name.rpartition("_")[2]] += metric.value
        elif metric.name == "vllm:prompt_tokens_by_source":
            name = sources.get(metric.labels["source"])
            if name:
                values[name] += metric.value
        elif metric.name == "vllm:kv_cache_usage_perc":
            values["usage"] = max(values["usage"], metric.value)
    return values


def one_run(arguments: argparse.Namespace) -> None:
    """One arm: an engine with or without prefix caching; prints what its meters say."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    from vllm import LLM, SamplingParams

    more: dict[str, Any] = {}
    if arguments.dummy:
        more = {"load_format": "dummy", "skip_tokenizer_init": True}
    llm = LLM(
        model=arguments.model,
        gpu_memory_utilization=arguments.util,
        max_model_len=arguments.max_model_len,
        enable_prefix_caching=not arguments.no_caching,
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
    llm.reset_prefix_cache()
    before, start = read(llm), time.perf_counter()
    outputs = llm.generate(inputs, params(1), use_tqdm=False)
    seconds = time.perf_counter() - start
    after = read(llm)

    llm.reset_prefix_cache()
    engine, peak = llm.llm_engine, 0.0
    for number, prompt in enumerate(inputs):
        engine.add_request(f"peak-{number}", prompt, params(arguments.max_tokens))
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        peak = max(peak, read(llm)["usage"])
    engine.do_log_stats()  # the periodic line, now
    result = {
        "block_size": llm.llm_engine.vllm_config.cache_config.block_size,
        "prompts": prompts,
        "each": [output.num_cached_tokens for output in outputs],
        **{name: int(after[name] - before[name]) for name in ("queries", "hits")},
        **{name: int(after[name] - before[name]) for name in ("computed", "cached")},
        "seconds": seconds,
        "peak_usage": peak,
        "token_ids": [tokens[name] for name in sorted(tokens, key=lambda n: int(n.split("-")[1]))],
    }
    print(MARK + json.dumps(result), flush=True)


def start(arguments: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Run `one_run` in a process of its own; its result. Shows the periodic log line."""
    command = [sys.executable, __file__, "--one", "--model", arguments.model, *more]
    for name in ("max_model_len", "prompts", "shared", "unique", "max_tokens", "util"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    command += ["--dummy"] if arguments.dummy else []
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.splitlines()
    results = [line for line in lines if line.startswith(MARK)]
    if done.returncode or not results:
        raise SystemExit("\n".join([*lines[-30:], f"the run failed: {' '.join(command)}"]))
    for line in lines:
        if "Prefix cache hit rate" in line and not line.startswith(MARK):
            print("  |", line)
    return json.loads(results[-1].removeprefix(MARK))


def load_lab(file: str) -> ModuleType:
    """A lab file as a module."""
    spec = importlib.util.spec_from_file_location("lab_03_03", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["lab_03_03"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefix-cache hits of a real vLLM.")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--shared", type=int, default=430, help="leading tokens in common")
    parser.add_argument("--unique", type=int, default=15, help="tokens of each prompt's own")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--util", type=float, default=0.5, help="gpu_memory_utilization")
    parser.add_argument("--dummy", action="store_true", help="random weights, no tokenizer")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--one", action="store_true", help="one engine, in this process")
    parser.add_argument("--no-caching", action="store_true", help="with --one")
    arguments = parser.parse_args()
    if arguments.one:
        return one_run(arguments)
    lab = load_lab(arguments.file)
    runs = {}
    for caching in (True, False):
        print(f"=== prefix caching {'on' if caching else 'off'}")
        run = runs[caching] = start(arguments, *([] if caching else ["--no-caching"]))
        queries, hits, computed = lab.predict_hits(run["prompts"], run["block_size"])
        expected = (queries, hits, computed) if caching else (0, 0, queries)
        print(f"predicted queries {expected[0]}, hits {expected[1]}, computed {expected[2]}")
        print(f"measured  queries {run['queries']}, hits {run['hits']}, computed {run['computed']}")
        print(f"cached tokens per request: {run['each']}")
        print(f"all first tokens after {run['seconds'] * 1e3:.1f} ms; ", end="")
        print(f"peak cache usage {run['peak_usage']:.3%}")
    on, off = runs[True], runs[False]
    print(f"computed tokens, off / on: {off['computed'] / on['computed']:.2f}")
    print(f"wall clock, off / on: {off['seconds'] / on['seconds']:.2f}")
    equal = sum(a == b for a, b in zip(on["token_ids"], off["token_ids"], strict=True))
    print(f"equal answers: {equal} of {len(on['token_ids'])}")


if __name__ == "__main__":
    main()

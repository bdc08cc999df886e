"""Drafts on a real vLLM 0.22.1: measure with and without, and reconcile.

    course gpu run 08-02                       n-gram drafts on the shipped model
    course gpu run 08-02 --cpu                 vLLM's CPU build
    python run.py --model Qwen/Qwen3-8B --method eagle3 --draft RedHatAI/Qwen3-8B-speculator.eagle3
    python run.py --model meta-llama/Meta-Llama-3-8B-Instruct --method eagle \
        --draft yuhuili/EAGLE-LLaMA3-Instruct-8B --max-model-len 4096

One engine per setting, each a process of its own: first without drafts, then one per number of
drafts. Three kinds of text, each at several batches. Times are per output token after the first,
from the engine's own stamps; counters are differences around the timed runs. Needs vllm==0.22.1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit import processes, versions

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[2] / "models" / "byte-llama"
SHOWN = ("SpecDecoding metrics", "not supported", "will be disabled")
TEXTS = {
    "prose": "{n}. A cache keeps what was computed before, so that a later request may find it. "
    "When the memory is full, the entry that was used longest ago is given up first, and",
    "code": "# {n}\nclass Queue:\n    def __init__(self):\n        self.items = []\n\n"
    "    def push(self, item):\n        self.items.append(item)\n\n"
    "    def pop(self):\n        return self.items.pop()\n\n    def",
    "copy": "{n}. The lamp on the third floor is green, the one on the second floor is red.\n"
    "{n}. The lamp on the third floor is green, the one on the second floor is red.\n{n}. The lamp",
}
"""Prompts by kind; a number makes each request of a batch another one."""


# --- one engine -----------------------------------------------------------------------------------


def counters(llm: Any, k: int) -> dict[str, Any]:
    """The engine's counters of drafts, in the form of the lab's `count_runs`."""
    positions = "num_accepted_tokens_per_pos"
    found: dict[str, Any] = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    found[positions] = [0] * k
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name in found:
            found[name] = list(metric.values) if name == positions else int(metric.value)
    return found


def minus(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What was counted in between."""
    return {
        name: [a - b for a, b in zip(value, before[name], strict=True)]
        if isinstance(value, list)
        else value - before[name]
        for name, value in after.items()
    }


def one_run(arguments: argparse.Namespace) -> None:
    """Start an engine, time it on every text and batch, give the numbers to the parent."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    config = json.loads(arguments.speculative)
    k = config["num_speculative_tokens"] if config else 0
    llm = LLM(
        model=arguments.model,
        dtype=arguments.dtype,
        speculative_config=config,
        max_model_len=arguments.max_model_len,
        gpu_memory_utilization=arguments.util,
        enable_prefix_caching=False,  # every prompt is computed in every run
        enforce_eager=current_platform.is_cpu(),  # to compile takes longer than this run
        disable_log_stats=False,  # without it there are no counters
    )
    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True)
    found = []
    for kind, text in TEXTS.items():
        for batch in arguments.batches:
            prompts = [text.format(n=number) for number in range(batch)]
            llm.generate(prompts, params, use_tqdm=False)  # warm up
            before = counters(llm, k)
            times = []
            for _ in range(arguments.repeat):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                stamps = [output.metrics for output in outputs]
                gaps = arguments.max_tokens - 1
                each = [(m.last_token_ts - m.first_token_ts) / gaps for m in stamps]
                times.append(statistics.mean(each))
            found.append(
                {
                    "kind": kind,
                    "batch": batch,
                    "times": times,
                    "counters": minus(counters(llm, k), before),
                    "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                }
            )
            processes.tell(
                f"{kind}, batch {batch}: {statistics.median(times) * 1e3:.2f} ms a token"
            )
    llm.llm_engine.do_log_stats()  # the line, of everything since the last one
    processes.answer({"found": found})


# --- all of them ----------------------------------------------------------------------------------


def start(
    arguments: argparse.Namespace, config: dict[str, Any] | None
) -> tuple[list[Any], list[str]]:
    """Run `one_run` in a process of its own: its numbers, and its lines."""
    command = [__file__, "--one", "--speculative", json.dumps(config)]
    command += ["--model", arguments.model, "--dtype", arguments.dtype, "--batches"]
    command += [*map(str, arguments.batches), "--repeat", str(arguments.repeat)]
    command += ["--max-tokens", str(arguments.max_tokens), "--util", str(arguments.util)]
    command += ["--max-model-len", str(arguments.max_model_len)]
    env = dict(os.environ)
    if versions.on_cpu():
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    ran = processes.start(command, show=SHOWN, env=env)
    return ran.needed()["found"], ran.lines


def load_lab(file: str) -> ModuleType:
    """A lab file as a module."""
    spec = importlib.util.spec_from_file_location("lab_08_02", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["lab_08_02"] = module
    spec.loader.exec_module(module)
    return module


def agreement(base: list[list[int]], spec: list[list[int]]) -> str:
    """How many texts are equal, and where the first one differs."""
    equal = sum(a == b for a, b in zip(base, spec, strict=True))
    first = min(
        (next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y))
        for a, b in [(a, b) for a, b in zip(base, spec, strict=True) if a != b] or [([0], [1])]
    )
    words = f"{equal} of {len(base)} texts equal"
    return words if equal == len(base) else f"{words}, first difference at token {first}"


def show(lab: ModuleType, base: dict[str, Any], spec: dict[str, Any], k: int) -> None:
    """One text at one batch: counters, and the two times reconciled."""
    counted = spec["counters"]
    drafts, accepted = counted["num_drafts"], counted["num_accepted_tokens"]
    print(f"{spec['kind']}, batch {spec['batch']}: {agreement(base['tokens'], spec['tokens'])}")
    slow, fast = statistics.median(base["times"]), statistics.median(spec["times"])
    print(f"   {slow * 1e3:.2f} ms a token without drafts, {fast * 1e3:.2f} with")
    if not drafts:
        return print("   no drafts at all")
    length = 1 + accepted / drafts
    rates = " ".join(f"{count / drafts:.3f}" for count in counted["num_accepted_tokens_per_pos"])
    print(
        f"   drafts {drafts}, draft tokens {counted['num_draft_tokens']}, accepted {accepted}; "
        f"mean acceptance length {length:.2f}; by position {rates}"
    )
    # Runs without drafts give one token each; the first token of a request is the prefill's.
    tokens = sum(len(ids) - 1 for ids in spec["tokens"]) * len(spec["times"])
    runs = tokens - accepted
    per_run = tokens / runs
    told = lab.reconcile(slow, fast, per_run, k)
    print(
        f"   {per_run:.2f} tokens a run over all runs; {told['speedup']:.2f} times as fast; a run "
        f"takes {told['run_steps']:.2f} steps, so the drafts cost {told['extra_steps']:+.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Drafts on a real vLLM.")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--method", default="ngram", help="ngram, eagle, eagle3, draft_model, mtp")
    parser.add_argument("--draft", help="the drafter's model, for methods that have one")
    parser.add_argument("--ks", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--dtype", help="default: float32 on a CPU, else the model's")
    parser.add_argument("--util", type=float, default=0.8, help="share of the GPU's memory")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--one", action="store_true", help="one engine, in this process")
    parser.add_argument("--speculative", default="null", help="with --one: the config, as JSON")
    arguments = parser.parse_args()
    on_cpu = versions.on_cpu()
    arguments.batches = arguments.batches or ([1, 8] if on_cpu else [1, 8, 32, 128])
    arguments.dtype = arguments.dtype or ("float32" if on_cpu else "auto")
    if arguments.one:
        return one_run(arguments)
    versions.need_vllm("the tests")
    lab = load_lab(arguments.file)
    print("=== without drafts", flush=True)
    base, _ = start(arguments, None)
    for k in arguments.ks:
        config: dict[str, Any] = {"method": arguments.method, "num_speculative_tokens": k}
        if arguments.method == "ngram":
            config |= {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
        if arguments.draft:
            config["model"] = arguments.draft
        print(f"=== {json.dumps(config)}", flush=True)
        found, lines = start(arguments, config)
        for without, with_drafts in zip(base, found, strict=True):
            show(lab, without, with_drafts, k)
        for line in lines:
            if "SpecDecoding metrics:" in line:
                told = lab.parse_spec_line(line)
                drafts = told["accepted"] / max(told["mean_acceptance_length"] - 1, 0.005)
                print(
                    f"the log, read back: {told['accepted']} of {told['drafted']} accepted, mean "
                    f"acceptance length {told['mean_acceptance_length']}: about {drafts:.0f} drafts"
                )


if __name__ == "__main__":
    main()

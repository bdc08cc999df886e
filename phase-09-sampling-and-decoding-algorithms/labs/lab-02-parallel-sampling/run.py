"""n answers on a real vLLM 0.22.1: predict the plans, the hits and the seeds, then look.

    course gpu run 09-02                       the shipped model
    course gpu run 09-02 --cpu                 vLLM's CPU build
    python run.py --model facebook/opt-125m --max-model-len 512
    python run.py --predict                    what must come, without vLLM

Two engines, each a process of its own: with prefix caching and without. In each the scheduler is
watched step by step. Needs vllm==0.22.1; without it the run says so and ends.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit import processes, versions
from labkit.modules import load_module

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[2] / "models" / "byte-llama"
P, L, N, SEED = 65, 24, 4, 7
SHORT = "Hi, GPU"
"""A prompt of less than one block, in every vocabulary."""


# --- one engine, in a process of its own ----------------------------------------------------------


def one_engine(arguments: argparse.Namespace) -> None:
    """Start an engine in this process, so that its scheduler can be watched; run the questions."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    llm = LLM(
        model=arguments.model,
        dtype="float32" if cpu else "auto",
        enable_prefix_caching=arguments.caching == "on",
        disable_log_stats=False,  # without it there are no counters
        enforce_eager=True,
        async_scheduling=False,
        block_size=16,  # a processor would take 128
        max_model_len=arguments.max_model_len,
        gpu_memory_utilization=arguments.util,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, plans = scheduler.schedule, []

    def watched(*given: Any, **more: Any) -> Any:
        plan = schedule(*given, **more)
        if plan.num_scheduled_tokens:
            plans.append(list(plan.num_scheduled_tokens.values()))
        return plan

    scheduler.schedule = watched
    processes.tell("the engine is up")

    def counters() -> list[int]:
        found = {metric.name: metric for metric in llm.get_metrics()}
        names = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits")
        return [int(found[name].value) if name in found else 0 for name in names]

    def asked(prompt: Any, **wish: Any) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Token ids of every answer, the plans, and how far the two counters moved."""
        before = counters()
        plans.clear()
        params = SamplingParams(temperature=1.0, max_tokens=L, ignore_eos=True, **wish)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        answers = [list(answer.token_ids) for answer in output.outputs]
        moved = [b - a for a, b in zip(before, counters(), strict=True)]
        return answers, [list(plan) for plan in plans], moved

    def prompt(first: int) -> dict[str, list[int]]:
        """65 ids; another first one makes every block another block."""
        return {"prompt_token_ids": [first, *range(40, 40 + P - 1)]}

    result: dict[str, Any] = {"device": current_platform.get_device_name()}
    result["many"] = asked(prompt(1), n=N)[1:]
    if arguments.caching == "on":
        result["short"] = asked(SHORT, n=N)[1:]
        first, _, _ = asked(prompt(2), n=N, seed=SEED)
        again, _, _ = asked(prompt(2), n=N, seed=SEED)
        alone = [asked(prompt(2), seed=SEED + index)[0][0] for index in range(N)]
        result["rerun"] = first == again
        result["children"] = [one == other for one, other in zip(first, alone, strict=True)]
        result["distinct"] = len({tuple(tokens) for tokens in first})
        try:
            SamplingParams(n=N, temperature=0.0)
        except ValueError as error:
            result["greedy"] = str(error)
        llm.llm_engine.do_log_stats()  # the line with the hit rate
    processes.answer(result)


# --- both, against the prediction -----------------------------------------------------------------


def told(plans: list[list[int]]) -> str:
    """Plans in one line: equal ones together."""
    runs = [(list(plan), len(list(same))) for plan, same in groupby(plans)]
    return ", ".join(f"{count} x {plan}" if count > 1 else str(plan) for plan, count in runs)


def expected(lab: ModuleType, caching: bool, prompt_len: int = P) -> tuple[list[list[int]], Any]:
    """The plans of the mini engine and the lab's cost."""
    trace = lab.run_mini(N, prompt_len, [L] * N, caching)
    return trace.plans, lab.parallel_cost(prompt_len, L, N, 16, caching)


def verdict(name: str, want: Any, came: Any) -> bool:
    """One line for an expectation; whether it holds."""
    print(f"{'as predicted' if want == came else 'NOT AS PREDICTED'}: {name}: {came}")
    if want != came:
        print(f"    expected {want}")
    return bool(want == came)


def compare(lab: ModuleType, caching: bool, result: dict[str, Any]) -> bool:
    """Everything one engine said, against what was predicted."""
    plans, cost = expected(lab, caching)
    came, (queries, hits) = result["many"]
    right = verdict(f"plans of {N} answers, {P} prompt tokens", told(plans), told(came))
    right &= verdict("tokens computed", cost.forward_tokens, sum(map(sum, came)))
    if not caching:
        return right
    found = round(cost.hit_rate * N * P)
    right &= verdict("tokens looked up, tokens found", (N * P, found), (queries, hits))
    _, (_, short) = result["short"]
    right &= verdict("tokens found by a prompt below one block", 0, short)
    right &= verdict(f"seed {SEED} twice: the same {N} texts", True, result["rerun"])
    right &= verdict("texts that differ among them", N, result["distinct"])
    words = f"seeds {SEED} to {SEED + N - 1} alone: the same as the children"
    right &= verdict(words, [True] * N, result["children"])
    print("temperature 0 and n = 4:", result.get("greedy", "accepted"))
    return right and "greedy" in result


def main() -> int:
    parser = argparse.ArgumentParser(description="n answers on a real vLLM.")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--util", type=float, default=0.5, help="share of the GPU's memory")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--predict", action="store_true", help="say what must come, and end")
    parser.add_argument("--caching", choices=("on", "off"), help="one engine, in this process")
    arguments = parser.parse_args()
    if arguments.caching:
        one_engine(arguments)
        return 0
    lab = load_module(Path(arguments.file))
    for caching in (True, False):
        plans, cost = expected(lab, caching)
        print(f"predicted, caching {'on' if caching else 'off'}: {told(plans)}; {cost}")
    if arguments.predict:
        return 0
    versions.need_vllm("--predict, or the tests")
    right = True
    for caching in (True, False):
        state = "on" if caching else "off"
        print(f"=== prefix caching {state}: starting an engine", flush=True)
        command = [__file__, "--caching", state, "--model", arguments.model]
        command += ["--max-model-len", str(arguments.max_model_len), "--util", str(arguments.util)]
        env = {**os.environ, **({"VLLM_CPU_KVCACHE_SPACE": "1"} if versions.on_cpu() else {})}
        ran = processes.start(command, show=("Prefix cache hit rate",), env=env)
        right &= compare(lab, caching, ran.needed())
    print("all as predicted" if right else "something is not as predicted; see above")
    return 0


if __name__ == "__main__":
    sys.exit(main())

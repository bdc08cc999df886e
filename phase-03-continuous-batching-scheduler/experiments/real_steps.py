"""How long are the steps of a stream when a long prompt arrives, in vLLM itself?

    course engine run phase-03-continuous-batching-scheduler/experiments/real_steps.py --out mine

Needs vllm==0.22.1, its CPU build or a GPU. Lab 03-05's seat beside one stream, on the shipped
model: a victim of 4 prompt tokens, and after its first token a prompt of 900. Each setting is an
engine in a process of its own; each of the victim's steps is timed around `LLMEngine.step`, and
the run is repeated. Prefix caching is off, so that each repetition computes the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SETTINGS = ((0, 2048), (256, 2048), (64, 2048), (16, 2048), (0, 64))
"""Threshold and budget."""
VICTIM, LONG = 4, 900
"""Prompt lengths."""
OUTPUTS = 64
REPEATS = 7
MARK = "RESULT "


def one_setting(threshold: int, budget: int) -> list[list[list[float]]]:
    """Per repetition the steps until all is done, each [tokens scheduled, milliseconds, first].

    `first` is 1 in the step that gave the long prompt its first token.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(ROOT / "models" / "byte-llama"),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        block_size=16,
        enable_prefix_caching=False,
        enforce_eager=True,
        async_scheduling=False,
        gpu_memory_utilization=0.2,
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    schedule, plans = scheduler.schedule, []
    scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]

    def add(name: str, length: int, outputs: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
        prompt = {"prompt_token_ids": [32 + i % 90 for i in range(length)]}
        engine.add_request(name, prompt, params)

    repeats = []
    for number in range(1 + REPEATS):  # the first warms up
        add(f"victim-{number}", VICTIM, OUTPUTS)
        engine.step()
        add(f"long-{number}", LONG, 2)
        steps: list[list[float]] = []
        first = True
        while engine.has_unfinished_requests():
            begun = time.perf_counter()
            outputs = engine.step()
            took = 1e3 * (time.perf_counter() - begun)
            answered = any(o.request_id.startswith("long") for o in outputs)
            steps.append([plans[-1].total_num_scheduled_tokens, took, float(answered and first)])
            first = first and not answered
        repeats.append(steps)
    return repeats[1:]


def typical(repeats: list[list[list[float]]]) -> list[list[float]]:
    """Step by step over the repetitions: tokens, the median of the milliseconds, `first`.

    Raises:
        ValueError: the repetitions were not scheduled alike.
    """
    rows = list(zip(*repeats, strict=True))
    for number, row in enumerate(rows):
        if len({(tokens, first) for tokens, _, first in row}) > 1:
            raise ValueError(f"step {number} differs between repetitions: {row}")
    return [[row[0][0], statistics.median(step[1] for step in row), row[0][2]] for row in rows]


def table(saved: dict[str, Any]) -> str:
    """The victim's decode steps in tokens and in milliseconds, by setting."""
    lines = [
        f"{'threshold, budget':<18}{'worst step':>15}{'median step':>15}{'mean':>9}"
        f"{'the prompt waits':>18}"
    ]
    for name, steps in saved["steps"].items():
        mine = steps[: saved["outputs"] - 1]
        worst = max(mine, key=lambda step: step[1])
        middle = statistics.median(step[1] for step in mine)
        tokens = statistics.median_low([int(step[0]) for step in mine])
        until = next(i for i, step in enumerate(steps) if step[2])
        first = sum(step[1] for step in steps[: until + 1])
        mean = statistics.mean(step[1] for step in mine)
        lines.append(
            f"{name:<18}{f'{int(worst[0])}: {worst[1]:.1f} ms':>15}"
            f"{f'{tokens}: {middle:.1f} ms':>15}{f'{mean:.1f} ms':>9}{f'{first:.0f} ms':>18}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="A long prompt beside a stream, in vLLM.")
    parser.add_argument("--out", type=Path, default=Path("my-steps"))
    parser.add_argument("--one", type=int, nargs=2, metavar=("THRESHOLD", "BUDGET"))
    arguments = parser.parse_args()
    if arguments.one:
        print(MARK + json.dumps(one_setting(*arguments.one)), flush=True)
        return
    from conformance.real_engine import provenance

    steps = {}
    for threshold, budget in SETTINGS:
        command = [sys.executable, __file__, "--one", str(threshold), str(budget)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        if done.returncode or not found:
            raise SystemExit(f"{done.stdout[-2000:]}\nthe run failed: {' '.join(command)}")
        repeats = json.loads(found[0].removeprefix(MARK))
        steps[f"{threshold}, {budget}"] = [
            [int(tokens), round(took, 3), int(first)] for tokens, took, first in typical(repeats)
        ]
    script = f"python {Path(__file__).relative_to(ROOT)}"
    saved = {
        "machine": provenance(script, "float32"),
        "victim": VICTIM,
        "long": LONG,
        "outputs": OUTPUTS,
        "repeats": REPEATS,
        "steps": steps,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "real-steps.json"
    path.write_text(json.dumps(saved) + "\n", encoding="utf-8")
    print(table(saved))


if __name__ == "__main__":
    main()

"""How long one step takes on this machine: measured on the shipped model, fitted to a line.

`python phase-03-continuous-batching-scheduler/experiments/step_cost.py` runs steps of many shapes,
fits seconds = a + b tokens + c context + d pairs by least squares on relative errors, prints the
residuals and writes `step-cost.json` into `--out`. One thread; seconds are this machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # read once, when numpy is imported

import numpy as np  # noqa: E402

from course.machine import processor  # noqa: E402
from mini_vllm import LLMEngine, SamplingParams, Scheduler, SchedulerOutput  # noqa: E402
from mini_vllm.batch import Model  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step's time depends on."""

    tokens: int
    """Tokens computed."""
    context: int
    """Sum of the sequence lengths after the step: K and V that are read."""
    pairs: int
    """Query and key pairs: each computed token with every token it sees."""


def shape_of(plan: SchedulerOutput) -> Shape:
    """The shape of a plan that has not run yet."""
    tokens = context = pairs = 0
    for request in plan.scheduled_requests:
        n, before = plan.num_scheduled_tokens[request.request_id], request.num_computed_tokens
        tokens += n
        context += before + n
        pairs += n * before + n * (n + 1) // 2
    return Shape(tokens, context, pairs)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: `base + max(floor, token * tokens) + context * ... + pair * ...`.

    `floor` is what the weights cost whatever is computed, where reading them takes longer than the
    arithmetic; it is 0 for a fitted line.
    """

    base: float
    token: float
    context: float
    pair: float
    floor: float = 0.0

    def seconds(self, shape: Shape) -> float:
        """Predicted seconds of a step."""
        work = max(self.floor, self.token * shape.tokens)
        return self.base + work + self.context * shape.context + self.pair * shape.pairs


H100_8B = StepCost(
    base=0.5e-3,
    token=2 * 8e9 / 495e12,
    context=2 * 32 * 8 * 128 * 2 / 3.35e12,
    pair=4 * 32 * 4096 / 495e12,
    floor=2 * 8e9 / 3.35e12,
)
"""Arithmetic, no measurement: 8e9 weights in bf16, 32 layers, hidden size 4096, 8 KV heads of 128.

3.35 TB/s is the data sheet's bandwidth of an H100 SXM; 495 TFLOP/s is half of its dense bf16 rate;
half a millisecond per step for everything else is assumed.
"""


def bound_chunks(scheduler: Scheduler, threshold: int) -> None:
    """Let the next step compute at most `threshold` tokens of one request; 0 is no bound."""
    scheduler.config = replace(scheduler.config, long_prefill_token_threshold=threshold)


def measure(
    num_steps: int, seed: int = 0, model: str | Path | Model = "byte-llama"
) -> list[dict[str, float]]:
    """Time steps of random shapes: some streams decoding, perhaps a chunk of a prompt beside them.

    Steps of a single token are left out: numpy multiplies one column by another routine (GEMV),
    at about half the time of two. Each shape is run five times and the shortest counts.

    Args:
        num_steps: shapes to measure.
        seed: of the shapes.
        model: as for `LLMEngine`.

    Returns:
        One `{"tokens", "context", "pairs", "seconds"}` per shape.
    """
    engine = LLMEngine(
        num_blocks=2048,
        block_size=16,
        max_num_seqs=256,
        max_num_batched_tokens=100_000,
        enable_prefix_caching=False,
        model=model,
    )
    scheduler, rng, rows = engine.scheduler, random.Random(seed), []
    longest = (engine.max_model_len or 1024) - 8
    while len(rows) < num_steps:
        streams, length = rng.choice((0, 1, 2, 4, 8, 16, 32)), rng.choice((16, 64, 200, 500))
        chunk, before = rng.choice((0, 1, 16, 32, 64, 128, 256)), rng.choice((0, 64, 256, 480))
        if streams + chunk < 2 or before + chunk > longest or length > longest:
            continue
        best: dict[str, float] = {}
        for _ in range(5):
            for name in list(scheduler.requests):
                engine.abort_request(name)
            bound_chunks(scheduler, 0)
            params = SamplingParams(max_tokens=6, ignore_eos=True)
            for stream in range(streams):
                engine.add_request([5 + (7 * stream + i) % 90 for i in range(length)], params)
            if streams:
                engine.step()
            if chunk:
                engine.add_request([5 + 3 * i % 90 for i in range(before + chunk + 1)], params)
                if before:
                    bound_chunks(scheduler, before)
                    engine.step()
                bound_chunks(scheduler, chunk)
            shapes: list[Shape] = []
            engine.observers.append(lambda plan, to=shapes: to.append(shape_of(plan)))
            start = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - start
            engine.observers.clear()
            if not best or seconds < best["seconds"]:
                best = {**asdict(shapes[0]), "seconds": round(seconds, 7)}
        rows.append(best)
    return rows


def fit(
    rows: Sequence[dict[str, float]], columns: Sequence[str]
) -> tuple[list[float], dict[str, float]]:
    """Least squares of seconds on 1 and `columns`, each row weighted by 1 / seconds.

    Returns:
        Coefficients, the constant first, and the residuals: median and 95th percentile of the
        absolute relative error, and R squared of the seconds.
    """
    seconds = np.array([row["seconds"] for row in rows])
    matrix = np.array([[1.0, *(row[name] for name in columns)] for row in rows])
    solution, *_ = np.linalg.lstsq(matrix / seconds[:, None], np.ones(len(rows)), rcond=None)
    predicted = matrix @ solution
    relative = np.abs(predicted / seconds - 1)
    spread = ((seconds - seconds.mean()) ** 2).sum()
    return [float(value) for value in solution], {
        "median_error": round(float(np.median(relative)), 4),
        "p95_error": round(float(np.quantile(relative, 0.95)), 4),
        "r2": round(float(1 - ((predicted - seconds) ** 2).sum() / spread), 4),
    }


def fitted(num_steps: int, model: str | Path | Model = "byte-llama") -> dict[str, Any]:
    """Measure and fit with three terms and with four; JSON types only."""
    rows = measure(num_steps, model=model)
    three, three_error = fit(rows, ("tokens", "context"))
    four, four_error = fit(rows, ("tokens", "context", "pairs"))
    return {
        "machine": processor(),
        "threads": 1,
        "numpy": np.__version__,
        "model": "byte-llama, float32" if isinstance(model, str) else "given",
        "cost": dict(zip(("base", "token", "context", "pair"), four, strict=True)),
        "residual": four_error,
        "three_terms": {
            "cost": dict(zip(("base", "token", "context"), three, strict=True)),
            "residual": three_error,
        },
        "steps": rows,
    }


def load(path: Path) -> StepCost:
    """The fitted cost from a file that `main` wrote."""
    return StepCost(**json.loads(path.read_text(encoding="utf-8"))["cost"])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, fit, print, write the JSON."""
    parser = argparse.ArgumentParser(description="Fit the time of a step on this machine.")
    parser.add_argument("--steps", type=int, default=60, help="shapes to measure")
    parser.add_argument("--out", type=Path, default=Path("my-policies"), help="folder to write to")
    args = parser.parse_args(argv)
    if args.steps < 8:
        parser.error("--steps needs at least 8")
    result = fitted(args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "step-cost.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(f"{result['machine']}, one thread, {args.steps} shapes of a step")
    for name, part in (("three terms", result["three_terms"]), ("four terms", result)):
        terms = ", ".join(f"{key} {value * 1e6:.3g} us" for key, value in part["cost"].items())
        error = part["residual"]
        print(f"{name}: {terms}")
        print(f"  error: median {error['median_error']:.1%}, 95th {error['p95_error']:.1%}")


if __name__ == "__main__":
    main()

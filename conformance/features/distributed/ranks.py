"""Random engines on random splits: do the ranks answer as one process does, and do they ever hang?

    python -m conformance.features.distributed.ranks --runs 1000

Each run draws a small model with random weights, a way to split it over at most four ranks, a
transport, the engine's knobs and a workload with chunks, shared prefixes, preemptions and aborts,
and serves it twice: in this process, and over ranks that stay alive from run to run. Prints a line
for each run that hangs (a deadline of `--limit` seconds passes) or differs, and ends with a line
`N runs, M steps: H hang, K differ; largest difference of a logit D`; exit status 1 unless both are
0.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from labkit.tables import write_section
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.distributed.autopsy import RankError
from mini_vllm.distributed.config import ParallelConfig
from mini_vllm.distributed.pool import RankPool
from mini_vllm.models.moe import MoeConfig
from mini_vllm.models.transformer import ModelConfig
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.tests.ranks_support import RandomSource

TOLERANCE = 1e-10
"""On float64 logits of size 1 to 10; `ranks_support.TOLERANCE` says why so small, and these models
may be wider."""
MOST_RANKS = 4
README = Path(__file__).with_name("README.md")


@dataclass(frozen=True)
class Run:
    """One random engine and its workload."""

    seed: int
    source: RandomSource
    split: dict[str, Any]
    transport: str
    knobs: dict[str, Any]
    prompts: list[list[int]]
    max_tokens: list[int]
    arrivals: list[int]
    """Step before which each prompt is added."""
    aborts: dict[int, int]
    """Number of a prompt by the step before which it is aborted."""

    @property
    def label(self) -> str:
        """The split in short."""
        names = {"tensor": "tp", "pipeline": "pp", "enable": "ep", "decode": "dcp"}
        sizes = {names[k.partition("_")[0]]: int(v) for k, v in self.split.items()}
        return " ".join(f"{k}{v}" for k, v in sizes.items() if v > (k != "ep"))


@dataclass
class Outcome:
    """What one engine made of a run."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    rows: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    steps: int = 0
    seen: Counter[str] = field(default_factory=Counter)


def draw(seed: int) -> Run:
    """The run of a seed."""
    rng = random.Random(f"ranks {seed}")
    config = _config(rng)
    split = _split(rng, config)
    block_size = rng.choice([4, 8, 4, 12])
    prefix = [rng.randrange(config.vocab_size) for _ in range(rng.choice([0, 5, 9, 13]))]
    prompts = [
        prefix[: rng.randrange(len(prefix) + 1)]
        + [rng.randrange(config.vocab_size) for _ in range(rng.randrange(1, 20))]
        for _ in range(rng.randrange(1, 8))
    ]
    max_tokens = [rng.randrange(1, 14) for _ in prompts]
    longest = max(len(p) + n for p, n in zip(prompts, max_tokens, strict=True))
    seqs = rng.choice([1, 2, 4, 6])
    chunked = rng.random() < 0.85
    knobs = {
        "dtype": "float64",
        "block_size": block_size,
        "num_blocks": 2 - -longest // block_size + rng.choice([0, 0, 1, 3, 20]),
        "max_num_seqs": seqs,
        "max_num_batched_tokens": max(seqs, rng.choice([3, 9, 17, 60])) if chunked else 60,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": rng.random() < 0.75,
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "forget_withdrawn_blocks": True,
        "long_prefill_token_threshold": rng.choice([0, 0, 4]),
    }
    if split.get("pipeline_parallel_size", 1) == 1 and rng.random() < 0.25:
        knobs["async_scheduling"] = True
    arrivals = [rng.choice([0, 0, 0, rng.randrange(8)]) for _ in prompts]
    aborts = {
        rng.randrange(1, 10): rng.randrange(len(prompts)) for _ in range(rng.choice([0, 0, 2]))
    }
    return Run(
        seed, RandomSource(config, seed), split, rng.choice(["shared_memory", "sockets"]), knobs,
        prompts, max_tokens, arrivals, aborts,
    )  # fmt: skip


def _config(rng: random.Random) -> ModelConfig:
    heads = rng.choice([4, 4, 8])
    layers = rng.choice([2, 3, 4, 5])
    config = ModelConfig(
        rng.choice([50, 64, 70, 130]), rng.choice([16, 32]), rng.choice([16, 24, 48]),
        layers, heads,
        rng.choice([n for n in (1, 2, 4, 8) if heads % n == 0]), rng.choice([4, 8]), 256,
        tie_word_embeddings=rng.random() < 0.5, qkv_bias=rng.random() < 0.5,
        o_bias=rng.random() < 0.5, mlp_bias=rng.random() < 0.5, qk_norm=rng.random() < 0.5,
    )  # fmt: skip
    if rng.random() < 0.5:
        return config
    dense = frozenset(layer for layer in range(layers) if rng.random() < 0.2)
    experts = rng.randrange(4, 9)
    moe = MoeConfig(
        experts, rng.randrange(1, 4), rng.choice([8, 16]), rng.random() < 0.5, mlp_only_layers=dense
    )
    return replace(config, mlp_bias=False, moe=moe)


def _split(rng: random.Random, config: ModelConfig) -> dict[str, Any]:
    """Any split that the model allows; `ParallelConfig` is asked."""
    while True:
        split: dict[str, Any] = {"tensor_parallel_size": rng.choice([1, 2, 2, 4, 4])}
        split["pipeline_parallel_size"] = rng.choice([1, 1, 2, 3, 4])
        split["enable_expert_parallel"] = rng.random() < 0.5
        split["decode_context_parallel_size"] = rng.choice([1, 1, 2, 4])
        sizes = split["tensor_parallel_size"] * split["pipeline_parallel_size"]
        if not 2 <= sizes <= MOST_RANKS:
            continue
        try:
            ParallelConfig(**split).check_model(config)
        except ValueError:
            continue
        return split


def serve(run: Run, engine: LLMEngine) -> Outcome:
    """The workload to its end."""
    out = Outcome()

    def capture(request: Request, row: np.ndarray) -> np.ndarray:
        out.rows[int(request.request_id), request.num_tokens] = row.copy()
        return row

    def watch(plan: SchedulerOutput) -> None:
        out.seen["preemptions"] += len(plan.preempted_req_ids)
        out.seen["hits"] += sum(n > 0 for n in plan.num_cached_tokens.values())
        sampling = len(plan.sampling_req_ids)
        out.seen["chunks"] += len(plan.scheduled_requests) - sampling

    engine.logits_processors.append(capture)
    engine.observers.append(watch)
    requests: dict[int, Request] = {}
    last = max([*run.arrivals, *run.aborts])
    while out.steps <= last or engine.has_unfinished_requests():
        for number in (n for n, step in enumerate(run.arrivals) if step == out.steps):
            params = SamplingParams(max_tokens=run.max_tokens[number], ignore_eos=True)
            engine.add_request(
                run.prompts[number], params, request_id=str(number), priority=number % 3,
                arrival_time=float(number),
            )  # fmt: skip
            requests[number] = engine.requests[str(number)]
        if out.steps in run.aborts:
            out.seen["aborts"] += str(run.aborts[out.steps]) in engine.requests
            engine.abort_request(str(run.aborts[out.steps]))
        engine.step()
        out.steps += 1
    aborted = set(run.aborts.values())
    out.tokens = {n: list(r.output_token_ids) for n, r in requests.items() if n not in aborted}
    return out


def compare(run: Run, got: Outcome, expected: Outcome) -> tuple[str, float]:
    """What differs in words, empty if nothing, and the largest difference of two logits.

    Aborted requests end after another number of tokens where more batches are in flight; what they
    have until then must agree.
    """
    rows = got.rows.keys() & expected.rows.keys()
    apart = max((float(np.abs(got.rows[k] - expected.rows[k]).max()) for k in rows), default=0.0)
    for number, tokens in expected.tokens.items():
        if got.tokens.get(number) != tokens:
            return f"prompt {number}: {got.tokens.get(number)}, need {tokens}", apart
    if apart > TOLERANCE:
        return f"logits differ by {apart:.1e}", apart
    return "", apart


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds that a rank may wait")
    parser.add_argument("--write", action="store_true", help="update the README.md beside it")
    arguments = parser.parse_args(argv)
    began, pools = time.monotonic(), dict[str, RankPool]()
    hangs = differ = steps = 0
    largest = 0.0
    seen: Counter[str] = Counter()
    splits: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.runs):
        run = draw(seed)
        dcp = run.split["decode_context_parallel_size"]
        expected = serve(run, LLMEngine(run.source.transformer(), **run.knobs))
        if run.transport not in pools or not pools[run.transport].is_alive:
            pools[run.transport] = RankPool(MOST_RANKS, run.transport, arguments.limit)
        try:
            knobs = {**run.knobs, "block_size": run.knobs["block_size"] // dcp}
            source: Any = run.source  # what ranks read, and no model
            engine = LLMEngine(source, rank_pool=pools[run.transport], **run.split, **knobs)
            got = serve(run, engine)
        except RankError as error:
            hangs += 1
            print(f"seed {seed}, {run.label}, {run.transport}: {error}", flush=True)
            continue
        why, apart = compare(run, got, expected)
        steps, largest = steps + got.steps, max(largest, apart)
        seen += got.seen
        splits[f"{run.label} {run.transport}"] += 1
        if why:
            differ += 1
            print(f"seed {seed}, {run.label}, {run.transport}: {why}", flush=True)
    for held in pools.values():
        held.close()
    said = (
        f"{arguments.runs} runs, {steps} steps: {hangs} hang, {differ} differ; largest difference "
        f"of a logit {largest:.1e}"
    )
    shown = ", ".join(f"{n} {what}" for what, n in sorted(seen.items()))
    ways = (
        f"{len(splits)} ways to split over a transport, the rarest in {min(splits.values())} run(s)"
    )
    print(shown, ways, f"{said} ({time.monotonic() - began:.0f} s)", sep="\n")
    if arguments.write:
        write_section("rank-runs", f"{said}. There were {shown}; {ways}.", README)
    return 1 if hangs or differ else 0


if __name__ == "__main__":
    sys.exit(main())

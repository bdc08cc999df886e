"""Six prompts through two servers: both do all, or one prefills and one goes on behind a wire.

Promises: every time is a plan of the engine's scheduler on a computed clock, with the prices that
lab 18-04 fits to steps of an 8 B model on an H100; the browser draws and computes nothing. Upstream
measures the same in `benchmarks/disagg_benchmarks/disagg_performance_benchmark.sh`.
"""

from __future__ import annotations

import functools
from typing import Any

from mini_vllm.config import EngineConfig
from mini_vllm.simulate.cost import LinearCost
from mini_vllm.simulate.pools import Wire, apart, together
from mini_vllm.simulate.traces import TraceRequest

COST = LinearCost({"step": 6.46e-3, "tokens": 2.12e-5, "prefill_pairs": 1.2e-9}, "lab 18-04")
KV_BYTES = 131_072
"""Of one token of an 8 B model with 8 KV heads in bfloat16."""
REQUESTS, OUTPUTS = 6, 24
PROMPTS = (512, 2048, 8192)
EVERY_MS = (20, 60, 200)
LINKS = (5, 10, 25, 100, 200, 400)
"""1e9 bits per second."""
TOGETHER = "two replicas"


@functools.cache
def film(prompt: int, every: int, arm: str) -> dict[str, Any]:
    """What becomes of the requests, in tenths of a millisecond.

    Args:
        prompt: tokens of each.
        every: milliseconds between two arrivals.
        arm: a link, or `TOGETHER`.
    """
    config = EngineConfig.of({
        "num_blocks": 8000, "max_num_batched_tokens": 2048, "max_num_seqs": 64,
        "async_scheduling": True, "enable_prefix_caching": False,
    })  # fmt: skip
    trace = [TraceRequest(number * every / 1e3, prompt, OUTPUTS) for number in range(REQUESTS)]
    if arm == TOGETHER:
        served = together(config, COST, trace)
    else:
        served = apart(config, COST, trace, Wire(float(arm), KV_BYTES))
    prefills = {each.number: each for each in (served.prefill or served.result).outcomes}
    crossings = {each.number: each for each in served.crossings}
    rows = list[dict[str, Any]]()
    for outcome in sorted(served.result.outcomes, key=lambda each: each.number):
        prefill, crossing = prefills[outcome.number], crossings.get(outcome.number)
        rows.append({
            "arrival": _tenths(outcome.arrival),
            "prefill": [_tenths(prefill.first_scheduled), _tenths(prefill.first_token)],
            "wire": [_tenths(crossing.begin), _tenths(crossing.end)] if crossing else None,
            "decode": [
                _tenths(outcome.first_scheduled if crossing else outcome.first_token),
                _tenths(outcome.last_token),
            ],
            "ttft": _tenths(outcome.ttft),
        })  # fmt: skip
    return {
        "rows": rows, "ttft": max(row["ttft"] for row in rows),
        "gap": _tenths(max(served.result.gaps)),
    }  # fmt: skip


def _tenths(seconds: float) -> int:
    return round(1e4 * seconds)


QUESTIONS: tuple[tuple[str, int, int, str, str, str], ...] = (
    ("Six prompts of 2,048, one every 60 ms, two replicas. The longest gap between two tokens, in "
     "ms?", 2048, 60, TOGETHER, "gap",
     "The budget of 2,048 is full: one decode and 2,047 tokens of a prompt."),
    ("The same apart, at 200 Gb/s: the longest gap?", 2048, 60, "200", "gap",
     "No prompt is computed where decodes run, but for its last token."),
    ("And the longest TTFT there?", 2048, 60, "200", "ttft",
     "52 ms of prefill, 11 of wire, a step at D, and what is waited for."),
    ("At 5 Gb/s: the longest TTFT?", 2048, 60, "5", "ttft",
     "A prompt takes 429 ms to cross and one comes every 60: they queue at the wire."),
)  # fmt: skip
"""What is asked, of which run, of which number, and why."""


def document() -> dict[str, Any]:
    """The widget's document."""
    arms = [TOGETHER, *map(str, LINKS)]
    films = {
        f"{prompt}|{every}|{arm}": film(prompt, every, arm)
        for prompt in PROMPTS for every in EVERY_MS for arm in arms
    }  # fmt: skip
    questions = [
        {"ask": ask, "prompt": prompt, "every": every, "arm": arm, "because": because,
         "answer": round(film(prompt, every, arm)[what] / 10)}
        for ask, prompt, every, arm, what, because in QUESTIONS
    ]  # fmt: skip
    return {
        "prompts": list(PROMPTS), "every": list(EVERY_MS), "arms": arms, "films": films,
        "questions": questions, "mebibytes": {p: p * KV_BYTES // 2**20 for p in PROMPTS},
    }  # fmt: skip

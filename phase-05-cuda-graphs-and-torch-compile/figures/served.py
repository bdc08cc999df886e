"""A run of the mini engine under changing load, as the graphs of phase 05 would see it.

Pages and figures use the same run: tokens per request of every step, by a scheduler with 60 seats,
a budget of 256 tokens and no prefix cache. The toy model answers; which tokens come is of no
matter to the plans. No upstream counterpart.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mini_vllm import LLMEngine, SamplingParams

MAX_NUM_SEQS = 60


def serve(seed: int = 5, arriving: int = 110) -> list[list[int]]:
    """Tokens per request, in scheduling order, of every step until all requests have ended.

    Args:
        seed: of prompt lengths (4 to 90 tokens), output lengths (10 to 70) and arrivals.
        arriving: steps during which requests arrive, 0 to 4 before each.
    """
    rng = random.Random(seed)
    engine = LLMEngine(
        model="toy",
        num_blocks=2048,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
    )
    schedule, steps = engine.scheduler.schedule, []

    def watched() -> Any:
        plan = schedule()
        steps.append(list(plan.num_scheduled_tokens.values()))
        return plan

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    for _ in range(arriving):
        for _ in range(rng.choice((0, 0, 0, 1, 2, 4))):
            prompt = "x" * rng.randint(4, 90)
            engine.add_request(
                prompt, SamplingParams(max_tokens=rng.randint(10, 70), ignore_eos=True)
            )
        engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    return [counts for counts in steps if counts]


def routed(steps: Sequence[Sequence[int]], answers: Sequence[Any]) -> list[tuple[str, int, int]]:
    """Runtime mode, tokens and padded tokens of each step.

    Args:
        steps: as `serve` gives them.
        answers: "found" of one recorded "dispatch" case of `conformance.parts`.
    """
    found = []
    for counts in steps:
        tokens, uniform = sum(counts), max(counts) == 1
        mode, padded = answers[tokens - 1][2 if uniform else 0]
        found.append((mode, tokens, padded))
    return found


def histogram(steps: Sequence[Sequence[int]]) -> Counter[int]:
    """How many steps had how many tokens."""
    return Counter(sum(counts) for counts in steps)

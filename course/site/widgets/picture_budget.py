"""Pictures of sizes dropped into two prompts: tokens, the encoder's budget, and what runs again.

Promises: every step is a plan of the mini engine's scheduler with its encoder gate; the browser
draws and adds up. Sizes become tokens as Qwen2-VL's processor has it, one for 28 x 28 pixels.
Mirrors `vllm/v1/core/sched/scheduler.py:1096` `Scheduler._try_schedule_encoder_inputs`.
"""

from __future__ import annotations

import functools
from typing import Any

from mini_vllm.config import SchedulerConfig
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.multimodal.gate import EncoderGate
from mini_vllm.multimodal.inputs import BlockKeys, MultiModalFeatureSpec, PlaceholderRange
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.sampling_params import SamplingParams
from mini_vllm.scheduler import Scheduler

SIZES = {"none": 0, "336 x 336": 144, "640 x 480": 391, "1280 x 960": 1564}
"""By size in pixels the tokens of a picture; lab 13-02 holds them against the processor."""
BUDGETS = (512, 2048)
"""Tokens per step; the encoder's budget and its cache are as much, or the largest picture's."""
WORDS = 8
"""In front of, between and behind the pictures of a prompt."""


@functools.cache
def film(first: str, second: str, third: str, budget: int, same: bool) -> dict[str, Any]:
    """Two prompts, both there at the first step: A with two pictures, B with one.

    Args:
        first, second, third: sizes; A's two, then B's.
        budget: tokens of a step.
        same: pictures of one size are one picture.

    Returns:
        `tokens` of each prompt, `size` of the cache, and `steps`: tokens of A and of B, the
        pictures whose encoder runs, those that are cached afterwards, those that were evicted.
        Pictures are letters.
    """
    shown = (("A", first), ("A", second), ("B", third))
    letters: dict[Any, str] = {}
    named = [
        letters.setdefault(size if same else place, "abc"[len(letters)]) if SIZES[size] else ""
        for place, (_, size) in enumerate(shown)
    ]
    cache = max(budget, *(SIZES[size] for _, size in shown))
    gate = EncoderGate(cache, cache)
    scheduler = Scheduler(
        KVCacheManager(1024, 16, False), SchedulerConfig(max_num_batched_tokens=budget), [gate]
    )
    requests = {}
    for name in "AB":
        features, at = [], WORDS
        for (owner, size), letter in zip(shown, named, strict=True):
            if owner == name and letter:
                place = PlaceholderRange(at, SIZES[size])
                features.append(MultiModalFeatureSpec(letter, place))
                at = place.end + WORDS
        request = Request(name, [1] * at, SamplingParams(max_tokens=1))
        request.block_keys = BlockKeys(tuple(features))
        requests[name] = request
        scheduler.add_request(request)
    steps = []
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        encoded, evicted = gate.planned()
        ran = [
            requests[name].block_keys.mm_features[i].identifier  # type: ignore[union-attr]
            for name, which in encoded.items() for i in which
        ]  # fmt: skip
        counts = [plan.num_scheduled_tokens.get(name, 0) for name in "AB"]
        steps.append([*counts, "".join(ran), "".join(gate.cache.cached), "".join(evicted)])
        _update(scheduler, plan)
        gate.computed(plan)
    tokens = [requests[name].num_prompt_tokens for name in "AB"]
    return {"tokens": tokens, "size": cache, "steps": steps, "names": named}


def _update(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """Every request that has computed its prompt says 7."""
    counts = plan.num_scheduled_tokens
    says = {
        request.request_id: [7] for request in plan.scheduled_requests
        if scheduler.needs_sample(request, counts[request.request_id])
    }  # fmt: skip
    scheduler.update_from_output(plan, says)


def _runs(made: dict[str, Any]) -> int:
    return sum(len(step[2]) for step in made["steps"])


QUESTIONS: tuple[tuple[str, tuple[str, str, str], int, bool, str, str], ...] = (
    ("A has a picture of 1280 x 960 and one of 640 x 480, and 8 words in front of, between and "
     "behind them. How many tokens has it?",
     ("1280 x 960", "640 x 480", "none"), 2048, True, "tokens",
     "1,564 + 391 + 3 x 8: one token for 28 x 28 pixels, each side rounded."),
    ("A has that one picture of 1280 x 960 twice. B brings one of 640 x 480. 512 tokens a step. "
     "How often does an encoder run, in all?",
     ("1280 x 960", "1280 x 960", "640 x 480"), 512, True, "runs",
     "Once for A, whose second place finds the rows, and once for B. Lab 13-06 has the case in "
     "which A's picture is lost between its two places."),
    ("Two different pictures of 1280 x 960 in A, none in B, 2,048 tokens a step. How many steps to "
     "both first tokens?",
     ("1280 x 960", "1280 x 960", "none"), 2048, False, "steps",
     "Both do not fit the encoder's budget of 2,048: the chunk ends in front of the second."),
    ("A and B bring the same 1280 x 960, 2,048 tokens a step. How often does its encoder run?",
     ("1280 x 960", "none", "1280 x 960"), 2048, True, "runs",
     "Once: B finds its rows in the cache, by the hash of its pixels."),
)  # fmt: skip
"""What is asked, of which pictures, under which budget, whether equal sizes are one picture, what
is counted, and why."""


def document() -> dict[str, Any]:
    """The widget's document; a film's key is its five choices."""
    names = list(SIZES)
    films = {
        f"{first}|{second}|{third}|{budget}|{int(same)}": film(first, second, third, budget, same)
        for first in names[1:] for second in names for third in names
        for budget in BUDGETS for same in (True, False)
    }  # fmt: skip
    counts = {
        "tokens": lambda made: made["tokens"][0], "runs": _runs,
        "steps": lambda made: len(made["steps"]),
    }  # fmt: skip
    questions = [
        {"ask": ask, "sizes": list(sizes), "budget": budget, "same": same, "because": because,
         "answer": counts[what](film(*sizes, budget, same))}
        for ask, sizes, budget, same, what, because in QUESTIONS
    ]  # fmt: skip
    return {"sizes": SIZES, "budgets": list(BUDGETS), "films": films, "questions": questions}

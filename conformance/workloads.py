"""Random workloads: a configuration, arrivals and aborts by step, and a script of sampled tokens.

A seed alone decides a workload, profile included, so a difference is reproduced from one number.
Each profile leans on one part of the scheduler; `mixed` leans on all of them. Nothing here knows
an engine: `record.py` drives the real one with these, `replay.py` the mini one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

EOS = 2
PROFILES = (
    "basic",  # budgets, slots, thresholds; caching off, memory for everybody
    "pressure",  # caching off, a pool barely larger than the longest request
    "prefix",  # caching on: shared, identical and continued prompts, tight to roomy pools
    "priority",  # the priority policy, urgent latecomers, tied keys, tight pools
    "withdrawal",  # ever more urgent long prompts: victims are already in the step's plan
    "whole-prompts",  # chunked prefill off
    "limits",  # EOS, cap and a tight max_model_len, alone and tied
    "aborts",  # requests ended from outside, wherever they are
    "mixed",
)

Workload = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Knobs:
    """How often a workload of one profile does what."""

    caching: float = 0.5
    priority: float = 0.0
    chunked: float = 1.0
    tight_pool: float = 0.4
    pool: tuple[float, float] = (0.25, 1.3)  # else: of what all requests need at their ends
    tight_budget: float = 0.2
    tight_length: float = 0.1
    sharing: float = 0.5
    staggered: float = 0.5
    aborts: float = 0.1
    early_eos: float = 0.3
    oversize: float = 0.0
    escalating: bool = False  # long prompts, each more urgent than those before


_KNOBS = {
    "basic": _Knobs(caching=0.0, tight_pool=0.0, tight_length=0.0, sharing=0.0, aborts=0.0),
    "pressure": _Knobs(caching=0.0, tight_pool=1.0, tight_length=0.0, sharing=0.0, aborts=0.0),
    "prefix": _Knobs(caching=1.0, tight_pool=0.5, sharing=0.9, aborts=0.0),
    "priority": _Knobs(
        priority=1.0, tight_pool=0.4, tight_budget=0.4, staggered=0.8, oversize=0.03
    ),
    "withdrawal": _Knobs(
        caching=0.6,
        priority=1.0,
        tight_pool=0.0,
        pool=(0.35, 0.6),
        tight_budget=1.0,
        staggered=0.8,
        aborts=0.0,
        early_eos=0.0,
        escalating=True,
    ),
    "whole-prompts": _Knobs(chunked=0.0, tight_pool=0.3, aborts=0.0),
    "limits": _Knobs(tight_length=0.9, early_eos=0.6, aborts=0.0),
    "aborts": _Knobs(aborts=0.9, tight_pool=0.6, sharing=0.7, priority=0.2, oversize=0.15),
    "mixed": _Knobs(
        priority=0.4, tight_budget=0.4, chunked=0.85, tight_length=0.3, aborts=0.3, oversize=0.03
    ),
}


def profile_of(seed: int) -> str:
    """The profile a seed belongs to: seeds count through the profiles."""
    return PROFILES[seed % len(PROFILES)]


def generate(seed: int) -> Workload:
    """The workload of a seed.

    Returns:
        `{"seed", "eos_token_id", "config", "events", "outputs"}` as in the recordings format;
        `outputs` holds `max_tokens` scripted ids per request, of which a run may use fewer.
    """
    knobs = _KNOBS[profile_of(seed)]
    rng = random.Random(seed)
    block_size = rng.choice((4, 4, 8, 16))
    num_requests = rng.choice((2, 3, 4, 5, 6, 7, 8, 10, 12))
    adds, outputs = _requests(rng, knobs, block_size, num_requests)

    longest = max(len(add["prompt_token_ids"]) + add["max_tokens"] for add in adds)
    max_prompt = max(len(add["prompt_token_ids"]) for add in adds)
    tight = rng.random() < knobs.tight_length
    max_model_len = rng.randint(max_prompt + 1, max(max_prompt + 1, longest)) if tight else 256
    if tight:
        _tie_eos_with_length(rng, adds, outputs, max_model_len)

    num_seqs = rng.choice((1, 2, 3, 4, 6, 8, 16))
    threshold = rng.choice((0, 0, 0, 1, 3, 5, 8, 13, 24))
    if rng.random() >= knobs.chunked:  # SchedulerConfig then asks for at least max_model_len
        max_model_len = min(max_model_len, longest + rng.randint(0, 8))
        chunked, budget = False, max(num_seqs, max_model_len) + rng.choice((0, 0, 5, 20, 100))
    elif rng.random() < knobs.tight_budget:  # several chunked prompts compete for few tokens
        num_seqs, threshold = rng.choice((3, 4, 5, 6)), rng.choice((0, 2, 3, 5))
        chunked, budget = True, num_seqs + rng.choice((0, 1, 2, 4))
    else:
        chunked, budget = True, num_seqs + rng.choice((0, 1, 3, 7, 15, 31, 63, 2048))

    def blocks(add: dict[str, Any]) -> int:
        tokens = min(len(add["prompt_token_ids"]) + add["max_tokens"], max_model_len + 1) - 1
        return -(-tokens // block_size)

    needed = [blocks(add) for add in adds]
    if rng.random() < knobs.tight_pool:
        usable = max(needed) + rng.choice((0, 0, 1, 1, 2, 3, 5))
    else:
        usable = max(max(needed), int(sum(needed) * rng.uniform(*knobs.pool)))
    events = _arrivals(rng, knobs, adds)
    if rng.random() < knobs.oversize and max(needed) > 1:
        usable = max(needed) - 1  # somebody can never run to the end: aborted, so the run ends
        victims = [add["request_id"] for add, n in zip(adds, needed, strict=True) if n > usable]
        last = max(events)
        events.setdefault(last + rng.randint(30, 50), _event())["abort"].extend(victims)
    if rng.random() < knobs.aborts:
        _aborts(rng, adds, events)
    return {
        "seed": seed,
        "eos_token_id": EOS,
        "config": {
            "num_blocks": usable + 1,
            "block_size": block_size,
            "max_num_seqs": num_seqs,
            "max_num_batched_tokens": budget,
            "long_prefill_token_threshold": threshold,
            "enable_prefix_caching": rng.random() < knobs.caching,
            "enable_chunked_prefill": chunked,
            "max_model_len": max_model_len,
            "policy": "priority" if rng.random() < knobs.priority else "fcfs",
        },
        "events": [{"step": step, **events[step]} for step in sorted(events)],
        "outputs": outputs,
    }


def _requests(
    rng: random.Random, knobs: _Knobs, block_size: int, num_requests: int
) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
    """The requests in order of arrival, and the tokens the model will say to each."""
    vocabulary = range(3, 3 + rng.choice((1, 2, 5, 40)))  # small ones make prefixes meet by chance
    longest_prompt = block_size * rng.choice((1, 2, 3, 5))
    longest_output = rng.choice((2, 6, 12, 24))
    prompts: list[list[int]] = []
    adds: list[dict[str, Any]] = []
    outputs: dict[str, list[int]] = {}
    for index in range(num_requests):
        prompt = rng.choices(vocabulary, k=rng.randint(1, longest_prompt))
        if prompts and rng.random() < knobs.sharing:
            old = rng.randrange(len(prompts))
            kind = rng.randrange(4)
            if kind == 0:  # the very same prompt
                prompt = list(prompts[old])
            elif kind == 1:  # the next turn of a conversation: prompt, answer and more
                prompt = prompts[old] + outputs[f"r{old}"] + prompt[:block_size]
            else:  # a shared prefix, cut anywhere
                prompt = prompts[old][: rng.randint(1, len(prompts[old]))] + prompt
        if knobs.escalating:
            prompt = (prompt * 5 * block_size)[: rng.randint(2, 5) * block_size]
        prompt = prompt[: 6 * block_size]
        prompts.append(prompt)
        request_id, max_tokens = f"r{index}", rng.randint(1, longest_output)
        script = rng.choices(vocabulary, k=max_tokens)
        if rng.random() < knobs.early_eos:
            last = max_tokens - 1
            script[rng.choice((last, rng.randint(0, last)))] = EOS  # tied with the cap, or early
        outputs[request_id] = script
        adds.append(
            {
                "request_id": request_id,
                "prompt_token_ids": prompt,
                "max_tokens": max_tokens,
                "priority": -index if knobs.escalating else rng.choice((-1, 0, 0, 0, 1, 2, 5)),
                "arrival_time": 0.0,
                "ignore_eos": rng.random() < 0.15,
            }
        )
    return adds, outputs


def _tie_eos_with_length(
    rng: random.Random,
    adds: list[dict[str, Any]],
    outputs: dict[str, list[int]],
    max_model_len: int,
) -> None:
    """Let some answers say EOS with exactly the token that fills the model's length."""
    for add in adds:
        position = max_model_len - len(add["prompt_token_ids"]) - 1
        script = outputs[add["request_id"]]
        if position < len(script) and rng.random() < 0.3:
            script[position] = EOS


def _event() -> dict[str, list[Any]]:
    return {"add": [], "abort": []}


def _arrivals(
    rng: random.Random, knobs: _Knobs, adds: list[dict[str, Any]]
) -> dict[int, dict[str, list[Any]]]:
    """Events by step: all at once, or a few steps apart, sometimes after the engine went idle."""
    events: dict[int, dict[str, list[Any]]] = {0: _event()}
    step, staggered = 0, rng.random() < knobs.staggered
    for add in adds:
        if staggered:
            step += rng.choice((0, 0, 1, 1, 2, 4, 9))
        # Clocks of different frontends need not agree with the order of arrival, and may tie.
        add["arrival_time"] = float(rng.choice((step, step, step + 1, max(0, step - 2))))
        events.setdefault(step, _event())["add"].append(add)
    return events


def _aborts(
    rng: random.Random, adds: list[dict[str, Any]], events: dict[int, dict[str, list[Any]]]
) -> None:
    """Abort some requests: before they arrive, as they arrive, while they live, and afterwards."""
    last = max(events)
    arrival = {add["request_id"]: step for step in events for add in events[step]["add"]}
    for request_id in rng.sample(sorted(arrival), rng.randint(1, max(1, len(adds) // 2))):
        after = rng.choice((-2, 0, 0, 1, 2, 3, 5, 8, 12, 20))
        step = min(max(0, arrival[request_id] + after), last + 20)
        events.setdefault(step, _event())["abort"].append(request_id)
    if rng.random() < 0.2:
        events[rng.choice(sorted(events))]["abort"].append("nobody")

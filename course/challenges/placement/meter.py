"""Bytes sent under a placement of experts. vLLM's:
`vllm/model_executor/layers/fused_moe/expert_map_manager.py:22` `determine_expert_map`, "linear".
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from course.challenges.judge import Player, Wrong, wholes

TITLE = "Experts on ranks so that tokens travel little"
UNIT = "bytes"
FEWER = True
MARKS = (("vLLM's", 1, 1), ("bronze", 9, 10), ("silver", 2, 5))

RANKS, EXPERTS, TOKENS, BYTES = 4, 32, 1500, 4096


def workload(seed: str) -> dict[str, list[Any]]:
    """`{"tokens", "later"}`, `[rank, experts]` each: topics have experts, and ranks have topics."""
    rng = random.Random(seed)
    order = rng.sample(range(EXPERTS), EXPERTS)
    topics = [order[at : at + 4] for at in range(0, EXPERTS, 4)]

    def token() -> list[Any]:
        rank = rng.randrange(RANKS)
        topic = (2 * rank + rng.randrange(2)) if rng.randrange(10) < 6 else rng.randrange(8)
        chosen = rng.sample(topics[topic], 2)
        if rng.randrange(4) == 0:
            chosen[1] = rng.choice([e for e in range(EXPERTS) if e != chosen[0]])
        return [rank, chosen]

    return {
        "tokens": [token() for _ in range(TOKENS)],
        "later": [token() for _ in range(TOKENS)],
    }


def play(answer: Callable[..., Player], load: dict[str, list[Any]]) -> int:
    """Bytes that the later tokens send."""
    player = answer({"ranks": RANKS, "experts": EXPERTS, "tokens": load["tokens"]})
    place = wholes("place()", player.call("place"), 0, RANKS - 1, EXPERTS)
    if sorted(place) != sorted(_linear()):
        raise Wrong(f"place() must give each of {RANKS} ranks {EXPERTS // RANKS} experts")
    return _sent(load, place)


def _sent(load: dict[str, list[Any]], place: list[int]) -> int:
    later = load["later"]
    return BYTES * sum(len({place[e] for e in experts} - {rank}) for rank, experts in later)


def _linear() -> list[int]:
    return [expert * RANKS // EXPERTS for expert in range(EXPERTS)]


def vllm(load: dict[str, list[Any]]) -> int:
    """Bytes under vLLM's linear placement."""
    return _sent(load, _linear())


def real() -> Callable[[dict[str, list[Any]]], int]:
    """The same by the pinned tree's own maps."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    place = [-1] * EXPERTS
    for rank in range(RANKS):
        _, held, _ = determine_expert_map(RANKS, rank, EXPERTS, "linear")
        for expert, local in enumerate(held.tolist()):
            if local >= 0:
                place[expert] = rank
    return lambda load: _sent(load, place)

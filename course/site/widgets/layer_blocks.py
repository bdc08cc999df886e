"""A request that grows through groups of layers, and which of its blocks live: for the widget.

Promises: every table is the engine's own manager's; the browser draws and computes nothing.
Mirrors `vllm/v1/core/single_type_kv_cache_manager.py:654`
`SlidingWindowManager.get_num_skipped_tokens`.
"""

from __future__ import annotations

import functools
from typing import Any

from mini_vllm import Request, SamplingParams
from mini_vllm.kv.coordinator import HybridKVCacheManager
from mini_vllm.kv_cache_interface import KVCacheSpec, MambaSpec

BLOCK_SIZE, NUM_BLOCKS, NUM_TOKENS = 16, 64, 208

LAYERS = {
    "64, 64, all": "64 64 all",
    "20, 20, all": "20 20 all",
    "128, all": "128 all",
    "state, state, all": "state state all",
    "all, all, all": "all all all",
}
"""What each group sees: a window, everything, or a state."""

BUDGETS = (16, 48, 64, 208)
"""Tokens per step."""


@functools.cache
def film(groups: str, budget: int) -> list[dict[str, Any]]:
    """Per step: `tokens` that are there after it, a table per group, blocks held, blocks free.

    In a table 0 is the null block.
    """
    specs = [_spec(number, kind) for number, kind in enumerate(groups.split())]
    kv = HybridKVCacheManager(NUM_BLOCKS, BLOCK_SIZE, kv_specs=specs)
    request = Request("a", [1] * NUM_TOKENS, SamplingParams())
    steps: list[dict[str, Any]] = []
    while request.num_computed_tokens < NUM_TOKENS:
        kv.new_step_starts()
        num_new = min(budget, NUM_TOKENS - request.num_computed_tokens)
        assert kv.allocate_slots(request, num_new) is not None
        request.num_computed_tokens += num_new
        tables = [kv.get_block_ids("a", group) for group in range(len(specs))]
        steps.append(
            {
                "tokens": request.num_computed_tokens, "tables": tables,
                "held": sum(block != 0 for table in tables for block in table),
                "free": kv.block_pool.get_num_free_blocks(),
            }
        )  # fmt: skip
    return steps


def _spec(number: int, kind: str) -> KVCacheSpec:
    if kind == "state":
        return MambaSpec((number,), state_shapes=((1,),), page_size_padded=64)
    return KVCacheSpec((number,), 1, 2, None if kind == "all" else int(kind))


QUESTIONS: tuple[tuple[str, str, int, int, str], ...] = (
    ("A window of 64 in two groups, none in the third; chunks of 64; blocks of 16. How many blocks "
     "does the request hold after its third chunk, 192 tokens?",
     "64, 64, all", 64, 2,
     "8 in each window group: when the third chunk was planned, 65 of 128 tokens had been passed."),
    ("The same with a window of 20: how many?",
     "20, 20, all", 64, 2,
     "6 and 6 and 12: of 128 tokens 109 had been passed, six whole blocks of eight."),
    ("All 208 tokens in one step, a window of 64. How many blocks at once?",
     "64, 64, all", 208, 0,
     "Nothing has been passed before the step, so a window group holds the whole step."),
    ("States, one step for each 16 tokens. How many blocks at 208 tokens?",
     "state, state, all", 16, 12,
     "Each group of states holds what the last step read and what this one writes; attention 13."),
)  # fmt: skip
"""What is asked, of which groups with which budget, after which step, and why."""


def document() -> dict[str, Any]:
    """The widget's document."""
    films = {
        name: {str(budget): film(groups, budget) for budget in BUDGETS}
        for name, groups in LAYERS.items()
    }
    questions = [
        {"ask": ask, "layers": name, "budget": budget, "step": step, "because": because,
         "answer": film(LAYERS[name], budget)[step]["held"]}
        for ask, name, budget, step, because in QUESTIONS
    ]  # fmt: skip
    kinds = {name: groups.split() for name, groups in LAYERS.items()}
    return {
        "layers": kinds, "budgets": list(BUDGETS), "films": films, "questions": questions,
        "block_size": BLOCK_SIZE,
    }  # fmt: skip

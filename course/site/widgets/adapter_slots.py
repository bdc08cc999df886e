"""Adapters that arrive one after the other, and who waits for a slot: what the widget shows.

Promises: every step is one of the engine's own scheduler with the engine's own gate, and every load
is one of the engine's own slots; the browser draws and computes nothing.
Mirrors `vllm/v1/core/sched/scheduler.py:573` `Scheduler.schedule`.
"""

from __future__ import annotations

import functools
from typing import Any

from mini_vllm import KVCacheManager, Request, SamplingParams, Scheduler, SchedulerConfig
from mini_vllm.lora.gate import AdapterGate
from mini_vllm.lora.request import LoRARequest
from mini_vllm.lora.slots import AdapterSlotCache

PATTERNS = {
    "one of each, again and again": "ABCDABCDABCD",
    "in bunches": "AAABBBCCCDDD",
    "one popular, others rare": "AABACAADAEAA",
    "every second without an adapter": "A-B-C-A-B-C-",
}
"""The adapter of each request, one arriving per step; "-" is the base model."""

SLOTS = (1, 2, 3, 4)
MAX_NUM_SEQS = 6
NUM_TOKENS = 5
"""Output tokens of every request; its prompt is one token, so it runs for this many steps."""


@functools.cache
def trace(pattern: str, max_loras: int) -> dict[str, Any]:
    """Per step who runs, who waits and who is set aside, and which adapters are loaded.

    Returns:
        `steps`: each a text with one letter per request ("." not there yet or gone, "r" runs, "w"
        waits for a place, "s" set aside: its adapter has no slot) and the adapters loaded into
        slots; `last`: steps until all have ended; `waited`: steps spent in "w" or "s", all
        requests together; `loads`.
    """
    config = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS)
    scheduler = Scheduler(KVCacheManager(64, 4), config, [AdapterGate(max_loras)])
    slots = AdapterSlotCache(max_loras)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    steps: list[dict[str, Any]] = []
    names = [f"r{number}" for number in range(len(pattern))]
    while len(steps) < len(pattern) or scheduler.has_unfinished_requests():
        if (number := len(steps)) < len(pattern):
            letter = pattern[number]
            keys = (_adapter(letter),) if letter != "-" else ()
            scheduler.add_request(
                Request(names[number], [number + 1], params, arrival_time=number, extra_keys=keys)
            )
        plan = scheduler.schedule()
        planned = [pattern[names.index(r)] for r in plan.num_scheduled_tokens]
        wanted = [letter for letter in dict.fromkeys(planned) if letter != "-"]
        order = sorted(wanted, key=lambda letter: ord(letter) not in slots.resident())
        loads = [letter for letter in order if "load" in slots.ensure(ord(letter))]
        state = {r.request_id: "w" for r in scheduler.waiting}
        state |= {r.request_id: "s" for r in scheduler.skipped}
        state |= dict.fromkeys(plan.num_scheduled_tokens, "r")
        steps.append({"states": "".join(state.get(n, ".") for n in names), "loads": loads})
        scheduler.update_from_output(plan, {r: [0] for r in plan.num_scheduled_tokens})
    waited = sum(step["states"].count("w") + step["states"].count("s") for step in steps)
    loads_in_all = sum(len(step["loads"]) for step in steps)
    return {"steps": steps, "last": len(steps), "waited": waited, "loads": loads_in_all}


def _adapter(letter: str) -> LoRARequest:
    return LoRARequest(letter, ord(letter), f"adapters/{letter}")


QUESTIONS: tuple[tuple[str, str, int, str, str], ...] = (
    ("Four adapters in turn, one slot. After how many steps have all twelve ended?",
     "one of each, again and again", 1, "last",
     "The A's share the slot up to step 12; then the B's, C's and D's have five steps each."),
    ("The same twelve with two slots. After how many?",
     "one of each, again and again", 2, "last",
     "A and B hold the slots up to steps 12 and 13; then C and D have five steps each."),
    ("The same adapters in bunches, one slot. How many loads?", "in bunches", 1, "loads",
     "One for each adapter: its three share the slot."),
    ("One popular adapter and four rare ones, one slot. How many loads?",
     "one popular, others rare", 1, "loads",
     "A is loaded once, since one of its requests always runs; then each rare one."),
    ("Every second request is the base model's; one slot. After how many steps has all ended?",
     "every second without an adapter", 1, "last",
     "A, then both B's, both C's, and the second A last."),
)  # fmt: skip
"""What is asked, of which pattern with how many slots, and the field that answers."""


def document() -> dict[str, Any]:
    """The widget's document."""
    films = {
        name: {str(slots): trace(pattern, slots) for slots in SLOTS}
        for name, pattern in PATTERNS.items()
    }
    questions = [
        {"ask": ask, "pattern": name, "slots": slots, "answer": films[name][str(slots)][field]}
        | {"because": because}
        for ask, name, slots, field, because in QUESTIONS
    ]
    return {
        "patterns": PATTERNS, "slots": list(SLOTS), "films": films, "questions": questions,
        "max_num_seqs": MAX_NUM_SEQS, "num_tokens": NUM_TOKENS,
    }  # fmt: skip

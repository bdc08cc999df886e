"""Lab 03-07: the priority hazard. See a request read memory that nobody wrote, and prevent it.

`stale_reads` is shadow KV: it follows a recording and checks every read. `my_numbers` are those of
a workload of yours that shows the hazard; `FixedScheduler` has none. The decisions in question are
`vllm/v1/core/sched/scheduler.py:329` `Scheduler.schedule`, lines 456 to 479.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mini_vllm
from mini_vllm import Request, SchedulerOutput

# --- given ---------------------------------------------------------------------------------------


class Stale(NamedTuple):
    """Given. A position that a request reads although its slot does not hold that prefix."""

    step: int
    request_id: str
    position: int
    block_id: int


def fingerprints(token_ids: list[int]) -> list[int]:
    """Given. One value per position, which stands for all tokens up to there."""
    values, value = [], 0
    for token in token_ids:
        value = hash((value, token))
        values.append(value)
    return values


class Numbers(NamedTuple):
    """Given. What varies in a workload of one patient and one urgent request, blocks of 4."""

    num_blocks: int
    threshold: int
    low_prompt: int
    high_prompt: int
    high_outputs: int


def workload(numbers: Numbers) -> dict[str, Any]:
    """Given. `low` (priority 5, 2 outputs) arrives in step 0, `high` (priority 0) in step 1.

    For `conformance.replay.run`. Budget 16, two slots, prefix caching on; every token of a prompt
    is different.
    """

    def add(name: str, first: int, prompt: int, outputs: int, priority: int) -> dict[str, Any]:
        return {
            "request_id": name,
            "prompt_token_ids": list(range(first, first + prompt)),
            "max_tokens": outputs,
            "priority": priority,
            "arrival_time": 5.0 - priority,
            "ignore_eos": True,
        }

    low = add("low", 100, numbers.low_prompt, 2, 5)
    high = add("high", 500, numbers.high_prompt, numbers.high_outputs, 0)
    return {
        "seed": -1,
        "eos_token_id": 2,
        "config": {
            "num_blocks": numbers.num_blocks,
            "block_size": 4,
            "max_num_seqs": 2,
            "max_num_batched_tokens": 16,
            "long_prefill_token_threshold": numbers.threshold,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "max_model_len": 256,
            "policy": "priority",
        },
        "events": [{"step": 0, "add": [low]}, {"step": 1, "add": [high]}],
        "outputs": {"low": [7, 7], "high": [8] * numbers.high_outputs},
    }


# --- yours ---------------------------------------------------------------------------------------


def stale_reads(entry: dict[str, Any]) -> list[Stale]:
    """Every stale read of a recorded workload: step by step, and for each request by position.

    A step writes the positions it schedules and reads all earlier ones of the same request;
    position `p` lives in slot `p % block_size` of block `block_ids[request_id][p // block_size]`. A
    read is sound if its slot holds the fingerprint of that position, written in this step or
    before: all requests of a step write before any of them reads. A slot never written is sound for
    nobody.

    `num_computed_tokens` of a recording *includes* the step's tokens. A request that has caught up
    with its tokens has one more, the next of `outputs[request_id]`, from the next step on. `entry`
    is left as it was.

    Args:
        entry: a recording, as `conformance.recording.read` and `conformance.replay.run` give it:
            "config", "events" (arrivals under "add"), "outputs" and "steps".
    """
    size = entry["config"]["block_size"]
    tokens = {
        add["request_id"]: list(add["prompt_token_ids"])
        for event in entry["events"]
        for add in event.get("add", ())
    }
    script = {request_id: list(outputs) for request_id, outputs in entry["outputs"].items()}
    shadow: dict[tuple[int, int], int] = {}
    found: list[Stale] = []
    for number, step in enumerate(entry["steps"]):
        scheduled = step["num_scheduled_tokens"]
        marks = {request_id: fingerprints(tokens[request_id]) for request_id in scheduled}
        for request_id, count in scheduled.items():
            table, end = step["block_ids"][request_id], step["num_computed_tokens"][request_id]
            for position in range(end - count, end):
                shadow[table[position // size], position % size] = marks[request_id][position]
        for request_id, count in scheduled.items():
            table, end = step["block_ids"][request_id], step["num_computed_tokens"][request_id]
            for position in range(end - count):
                slot = table[position // size], position % size
                if shadow.get(slot) != marks[request_id][position]:
                    found.append(Stale(number, request_id, position, slot[0]))
            if end == len(tokens[request_id]) and script[request_id]:
                tokens[request_id].append(script[request_id].pop(0))
    return found


def my_numbers() -> Numbers:
    """Numbers for which `workload` shows the hazard; another pool and another `low_prompt`.

    The recorded workload has 8 blocks, a threshold of 8, prompts of 24 and 4 tokens, 2 outputs.
    Both requests must fit the pool alone: see lab 03-04.
    """
    return Numbers(num_blocks=11, threshold=8, low_prompt=36, high_prompt=7, high_outputs=4)


class FixedScheduler(mini_vllm.Scheduler):
    """The engine's scheduler without the hazard. Everything else stays as it is."""

    def _withdraw(self, victim: Request, output: SchedulerOutput) -> int:
        """Unschedule a victim that this step had planned; returns the refunded budget.

        Called by the running phase before the victim's blocks are freed and before its counter is
        set to 0. The engine's own (`super()`) takes the victim out of the plan.

        What the step would have computed will not be computed: nobody may find it in the index
        afterwards, and everybody may still find what is computed. See `self.kv.get_blocks` (the
        table) and `self.kv.block_pool.evict` (un-indexes a block, if it is indexed).
        """
        num_sound = victim.num_computed_tokens // self.kv.block_size
        for block in self.kv.get_blocks(victim.request_id)[num_sound:]:
            self.kv.block_pool.evict(block)
        return super()._withdraw(victim, output)

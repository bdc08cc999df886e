"""Requests of lab 14-05, and how they are served: given, and not part of the lesson.

A trace has Mooncake's form: `input_length` in tokens and `hash_ids`, one for each block of the
prompt, equal where prefixes are. Prompts are served one after another by the engine's own scheduler
and manager over one group of full attention and three of states, which share a pool; a request
computes its prompt, samples one token and ends. Nothing runs a model: hits are counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mini_vllm import Request, SamplingParams
from mini_vllm.config import SchedulerConfig
from mini_vllm.kv.coordinator import HybridKVCacheManager, StateGate
from mini_vllm.kv_cache_interface import KVCacheSpec, MambaSpec
from mini_vllm.scheduler import Scheduler

BLOCK_SIZE, NUM_STATES, BUDGET = 16, 3, 1024
"""Tokens per block; groups of states; tokens per step."""
NUM_BLOCKS = {"chat": 300, "documents": 300, "mixed": 420}
"""Blocks of the pool for each kind of trace."""
UNBOUNDED = 12_000

Line = dict[str, Any]
Choose = Callable[[Any, int, int], int]
"""`choose(request, start, num_new)`: tokens of this step, at most `num_new`."""


class Served(NamedTuple):
    """What became of a trace."""

    hits: list[int]
    """Tokens that each prompt found."""
    steps: int
    """Plans with tokens in them."""
    wrong: list[tuple[int, int, int]]
    """Hits of a state that is not what its block says: the prompt, the tokens found, and those that
    the state has read."""


def _line(blocks: Sequence[int], tail: int) -> Line:
    """A prompt of whole blocks and `tail` tokens of one more."""
    return {
        "timestamp": 0, "input_length": len(blocks) * BLOCK_SIZE - (BLOCK_SIZE - tail),
        "output_length": 1, "hash_ids": list(blocks),
    }  # fmt: skip


def trace(kind: str, seed: int) -> list[Line]:
    """60 to 100 prompts: "chat", "documents", or "mixed" with prompts that never come again."""
    rng = random.Random(f"{kind} {seed}")
    names = iter(range(1, 1_000_000))

    def new(least: int, most: int) -> list[int]:
        return [next(names) for _ in range(rng.randint(least, most))]

    queues: list[list[list[int]]] = []
    if kind in ("chat", "mixed"):
        systems = [new(5, 8) for _ in range(2)]
        for _ in range(12 if kind == "chat" else 6):
            said, turns = list(rng.choice(systems)), []
            for _ in range(rng.randint(4, 8)):
                said = said + new(2, 6)
                turns.append(said + new(1, 1))  # the last block is begun, and goes on otherwise
            queues.append(turns)
    if kind in ("documents", "mixed"):
        tools = new(4, 4)
        for _ in range(7 if kind == "documents" else 3):
            text = tools + new(14, 26)
            queues.append([text + new(2, 5) for _ in range(rng.randint(8, 12))])
    if kind == "mixed":
        queues += [[new(12, 28)] for _ in range(16)]
    lines = []
    while queues:
        queue = rng.choice(queues)
        lines.append(_line(queue.pop(0), rng.randint(1, BLOCK_SIZE - 1)))
        queues = [each for each in queues if each]
    return lines


def tokens_of(line: Line) -> list[int]:
    """Token ids that are equal where the blocks are."""
    ids = [block * BLOCK_SIZE + i for block in line["hash_ids"] for i in range(BLOCK_SIZE)]
    return ids[: line["input_length"]]


def serve(
    lines: Sequence[Line],
    num_blocks: int,
    choose: Choose | None = None,
    mode: str = "align",
    budget: int = BUDGET,
) -> Served:
    """Serve a trace, prompt after prompt.

    Args:
        choose: ends the steps of a prompt; None: the engine's own rule of the mode.
        mode: of the states: "align", "all" or "none", the last without prefix caching.
        budget: tokens of a step.

    As the kernels of mode "align" do it, a step writes one state: that of its last token.
    """
    size = BLOCK_SIZE if mode != "none" else 1 << 16
    states = [
        MambaSpec((i,), block_size=size, state_shapes=((1,),), mamba_cache_mode=mode)
        for i in range(NUM_STATES)
    ]
    specs = [*states, KVCacheSpec((NUM_STATES,), 1, 1, None, BLOCK_SIZE)]
    kv = HybridKVCacheManager(num_blocks, BLOCK_SIZE, mode != "none", kv_specs=specs)
    if choose is not None:
        kv.ends_at_blocks = choose  # type: ignore[method-assign]
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=budget)
    scheduler = Scheduler(kv, config, [StateGate(kv)])
    hits, steps, wrong = [], 0, []
    written: dict[int, int] = {}
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    for number, line in enumerate(lines):
        request = Request(str(number), tokens_of(line), params)
        scheduler.add_request(request)
        idle = 0
        while not request.is_finished:
            plan = scheduler.schedule()
            hits += [int(plan.num_cached_tokens[name]) for name in plan.scheduled_new_req_ids]
            planned = plan.total_num_scheduled_tokens
            steps, idle = steps + (planned > 0), 0 if planned else idle + 1
            if idle > 2:
                raise RuntimeError(
                    f"prompt {number} of {request.num_tokens} tokens stands still at "
                    f"{request.num_computed_tokens}: a step of 0 tokens was chosen"
                )
            table, found = kv.get_block_ids(request.request_id), request.num_computed_tokens
            if mode == "align" and plan.scheduled_new_req_ids and found:
                state = table[found // size - 1]
                if written[state] != found:
                    wrong.append((number, found, written[state]))
            if planned:
                written[table[-1]] = found + planned
            ends = found + planned >= request.num_tokens
            scheduler.update_from_output(plan, {request.request_id: [0]} if ends else {})
    return Served(hits, steps, wrong)


def choosing(lab: Any, policy: Any, block_size: int = BLOCK_SIZE) -> Choose:
    """A learner's `cut` over the places that `policy` names when a prompt is first planned."""
    known: dict[str, list[int]] = {}

    def choose(request: Any, start: int, num_new: int) -> int:
        if start >= request.num_prompt_tokens:
            return num_new
        if request.request_id not in known:
            known[request.request_id] = list(policy.places(list(request.all_token_ids), start))
        places = known[request.request_id]
        return int(lab.cut(places, start, num_new, request.num_prompt_tokens, block_size))

    return choose

"""Lab 09-02: n answers to one prompt, what they share, and what that saves.

The core of an engine knows no "n": it gets n requests, and the prefix cache does the rest. Holds:

- N1: children share whole blocks of the prompt, and never the block of its last token, because that
  token must be computed to give logits.
- N2: each child has an id, a seed, a row and a generator of its own; nothing else is different.
- N3: a shared block is held until the last child that uses it ends.

Sources: `vllm/v1/engine/parallel_sampling.py:13` `ParentRequest`,
`vllm/v1/core/kv_cache_manager.py:194` `KVCacheManager.get_computed_blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mini_vllm import LLMEngine, SamplingParams, SchedulerOutput
from mini_vllm.block_pool import KVCacheBlock


@dataclass(frozen=True, slots=True)
class Params:
    """What a client asks for (given)."""

    n: int = 1
    temperature: float = 1.0
    seed: int | None = None
    max_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Cost:
    """What n answers of one length cost together (given)."""

    shared_blocks: int
    """Blocks of the prompt that later children find."""
    prefill_tokens: int
    """Prompt tokens that are computed, over all children."""
    hit_rate: float
    """Prompt tokens found, over prompt tokens looked up, in [0, 1)."""
    kv_blocks: int
    """Distinct blocks in use when all children are about to end."""
    forward_tokens: int
    """Tokens that go through the model, prompts and outputs."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What an engine did with n children (given)."""

    plans: list[list[int]]
    """Per step: tokens scheduled of each child, in order of index; 0 for one that is not in it."""
    refs: list[int]
    """After each step: the reference count of the block that child 0 was given first."""
    blocks: list[int]
    """In each step: distinct blocks that the children hold together."""


def parallel_cost(P: int, L: int, n: int, block_size: int = 16, caching: bool = True) -> Cost:
    """What n answers of L tokens each to one prompt of P tokens cost.

    The children run side by side, and each ends with its L-th token, which is never fed back. With
    `caching` every child but the first finds the shared blocks (N1); without, none finds anything.

    A trace: P = 65, L = 24, n = 4, blocks of 16: four shared blocks, 68 prefill tokens, hit rate
    192/260, 12 blocks, 160 forward tokens; without caching 0, 260, 0, 24, 352.

    Raises:
        ValueError: P, L, n or block_size is below 1.
    """
    for name, value in (("P", P), ("L", L), ("n", n), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"{name}={value}: need at least 1")
    shared = (P - 1) // block_size if caching else 0
    found = (n - 1) * shared * block_size
    prefill = n * P - found
    per_child = -(-(P + L - 1) // block_size)
    return Cost(
        shared_blocks=shared,
        prefill_tokens=prefill,
        hit_rate=found / (n * P),
        kv_blocks=shared + n * (per_child - shared),
        forward_tokens=prefill + n * (L - 1),
    )


def fan_out(request_id: str, params: Params) -> list[tuple[str, Params]]:
    """The children of a request, by index: their ids and what each asks for.

    One answer is the request itself, under its own id. Several are children `0_ID`, `1_ID`, ...,
    each with n = 1; child i has the seed `seed + i`, or none where there is none (N2).

    Raises:
        ValueError: n is below 1, or above 1 at temperature 0, where all would say the same.

    Source: `vllm/v1/engine/parallel_sampling.py:57` `ParentRequest._get_child_sampling_params`.
    """
    if params.n < 1:
        raise ValueError(f"n={params.n}: need at least 1")
    if params.n > 1 and params.temperature == 0.0:
        raise ValueError(f"n={params.n}: need 1 with temperature=0.0 (greedy)")
    if params.n == 1:
        return [(request_id, params)]
    return [
        (
            f"{index}_{request_id}",
            replace(params, n=1, seed=None if params.seed is None else params.seed + index),
        )
        for index in range(params.n)
    ]


def run_mini(n: int, prompt_len: int, max_tokens: Sequence[int], caching: bool = True) -> Trace:
    """n children of one prompt through `mini_vllm`, step by step.

    Any prompt of `prompt_len` tokens will do, the same for all; child i says `max_tokens[i]`
    tokens, whatever it samples. The engine is `LLMEngine("toy")` with blocks of 16 and otherwise
    its defaults; all children are queued before the first step.

    A trace: n = 4, 65 prompt tokens, lengths 2, 4, 8, 16: the first plan is [65, 1, 1, 1], the
    second [1, 1, 1, 1], the third [0, 1, 1, 1]; the first block is held 4 times after step 1, 3
    after step 2, 2 after step 4, once after step 8, not at all after step 16.

    Raises:
        ValueError: `max_tokens` has not one length per child.
    """
    if len(max_tokens) != n:
        raise ValueError(f"max_tokens={list(max_tokens)}: need {n}, one per child")
    engine = LLMEngine("toy", block_size=16, enable_prefix_caching=caching)
    names = [f"{index}_mini" for index in range(n)]
    for index, (name, length) in enumerate(zip(names, max_tokens, strict=True)):
        wish = SamplingParams(temperature=1.0, seed=index, max_tokens=length, ignore_eos=True)
        engine.add_request([65] * prompt_len, wish, request_id=name)
    trace = Trace([], [], [])
    kv = engine.scheduler.kv
    prompt_block: list[KVCacheBlock] = []

    def note(plan: SchedulerOutput) -> None:
        trace.plans.append([plan.num_scheduled_tokens.get(name, 0) for name in names])
        tables = [kv.get_blocks(name) for name in names]
        trace.blocks.append(len({block.block_id for table in tables for block in table}))
        if not prompt_block:
            prompt_block.append(tables[0][0])

    engine.observers.append(note)
    while engine.has_unfinished_requests():
        engine.step()
        trace.refs.append(prompt_block[0].ref_cnt)
    return trace

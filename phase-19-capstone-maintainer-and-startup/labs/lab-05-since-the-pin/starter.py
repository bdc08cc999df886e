"""Lab 19-05: keep an engine true to a later release, one rule at a time.

The engine decides as vLLM 0.22.1 does. 0.33.0's own scheduler was run on the same workloads, and
what it decided is recorded. Five rules changed, one class below for each. As they stand they
inherit all they do from the engine, so they decide as the pin; which methods to override, and how,
is yours to find. `mini_vllm/releases` holds one answer: leave it closed.
"""

from __future__ import annotations

from mini_vllm import BlockPool, EngineParts, Request, Scheduler, SchedulerOutput


class Pool(BlockPool):
    """Which free block is handed out next: the `blocks` recordings.

    Recorded, seed 181: three usable blocks of 4, no prefix caching. r0 holds blocks 1 and 2 and
    ends in step 0. In step 1 r1 needs two blocks.

        the pin    r1: [3, 2]
        0.33.0     r1: [2, 1]

    Must hold: every block table as recorded, with prefix caching and without; B1, B4 and B10 as
    before; `free_queue` stays the object it is, and freeing n blocks touches a number of blocks
    that depends on n, not on the size of the pool.
    """


class Chunks(Scheduler):
    """How much of a prompt one step computes: the `chunks` recordings.

    Recorded, seed 368: `long_prefill_token_threshold` is 3, the budget 2,054. r0 arrives with 31
    prompt tokens in step 0, r1 with 5 in step 1.

        the pin    step 0  r0: 3      step 1  r0: 3, r1: 3
        0.33.0     step 0  r0: 31     step 1  r1: 5

    Must hold: every chunk as recorded. The threshold still bounds chunks in most steps, the budget
    in all of them, and the configuration is nobody's to change.
    """


class Labels(Scheduler):
    """What a plan calls the requests it admits: the `labels` recordings.

    Recorded, seed 2969: r1 was preempted in step 2 and is admitted again in step 3.

        the pin    step 3  new []        resumed ['r1']
        0.33.0     step 3  new ['r1']    resumed []

    Must hold: both lists as recorded, in their order; nobody gets more or less.
    """


class Walk(Scheduler):
    """Who gets a turn in a step that preempts: the `walk` recordings.

    Recorded, seed 3562: policy "priority", three requests, four usable blocks, a budget of 7. In
    step 1 r0 takes the last free block, and r1 needs one.

        the pin    step 1  r0: 3           r1 preempted
        0.33.0     step 1  r0: 3, r2: 3    r1 preempted

    Must hold: every plan as recorded, nobody planned twice, the budget kept. No recording shows
    this rule and no other, so its test needs the other three as well.
    """


class Ends(Request):
    """When a request that has asked for `min_tokens` ends.

    Recorded, one call of the stop check: two prompt tokens, outputs [7, 7], `min_tokens` 3,
    `max_tokens` 3, `max_model_len` 4.

        the pin    goes on
        0.33.0     ends, "length"

    Must hold: every one of the 10,920 recorded calls; `sampling_params` are the caller's and stay
    what they are; a request without an output does not end.
    """


class Newest(Chunks, Labels, Walk):
    """Your three rules of the scheduler together."""


def parts() -> EngineParts:
    """What `LLM(parts=parts())` needs to decide as 0.33.0 does."""
    return EngineParts(block_pool=Pool, scheduler=Newest, request=Ends)

"""Lab 03-02: chunked prefill. How many steps a prompt takes, and why no output changes.

`num_prefill_steps` and `chunk_sizes` predict; `needs_sample` is the guard that makes a chunk
harmless, `vllm/v1/worker/gpu_model_runner.py:2004-2010` `GPUModelRunner._prepare_inputs` in one
comparison; `serve` measures on the engine. Prompts are cut where
`vllm/v1/core/sched/scheduler.py:329` `Scheduler.schedule` clamps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mini_vllm
from mini_vllm import EngineParts, LLMEngine, Request, SamplingParams


def num_prefill_steps(prompt_len: int, threshold: int, budget: int) -> int:
    """Steps until the first token of a prompt that has the engine to itself.

    Exact for whole numbers of any size, in constant time. Holds with an empty prefix cache and
    enough memory. The step that computes the last chunk samples as well, so this is also the time
    to the first token.

    Args:
        prompt_len: prompt tokens.
        threshold: most tokens of one request in one step; 0 or less means no such bound.
        budget: most tokens of one step.

    Raises:
        ValueError: `prompt_len` or `budget` below 1.
    """
    chunk = _largest_chunk(prompt_len, threshold, budget)
    return -(-prompt_len // chunk)


def chunk_sizes(prompt_len: int, threshold: int, budget: int) -> list[int]:
    """The tokens of each of those steps, in order; their sum is `prompt_len`.

    Args and errors: as `num_prefill_steps`.
    """
    chunk = _largest_chunk(prompt_len, threshold, budget)
    full, rest = divmod(prompt_len, chunk)
    return [chunk] * full + ([rest] if rest else [])


def _largest_chunk(prompt_len: int, threshold: int, budget: int) -> int:
    """The most tokens one step gives to a lone request; refuses what is out of range."""
    if prompt_len < 1:
        raise ValueError(f"prompt_len={prompt_len}: need at least 1")
    if budget < 1:
        raise ValueError(f"budget={budget}: need at least 1")
    return budget if threshold <= 0 else min(threshold, budget)


def needs_sample(request: Request, num_scheduled: int) -> bool:
    """Whether the step that computes `num_scheduled` tokens of `request` says its next token.

    True exactly when the logits of this step predict a token that nobody knows yet, outputs counted
    as known. Asked before `num_computed_tokens` moves; changes nothing.

    10 prompt tokens, none computed: 4 scheduled say nothing, 10 scheduled say a token.

    Raises:
        ValueError: the plan goes beyond the tokens that are known.
    """
    after = request.num_computed_tokens + num_scheduled
    if after > request.num_tokens:
        raise ValueError(f"{request.request_id}: {after} of {request.num_tokens} tokens planned")
    return after == request.num_tokens


class Scheduler(mini_vllm.Scheduler):
    """Given. The engine's scheduler; whose row of logits speaks is your guard's decision."""

    def schedule(self) -> mini_vllm.SchedulerOutput:
        plan = super().schedule()
        for request in plan.scheduled_requests:
            request_id = request.request_id
            plan.num_computed_tokens[request_id] = request.num_computed_tokens
            if needs_sample(request, plan.num_scheduled_tokens[request_id]):
                plan.sampling_req_ids.add(request_id)
        return plan


@dataclass(frozen=True, slots=True)
class Run:
    """Given. What `serve` saw, one entry per prompt and in prompt order."""

    token_ids: list[list[int]]
    """Output token ids."""
    chunks: list[list[int]]
    """Tokens computed in each step up to the one that said the first token."""
    first_token_step: list[int]
    """Number of that step, counted from 1; steps spent waiting count."""


def serve(
    prompts: list[str] | list[list[int]],
    max_tokens: int,
    *,
    parts: EngineParts | None = None,
    **engine_kwargs: Any,
) -> Run:
    """Serve all prompts together, greedy, exactly `max_tokens` outputs each, and watch.

    All prompts are there before the first step, and all are served to their end. A step is counted
    whether or not a prompt has a part in it, and what a request computes after its first token is
    no chunk, recomputation after a preemption included.

    40 and 5 tokens, threshold 16: chunks [[16, 16, 8], [5]], first tokens in steps [3, 1].

    Args:
        prompts: texts or token ids.
        max_tokens: outputs per request; EOS is ignored.
        parts: the engine's parts; the default has your `Scheduler` in it.
        engine_kwargs: further arguments of `LLMEngine`, such as `model` and
            `long_prefill_token_threshold`.
    """
    engine = LLMEngine(parts=parts or EngineParts(scheduler=Scheduler), **engine_kwargs)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    requests = [engine.requests[request_id] for request_id in ids]
    chunks: dict[str, list[int]] = {request_id: [] for request_id in ids}
    first: dict[str, int] = {}

    def watch(plan: mini_vllm.SchedulerOutput) -> None:
        for request in plan.scheduled_requests:
            if request.num_output_tokens == 0:
                chunks[request.request_id].append(plan.num_scheduled_tokens[request.request_id])

    engine.observers.append(watch)
    step = 0
    while engine.has_unfinished_requests():
        step += 1
        engine.step()
        for request in requests:
            if request.num_output_tokens > 0:
                first.setdefault(request.request_id, step)
    return Run(
        [request.output_token_ids for request in requests],
        [chunks[request_id] for request_id in ids],
        [first[request_id] for request_id in ids],
    )

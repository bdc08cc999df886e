"""Lab 01-04: see which tokens of which requests share a step, without disturbing the engine.

`trace_batches` puts a probe on one method of one scheduler; `mixed_steps` reads its rows. What the
probe sees is `vllm/v1/core/sched/output.py:181` `SchedulerOutput`, the plan that
`vllm/v1/core/sched/scheduler.py:329` `Scheduler.schedule` returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mini_vllm import LLMEngine, SamplingParams, SchedulerOutput


def trace_batches(
    prompts: list[str], max_tokens: int = 4, **engine_kwargs: Any
) -> tuple[list[str], list[dict[str, int]]]:
    """Run all prompts together; return their ids and what each step scheduled.

    The engine is an `LLMEngine` of its own; its plans are watched and never changed, and no other
    engine notices. Every prompt is there before the first step, greedy (temperature 0), with
    `max_tokens` and `ignore_eos=True`; the run ends when nothing is unfinished.

    Args:
        prompts: texts, added in this order.
        max_tokens: output tokens of each.
        engine_kwargs: passed to `LLMEngine` as they are.

    Returns:
        The request ids in the order of `prompts`, and one dict per call of `schedule`: tokens per
        request id, in scheduling order. The dicts belong to the caller.
    """
    engine = LLMEngine(**engine_kwargs)
    rows: list[dict[str, int]] = []
    schedule = engine.scheduler.schedule

    def watched() -> SchedulerOutput:
        plan = schedule()
        rows.append(dict(plan.num_scheduled_tokens))
        return plan

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.has_unfinished_requests():
        engine.step()
    return ids, rows


def mixed_steps(
    rows: Sequence[Mapping[str, int]], num_prompt_tokens: Mapping[str, int]
) -> list[int]:
    """Numbers of the steps, from 0, that serve a prompt and an output side by side.

    A request is in its prompt in a step while the tokens computed for it *before* that step are
    fewer than its prompt. The size of its share does not tell: the last chunk of a prompt may be
    a single token, as a decode is.

    Args:
        rows: what `trace_batches` returned: tokens per request id, one mapping per step. No
            preemption and no prefix hits, so that the sum of a request's shares is its counter.
        num_prompt_tokens: length of the prompt of every request id in `rows`.
    """
    computed = dict.fromkeys(num_prompt_tokens, 0)
    mixed = []
    for number, row in enumerate(rows):
        in_prompt = {computed[name] < num_prompt_tokens[name] for name in row}
        if in_prompt == {True, False}:
            mixed.append(number)
        for name, count in row.items():
            computed[name] += count
    return mixed

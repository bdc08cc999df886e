"""Lab 01-01: watch one request live, as one row of values per step.

`Event` is given; `snapshot`, `trace_request` and `predict_num_events` are
the lab. Your loop is the driver of `vllm/v1/engine/core.py:428` `EngineCore.step`; what you look
at are the two counters `vllm/v1/request.py:145` `Request.num_computed_tokens` and
`vllm/v1/request.py:239` `Request.num_tokens`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mini_vllm import LLMEngine, Request, SamplingParams


class Event(NamedTuple):
    """What one request looked like at the end of one step. Values, no references."""

    request_id: str
    status: str
    """Name of the status, such as "RUNNING"."""
    num_computed_tokens: int
    """Tokens whose K and V are in the cache."""
    num_tokens: int
    """Prompt and output tokens that exist."""


def snapshot(request: Request) -> Event:
    """Copy what an `Event` holds out of a live request.

    The request goes on changing; the event must not. `status` is the name of the enum member,
    as in `vllm/v1/request.py:315` `RequestStatus`.
    """
    raise NotImplementedError


def trace_request(prompt: str, max_tokens: int = 4, **engine_kwargs: Any) -> list[Event]:
    """Run one prompt to its end and return one event per request and step.

    The engine is `LLMEngine(**engine_kwargs)`, the request greedy (temperature 0) with
    `ignore_eos=True`, so that the length is known beforehand. An event shows the end of its step,
    also for the request that the step has finished. A trace of "hello" with 4 outputs, (status,
    computed, tokens): RUNNING 5 6, RUNNING 6 7, RUNNING 7 8, FINISHED_LENGTH 8 9.

    Args:
        prompt: text; one token per byte with the byte tokenizer.
        max_tokens: output tokens, at least 1.
        engine_kwargs: passed to `LLMEngine` as they are.

    Raises:
        ValueError: whatever `SamplingParams` or the engine refuses.
    """
    raise NotImplementedError


def predict_num_events(num_prompt_tokens: int, max_tokens: int, chunk: int) -> int:
    """How many events `trace_request` returns for a lone request, without running anything.

    Equal to the engine for every prompt, chunk and number of outputs.

    Args:
        num_prompt_tokens: tokens of the prompt, at least 1.
        max_tokens: output tokens, at least 1.
        chunk: most prompt tokens one step may compute: the smaller of `max_num_batched_tokens`
            and, when it is on, `long_prefill_token_threshold`. At least 1.

    Raises:
        ValueError: any of the three is below 1.
    """
    raise NotImplementedError

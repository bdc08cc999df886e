"""Lab 15-01: a request moves to another engine in the middle of its answer, unnoticed.

Two engines of the same model, each with a pool, tables and queues of its own. What must hold:

- H1: the answer is that of a request that never moved, and so is every row of logits.
- H2: nothing is left of it at the source, and nothing of the source is touched after the export.
- H3: the destination pays exactly the blocks that the moved tokens fill, and computes none of those
  tokens again, but for one where no other token is left to give logits.
- H4: a refusal is an error at the door that says what was needed; both engines are as they were.

`engine.runner.kv_cache` is [layers, 2, num_blocks, block_size, kv_heads, head_dim]. Source:
`vllm/v1/core/sched/scheduler.py:1842` `Scheduler._free_request` and what stands around it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.request import Request, RequestStatus

Fingerprint = tuple[int, str, int, int, int]


class HandoffRefused(RuntimeError):
    """The destination cannot take it now, and may be able to later (given)."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """All that travels (given). It holds copies: what the source does next changes nothing here."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    num_computed_tokens: int
    sampling_params: SamplingParams
    eos_token_id: int | None
    arrival_time: float
    rng_state: Any
    """Of the request's generator; None where it has none."""
    kv: np.ndarray
    """[layers, 2, num_computed_tokens, kv_heads, head_dim], in the order of the tokens."""
    fingerprint: Fingerprint


def fingerprint_of(engine: LLMEngine) -> Fingerprint:
    """What two engines must share: model, dtype, layers, KV heads, head size (given)."""
    model: Any = engine.model
    name = zlib.crc32(np.ascontiguousarray(model.embed_tokens[:64], dtype="<f4").tobytes())
    cache = engine.runner.kv_cache
    assert cache is not None
    layers, _, _, _, heads, head_dim = cache.shape
    return name, cache.dtype.name, layers, heads, head_dim


def forget(engine: LLMEngine, request: Request) -> None:
    """The engine's front half knows it no more: id, features, random numbers (given).

    Its place in `scheduler.running` and its blocks are yours.
    """
    del engine.scheduler.requests[request.request_id]
    engine._remove(request.request_id)


def adopt(engine: LLMEngine, request: Request) -> None:
    """The engine's front half knows it: id, features, a fresh generator (given).

    It stands in none of the queues yet; its status, its place and its blocks are yours.
    """
    engine.queue_requests(request.request_id, [request])
    engine.scheduler.waiting.remove(request)


def export_request(engine: LLMEngine, request_id: str) -> Handoff:
    """Take a running request out of an engine, between two of its steps.

    Raises:
        KeyError: no live request has this id.
        ValueError: it is not RUNNING, so it has no K and V to ship.
    """
    raise NotImplementedError


def import_request(engine: LLMEngine, handoff: Handoff) -> Request:
    """Go on with it here, as a RUNNING request, the newest.

    Raises:
        ValueError: it can never run here: another fingerprint; its id is live; it is finished;
            `num_computed_tokens` is below 1 or above its tokens, or `kv` is not their shape; or its
            whole life (prompt and `max_tokens`, of which the last is never computed) needs more
            blocks than the pool has.
        HandoffRefused: it cannot run here now: `max_num_seqs` requests run, or the blocks are not
            free. The message names the number needed and the number there is.
    """
    raise NotImplementedError


def run_to_completion(engine: LLMEngine, max_steps: int = 10_000) -> dict[str, list[int]]:
    """Step until nothing is left; the output ids of each request that ended, by id.

    Raises:
        RuntimeError: requests are unfinished after `max_steps` steps.
    """
    raise NotImplementedError

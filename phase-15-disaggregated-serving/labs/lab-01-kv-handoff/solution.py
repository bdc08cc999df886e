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

import copy
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
    scheduler = engine.scheduler
    if request_id not in scheduler.requests:
        raise KeyError(f"request_id={request_id!r}: no live request has this id")
    request = scheduler.requests[request_id]
    if request.status != RequestStatus.RUNNING:
        raise ValueError(f"request_id={request_id!r} is {request.status.name}: need RUNNING")
    block, offset = _slots(engine, request_id, request.num_computed_tokens)
    cache = engine.runner.kv_cache
    assert cache is not None
    generator = engine.row_sampler.generators.get(request_id)
    handoff = Handoff(
        request_id, tuple(request.prompt_token_ids), tuple(request.output_token_ids),
        request.num_computed_tokens, request.sampling_params, request.eos_token_id,
        request.arrival_time,
        None if generator is None else copy.deepcopy(generator.bit_generator.state),
        cache[:, :, block, offset], fingerprint_of(engine),
    )  # fmt: skip
    scheduler.running = [other for other in scheduler.running if other is not request]
    scheduler.kv.free(request)
    forget(engine, request)
    return handoff


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
    scheduler, manager = engine.scheduler, engine.scheduler.kv
    count = handoff.num_computed_tokens
    request = _request_of(engine, handoff)
    size, usable = manager.block_size, manager.block_pool.num_blocks - 1
    life = len(handoff.prompt_token_ids) + handoff.sampling_params.max_tokens - 1
    if -(-life // size) > usable:
        raise ValueError(f"its whole life needs {-(-life // size)} blocks: the pool has {usable}")
    if len(scheduler.running) >= scheduler.max_num_seqs:
        raise HandoffRefused(
            f"needs a slot: {len(scheduler.running)} of {scheduler.max_num_seqs} are taken"
        )
    if manager.allocate_slots(request, count) is None:
        free = manager.block_pool.get_num_free_blocks()
        raise HandoffRefused(f"needs {-(-count // size)} blocks: {free} are free")
    block, offset = _slots(engine, request.request_id, count)
    cache = engine.runner.kv_cache
    assert cache is not None
    cache[:, :, block, offset] = handoff.kv
    request.num_computed_tokens = min(count, request.num_tokens - 1)
    adopt(engine, request)
    if handoff.rng_state is not None:
        generator = engine.row_sampler.generators[request.request_id]
        generator.bit_generator.state = copy.deepcopy(handoff.rng_state)
    request.status = RequestStatus.RUNNING
    scheduler.running.append(request)
    return request


def run_to_completion(engine: LLMEngine, max_steps: int = 10_000) -> dict[str, list[int]]:
    """Step until nothing is left; the output ids of each request that ended, by id.

    Raises:
        RuntimeError: requests are unfinished after `max_steps` steps.
    """
    ended: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return ended
        ended |= {request.request_id: request.output_token_ids for request in engine.step()}
    if engine.has_unfinished_requests():
        raise RuntimeError(f"requests are unfinished after {max_steps} steps")
    return ended


def _slots(engine: LLMEngine, request_id: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Block and offset of a request's first `count` tokens, in their order."""
    manager = engine.scheduler.kv
    table = np.array(manager.get_block_ids(request_id), dtype=np.int64)
    index, offset = np.divmod(np.arange(count), manager.block_size)
    return table[index], offset


def _request_of(engine: LLMEngine, handoff: Handoff) -> Request:
    """The request as it was, its counter at 0; refused where it cannot go on anywhere here."""
    if handoff.fingerprint != (mine := fingerprint_of(engine)):
        raise ValueError(f"fingerprint {handoff.fingerprint}: this engine has {mine}")
    if handoff.request_id in engine.requests:
        raise ValueError(f"request_id={handoff.request_id!r}: a live request has this id")
    request = Request(
        handoff.request_id, handoff.prompt_token_ids, handoff.sampling_params,
        handoff.eos_token_id, handoff.arrival_time,
    )  # fmt: skip
    for token in handoff.output_token_ids:
        request.append_output_token(token)
    if request.maybe_finish(engine.max_model_len):
        raise ValueError(f"request_id={handoff.request_id!r} is finished: need one that goes on")
    count = handoff.num_computed_tokens
    _, _, layers, heads, head_dim = mine
    shape = layers, 2, count, heads, head_dim
    if not 0 < count <= request.num_tokens or handoff.kv.shape != shape:
        raise ValueError(
            f"num_computed_tokens={count}, kv of shape {handoff.kv.shape}: need 1 to "
            f"{request.num_tokens} tokens, and {shape}"
        )
    return request

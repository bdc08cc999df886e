"""What the tests of this package share: random scenarios, a driver, scripted models, probes.

Promises: a scenario is plain data, so a failing one prints and replays; every request of a scenario
fits the pool, so it must finish. The driver calls back after each `schedule()` and each step.
Needs pytest; property tests skip themselves where `hypothesis` is absent.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mini_vllm import EngineParts, LLMEngine
from mini_vllm.batch import ForwardBatch, Model
from mini_vllm.block_pool import KVCacheBlock
from mini_vllm.config import SamplingParams
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.models.toy import ToyModel
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request, RequestStatus
from mini_vllm.tokenizer import Tokenizer

STEMS = (
    (1, 2, 3, 4, 5, 6) * 4,
    (1, 2, 3, 4, 1, 2, 3, 4) * 3,
    (2,) * 24,
)
"""Prompts are cut from these, so many share a prefix, and equal blocks sit under other parents."""


class TinyTokenizer:
    """Eight ids, the last of them EOS, so that random requests do stop by themselves."""

    vocab_size = 8
    eos_token_id = 7

    def encode(self, text: str) -> list[int]:
        """One id in 0-6 per character."""
        return [ord(c) % 7 for c in text]

    def decode(self, token_ids: list[int]) -> str:
        """The ids as digits."""
        return "".join(str(t) for t in token_ids)


class ScriptedModel:
    """Logits that make greedy sampling return `next_token(last_token, position)`."""

    def __init__(self, next_token: Callable[[int, int], int], vocab_size: int = 257) -> None:
        self.next_token = next_token
        self.vocab_size = vocab_size

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """One-hot rows, float64 [num_reqs, vocab_size]."""
        logits = np.zeros((batch.num_reqs, self.vocab_size))
        for row, i in enumerate(batch.logits_indices):
            token = self.next_token(int(batch.token_ids[i]), int(batch.positions[i]))
            logits[row, token] = 1.0
        return logits


# ------------------------------------------------------------------ scenarios


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a scenario, added before step `step`, aborted before step `abort_step`."""

    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    ignore_eos: bool = False
    abort_step: int | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload and the engine that serves it."""

    arrivals: tuple[Arrival, ...]
    block_size: int = 4
    spare_blocks: int = 0
    max_num_seqs: int = 4
    spare_budget: int = 0
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    spare_model_len: int | None = None
    enable_chunked_prefill: bool = True
    async_scheduling: bool = False

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus one output plus the spare, or None."""
        if self.spare_model_len is None:
            return None
        return max(len(a.prompt) for a in self.arrivals) + 1 + self.spare_model_len

    @property
    def max_num_batched_tokens(self) -> int:
        """The slots plus the spare; without chunking at least the longest sequence."""
        budget = self.max_num_seqs + self.spare_budget
        if self.enable_chunked_prefill:
            return budget
        return max(budget, *(len(a.prompt) + a.max_tokens for a in self.arrivals))

    @property
    def num_blocks(self) -> int:
        """Null block, the blocks of the largest request alone, and the spare ones."""
        longest = max(len(a.prompt) + a.max_tokens - 1 for a in self.arrivals)
        return 1 - (-longest // self.block_size) + self.spare_blocks

    def engine(
        self,
        model: Model | None = None,
        tokenizer: Tokenizer | None = None,
        parts: EngineParts | None = None,
    ) -> LLMEngine:
        """An idle engine of this configuration; by default `ToyModel` over eight ids.

        Under the priority policy, blocks of withdrawn requests are forgotten: without that the
        real engine's decisions let a resumed request adopt unwritten blocks.
        """
        return LLMEngine(
            model if model is not None else ToyModel(TinyTokenizer.vocab_size),
            tokenizer=tokenizer if tokenizer is not None else TinyTokenizer(),
            parts=parts,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_model_len=self.max_model_len,
            policy=self.policy,
            enable_chunked_prefill=self.enable_chunked_prefill,
            forget_withdrawn_blocks=True,
            async_scheduling=self.async_scheduling,
        )


def for_all(
    *strategies: Callable[[Any], Any], max_examples: int = 50, shrink: bool = True
) -> Callable[..., Any]:
    """Decorator: run a test on random values, the same ones in every run.

    Args:
        strategies: each maps the module `hypothesis.strategies` to one strategy.
        max_examples: how many values to try.
        shrink: look for a smaller failing value; off where one try is slow.
    """
    if importlib.util.find_spec("hypothesis") is None:
        return pytest.mark.skip(reason="hypothesis is not installed (pip install hypothesis)")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        given_values = given(*(make(st) for make in strategies))
        return settings(
            max_examples=max_examples,
            deadline=None,
            derandomize=True,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        )(given_values(test))

    return decorate


def scenarios(
    st: Any,
    *,
    policies: Sequence[str] = ("fcfs", "priority"),
    caching: Sequence[bool] = (True, False),
    aborts: bool = True,
    min_requests: int = 2,
    max_requests: int = 6,
    prompts: Any = None,
    max_tokens: int = 16,
    spare_blocks: int = 4,
) -> Any:
    """Strategy of small scenarios with tight pools; `st` is `hypothesis.strategies`."""
    if prompts is None:
        stems = st.builds(lambda s, n: STEMS[s][:n], st.integers(0, 2), st.integers(1, 14))
        tails = st.lists(st.integers(0, 6), max_size=3).map(tuple)
        prompts = st.builds(lambda stem, tail: stem + tail, stems, tails)
    arrival = st.builds(
        Arrival,
        step=st.integers(0, 5),
        prompt=prompts,
        max_tokens=st.integers(1, max_tokens).map(lambda n: max_tokens + 1 - n),
        priority=st.integers(0, 2),
        ignore_eos=st.sampled_from([True, True, False]),
        abort_step=st.sampled_from([None] * 7 + [1, 5, 12]) if aborts else st.none(),
    )
    return st.builds(
        Scenario,
        arrivals=st.lists(arrival, min_size=min_requests, max_size=max_requests).map(tuple),
        block_size=st.sampled_from([2, 1, 3, 4, 8]),
        spare_blocks=st.integers(0, spare_blocks),
        max_num_seqs=st.sampled_from([5, 4, 3, 2, 1]),
        spare_budget=st.sampled_from([60, 20, 10, 3, 1, 0]),
        long_prefill_token_threshold=st.sampled_from([0, 0, 1, 3, 8]),
        enable_prefix_caching=st.sampled_from(list(caching)),
        policy=st.sampled_from(list(policies)),
        spare_model_len=st.sampled_from([None, None, None, 0, 3, 8]),
        enable_chunked_prefill=st.sampled_from([True, True, True, False]),
    )


# ------------------------------------------------------------------ driving


@dataclass(frozen=True, slots=True)
class RequestState:
    """A request as it stood at the start of a step."""

    status: RequestStatus
    num_computed_tokens: int
    num_tokens: int
    num_preemptions: int
    output_token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class Moment:
    """What a check sees, after `schedule()` (phase "scheduled") or after the step ("stepped")."""

    step: int
    phase: str
    engine: LLMEngine
    requests: dict[str, Request]
    """Every request ever added, by id, in order of arrival."""
    output: SchedulerOutput
    before: dict[str, RequestState]
    """All requests at the start of the step, after arrivals and aborts."""
    running_before: list[str]
    waiting_before: list[str]
    finished: list[Request] = field(default_factory=list)

    @property
    def kv(self) -> KVCacheManager:
        """The engine's KV manager."""
        return self.engine.scheduler.kv


Check = Callable[[Moment], None]


def drive(
    scenario: Scenario, check: Check | None = None, engine: LLMEngine | None = None
) -> dict[str, Request]:
    """Serve a scenario to its end, calling `check` after each `schedule()` and each step.

    Returns:
        All its requests by id ("r0", "r1", ... in the scenario's order).

    Raises:
        AssertionError: the engine is still busy after far more steps than the work can need.
    """
    engine = engine if engine is not None else scenario.engine()
    requests: dict[str, Request] = {}
    moments: list[Moment] = []

    def scheduled(output: SchedulerOutput) -> None:
        scheduler = engine.scheduler
        moments[-1].output = output
        moments[-1].phase = "scheduled"
        assert output.num_scheduled_tokens.keys() == {
            r.request_id for r in output.scheduled_requests
        }
        assert scheduler is moments[-1].engine.scheduler
        if check is not None:
            check(moments[-1])

    engine.observers.append(scheduled)
    last_event = max(max(a.step, a.abort_step or 0) for a in scenario.arrivals)
    limit = last_event + 50 * sum(len(a.prompt) + a.max_tokens for a in scenario.arrivals)
    step = 0
    while step <= last_event or engine.has_unfinished_requests():
        assert step <= limit, f"still busy after {limit} steps: {scenario}"
        for number, arrival in enumerate(scenario.arrivals):
            request_id = f"r{number}"
            if arrival.step == step:
                params = SamplingParams(
                    max_tokens=arrival.max_tokens, ignore_eos=arrival.ignore_eos
                )
                engine.add_request(
                    list(arrival.prompt),
                    params,
                    request_id=request_id,
                    priority=arrival.priority,
                    arrival_time=float(arrival.step),
                )
                requests[request_id] = engine.requests[request_id]
            if arrival.abort_step == step:
                engine.abort_request(request_id)
        moment = Moment(
            step,
            "start",
            engine,
            requests,
            SchedulerOutput(),
            {request_id: _state_of(engine, request) for request_id, request in requests.items()},
            [request.request_id for request in engine.scheduler.running],
            [request.request_id for request in engine.scheduler.waiting],
        )
        moments.append(moment)
        moment.finished = engine.step()
        moment.phase = "stepped"
        if check is not None:
            check(moment)
        step += 1
    engine.observers.remove(scheduled)
    return requests


def _state_of(engine: LLMEngine, request: Request) -> RequestState:
    return RequestState(
        request.status,
        request.num_computed_tokens,
        request.num_tokens,
        request.num_preemptions,
        tuple(request.output_token_ids),
        tuple(engine.scheduler.kv.get_block_ids(request.request_id)),
    )


# ------------------------------------------------------------------ watching the KV manager


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a `KVCacheManager` method, with the state around it."""

    name: str
    request: Request
    kv: KVCacheManager
    before: dict[str, Any]
    num_new_tokens: int = 0
    adopted: tuple[KVCacheBlock, ...] = ()
    result: Any = None


class WatchedKVCacheManager(KVCacheManager):
    """A KV manager that reports every call to `watch` after it returned."""

    watch: Callable[[Call], None] | None = None

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        before = kv_state(self)
        result = super().get_computed_blocks(request)
        self._report(Call("get_computed_blocks", request, self, before, result=result))
        return result

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock] | None = None,
        num_lookahead_tokens: int = 0,
    ) -> list[KVCacheBlock] | None:
        before = kv_state(self)
        result = super().allocate_slots(
            request, num_new_tokens, new_computed_blocks, num_lookahead_tokens
        )
        adopted = tuple(new_computed_blocks or ())
        call = Call("allocate_slots", request, self, before, num_new_tokens, adopted, result)
        self._report(call)
        return result

    def free(self, request: Request) -> None:
        before = kv_state(self)
        super().free(request)
        self._report(Call("free", request, self, before))

    def _report(self, call: Call) -> None:
        if self.watch is not None:
            self.watch(call)


def watch_calls(
    scenario: Scenario, watch: Callable[[Call], None], check: Check | None = None
) -> dict[str, Request]:
    """Drive a scenario, calling `watch` after every call of the KV manager."""
    engine = scenario.engine(parts=EngineParts(kv_cache_manager=WatchedKVCacheManager))
    kv = engine.scheduler.kv
    assert isinstance(kv, WatchedKVCacheManager)
    kv.watch = watch
    return drive(scenario, check, engine)


def kv_state(kv: KVCacheManager) -> dict[str, Any]:
    """Everything a KV manager remembers, as plain data that compares by value."""
    pool = kv.block_pool
    return {
        "blocks": [(b.ref_cnt, b.block_hash, b.is_null) for b in pool.blocks],
        "queue": [b.block_id for b in pool.free_queue.get_all_free_blocks()],
        "num_free": pool.get_num_free_blocks(),
        "index": [(h, list(held)) for h, held in pool.cached_block_hash_to_block.items()],
        "tables": {r: [b.block_id for b in table] for r, table in kv.req_to_blocks.items()},
        "rest": {
            k: repr(v) for k, v in vars(kv).items() if k not in ("block_pool", "watch", "stats")
        },
    }


def engine_state(engine: LLMEngine) -> dict[str, Any]:
    """Everything an engine remembers between steps, the KV cache's contents included."""
    scheduler, cache = engine.scheduler, engine.runner.kv_cache
    slots = Request.__slots__
    return {
        "kv": kv_state(scheduler.kv),
        "waiting": [r.request_id for r in scheduler.waiting],
        "running": [r.request_id for r in scheduler.running],
        "requests": {
            request_id: {name: repr(getattr(request, name)) for name in slots}
            for request_id, request in scheduler.requests.items()
        },
        "generators": {k: repr(g.bit_generator.state) for k, g in engine.rows.generators.items()},
        "cache": None if cache is None else cache.tobytes(),
    }


# ------------------------------------------------------------------ shadow KV (K1)


class ShadowModel:
    """Writes, instead of K and V, a fingerprint of each token's whole prefix; reads them all back.

    At every forward pass each scheduled slot receives the fingerprint of the tokens up to it. Then
    every position of every scheduled request, from 0 to its last scheduled token, is read through
    the block table and must hold the fingerprint of that request's own prefix (K1).
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.slots: dict[int, int] = {}
        self.output: SchedulerOutput | None = None
        """The plan being executed; the test sets it from a check."""

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """Check K1, then let the wrapped model answer."""
        assert self.output is not None
        starts = batch.query_start_loc
        prefixes = [_fingerprints(r.all_token_ids) for r in self.output.scheduled_requests]
        for i, prefix in enumerate(prefixes):
            for token in range(starts[i], starts[i + 1]):
                position = int(batch.positions[token])
                self.slots[int(batch.slot_mapping[token])] = prefix[position]
        for i, prefix in enumerate(prefixes):
            for position in range(int(batch.seq_lens[i])):
                block, offset = divmod(position, batch.block_size)
                slot = int(batch.block_tables[i, block]) * batch.block_size + offset
                request = self.output.scheduled_requests[i]
                assert self.slots.get(slot) == prefix[position], (
                    f"K1: position {position} of {request} reads slot {slot}, which holds "
                    "another prefix or nothing"
                )
        return self.model.forward(batch)


def _fingerprints(token_ids: Sequence[int]) -> list[int]:
    """A number per position that depends on all tokens up to it."""
    prints: list[int] = []
    current = 0
    for token in token_ids:
        current = hash((current, token, len(prints)))
        prints.append(current)
    return prints


def drive_with_shadow(scenario: Scenario, engine: LLMEngine | None = None) -> dict[str, Request]:
    """Drive a scenario with K1 checked at every forward pass."""
    engine = engine if engine is not None else scenario.engine()
    shadow = ShadowModel(engine.model)
    engine.model = shadow

    def check(moment: Moment) -> None:
        shadow.output = moment.output

    return drive(scenario, check, engine)

"""What the tests of this package share: random scenarios, a driver, scripted models, probes.

Promises: a scenario is plain data, so a failing one prints and replays; every request of a scenario
fits the pool, so it must finish. The driver calls back after each `schedule()` and each step.
Needs pytest; property tests skip themselves where `hypothesis` is absent.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mini_vllm import EngineParts, LLMEngine
from mini_vllm.batch import ForwardBatch, Model
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
class ScenarioRequest:
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

    arrivals: tuple[ScenarioRequest, ...]
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
        ScenarioRequest,
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


@functools.cache
def _drawn(number: int, **knobs: Any) -> list[Scenario]:
    found: list[Scenario] = []

    def collect(scenario: Scenario) -> None:
        found.append(scenario)

    for_all(lambda st: scenarios(st, **knobs), max_examples=number, shrink=False)(collect)()
    return found


def for_scenarios(number: int, **knobs: Any) -> Callable[..., Any]:
    """Decorator: run a test on `number` scenarios, drawn once for all tests that ask the same.

    Drawing costs as much as serving. A test that fails draws anew, to find a smaller scenario.

    Args:
        knobs: of `scenarios`; lists as tuples.
    """
    if importlib.util.find_spec("hypothesis") is None:
        return for_all(scenarios)

    def decorate(test: Callable[[Scenario], None]) -> Callable[[], None]:
        def on_all_scenarios() -> None:
            for scenario in _drawn(number, **knobs):
                try:
                    test(scenario)
                except Exception:
                    for_all(lambda st: scenarios(st, **knobs), max_examples=number)(test)()
                    raise

        on_all_scenarios.__name__, on_all_scenarios.__doc__ = test.__name__, test.__doc__
        return on_all_scenarios

    return decorate


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

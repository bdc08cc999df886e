"""Two servers for a trace: each for all of it, or one that prefills and one that goes on.

Promises: either server plans as the engine's scheduler does; what the second one loads is billed in
its blocks and not computed, but for the last token of the prompt, which it computes itself; the
wire carries one prompt after the other. No upstream counterpart: what is measured there is
`benchmarks/disagg_benchmarks/disagg_performance_benchmark.sh`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mini_vllm.checks import number, whole
from mini_vllm.config import EngineConfig
from mini_vllm.plan import NO_EXTERNAL_TOKENS, ExternalTokens, Gate
from mini_vllm.request import Request
from mini_vllm.simulate.cost import StepCost
from mini_vllm.simulate.simulator import Simulated, Simulator
from mini_vllm.simulate.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class Wire:
    """What lies between two servers."""

    gbps: float
    """1e9 bits per second."""
    bytes_per_token: int
    """K and V of one token, all layers."""

    def __post_init__(self) -> None:
        if number("gbps", self.gbps) <= 0:
            raise ValueError(f"gbps={self.gbps!r}: need more than 0")
        whole("bytes_per_token", self.bytes_per_token, 1)

    def seconds(self, num_tokens: int) -> float:
        """To carry so many tokens with nothing else on it."""
        return num_tokens * self.bytes_per_token * 8 / (self.gbps * 1e9)


@dataclass(frozen=True, slots=True)
class Crossing:
    """One prompt's K and V on the wire, in seconds."""

    number: int
    """Of the request in its trace."""
    ready: float
    begin: float
    end: float


@dataclass(slots=True)
class Served:
    """What two servers made of a trace."""

    result: Simulated
    """Outcomes of both, by the trace's arrivals; gaps between tokens."""
    crossings: list[Crossing] = field(default_factory=list)
    prefill: Simulated | None = None
    """The first server's own, where it only prefills."""


class Loaded(Gate):
    """Every prompt comes from outside, but for its last token; once, as a NIXL load does."""

    def __init__(self) -> None:
        self._asked: set[str] = set()

    def found(self, request: Request, num_cached: int) -> ExternalTokens:
        """All that is not cached; after a preemption it is computed here."""
        if request.request_id in self._asked:
            return NO_EXTERNAL_TOKENS
        self._asked.add(request.request_id)
        return ExternalTokens(max(0, request.num_prompt_tokens - 1 - num_cached))


def together(config: EngineConfig, cost: StepCost, trace: Sequence[TraceRequest]) -> Served:
    """Two servers that prefill and decode, each with every second request.

    Raises:
        TraceError, CostError: as `Simulator.run`.
    """
    merged = Simulated()
    for parity in (0, 1):
        own = list(range(parity, len(trace), 2))
        found = Simulator(config, cost).run([trace[index] for index in own])
        for outcome in found.outcomes:
            outcome.number = own[outcome.number]
        _merge(merged, found)
    return Served(merged)


def apart(
    config: EngineConfig, cost: StepCost, trace: Sequence[TraceRequest], wire: Wire
) -> Served:
    """One server that prefills, a wire, and one that goes on.

    A prompt leaves when it is computed, in this order, and its request reaches the second server
    when all of it has crossed. Blocks of the first server that wait for the wire are not counted
    against its pool.

    Raises:
        TraceError, CostError: as `Simulator.run`.
    """
    prompts = [
        TraceRequest(each.arrival, each.prompt_len, 1, each.hash_ids, each.hash_block)
        for each in trace
    ]
    prefill = Simulator(config, cost).run(prompts)
    free_at, crossings = 0.0, list[Crossing]()
    for outcome in sorted(prefill.outcomes, key=lambda each: (each.last_token, each.number)):
        begin = max(free_at, outcome.last_token)
        free_at = begin + wire.seconds(outcome.prompt_len)
        crossings.append(Crossing(outcome.number, outcome.last_token, begin, free_at))
    decoder = Simulator(config, cost)
    decoder.scheduler.gates = (*decoder.scheduler.gates, Loaded())
    decode = decoder.run(
        [TraceRequest(c.end, trace[c.number].prompt_len, trace[c.number].output_len)
         for c in crossings]
    )  # fmt: skip
    for outcome in decode.outcomes:
        outcome.number = crossings[outcome.number].number
        outcome.arrival = trace[outcome.number].arrival
    merged = Simulated()
    _merge(merged, decode)
    merged.num_steps += prefill.num_steps
    merged.computed_tokens += prefill.computed_tokens
    merged.preemptions += prefill.preemptions
    merged.busy += prefill.busy
    return Served(merged, crossings, prefill)


def _merge(into: Simulated, found: Simulated) -> None:
    into.outcomes += found.outcomes
    into.gaps += found.gaps
    into.gap_counts += found.gap_counts
    into.duration = max(into.duration, found.duration)
    for name in ("num_steps", "busy", "computed_tokens", "preemptions", "queries", "hits"):
        setattr(into, name, getattr(into, name) + getattr(found, name))

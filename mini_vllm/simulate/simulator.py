"""The engine's scheduler on a computed clock: what a server would decide, and when.

Promises: every plan is the scheduler's own, so it equals vLLM's wherever the scheduler does; only
the time of a step is modelled. Decisions are exact given the clock: a step that is predicted too
long lets more requests arrive before the next. Memory does not grow with the trace but for one
small record per request. Mirrors the order of things in `vllm/v1/engine/core.py:1203`
`EngineCoreProc._process_input_queue` and `:469` `EngineCore.step_with_batch_queue`.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import heappop, heappush

from mini_vllm.config import EngineConfig, SamplingParams
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.lora.gate import AdapterGate
from mini_vllm.lora.request import LoRARequest
from mini_vllm.parts import EngineParts
from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.releases import PIN, parts_of
from mini_vllm.request import Request, RequestStatus
from mini_vllm.scheduler import Scheduler
from mini_vllm.simulate.cost import StepCost, StepWork, work_of
from mini_vllm.simulate.traces import Skipped, TraceError, TraceRequest

SAID = (0,)
Observer = Callable[[float, float, SchedulerOutput, StepWork], None]
"""Called with each plan's begin and end in seconds, the plan, and its work."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Speculative decoding by its numbers: how many drafts, and how many of them are accepted."""

    num_tokens: int
    acceptance: float
    """Chance that a draft is accepted, given that those before it were."""
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.num_tokens) is not int or not 1 <= self.num_tokens <= 64:
            raise ValueError(f"num_speculative_tokens={self.num_tokens!r}: need 1 to 64")
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance={self.acceptance!r}: need 0 to 1")


class SimulatedRequest(Request):
    """A request whose tokens are counted and not kept."""

    __slots__ = ("end", "source")

    def __init__(self, number: int, source: TraceRequest) -> None:
        super().__init__(
            str(number), SAID, _params(source.output_len), arrival_time=source.arrival,
            priority=source.priority,
            extra_keys=(_adapter(source.lora),) if source.lora else (),
        )  # fmt: skip
        self.num_prompt_tokens = self.num_tokens = source.prompt_len
        self.source, self.end = source, source.prompt_len + source.output_len

    def append_output_token(self, token_id: int) -> None:
        """Count it."""
        self.num_tokens += 1

    def append_output_tokens(
        self, token_ids: Sequence[int], max_model_len: int | None = None
    ) -> bool:
        """Count the tokens of one step, up to the one that ends the request; whether one did."""
        for _ in token_ids:
            self.num_tokens += 1
            if self.maybe_finish(max_model_len):
                return True
        return False

    def maybe_finish(self, max_model_len: int | None = None) -> bool:
        """As of a request that only its length ends; `Simulator.check` has seen to the model's."""
        if self.num_tokens < self.end:
            return False
        self.status = RequestStatus.FINISHED_LENGTH
        return True


@cache
def _params(output_len: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_len, ignore_eos=True)


@cache
def _adapter(number: int) -> LoRARequest:
    return LoRARequest(f"adapter {number}", number, "-")


def counted(base: Callable[..., KVCacheManager]) -> Callable[..., KVCacheManager]:
    """A manager whose hashes come from the trace: tokens are never looked at."""

    class Counted(base):  # type: ignore[misc, valid-type]
        def _extend_hashes(self, request: SimulatedRequest) -> None:
            have, size = len(request.block_hashes), self.block_size
            if have == request.num_tokens // size:
                return
            if not have:
                request.block_hashes = list(prompt_hashes(request.source, size))
                have = len(request.block_hashes)
            # Blocks with outputs, or of a trace without prefixes: equal to nobody's but its own.
            own = -(int(request.request_id) << 24) - 1
            request.block_hashes += [own - i for i in range(have, request.num_tokens // size)]

    return Counted


def prompt_hashes(source: TraceRequest, block_size: int) -> Iterable[int]:
    """One hash per full block of the prompt, from ids of another size; adapters keep apart.

    Raises:
        TraceError: neither size divides the other.
    """
    ids, theirs, full = source.hash_ids, source.hash_block, source.prompt_len // block_size
    if ids is None:
        return ()
    if theirs % block_size == 0:
        per = theirs // block_size
        found = [each * per + i for each in ids for i in range(per)][:full]
    elif block_size % theirs == 0:
        per = block_size // theirs
        found = [ids[end - 1] for end in range(per, full * per + 1, per)]
    else:
        raise TraceError(f"block_size={block_size}: need a divisor or a multiple of {theirs}")
    return [hash((source.lora, each)) for each in found] if source.lora else found


@dataclass(slots=True)
class Outcome:
    """One request when it is done. Times in seconds on the simulation's clock."""

    number: int
    arrival: float
    prompt_len: int
    output_len: int
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def ttft(self) -> float:
        """From arrival to the first token."""
        return self.first_token - self.arrival

    @property
    def e2el(self) -> float:
        """From arrival to the last token."""
        return self.last_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None where there is only one."""
        gaps = self.output_len - 1
        return (self.last_token - self.first_token) / gaps if gaps else None


@dataclass(slots=True)
class Simulated:
    """What a simulation came to."""

    outcomes: list[Outcome] = field(default_factory=list)
    """In the order in which requests ended."""
    gaps: array[float] = field(default_factory=lambda: array("d"))
    """Times between two tokens of a request, each value once per step."""
    gap_counts: array[int] = field(default_factory=lambda: array("L"))
    """How many requests had each of them."""
    num_steps: int = 0
    duration: float = 0.0
    busy: float = 0.0
    """Seconds in which the model ran."""
    preemptions: int = 0
    computed_tokens: int = 0
    """Of all steps, drafts among them."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    queries: int = 0
    hits: int = 0
    """Prompt tokens looked up and found, as `vllm:prefix_cache_queries` and `_hits` count them."""
    peak_running: int = 0
    peak_waiting: int = 0
    peak_usage: float = 0.0
    skipped: Skipped = field(default_factory=Skipped)

    @property
    def recomputed_tokens(self) -> int | None:
        """Tokens computed a second time, since a preemption had thrown them away; None with drafts,
        where a step computes tokens that are then rejected."""
        if self.drafted_tokens:
            return None
        once = sum(o.prompt_len + o.output_len - 1 - o.cached_tokens for o in self.outcomes)
        return self.computed_tokens - once


@dataclass(slots=True)
class _Live:
    """A request on its way."""

    request: SimulatedRequest
    outcome: Outcome
    last: float = -1.0


class Simulator:
    """One server."""

    def __init__(
        self,
        config: EngineConfig,
        cost: StepCost,
        *,
        release: str = PIN,
        parts: EngineParts | None = None,
        drafts: Drafts | None = None,
        max_loras: int | None = None,
        host: float | None = None,
        gates: Sequence[Gate] = (),
    ) -> None:
        """An idle one.

        Args:
            config: as for the engine; `async_scheduling` decides how many plans are in flight.
            cost: of a step.
            release: decides as this one.
            parts: instead of the release's.
            drafts: speculative decoding.
            max_loras: most adapters in one step; None: the trace's adapters are refused.
            host: seconds that each step costs before the model runs; None: the cost's own.
            gates: what else speaks to the scheduler; requests have no tokens, hashes they have.

        Raises:
            ValueError: an unknown release, or a combination that is not proved there.
        """
        if release != PIN and parts is None and (drafts or max_loras or gates):
            raise ValueError(
                f"release={release!r}: drafts, adapters and gates are simulated at {PIN} alone"
            )
        if drafts and max_loras:
            raise ValueError(
                "max_loras with drafts: the two were not compared together; need one of them"
            )
        parts = parts_of(release) if parts is None else parts
        self.cost, self.drafts = cost, drafts
        self.host = getattr(cost, "host", 0.0) if host is None else host
        self.depth = 2 if config.scheduler.async_scheduling else 1
        self.max_loras = max_loras
        if drafts:
            k = drafts.num_tokens
            scheduler = replace(config.scheduler, num_speculative_tokens=k, num_lookahead_tokens=k)
            config = replace(config, scheduler=scheduler)
        self.config = config
        gates = [*([AdapterGate(max_loras)] if max_loras else []), *gates]
        self.scheduler: Scheduler = replace(
            parts, kv_cache_manager=counted(parts.kv_cache_manager)
        ).build_scheduler(config, gates)
        self.observers: list[Observer] = []
        self.draw = random.Random(drafts.seed if drafts else 0)

    def run(
        self,
        trace: Iterable[TraceRequest],
        *,
        concurrency: int | None = None,
        turnaround: float = 0.0,
        ramp: float = 0.0,
        on_end: Callable[[int], None] | None = None,
        skip: bool = False,
    ) -> Simulated:
        """Serve a trace to its end.

        Args:
            trace: in order of arrival.
            concurrency: a closed loop: at most this many requests are in the server, and the next
                arrives when one ends, whatever the trace says of times.
            turnaround: of a closed loop, seconds from a request's end to the arrival of the next:
                the way of the last token to the client, and of the next prompt from it.
            ramp: of a closed loop, seconds from one client's first request to the next client's.
            on_end: called with the number of requests that have ended.
            skip: leave requests out that the server would refuse, and count them.

        Raises:
            TraceError: a request that the server would refuse.
            CostError: a step that the cost knows nothing about.
        """
        clients = None
        if concurrency is not None:
            for name, value in (("turnaround", turnaround), ("ramp", ramp)):
                if not 0 <= value < math.inf:
                    raise ValueError(f"{name}={value!r}: need seconds, 0 or more")
            clients = _Clients([ramp * place for place in range(concurrency)], turnaround)
        return _Run(self, trace, clients, on_end, skip).run()

    def check(self, source: TraceRequest, number: int) -> None:
        """Raises TraceError for a request that could never be served here."""
        cache, limit = self.config.cache, self.config.scheduler.max_model_len
        most = (cache.num_blocks - 1) * cache.block_size
        length = source.prompt_len + source.output_len
        if limit is not None and length > limit:
            raise TraceError(
                f"request {number}: {source.prompt_len} + {source.output_len} tokens: need at "
                f"most max_model_len={limit}"
            )
        if length > most:
            raise TraceError(
                f"request {number}: {length} tokens: need at most {most}, what the cache holds "
                f"(num_blocks={cache.num_blocks} of {cache.block_size}, one of them reserved)"
            )
        if source.lora and not self.max_loras:
            raise TraceError(
                f"request {number}: has an adapter: need max_loras, the number of adapters on "
                "the device at once"
            )


@dataclass(slots=True)
class _Clients:
    """A closed loop: when each client that waits for nothing sends its next request."""

    ready: list[float]
    """A heap of times, in seconds."""
    turnaround: float


class _Run:
    """One walk through a trace."""

    def __init__(
        self, simulator: Simulator, trace: Iterable[TraceRequest], clients: _Clients | None,
        on_end: Callable[[int], None] | None, skip: bool,
    ) -> None:  # fmt: skip
        self.simulator, self.scheduler = simulator, simulator.scheduler
        self.clients, self.on_end, self.skip = clients, on_end, skip
        self.result = Simulated()
        self.live: dict[str, _Live] = {}
        self.now = 0.0
        self.free_at = 0.0
        """When the model has run all that was submitted."""
        self.in_flight: deque[tuple[SchedulerOutput, float, bool]] = deque()
        """Plans, when each ends, and whether it is steady: see `_work_of`."""
        self.submitted: tuple[list[Request], StepWork] = [], StepWork()
        """The requests and the work of the last plan."""
        self.spoke: dict[str, tuple[int, ...]] | None = None
        """What the last update said, if every request of its plan said a token and none ended; then
        `spoke_at` stands for the `last` of each."""
        self.spoke_at = 0.0
        self._sources = self._accepted(trace)
        self._next = next(self._sources, None)

    def run(self) -> Simulated:
        scheduler, depth = self.scheduler, self.simulator.depth
        while True:
            self._arrive()
            if scheduler.has_unfinished_requests():
                plan = scheduler.schedule()
                self._submit(plan)
                if plan.scheduled_requests and len(self.in_flight) < depth:
                    continue
            elif not self.in_flight:
                if self._next is None:
                    break
                self.now = max(self.now, self._next_arrival())
                continue
            plan, end, steady = self.in_flight.popleft()
            self.now = max(self.now, end)
            if steady and self.spoke is not None:
                self._update_again(plan, self.spoke)
            else:
                self._update(plan)
        self.result.duration = self.now
        stats = scheduler.kv.stats
        self.result.queries, self.result.hits = stats.queries, stats.hits
        return self.result

    def _accepted(self, trace: Iterable[TraceRequest]) -> Iterator[tuple[int, TraceRequest]]:
        for number, source in enumerate(trace):
            try:
                self.simulator.check(source, number)
            except TraceError as error:
                if not self.skip:
                    raise
                self.result.skipped.note(str(error))
                continue
            yield number, source

    def _arrive(self) -> None:
        """Hand the scheduler what has come by now."""
        while self._next is not None and (arrival := self._next_arrival()) <= self.now:
            number, source = self._next
            if self.clients is not None:
                heappop(self.clients.ready)
            request = SimulatedRequest(number, source)
            request.arrival_time = arrival
            outcome = Outcome(number, arrival, source.prompt_len, source.output_len)
            self.live[request.request_id] = _Live(request, outcome)
            self.scheduler.add_request(request)
            self._next = next(self._sources, None)

    def _next_arrival(self) -> float:
        """When the next request comes; infinity where it waits for another one's end."""
        if self._next is None:
            return math.inf
        if self.clients is None:
            return self._next[1].arrival
        return self.clients.ready[0] if self.clients.ready else math.inf

    def _submit(self, plan: SchedulerOutput) -> None:
        """Let the model run a plan when it is free; the engine goes on."""
        result, scheduler = self.result, self.scheduler
        self.now += self.simulator.host
        begin = max(self.now, self.free_at)
        work, steady = self._work_of(plan)
        end = begin + self.simulator.cost.seconds(work) if plan.scheduled_requests else begin
        self.free_at = end
        self.in_flight.append((plan, end, steady))
        if plan.scheduled_requests:
            result.num_steps += 1
            result.busy += end - begin
            result.computed_tokens += work.tokens
            result.drafted_tokens += work.drafts
        elif len(self.in_flight) == 1 and not plan.preempted_req_ids:
            self._skip_idle_time()
        for name in plan.scheduled_new_req_ids:
            outcome = self.live[name].outcome
            if not outcome.preemptions:  # a later release lists resumed requests here too
                outcome.first_scheduled = begin
                outcome.cached_tokens = plan.num_cached_tokens[name]
        for name in plan.preempted_req_ids:
            self.live[name].outcome.preemptions += 1
            result.preemptions += 1
        running = len(scheduler.running)
        result.peak_running = max(result.peak_running, running)
        result.peak_waiting = max(result.peak_waiting, len(self.live) - running)
        result.peak_usage = max(result.peak_usage, scheduler.kv.usage)
        for observer in self.simulator.observers:
            observer(begin, end, plan, work)

    def _work_of(self, plan: SchedulerOutput) -> tuple[StepWork, bool]:
        """Its work, and whether the plan is steady: the same requests as in the one before compute
        one token each, as they did there. Nine of ten steps are; what they come to is known without
        a look at each request."""
        requests, count = plan.scheduled_requests, len(plan.scheduled_requests)
        before, work = self.submitted
        steady = (
            work.tokens == count and requests == before and not self.simulator.drafts
            and sum(plan.num_scheduled_tokens.values()) == count > 0
        )  # fmt: skip
        if steady:
            context = work.decode_context + count
            work = StepWork(count, work.padded, count, 0, context, 0, work.adapters)
        else:
            work = work_of(plan)
        self.submitted = requests, work
        return work, steady

    def _skip_idle_time(self) -> None:
        """Nothing runs and no request can be admitted: only an arrival could change that."""
        if (arrival := self._next_arrival()) == math.inf:
            waits = ", ".join(list(self.live)[:3])
            raise RuntimeError(f"nothing can be planned, and requests wait: {waits}")
        self.now = max(self.now, arrival)

    def _said(self, plan: SchedulerOutput) -> dict[str, tuple[int, ...]]:
        """The tokens that a plan gives: one per request that has caught up, and its drafts."""
        counts, live = plan.num_scheduled_tokens, self.live
        if self.simulator.depth > 1:
            sampling = plan.sampling_req_ids
            names = [name for name in counts if name in sampling and name in live]
        else:
            names = [
                r.request_id
                for r in plan.scheduled_requests
                if r.num_computed_tokens + counts[r.request_id] >= r.num_tokens
            ]
        if not plan.spec_token_ids:
            return dict.fromkeys(names, SAID)
        return {name: SAID * (1 + self._accepted_drafts(plan, name)) for name in names}

    def _accepted_drafts(self, plan: SchedulerOutput, name: str) -> int:
        number = 0
        drafts, draw = self.simulator.drafts, self.simulator.draw
        while (
            drafts and number < len(plan.spec_token_ids.get(name, ()))
            and draw.random() < drafts.acceptance
        ):  # fmt: skip
            number += 1
        self.result.accepted_tokens += number
        return number

    def _update(self, plan: SchedulerOutput) -> None:
        """Tell the scheduler the tokens of a plan that has run."""
        if self.spoke is not None:
            for name in self.spoke:
                self.live[name].last = self.spoke_at
        said = self._said(plan)
        before = {name: self.live[name].request.num_tokens for name in said}
        finished = self.scheduler.update_from_output(plan, said)
        if (drafts := self.simulator.drafts) and self.simulator.depth == 1:
            held = dict.fromkeys(said, (0,) * drafts.num_tokens)
            self.scheduler.update_draft_token_ids(held)
        now = self.now
        gaps: dict[float, int] = {}
        for name, number in before.items():
            live = self.live[name]
            gained = live.request.num_tokens - number
            if not gained:
                continue
            if live.last < 0:
                live.outcome.first_token = now
                if gained > 1:
                    gaps[0.0] = gaps.get(0.0, 0) + gained - 1
            else:
                gap = now - live.last
                gaps[gap] = gaps.get(gap, 0) + 1
                if gained > 1:
                    gaps[0.0] = gaps.get(0.0, 0) + gained - 1
            live.last = now
        self.result.gaps.extend(gaps)
        self.result.gap_counts.extend(gaps.values())
        all_spoke = len(said) == len(plan.scheduled_requests)
        self.spoke, self.spoke_at = said if all_spoke else None, now
        self._end(finished)

    def _update_again(self, plan: SchedulerOutput, said: dict[str, tuple[int, ...]]) -> None:
        """As `_update`, of a steady plan: everyone says a token as in the update before."""
        finished = self.scheduler.update_from_output(plan, said)
        self.result.gaps.append(self.now - self.spoke_at)
        self.result.gap_counts.append(len(said))
        self.spoke_at = self.now
        if finished:
            for name in said:
                self.live[name].last = self.now
            self._end(finished)

    def _end(self, finished: list[Request]) -> None:
        """Note who has ended; a closed loop's clients send their next requests."""
        for request in finished:
            live = self.live.pop(request.request_id)
            live.outcome.last_token = self.now
            self.result.outcomes.append(live.outcome)
            if self.clients is not None:
                heappush(self.clients.ready, self.now + self.clients.turnaround)
        if finished:
            self.spoke = None
            if self.on_end is not None:
                self.on_end(len(self.result.outcomes))

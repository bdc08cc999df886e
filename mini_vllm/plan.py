"""The plan of one step, and what a feature may ask of the scheduler that makes it.

Promises: a plan says everything the runner needs (which tokens, from where, in which blocks), so
the runner sees no scheduler and no KV manager. Mirrors `vllm/v1/core/sched/output.py:181`
`SchedulerOutput`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mini_vllm.request import Request

if TYPE_CHECKING:
    from mini_vllm.kv_cache import KVCacheManager


@dataclass(slots=True)
class SchedulerOutput:
    """Who computes how many tokens in this step.

    `num_scheduled_tokens` and `scheduled_requests` are in scheduling order.
    """

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_requests: list[Request] = field(default_factory=list)
    preempted_req_ids: list[str] = field(default_factory=list)
    scheduled_new_req_ids: list[str] = field(default_factory=list)
    scheduled_resumed_req_ids: list[str] = field(default_factory=list)
    num_cached_tokens: dict[str, int] = field(default_factory=dict)
    """Prefix-cache hits in tokens of each request admitted in this step."""
    finished_req_ids: set[str] = field(default_factory=set)
    """Requests that finished or were aborted since the previous step."""
    spec_token_ids: dict[str, Sequence[int]] = field(default_factory=dict)
    """Drafts verified in this step, per request that has any."""
    num_computed_tokens: dict[str, int] = field(default_factory=dict)
    """Position of each request's first scheduled token; see `bind`."""
    sampling_req_ids: set[str] = field(default_factory=set)
    """Requests whose last known token is computed in this step, so that one is sampled (S4)."""
    block_ids: dict[str, Sequence[int]] = field(default_factory=dict)
    """Block table of each scheduled request; see `bind`."""
    group_block_ids: list[dict[str, Sequence[int]]] = field(default_factory=list)
    """The tables of each further cache group, as `block_ids`; empty where there is one group."""
    features: dict[str, Any] = field(default_factory=dict)
    """What a feature has worked out for this step, under its name: with several plans under way
    each carries its own."""
    prompt_rows: dict[str, int] = field(default_factory=dict)
    """Rows of logits wanted of a request's prompt, before that of its last scheduled token."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens the model will compute in this step."""
        return sum(self.num_scheduled_tokens.values())

    @property
    def num_rows(self) -> int:
        """Rows of logits: one per scheduled request, one more per draft and `prompt_rows`."""
        drafts = sum(map(len, self.spec_token_ids.values()))
        return len(self.scheduled_requests) + drafts + sum(self.prompt_rows.values())

    def rows_of(self, request_id: str) -> int:
        """Rows of logits of one request, in the order of its tokens."""
        drafts = self.spec_token_ids.get(request_id, ())
        return 1 + len(drafts) + self.prompt_rows.get(request_id, 0)

    def num_rejected(self, request_id: str, tokens: Sequence[int]) -> int:
        """How many of its drafts were not among the `tokens` sampled (one more is always new)."""
        drafts = self.spec_token_ids.get(request_id, ())
        return len(drafts) + 1 - len(tokens) if drafts else 0

    def still_wanted(self, sampled: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
        """The tokens of those of its requests that have not ended meanwhile."""
        wanted = [r.request_id for r in self.scheduled_requests if not r.is_finished]
        return {request_id: sampled[request_id] for request_id in wanted if request_id in sampled}

    def subtract_rejected(
        self, previous: SchedulerOutput, sampled: Mapping[str, Sequence[int]]
    ) -> None:
        """Take back what `previous`, still in flight when this was planned, turned out to reject.

        The scheduler's counters assume that every draft in flight is accepted; the runner knows
        better before the scheduler does.
        """
        admitted = {*self.scheduled_new_req_ids, *self.scheduled_resumed_req_ids}
        for request_id in previous.spec_token_ids:
            tokens = sampled.get(request_id)
            if tokens and request_id in self.num_computed_tokens and request_id not in admitted:
                self.num_computed_tokens[request_id] -= previous.num_rejected(request_id, tokens)

    def advance(self, request: Request) -> None:
        """Note where a request stands and count what is planned for it, before it has run.

        As `vllm/v1/core/sched/scheduler.py:951` `Scheduler._update_after_schedule`.
        """
        request_id, start = request.request_id, request.num_computed_tokens
        self.num_computed_tokens[request_id] = start
        request.num_computed_tokens = start + self.num_scheduled_tokens[request_id]

    def bind(self, kv: KVCacheManager, num_groups: int = 1) -> None:
        """Note what the runner needs, before a later call moves counters or tables.

        A scheduler whose counters move ahead (`AsyncScheduler`) has filled the positions itself.
        With several cache groups each has a table of its own.
        """
        counts = self.num_scheduled_tokens
        if not self.num_computed_tokens:
            for request in self.scheduled_requests:
                request_id, start = request.request_id, request.num_computed_tokens
                self.num_computed_tokens[request_id] = start
                if start + counts[request_id] >= request.num_tokens:
                    self.sampling_req_ids.add(request_id)
        self.block_ids = {request_id: kv.get_block_ids(request_id) for request_id in counts}
        if num_groups > 1:
            self.group_block_ids = [
                {request_id: kv.get_block_ids(request_id, group) for request_id in counts}
                for group in range(1, num_groups)
            ]


class ExternalTokens(NamedTuple):
    """Tokens whose K and V a gate brings from outside, behind the hits of the prefix cache."""

    num_tokens: int
    load_async: bool = False
    """They come while other requests run: this one gets its blocks now and waits for them."""


NO_EXTERNAL_TOKENS = ExternalTokens(0)


class Gate:
    """What a feature may ask of the scheduler; a feature overrides what it needs.

    The moments of one `schedule()`, in this order; `leaves` comes whenever blocks would be freed.
    """

    def begins(self, plan: SchedulerOutput) -> None:
        """A step is being planned: budgets of a step start here."""

    def admission(
        self, request: Request, plan: SchedulerOutput
    ) -> Literal["admit", "skip", "stop"]:
        """May this waiting request run? "skip" looks at the next one, "stop" ends the scan."""
        return "admit"

    def found(self, request: Request, num_cached: int) -> ExternalTokens | None:
        """What it can bring behind the `num_cached` tokens hit; None: it cannot say yet, and the
        request is passed over.

        As `vllm/distributed/kv_transfer/kv_connector/v1/base.py:454`
        `KVConnectorBase_V1.get_num_new_matched_tokens`. A request whose load is under way waits
        among the skipped until `admission` says that the load is there.
        """
        return NO_EXTERNAL_TOKENS

    def limit(self, request: Request, start: int, num_new: int) -> int:
        """At most this many of the `num_new` tokens wanted from position `start` on."""
        return num_new

    def refused(self, request: Request) -> None:
        """There are no blocks for a waiting request after all: give up what `limit` took for it."""

    def scheduled(self, request: Request, num_new: int, plan: SchedulerOutput) -> None:
        """The request has entered the plan with `num_new` tokens; with 0 it has not, but its blocks
        are there and its load begins."""

    def leaves(self, request: Request) -> bool:
        """The request is preempted or ends. True: keep its blocks, the gate frees them later."""
        return False

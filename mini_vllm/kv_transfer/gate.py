"""What the scheduler asks about K and V that lie elsewhere: bring them, wait for them, keep them.

Promises: a request whose load is under way has its blocks and is not scheduled; what a load brings
enters the prefix index when it is there, never before; blocks that are read or written from outside
are freed when the last of them says so. Decides as `vllm/v1/core/sched/scheduler.py:2103`
`Scheduler._try_promote_blocked_waiting_request` and what stands around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.kv_transfer.base import KVConnectorBase_V1, KVConnectorOutput
from mini_vllm.plan import NO_EXTERNAL_TOKENS, ExternalTokens, Gate, SchedulerOutput
from mini_vllm.request import Request

REMOTE_KVS = "remote_kvs"
"""What a request waits for whose load is under way; upstream's WAITING_FOR_REMOTE_KVS."""

_MOST_PARAMS = 10_000


class ConnectorGate(Gate):
    """The scheduler's half of a connector, and whose blocks it holds."""

    def __init__(
        self,
        connector: KVConnectorBase_V1,
        kv: KVCacheManager | None = None,
        kv_load_failure_policy: str = "fail",
        share_invalid_blocks: bool = False,
        plans_ahead: bool = False,
    ) -> None:
        """An idle one.

        Args:
            connector: the scheduler's half.
            kv: the block tables; they may be set later.
            kv_load_failure_policy: "recompute" what could not be loaded, or "fail" the request.
            share_invalid_blocks: as at the pin under "recompute": a block whose load failed stays
                in the prefix index, and counts as computed for all who hold it but the first, who
                computes it again. A request that reads it before then reads what is not there:
                `conformance/features/kv_transfer/README.md`.
            plans_ahead: the scheduler's counters move when it plans, before the plan has run.
        """
        self.plans_ahead = plans_ahead
        self.connector, self.kv_load_failure_policy = connector, kv_load_failure_policy
        self.share_invalid_blocks = share_invalid_blocks
        self.kv: Any = kv
        self.loading: dict[str, Request] = {}
        """Requests that wait for their load."""
        self.held: dict[str, tuple[Request, set[str]]] = {}
        """Requests that have ended and whose blocks are kept, and for what: "recving" is a load
        that still writes them, "sending" a peer that still reads them."""
        self.kv_transfer_params: dict[str, dict[str, Any]] = {}
        """What `request_finished` gave for the clients of requests that ended."""
        self.num_unknown = 0
        """Requests of the last plan of which the connector could not say yet."""
        self.num_external_tokens = 0
        """Tokens that came from outside and were not computed; upstream counts them in
        `vllm:prompt_tokens_by_source` under "external_kv_transfer"."""
        self._received: set[str] = set()
        self._external: dict[str, int] = {}
        self._first: dict[str, int] = {}  # of those that wait, the first token from outside
        self._truncated: dict[str, tuple[Request, int]] = {}
        self._failures: dict[str, tuple[Request, str]] = {}

    # ------------------------------------------------------------------ moments of the scheduler

    def begins(self, plan: SchedulerOutput) -> None:
        """Ask again about the requests that had no answer."""
        self.num_unknown = 0

    def admission(
        self, request: Request, plan: SchedulerOutput
    ) -> Literal["admit", "skip", "stop"]:
        """ "skip" while its load is under way."""
        if request.waits_for != REMOTE_KVS:
            return "admit"
        if request.request_id not in self._received:
            return "skip"
        self._promote(request)
        return "admit"

    def found(self, request: Request, num_cached: int) -> ExternalTokens | None:
        """What the connector can bring behind the prefix hits, unless the prompt must be computed,
        such as for its logprobs; the pin asks in that case, too."""
        if request.sampling_params.skip_reading_prefix_cache:
            return NO_EXTERNAL_TOKENS
        num_tokens, load_async = self.connector.get_num_new_matched_tokens(request, num_cached)
        if num_tokens is None:
            self.num_unknown += 1
            return None
        self._external[request.request_id] = num_tokens
        return ExternalTokens(num_tokens, load_async and num_tokens > 0)

    def refused(self, request: Request) -> None:
        """No blocks: nothing is loaded."""
        self._external.pop(request.request_id, None)

    def scheduled(self, request: Request, num_new: int, plan: SchedulerOutput) -> None:
        """An admission has its blocks; with 0 new tokens its load begins."""
        request_id = request.request_id
        if num_new and request_id not in plan.num_cached_tokens:
            return  # it was running
        external = self._external.pop(request_id, 0)
        self.connector.update_state_after_alloc(request, self.kv.get_blocks(request_id), external)
        if num_new:
            self.num_external_tokens += external
            return
        request.waits_for = REMOTE_KVS
        self.loading[request_id] = request
        self._first[request_id] = request.num_computed_tokens - external

    def leaves(self, request: Request) -> bool:
        """A request that has ended keeps its blocks while they are written or read.

        At the pin the first of two reports frees them and the second finds no request, which ends
        the engine (46240): here each report takes its own reason away.
        """
        request_id = request.request_id
        self._external.pop(request_id, None)
        self._first.pop(request_id, None)
        if not request.is_finished:
            return False
        why: set[str] = set()
        if self.loading.pop(request_id, None) is not None and request_id not in self._received:
            why.add("recving")
        self._received.discard(request_id)
        block_ids = self.kv.get_block_ids(request_id)
        is_sent, params = self.connector.request_finished(request, block_ids)
        if is_sent:
            why.add("sending")
        if params is not None:
            self.kv_transfer_params[request_id] = params
            if len(self.kv_transfer_params) > _MOST_PARAMS:  # clients that never asked
                del self.kv_transfer_params[next(iter(self.kv_transfer_params))]
        if why:
            self.held[request_id] = request, why
        return bool(why)

    # ------------------------------------------------------------------ moments of a step

    def executed(
        self, plan: SchedulerOutput, sampled: dict[str, list[int]], output: KVConnectorOutput
    ) -> None:
        """A plan has run, and the scheduler does not know its tokens: take those away that came
        from blocks whose load failed."""
        if not output.invalid_block_ids:
            return
        invalid, why = output.invalid_block_ids, output.errors
        waiting = [(request, request.num_computed_tokens) for request in self.loading.values()]
        for request, num_valid in self._affected(waiting, invalid):
            request.num_computed_tokens = num_valid
            self._note_failure(request, why)
        planned = [
            (request, plan.num_computed_tokens[request.request_id])
            for request in plan.scheduled_requests
        ]
        for request, num_valid in self._affected(planned, invalid, evicts=True):
            self._note_failure(request, why)
            if self.plans_ahead:  # its token is dropped, and the next plan begins here
                request.num_computed_tokens, request.num_output_placeholders = num_valid, 0
                request.num_tokens_to_discard += request.request_id in plan.sampling_req_ids
            else:
                sampled.pop(request.request_id, None)
                self._truncated[request.request_id] = request, num_valid

    def updated(self, output: KVConnectorOutput, end: Callable[[Request, str], None]) -> None:
        """The scheduler knows the tokens of a plan, and this is what was reported with it.

        In upstream's order: failed loads end, then received ones may be admitted, then what was
        sent is free.

        Args:
            output: the worker's report.
            end: ends a request whose load failed, with an error.
        """
        for request, num_valid in self._truncated.values():
            if not request.is_finished:
                request.num_computed_tokens = num_valid
        failures, self._failures, self._truncated = self._failures, {}, {}
        if self.kv_load_failure_policy == "fail":
            for request, reason in failures.values():
                if not request.is_finished:
                    end(request, reason)
        self.connector.update_connector_output(output)
        for request_id in output.finished_recving:
            if request_id in self.held:
                self._let_go(request_id, "recving")
            elif request_id in self.loading:
                self._received.add(request_id)
        for request_id in output.finished_sending:
            self._let_go(request_id, "sending")

    def restart(self) -> None:
        """The block tables are new: nothing is loaded, nothing kept."""
        for request in self.loading.values():
            request.waits_for = None
        self.loading, self.held = {}, {}
        self._received, self._external, self._first = set(), {}, {}
        self._truncated, self._failures = {}, {}

    # ------------------------------------------------------------------ inside

    def _promote(self, request: Request) -> None:
        """Its load is over, and it may be admitted; the scheduler indexes what its counter says.

        As `vllm/v1/core/sched/scheduler.py:2069` `Scheduler._update_waiting_for_remote_kv`.
        """
        first = self._first.pop(request.request_id)
        self.num_external_tokens += max(0, request.num_computed_tokens - first)
        if not request.num_computed_tokens:
            self.kv.free(request)  # nothing came; it is asked for again
        self._received.remove(request.request_id)
        del self.loading[request.request_id]
        request.waits_for = None

    def _note_failure(self, request: Request, why: Mapping[str, str]) -> None:
        reason = why.get(request.request_id, "its KV could not be loaded")
        self._failures[request.request_id] = request, reason

    def _let_go(self, request_id: str, reason: str) -> None:
        """One reason less to keep a request's blocks; a report about none is ignored (43226)."""
        if request_id not in self.held:
            return
        request, why = self.held[request_id]
        why.discard(reason)
        if not why:
            del self.held[request_id]
            self.kv.free(request)

    def _affected(
        self,
        requests: Sequence[tuple[Request, int]],
        invalid: set[int],
        evicts: bool = False,
    ) -> Iterator[tuple[Request, int]]:
        """Which of these hold invalid blocks among those of their computed tokens, and how many
        tokens of each are valid.

        With `share_invalid_blocks` one that an earlier request computes again counts as valid. As
        `vllm/v1/core/sched/scheduler.py:2169` `Scheduler._update_requests_with_invalid_blocks`.
        """
        marked = set[int]()
        for request, num_computed in requests:
            block_ids = self.kv.get_block_ids(request.request_id)
            bad = [
                index
                for index, block_id in enumerate(block_ids[: -(-num_computed // self._block_size)])
                if block_id in invalid
            ]
            if not bad:
                continue
            known = marked if self.share_invalid_blocks else ()
            first = next((index for index in bad if block_ids[index] not in known), None)
            marked.update(block_ids[index] for index in bad)
            if first is None:
                yield request, num_computed
                continue
            if evicts and (self.kv_load_failure_policy == "fail" or not self.share_invalid_blocks):
                for block in self.kv.get_blocks(request.request_id)[first:]:
                    self.kv.block_pool.evict(block)
            yield request, first * self._block_size

    @property
    def is_busy(self) -> bool:
        """Whether blocks are kept, or an answer is awaited, for which time alone is needed."""
        return bool(self.held or self.loading or self.num_unknown or self.connector.is_waiting())

    @property
    def _block_size(self) -> int:
        size: int = self.kv.block_size
        return size

"""What the scheduler asks about K and V that lie elsewhere: bring them, wait for them, keep them.

Promises: a request whose load is under way has its blocks and is not scheduled; what a load brings
enters the prefix index when it is there, never before; blocks that are read or written from outside
are freed when the last of them says so. Decides as `vllm/v1/core/sched/scheduler.py:2103`
`Scheduler._try_promote_blocked_waiting_request` and what stands around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.kv_transfer.base import KVConnectorBase_V1, KVConnectorOutput
from mini_vllm.plan import ExternalTokens, Gate, SchedulerOutput
from mini_vllm.request import Request, RequestStatus

REMOTE_KVS = "remote_kvs"
"""What a request waits for whose load is under way; upstream's WAITING_FOR_REMOTE_KVS."""


class Aborts(Protocol):
    """The scheduler, as far as a failed load concerns it."""

    def abort_request(self, request_id: str) -> Request | None:
        """End a request."""
        ...


class ConnectorGate(Gate):
    """The scheduler's half of a connector, and whose blocks it holds."""

    def __init__(
        self,
        connector: KVConnectorBase_V1,
        kv: KVCacheManager | None = None,
        kv_load_failure_policy: str = "fail",
        share_invalid_blocks: bool = False,
    ) -> None:
        """An idle one.

        Args:
            connector: the scheduler's half.
            kv: the block tables; whoever builds them may set `kv` later.
            kv_load_failure_policy: "recompute" what could not be loaded, or "fail" the request.
            share_invalid_blocks: as at the pin under "recompute": a block whose load failed stays
                in the prefix index, and counts as computed for all who hold it but the first, who
                computes it again. A request that reads it before then reads what is not there:
                `conformance/features/kv_transfer/README.md`.
        """
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
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._external: dict[str, int] = {}
        self._truncated: dict[str, tuple[Request, int]] = {}
        self._failures: dict[str, Request] = {}

    # ------------------------------------------------------------------ moments of the scheduler

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
        """What the connector can bring behind the prefix hits."""
        num_tokens, load_async = self.connector.get_num_new_matched_tokens(request, num_cached)
        if num_tokens is None:
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
        if num_new == 0:
            request.waits_for = REMOTE_KVS
            self.loading[request_id] = request

    def leaves(self, request: Request) -> bool:
        """A request that has ended keeps its blocks while they are written or read.

        At the pin the first of two reports frees them and the second finds no request, which ends
        the engine (46240): here each report takes its own reason away.
        """
        request_id = request.request_id
        self._external.pop(request_id, None)
        if not request.is_finished:
            return False
        why: set[str] = set()
        if self.loading.pop(request_id, None) is not None and request_id not in self._received:
            why.add("recving")
        self._received.discard(request_id)
        self._failed.discard(request_id)
        block_ids = self.kv.get_block_ids(request_id)
        is_sent, params = self.connector.request_finished(request, block_ids)
        if is_sent:
            why.add("sending")
        if params is not None:
            self.kv_transfer_params[request_id] = params
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
        invalid = output.invalid_block_ids
        waiting = [(request, request.num_computed_tokens) for request in self.loading.values()]
        for request, num_valid in self._affected(waiting, invalid):
            request.num_computed_tokens = num_valid
            self._failed.add(request.request_id)
            self._failures[request.request_id] = request
        planned = [
            (request, plan.num_computed_tokens[request.request_id])
            for request in plan.scheduled_requests
        ]
        for request, num_valid in self._affected(planned, invalid, evicts=True):
            self._failures[request.request_id] = request
            if request.num_output_placeholders:  # counters move ahead, and so does the next plan
                request.num_computed_tokens, request.num_output_placeholders = num_valid, 0
                request.num_tokens_to_discard += 1
            else:
                sampled.pop(request.request_id, None)
                self._truncated[request.request_id] = request, num_valid

    def updated(
        self, plan: SchedulerOutput, scheduler: Aborts, output: KVConnectorOutput
    ) -> list[Request]:
        """The scheduler knows the tokens of a plan; the requests that end because of `output`.

        In upstream's order: failed loads end, then received ones may be admitted, then what was
        sent is free.
        """
        for request, num_valid in self._truncated.values():
            if not request.is_finished:
                request.num_computed_tokens = num_valid
        failures, self._failures, self._truncated = self._failures, {}, {}
        ended = []
        if self.kv_load_failure_policy == "fail":
            for request_id, request in failures.items():
                if scheduler.abort_request(request_id) is not None:
                    request.status = RequestStatus.FINISHED_ERROR
                    request.stop_reason = output.errors.get(request_id, "its KV could not be loaded")
                    ended.append(request)
        self.connector.update_connector_output(output)
        for request_id in output.finished_recving:
            if request_id in self.held:
                self._let_go(request_id, "recving")
            elif request_id in self.loading:
                self._received.add(request_id)
        for request_id in output.finished_sending:
            self._let_go(request_id, "sending")
        return ended

    def restart(self) -> None:
        """The block tables are new: nothing is loaded, nothing kept."""
        for request in self.loading.values():
            request.waits_for = None
        self.loading, self.held = {}, {}
        self._received, self._failed, self._external = set(), set(), {}
        self._truncated, self._failures = {}, {}

    # ------------------------------------------------------------------ inside

    def _promote(self, request: Request) -> None:
        """What was loaded enters the index, and the request may be admitted.

        As `vllm/v1/core/sched/scheduler.py:2069` `Scheduler._update_waiting_for_remote_kv`.
        """
        request_id, num_loaded = request.request_id, request.num_computed_tokens
        if num_loaded:
            self.kv.cache_blocks(request, num_loaded)
        else:
            self.kv.free(request)  # nothing came; it is asked for again
        if request_id not in self._failed and num_loaded == request.num_tokens:
            request.num_computed_tokens -= 1  # the last token gives the logits
        self._failed.discard(request_id)
        self._received.remove(request_id)
        del self.loading[request_id]
        request.waits_for = None

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
    def _block_size(self) -> int:
        size: int = self.kv.block_size
        return size

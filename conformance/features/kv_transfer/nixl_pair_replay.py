"""The mini engine's scheduler and its pulling connector through what `nixl_pair` recorded.

Compared are the plans, statuses, counters, blocks and what the worker is to read, of either engine
in every step. Left out: leases, which P's worker keeps here alone, and `remote_engine_id`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conformance.features.kv_transfer.nixl_pair import ASKS, BLOCK_SIZE
from mini_vllm.config import SamplingParams, SchedulerConfig
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.kv_transfer.base import KVConnectorOutput, KVConnectorRole
from mini_vllm.kv_transfer.config import KVTransferConfig
from mini_vllm.kv_transfer.gate import REMOTE_KVS, ConnectorGate
from mini_vllm.kv_transfer.pull import PullConnector
from mini_vllm.kv_transfer.sockets import SocketTransport
from mini_vllm.kv_transfer.wire import Fingerprint
from mini_vllm.request import Request, RequestStatus
from mini_vllm.scheduler import Scheduler

COMPARED = (
    "planned", "status", "computed", "block_ids", "free_blocks", "to_read", "finished", "tokens",
)  # fmt: skip
_STATUS = {
    RequestStatus.FINISHED_LENGTH: "FINISHED_LENGTH_CAPPED",
    RequestStatus.FINISHED_ABORTED: "FINISHED_ABORTED",
}


class _Engine:
    """A scheduler, its connector's half, and what the worker is told."""

    def __init__(self, num_blocks: int = 20, policy: str = "fail") -> None:
        config = KVTransferConfig("SocketConnector", "kv_both", "P")
        fingerprint = Fingerprint("none", "float32", 1, 1, 1)
        role = KVConnectorRole.SCHEDULER
        self.connector = PullConnector(config, role, fingerprint, SocketTransport)
        self.kv = KVCacheManager(num_blocks, BLOCK_SIZE, True)
        self.gate = ConnectorGate(self.connector, self.kv, policy)
        self.scheduler = Scheduler(
            self.kv, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256), [self.gate]
        )
        self.requests: dict[str, Request] = {}

    def add(self, name: str, length: int, max_tokens: int, params: Mapping[str, Any]) -> None:
        """As the recorder adds it."""
        wishes = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = self.requests[name] = Request(name, list(range(3, 3 + length)), wishes)
        self.connector.on_new_request(request, params)
        self.scheduler.add_request(request)

    def step(
        self, received: Sequence[str], sent: Sequence[str], invalid: Sequence[int]
    ) -> dict[str, Any]:
        """As the recorder's."""
        plan = self.scheduler.schedule()
        meta = self.connector.build_connector_meta(plan)
        live = {**self.scheduler.requests, **{n: r for n, (r, _) in self.gate.held.items()}}
        noted: dict[str, Any] = {
            "planned": dict(plan.num_scheduled_tokens),
            "status": {name: _status(request) for name, request in live.items()},
            "computed": {
                name: r.num_computed_tokens + plan.num_scheduled_tokens.get(name, 0)
                for name, r in self.requests.items()
            },
            "block_ids": {name: list(self.kv.get_block_ids(name)) for name in live},
            "free_blocks": self.kv.block_pool.get_num_free_blocks(),
            "to_read": {
                **{str(remote["remote_request_id"]): [] for remote in meta.releases},
                **{
                    load.request_id: list(
                        load.block_ids[load.first // BLOCK_SIZE : -(-load.num_tokens // BLOCK_SIZE)]
                    )
                    for load in meta.loads
                },
            },
        }
        tokens = {
            r.request_id: [7] for r in plan.scheduled_requests
            if noted["computed"][r.request_id] >= r.num_tokens
        }  # fmt: skip
        output = KVConnectorOutput(list(received), list(sent), set(invalid))
        failed: dict[str, str] = {}

        def end(request: Request, reason: str) -> None:
            self.scheduler.abort_request(request.request_id)
            failed[request.request_id] = "error"

        self.gate.executed(plan, tokens, output)
        ended = self.scheduler.update_from_output(plan, tokens)
        noted["finished"] = {r.request_id: str(r.finish_reason) for r in ended}
        self.gate.updated(output, end)
        noted["finished"] |= failed
        noted["tokens"] = {name: len(r.output_token_ids) for name, r in self.requests.items()}
        return noted


def _status(request: Request) -> str:
    if request.waits_for == REMOTE_KVS and not request.is_finished:
        return "WAITING_FOR_REMOTE_KVS"
    return _STATUS.get(request.status, request.status.name)


def replayed(recorded: Mapping[str, Any]) -> str:
    """The first difference of a case in words, "" for none."""
    case, steps = recorded["case"], iter(recorded["steps"])
    p, d = _Engine(), _Engine(case["num_blocks"], case["policy"])
    p.add("r", case["prompt_len"], 1, ASKS)
    params = dict(recorded["steps"][0]["kv_transfer_params"])
    reading: dict[str, int] = {}
    notices: set[str] = set()
    number = -bool(case["warm"])  # D's first step serves another
    if case["warm"]:
        d.add("before", case["warm"], 1, {})
    else:
        d.add("r", case["prompt_len"], 3, params)
    for place, step in enumerate(steps):
        if step["engine"] == "P":
            got = p.step((), sorted(notices), ())
        else:
            if number == 0 and case["warm"]:
                d.add("r", case["prompt_len"], 3, params)
            if number == case["aborts_at"]:
                d.scheduler.abort_request("r")
            due = sorted(name for name, end in reading.items() if end <= number)
            reading = {name: end for name, end in reading.items() if name not in due}
            table = d.kv.get_block_ids("r") if due else ()
            got = d.step(due, (), [table[i] for i in case["invalid"] if due])
            begun = got["to_read"]
            reading |= {name: number + case["load_steps"] for name in begun if begun[name]}
            notices = {*due, *(name for name in begun if not begun[name])}
            number += 1
        for name in COMPARED:
            if got[name] != step[name]:
                where = f"step {place}, {step['engine']}, {name}"
                return f"{where}: expected {step[name]}, got {got[name]}"
    return ""

"""A replay with a connector: `kv` in an arrival scripts what it has of a request, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conformance.features import Find, Replayed
from conformance.features.kv_transfer.kv_events import CONFIG, Numbers
from conformance.recorders.stand_ins import Failing
from mini_vllm.block_pool import KVCacheBlock
from mini_vllm.kv_transfer.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
)
from mini_vllm.kv_transfer.config import KVTransferConfig
from mini_vllm.request import Request, RequestStatus


class ScriptedConnector(KVConnectorBase_V1):
    """Both halves without bytes: a pure function of the script and of the step."""

    def __init__(self, script: Mapping[str, Mapping[str, Any]], block_size: int) -> None:
        config = KVTransferConfig(kv_connector="scripted", kv_role="kv_both")
        super().__init__(config, KVConnectorRole.SCHEDULER)
        self.script = script
        self.failing = Failing(script)
        self.failing.block_size = block_size
        self.now = 0
        """The step that is under way."""
        self.depth = 1
        """Plans in flight at most."""
        self.loads: dict[str, int] = {}
        self.sends: dict[str, int] = {}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        kv = self.script.get(request.request_id)
        if kv is None:
            return 0, False
        if self.now < kv["known_at"]:
            return None, False
        self.failing.found[request.request_id] = num_computed_tokens
        more = max(0, kv["external_tokens"] - num_computed_tokens)
        return more, kv["load_async"] and more > 0

    def update_state_after_alloc(
        self, request: Request, blocks: Sequence[KVCacheBlock], num_external_tokens: int
    ) -> None:
        name = request.request_id
        if not num_external_tokens:
            return
        reported = self.now
        if self.script[name]["load_async"]:
            if self.script[name]["load_steps"] is None:
                return
            reported = self.loads[name] = self.now + self.script[name]["load_steps"]
        block_ids = [block.block_id for block in blocks]
        self.failing.load(name, block_ids, num_external_tokens, reported)

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if not request.is_finished:
            raise AssertionError(f"request_finished: {request} has not ended")
        kv = self.script.get(request.request_id)
        if kv is None or kv["send_steps"] is None:
            return False, None
        unasked = kv.get("unasked", "")
        if request.finish_reason not in ("stop", "length") and unasked != "send":
            return False, None
        self.sends[request.request_id] = self.now + kv["send_steps"]
        return unasked != "report", None

    def output(self) -> KVConnectorOutput:
        """What the worker's half reports to the update of this step."""
        names = []
        for under_way in (self.loads, self.sends):
            names.append(sorted(name for name, step in under_way.items() if step <= self.now))
            for name in names[-1]:
                del under_way[name]
        received, sent = names
        return KVConnectorOutput(received, sent, set(self.failing.at(self.now)))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any) -> None:
        """There are no bytes."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """There are no bytes."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any) -> None:
        """There are no bytes."""

    def wait_for_save(self) -> None:
        """There are no bytes."""


class ScriptedOffload(ScriptedConnector):
    """The scheduler's half of our offloading connector, and a worker whose transfers take steps."""

    def __init__(self, offload: Mapping[str, Any], block_size: int, find: Find) -> None:
        super().__init__({}, block_size)
        self.steps = {True: offload["store_steps"], False: offload["load_steps"]}
        host = find("kv_transfer.offload", "HostBlocks")(offload["num_cpu_blocks"])
        make = find("kv_transfer.offload", "OffloadingScheduler")
        self.scheduler = make(block_size, offload["factor"], host)
        self.under_way: dict[int, int] = {}
        self.told: list[list[Any]] = []
        """The jobs of the step that is under way."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count = self.scheduler.lookup(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(
        self, request: Request, blocks: Sequence[KVCacheBlock], num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            ids = [block.block_id for block in blocks]
            self.scheduler.allocated(request, ids, num_external_tokens)
            self.loads[request.request_id] = self.now + self.steps[False]

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request)
        return False, None

    def begin(self, plan: Any) -> None:
        """The jobs of a bound plan."""
        jobs = self.scheduler.planned(plan)
        kinds = {False: "load", True: "store"}
        self.told = [
            [kinds[job.is_store], job.request_id, job.host_ids, job.block_ids] for job in jobs
        ]
        self.under_way |= {job.number: self.now + self.steps[job.is_store] for job in jobs}

    def output(self) -> KVConnectorOutput:
        output = super().output()
        output.completed_jobs = [n for n, step in self.under_way.items() if step <= self.now]
        for number in output.completed_jobs:
            del self.under_way[number]
        return output

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.completed(connector_output.completed_jobs)


class Connectors(Replayed):
    """A gate whose connector is the script, and the reports of its worker."""

    name = "kv_transfer"
    now = 0
    """The step that is under way."""
    fields = ("finished_recving", "finished_sending", "invalid_block_ids", "skipped", "kv_events",
              "offload_jobs", "completed_jobs")  # fmt: skip

    def is_on(self, config: Mapping[str, Any]) -> bool:
        return bool(config.get("kv_script") or config.get(CONFIG) or config.get("offload"))

    def asked(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        adds = [add for event in entry["events"] for add in event.get("add", ())]
        script = {add["request_id"]: add["kv"] for add in adds if add.get("kv")}
        return {"kv_script": script} if script else {}

    def manager(self, config: Mapping[str, Any], make: Any, find: Find) -> Any:
        """One that tells the gate of its tables: they are made first."""

        def made(*arguments: Any, **named: Any) -> Any:
            kv = make(*arguments, **named)
            if config.get(CONFIG):
                kv.kv_events, numbers = [], Numbers()
                kv.block_pool.on_event = lambda e: kv.kv_events.append(
                    numbers.event(e.kind, e.block_hashes, e.parent_block_hash, e.token_ids)
                )
            size = config["block_size"]
            if config.get("offload"):
                connector: Any = ScriptedOffload(config["offload"], size, find)
            elif config.get("kv_script"):
                connector = ScriptedConnector(config["kv_script"], size)
            else:
                return kv
            connector.depth = 2 if config.get("async_scheduling") else 1
            gate = find("kv_transfer.gate", "ConnectorGate")(
                connector, kv, config.get("kv_load_failure_policy", "recompute"),
                share_invalid_blocks=True,
            )  # fmt: skip
            kv.connector_gate = gate
            return kv

        return made

    def gates(self, kv: Any, find: Find) -> Sequence[Any]:
        return [kv.connector_gate] if hasattr(kv, "connector_gate") else []

    def begin(self, requests: Mapping[str, Any], step: int) -> None:
        self.now = step

    def before(self, scheduler: Any) -> Mapping[str, Any]:
        if (gate := gate_of(scheduler)) is not None:
            gate.connector.now = self.now
        return {}

    def observe(self, scheduler: Any, plan: Any) -> Mapping[str, Any]:
        told: dict[str, Any] = {}
        if (events := getattr(scheduler.kv, "kv_events", None)) is not None:
            told["kv_events"], scheduler.kv.kv_events = events, []
        if (gate := gate_of(scheduler)) is None:
            return told
        plan.bind(scheduler.kv)
        connector = gate.connector
        if hasattr(connector, "begin"):
            connector.begin(plan)
            told["offload_jobs"] = connector.told
        is_due = connector.now + 1 >= connector.depth
        gate.output = connector.output() if is_due else KVConnectorOutput()
        if gate.connector.depth > 1:  # upstream keeps requests that ended until they are sent
            requests = [
                *scheduler.requests.values(),
                *(request for request, _ in gate.held.values()),
            ]
            counts = {r.request_id: r.num_output_placeholders for r in requests}
            told["num_output_placeholders"] = {r: count for r, count in counts.items() if count}
        told["completed_jobs"] = len(gate.output.completed_jobs)
        return {
            **told,
            "finished_recving": list(gate.output.finished_recving),
            "finished_sending": list(gate.output.finished_sending),
            "invalid_block_ids": sorted(gate.output.invalid_block_ids),
        }

    def executed(self, scheduler: Any, plan: Any, sampled: dict[str, list[int]]) -> None:
        if (gate := gate_of(scheduler)) is not None:
            gate.executed(plan, sampled, gate.output)

    def updated(self, scheduler: Any, plan: Any) -> Sequence[Request] | None:
        if (gate := gate_of(scheduler)) is None:
            return None
        ended: list[Request] = []

        def end(request: Request, reason: str) -> None:
            scheduler.abort_request(request.request_id)
            request.status = RequestStatus.FINISHED_ERROR
            ended.append(request)

        gate.updated(gate.output, end)
        gate.connector.now = self.now + 1  # for the events that come next
        return ended

    def is_busy(self, scheduler: Any) -> bool:
        gate = gate_of(scheduler)
        return gate is not None and bool(gate.held)


def gate_of(scheduler: Any) -> Any:
    """The gate of a scheduler whose requests are loaded from outside; or None."""
    gates = getattr(scheduler, "gates", ())
    return next((gate for gate in gates if hasattr(gate, "kv_load_failure_policy")), None)


FEATURE = Connectors()

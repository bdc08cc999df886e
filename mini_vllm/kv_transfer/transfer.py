"""What an engine holds that sends or takes K and V: both halves of a connector, and the gate.

Promises: the worker's half is called as upstream's model runner calls it, also in a step without a
forward pass; a load that fails ends its request or has it computed here, as the policy says. What
was not compared with the real engine together with a connector is refused by name. Mirrors
`vllm/v1/worker/kv_connector_model_runner_mixin.py:38`
`KVConnectorModelRunnerMixin.kv_connector_no_forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.executor import Executor
from mini_vllm.feature import Feature, RequestInput, SampledTokenIds
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.kv_transfer.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
)
from mini_vllm.kv_transfer.config import KVTransferConfig
from mini_vllm.kv_transfer.connectors import Place, create_connector
from mini_vllm.kv_transfer.gate import ConnectorGate
from mini_vllm.kv_transfer.pull import check_params, hash_of
from mini_vllm.kv_transfer.wire import Fingerprint
from mini_vllm.models.transformer import Transformer
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request

if TYPE_CHECKING:
    from mini_vllm.features import EngineSetup
    from mini_vllm.scheduler import Scheduler

NOT_COMPARED = (
    "speculative_config", "enable_lora", "tensor_parallel_size", "pipeline_parallel_size",
    "enable_expert_parallel", "decode_context_parallel_size", "structured_outputs_config",
)  # fmt: skip
"""Arguments of the engine that were not compared together with a connector."""
IDLE_S = 0.002
"""How long a step without a forward pass waits for a transfer; upstream's core sleeps 1 ms."""


@dataclass(slots=True)
class Step:
    """What a plan carries for the connector."""

    meta: KVConnectorMetadata
    has_begun: bool = False
    output: KVConnectorOutput | None = None


class LoadFailures:
    """Ends requests whose load failed: they will never have a row of logits."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    def validate_drafts(
        self, request: Request, in_flight: Sequence[int], drafts: Sequence[int]
    ) -> list[int]:
        """As they are."""
        return list(drafts)

    def failures(self) -> Mapping[str, str]:
        """Why, by request, since the last call."""
        failed, self.failed = self.failed, {}
        return failed

    def __call__(self, request: Request, row: np.ndarray) -> np.ndarray:
        """The row as given."""
        return row


class KVTransfer(Feature):
    """Takes `kv_transfer_params` with a request, and gives those of one that ended."""

    name = "kv_transfer"

    def __init__(
        self,
        config: KVTransferConfig,
        scheduler_half: KVConnectorBase_V1,
        worker_half: KVConnectorBase_V1,
        gate: ConnectorGate,
    ) -> None:
        self.config = config
        self.gate: ConnectorGate = gate
        self.scheduler_half, self.worker_half = scheduler_half, worker_half
        self.mask: LoadFailures = LoadFailures()
        self.num_failed_loads = 0
        """Loads that ended without their K and V."""
        self._has_moved = False
        self._params: dict[str, Mapping[str, Any]] = {}

    # ------------------------------------------------------------------ at the door

    def process_input(self, inputs: RequestInput) -> None:
        """Its parameters are checked, and kept for the request that is made."""
        params = inputs.options.get("kv_transfer_params")
        inputs.accepted_options.add("kv_transfer_params")
        if inputs.params.structured_outputs is not None:
            raise ValueError("structured_outputs: need None with kv_transfer_config")
        known = {} if params is None else check_params(params, self.config)
        if known and inputs.params.n > 1:
            raise ValueError(f"n={inputs.params.n}: need 1 with kv_transfer_params")
        if known.get("do_remote_prefill") and known["prompt_hash"] != hash_of(inputs.token_ids):
            raise ValueError(
                "kv_transfer_params: prompt_hash is that of another prompt; send the prompt that "
                "the producer computed"
            )
        make = inputs.make_request

        def make_request(request_id: str, *arguments: Any, **named: Any) -> Request:
            if request_id in self.gate.held:
                need = "another id, since its blocks are being transferred"
                raise ValueError(f"request_id={request_id!r}: need {need}")
            self._params[request_id] = known
            return make(request_id, *arguments, **named)

        inputs.make_request = make_request

    def add_request(self, request: Request) -> None:
        """The connector knows of it."""
        request_id = request.request_id
        self.scheduler_half.on_new_request(request, self._params.pop(request_id, {}))
        if (params := self.scheduler_half.params_ahead(request_id)) is not None:
            self.gate.kv_transfer_params[request_id] = params
            self._begin(self._planned(SchedulerOutput()))  # a consumer may ask from now on
            self.worker_half.clear_connector_metadata()

    def remove_request(self, request_id: str) -> None:
        """Nothing of it is kept but its blocks, where they are read or written."""
        self._params.pop(request_id, None)
        self.scheduler_half.forget_request(request_id)

    def take_kv_transfer_params(self, request_id: str) -> dict[str, Any] | None:
        """What the client of a request that ended hands to the next engine; once."""
        return self.gate.kv_transfer_params.pop(request_id, None)

    # ------------------------------------------------------------------ a step

    def after_schedule(self, plan: SchedulerOutput) -> None:
        """The scheduler's half says what begins; without a forward pass it begins at once."""
        self._planned(plan)
        self._has_moved = False
        if plan.scheduled_requests:
            return
        self._begin(plan)
        if self.is_busy() and not plan.preempted_req_ids:
            self.worker_half.wait_for_news(IDLE_S)
        output = self._finish(plan)
        self.gate.executed(plan, {}, output)
        self.gate.updated(output, self._end)
        self._has_moved = bool(output.finished_recving or output.finished_sending)

    def before_execute(self, plan: SchedulerOutput) -> Mapping[str, str]:
        """Loads begin."""
        self._begin(plan)
        return {}

    def after_execute(
        self,
        plan: SchedulerOutput,
        sampled: SampledTokenIds,
        in_flight: Mapping[str, Sequence[int]],
    ) -> None:
        """What has ended is noted; tokens that came of a failed load are taken away."""
        if not plan.scheduled_requests:
            return
        self.worker_half.wait_for_save()
        output = plan.features[self.name].output = self._finish(plan)
        assert isinstance(sampled, dict)
        self.gate.executed(plan, sampled, output)

    def after_update(
        self,
        plan: SchedulerOutput,
        sampled: SampledTokenIds,
        finished: list[Request],
        scheduler: Scheduler,
    ) -> None:
        """The scheduler knows what was loaded, sent and lost."""
        if (output := plan.features[self.name].output) is not None:
            self.gate.updated(output, self._end)
        if finished:  # their K and V can be read as soon as their clients know of it
            self._begin(self._planned(SchedulerOutput()))
            self.worker_half.clear_connector_metadata()

    def _planned(self, plan: SchedulerOutput) -> SchedulerOutput:
        plan.features[self.name] = Step(self.scheduler_half.build_connector_meta(plan))
        return plan

    def _begin(self, plan: SchedulerOutput) -> None:
        step = plan.features[self.name]
        if not step.has_begun:
            step.has_begun = True
            self.worker_half.bind_connector_metadata(step.meta)
            self.worker_half.start_load_kv(plan)

    def _finish(self, plan: SchedulerOutput) -> KVConnectorOutput:
        self._begin(plan)
        output = self.worker_half.get_finished(plan.finished_req_ids)
        self.worker_half.clear_connector_metadata()
        self.num_failed_loads += len(output.errors)
        return output

    def _end(self, request: Request, reason: str) -> None:
        self.mask.failed[request.request_id] = reason

    # ------------------------------------------------------------------ the engine

    def is_busy(self) -> bool:
        """Whether something is on its way, or has just come, so that the next plan may do more."""
        return self._has_moved or self.gate.is_busy

    def stats(self) -> dict[str, int]:
        """Tokens that came from outside, loads that failed, and requests that wait or are kept."""
        return {
            "num_external_tokens": self.gate.num_external_tokens,
            "num_failed_loads": self.num_failed_loads,
            "loading": len(self.gate.loading),
            "held": len(self.gate.held),
        }

    def restart(self) -> None:
        """Nothing is loaded, kept or on its way."""
        self.gate.restart()
        self.scheduler_half.reset()
        self.worker_half.reset()
        self.mask.failed = {}

    def close(self) -> None:
        """End threads and sockets."""
        self.scheduler_half.shutdown()
        self.worker_half.shutdown()


class LayerHooks:
    """Attention with the connector before and after it, layer by layer.

    As `vllm/model_executor/layers/attention/kv_transfer_utils.py:15` `maybe_transfer_kv_layer`.
    """

    def __init__(
        self, attention: Callable[..., np.ndarray], connector: KVConnectorBase_V1, names: list[str]
    ) -> None:
        self.attention, self.connector, self.names = attention, connector, names
        self._next = 0

    def __call__(
        self, query: np.ndarray, layer_cache: np.ndarray, batch: ForwardBatch, scale: float
    ) -> np.ndarray:
        """As the attention; layers come in their order."""
        name = self.names[self._next]
        self._next = (self._next + 1) % len(self.names)
        self.connector.wait_for_layer_load(name)
        attended = self.attention(query, layer_cache, batch, scale)
        self.connector.save_kv_layer(name, layer_cache, batch)
        return attended


def open_room(arguments: Mapping[str, Any], setup: EngineSetup) -> KVTransfer:
    """A connector for a model whose layers all keep the same.

    Raises:
        ValueError: a config that is not one, a model without K and V or with several groups of
            layers, or a feature that was not compared together with a connector.
    """
    config = KVTransferConfig.of(arguments["kv_transfer_config"])
    for name in NOT_COMPARED:
        value = setup.arguments.get(name)
        if value and (value is True or value != 1):  # True equals 1, and 1 is one rank
            raise ValueError(f"{name}={value!r}: need none with kv_transfer_config")
    loaded = setup.load()
    if not isinstance(loaded.model, Transformer) or loaded.kv_cache_manager is not None:
        raise ValueError(
            f"model={setup.model!r}: kv_transfer_config needs a model whose layers all keep K and "
            "V of every token"
        )
    if loaded.room is not None:
        raise ValueError(f"model={setup.model!r}: kv_transfer_config needs a model of text alone")
    model, cache = loaded.model, setup.config.cache
    layers, heads, head_dim = model.kv_shape
    dtype = np.dtype(loaded.dtype).name
    fingerprint = Fingerprint(_name_of(model), dtype, layers, heads, head_dim)
    place = Place(fingerprint, cache.block_size, cache.enable_prefix_caching)
    worker_half = create_connector(config, KVConnectorRole.WORKER, place)
    scheduler_half = create_connector(config, KVConnectorRole.SCHEDULER, place)
    scheduler_half.set_xfer_handshake_metadata(worker_half.get_handshake_metadata())
    ahead = setup.config.scheduler.async_scheduling
    gate = ConnectorGate(scheduler_half, None, config.kv_load_failure_policy, plans_ahead=ahead)
    setup.parts = replace(
        setup.parts, kv_cache_manager=partial(_managed, gate, setup.parts.kv_cache_manager)
    )
    names = [f"model.layers.{index}.self_attn.attn" for index in range(layers)]
    if worker_half.uses_layers:
        model.attention = LayerHooks(model.attention, worker_half, names)

    def build_executor(runner: Any, row_sampler: Any, features: Any) -> Executor:
        worker_half.register_kv_caches(dict(zip(names, runner.kv_cache, strict=True)))
        return Executor(runner, row_sampler, features, 1 + ahead)

    setup.executor = build_executor
    return KVTransfer(config, scheduler_half, worker_half, gate)


def _managed(
    gate: ConnectorGate, make: Callable[..., KVCacheManager], *arguments: Any, **named: Any
) -> KVCacheManager:
    """The block tables, which the gate knows from now on."""
    gate.kv = kv = make(*arguments, **named)
    return kv


def _name_of(model: Transformer) -> str:
    """What tells the K and V of two models apart: a hash of what the first tokens become.

    Upstream compares names: `vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py:74`
    `compute_nixl_compatibility_hash`.
    """
    rows = np.ascontiguousarray(model.embed_tokens[:64], dtype="<f4")
    return f"{model.config.architecture}-{hash_of(rows.view('<i4').ravel().tolist())[:16]}"

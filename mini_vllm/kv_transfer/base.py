"""What moves K and V between engines, in two halves: one beside the scheduler, one in the worker.

Promises: the names, the calls and their order are upstream's. The scheduler's half decides and
names blocks, the worker's half moves bytes, and what passes between them is one metadata object per
step. Mirrors `vllm/distributed/kv_transfer/kv_connector/v1/base.py:171` `KVConnectorBase_V1`.
"""

# ruff: noqa: B027 - a connector overrides those of the moments that it needs
from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.block_pool import KVCacheBlock
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request

if TYPE_CHECKING:
    from mini_vllm.kv_transfer.config import KVTransferConfig


class KVConnectorRole(enum.Enum):
    """Which half a connector is, as `vllm/distributed/kv_transfer/kv_connector/v1/base.py:124`
    `KVConnectorRole`."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    """What the scheduler's half tells the worker's for one step; a connector has its own."""


@dataclass(slots=True)
class KVConnectorOutput:
    """What the worker's half reports after a step.

    Mirrors `vllm/v1/outputs.py:195` `KVConnectorOutput`; the ids are in order here, since blocks
    are freed in this order and upstream walks sets.
    """

    finished_recving: Sequence[str] = ()
    """Requests whose load has ended, well or not."""
    finished_sending: Sequence[str] = ()
    """Requests whose blocks have been read, or are given up."""
    invalid_block_ids: set[int] = field(default_factory=set)
    """Blocks whose load failed; the requests that hold them lose everything from there on."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Why the load of a request failed, for its message. Upstream logs it."""
    completed_jobs: Sequence[int] = ()
    """Transfers that a connector numbers itself and that have ended; upstream's
    `kv_connector_worker_meta` carries them."""


class KVConnectorBase_V1(ABC):
    """One half of a connector. A class implements both, and `role` says which one this is."""

    uses_layers = False
    """Whether `wait_for_layer_load` and `save_kv_layer` have anything to do."""

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole) -> None:
        self.config, self.role = config, role
        self._connector_metadata: KVConnectorMetadata | None = None

    # ------------------------------------------------------------------ the worker's half

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Before each step: what the scheduler's half has said of it."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """After each step."""
        self._connector_metadata = None

    def register_kv_caches(self, kv_caches: Mapping[str, np.ndarray]) -> None:
        """Once, and again after a restart: each layer's cache by its name, [2, num_blocks,
        block_size, num_kv_heads, head_dim]."""

    @abstractmethod
    def start_load_kv(self, forward_context: SchedulerOutput) -> None:
        """Before the model runs: begin to load what the metadata names."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before a layer attends: a load that this step needs must be there."""

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: np.ndarray, attn_metadata: ForwardBatch
    ) -> None:
        """After a layer attended: `kv_layer` holds K and V of this step's tokens as well."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """After the model ran: what `save_kv_layer` began must not read the cache any more."""

    def get_handshake_metadata(self) -> Mapping[str, Any]:
        """What the scheduler's half must know of this one, such as where it listens."""
        return {}

    def wait_for_news(self, seconds: float) -> None:
        """Nothing else is to do: return when something has come, or after so long."""

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """After each step: which loads and sends have ended. `finished_req_ids` are the requests
        that ended since the step before."""
        return KVConnectorOutput()

    # ------------------------------------------------------------------ the scheduler's half

    def set_xfer_handshake_metadata(self, metadata: Mapping[str, Any]) -> None:
        """What the worker's half has said of itself."""

    def on_new_request(self, request: Request, kv_transfer_params: Mapping[str, Any]) -> None:
        """A request is queued, with what its client brought for the connector.

        Upstream keeps that in the request: `vllm/v1/request.py:59` `Request`.
        """

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens it can bring behind those computed, and whether they come later.

        None: it cannot say yet. The scheduler asks again at the next step, and after a preemption;
        what it answers changes nothing until `update_state_after_alloc`.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, blocks: Sequence[KVCacheBlock], num_external_tokens: int
    ) -> None:
        """The request has its blocks, `num_external_tokens` of them to be loaded; 0 at the second
        call for a request that was loaded."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the worker's half must know of this plan; the state behind it starts anew."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the worker's half reported."""

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. True: keep its blocks until it is among `finished_sending`; and
        what its client hands to the engine that goes on with it."""
        return False, None

    def params_ahead(self, request_id: str) -> dict[str, Any] | None:
        """What the client of a request that is queued may hand to another engine at once, before
        `request_finished` says it."""
        return None

    def forget_request(self, request_id: str) -> None:
        """A request is gone, also one of which `request_finished` never said so; an unknown id is
        a no-op."""

    # ------------------------------------------------------------------ both

    def is_waiting(self) -> bool:
        """Whether steps must go on, though no request is left, for a transfer to end."""
        return False

    def reset(self) -> None:
        """Nothing of the cache, and nothing in flight, is kept."""

    def shutdown(self) -> None:
        """The engine serves no more."""

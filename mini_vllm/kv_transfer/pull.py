"""A connector whose consumer reads: the producer keeps its blocks until that is done.

    client -> P: kv_transfer_params={"do_remote_decode": True}, max_tokens=1
    P -> client: kv_transfer_params={"do_remote_prefill": True, "remote_request_id": ..., ...}
    client -> D: the same prompt, with these kv_transfer_params
    D -> P: READ; P -> D: a LAYER after the other, END; D -> P: DONE, and P frees the blocks

Promises: the two dictionaries have the names of upstream's NIXL connector; P's token is dropped and
D computes the last token of the prompt itself; a load ends, whatever its peer does. Mirrors
`vllm/distributed/kv_transfer/kv_connector/v1/nixl/scheduler.py:356`
`NixlConnectorScheduler.get_num_new_matched_tokens` and what stands around it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.block_pool import KVCacheBlock
from mini_vllm.checks import number, whole
from mini_vllm.kv_transfer.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
)
from mini_vllm.kv_transfer.config import KVTransferConfig
from mini_vllm.kv_transfer.transfers import Inbox, Load, Outbox
from mini_vllm.kv_transfer.wire import Fingerprint, Message
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request, RequestStatus

EXTRA = {
    "host": "127.0.0.1", "port": 0, "lease_s": 30.0, "load_timeout_s": 30.0, "max_transfers": 8,
    "stream": False,
}  # fmt: skip
"""What `kv_connector_extra_config` may hold, and its defaults. The lease is upstream's
`vllm/distributed/kv_transfer/kv_connector/v1/nixl/scheduler.py:71`
`NixlConnectorScheduler._kv_lease_duration`; there heartbeats extend it. With `stream` a producer
gives its parameters when a prompt is queued, and each layer when it is computed."""

REMOTE = {
    "remote_engine_id": str, "remote_request_id": str, "remote_host": str, "remote_port": int,
    "remote_num_tokens": int, "prompt_hash": str,
}  # fmt: skip
"""What `do_remote_prefill` needs beside it."""


class Transport(Protocol):
    """What carries messages between a consumer and its producers."""

    def address(self) -> Mapping[str, Any]:
        """`remote_host` and `remote_port` for those who want to read here."""
        ...

    def read(self, number: int, load: Load) -> None:
        """Begin to ask for a load; its messages come by `poll`, under this number."""
        ...

    def done(self, remote: Mapping[str, Any], number: int | None = None) -> None:
        """Tell a producer that its blocks are not needed any more, if it can be told; what still
        comes for the load of this number is not wanted."""
        ...

    def poll(self) -> Iterable[tuple[int, Message | Exception]]:
        """What has come since the last call."""
        ...

    def wait(self, seconds: float) -> None:
        """Return when something has come, or after so long."""
        ...

    def forget(self) -> None:
        """Nothing that is on its way is wanted."""
        ...

    def close(self) -> None:
        """Carry nothing more."""
        ...


@dataclass(slots=True)
class PullMetadata(KVConnectorMetadata):
    """What begins in a step."""

    loads: list[Load] = field(default_factory=list)
    offers: list[tuple[str, Sequence[int], int, str]] = field(default_factory=list)
    """Request, blocks, tokens, hash of the prompt."""
    releases: list[Mapping[str, Any]] = field(default_factory=list)
    """What producers keep for requests that need it not."""
    expected: list[tuple[str, int, str]] = field(default_factory=list)
    """Request, tokens, hash of the prompt: of those that are queued to be streamed."""
    chunks: list[tuple[str, Sequence[int], int]] = field(default_factory=list)
    """Request, blocks, and up to which token this step computes them."""
    paused: list[str] = field(default_factory=list)
    """Those that were preempted."""
    dropped: list[str] = field(default_factory=list)
    """Those that will not be computed."""


class PullConnector(KVConnectorBase_V1):
    """Both halves; what carries the messages is an argument."""

    def __init__(
        self,
        config: KVTransferConfig,
        role: KVConnectorRole,
        fingerprint: Fingerprint,
        transport: Callable[[Outbox, Mapping[str, Any]], Transport],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """One half.

        Args:
            config: whose `kv_connector_extra_config` holds some of `EXTRA`.
            role: which half.
            fingerprint: what a peer's K and V must look like.
            transport: makes the worker's, from what it offers and the extra config.
            clock: of leases and timeouts, in the unit that these have.

        Raises:
            ValueError: something of the extra config that is unknown or out of range.
        """
        super().__init__(config, role)
        self.extra = config.extra(EXTRA)
        whole("port", self.extra["port"], 0, 65535)
        whole("max_transfers", self.extra["max_transfers"], 1)
        for name in ("lease_s", "load_timeout_s"):
            if number(name, self.extra[name]) <= 0:
                raise ValueError(f"{name}={self.extra[name]!r}: need more than 0 seconds")
        self._params: dict[str, dict[str, Any]] = {}
        self._meta = PullMetadata()
        self._address: Mapping[str, Any] = {}
        self._busy: set[str] = set()
        self._streams: dict[str, int] = {}  # of those that are being computed, the prompt's tokens
        self._numbers: dict[str, int] = {}
        if not isinstance(self.extra["stream"], bool):
            raise ValueError(f"stream={self.extra['stream']!r}: need True or False")
        self.uses_layers = self.extra["stream"] and config.is_kv_producer
        if role is KVConnectorRole.WORKER:
            self.outbox = Outbox(fingerprint, self.extra["lease_s"], clock)
            self.inbox = Inbox(fingerprint, self.extra["load_timeout_s"], clock)
            self.transport = transport(self.outbox, self.extra)

    # ------------------------------------------------------------------ the scheduler's half

    def set_xfer_handshake_metadata(self, metadata: Mapping[str, Any]) -> None:
        self._address = metadata

    def on_new_request(self, request: Request, kv_transfer_params: Mapping[str, Any]) -> None:
        request_id = request.request_id
        self._params[request_id] = dict(kv_transfer_params)
        if self.uses_layers and kv_transfer_params.get("do_remote_decode"):
            self._streams[request_id] = request.num_prompt_tokens
            prompt_hash = hash_of(request.prompt_token_ids)
            self._meta.expected.append((request_id, request.num_prompt_tokens, prompt_hash))

    def params_ahead(self, request_id: str) -> dict[str, Any] | None:
        for expected, num_tokens, prompt_hash in self._meta.expected:
            if expected == request_id:
                return self._remote_params(request_id, (), num_tokens, prompt_hash)
        return None

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        params = self._params.get(request.request_id, {})
        if not params.get("do_remote_prefill"):
            return 0, False
        count = min(params["remote_num_tokens"], request.num_prompt_tokens) - num_computed_tokens
        return max(0, count), count > 0

    def update_state_after_alloc(
        self, request: Request, blocks: Sequence[KVCacheBlock], num_external_tokens: int
    ) -> None:
        params = self._params.get(request.request_id, {})
        if not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # whatever becomes of it, it is asked for once
        if not num_external_tokens:
            self._meta.releases.append(params)
            return
        last = min(params["remote_num_tokens"], request.num_prompt_tokens)
        self._meta.loads.append(
            Load(
                request.request_id, [block.block_id for block in blocks],
                last - num_external_tokens, last, params,
            )
        )  # fmt: skip

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PullMetadata:
        meta, self._meta = self._meta, PullMetadata()
        plan = scheduler_output
        meta.paused += [name for name in plan.preempted_req_ids if name in self._streams]
        for name, num_tokens in self._streams.items():
            if count := plan.num_scheduled_tokens.get(name):
                end = min(plan.num_computed_tokens[name] + count, num_tokens)
                meta.chunks.append((name, list(plan.block_ids[name]), end))
        return meta

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        params = self._params.pop(request.request_id, {})
        is_told = self._streams.pop(request.request_id, None) is not None
        if params.get("do_remote_prefill"):  # it ends before it was looked at
            self._meta.releases.append(params)
            return False, None
        if not params.get("do_remote_decode") or request.status != RequestStatus.FINISHED_LENGTH:
            self._meta.dropped += [request.request_id] * is_told
            return False, None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        prompt_hash = hash_of(request.prompt_token_ids)
        self._meta.offers.append((request.request_id, block_ids, num_tokens, prompt_hash))
        self._busy.add(request.request_id)
        if is_told:
            return True, None
        return True, self._remote_params(request.request_id, block_ids, num_tokens, prompt_hash)

    def _remote_params(
        self, request_id: str, block_ids: Sequence[int], num_tokens: int, prompt_hash: str
    ) -> dict[str, Any]:
        """What the consumer needs to read here."""
        return {
            "do_remote_prefill": True, "do_remote_decode": False,
            "remote_engine_id": self.config.engine_id, "remote_request_id": request_id,
            "remote_block_ids": list(block_ids), "remote_num_tokens": num_tokens,
            "prompt_hash": prompt_hash, **self._address,
        }  # fmt: skip

    def forget_request(self, request_id: str) -> None:
        self._params.pop(request_id, None)
        if self._streams.pop(request_id, None) is not None:
            self._meta.dropped.append(request_id)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._busy -= set(connector_output.finished_sending)

    def is_waiting(self) -> bool:
        return bool(self._busy or self._meta.releases or self._meta.offers or self._meta.dropped)

    def reset(self) -> None:
        """Loads start over as requests without K and V elsewhere, and nothing is offered."""
        self._meta, self._busy, self._streams = PullMetadata(), set(), {}
        if self.role is KVConnectorRole.WORKER:
            self.outbox.reset()
            self.inbox.reset()
            self.transport.forget()

    # ------------------------------------------------------------------ the worker's half

    def register_kv_caches(self, kv_caches: Mapping[str, np.ndarray]) -> None:
        self.outbox.caches = self.inbox.caches = list(kv_caches.values())
        self._numbers = {name: number for number, name in enumerate(kv_caches)}

    def get_handshake_metadata(self) -> Mapping[str, Any]:
        return self.transport.address()

    def start_load_kv(self, forward_context: SchedulerOutput) -> None:
        meta = self._connector_metadata
        assert isinstance(meta, PullMetadata)
        for expected in meta.expected:
            self.outbox.expect(*expected)
        for name in meta.paused:
            self.outbox.pause(name)
        for name in meta.dropped:
            self.outbox.drop(name)
        self.outbox.grow(meta.chunks)
        for offer in meta.offers:
            self.outbox.offer(*offer)
        for load in meta.loads:
            self.transport.read(self.inbox.begin(load), load)
        for remote in meta.releases:
            self.transport.done(remote)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request whose load is under way is in no plan."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: np.ndarray, attn_metadata: ForwardBatch
    ) -> None:
        """With `stream` this layer may be read; else the consumer reads when the request ended."""
        self.outbox.computed(self._numbers[layer_name])

    def wait_for_save(self) -> None:
        """There is nothing to wait for."""

    def wait_for_news(self, seconds: float) -> None:
        self.transport.wait(seconds)

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        under_way = dict(self.inbox.loads)
        for key, message in self.transport.poll():
            self.inbox.take(key, message)
        output = self.inbox.take_ended()
        for key, load in under_way.items():
            if key not in self.inbox.loads:  # loaded or not, its producer need keep nothing
                self.transport.done(load.remote, key)
        output.finished_sending = self.outbox.take_ended()
        return output

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self.transport.close()


def hash_of(token_ids: Sequence[int]) -> str:
    """Of a prompt; two engines agree on it, whatever their `PYTHONHASHSEED`."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).hexdigest()


def check_params(params: Any, config: KVTransferConfig) -> dict[str, Any]:
    """The `kv_transfer_params` of a request.

    Raises:
        ValueError: not a mapping, an entry of the wrong type, or a role that the engine has not.
    """
    if not isinstance(params, Mapping):
        raise ValueError(f"kv_transfer_params={params!r}: need a mapping")
    for name in ("do_remote_prefill", "do_remote_decode"):
        if not isinstance(params.get(name, False), bool):
            raise ValueError(f"kv_transfer_params[{name!r}]={params[name]!r}: need True or False")
    if params.get("do_remote_decode") and not config.is_kv_producer:
        raise ValueError("do_remote_decode=True: need kv_role='kv_producer' or 'kv_both'")
    if params.get("do_remote_prefill"):
        if not config.is_kv_consumer:
            raise ValueError("do_remote_prefill=True: need kv_role='kv_consumer' or 'kv_both'")
        for name, kind in REMOTE.items():
            if type(params.get(name)) is not kind:
                need = f"need the {kind.__name__} that the producer gave"
                raise ValueError(f"kv_transfer_params[{name!r}]={params.get(name)!r}: {need}")
        whole("kv_transfer_params['remote_num_tokens']", params["remote_num_tokens"], 1)
        whole("kv_transfer_params['remote_port']", params["remote_port"], 1, 65535)
    return dict(params)

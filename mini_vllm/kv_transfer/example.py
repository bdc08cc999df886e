"""A connector that keeps the K and V of prompts in files and loads them without a wait.

Promises: upstream's arithmetic: what is kept of a prompt are its first `align_to_block_size`
tokens, and a prompt hits if those before its last one are kept. A prompt that is computed in
several steps is not kept, while upstream then keeps what is not computed yet. Mirrors
`vllm/distributed/kv_transfer/kv_connector/v1/example_connector.py:85` `ExampleConnector`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.block_pool import KVCacheBlock
from mini_vllm.kv_transfer.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
)
from mini_vllm.kv_transfer.config import KVTransferConfig
from mini_vllm.kv_transfer.pull import hash_of
from mini_vllm.kv_transfer.transfers import gathered, scatter
from mini_vllm.kv_transfer.wire import (
    HEADER_BYTES,
    Fingerprint,
    WireError,
    decode,
    encode,
    layer_messages,
    layer_of,
)
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request


def align_to_block_size(num_tokens: int, block_size: int) -> int:
    """The tokens of whole blocks before the last token.

    As `vllm/distributed/kv_transfer/kv_connector/v1/example_connector.py:455`
    `align_to_block_size`.
    """
    return (num_tokens - 1) // block_size * block_size


@dataclass(frozen=True, slots=True)
class FileOfRequest:
    """What a step loads or saves."""

    request_id: str
    block_ids: Sequence[int]
    first: int
    num_tokens: int
    name: str
    is_store: bool


@dataclass(slots=True)
class ExampleMetadata(KVConnectorMetadata):
    """The files of a step."""

    files: list[FileOfRequest] = field(default_factory=list)


class ExampleConnector(KVConnectorBase_V1):
    """Both halves, over a folder that several engines may share."""

    uses_layers = True

    def __init__(
        self, config: KVTransferConfig, role: KVConnectorRole, fingerprint: Fingerprint,
        block_size: int,
    ) -> None:  # fmt: skip
        """One half; `kv_connector_extra_config` has `shared_storage_path`."""
        super().__init__(config, role)
        default = Path(tempfile.gettempdir()) / "kv"
        given = config.extra({"shared_storage_path": str(default)})["shared_storage_path"]
        if not isinstance(given, str | Path):
            raise ValueError(f"shared_storage_path={given!r}: need a folder")
        self.fingerprint, self.block_size = fingerprint, block_size
        self.folder = Path(given)
        self._to_load: dict[str, tuple[list[int], int]] = {}
        self._numbers: dict[str, int] = {}
        self._caches: dict[str, np.ndarray] = {}
        self._invalid: set[int] = set()
        self._errors: dict[str, str] = {}

    # ------------------------------------------------------------------ the scheduler's half

    def name_of(self, token_ids: Sequence[int]) -> str:
        """The folder of a prompt's first tokens."""
        return hash_of(token_ids)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_tokens = align_to_block_size(request.num_prompt_tokens - 1, self.block_size)
        if num_tokens <= num_computed_tokens or not self._is_kept(request, num_tokens):
            return 0, False
        return num_tokens - num_computed_tokens, False

    def _is_kept(self, request: Request, num_tokens: int) -> bool:
        return (self.folder / self.name_of(request.all_token_ids[:num_tokens])).is_dir()

    def update_state_after_alloc(
        self, request: Request, blocks: Sequence[KVCacheBlock], num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            ids = [block.block_id for block in blocks]
            self._to_load[request.request_id] = ids, num_external_tokens

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ExampleMetadata:
        meta = ExampleMetadata()
        for request in scheduler_output.scheduled_requests:
            request_id, tokens = request.request_id, request.all_token_ids
            if request_id in self._to_load:
                block_ids, count = self._to_load[request_id]
                end = align_to_block_size(request.num_prompt_tokens - 1, self.block_size)
                name = self.name_of(tokens[:end])
                meta.files.append(
                    FileOfRequest(request_id, block_ids, end - count, end, name, False)
                )
                continue
            end = align_to_block_size(request.num_prompt_tokens, self.block_size)
            start = scheduler_output.num_computed_tokens[request_id]
            planned = scheduler_output.num_scheduled_tokens[request_id]
            if request_id not in scheduler_output.num_cached_tokens or start + planned < end:
                continue  # it was running, or its prompt takes several steps
            name = self.name_of(tokens[:end])
            if end and not (self.folder / name).is_dir():
                block_ids = list(scheduler_output.block_ids[request_id])
                meta.files.append(FileOfRequest(request_id, block_ids, 0, end, name, True))
        self._to_load = {}
        return meta

    def reset(self) -> None:
        self._to_load, self._invalid, self._errors = {}, set(), {}

    # ------------------------------------------------------------------ the worker's half

    def register_kv_caches(self, kv_caches: Any) -> None:
        self._caches = dict(kv_caches)
        self._numbers = {name: number for number, name in enumerate(kv_caches)}

    def _files(self, is_store: bool) -> list[FileOfRequest]:
        meta = self._connector_metadata
        assert isinstance(meta, ExampleMetadata)
        return [file for file in meta.files if file.is_store is is_store]

    def start_load_kv(self, forward_context: SchedulerOutput) -> None:
        """Nothing yet: each layer is loaded when it is needed."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Load the layer of every request that needs it."""
        for file in self._files(is_store=False):
            if file.request_id in self._errors:
                continue
            try:
                kv = self._loaded(file, layer_name)
                scatter(self._caches[layer_name], file.block_ids, file.first, kv[:, file.first :])
            except (OSError, WireError) as error:
                self._errors[file.request_id] = f"its KV could not be loaded: {error}"
                shutil.rmtree(self.folder / file.name, ignore_errors=True)  # for those who come
                size = self.block_size
                held = file.block_ids[file.first // size : -(-file.num_tokens // size)]
                self._invalid.update(held)

    def _loaded(self, file: FileOfRequest, layer_name: str) -> np.ndarray:
        data = (self.folder / file.name / layer_name).read_bytes()
        message = decode(data[:HEADER_BYTES], data[HEADER_BYTES:])
        layer, kv = layer_of(message, self.fingerprint, 0, file.num_tokens)
        if layer != self._numbers[layer_name] or kv.shape[1] != file.num_tokens:
            raise WireError(
                f"{layer_name}: the file holds {kv.shape[1]} tokens of layer {layer}, need "
                f"{file.num_tokens} of layer {self._numbers[layer_name]}"
            )
        return kv

    def save_kv_layer(
        self, layer_name: str, kv_layer: np.ndarray, attn_metadata: ForwardBatch
    ) -> None:
        for file in self._files(is_store=True):
            kv = gathered(kv_layer, file.block_ids, 0, file.num_tokens)
            [message] = layer_messages(file.name, self._numbers[layer_name], kv)
            partly = self.folder / f"{file.name}.{os.getpid()}"
            partly.mkdir(parents=True, exist_ok=True)
            (partly / layer_name).write_bytes(encode(message))

    def wait_for_save(self) -> None:
        """What is whole gets its name, so a part is not found."""
        for file in self._files(is_store=True):
            partly = self.folder / f"{file.name}.{os.getpid()}"
            with suppress(OSError):  # another engine was first
                partly.rename(self.folder / file.name)
            shutil.rmtree(partly, ignore_errors=True)

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        output = KVConnectorOutput(invalid_block_ids=self._invalid, errors=self._errors)
        self._invalid, self._errors = set(), {}
        return output

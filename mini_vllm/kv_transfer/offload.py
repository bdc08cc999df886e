"""K and V that leave the cache's blocks for host memory, and for disk, and come back.

Promises: upstream's chunk arithmetic: an offloaded block is `block_size_factor` blocks of the
cache, known by the hash of the last of them; what is stored, what is hit, what is evicted and which
request waits for a transfer is decided as there. A copy is made before the cache's block can be
overwritten, so nothing is flushed. Mirrors
`vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py:235`
`OffloadingConnectorScheduler` and `vllm/v1/kv_offload/cpu/manager.py:26` `CPUOffloadingManager`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.block_pool import KVCacheBlock
from mini_vllm.checks import whole
from mini_vllm.kv_transfer.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
)
from mini_vllm.kv_transfer.config import KVTransferConfig
from mini_vllm.kv_transfer.wire import (
    HEADER_BYTES,
    Kind,
    Message,
    WireError,
    decode,
    encode,
)
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request

EXTRA = {"block_size": None, "num_cpu_blocks": 1024, "disk_path": None, "num_disk_blocks": 0}
"""What `kv_connector_extra_config` may hold: tokens of an offloaded block (by default those of one
of the cache; upstream has the same name), how many of them memory holds (upstream says
`cpu_bytes_to_use`), and a folder and how many it holds."""


@dataclass(slots=True)
class HostBlock:
    """A block in host memory; `ref_cnt` is -1 while it is written, else who reads it."""

    block_id: int
    ref_cnt: int = -1


@dataclass(frozen=True, slots=True)
class StoreOutput:
    """What a store may write, where, and what it evicted."""

    keys: list[int]
    block_ids: list[int]
    evicted: list[tuple[int, int]]
    """Keys, and the blocks that held them."""


class HostBlocks:
    """Which hashes lie in which host block, the one used longest ago first."""

    def __init__(self, num_blocks: int) -> None:
        """Empty."""
        self.num_blocks = whole("num_cpu_blocks", num_blocks, 1)
        self.blocks: OrderedDict[int, HostBlock] = OrderedDict()
        self._num_allocated = 0
        self._free: list[int] = []

    def lookup(self, key: int) -> bool | None:
        """Whether a hash is there; None while it is being written."""
        block = self.blocks.get(key)
        if block is None:
            return False
        return True if block.ref_cnt >= 0 else None

    def touch(self, keys: Sequence[int]) -> None:
        """They were used, the first of them last."""
        for key in reversed(keys):
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def prepare_load(self, keys: Sequence[int]) -> list[int]:
        """Where they lie; they stay until `complete_load`."""
        for key in keys:
            self.blocks[key].ref_cnt += 1
        return [self.blocks[key].block_id for key in keys]

    def complete_load(self, keys: Sequence[int]) -> None:
        """They have been read."""
        for key in keys:
            self.blocks[key].ref_cnt -= 1

    def prepare_store(self, keys: Sequence[int]) -> StoreOutput | None:
        """Room for those of them that are not there; None, and nothing changed, without room."""
        new = [key for key in keys if key not in self.blocks]
        missing = len(new) - (len(self._free) + self.num_blocks - self._num_allocated)
        evicted: list[tuple[int, int]] = []
        if new and missing > 0:
            kept = set(keys)
            idle = (k for k, b in self.blocks.items() if b.ref_cnt == 0 and k not in kept)
            victims = [key for _, key in zip(range(missing), idle, strict=False)]
            if len(victims) < missing:
                return None
            for key in victims:
                block_id = self.blocks.pop(key).block_id
                self._free.append(block_id)
                evicted.append((key, block_id))
        block_ids = []
        for key in new:
            if self._num_allocated < self.num_blocks:
                block_id, self._num_allocated = self._num_allocated, self._num_allocated + 1
            else:
                block_id = self._free.pop()
            self.blocks[key] = HostBlock(block_id)
            block_ids.append(block_id)
        return StoreOutput(new, block_ids, evicted)

    def complete_store(self, keys: Sequence[int]) -> None:
        """They have been written."""
        for key in keys:
            block = self.blocks.get(key)
            if block is not None and block.ref_cnt < 0:
                block.ref_cnt = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One transfer between the cache and host memory."""

    number: int
    request_id: str
    keys: list[int]
    host_ids: list[int]
    """Of the offloaded blocks; -1: on disk."""
    block_ids: list[int]
    """Of the cache, in sequence order."""
    skipped: int
    """Blocks of the cache at the start of the first offloaded block that are not touched."""
    is_store: bool
    evicted: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class OffloadMetadata(KVConnectorMetadata):
    """The transfers of a step."""

    jobs: list[Job] = field(default_factory=list)


@dataclass(slots=True)
class _State:
    """What is known of a request."""

    request: Request
    keys: list[int] = field(default_factory=list)
    next_stored: int = 0
    """The offloaded block that is stored next."""
    num_local_tokens: int = 0
    jobs: set[int] = field(default_factory=set)


class OffloadingScheduler:
    """The scheduler's half: it decides about hashes and block ids, and moves no bytes."""

    def __init__(
        self, block_size: int, factor: int, host: HostBlocks, enable_caching: bool = True,
        disk: Mapping[int, Any] | None = None,
    ) -> None:  # fmt: skip
        """Nothing is offloaded.

        Args:
            block_size: tokens of a block of the cache.
            factor: such blocks in an offloaded one.
            host: the host's blocks.
            enable_caching: of the cache: then a block that is being loaded is not loaded twice.
            disk: hashes that lie on disk.
        """
        self.block_size, self.factor, self.host = block_size, factor, host
        self.disk = {} if disk is None else disk
        self.jobs: dict[int, Job] = {}
        """Under way, by number."""
        self._states: dict[str, _State] = {}
        self._loading: set[int] | None = set() if enable_caching else None
        self._new: list[Job] = []
        self._next_job = 0

    @property
    def _chunk(self) -> int:
        return self.block_size * self.factor

    def _update_keys(self, state: _State) -> None:
        hashes, factor = state.request.block_hashes, self.factor
        state.keys += hashes[factor * len(state.keys) + factor - 1 :: factor]

    def lookup(self, request: Request, num_computed: int) -> int | None:
        """Tokens that can be loaded behind those computed; None while a hit is on its way."""
        state = self._states.setdefault(request.request_id, _State(request))
        self._update_keys(state)
        state.num_local_tokens = num_computed
        count = self._lookup(state, num_computed)
        self.host.touch(state.keys)
        return count

    def _lookup(self, state: _State, num_computed: int) -> int | None:
        chunk = self._chunk
        most = min(state.request.num_tokens, len(state.keys) * chunk)
        if most - num_computed < chunk:
            return 0
        first, deferred, hits = num_computed // chunk, False, 0
        for key in state.keys[first : -(-most // chunk)]:
            found = self.host.lookup(key)
            deferred = deferred or found is None
            if found is False and key not in self.disk:
                break
            hits += 1
        if deferred:
            return None
        count = min(most, chunk * (first + hits)) - num_computed
        if not hits or count < chunk:
            return 0
        wanted = state.keys[first : -(-(num_computed + count) // chunk)]
        if self._loading and any(key in self._loading for key in wanted):
            return None
        return count

    def allocated(self, request: Request, block_ids: Sequence[int], num_external: int) -> None:
        """A load begins."""
        state = self._states[request.request_id]
        end = state.num_local_tokens + num_external
        first, last = state.num_local_tokens // self.block_size, -(-end // self.block_size)
        keys = state.keys[first // self.factor : -(-end // self._chunk)]
        held = [key for key in keys if key in self.host.blocks]
        places = dict(zip(held, self.host.prepare_load(held), strict=True))
        state.next_stored = -(-end // self._chunk)
        job = Job(
            self._next_job, request.request_id, keys, [places.get(key, -1) for key in keys],
            list(block_ids[first:last]), first % self.factor, False,
        )  # fmt: skip
        self._begin(state, job)
        if self._loading is not None:
            self._loading.update(keys)

    def _begin(self, state: _State, job: Job) -> None:
        self._next_job += 1
        self.jobs[job.number] = job
        state.jobs.add(job.number)
        self._new.append(job)

    def planned(self, plan: SchedulerOutput) -> list[Job]:
        """The jobs of a bound plan: loads that have begun, and stores of what it fills.

        Requests in upstream's order: new ones, running ones, resumed ones.
        """
        new, resumed = set(plan.scheduled_new_req_ids), set(plan.scheduled_resumed_req_ids)
        rank = dict.fromkeys(new, 0) | dict.fromkeys(resumed, 2)
        for request in sorted(plan.scheduled_requests, key=lambda r: rank.get(r.request_id, 1)):
            self._store(request, plan)
        jobs, self._new = self._new, []
        return jobs

    def _store(self, request: Request, plan: SchedulerOutput) -> None:
        state = self._states[request.request_id]
        self._update_keys(state)
        end = plan.num_computed_tokens[request.request_id]
        end = min(end + plan.num_scheduled_tokens[request.request_id], request.num_tokens)
        first, last = state.next_stored, end // self._chunk
        if last <= first:
            state.next_stored = last
            return
        keys = state.keys[first:last]
        output = self.host.prepare_store(keys)
        if output is None:
            return  # tried again at the next step
        if output.keys:
            self.host.touch(state.keys)
            table, size = plan.block_ids[request.request_id], self.factor
            block_ids = [
                block_id
                for index, key in enumerate(keys, first) if key in set(output.keys)
                for block_id in table[index * size : (index + 1) * size]
            ]  # fmt: skip
            job = Job(
                self._next_job, request.request_id, output.keys, output.block_ids, block_ids, 0,
                True, output.evicted,
            )  # fmt: skip
            self._begin(state, job)
        state.next_stored = last

    def completed(self, numbers: Sequence[int]) -> None:
        """Transfers have ended."""
        for number in numbers:
            job = self.jobs.pop(number, None)
            if job is None:
                continue
            if job.is_store:
                self.host.complete_store(job.keys)
            else:
                in_host = zip(job.keys, job.host_ids, strict=True)
                self.host.complete_load([key for key, place in in_host if place >= 0])
                if self._loading:
                    self._loading.difference_update(job.keys)
            state = self._states[job.request_id]
            state.jobs.discard(number)
            if not state.jobs and state.request.is_finished:
                del self._states[job.request_id]

    def finished(self, request: Request) -> None:
        """A request has ended; what of it is under way goes on."""
        state = self._states.get(request.request_id)
        if state is not None and not state.jobs:
            del self._states[request.request_id]

    def reset(self) -> None:
        """The cache is another one: what lies in host memory stays."""
        for job in [*self.jobs.values()]:
            if job.is_store:  # it may be half written
                for key in job.keys:
                    self.host.blocks[key].ref_cnt = 0
        self.completed([*self.jobs])
        self._states, self._new = {}, []


class DiskBlocks:
    """Offloaded blocks in files of a folder of its own, the one used longest ago first."""

    def __init__(self, path: str | None, num_blocks: int) -> None:
        """Empty; the folder is made below `path` and removed by `close`."""
        self.num_blocks = whole("num_disk_blocks", num_blocks, 0)
        self.folder: Path | None = None
        self.files: OrderedDict[int, Path] = OrderedDict()
        if num_blocks:
            if not isinstance(path, str) or not Path(path).is_dir():
                raise ValueError(f"disk_path={path!r}: need a folder, with num_disk_blocks")
            self.folder = Path(tempfile.mkdtemp(prefix="kv-", dir=path))

    def put(self, key: int, kv: np.ndarray) -> None:
        """Keep one block [layers, 2, tokens, heads, head_dim], if there is room for any."""
        if self.folder is None:
            return
        while len(self.files) >= self.num_blocks and key not in self.files:
            self.files.popitem(last=False)[1].unlink(missing_ok=True)
        path = self.folder / f"{key & (1 << 64) - 1:016x}.kv"
        fields = {"shape": kv.shape, "dtype": kv.dtype.name}
        path.write_bytes(encode(Message(Kind.LAYER, fields, kv.tobytes())))
        self.files[key] = path

    def get(self, key: int, like: np.ndarray) -> np.ndarray:
        """One block, of the shape of `like`. What cannot be read is forgotten, or it would be asked
        for again and again. Raises OSError, WireError, KeyError."""
        path = self.files.pop(key)
        kv = self._read(path, like)
        self.files[key] = path
        return kv

    def _read(self, path: Path, like: np.ndarray) -> np.ndarray:
        data = path.read_bytes()
        message = decode(data[:HEADER_BYTES], data[HEADER_BYTES:])
        if tuple(message.fields.get("shape", ())) != like.shape:
            raise WireError(
                f"{path.name}: a block of shape {message.fields.get('shape')}: need {like.shape}"
            )
        return np.frombuffer(message.data, like.dtype).reshape(like.shape)

    def close(self) -> None:
        """Remove the folder."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.files.clear()


class OffloadingConnector(KVConnectorBase_V1):
    """Both halves; the worker's copies when a step has run."""

    def __init__(
        self, config: KVTransferConfig, role: KVConnectorRole, block_size: int,
        enable_caching: bool = True,
    ) -> None:  # fmt: skip
        """One half. Raises ValueError by what `kv_connector_extra_config` holds."""
        super().__init__(config, role)
        if not enable_caching:
            raise ValueError("enable_prefix_caching=False: need True with OffloadingConnector")
        extra = config.extra(EXTRA)
        chunk = block_size if extra["block_size"] is None else extra["block_size"]
        whole("block_size", chunk, 1)
        if chunk % block_size:
            raise ValueError(f"block_size={chunk}: need a multiple of the cache's {block_size}")
        self.factor = chunk // block_size
        self.disk = DiskBlocks(None, 0)
        self.scheduler = OffloadingScheduler(
            block_size, self.factor, HostBlocks(extra["num_cpu_blocks"])
        )
        self._completed: list[int] = []
        self._received: list[str] = []
        self._invalid: set[int] = set()
        self._errors: dict[str, str] = {}
        if role is KVConnectorRole.WORKER:
            self.disk = DiskBlocks(extra["disk_path"], extra["num_disk_blocks"])

    # ------------------------------------------------------------------ the scheduler's half

    def set_xfer_handshake_metadata(self, metadata: Mapping[str, Any]) -> None:
        """What lies on disk is known to both halves."""
        self.scheduler.disk = metadata["disk"]

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

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadMetadata:
        return OffloadMetadata(self.scheduler.planned(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.completed(connector_output.completed_jobs)

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request)
        return False, None

    def reset(self) -> None:
        self.scheduler.reset()
        self._completed, self._received = [], []
        self._invalid, self._errors = set(), {}

    # ------------------------------------------------------------------ the worker's half

    def register_kv_caches(self, kv_caches: Mapping[str, np.ndarray]) -> None:
        self._caches = list(kv_caches.values())
        _, _, size, heads, head_dim = self._caches[0].shape
        shape = len(self._caches), 2, self.factor * size, heads, head_dim
        num_blocks = self.scheduler.host.num_blocks
        self._host = np.zeros((num_blocks, *shape), self._caches[0].dtype)

    def get_handshake_metadata(self) -> Mapping[str, Any]:
        return {"disk": self.disk.files}

    def _jobs(self, is_store: bool) -> Iterator[Job]:
        meta = self._connector_metadata
        assert isinstance(meta, OffloadMetadata)
        return (job for job in meta.jobs if job.is_store is is_store)

    def start_load_kv(self, forward_context: SchedulerOutput) -> None:
        for job in self._jobs(is_store=False):
            self._load(job)
        for job in self._jobs(is_store=True):  # evicted blocks leave before they are overwritten
            for key, host_id in job.evicted:
                self.disk.put(key, self._host[host_id])

    def _load(self, job: Job) -> None:
        size = self._caches[0].shape[2]
        targets = [-1] * job.skipped + list(job.block_ids)
        for index, (key, host_id) in enumerate(zip(job.keys, job.host_ids, strict=True)):
            held = targets[index * self.factor : (index + 1) * self.factor]
            try:
                kv = self._host[host_id] if host_id >= 0 else self.disk.get(key, self._host[0])
            except (OSError, KeyError, WireError) as error:
                self._invalid.update(block_id for block_id in held if block_id >= 0)
                self._errors[job.request_id] = f"its KV could not be loaded: {error}"
                continue
            for part, block_id in enumerate(held):
                if block_id >= 0:
                    for layer, cache in enumerate(self._caches):
                        cache[:, block_id] = kv[layer, :, part * size : (part + 1) * size]
        self._received.append(job.request_id)
        self._completed.append(job.number)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request whose load is under way is in no plan."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: np.ndarray, attn_metadata: ForwardBatch
    ) -> None:
        """All layers are copied when the last one has run."""

    def wait_for_save(self) -> None:
        for job in self._jobs(is_store=True):
            for index, host_id in enumerate(job.host_ids):
                for part in range(self.factor):
                    block_id = job.block_ids[index * self.factor + part]
                    size = self._caches[0].shape[2]
                    for layer, cache in enumerate(self._caches):
                        self._host[host_id, layer, :, part * size : (part + 1) * size] = cache[
                            :, block_id
                        ]
            self._completed.append(job.number)

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        output = KVConnectorOutput(
            self._received, invalid_block_ids=self._invalid, errors=self._errors,
            completed_jobs=self._completed,
        )  # fmt: skip
        self._received, self._completed = [], []
        self._invalid, self._errors = set(), {}
        return output

    def shutdown(self) -> None:
        self.disk.close()

"""Upstream's interface over mini's parts, so that upstream's tests can drive them.

Promises: nothing is decided here. Every class keeps a part of `mini_vllm` (`.mini`) and translates
names, argument lists and the moment at which counters move; what it returns is what mini did.
Mirrors `vllm/v1/core/block_pool.py:130` `BlockPool`, `vllm/v1/core/kv_cache_manager.py:110`
`KVCacheManager`, `vllm/v1/core/sched/scheduler.py:64` `Scheduler` and `vllm/v1/request.py:59`
`Request` as far as the tests in scope look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.core.sched.output import SchedulerOutput as UpstreamPlan
from vllm.v1.kv_cache_interface import KVCacheSpecKind

from mini_vllm import async_scheduler, block_pool, kv_cache, plan, request, scheduler
from mini_vllm.block_pool import ROOT_HASH, KVCacheBlock, KVEvent
from mini_vllm.config import SamplingParams, SchedulerConfig
from mini_vllm.spec_decode.metrics import SpecDecodingStats
from mini_vllm.structured_output.gate import GrammarGate

NONE_HASH = ROOT_HASH
RequestStatus = SimpleNamespace(
    **request.RequestStatus.__members__,
    FINISHED_LENGTH_CAPPED=request.RequestStatus.FINISHED_LENGTH,
)

# The links of the free queue by upstream's names.
for _link in ("next_free", "prev_free"):
    setattr(KVCacheBlock, f"{_link}_block", KVCacheBlock.__dict__[_link])


# ---------------------------------------------------------------------- hashes


def hash_of(key: tuple[Any, Sequence[int], tuple[Any, ...] | None]) -> int:
    """What stands for `sha256` in the tests: mini has one hash function, Python's own.

    Upstream hashes the triple (parent, tokens, extra keys or None). Mini hashes a pair where there
    are no extra keys, and puts the keys of a request (a salt) into the parent of its first block.
    """
    parent, token_ids, extra_keys = key
    if parent == NONE_HASH and extra_keys:
        parent, extra_keys = hash((parent, extra_keys)), None
    return hash((parent, token_ids, extra_keys) if extra_keys else (parent, token_ids))


def hash_block_tokens(
    hash_function: Callable[..., int],
    parent_block_hash: int | None,
    token_ids: Sequence[int],
    extra_keys: tuple[Any, ...] | None = None,
) -> int:
    """As `vllm/v1/core/kv_cache_utils.py:541` `hash_block_tokens`, with mini's function."""
    parent = ROOT_HASH if parent_block_hash is None else parent_block_hash
    return block_pool.hash_block_tokens(parent, token_ids, extra_keys or ())


class BlockHasher:
    """Mini's `KVCacheManager` hashes when it looks up; this lets it hash when upstream does."""

    def __init__(self, block_size: int, hash_function: Callable[..., int] = hash_of) -> None:
        self.block_size = block_size

    def __call__(self, made: Request) -> None:
        kv_cache.KVCacheManager._extend_hashes(self, made)  # type: ignore[arg-type]


def generate_block_hash_extra_keys(
    made: Request, start: int, end: int, mm_index: int
) -> tuple[tuple[Any, ...] | None, int]:
    """The extra keys that mini hashes the block of tokens `start` to `end` with."""
    of_request: list[tuple[Any, ...]] = []
    of_blocks: list[tuple[Any, ...]] = []

    def root_hash(keys: tuple[Any, ...]) -> int:
        of_request.append(keys)
        return NONE_HASH

    def hash_block(parent: int, token_ids: Sequence[int], keys: tuple[Any, ...] = ()) -> int:
        of_blocks.append(keys)
        return NONE_HASH

    kept, made.block_hashes = made.block_hashes, []
    with mock.patch.multiple(kv_cache, root_hash=root_hash, hash_block_tokens=hash_block):
        BlockHasher(end - start)(made)
    made.block_hashes = kept
    keys = of_blocks[start // (end - start)]
    return (keys if start else of_request[0] + keys) or None, mm_index


# ---------------------------------------------------------------------- requests


class Truth(int):
    """A truth value that may also be called: mini's `is_finished` is a property."""

    def __call__(self) -> bool:
        return bool(self)


_ALL_TOKEN_IDS: Any = request.Request.__dict__["all_token_ids"]


class Request(request.Request):
    """A mini request made from upstream's arguments. Pictures are left out of what it computes."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: Any,
        pooling_params: None = None,
        arrival_time: float = 0.0,
        mm_features: Sequence[Any] | None = None,
        priority: int = 0,
        lora_request: None = None,
        cache_salt: str | None = None,
        block_hasher: BlockHasher | None = None,
        prompt_embeds: None = None,
    ) -> None:
        super().__init__(
            request_id,
            prompt_token_ids,
            SamplingParams(
                max_tokens=sampling_params.max_tokens,
                ignore_eos=sampling_params.ignore_eos,
                min_tokens=sampling_params.min_tokens,
                stop_token_ids=sampling_params.stop_token_ids,
                skip_reading_prefix_cache=sampling_params.skip_reading_prefix_cache,
            ),
            eos_token_id=sampling_params.eos_token_id,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
        )
        if sampling_params.structured_outputs is not None:
            self.waits_for = "grammar"
        self.mm_features = list(mm_features or ())
        self.block_hasher = block_hasher
        self.update_block_hashes()

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt; a test may write another one."""
        return self.all_token_ids[: self.num_prompt_tokens]

    @prompt_token_ids.setter
    def prompt_token_ids(self, token_ids: Sequence[int]) -> None:
        self.num_prompt_tokens = len(token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        """Every token; upstream's is a view that a test replaces with the list behind it."""
        return _ALL_TOKEN_IDS.__get__(self)

    @all_token_ids.setter
    def all_token_ids(self, token_ids: Sequence[int]) -> None:
        _ALL_TOKEN_IDS.__set__(self, list(token_ids))
        self.num_tokens = len(token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens + len(self.spec_token_ids)

    def update_block_hashes(self) -> None:
        if self.block_hasher is not None:
            self.block_hasher(self)

    @property
    def is_finished(self) -> Truth:  # type: ignore[override]
        return Truth(request.Request.is_finished.fget(self))  # type: ignore[attr-defined]

    def append_output_token_ids(self, token_ids: int | Sequence[int]) -> None:
        for token in [token_ids] if isinstance(token_ids, int) else token_ids:
            self.append_output_token(token)
        self.update_block_hashes()


def check_stop(made: Request, max_model_len: int) -> bool:
    """As `vllm/v1/core/sched/utils.py:94` `check_stop`."""
    return made.maybe_finish(max_model_len)


# ---------------------------------------------------------------------- blocks


class FreeKVCacheBlockQueue(block_pool.FreeKVCacheBlockQueue):
    """Mini's queue with upstream's names for several blocks at once and for the two ends."""

    @property
    def fake_free_list_head(self) -> KVCacheBlock:
        return self._head

    @property
    def fake_free_list_tail(self) -> KVCacheBlock:
        return self._tail

    def popleft(self) -> KVCacheBlock:
        try:
            return super().popleft()
        except ValueError as error:  # the same refusal in upstream's words
            raise ValueError("No free blocks available") from error

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        return [self.popleft() for _ in range(n)]

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            self.append(block)


class BlockHashToBlockMap:
    """The index of a mini pool: `vllm/v1/core/block_pool.py:34` `BlockHashToBlockMap`."""

    def __init__(self, pool: block_pool.BlockPool | None = None) -> None:
        self.mini = pool or block_pool.BlockPool(2)
        self._several: set[Any] = set()  # keys that have had two blocks at once

    def __len__(self) -> int:
        return len(self.mini.cached_block_hash_to_block)

    def get_one_block(self, key: Any) -> KVCacheBlock | None:
        return self.mini.get_cached_block(key)

    def insert(self, key: Any, block: KVCacheBlock) -> None:
        if block.block_hash is None:
            self.mini.cache_full_blocks([block], [key])
        else:  # the caller has put the hash on the block itself
            self.mini.cached_block_hash_to_block.setdefault(key, {})[block.block_id] = block
        if len(self.mini.cached_block_hash_to_block[key]) > 1:
            self._several.add(key)

    def pop(self, key: Any, block_id: int) -> KVCacheBlock | None:
        block = self.mini.cached_block_hash_to_block.get(key, {}).get(block_id)
        if block is not None:
            self.mini.evict(block)
        return block

    @property
    def _cache(self) -> dict[Any, Any]:
        """Upstream keeps a lone block bare until a second one has come."""
        return {
            key: holders if key in self._several else next(iter(holders.values()))
            for key, holders in self.mini.cached_block_hash_to_block.items()
        }


class BlockPool:
    """A mini pool, and the events it reports as upstream queues them."""

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        spec_kind: str | None = None,
    ) -> None:
        self.mini = block_pool.BlockPool(num_gpu_blocks, enable_caching)
        self.num_gpu_blocks = num_gpu_blocks
        self.block_size, self.spec_kind = hash_block_size, spec_kind
        self.mini.free_queue.__class__ = FreeKVCacheBlockQueue
        self.free_block_queue: Any = self.mini.free_queue
        self.blocks, self.null_block = self.mini.blocks, self.mini.null_block
        self.get_new_blocks = self.mini.get_new_blocks
        self.get_num_free_blocks = self.mini.get_num_free_blocks
        self.cached_block_hash_to_block = BlockHashToBlockMap(self.mini)
        self._maybe_evict_cached_block = self.mini.evict
        self.kv_event_queue: list[Any] = []
        if enable_kv_cache_events:
            self.mini.on_event = lambda event: self.kv_event_queue.append(self._in_words(event))

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """Upstream's pool finds hashes and tokens in the request; in mini its caller does."""
        kv = kv_cache.KVCacheManager(
            self.num_gpu_blocks, block_size, block_pool=lambda *_: self.mini
        )
        kv.req_to_blocks[request.request_id] = list(blocks)
        kv._num_cached[request.request_id] = num_cached_blocks
        kv.cache_blocks(request, num_full_blocks * block_size)

    def take_events(self) -> list[Any]:
        events, self.kv_event_queue[:] = self.kv_event_queue[:], []
        return events

    def _in_words(self, event: KVEvent) -> Any:
        hashes = list(event.block_hashes)
        if event.kind == "cleared":
            return AllBlocksCleared()
        if event.kind == "removed":
            return BlockRemoved(block_hashes=hashes, medium=MEDIUM_GPU, group_idx=0)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=event.parent_block_hash,
            token_ids=list(event.token_ids),
            block_size=self.block_size,
            lora_id=None,
            medium=MEDIUM_GPU,
            lora_name=None,
            group_idx=0,
            kv_cache_spec_kind=self.spec_kind,
        )


class KVCacheBlocks:
    """Blocks of mini's one group, in upstream's tuple of groups."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.blocks = (list(blocks),)

    def get_block_ids(self) -> tuple[list[int]]:
        return ([block.block_id for block in self.blocks[0]],)


class KVCacheManager:
    """A mini manager behind upstream's argument lists."""

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        hash_block_size: int,
        enable_caching: bool = True,
        log_stats: bool = True,
        enable_kv_cache_events: bool = False,
        use_eagle: bool = False,
    ) -> None:
        (group,) = kv_cache_config.kv_cache_groups
        kind = KVCacheSpecKind.FULL_ATTENTION.value
        self.block_pool = BlockPool(
            kv_cache_config.num_blocks,
            enable_caching,
            hash_block_size,
            enable_kv_cache_events,
            kind,
        )
        self.mini = kv_cache.KVCacheManager(
            kv_cache_config.num_blocks,
            group.kv_cache_spec.block_size,
            enable_caching,
            block_pool=lambda *_: self.block_pool.mini,
        )
        self.mini.max_model_len, self.mini.use_eagle = max_model_len, use_eagle
        self.log_stats = log_stats
        tables = SimpleNamespace(
            req_to_blocks=self.mini.req_to_blocks, num_cached_block=self.mini._num_cached
        )
        self.coordinator = SimpleNamespace(single_type_managers=(tables,))
        self.free = self.mini.free
        self.reset_prefix_cache = self.mini.reset_prefix_cache
        self.take_events = self.block_pool.take_events

    @property
    def prefix_cache_stats(self) -> kv_cache.PrefixCacheStats | None:
        """Mini always counts."""
        return self.mini.stats if self.log_stats else None

    def get_computed_blocks(self, made: Request) -> tuple[KVCacheBlocks, int]:
        blocks, num_tokens = self.mini.get_computed_blocks(made)
        return KVCacheBlocks(blocks), num_tokens

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
    ) -> KVCacheBlocks | None:
        """Mini's caller has put the hits into the counter before; upstream's does it afterwards."""
        hits = new_computed_blocks.blocks[0] if new_computed_blocks else []
        before = request.num_computed_tokens
        request.num_computed_tokens += num_new_computed_tokens
        try:
            blocks = self.mini.allocate_slots(request, num_new_tokens, hits, num_lookahead_tokens)
        finally:
            request.num_computed_tokens = before
        return None if blocks is None else KVCacheBlocks(blocks)


# ---------------------------------------------------------------------- the scheduler


class Scheduler:
    """A mini scheduler whose counters move in `schedule`, built from upstream's configuration."""

    part: type[scheduler.Scheduler] = scheduler.Scheduler

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        structured_output_manager: Any,
        block_size: int,
        hash_block_size: int | None = None,
        log_stats: bool = False,
    ) -> None:
        self.vllm_config = vllm_config
        asked, drafts = vllm_config.scheduler_config, vllm_config.speculative_config
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config,
            vllm_config.model_config.max_model_len,
            block_size,
            vllm_config.cache_config.enable_prefix_caching,
            log_stats,
        )
        config = SchedulerConfig(
            max_num_seqs=asked.max_num_seqs,
            max_num_batched_tokens=asked.max_num_batched_tokens,
            long_prefill_token_threshold=asked.long_prefill_token_threshold,
            max_model_len=vllm_config.model_config.max_model_len,
            policy=asked.policy,
            enable_chunked_prefill=asked.enable_chunked_prefill,
            async_scheduling=asked.async_scheduling,
            num_speculative_tokens=drafts.num_speculative_tokens if drafts else 0,
        )
        self.mini = self.part(self.kv_cache_manager.mini, config, [GrammarGate()])
        self.add_request = self.mini.add_request
        self.reset_prefix_cache = self.mini.reset_prefix_cache
        self.encoder_cache_manager = SimpleNamespace(freed=(), cached=())  # mini has none
        self.plans: dict[int, tuple[UpstreamPlan, plan.SchedulerOutput]] = {}

    requests = property(lambda self: self.mini.requests)
    running = property(lambda self: self.mini.running)
    waiting = property(lambda self: self.mini.waiting)
    skipped_waiting = property(lambda self: self.mini.skipped)
    finished_req_ids = property(lambda self: self.mini._finished_req_ids)

    def get_num_unfinished_requests(self) -> int:
        return len(self.waiting) + len(self.skipped_waiting) + len(self.running)

    def finish_requests(self, request_id: str, status: request.RequestStatus) -> None:
        """Mini ends a request from outside in one way, by an abort."""
        ended = self.mini.abort_request(request_id)
        if ended is not None:
            ended.status = status

    def schedule(self) -> UpstreamPlan:
        made = self.mini.schedule()
        output = _plan_in_words(made, self.kv_cache_manager.mini)
        self._move(made, 1)
        self.plans[id(output)] = output, made
        return output

    def update_draft_token_ids(self, drafts: Any) -> None:
        made = zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        self.mini.update_draft_token_ids(dict(made))

    def update_from_output(self, output: UpstreamPlan, sampled: Any) -> dict[int, Any]:
        """Mini's update; what a test reads of upstream's answer are the counters of drafts."""
        _, made = self.plans.pop(id(output), (None, None))
        if made is None:  # a plan written by the test
            counts = output.num_scheduled_tokens
            made = plan.SchedulerOutput(
                num_scheduled_tokens=counts,
                scheduled_requests=[self.requests[request_id] for request_id in counts],
                spec_token_ids=output.scheduled_spec_decode_tokens,
            )
        tokens: Mapping[str, list[int]] = dict(
            zip(sampled.req_ids, sampled.sampled_token_ids, strict=True)
        )
        self._move(made, -1)
        self.mini.update_from_output(made, tokens)
        counted = SpecDecodingStats(self.mini.config.num_speculative_tokens)
        for request_id, drafts in made.spec_token_ids.items():
            if sampled_tokens := tokens.get(request_id):
                counted.observe_draft(len(drafts), len(sampled_tokens) - 1)
        stats = SimpleNamespace(spec_decoding_stats=counted if counted.num_drafts else None)
        return {0: SimpleNamespace(scheduler_stats=stats)}

    def _move(self, made: plan.SchedulerOutput, sign: int) -> None:
        """Mini's plain scheduler advances in `update_from_output`; here the step is in flight."""
        for each in made.scheduled_requests:
            each.num_computed_tokens += sign * made.num_scheduled_tokens[each.request_id]


class AsyncScheduler(Scheduler):
    """The same over mini's `AsyncScheduler`, whose counters move in `schedule` by themselves."""

    part = async_scheduler.AsyncScheduler

    def _move(self, made: plan.SchedulerOutput, sign: int) -> None:
        pass


def _plan_in_words(made: plan.SchedulerOutput, kv: kv_cache.KVCacheManager) -> UpstreamPlan:
    """A mini plan as upstream's; called before a plain scheduler's counters move."""
    new, resumed = set(made.scheduled_new_req_ids), set(made.scheduled_resumed_req_ids)
    by_id = {each.request_id: each for each in made.scheduled_requests}
    again = [each for request_id, each in by_id.items() if request_id not in new]
    start = made.num_computed_tokens or {i: r.num_computed_tokens for i, r in by_id.items()}
    return UpstreamPlan(
        scheduled_new_reqs=[
            NewRequestData(
                req_id=request_id,
                prompt_token_ids=by_id[request_id].prompt_token_ids,
                mm_features=by_id[request_id].mm_features,  # type: ignore[attr-defined]
                sampling_params=None,
                pooling_params=None,
                block_ids=(kv.get_block_ids(request_id),),
                num_computed_tokens=start[request_id],
                lora_request=None,
            )
            for request_id in made.scheduled_new_req_ids
        ],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[each.request_id for each in again],
            resumed_req_ids=resumed,
            new_token_ids=[],
            all_token_ids={i: by_id[i].all_token_ids[:] for i in resumed},
            new_block_ids=[None] * len(again),  # mini's plan carries whole tables
            num_computed_tokens=[start[each.request_id] for each in again],
            num_output_tokens=[each.num_output_tokens for each in again],
        ),
        num_scheduled_tokens=made.num_scheduled_tokens,
        total_num_scheduled_tokens=made.total_num_scheduled_tokens,
        scheduled_spec_decode_tokens={i: list(t) for i, t in made.spec_token_ids.items()},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[],
        finished_req_ids=made.finished_req_ids,
        free_encoder_mm_hashes=[],
        preempted_req_ids=set(made.preempted_req_ids),
    )

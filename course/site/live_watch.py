"""What a step of the engine did, call by call: the block tables with a note of every call.

Promises: a watched manager answers as the plain one and changes nothing beside it; what is noted
was true at the moment of the call. Mirrors `vllm/v1/core/kv_cache_manager.py:110` `KVCacheManager`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mini_vllm.block_pool import KVCacheBlock
from mini_vllm.engine import LLMEngine
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the manager; what it does not concern is 0 or empty."""

    kind: str
    """"lookup" of cached blocks, "fits" (the whole sequence), "allocate", or "free"."""
    request_id: str
    ok: bool = True
    num_new: int = 0
    """Tokens to be computed."""
    num_tokens: int = 0
    """Tokens that the request has."""
    num_computed: int = 0
    needed: int = 0
    """Free blocks it takes, hits that are in the queue included."""
    free: int = 0
    """Free blocks before the call."""
    blocks: tuple[int, ...] = ()
    """Ids found ("lookup"), newly taken ("allocate") or given back ("free")."""
    revived: int = 0
    """Of the hits at hand, how many are in the free queue."""
    lost: tuple[int, ...] = ()
    """Of the blocks taken, those whose cached content is overwritten."""


class WatchedKV(KVCacheManager):
    """The engine's own manager; `calls` grows with every call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `KVCacheManager`."""
        super().__init__(*args, **kwargs)
        self.calls: list[Call] = []

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """As the plain one."""
        blocks, num_hits = super().get_computed_blocks(request)
        ids = tuple(block.block_id for block in blocks)
        self._note("lookup", request, (), blocks=ids, ok=bool(blocks))
        return blocks, num_hits

    def full_sequence_fits(
        self, request: Request, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> bool:
        """As the plain one."""
        needed = self.get_num_blocks_to_allocate(
            request.request_id, request.num_tokens, new_computed_blocks
        )
        fits = super().full_sequence_fits(request, new_computed_blocks)
        self._note("fits", request, new_computed_blocks, needed=needed, ok=fits)
        return fits

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock] | None = None,
        num_lookahead_tokens: int = 0,
        *rest: Any,
    ) -> list[KVCacheBlock] | None:
        """As the plain one."""
        hits = new_computed_blocks or ()
        pool = self.block_pool
        needed = self.get_num_blocks_to_allocate(
            request.request_id, request.num_computed_tokens + num_new_tokens, hits
        )
        before = pool.get_num_free_blocks()
        cached = {
            b.block_id for b in pool.free_queue.get_all_free_blocks() if b.block_hash is not None
        }
        revived = sum(block.ref_cnt == 0 for block in hits)
        made = super().allocate_slots(
            request, num_new_tokens, new_computed_blocks, num_lookahead_tokens, *rest
        )
        new = tuple(block.block_id for block in made or ())
        self.calls.append(
            Call(
                "allocate", request.request_id, made is not None, num_new_tokens,
                request.num_tokens, request.num_computed_tokens, needed, before, new, revived,
                tuple(block_id for block_id in new if block_id in cached),
            )
        )  # fmt: skip
        return made

    def free(self, request: Request) -> None:
        """As the plain one."""
        ids = tuple(self.get_block_ids(request.request_id))
        self._note("free", request, (), blocks=ids)
        super().free(request)

    def _note(
        self, kind: str, request: Request, hits: Sequence[KVCacheBlock], **known: Any
    ) -> None:
        self.calls.append(
            Call(
                kind,
                request.request_id,
                num_tokens=request.num_tokens,
                num_computed=request.num_computed_tokens,
                free=self.block_pool.get_num_free_blocks(),
                revived=sum(block.ref_cnt == 0 for block in hits),
                **known,
            )
        )


@dataclass(frozen=True, slots=True)
class Pool:
    """The block pool at one moment: by block id, the null block 0 included."""

    refs: tuple[int, ...]
    hashes: tuple[int | None, ...]
    free: tuple[int, ...]
    """The queue, next out first."""
    tables: dict[str, list[int]]

    @classmethod
    def of(cls, kv: KVCacheManager) -> Pool:
        """As it is now."""
        blocks = kv.block_pool.blocks
        queue = kv.block_pool.free_queue.get_all_free_blocks()
        return cls(
            tuple(block.ref_cnt for block in blocks),
            tuple(block.block_hash for block in blocks),
            tuple(block.block_id for block in queue),
            {name: kv.get_block_ids(name) for name in kv.req_to_blocks},
        )

    def shown(self, names: dict[int, str], step: Step | None = None) -> dict[str, Any]:
        """As JSON types, hashes by the names `names` gives them in order of appearance.

        `hits`, `fresh` and `lost` are the blocks adopted, newly given and overwritten in `step`.
        """
        for value in self.hashes:
            if value is not None:
                names.setdefault(value, f"h{len(names) + 1}")
        calls = step.calls if step else ()
        given = [call for call in calls if call.kind == "allocate" and call.ok]
        admitted = step.hits if step else {}
        return {
            "refs": list(self.refs),
            "hashes": ["" if value is None else names[value] for value in self.hashes],
            "free": list(self.free),
            "tables": self.tables,
            "hits": sorted({block for ids in admitted.values() for block in ids}),
            "fresh": sorted({block for call in given for block in call.blocks}),
            "lost": sorted({block for call in given for block in call.lost}),
        }


@dataclass(frozen=True, slots=True)
class Step:
    """What one `schedule()` did: its calls in order, and the pool after it."""

    calls: tuple[Call, ...]
    pool: Pool
    hits: dict[str, tuple[int, ...]]
    """Blocks adopted by each request admitted in the step, if any."""
    known: frozenset[str]
    """The live requests."""
    budget: int
    slots: int
    running: tuple[str, ...]
    waiting: tuple[str, ...]

    @classmethod
    def of(cls, kv: WatchedKV, engine: LLMEngine, plan: SchedulerOutput) -> Step:
        """Right after `schedule()`; `engine` has made `plan`."""
        calls = tuple(kv.calls)
        kv.calls.clear()
        found = {call.request_id: call.blocks for call in calls if call.kind == "lookup"}
        scheduler = engine.scheduler
        return cls(
            calls,
            Pool.of(kv),
            {name: found[name] for name in plan.num_cached_tokens if found.get(name)},
            frozenset(engine.requests),
            scheduler.config.max_num_batched_tokens,
            scheduler.max_num_seqs,
            tuple(request.request_id for request in scheduler.running),
            tuple(request.request_id for request in scheduler.waiting),
        )

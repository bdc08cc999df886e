"""Deliberate damage is noticed: each test breaks one thing and shows which check sees it.

The checks are K1 (shadow KV: does every position read back its own prefix) and E1 (the shipped
model: are the logits of every output those of a dense pass). The first tests show that both accept
the same workloads undamaged.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from mini_vllm import EngineParts
from mini_vllm.attention import paged_attention_reference
from mini_vllm.batch import ForwardBatch
from mini_vllm.block_pool import BlockPool
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.model_runner import ModelRunner
from mini_vllm.models.tests.test_shipped_model import MAX_TOKENS, TEXTS, check_e1, expected, model
from mini_vllm.models.toy import ToyModel
from mini_vllm.models.transformer import Transformer
from mini_vllm.scheduler import Scheduler
from mini_vllm.tests.support import Scenario, ScenarioRequest
from mini_vllm.tests.watching import drive_with_shadow
from mini_vllm.tokenizer import ByteTokenizer


def request(
    step: int, text: bytes, max_tokens: int = MAX_TOKENS, priority: int = 0
) -> ScenarioRequest:
    return ScenarioRequest(step, tuple(text), max_tokens, priority, ignore_eos=True)


CROWDED = Scenario(
    (
        request(0, TEXTS[0][:12]),
        request(0, TEXTS[0][:12] + b"!"),
        request(2, TEXTS[0][:9]),
    ),
    block_size=2,
    spare_blocks=6,
    max_num_seqs=3,
    spare_budget=8,
    long_prefill_token_threshold=5,
)
"""Chunks, hits, preemptions and resumed requests."""

RETURNING = Scenario(
    (request(0, TEXTS[0][:16], 2), request(4, TEXTS[2][:16], 2), request(8, TEXTS[0][:16], 2)),
    block_size=4,
    max_num_seqs=2,
    spare_budget=30,
)
"""A prompt, another that reuses its blocks, then the first again."""

REARRANGED = Scenario(
    (request(0, b"The KV cache is "), request(2, b"ache is The KV c?")),
    block_size=8,
    spare_blocks=4,
    max_num_seqs=2,
    spare_budget=30,
)
"""Two prompts of the same two blocks in the other order."""

WITHDRAWN = Scenario(
    (request(0, TEXTS[2][:8], 3), request(0, TEXTS[0][:1], 4)),
    block_size=1,
    spare_blocks=1,
    max_num_seqs=3,
    long_prefill_token_threshold=2,
    policy="priority",
)
"""A victim leaves a step that had just indexed its blocks, and later looks them up again."""

SCENARIOS = (CROWDED, RETURNING, REARRANGED)


@dataclasses.dataclass(frozen=True)
class Damage:
    """One broken thing: engine parts, a patch of a name, or another attention."""

    parts: EngineParts = dataclasses.field(default_factory=EngineParts)
    patch: tuple[object, str, object] | None = None
    attention: Callable[..., np.ndarray] | None = None


def see_by_k1(scenario: Scenario, damage: Damage) -> None:
    engine = scenario.engine(ToyModel(257), ByteTokenizer(), damage.parts)
    drive_with_shadow(scenario, engine)


def see_by_e1(scenario: Scenario, damage: Damage) -> None:
    broken: Transformer = copy.copy(model())
    if damage.attention is not None:
        broken.attention = damage.attention
    check_e1(scenario, scenario.engine(broken, ByteTokenizer(), damage.parts))


def is_noticed(see: Callable[[Scenario, Damage], None], damage: Damage) -> bool:
    """Whether the check fails on at least one of the workloads."""
    for scenario in SCENARIOS:  # undamaged, and kept for all cases
        for arrival in scenario.arrivals:
            expected(arrival.prompt)
    with pytest.MonkeyPatch.context() as patch:
        if damage.patch is not None:
            patch.setattr(*damage.patch)
        for scenario in SCENARIOS:
            try:
                see(scenario, damage)
            except AssertionError:
                return True
    return False


# ------------------------------------------------------------------ the damages


def changed_batch(change: Callable[[ForwardBatch], dict]) -> Damage:
    """Damage to the batch after it was prepared; `change` returns the fields to replace."""
    prepare = ModelRunner.prepare_batch

    def damaged(self, plan):
        batch = prepare(self, plan)
        return dataclasses.replace(batch, **change(batch))

    return Damage(patch=(ModelRunner, "prepare_batch", damaged))


def swapped_table(batch: ForwardBatch) -> dict:
    tables = batch.block_tables.copy()
    if tables.shape[1] >= 2:
        tables[:, [0, 1]] = tables[:, [1, 0]]
    return {"block_tables": tables}


def neighbours_table(batch: ForwardBatch) -> dict:
    return {"block_tables": np.roll(batch.block_tables, 1, axis=0)}


def positions_from_zero(batch: ForwardBatch) -> dict:
    counts = np.diff(batch.query_start_loc)
    return {"positions": np.concatenate([np.arange(n) for n in counts])}


class NeverEvicts(BlockPool):
    def evict(self, block):
        return False


class KeepsRevivedBlocksQueued(BlockPool):
    def touch(self, blocks):
        for block in blocks:
            was_free = block.ref_cnt == 0
            super().touch([block])
            if was_free:
                block.ref_cnt -= 1
                self.free_queue.append(block)


class FindsAnyBlock(BlockPool):
    """Answers a miss with some cached block: a stale one."""

    def get_cached_block(self, block_hash):
        found = super().get_cached_block(block_hash)
        held = [b for b in self.blocks if b.block_hash is not None]
        return found or (held[0] if held else None)


class CachesPartialBlocks(KVCacheManager):
    """Indexes a block as soon as its tokens are known, before they are computed."""

    def allocate_slots(self, request, num_new_tokens, new_computed_blocks=None):
        new = super().allocate_slots(request, num_new_tokens, new_computed_blocks)
        if new is not None and self.enable_caching:
            table = self.get_blocks(request.request_id)
            num_known = min(len(table), request.num_tokens // self.block_size)
            self.cache_blocks(request, num_known * self.block_size)
        return new


class FreesTooEarly(KVCacheManager):
    """Gives blocks back while the request still runs: another request writes into them."""

    def allocate_slots(self, request, num_new_tokens, new_computed_blocks=None):
        new = super().allocate_slots(request, num_new_tokens, new_computed_blocks)
        for block in new or ():
            block.ref_cnt -= 1
            self.block_pool.free_queue.append(block)
        return new


class KeepsTheCounter(Scheduler):
    """A preempted request believes its tokens are still computed."""

    def _schedule_waiting(self, output, budget):
        for request in self.waiting:
            request.num_computed_tokens = 0
        super()._schedule_waiting(output, budget)
        for request in self.running:
            if request.num_preemptions and request.num_output_tokens:
                missing = request.num_tokens - 1 - request.num_computed_tokens
                if request.request_id in output.scheduled_resumed_req_ids and missing > 0:
                    request.num_computed_tokens += missing
                    output.num_scheduled_tokens[request.request_id] = 1


def seen_one_too_many(query, layer_cache, batch, scale):
    """The causal mask off by one: a query sees the next position of its own chunk."""
    last = np.repeat(batch.seq_lens - 1, np.diff(batch.query_start_loc))
    shifted = dataclasses.replace(batch, positions=np.minimum(batch.positions + 1, last))
    return paged_attention_reference(query, layer_cache, shifted, scale)


def seen_one_too_few(query, layer_cache, batch, scale):
    """The other off by one: a query does not see its own position."""
    shifted = dataclasses.replace(batch, positions=np.maximum(batch.positions - 1, 0))
    return paged_attention_reference(query, layer_cache, shifted, scale)


def heads_interleaved(query, layer_cache, batch, scale):
    """GQA with head h on KV head h % num_kv_heads, instead of equal contiguous groups."""
    num_heads, num_kv_heads = query.shape[1], layer_cache.shape[3]
    order = np.argsort(np.arange(num_heads) % num_kv_heads, kind="stable")
    out = np.empty_like(query)
    out[:, order] = paged_attention_reference(query[:, order], layer_cache, batch, scale)
    return out


def hash_without_parent(_, token_ids, extra_keys=()):
    return hash((0, tuple(token_ids)))


DAMAGES = {
    "two block-table entries swapped": (changed_batch(swapped_table), "K1 E1"),
    "the neighbour's block table": (changed_batch(neighbours_table), "K1 E1"),
    "slot mapping shifted by one": (
        changed_batch(
            lambda b: {"slot_mapping": (b.slot_mapping + 1) % (b.slot_mapping.max() + 2)}
        ),
        "K1 E1",
    ),
    "positions restart with each chunk": (changed_batch(positions_from_zero), "E1"),
    "logits of the token before the last": (
        changed_batch(lambda b: {"logits_indices": np.maximum(b.logits_indices - 1, 0)}),
        "E1",
    ),
    "no eviction on reuse": (Damage(EngineParts(block_pool=NeverEvicts)), "K1 E1"),
    "revived blocks stay in the queue": (
        Damage(EngineParts(block_pool=KeepsRevivedBlocksQueued)),
        "K1 E1",
    ),
    "a stale block is adopted": (Damage(EngineParts(block_pool=FindsAnyBlock)), "K1 E1"),
    "partial blocks are cached": (
        Damage(EngineParts(kv_cache_manager=CachesPartialBlocks)),
        "K1 E1",
    ),
    "blocks freed while in use": (Damage(EngineParts(kv_cache_manager=FreesTooEarly)), "K1 E1"),
    "a resumed request skips its prefix": (
        Damage(EngineParts(scheduler=KeepsTheCounter)),
        "K1 E1",
    ),
    "hash without the parent": (
        Damage(patch=("mini_vllm.kv_cache.hash_block_tokens", hash_without_parent)),
        "K1 E1",
    ),
    "causal mask one too wide": (Damage(attention=seen_one_too_many), "E1"),
    "causal mask one too narrow": (Damage(attention=seen_one_too_few), "E1"),
    "query heads on the wrong KV heads": (Damage(attention=heads_interleaved), "E1"),
}
CHECKS = {"K1": see_by_k1, "E1": see_by_e1}
CASES = [
    pytest.param(damage, CHECKS[check], id=f"{name}-{check}")
    for name, (damage, checks) in DAMAGES.items()
    for check in checks.split()
]


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_undamaged_workloads_pass(check):
    assert not is_noticed(CHECKS[check], Damage())


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "see"), CASES)
def test_damage_is_noticed(damage, see):
    assert is_noticed(see, damage)


@pytest.mark.parametrize("forget", [True, False])
def test_the_hazard_of_withdrawn_blocks_is_seen_and_the_flag_removes_it(forget):
    """As upstream schedules, a resumed victim adopts blocks that nobody ever computed."""
    toy = WITHDRAWN.engine(ToyModel(257), ByteTokenizer())
    real = WITHDRAWN.engine(model(), ByteTokenizer())
    for engine, run in ((toy, drive_with_shadow), (real, check_e1)):
        scheduler = engine.scheduler
        scheduler.config = dataclasses.replace(scheduler.config, forget_withdrawn_blocks=forget)
        if forget:
            run(WITHDRAWN, engine)
            continue
        with pytest.raises(AssertionError, match=r"another prefix|logits of output"):
            run(WITHDRAWN, engine)

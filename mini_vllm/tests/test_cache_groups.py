"""Several block tables per request: plan, runner and batch carry one for each group of layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from mini_vllm import EngineParts, KVCacheManager, LLMEngine, SamplingParams
from mini_vllm.batch import ForwardBatch
from mini_vllm.kv_cache_interface import KVCacheSpec, allocate_caches
from mini_vllm.models import registry

VOCAB = 257
SPECS = (KVCacheSpec((0, 1), 1, 2), KVCacheSpec((2,), 1, 4, block_size=2))


class TwoTables(KVCacheManager):
    """A second table per request, of blocks half as long, out of the same pool; no prefix hits."""

    def __init__(self, num_blocks, block_size, enable_caching, block_pool):
        super().__init__(num_blocks, block_size, enable_caching, block_pool)
        self.second: dict[str, list] = {}

    def allocate_slots(self, request, num_new_tokens, *args):
        held = self.second.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        missing = max(0, -(-num_tokens // SPECS[1].block_size) - len(held))
        if missing > self.block_pool.get_num_free_blocks():
            return None
        new = self.block_pool.get_new_blocks(missing)
        blocks = super().allocate_slots(request, num_new_tokens, *args)
        if blocks is None:
            self.block_pool.free_blocks(new)
        else:
            self.second[request.request_id] = held + new
        return blocks

    def get_block_ids(self, request_id, group=0):
        if group == 0:
            return super().get_block_ids(request_id)
        return [block.block_id for block in self.second.get(request_id, ())]

    def free(self, request):
        super().free(request)
        self.block_pool.free_blocks(reversed(self.second.pop(request.request_id, [])))


@dataclass
class Remembers:
    """Writes every token into the cache of each group; its next token depends on all it reads."""

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        seen = [self._history(batch.of_group(group)) for group in (0, 1)]
        for first, second in zip(*seen, strict=True):
            assert first == second, "the two groups remember different tokens"
        logits = np.zeros((len(batch.logits_indices), VOCAB))
        for row, history in enumerate(seen[0]):
            logits[row, int(sum(k * t for k, t in enumerate(history, 1))) % 251] = 1.0
        return logits

    @staticmethod
    def _history(batch: ForwardBatch) -> list[list[float]]:
        """Per request the tokens that the last layer of the group holds, this step's included."""
        last = batch.kv_cache[-1]  # [2, num_blocks, block_size, num_kv_heads, head_dim]
        block, offset = np.divmod(batch.slot_mapping, batch.block_size)
        last[:, block, offset] = batch.token_ids[:, None, None]
        histories = []
        for table, length in zip(batch.block_tables, batch.seq_lens, strict=True):
            places = [divmod(p, batch.block_size) for p in range(length)]
            histories.append([float(last[0, table[b], o, 0, 0]) for b, o in places])
        return histories


@pytest.fixture
def engine_of(monkeypatch):
    def load(model, tokenizer, *args, **options):
        loaded = original(model, tokenizer, *args, **options)
        return registry.LoadedModel(
            loaded.model, loaded.tokenizer, loaded.eos_token_ids, loaded.vocab_size, SPECS,
            kv_cache_manager=TwoTables,
        )  # fmt: skip

    original = registry.load_model
    monkeypatch.setattr("mini_vllm.features.load_model", load)

    def build(**knobs):
        return LLMEngine(Remembers(), block_size=4, enable_prefix_caching=False, **knobs)

    return build


def test_each_group_has_its_own_table_and_both_remember_the_same(engine_of):
    prompts = [list(range(3, 14)), list(range(40, 45)), [7] * 9]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    plenty = engine_of(num_blocks=64)
    expected = [out.outputs[0].token_ids for out in plenty.generate(prompts, params)]
    small = engine_of(num_blocks=20, max_num_batched_tokens=5)
    preempted = []
    small.observers.append(lambda plan: preempted.extend(plan.preempted_req_ids))
    assert [out.outputs[0].token_ids for out in small.generate(prompts, params)] == expected
    assert preempted and small.scheduler.kv.block_pool.get_num_free_blocks() == 19


def test_one_group_has_no_further_tables():
    engine = LLMEngine("toy", num_blocks=8, block_size=4)
    engine.add_request([3, 4, 5])
    seen = []
    engine.observers.append(lambda plan: seen.append(plan.group_block_ids))
    engine.step()
    assert seen == [[]]


def test_all_groups_lie_over_the_same_bytes():
    first, second = allocate_caches(SPECS, 5, 4, np.float32)
    assert first.shape == (2, 2, 5, 4, 1, 2) and second.shape == (1, 2, 5, 2, 1, 4)
    assert np.shares_memory(first, second)
    second[0, 1, 3] = 7.0
    assert (first[0, 1, 3] == 7.0).all() and first.sum() == 7.0 * 8


def test_groups_whose_blocks_differ_in_size_are_refused():
    with pytest.raises(ValueError, match=r"\[8, 16\] elements"):
        allocate_caches([KVCacheSpec((0,), 1, 2), KVCacheSpec((1,), 2, 2)], 5, 4, np.float32)


def test_a_part_of_the_learners_keeps_its_place_where_the_model_wants_no_other():
    class Mine(KVCacheManager):
        pass

    engine = LLMEngine("toy", parts=EngineParts(kv_cache_manager=Mine), num_blocks=8)
    assert type(engine.scheduler.kv) is Mine

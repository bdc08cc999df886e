"""The slots of adapters by themselves: which one is where, and which one goes."""

from __future__ import annotations

import random

import pytest

from mini_vllm.lora.slots import AdapterSlotCache


def test_the_slot_cache_hits_loads_and_evicts_the_coldest():
    cache = AdapterSlotCache(2)
    said = [cache.ensure(adapter) for adapter in (1, 2, 1, 3, 2)]
    assert said == ["load", "load", "hit", "evict+load", "evict+load"]
    assert cache.resident() == [3, 2]
    assert {adapter: cache.slot_of(adapter) for adapter in (3, 2)} == {3: 1, 2: 0}
    assert cache.stats() == {"hits": 1, "misses": 4, "evictions": 2, "hit_rate": 0.2}


def test_whatever_a_step_needs_is_resident_after_it_has_been_asked_for():
    rng, cache = random.Random(0), AdapterSlotCache(4)
    for _ in range(300):
        wanted = rng.sample(range(1, 12), rng.randint(1, 4))
        for adapter in wanted:
            cache.ensure(adapter)
        slots = [cache.slot_of(adapter) for adapter in cache.resident()]
        assert set(wanted) <= set(cache.resident())
        assert sorted(slots) == list(range(len(slots)))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_a_slot_cache_refuses_ids_and_sizes_below_one(wrong):
    with pytest.raises(ValueError, match="max_loras="):
        AdapterSlotCache(wrong)
    with pytest.raises(ValueError, match="adapter_id="):
        AdapterSlotCache(1).ensure(wrong)

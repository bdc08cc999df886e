"""What lab 11-04 pins: slots that stay, an order of eviction, and a scan that passes over."""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from types import SimpleNamespace

import pytest

from conformance import parts, recording, replay
from conformance.features import RECORDINGS
from labkit import refused, same
from mini_vllm.lora.request import LoRARequest
from mini_vllm.plan import SchedulerOutput

SEEDS = range(60_000, 60_060)


class Looked(int):
    """An adapter id that counts how often ids were compared, or hashed to be looked up."""

    count = 0

    def __hash__(self):
        Looked.count += 1
        return hash(int(self))

    def __eq__(self, other):
        Looked.count += 1
        return int(self) == int(other)


def draws(num, hot, rng, of=16, share=0.8):
    """Ids 1 to `of`, a share of them among the first `hot`."""
    for _ in range(num):
        yield 1 + (rng.randrange(hot) if rng.random() < share else hot + rng.randrange(of - hot))


# --- the slots ------------------------------------------------------------------------------------


def test_fill_then_hit(lab):
    cache = lab.AdapterSlotCache(2)
    empty = {"hits": 0, "misses": 0, "evictions": 0, "hit_rate": 0.0}
    same(cache.stats(), empty, "before the first call")
    came = [cache.ensure(adapter) for adapter in (1, 2, 1, 3, 2)]
    same(
        came,
        ["load", "load", "hit", "evict+load", "evict+load"],
        "2 slots, adapters 1, 2, 1, 3, 2: two empty slots, a hit, then 2 and 1 make room",
    )
    same(cache.resident(), [3, 2], "and then, the one used longest ago first")
    same([cache.slot_of(3), cache.slot_of(2)], [1, 0], "3 came into the slot of 2, and 2 into 1's")
    same(
        cache.stats(),
        {"hits": 1, "misses": 4, "evictions": 2, "hit_rate": 0.2},
        "one hit in five calls; a load of either kind is a miss",
    )


def test_lru_evicts_the_coldest(lab):
    cache = lab.AdapterSlotCache(3)
    for adapter in (1, 2, 3, 1, 2):
        cache.ensure(adapter)
    cache.ensure(4)
    same(cache.resident(), [1, 2, 4], "used 1, 2, 3, 1, 2: 3 was used longest ago and leaves for 4")
    cache.ensure(1)
    cache.ensure(5)
    same(cache.resident(), [4, 1, 5], "1 was used again, so 2 leaves for 5")


def test_there_are_never_more_residents_than_slots(lab):
    for num_slots in (1, 2, 5):
        cache = lab.AdapterSlotCache(num_slots)
        for count, adapter in enumerate(range(1, 12), 1):
            cache.ensure(adapter)
            same(
                len(cache.resident()),
                min(count, num_slots),
                f"{num_slots} slots, {count} different adapters asked for",
            )


def test_a_slot_is_an_address(lab):
    rng = random.Random(4)
    cache, held = lab.AdapterSlotCache(4), {}
    for adapter in draws(400, 3, rng, of=9):
        said = cache.ensure(adapter)
        slots = {each: cache.slot_of(each) for each in cache.resident()}
        same(
            sorted(slots.values()),
            list(range(len(slots))),
            f"after ensure({adapter}): residents stand in different slots, the lowest ones (A4)",
        )
        kept = {each: slot for each, slot in held.items() if each in slots}
        same(
            {each: slots[each] for each in kept},
            kept,
            f"ensure({adapter}) said {said}: the weights of the others were not moved (A3)",
        )
        held = slots
    missing = next(each for each in range(1, 10) if each not in held)
    try:
        came = cache.slot_of(missing)
    except KeyError:
        return
    raise AssertionError(f"slot_of of an adapter that left must raise KeyError; came {came}")


def test_step_set_ends_resident(lab):
    rng = random.Random(5)
    cache = lab.AdapterSlotCache(4)
    for _ in range(300):
        wanted = rng.sample(range(1, 13), rng.randint(1, 4))
        for adapter in wanted:
            cache.ensure(adapter)
        missing = [each for each in wanted if each not in cache.resident()]
        assert not missing, (
            f"a step of {wanted} on 4 slots, made resident in this order: none of them may push "
            f"out another of the same step\nexpected all resident\ncame     without {missing}"
        )
    for order in itertools.permutations((1, 2, 3, 4, 5)):
        for adapter in order:
            cache.ensure(adapter)
        same(len(cache.resident()), 4, f"five adapters on four slots, in the order {order}")


def test_accounting(lab):
    cache, rng = lab.AdapterSlotCache(3), random.Random(6)
    hits = evicted = 0
    for count, adapter in enumerate(draws(200, 2, rng, of=7), 1):
        before = cache.resident()
        said = cache.ensure(adapter)
        left = set(before) - set(cache.resident())
        evicted += len(left)
        hits += adapter in before
        now = cache.stats()
        same(
            (now["hits"], now["misses"], now["evictions"]),
            (hits, count - hits, evicted),
            f"(hits, misses, evictions) after {count} calls: a load of either kind is a miss",
        )
        expected = "hit" if adapter in before else "evict+load" if left else "load"
        same(said, expected, f"what ensure({adapter}) says, residents before: {before}")
        same(now["hit_rate"], now["hits"] / count, f"hits over calls after {count} calls")


def test_skewed_traffic_loves_lru(lab, record_property):
    rates = {}
    for hot in (2, 3, 4):
        cache, rng = lab.AdapterSlotCache(4), random.Random(0)
        for _ in range(20_000):
            cache.ensure(
                1 + (rng.randrange(hot) if rng.random() < 0.8 else hot + rng.randrange(16 - hot))
            )
        rates[hot] = cache.stats()["hit_rate"]
    same(
        {hot: round(rate, 3) for hot, rate in rates.items()},
        {2: 0.798, 3: 0.713, 4: 0.591},
        "hit rates of 20,000 draws from 16 adapters on 4 slots, four in five of them among the "
        "2, 3 or 4 hot ones; first in, first out would have .727, .646, .546",
    )
    record_property("measured.skew", rates[3])


def test_a_scan_in_a_circle_never_hits(lab, record_property):
    cache = lab.AdapterSlotCache(4)
    for adapter in [1, 2, 3, 4, 5] * 40:
        cache.ensure(adapter)
    same(
        cache.stats()["hits"], 0, "1 to 5 in a circle on 4 slots: each leaves just before its turn"
    )
    record_property("measured.circle", cache.stats()["hits"])


def test_more_slots_cost_no_more(lab):
    most = {}
    for num_slots in (4, 256):
        cache = lab.AdapterSlotCache(num_slots)
        for adapter in range(1, num_slots + 1):
            cache.ensure(Looked(adapter))
        calls = [*range(1, num_slots + 1), *range(10_000, 10_000 + num_slots)]
        Looked.count = 0
        for adapter in calls:
            cache.ensure(Looked(adapter))
        most[num_slots] = Looked.count / len(calls)
    assert most[256] <= 2 * most[4] + 4 and most[256] <= 20, (
        "ids compared or hashed in one ensure: as many with 256 slots as with 4, since every step "
        "asks for each of its adapters\n"
        f"expected at most {min(20, 2 * most[4] + 4):.1f}\ncame     {most[256]:.1f}"
    )


def test_bad_ids_and_sizes(lab):
    for size in (0, -1):
        refused(lambda size=size: lab.AdapterSlotCache(size), f"max_loras={size}: no slots")
        refused(lambda size=size: lab.max_schedulable([1], size), f"max_loras={size}: no slots")
    cache = lab.AdapterSlotCache(2)
    cache.ensure(1)
    for adapter in (0, -1):
        refused(
            lambda adapter=adapter: cache.ensure(adapter),
            f"adapter {adapter}: 0 and -1 stand for the base in tables further down",
        )
    same(
        (cache.resident(), cache.stats()["misses"]),
        ([1], 1),
        "a call that was refused leaves nothing",
    )


def test_the_real_manager_agrees(lab):
    for number, case in enumerate(parts.load("adapter_slots")):
        cache = lab.AdapterSlotCache(case["max_loras"])
        for index, step in enumerate(case["steps"]):
            if step["error"]:
                continue
            for adapter in step["adapters"]:
                cache.ensure(adapter)
            slots = [None] * case["max_loras"]
            for adapter in cache.resident():
                slots[cache.slot_of(adapter)] = adapter
            where = f"recorded from vLLM's manager, case {number}, step {index}, which needs "
            where += f"{step['adapters']}"
            same(cache.resident(), step["active"], f"{where}: residents, coldest first")
            same(slots, step["slots"], f"{where}: the id in each slot")


# --- the walk -------------------------------------------------------------------------------------


def test_scheduler_caps_distinct_adapters_per_step(lab):
    same(
        lab.max_schedulable([1, 2, 1, 3, None, 2, 4], 2),
        ([0, 1, 2, 4, 5], [3, 6]),
        "2 slots, queue 1, 2, 1, 3, base, 2, 4: adapters 1 and 2 take them; 3 and 4 wait",
    )
    rng = random.Random(7)
    for _ in range(300):
        slots = rng.randint(1, 4)
        queue = [rng.choice((None, 1, 2, 3, 4, 5, 6)) for _ in range(rng.randint(0, 12))]
        admitted, deferred = lab.max_schedulable(list(queue), slots)
        same(
            sorted([*admitted, *deferred]),
            list(range(len(queue))),
            f"queue {queue}: each place in one of the two lists",
        )
        active = {queue[place] for place in admitted} - {None}
        assert len(active) <= slots, (
            f"queue {queue}, {slots} slots (A1)\nexpected at most {slots} adapters\n"
            f"came     {sorted(active)}"
        )
        assert not deferred or len(active) == slots, (
            f"queue {queue}, {slots} slots: nobody waits while a slot is empty\n"
            f"expected {slots} adapters\ncame     {sorted(active)}, deferred {deferred}"
        )


def test_base_requests_never_consume_slots(lab):
    same(
        lab.max_schedulable([None, None, 1, None, 2, None], 1),
        ([0, 1, 2, 3, 5], [4]),
        "1 slot: base requests pass whatever stands in it, and leave it to adapter 1 (A1)",
    )
    same(
        lab.max_schedulable([1, 2], 2, running=[None, None, None]),
        ([0, 1], []),
        "three base requests run: both slots are empty",
    )


def test_deferral_is_not_a_barrier(lab):
    same(
        lab.max_schedulable([1, 2, 1, None, 1], 1),
        ([0, 2, 3, 4], [1]),
        "1 slot: 2 waits, and those behind it who need no further slot go on (A2)",
    )
    queue = [None, None, None, 1, 3, 2, 4, 5, 5, 5, 5, None, None, 1, 2, 3]
    same(
        lab.max_schedulable(queue, 4),
        ([0, 1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15], [7, 8, 9, 10]),
        f"the case of the upstream change that brought the skip: {queue}, 4 slots",
    )


def test_running_seeds_the_set(lab):
    same(
        lab.max_schedulable([1, 2, 1, 3, None, 2, 4], 2, running=[7]),
        ([0, 2, 4], [1, 3, 5, 6]),
        "2 slots, one held by adapter 7, which runs: room for adapter 1 only",
    )
    same(
        lab.max_schedulable([3, 1, 2], 2, running=[2, 1, 2]),
        ([1, 2], [0]),
        "both slots held by 1 and 2: their requests still join, 3 waits",
    )
    refused(
        lambda: lab.max_schedulable([1], 2, running=[1, 2, 3]),
        "three adapters running on two slots",
    )


def test_a_cold_tenant_may_wait_for_ever(lab, record_property):
    running, waiting, admitted_at = [], deque(), None
    for step in range(1000):
        running = [(adapter, ends) for adapter, ends in running if ends > step]
        if step % 5 == 0:
            waiting.append(1)
        if step == 3:
            waiting.append(2)
        places, _ = lab.max_schedulable(list(waiting), 1, [adapter for adapter, _ in running])
        chosen = [waiting[place] for place in places]
        running += [(adapter, step + 10) for adapter in chosen]
        waiting = deque(a for place, a in enumerate(waiting) if place not in places)
        if 2 in chosen and admitted_at is None:
            admitted_at = step
    same(
        (admitted_at, list(waiting)),
        (None, [2]),
        "1 slot; a request of adapter 1 comes every 5 steps and runs 10; one of adapter 2 came at "
        "step 3: the slot is never empty, and who shares it is never kept out (A2)",
    )
    record_property("measured.cold", "never" if admitted_at is None else "later")


# --- the gate of the engine -----------------------------------------------------------------------


def request_of(adapter):
    """What the gate sees of a request, and how often it looked."""
    keys = (LoRARequest(f"lora{adapter}", adapter, "none"),) if adapter else ()

    class Watched(SimpleNamespace):
        looks = 0

        @property
        def extra_keys(self):
            self.looks += 1
            return keys

    return Watched()


def test_a_plan_starts_from_its_own_requests(lab):
    gate = lab.AdapterGate(1)
    one, two, base = request_of(1), request_of(2), request_of(None)
    plan = SchedulerOutput()
    came = [gate.admission(one, plan), gate.admission(two, plan)]
    same(came, ["admit", "admit"], "1 slot, nobody has entered the plan: either may")
    gate.scheduled(base, 1, plan)
    gate.scheduled(one, 1, plan)
    came = [gate.admission(each, plan) for each in (one, two, base)]
    same(came, ["admit", "skip", "admit"], "adapter 1 and a base request have entered")
    plan = SchedulerOutput()
    same(gate.admission(two, plan), "admit", "the next plan, in which nobody of adapter 1 runs")
    plan = SchedulerOutput()
    gate.scheduled(one, 1, plan)
    same(gate.admission(two, plan), "skip", "and one in which adapter 1 runs on")


def test_a_plan_is_known_by_itself(lab):
    """By its address it would be taken for the one that stood there before."""
    gate, plan = lab.AdapterGate(1), SchedulerOutput()
    gate.scheduled(request_of(1), 1, plan)
    address = id(plan)
    del plan
    for _ in range(100):  # CPython gives the next plan the address of one that is gone
        plan = SchedulerOutput()
        if id(plan) == address:
            break
    same(
        gate.admission(request_of(2), plan), "admit",
        "a new plan, in which nobody runs, wherever in memory it stands",
    )  # fmt: skip


def test_the_walk_costs_no_more_with_more_slots(lab):
    most = {}
    for num_slots in (4, 256):
        queue = [Looked(adapter) for adapter in range(1, 2 * num_slots + 1)]
        Looked.count = 0
        lab.max_schedulable(queue, num_slots)
        most[num_slots] = Looked.count / len(queue)
    assert most[256] <= 2 * most[4] + 4, (
        "ids compared or hashed for one request of the queue: as many with 256 slots as with 4\n"
        f"expected at most {2 * most[4] + 4:.1f}\ncame     {most[256]:.1f}"
    )


def test_the_gate_looks_at_one_request_at_a_time(lab):
    gate, plan = lab.AdapterGate(8), SchedulerOutput()
    requests = [request_of(1 + place % 12) for place in range(200)]
    for each in requests:
        if gate.admission(each, plan) == "admit":
            gate.scheduled(each, 1, plan)
            plan.scheduled_requests.append(each)
    looks = sum(each.looks for each in requests)
    assert len(requests) <= looks <= 6 * len(requests), (
        "200 waiting requests: each is asked for its adapter when it is looked at and when it "
        "enters, not again for everybody behind it\n"
        f"expected 200 to 1,200 looks\ncame     {looks:,}"
    )


@functools.cache
def recorded():
    found = []
    for entry in recording.read(RECORDINGS / "lora.jsonl.gz"):
        if entry["seed"] in SEEDS:
            found.append(entry)
        elif found:
            break
    return found


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_the_real_scheduler_agrees(lab, part):
    build = functools.partial(replay.mini_scheduler, gates={"lora": lab.AdapterGate})
    skips = 0
    for entry in recorded()[part::3]:
        _, difference = replay.replay(entry, build)
        skips += sum(bool(step["skipped_waiting"]) for step in entry["steps"])
        assert difference is None, (
            "the mini scheduler with your gate leaves a recording of vLLM's scheduler; "
            f"max_loras={entry['config']['max_loras']}, `lora` is a request's adapter, 0 the base\n"
            f"{difference}"
        )
    assert skips > 20, f"the recordings hold steps in which somebody is skipped; came {skips}"

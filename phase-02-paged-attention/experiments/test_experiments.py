"""The experiments' rules on small cases, and that the committed measurements still come out."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from course.files import load_module
from mini_vllm.block_pool import BlockPool

HERE = Path(__file__).parent


def load(name: str) -> ModuleType:
    return load_module(HERE / f"{name}.py")


churn = load("measure_churn")
eviction = load("measure_eviction")
free_queue = load("measure_free_queue")
figures = load("figures_experiments")


def job(total: int, tokens: int = 1):
    return churn.Job(prompt=tokens, total=total, tokens=tokens)


# ------------------------------------------------------------------ churn


def test_first_fit_takes_the_first_hole_and_joins_neighbours():
    memory = churn.FirstFit(100)
    jobs = [job(30), job(20), job(40)]
    assert [memory.admit(j) for j in jobs] == [True] * 3
    assert [j.place for j in jobs] == [(0, 30), (30, 20), (50, 40)]
    memory.release(jobs[0])
    assert memory.holes() == [30, 10]
    assert not memory.admit(job(35)), "40 slots are free, but no hole has 35"
    memory.release(jobs[1])
    assert memory.holes() == [50, 10], "30 and 20 side by side are one hole of 50"
    memory.release(jobs[2])
    assert (memory.holes(), memory.given()) == ([100], 0)


def test_buddies_split_by_halves_and_join_only_their_own_half():
    memory = churn.Buddy(64)
    a, b, c = job(16), job(9), job(16)
    assert [memory.admit(j) for j in (a, b, c)] == [True] * 3
    assert [j.place for j in (a, b, c)] == [(0, 16), (16, 16), (32, 16)]
    memory.release(b)
    assert sorted(memory.holes()) == [16, 16], "places 16 and 48 are no buddies of each other"
    memory.release(a)
    assert sorted(memory.holes()) == [16, 32]
    memory.release(c)
    assert memory.holes() == [64]


def test_blocks_grow_on_demand_and_need_no_neighbours():
    memory = churn.Paged(64, 16)
    a, b = job(64, tokens=16), job(64, tokens=17)
    assert memory.admit(a) and memory.admit(b)
    assert memory.given() == 48
    assert memory.grow(a), "token 17 opens a block"
    assert memory.given() == 64
    a.tokens = 32
    assert not memory.grow(a), "no block is left"
    memory.release(b)
    assert memory.grow(a)


@pytest.mark.parametrize("name", list(churn.allocators(churn.Settings())))
def test_no_slot_is_given_twice_and_none_is_lost(name):
    settings = churn.Settings(slots=1024, max_len=128, steps=150, warm_up=0, arrivals_per_step=0.5)
    memory, live = churn.allocators(settings)[name], []
    for arriving in churn.jobs(settings, 3):
        live += [j for j in arriving if memory.admit(j)]
        if len(live) > 4:
            memory.release(live.pop(0))
        assert memory.given() + sum(memory.holes()) == settings.slots
        if name != "blocks":
            spans = sorted(j.place for j in live)
            pairs = itertools.pairwise(spans)
            assert all(start + size <= other for (start, size), (other, _) in pairs)
    for j in live:
        memory.release(j)
    assert memory.given() == 0


def test_churn_measurement_is_what_the_script_gives_today():
    saved = json.loads((HERE / "measured" / "churn.json").read_text())
    settings = churn.Settings(**{k: tuple(v) if isinstance(v, list) else v
                                 for k, v in saved["settings"].items()})  # fmt: skip
    for name in saved["runs"]:
        again = churn.simulate(churn.allocators(settings)[name], settings, 0)
        assert again.pop("series") == saved["series"][name], name
        assert {k: round(v, 5) for k, v in again.items()} == saved["runs"][name][0], name


def test_churn_script_writes_what_the_table_reads(tmp_path, capsys):
    churn.main(["--steps", "60", "--warm-up", "20", "--seeds", "3", "--out", str(tmp_path)])
    saved = json.loads((tmp_path / "churn.json").read_text())
    assert churn.table(saved) == capsys.readouterr().out.rstrip("\n")


def test_an_interval_needs_its_quantile():
    assert churn.interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.303 / 3**0.5))
    with pytest.raises(ValueError, match="7 values"):
        churn.interval([1.0] * 7)


# ------------------------------------------------------------------ eviction


def order_of_eviction(pool_class) -> list[int]:
    """Ids in eviction order after one request of 3 blocks and then one of 2, freed tail first."""
    pool = pool_class(6)
    first = pool.get_new_blocks(3)
    second = pool.get_new_blocks(2)
    pool.free_blocks(reversed(second))
    pool.free_blocks(reversed(first))
    return [block.block_id for block in pool.get_new_blocks(5)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("reverse free", [5, 4, 3, 2, 1]),  # by the time of leaving, tail first
        ("forward free", [4, 5, 1, 2, 3]),
        ("LRU", [1, 2, 3, 4, 5]),  # by the time of allocation, in table order
        ("LRU, tail first", [3, 2, 1, 5, 4]),
    ],
)
def test_policies_differ_in_order_only(policy, expected):
    assert order_of_eviction(eviction.POLICIES[policy]) == expected


def test_random_eviction_takes_each_block_once():
    assert sorted(order_of_eviction(eviction.POLICIES["random"])) == [1, 2, 3, 4, 5]


def test_a_hit_renews_the_stamp():
    pool = eviction.LruPool(4)
    a, b, c = pool.get_new_blocks(3)
    pool.cache_full_blocks([a], [7])
    pool.free_blocks([c, b, a])
    pool.touch([a])
    pool.free_blocks([a])
    assert [block.block_id for block in pool.get_new_blocks(3)] == [2, 3, 1]


def test_a_pool_that_never_evicts_hits_every_full_block_that_was_there():
    workload = eviction.Workload(sessions=5, turns=1e9, longest=600, warm_up=0.0, system_prompts=1)
    sessions = eviction.chats(workload, 1)
    got = eviction.serve(sessions, workload, BlockPool, 5000)
    asked = hit = 0
    for number, session in enumerate(sorted(sessions, key=lambda s: s.start)):
        before = 0 if number == 0 else None
        for turn in session.turns:
            if before is None:  # the system prompt, which somebody else has asked with
                others = [t.tokens for s in sessions if s is not session for t in s.turns]
                before = max(common(turn.tokens, other) for other in others)
            asked += turn.num_prompt
            hit += min(before, turn.num_prompt - 1) // 16 * 16
            before = len(turn.tokens)
    assert got["turns"] == sum(len(session.turns) for session in sessions)
    assert got["hit_rate"] == pytest.approx(hit / asked)


def common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_eviction_measurement_is_what_the_script_gives_today():
    saved = json.loads((HERE / "measured" / "eviction.json").read_text())
    workload = eviction.Workload(**{k: tuple(v) if isinstance(v, list) else v
                                    for k, v in saved["workload"].items()})  # fmt: skip
    sessions, size = eviction.chats(workload, 0), saved["pool_sizes"][0]
    for name, pool in eviction.POLICIES.items():
        rate = eviction.serve(sessions, workload, pool, size)["hit_rate"]
        assert round(rate, 6) == saved["hit_rate"][name][str(size)][0], name


def test_eviction_script_writes_what_the_table_reads(tmp_path, capsys):
    arguments = ["--sessions", "8", "--pool-sizes", "400", "500", "--seeds", "3"]
    eviction.main([*arguments, "--out", str(tmp_path)])
    saved = json.loads((tmp_path / "eviction.json").read_text())
    assert eviction.table(saved) == capsys.readouterr().out.rstrip("\n")


def test_a_turn_larger_than_the_pool_is_refused():
    workload = eviction.Workload(sessions=5)
    with pytest.raises(RuntimeError, match="do not fit an empty pool"):
        eviction.serve(eviction.chats(workload, 0), workload, BlockPool, 5)


# ------------------------------------------------------------------ the free queue


@pytest.mark.parametrize("structure", list(free_queue.STRUCTURES))
@pytest.mark.parametrize("operation", list(free_queue.OPERATIONS))
def test_every_structure_keeps_the_same_order(structure, operation):
    def after(name: str) -> list[int]:
        blocks = [free_queue.KVCacheBlock(i) for i in range(200)]
        queue = free_queue.STRUCTURES[name](blocks)
        picked = [blocks[i * 37 % 200] for i in range(130)]
        free_queue.OPERATIONS[operation](queue, picked)
        return [queue.popleft().block_id for _ in range(200)]

    assert after(structure) == after("linked list")


def test_free_queue_script_writes_what_the_table_reads(tmp_path, capsys):
    arguments = ["--sizes", "128", "--count", "64", "--repeats", "1"]
    free_queue.main([*arguments, "--out", str(tmp_path)])
    saved = json.loads((tmp_path / "free-queue.json").read_text())
    assert free_queue.table(saved) in capsys.readouterr().out
    assert {row["structure"] for row in saved["rows"]} == set(free_queue.STRUCTURES)
    assert set(saved["machine"]) == {"cpu", "cores"}


def test_only_the_ordered_dict_makes_an_object_per_block():
    objects = {
        name: round(free_queue.cost_of_queueing(name, 4096)["objects"], 1)
        for name in free_queue.STRUCTURES
    }
    assert objects == {"linked list": 0.0, "deque": 0.0, "OrderedDict": 1.0}


@pytest.mark.parametrize("name", list(figures.FIGURES))
def test_figures_are_well_formed_and_described(name):
    pytest.importorskip("matplotlib", reason="plots need the figures extra")
    root = ElementTree.fromstring(figures.FIGURES[name]())
    assert root.find("{http://www.w3.org/2000/svg}desc") is not None

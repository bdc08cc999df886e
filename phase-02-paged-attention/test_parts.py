"""Labs 02-01 and 02-05 as parts of the engine: same tables, same tokens, over the shipped model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from course.files import load_module
from course.learning import mine
from course.learning.labs import find_labs
from labkit.mine import PassedCourse
from mini_vllm import BlockPool, EngineParts, LLMEngine, SamplingParams

PHASE = Path(__file__).parent
ALLOCATOR = PHASE / "labs" / "lab-01-block-allocator" / "solution.py"
MANAGER = PHASE / "labs" / "lab-05-share-and-evict" / "solution.py"
PROMPTS = [
    "A block that nobody uses is free",
    "A block that nobody uses is cached",
    "The queue keeps the oldest block in front",
] * 2
CRAMPED = {"num_blocks": 10, "block_size": 8}
SUPPLIED = {
    "pool": (ALLOCATOR, None),
    "manager": (None, MANAGER),
    "pool and manager": (ALLOCATOR, MANAGER),
}


def parts_from(pool: Path | None, manager: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if pool is not None:
        found["block_pool"] = load_module(pool).BlockPool
    if manager is not None:
        found["kv_cache_manager"] = load_module(manager).KVCacheManager
    return found


class Watch:
    """Counts what a pool class evicts and revives, without changing what it does."""

    def __init__(self) -> None:
        self.evicted = self.revived = 0

    def around(self, pool_class: type) -> type:
        watch = self

        class Watched(pool_class):
            def evict(self, block: Any) -> bool:
                evicted = super().evict(block)
                watch.evicted += evicted
                return evicted

            def touch(self, blocks: Any) -> None:
                blocks = list(blocks)
                watch.revived += sum(block.ref_cnt == 0 for block in blocks)
                super().touch(blocks)

        return Watched


def run(supplied: dict[str, Any], watch: Watch, **engine_kwargs: Any) -> tuple[list, list]:
    """Block tables of every step and tokens of every request, one group after the other."""
    pool = watch.around(supplied.get("block_pool", BlockPool))
    engine = LLMEngine(
        dtype="float64", parts=EngineParts(**supplied | {"block_pool": pool}), **engine_kwargs
    )
    steps = []

    def note(plan: Any) -> None:
        kv = engine.scheduler.kv
        steps.append([kv.get_block_ids(r.request_id) for r in plan.scheduled_requests])
        steps.append([b.block_id for b in kv.block_pool.free_queue.get_all_free_blocks()])

    engine.observers.append(note)
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    tokens = []
    for start in range(0, len(PROMPTS), 2):
        results = engine.generate(PROMPTS[start : start + 2], params)
        tokens += [result.outputs[0].token_ids for result in results]
    return steps, tokens


@functools.cache
def engines_own(caching: bool) -> tuple[list, list]:
    return run({}, Watch(), **CRAMPED, enable_prefix_caching=caching)


@pytest.mark.parametrize(
    "supplied",
    [
        "pool and manager",
        pytest.param("pool", marks=pytest.mark.slow),
        pytest.param("manager", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_the_engine_decides_and_says_the_same_with_the_labs_parts(supplied, caching):
    expected, watched = engines_own(caching), Watch()
    supplied = parts_from(*SUPPLIED[supplied])
    got = run(supplied, watched, **CRAMPED, enable_prefix_caching=caching)
    assert got[0] == expected[0], "block tables or free queue of a step"
    assert got[1] == expected[1], "tokens"
    if caching:
        assert watched.evicted >= 5, "the run evicts cached blocks"
        assert watched.revived >= 5, "the run revives free cached blocks"


def test_the_manifests_supply_these_two_parts():
    labs = find_labs(PHASE.parent)
    parts, owners = mine.parts_of(
        [lab for lab in labs if lab.id in ("02-01", "02-05")],
        lambda lab: True,
        lambda lab: lab.solution,
    )
    assert {part: lab.id for part, lab in owners.items()} == {
        "block_pool": "02-01",
        "kv_cache_manager": "02-05",
    }
    assert [part.__name__ for part in parts.values()] == ["BlockPool", "KVCacheManager"]


@pytest.mark.slow
def test_course_run_mine_serves_from_the_learners_passed_labs(tmp_path, monkeypatch, capsys):
    """A course of these two labs, both passed: `course run --mine` uses them."""
    course = PassedCourse(tmp_path, ["02-01", "02-05"], monkeypatch, capsys)
    prompt = "The block pool hands"
    plain, mine_said = (course.run(prompt, *how, max_tokens=16) for how in ((), ("--mine",)))
    assert "block_pool         yours, from lab 02-01" in mine_said
    assert "kv_cache_manager   yours, from lab 02-05" in mine_said
    text = plain.partition("\n\n")[0]
    assert text.startswith(prompt) and len(text) > len(prompt)
    assert text in mine_said, "the learner's parts say the same as the course's"

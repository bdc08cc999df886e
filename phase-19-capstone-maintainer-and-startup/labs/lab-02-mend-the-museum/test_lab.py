"""What lab 19-02 pins: six mends, each by what the first release that behaves decided."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conformance import recording, replay
from conformance.releases import builders
from labkit import same
from mini_vllm import EngineParts, KVCacheManager, Request, SamplingParams, SchedulerConfig

HERE = Path(__file__).resolve().parent / "recordings"
PLANNED = ("num_scheduled_tokens", "preempted", "running", "waiting", "finished")


@cache
def recorded(name: str) -> Any:
    path = HERE / name
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    return tuple(recording.read(path, None))


def shown(number: int) -> dict[str, Any]:
    """The exhibit, as the release that has the bug ran it."""
    return recorded("shown.json")[str(number)]


def agree(name: str, parts: EngineParts, why: str) -> None:
    """Fail with how many workloads agree, and with the plans of the smallest that does not."""
    entries, build = recorded(name), builders(parts)
    differ = []
    for entry in entries:
        _, found = replay.replay(entry, *build, fields=PLANNED)
        if found is not None:
            differ.append((found.step, len(entry["outputs"]), entry["seed"], entry, found))
    if not differ:
        return
    entry, found = min(differ, key=lambda each: each[:3])[3:]
    before = "\n".join(
        f"  step {i}: {step['num_scheduled_tokens']}, preempted {step['preempted']}, "
        f"waiting {step['waiting']}"
        for i, step in enumerate(entry["steps"][: found.step + 1])
    )
    raise AssertionError(
        f"{why}\n{len(entries) - len(differ)} of {len(entries)} recorded workloads agree. The "
        f"first difference of the smallest: seed {found.seed}, step {found.step}, {found.field}\n"
        f"expected {found.expected}\ncame     {found.got}\nas recorded:\n{before}"
    )


def test_the_hit_rate_is_of_strangers(lab, record_property):
    """25780: a request that resumes on its own blocks is counted as a hit."""
    stats = lab.HitRate()
    stats.record(8, 0, False)
    stats.record(9, 8, True)
    same(
        (stats.queries, stats.hits, stats.preempted_queries, stats.preempted_hits),
        (8, 0, 9, 8),
        "queries and hits, then those of preempted requests, after (8, 0, False), (9, 8, True):",
    )
    for number, run in enumerate(recorded("25780.json")):
        stats = lab.HitRate()
        for call in run["calls"]:
            stats.record(*call)
        came = {name: getattr(stats, name) for name in run["stats"]}
        same(came, run["stats"], f"run {number} of 0.11.1, look-ups {run['calls']}:")
    record_property("measured.hit_rate_room", shown(25780)["invariant"])


def test_the_worker_is_told_of_what_is_gone(lab, record_property):
    """52482: a picture that was allocated again is dropped."""
    for number, calls in enumerate(recorded("52482.json")):
        cache_, held = lab.Told(7), {}
        for index, (call, request_id, name, answer) in enumerate(calls):
            where = f"run {number} of 0.28.0, call {index} of {calls[: index + 1]}:"
            if call == "told":
                same(cache_.get_freed_mm_hashes(), answer, where)
            elif call == "free":
                cache_.free_encoder_input(held.pop(request_id), 0)
            else:
                held[request_id] = request = picture(request_id, name)
                if not cache_.check_and_update_cache(request, 0) and answer != "no room":
                    assert cache_.can_allocate(request, 0, 8, 0), f"{where} found no room"
                    if answer == "allocated":
                        cache_.allocate(request, 0)
                elif answer == "no room":
                    assert not cache_.can_allocate(request, 0, 8, 0), f"{where} found room"
    record_property("measured.told_room", shown(52482)["invariant"])


def picture(request_id: str, name: str) -> Any:
    """A request with one picture of three embeddings."""
    place = SimpleNamespace(get_num_embeds=lambda: 3)
    feature = SimpleNamespace(identifier=name, mm_position=place)
    keys = SimpleNamespace(mm_features=(feature,))
    return SimpleNamespace(request_id=request_id, block_keys=keys)


def test_a_newcomer_hits_what_was_computed(lab, record_property):
    """49377: a hash outlives the token that it was made of."""
    session = lab.Session()
    session.extend([1, 2, 3, 99])
    session.take_back(3)
    same(
        (session.tokens, session.block_hashes), ([1, 2, 3], []),
        "tokens and hashes after 1, 2, 3, 99 with 3 computed:",
    )  # fmt: skip
    session = lab.Session()
    session.extend(range(9))
    session.take_back(8)
    same(len(session.block_hashes), 2, "hashes of nine tokens of which eight were computed:")
    for number, run in enumerate(recorded("49377.json")):
        session, index = lab.Session(), set()
        for turn, before in zip(run["turns"], [None, *run["turns"]], strict=False):
            if before:
                session.take_back(before["num_computed_tokens"])
            session.extend(turn["prompt"])
            same(
                len(session.tokens), turn["tokens"],
                f"tokens when a turn begins; session {number} of 0.32.0, {run['turns']}:",
            )  # fmt: skip
            for token in turn["says"]:
                index |= set(session.block_hashes)
                session.extend([token])
        for tokens, hits in run["newcomers"]:
            newcomer = lab.Session()
            newcomer.extend(tokens)
            found = 0
            for block_hash in newcomer.block_hashes[: (len(tokens) - 1) // lab.SIZE]:
                if block_hash not in index:
                    break
                found += lab.SIZE
            same(found, hits, f"hits of {tokens} after {run['turns']}, session {number} of 0.32.0:")
    record_property("measured.session_room", shown(49377)["invariant"])


def test_what_is_admitted_fits(lab, record_property):
    """37307: admitted by its first chunk, preempted by its second."""
    agree(
        "37307.jsonl.gz", EngineParts(scheduler=lab.Admission),
        "Admission, on workloads that 0.19.0 decided:",
    )  # fmt: skip
    agree(
        "37307-hits.jsonl.gz", EngineParts(scheduler=lab.Admission),
        "Admission, on prompts that begin alike, as 0.19.0 decided:",
    )  # fmt: skip
    record_property("measured.storm_step", shown(37307)["step"])


def test_nobody_is_stepped_over(lab, record_property):
    """49097: the place moves back only with a victim that was planned."""
    scheduler = lab.Walk(KVCacheManager(8, lab.SIZE, False), SchedulerConfig())
    for index, victim, place in ((1, 0, 0), (1, 2, 1), (1, 1, 1), (0, 0, 0)):
        for planned in (True, False):
            came = scheduler.place_after(index, victim, planned)
            same(came, place, f"the place after index {index}, victim {victim}, {planned=}:")
    agree(
        "49097.jsonl.gz", EngineParts(async_scheduler=lab.Walk),
        "Walk, on workloads that 0.28.0 decided with two plans in flight:",
    )  # fmt: skip
    record_property("measured.walk_room", shown(49097)["invariant"])
    record_property("measured.walk_step", shown(49097)["step"])


def served(scheduler: Any, most: int = 400) -> bool:
    """Whether everything that was accepted comes to its end."""
    idle = 0
    for _ in range(most):
        if not scheduler.requests:
            return True
        plan = scheduler.schedule()
        due = [
            each.request_id
            for each in plan.scheduled_requests
            if scheduler.needs_sample(each, plan.num_scheduled_tokens[each.request_id])
        ]
        scheduler.update_from_output(plan, {request_id: [7] for request_id in due})
        idle = 0 if plan.num_scheduled_tokens else idle + 1
        if idle > 2:
            return False
    return False


def door(lab: Any, num_blocks: int) -> Any:
    return lab.Door(KVCacheManager(num_blocks, lab.SIZE), SchedulerConfig())


def asks(name: str, prompt: int, most: int) -> Request:
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    return Request(name, range(100, 100 + prompt), params)


def test_the_door_refuses_what_never_ends(lab, record_property):
    """39734: a prompt longer than the pool is accepted."""
    for blocks, prompt, most, ends in recorded("39734.json"):
        came = door(lab, blocks).can_be_served(prompt, most)
        same(
            came, ends,
            f"{blocks - 1} usable blocks of 4, a prompt of {prompt}, max_tokens {most}, alone at "
            f"0.22.1, which {'ends' if ends else 'stands still'}:",
        )  # fmt: skip
    busy = door(lab, 5)
    busy.add_request(asks("a", 12, 2))
    busy.schedule()
    same(
        busy.can_be_served(12, 2), True,
        "4 usable blocks of 4, of which a request holds 3: a prompt of 12, max_tokens 2, alone:",
    )  # fmt: skip
    record_property("measured.door_room", shown(39734)["invariant"])


def test_what_is_accepted_ends_among_others(lab):
    """A request that is served alone and waits for ever in company, or that takes others along."""
    refused = 0
    for seed in range(60):
        rng = random.Random(seed)
        scheduler, asked = door(lab, rng.randint(3, 8)), []
        for name in "abcd":
            asked.append((rng.randint(1, 30), rng.randint(1, 9)))
            try:
                scheduler.add_request(asks(name, *asked[-1]))
            except ValueError:
                refused += 1
        assert served(scheduler), (
            f"seed {seed}: every request that was accepted comes to its end. "
            f"(prompt, max_tokens) were {asked}, accepted and left {list(scheduler.requests)}"
        )
    assert refused, "some of these prompts are larger than the pool: one at least is refused"

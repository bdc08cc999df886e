"""What releases decided for the museum's rooms in the page and for labs 19-02 to 19-04.

    python -m conformance.museum.recorder

Each file is of the first release that behaves, and of draws in which the one before differs; some
in which both agree stand beside them. Where no release behaves, what is recorded is which requests
come to their end.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conformance import recording, workload_file
from conformance.museum.exhibit import RECORDED
from conformance.museum.exhibits import EXHIBITS
from conformance.real_core import core_of
from conformance.real_core.places import PIN
from conformance.recorders import connector
from conformance.recorders.run import RefusedError, Run, Stalled
from conformance.workloads import Workload

LABS = Path(__file__).parents[2] / "phase-19-capstone-maintainer-and-startup" / "labs"
MEND = LABS / "lab-02-mend-the-museum" / "recordings"
JUDGE = LABS / "lab-03-is-this-a-bug" / "recordings"
BISECT = LABS / "lab-04-bisect" / "recordings"
ROOMS = RECORDED.parent
SIZE = 4
PLANNED = ("num_scheduled_tokens", "preempted", "running", "waiting", "finished")
"""What of a step is compared: which block is which is another rule's."""
SHOWN = (37307, 49097, 52482, 25780, 49377, 39734)


def decided(workload: Workload, version: str) -> recording.Recording | None:
    """What a release makes of it; None where it stands still or fails."""
    try:
        return Run(copy.deepcopy(workload), core_of(version), tells_tokens=False).recorded()
    except (Stalled, RefusedError):
        return None


def drawn(rng: random.Random, config: str, num_requests: int, most: int) -> Workload:
    """A few requests that together are too large for the pool."""
    lines = [f"config: {{{config}}}", "requests:"]
    for index in range(num_requests):
        lines.append(
            f"- {{id: r{index}, prompt: {rng.randint(1, most)}, max_tokens: {rng.randint(1, 8)}, "
            f"priority: {rng.randint(0, 9)}, step: {rng.randint(0, 4)}}}"
        )
    return workload_file.parse("\n".join(lines))


def admission(rng: random.Random) -> Workload:
    """Long prompts, a small budget, few blocks."""
    config = (
        f"num_blocks: {rng.randint(6, 10)}, max_num_seqs: 4, "
        f"max_num_batched_tokens: {rng.randint(4, 8)}, "
        f"enable_prefix_caching: {rng.choice(('true', 'false'))}"
    )
    return drawn(rng, config, rng.randint(2, 4), 12)


def shared(rng: random.Random) -> Workload:
    """The same, with prompts that begin alike: what is hit is free, or others hold it."""
    config = (
        f"num_blocks: {rng.randint(6, 10)}, max_num_seqs: 4, "
        f"max_num_batched_tokens: {rng.randint(4, 8)}"
    )
    lines = [f"config: {{{config}}}", "requests:"]
    for index in range(rng.randint(3, 5)):
        prompt = [9] * rng.choice((0, 4, 8, 12)) + [20 + index] * rng.randint(1, 9)
        lines.append(
            f"- {{id: r{index}, prompt: {prompt}, max_tokens: {rng.randint(1, 6)}, "
            f"step: {rng.randint(0, 9)}}}"
        )
    return workload_file.parse("\n".join(lines))


def walk(rng: random.Random) -> Workload:
    """Priorities, two plans in flight, few blocks."""
    config = (
        f"num_blocks: {rng.randint(5, 9)}, max_num_seqs: 4, "
        f"max_num_batched_tokens: {rng.randint(4, 16)}, policy: priority, "
        "async_scheduling: true, enable_prefix_caching: false"
    )
    return drawn(rng, config, rng.randint(3, 5), 10)


def plans(
    draw: Any, bad: str, good: str, seeds: int, differ: int, same: int
) -> Iterator[recording.Recording]:
    """What `good` decided: so many draws in which `bad` decides otherwise, and so many others."""
    left = {True: differ, False: same}
    for seed in range(seeds):
        workload = draw(random.Random(seed))
        workload["seed"] = seed
        after, before = decided(workload, good), decided(workload, bad)
        if after is None:
            continue
        parts = before is None or any(
            [step[field] for step in before["steps"]] != [step[field] for step in after["steps"]]
            for field in PLANNED
        )
        if left[parts]:
            left[parts] -= 1
            yield after
        if not any(left.values()):
            return


def evictions(version: str, seeds: int) -> list[list[list[Any]]]:
    """Calls of the encoder cache's counts as a scheduler makes them, with what was answered."""
    module = core_of(version).namespace.load("vllm.v1.core.encoder_cache_manager")
    found = []
    for seed in range(seeds):
        rng = random.Random(seed)
        cache = module.EncoderCacheManager(7)
        calls: list[list[Any]] = []
        held: list[Any] = []
        for number in range(32):
            name = rng.choice("ABCD")
            request = picture(f"r{number}", name)
            if held and rng.random() < 0.6:
                other = held.pop(rng.randrange(len(held)))
                cache.free_encoder_input(other, 0)
                calls.append(["free", other.request_id, other.mm_features[0].identifier, None])
            if cache.check_and_update_cache(request, 0):
                answer = "hit"
            elif not cache.can_allocate(request, 0, 8, 0):
                answer = "no room"
            else:
                answer = "allocated"
                if rng.random() < 0.25:
                    answer = "room, but refused its blocks"
                else:
                    cache.allocate(request, 0)
            if answer in ("hit", "allocated"):
                held.append(request)
            calls.append(["ask", request.request_id, name, answer])
            if rng.random() < 0.2:
                calls.append(["told", "", "", list(cache.get_freed_mm_hashes())])
        found.append(calls)
    return found


def picture(request_id: str, name: str) -> Any:
    """A request with one picture of three embeddings, as both managers read it."""
    place = SimpleNamespace(offset=0, length=3, get_num_embeds=3)
    return SimpleNamespace(
        request_id=request_id,
        mm_features=[SimpleNamespace(identifier=name, mm_position=place)],
        get_num_encoder_embeds=lambda index: 3,
    )


def look_ups(version: str, seeds: int) -> list[dict[str, Any]]:
    """Every look-up of runs with preemptions, and the statistics after them."""
    core, found = core_of(version), []
    kind = core.namespace.load("vllm.v1.metrics.stats").PrefixCacheStats
    plain = ("requests", "queries", "hits")
    names = (*plain, *(f"preempted_{name}" for name in plain))
    for seed in range(seeds):
        rng = random.Random(seed)
        config = f"num_blocks: {rng.randint(5, 8)}, max_num_seqs: 4, max_num_batched_tokens: 16"
        made = Run(drawn(rng, config, 3, 10), core, tells_tokens=False)
        manager = made.scheduler.kv_cache_manager
        calls: list[list[Any]] = []
        manager.log_stats, manager.prefix_cache_stats = True, kind()
        ask = manager.get_computed_blocks

        def noting(request: Any, ask: Any = ask, calls: list[Any] = calls) -> Any:
            answer = ask(request)
            calls.append([request.num_tokens, answer[1], request.num_preemptions > 0])
            return answer

        manager.get_computed_blocks = noting
        try:
            made.recorded()
        except Stalled:
            continue
        stats = manager.prefix_cache_stats
        found.append({"calls": calls, "stats": {name: getattr(stats, name) for name in names}})
    return found


def sessions(version: str, seeds: int) -> list[dict[str, Any]]:
    """Turns of streaming sessions, and how much newcomers hit after them."""
    core, found = core_of(version), []
    config = {**workload_file.CONFIG, "num_blocks": 64}
    for seed in range(seeds):
        rng = random.Random(seed)
        scheduler, turns, seen = core.make_scheduler(config), [], []
        for number in range(3):
            prompt = [rng.randint(1, 9) for _ in range(rng.randint(1, 6))]
            said = rng.randint(1, 3)
            request = core.make_request(asked("session", prompt, said), SIZE, 2)
            request.resumable, request.streaming_queue = True, deque()
            scheduler.add_request(request)
            live = scheduler.requests["session"]
            told: list[int] = []
            before = len(live.all_token_ids)
            turns.append({"prompt": prompt, "tokens": before, "says": told})
            for index in range(said):
                plan, token = scheduler.schedule(), 90 + 3 * number + index
                told.append(token)
                output = core.runner_output(plan, {"session": token})
                scheduler.update_from_output(plan, output)
            turns[-1]["num_computed_tokens"] = live.num_computed_tokens
            seen.append(list(live.all_token_ids))
        asks = []
        for tokens in (*seen, *([*each[:-1], 5, 5] for each in seen)):
            newcomer = core.make_request(asked("newcomer", [*tokens, 5], 1), SIZE, 2)
            asks.append([[*tokens, 5], scheduler.kv_cache_manager.get_computed_blocks(newcomer)[1]])
        found.append({"turns": turns, "newcomers": asks})
    return found


def asked(name: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """A request as a recording has it."""
    return {
        "request_id": name, "prompt_token_ids": list(prompt), "max_tokens": max_tokens,
        "priority": 0, "arrival_time": 0.0, "ignore_eos": True,
    }  # fmt: skip


def alone(version: str) -> list[list[Any]]:
    """Requests alone on a server: pool, prompt, max_tokens, and whether each comes to its end."""
    found = []
    for blocks in (2, 3, 4, 6):
        for prompt in range(1, 4 * blocks + 2, 1 if blocks < 4 else 3):
            for most in (1, 2, 4, 9):
                text = (
                    f"config: {{num_blocks: {blocks}, max_num_batched_tokens: 64}}\n"
                    f"requests: [{{id: a, prompt: {prompt}, max_tokens: {most}}}]"
                )
                ends = decided(workload_file.parse(text), version) is not None
                found.append([blocks, prompt, most, ends])
    return found


def first_shown() -> dict[str, Any]:
    """Of each exhibit of the lab the room, and the step at which it breaks, as its release ran."""
    level = logging.root.manager.disable
    found = {}
    for number in SHOWN:
        exhibit = EXHIBITS[number]
        shown = exhibit.show(core_of(exhibit.bad))
        assert shown.broken, number
        found[str(number)] = {
            "bad": exhibit.bad, "good": exhibit.good, "invariant": exhibit.invariant,
            "step": shown.step, "lines": list(shown.lines),
        }  # fmt: skip
    logging.disable(level)
    return found


def mend() -> Mapping[str, Any]:
    """The recordings of lab 19-02, by file name; lists of recordings and plain values."""
    return {
        "37307.jsonl.gz": list(plans(admission, "0.18.0", "0.19.0", 4000, 30, 10)),
        "37307-hits.jsonl.gz": list(plans(shared, "0.18.0", "0.19.0", 4000, 20, 5)),
        "49097.jsonl.gz": list(plans(walk, "0.27.1", "0.28.0", 9000, 20, 10)),
        "52482.json": evictions("0.28.0", 30),
        "25780.json": look_ups("0.11.1", 20),
        "49377.json": sessions("0.32.0", 25),
        "39734.json": alone("0.22.1"),
        "shown.json": first_shown(),
    }


# ------------------------------------------------------------------ lab 19-03


def calls_of(scheduler: Any) -> list[list[Any]]:
    """Notes, from now on, which blocks are found, adopted and handed out, and for whom."""
    manager, calls = scheduler.kv_cache_manager, []
    pool = manager.block_pool
    find, allocate = manager.get_computed_blocks, manager.allocate_slots
    touch, hand_out = pool.touch, pool.get_new_blocks

    def finding(request: Any) -> Any:
        answer = find(request)
        ids = [block.block_id for blocks in answer[0].blocks for block in blocks]
        calls.append(["found", request.request_id, ids])
        return answer

    def allocating(request: Any, *rest: Any, **named: Any) -> Any:
        answer = allocate(request, *rest, **named)
        said = "refused" if answer is None else "allocated"
        calls.append([said, request.request_id, []])
        return answer

    def touching(blocks: Any) -> Any:
        calls.append(["adopted", "", [block.block_id for block in blocks]])
        return touch(blocks)

    def handing(count: int) -> Any:
        blocks = hand_out(count)
        calls.append(["handed out", "", [block.block_id for block in blocks]])
        return blocks

    manager.get_computed_blocks, manager.allocate_slots = finding, allocating
    pool.touch, pool.get_new_blocks = touching, handing
    return calls


def between(version: str, seeds: int) -> dict[str, Any]:
    """37076: what the scheduler asks of the manager, and the order of calls of the report."""
    core, passes = core_of(version), []
    for seed in range(seeds):
        rng = random.Random(seed)
        shared = [9] * 8
        lines = [f"config: {{num_blocks: {rng.randint(6, 9)}, max_num_batched_tokens: 16}}"]
        lines.append("requests:")
        for index in range(6):
            prompt = [*shared[: rng.choice((0, 4, 8))], *(10 + index,) * rng.randint(1, 9)]
            lines.append(
                f"- {{id: r{index}, prompt: {prompt}, max_tokens: {rng.randint(1, 6)}, "
                f"step: {rng.randint(0, 6)}}}"
            )
        made = Run(workload_file.parse("\n".join(lines)), core, tells_tokens=False)
        calls = calls_of(made.scheduler)
        made.recorded()
        passes.append(calls)
    scheduler = core.make_scheduler({**workload_file.CONFIG, "num_blocks": 3})
    first = core.make_request(asked("first", [9] * 4, 1), SIZE, 2)
    scheduler.add_request(first)
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, core.runner_output(plan, {"first": 7}))
    calls, manager = calls_of(scheduler), scheduler.kv_cache_manager
    a = core.make_request(asked("a", [9] * 4 + [8], 1), SIZE, 2)
    b = core.make_request(asked("b", [5] * 8, 1), SIZE, 2)
    manager.get_computed_blocks(a)
    manager.get_computed_blocks(b)
    manager.allocate_slots(b, 8)
    return {"scheduler": passes, "report": calls}


def admissions(version: str, policy: str, seeds: int) -> list[dict[str, Any]]:
    """41951: who was admitted and who was left waiting, with equal priorities among the draws."""
    found = []
    for seed in range(seeds):
        rng = random.Random(seed)
        lines = [
            f"config: {{num_blocks: {rng.randint(5, 7)}, max_num_seqs: 3, "
            f"max_num_batched_tokens: 16, policy: {policy}, enable_prefix_caching: false}}",
            "requests:",
        ]
        for index in range(5):
            lines.append(
                f"- {{id: r{index}, prompt: {rng.randint(1, 8)}, max_tokens: {rng.randint(2, 8)}, "
                f"priority: {rng.randint(0, 1)}, step: {rng.randint(0, 4)}, "
                f"arrival_time: {float(rng.randint(0, 4))}}}"
            )
        workload = workload_file.parse("\n".join(lines))
        entry = decided(workload, version)
        if entry is None:
            continue
        adds = [add for event in workload["events"] for add in event["add"]]
        keys = {a["request_id"]: [a["priority"], a["arrival_time"], a["request_id"]] for a in adds}
        steps = [
            {"admitted": [*step["new"], *step["resumed"]], "preempted": list(step["preempted"]),
             "waiting": list(step["waiting"])}
            for step in entry["steps"]
        ]  # fmt: skip
        found.append({"keys": keys, "steps": steps})
    return found


def hits(version: str, caching: bool, seeds: int) -> list[list[list[Any]]]:
    """51198: prompts, one after the other, on full attention and a state; how many tokens hit."""
    core, found = core_of(version), []
    groups = [{"kind": "full", "block_size": 16}, {"kind": "mamba", "block_size": 16}]
    config = {
        **workload_file.CONFIG, "num_blocks": 200, "block_size": 16, "kv_groups": groups,
        "enable_prefix_caching": caching,
    }  # fmt: skip
    for seed in range(seeds):
        rng = random.Random(seed)
        scheduler, asks = core.make_scheduler(config), []
        for index in range(5):
            prompt = [9] * rng.choice((5, 12, 15, 20, 40)) + [20 + index] * rng.randint(1, 4)
            name = f"r{index}"
            scheduler.add_request(core.make_request(asked(name, prompt, 1), 16, 2))
            plan = scheduler.schedule()
            asks.append([prompt, len(prompt) - plan.num_scheduled_tokens[name]])
            scheduler.update_from_output(plan, core.runner_output(plan, {name: 7}))
        found.append(asks)
    return found


def planned(workload: Workload, version: str) -> dict[str, Any]:
    """A run up to its end, or to where it stands still, and what is left then."""
    made = Run(copy.deepcopy(workload), core_of(version), tells_tokens=False)
    with contextlib.suppress(Stalled):
        made.recorded()
    keys = ("num_scheduled_tokens", "preempted", "running", "free_blocks")
    steps = [{key: step[key] for key in keys} for step in made.steps]
    budget = workload["config"]["max_num_batched_tokens"]
    return {"budget": budget, "steps": steps, "left": sorted(made.scheduler.requests)}


def lost_step(rng: random.Random) -> Workload:
    """Priorities, a small budget, few blocks."""
    config = (
        f"num_blocks: {rng.randint(4, 6)}, max_num_seqs: 3, "
        f"max_num_batched_tokens: {rng.randint(3, 6)}, policy: priority, "
        "enable_prefix_caching: false"
    )
    return drawn(rng, config, 3, 6)


def judged() -> dict[str, Any]:
    """The files of lab 19-03, by report."""
    walks = [lost_step(random.Random(seed)) for seed in range(24)]
    loads = [connector.generate(seed) for seed in (101, 145, 496, 0, 1)]
    walks.insert(0, EXHIBITS[26765].workload or {})
    loads.insert(0, EXHIBITS[44560].workload or {})
    return {
        "37076.json": between("0.22.1", 12),
        "41951.json": {
            "priority": admissions("0.22.1", "priority", 16),
            "fcfs": admissions("0.22.1", "fcfs", 16),
        },
        "51198.json": {"hybrid": hits("0.26.0", True, 12), "off": hits("0.26.0", False, 4)},
        "26765.json": {
            "step": EXHIBITS[26765].show(core_of("0.22.1")).step,
            **{v: [planned(each, v) for each in walks] for v in ("0.22.1", "0.33.0")},
        },
        "44560.json": {v: [planned(each, v) for each in loads] for v in ("0.22.1", "0.23.0")},
    }


def write(folder: Path, files: Mapping[str, Any]) -> None:
    """Each value in its file: recordings as such, anything else as JSON, an element a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        if name.endswith(".jsonl.gz"):
            recording.write(folder / name, value)
        elif isinstance(value, list):
            lines = ",\n".join(json.dumps(each) for each in value)
            (folder / name).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        else:
            (folder / name).write_text(
                json.dumps(value, separators=(",", ":")) + "\n", encoding="utf-8"
            )


def verdicts() -> dict[str, Any]:
    """The file of lab 19-04: of each exhibit, which releases have it; some cannot run it."""
    level = logging.root.manager.disable
    found: dict[str, dict[str, bool]] = {}
    for number, exhibit in EXHIBITS.items():
        said = {}
        for version in NEEDED:
            try:
                said[version] = exhibit.show(core_of(version)).broken
            except (ValueError, AttributeError) as error:  # a release without what is exhibited
                print(f"{number} at {version}: {type(error).__name__} {error}")
        found[str(number)] = said
    logging.disable(level)
    return {"verdicts.json": found}


NEEDED = (
    "0.11.0", "0.11.2", "0.13.0", "0.14.0", "0.16.0", "0.18.0", "0.19.0", "0.22.1", "0.23.0",
    "0.24.0", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0",
    "0.33.0",
)  # fmt: skip
"""The releases that lab 19-04 asks, the oldest first."""


# ------------------------------------------------------------------ the rooms in the page


def rooms() -> dict[str, Any]:
    """What `course museum run` shows of each exhibit, by release: those that it runs, and the pin.

    Where no release behaves, the newest one asked stands in place of the first good one.
    """
    level = logging.root.manager.disable
    found: dict[str, dict[str, Any]] = {}
    for number, exhibit in EXHIBITS.items():
        versions = {exhibit.bad, exhibit.good or NEEDED[-1], PIN}
        found[str(number)] = {
            version: asdict(exhibit.show(core_of(version)))
            for version in sorted(versions, key=[*OLDER, *NEEDED].index)
        }
    logging.disable(level)
    return {RECORDED.name: found}


OLDER = ("0.11.1", "0.12.0", "0.17.0")
"""Asked by an exhibit or a lab, and not by lab 19-04."""
FILES = ((MEND, mend), (JUDGE, judged), (BISECT, verdicts), (ROOMS, rooms))


if __name__ == "__main__":
    for folder, made in FILES:
        write(folder, made())

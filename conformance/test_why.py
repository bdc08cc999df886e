"""Reasons are exact: lifting the limit that one names changes the step, lifting others does not.

For drawn steps of recorded workloads the scheduler is copied before it plans. On one copy the limit
that the reason names is lifted, on another copy each limit that it does not name.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance import recording, replay, why
from mini_vllm import LLM, SamplingParams
from mini_vllm.block_pool import KVCacheBlock
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.observe.why import GETS, WAITS, Log, Span, explain

RECORDINGS = Path(__file__).parent / "recordings"
FILES = ("basic", "pressure", "priority", "prefix", "whole-prompts", "lora", "grammar", "async")
PLENTY = 10_000


def add_blocks(scheduler: Any, count: int) -> None:
    """Free blocks that were not there."""
    pool = scheduler.kv.block_pool
    for number in range(pool.num_blocks, pool.num_blocks + count):
        pool.blocks.append(KVCacheBlock(number))
        pool.free_queue.append(pool.blocks[-1])
    pool.num_blocks += count


def lift(scheduler: Any, kind: str, request_id: str) -> None:
    """Take one limit away from a copy."""
    if kind in ("blocks", "preemption"):
        add_blocks(scheduler, 200)
    elif kind == "adapters":
        for gate in scheduler.gates:
            if hasattr(gate, "max_loras"):
                gate.max_loras = PLENTY
    elif kind == "grammar":
        scheduler.requests[request_id].waits_for = None
    else:
        change: dict[str, Any] = {
            "budget": {"max_num_batched_tokens": PLENTY},
            "threshold": {"long_prefill_token_threshold": 0},
            "max_num_seqs": {},
            "whole prompt": {"enable_chunked_prefill": True},
        }[kind]
        if kind == "max_num_seqs":
            scheduler.max_num_seqs = PLENTY
        scheduler.config = dataclasses.replace(scheduler.config, **change)


def gets(scheduler: Any, request_id: str) -> int:
    """Tokens that a request gets in the step that the scheduler plans now."""
    return int(scheduler.schedule().num_scheduled_tokens.get(request_id, 0))


def reason_now(log: Any, request_id: str, step: int) -> Span | None:
    """What decided over the request in this step, not what its cache had."""
    for span in reversed(log.of(request_id)):
        if span.last == step and span.kind.startswith(("waits", "gets")):
            return span
    return None


def steps(names: tuple[str, ...], count: int, seed: int) -> Iterator[tuple[Any, str, Span, int]]:
    """A copy of the scheduler before a step, a request, the reason, and what it got."""
    draw = random.Random(seed)
    for name in names:
        path = RECORDINGS / f"{name}.jsonl.gz"
        lines = draw.sample(range(1, recording.count(path) + 1), count)
        wanted = sorted(lines)
        entries = dict(zip(wanted, recording.read(path, wanted=wanted.__contains__), strict=True))
        for entry in map(entries.__getitem__, lines):
            driven = replay.Driven(
                entry, replay.mini_scheduler(replay.config_of(entry)), replay.mini_request
            )
            log, scheduler = explain(driven.scheduler), driven.scheduler
            events = replay.events_by_step(entry)
            chosen = draw.randrange(len(entry["steps"]))
            kept: list[Any] = []
            plan = type(scheduler).schedule

            def schedule(driven: Any = driven, chosen: int = chosen, kept: list[Any] = kept,
                         plan: Any = plan) -> Any:  # fmt: skip
                scheduler = driven.scheduler
                if driven.num_steps - 1 == chosen:
                    del scheduler.schedule
                    kept.append(copy.deepcopy(scheduler))
                return plan(scheduler)

            scheduler.schedule = schedule  # type: ignore[method-assign]
            for index in range(chosen + 1):
                recorded = entry["steps"][index]
                got = driven.step(
                    events.get(index, {}), recorded.get("sampled_token_ids"),
                    recorded.get("draft_token_ids"),
                )  # fmt: skip
            found = {name: reason_now(log, name, chosen) for name in sorted(log.spans)}
            names_now = [name for name, span in found.items() if span is not None]
            names_now.sort(key=lambda name: found[name].kind == "gets: decode")  # type: ignore[union-attr]
            for request_id in names_now[:3]:
                if (span := found[request_id]) is not None:
                    count_of = int(got["num_scheduled_tokens"].get(request_id, 0))
                    yield kept[0], request_id, span, count_of


@pytest.fixture(autouse=True)
def deep() -> Iterator[None]:
    """Copies of an engine's state are as deep as its chains of blocks are long."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    yield
    sys.setrecursionlimit(before)


def check(names: tuple[str, ...], count: int, seed: int) -> Counter[str]:
    """How many reasons of each kind held."""
    held: Counter[str] = Counter()
    for before, request_id, span, count_of in steps(names, count, seed):
        side, _, kind = span.kind.partition(": ")
        named = str(span.key[1]) if kind == "behind" else kind
        who = str(span.key[0]) if kind == "behind" else request_id
        liftable = {"budget", "max_num_seqs", "blocks", "preemption", "threshold", "adapters",
                    "grammar", "whole prompt"}  # fmt: skip
        if named in liftable:
            without = copy.deepcopy(before)
            lift(without, named, who)
            now = gets(without, request_id)
            after = reason_now(without.log, request_id, span.last)
            if after is None:  # it is preempted now
                changed = True
            elif kind == "behind":
                changed = (after.kind, after.key[:2]) != (span.kind, span.key[:2])
            else:
                changed = now != count_of or after.kind != span.kind
            assert changed, f"{request_id}: {span} (lifting it changes nothing)"
        others = {"budget", "max_num_seqs", "blocks"} - {named}
        if kind in ("blocks", "max_num_seqs", "budget", "adapters", "grammar") and side == "waits":
            if kind == "budget":
                others -= {"blocks"}  # with more blocks a step that preempted may go on
            for other in sorted(others - ({"budget"} if kind == "blocks" else set())):
                without = copy.deepcopy(before)
                lift(without, other, request_id)
                assert gets(without, request_id) == 0, (
                    f"{request_id}: {span} (but lifting {other} alone helps)"
                )
        held[span.kind] += 1
    return held


@pytest.mark.slow
def test_reasons_hold_and_no_other_limit_does():
    held = check(FILES, 2, seed=1)
    assert sum(held.values()) >= 25


@pytest.mark.slow
def test_hundreds_of_reasons_of_every_kind():
    held = check((*FILES, "hybrid"), 30, seed=7)
    assert sum(held.values()) >= 300
    for kind in ("budget", "max_num_seqs", "blocks", "preemption", "behind", "adapters", "grammar"):
        assert held[f"waits: {kind}"] >= 1, kind
    for kind in ("budget", "threshold", "all", "decode"):
        assert held[f"gets: {kind}"] >= 10, kind


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pressure", "hybrid"])
def test_as_many_blocks_as_are_missing_admit_a_request_and_one_less_does_not(name):
    seen = 0
    for before, request_id, span, _ in steps((name,), 150, seed=11):
        if span.kind != "waits: blocks" or span.varies:
            continue
        needed, free = re.findall(r"needs (\d+) blocks? and (\d+|none) (?:is|are) free", span.text)[
            0
        ]
        missing = int(needed) - (0 if free == "none" else int(free))
        for count in (missing - 1, missing):
            without = copy.deepcopy(before)
            add_blocks(without, count)
            without.schedule()
            after = reason_now(without.log, request_id, span.last)
            is_refused = after is not None and after.kind == "waits: blocks"
            assert is_refused is (count < missing), f"{request_id}: {span}; {count} more: {after}"
        seen += 1
    assert seen >= 5, f"{seen} requests that waited for blocks"


@pytest.mark.slow
def test_watching_changes_no_decision():
    for name in FILES:
        for entry in itertools.islice(recording.read(RECORDINGS / f"{name}.jsonl.gz"), 5):

            def build(config: Any) -> Any:
                scheduler = replay.mini_scheduler(config)
                explain(scheduler)
                return scheduler

            assert replay.replay(entry, build)[1] is None


def test_an_engine_says_why():
    llm = LLM("toy", num_blocks=6, block_size=4, max_num_batched_tokens=8)
    log = explain(llm.llm_engine.scheduler)
    llm.generate(["abcdefgh", "abcdefgh"], SamplingParams(max_tokens=6, ignore_eos=True))
    kinds = {span.kind for spans in log.spans.values() for span in spans}
    assert {"cache: new", "gets: all", "gets: decode", "ends"} <= kinds
    assert kinds & {f"waits: {kind}" for kind in WAITS}
    assert all(kind.partition(": ")[2] in {*WAITS, *GETS, "in flight"}
               for kind in kinds if kind.startswith(("waits", "gets")))  # fmt: skip


@pytest.mark.slow
def test_groups_of_states_are_refused(capsys):
    path = RECORDINGS / "states.jsonl.gz"
    seed = next(iter(recording.read(path, recording.UPSTREAM)))["seed"]
    assert why.run(path, None, None, seed) == 2
    assert (
        "has a group of states; need groups of full attention and windows"
        in capsys.readouterr().err
    )


def test_a_scheduler_of_ones_own_is_refused():
    with pytest.raises(ValueError, match="scheduler=object: need one derived from Scheduler"):
        explain(object())  # type: ignore[arg-type]


PRESSURE = RECORDINGS / "pressure.jsonl.gz"


@pytest.mark.slow
def test_a_recorded_request_is_explained_from_its_arrival_to_its_end():
    entry = next(iter(recording.read(PRESSURE, recording.UPSTREAM)))
    found = why.follow(PRESSURE, entry["seed"])
    assert not found.ends
    for request_id in found.names:
        spans = found.log.of(request_id)
        assert spans[-1].kind == "ends"
        steps = {n for s in spans if s.kind.startswith(("waits", "gets", "preempted"))
                 for n in range(s.first, s.last + 1)}  # fmt: skip
        assert steps == set(range(min(steps), max(steps) + 1)), "a step without a reason"
    lines = why.summary(found)
    assert len(lines) == len(found.names) and any("preempted" in line for line in lines)


@pytest.mark.slow
def test_a_block_that_was_there_is_not_called_new():
    """A preempted request looks for its own blocks: what is missing of them was evicted."""
    path, seen = RECORDINGS / "prefix.jsonl.gz", 0
    for entry in recording.read(path, recording.UPSTREAM):
        if seen > 3:
            break
        if not any(step["preempted"] for step in entry["steps"]):
            continue
        size = entry["config"]["block_size"]
        for spans in why.follow(path, entry["seed"]).log.spans.values():
            for before, span in enumerate(spans):
                lost = [s for s in spans[:before] if s.kind == "preempted"]
                if not lost or span.kind not in ("cache: new", "cache: parts", "cache: evicted"):
                    continue
                computed = int(re.findall(r"with (\d+) computed", lost[-1].text)[0])
                missing = int(re.findall(r"has (\d+) of", span.text)[0]) // size
                if missing < computed // size:  # it had filled the block that is missing
                    seen += 1
                    assert span.kind == "cache: evicted", (entry["seed"], str(span))
    assert seen > 3


@pytest.mark.slow
def test_where_two_prompts_part_is_said_by_the_token():
    path = RECORDINGS / "prefix.jsonl.gz"
    entry = next(
        e for e in recording.read(path, recording.UPSTREAM)
        if len({a["prompt_token_ids"][0] for ev in e["events"] for a in ev["add"]}) > 1
    )  # fmt: skip
    found = why.follow(path, entry["seed"])
    first, *others = found.tokens
    for other in others:
        a, b = found.tokens[first], found.tokens[other]
        equal = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        line, *_ = why.prefix_lines(found, first, other)
        assert (f"token {equal} is the first" in line) == (equal is not None)


def hashes_of(found: why.Explained, entry: Any) -> dict[str, list[int]]:
    """Block hashes of every prompt, of the mini engine's own manager."""
    kv = KVCacheManager(2, found.block_size)
    adds = [add for event in entry["events"] for add in event["add"]]
    requests = {add["request_id"]: replay.mini_request(add, 2) for add in adds}
    for request in requests.values():
        kv._extend_hashes(request)
    return {name: list(request.block_hashes) for name, request in requests.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("file", "count"), [("lora", 8), ("encoder", 16), ("prefix", 5)])
def test_what_is_said_to_be_shared_has_equal_hashes_and_what_follows_has_not(file, count, tmp_path):
    """Also where the tokens are equal and an adapter or a picture is not."""
    told: Counter[str] = Counter()
    for entry in itertools.islice(recording.read(RECORDINGS / f"{file}.jsonl.gz"), count):
        recording.write(tmp_path / "one.jsonl.gz", [entry])
        found = why.follow(tmp_path / "one.jsonl.gz")
        hashes = hashes_of(found, entry)
        for one, other in itertools.permutations(found.names, 2):
            line, *more = why.prefix_lines(found, one, other)
            pairs = zip(hashes[one], hashes[other], strict=False)
            shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            said = re.search(r"(\d+|no) blocks? (?:of \d+ can be|is) shared", line)
            assert said and int(said[1].replace("no", "0")) == shared, (entry["seed"], line)
            most = (len(found.tokens[one]) - 1) // found.block_size
            assert bool(more) == (shared > most), (entry["seed"], one, other)
            equal = found.tokens[one] == found.tokens[other]
            told["an adapter"] += "adapter" in line and equal
            told["a picture"] += "picture" in line
            told["the last token"] += bool(more)
    assert told["an adapter"] > 2 if file == "lora" else True, told
    assert told["a picture"] > 2 if file == "encoder" else True, told
    assert told["the last token"] > 2 if file == "prefix" else True, told


def test_a_file_without_tokens_names_the_adapter_and_rules_out_the_salt():
    found = why.Explained(
        Log(), names={"0": "x", "1": "y", "2": "z"}, block_size=4,
        hashes={"0": [1, 2, 3], "1": [1, 2, 4], "2": [9, 2, 3]}, prompts=dict.fromkeys("012", 12),
    )  # fmt: skip
    [first, second] = why.prefix_lines(found, "0", "y")
    assert first == "the first 2 blocks of 4 are equal"
    assert "a token between 8 and 11. The adapters are the same" in second
    [_, second] = why.prefix_lines(found, "0", "2")
    assert "a token between 0 and 3, or the cache_salt" in second
    *_, last = why.prefix_lines(found, "0", "0")
    assert last.startswith("at most 2 of them can hit: the last of the 12 tokens of 0")
    found.adapters["1"] = 7
    [line] = why.prefix_lines(found, "1", "0")
    assert line.startswith("1 is of adapter 7, 0 of the base model: the adapter is part of every")


@pytest.mark.slow
def test_what_cannot_be_explained_is_said(capsys):
    assert why.run(PRESSURE, None, None, None) == 2
    assert "400 workloads; name one with --seed" in capsys.readouterr().err
    assert why.run(Path("nowhere"), None, None, None) == 2
    assert "nowhere" in capsys.readouterr().err
    assert why.run(PRESSURE, "r99", None, 1) == 2
    assert "'r99': no request has this id; there are" in capsys.readouterr().err

"""What lab 03-03 pins: hits to the token, and what meters say of what vLLM's scheduler did."""

from __future__ import annotations

import functools
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance import recording
from labkit import refused
from mini_vllm import LLMEngine, SamplingParams

HERE = Path(__file__).parent
RECORDINGS = HERE.parents[2] / "conformance" / "recordings"


def workload(num_prompts: int = 16, shared: int = 430, unique: int = 15) -> list[list[int]]:
    """Prompts with a common beginning and tails that differ at once."""
    head = [7 + i % 83 for i in range(shared)]
    return [
        [*head, *(100 + (number + i) % 90 for i in range(unique))] for number in range(num_prompts)
    ]


# --- predicted -----------------------------------------------------------------------------------


def test_the_worked_example(lab):
    came = lab.predict_hits(workload(), 16)
    assert came == (7120, 6240, 880), (
        "16 prompts of 430 + 15 tokens, blocks of 16: 26 blocks, 416 tokens, for each of 15 "
        "followers. The 14 shared tokens in the next block are computed by everyone.\n"
        f"expected (queries, hits, computed) (7120, 6240, 880)\ncame     {came}"
    )
    each = lab.predict_each(workload(), 16)
    assert each == [0] + [416] * 15, (
        f"the first finds nothing.\nexpected {[0] + [416] * 15}\ncame     {each}"
    )


def test_identical_prompts_compute_their_last_block(lab):
    for length, expected in ((16, 0), (17, 16), (32, 16), (33, 32), (1, 0)):
        came = lab.predict_each([[5] * length] * 3, 16)
        assert came == [0, expected, expected], (
            f"three equal prompts of {length}: the last token is always computed, and with it its "
            f"whole block.\nexpected {[0, expected, expected]}\ncame     {came}"
        )


def test_any_earlier_prompt_counts(lab):
    a, b = [1] * 40, [2] * 40
    prompts = [a, b, [*b, 3, 4], [*a[:20], 9], [9] * 8, a[:16]]
    came = lab.predict_each(prompts, 8)
    expected = [0, 0, 40, 16, 0, 8]
    assert came == expected, (
        "the third continues the second, the fourth begins as the first (20 tokens, 2 blocks of "
        "8), the last is the first's two blocks exactly, less the one with its last token.\n"
        f"expected {expected}\ncame     {came}"
    )


def test_strangers_find_nothing(lab):
    prompts = [[number, *[5] * 63] for number in range(6)]
    came = lab.predict_hits(prompts, 16)
    assert came == (384, 0, 384), (
        "the prompts differ in their first token and are equal in the other 63. A block counts "
        f"with all that stands before it.\nexpected (384, 0, 384)\ncame     {came}"
    )
    came = lab.predict_hits([], 16)
    assert came == (0, 0, 0), f"no prompts; expected (0, 0, 0), came {came}"


def measured(prompts: list[list[int]], block_size: int, **settings: Any) -> list[int]:
    """Hits of each prompt by the mini engine's own counter."""
    engine = LLMEngine(num_blocks=4000, block_size=block_size, model="toy", **settings)
    cached: dict[str, int] = {}
    engine.observers.append(lambda plan: cached.update(plan.num_cached_tokens))
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.has_unfinished_requests():
        engine.step()
    return [cached[request_id] for request_id in ids]


@pytest.mark.slow
def test_the_mini_engine_finds_what_was_predicted(lab):
    rng = random.Random(3)
    for case in range(60):
        size = rng.choice((1, 2, 4, 8, 16))
        prompts: list[list[int]] = []
        for _ in range(rng.randint(1, 12)):
            base = rng.choice(prompts) if prompts and rng.random() < 0.8 else []
            head = base[: rng.randint(0, len(base))]
            prompts.append([*head, *(rng.randint(0, 2) for _ in range(rng.randint(1, 30)))])
        expected = measured(prompts, size, max_num_batched_tokens=rng.choice((16, 4096)))
        came = lab.predict_each(prompts, size)
        assert came == expected, (
            f"case {case}, blocks of {size}, prompts of {[len(p) for p in prompts]} tokens: the "
            f"hits of each in the mini engine.\nexpected {expected}\ncame     {came}"
        )


def clean_workloads() -> list[tuple[list[list[int]], list[int | None], int]]:
    """Recorded ones in which the prediction's premises hold: prompts, real hits, block size.

    Caching on, fcfs, no threshold, no request preempted or aborted, room for everything. Hits are
    None for a prompt that goes on where an earlier request's answer begins: answers are cached
    too.
    """
    found = []
    for name in ("limits", "mixed", "prefix", "whole-prompts"):
        for entry in recording.read(RECORDINGS / f"{name}.jsonl.gz"):
            config, outputs = entry["config"], entry["outputs"]
            adds = {add["request_id"]: add for event in entry["events"] for add in event["add"]}
            size, room = config["block_size"], config["num_blocks"] - 1
            need = (len(add["prompt_token_ids"]) + add["max_tokens"] for add in adds.values())
            if (
                not config["enable_prefix_caching"]
                or config["policy"] != "fcfs"
                or config["long_prefill_token_threshold"]
                or sum(-(-tokens // size) for tokens in need) > room
                or any(event["abort"] for event in entry["events"])
                or any(step["preempted"] for step in entry["steps"])
            ):
                continue
            prompts: dict[str, list[int]] = {}
            hits: list[int | None] = []
            for step in entry["steps"]:
                for r in step["new"]:
                    prompt = adds[r]["prompt_token_ids"]
                    goes_on = any(
                        prompt[: len(p) + 1] == [*p, *outputs[q][:1]] for q, p in prompts.items()
                    )
                    hit = step["num_computed_tokens"][r] - step["num_scheduled_tokens"][r]
                    hits.append(None if goes_on else hit)
                    prompts[r] = prompt
            found.append((list(prompts.values()), hits, size))
    return found


@pytest.mark.slow
def test_the_real_scheduler_found_what_was_predicted(lab):
    workloads = clean_workloads()
    total = sum(hit or 0 for _, hits, _ in workloads for hit in hits)
    assert total > 500, f"recordings with hits are missing: {total} tokens hit in {len(workloads)}"
    for prompts, hits, size in workloads:
        came = lab.predict_each(prompts, size)
        masked = [None if hit is None else c for hit, c in zip(hits, came or hits, strict=True)]
        assert came is not None and masked == hits, (
            f"recorded from v0.22.1, blocks of {size}, prompts {prompts}. None: not predictable "
            f"from prompts alone.\nexpected {hits}\ncame     {came}"
        )


# --- meters beside what happened -----------------------------------------------------------------


@functools.cache
def kept() -> list[dict[str, Any]]:
    """Workloads of vLLM's scheduler: its meters after each step, and what was watched."""
    path = RECORDINGS / "parts" / "meters.jsonl.gz"
    return [line for line in recording.lines(path) if "meters" in line]


def spans(lab: Any) -> Iterator[tuple[dict[str, Any], Any, Any, list[int], str]]:
    """From each reading at rest to a later one: the workload, both, what happened, and where."""
    for entry in kept():
        readings = [lab.Reading(*meters[:7]) for meters in entry["meters"]]
        rest = [k for k, r in enumerate(readings) if not (r.running or r.waiting)]
        ends = [rest[0], *(k for k in rest[1:-1] if readings[k + 1] != readings[k])]
        for start in ends[:3]:
            for stop in range(start + 1, len(readings)):
                pairs = zip(entry["happened"][start], entry["happened"][stop], strict=True)
                where = f"seed {entry['seed']}, steps {start} to {stop}, {readings[stop]}"
                yield entry, readings[start], readings[stop], [b - a for a, b in pairs], where


def test_lookups_that_were_repeated(lab):
    idle, length = lab.Reading(), 445
    came = lab.looked_up_again(idle, lab.Reading(30260, 27872, 880, 6240), length)
    assert came == (23140, 23140), (
        "at rest: 7,120 prompt tokens, and 30,260 looked up. What was looked up and not found is "
        f"in `computed`.\nexpected (23140, 23140)\ncame     {came}"
    )
    before, after = lab.Reading(1000, 900, 300, 500), lab.Reading(1100, 990, 350, 550)
    came = lab.looked_up_again(before, after, 99)
    assert came == (0, 0), (
        "counters count since the start, and repetitions of yesterday are in both readings: 100 "
        f"looked up, 50 computed, 50 cached.\nexpected (0, 0)\ncame     {came}"
    )
    came = lab.looked_up_again(idle, lab.Reading(0, 0, 50, 0), length)
    assert came == (0, 0), f"without prefix caching nothing is looked up.\ncame {came}"
    came = lab.looked_up_again(idle, lab.Reading(4450, 0, 445, 0, 0, 1, 2), length)
    assert came == (2670, 4005), (
        "one prompt has given its first token, three more are in flight and may each have been "
        f"looked up a first time.\nexpected (2670, 4005)\ncame     {came}"
    )


def test_the_interval_holds_what_the_scheduler_did(lab):
    points = 0
    for entry, before, after, happened, where in spans(lab):
        length, flying = max(map(len, entry["prompts"])), after.running + after.waiting
        least, most = lab.looked_up_again(before, after, length)
        assert least <= happened[0] <= most, (
            f"{where}: vLLM's scheduler looked up {happened[0]} tokens again.\n"
            f"came     {least} to {most}"
        )
        assert least >= 0 and most - least <= flying * length, (
            f"{where}: {flying} in flight, so the ends are at most {flying * length} apart.\n"
            f"came     {least} to {most}"
        )
        points += least == most
    assert points > 200, f"readings at rest: {points}"


def test_what_preemption_costs(lab):
    """A request that was preempted and waits is not in the counter yet (M3)."""
    late = 0
    for entry, before, after, happened, where in spans(lab):
        least, most = lab.computed_again(before, after, entry["config"]["max_model_len"])
        assert least <= happened[1] and (most is None or happened[1] <= most), (
            f"{where}: vLLM's scheduler computed {happened[1]} tokens again, "
            f"{after.preemptions - before.preemptions} preemptions were counted.\n"
            f"came     {least} to {most}"
        )
        if not (after.running or after.waiting):
            bound = (after.preemptions - before.preemptions) * entry["config"]["max_model_len"]
            assert most is not None and most <= bound, (
                f"{where}: at rest, so every preemption is counted: at most {bound}.\n"
                f"came     {least} to {most}"
            )
        elif after.preemptions == before.preemptions:
            late += happened[1] > 0
    assert late > 0, "no recorded reading has tokens computed again and no preemption counted"


def test_whether_memory_was_refused(lab):
    undecided = 0
    for entry, before, after, happened, where in spans(lab):
        length = max(map(len, entry["prompts"]))
        came = lab.memory_refused(before, after, length)
        assert came in (None, happened[2] > 0), (
            f"{where}: memory was refused {happened[2]} times.\ncame     {came}"
        )
        least, _ = lab.looked_up_again(before, after, length)
        at_rest = not (after.running or after.waiting)
        if least or after.preemptions > before.preemptions or (at_rest and after.queries):
            assert came is not None, f"{where}: the meters decide it; came None"
        undecided += came is None
    assert undecided > 0, "no recorded reading leaves it open"


def test_two_servers_with_equal_meters(lab):
    """Equal readings at rest, and memory was refused to one of them."""
    told: dict[Any, set[bool]] = {}
    for entry, before, after, happened, _ in spans(lab):
        key = (before, after, entry["config"]["max_model_len"])
        told.setdefault(key, set()).add(happened[2] > 0)
    twins = [key for key, found in told.items() if len(found) == 2]
    assert twins, "no two recorded servers have equal meters and different histories"
    for before, after, length in twins:
        came = lab.memory_refused(before, after, length)
        assert came is None, f"{before} to {after}: two servers, two histories.\ncame     {came}"
    before, after = lab.Reading(90, 0, 50, 0, 2), lab.Reading(130, 0, 90, 0, 2)
    came = lab.memory_refused(before, after, 64)
    assert came is False, f"both preemptions are yesterday's, and none was since; came {came}"
    nothing = lab.memory_refused(lab.Reading(), lab.Reading(), 64)
    assert nothing is False, f"a server that was asked nothing refused nothing; came {nothing}"
    off = lab.memory_refused(lab.Reading(), lab.Reading(0, 0, 64, 0), 64)
    assert off is None, f"without prefix caching a refusal leaves no trace; came {off}"
    off = lab.memory_refused(lab.Reading(), lab.Reading(0, 0, 64, 0, 1), 64)
    assert off is True, f"but a preemption does; came {off}"


def test_the_incident(lab):
    """Every recorded workload from its beginning to its end, with what was watched."""
    seen = Counter()
    for entry in kept():
        after = lab.Reading(*entry["meters"][-1][:7])
        config, prompts = entry["config"], entry["prompts"]
        size = config["block_size"]
        predicted = sum(lab.predict_each(prompts, size))
        if not config["enable_prefix_caching"]:
            expected = "nothing looked up"
        elif entry["happened"][-1][2]:
            expected = "memory"
        elif after.cached == predicted:
            expected = "as predicted"
        else:
            expected = "less found" if after.cached < predicted else "more found"
        came = lab.diagnose(lab.Reading(), after, prompts, size, config["max_model_len"])
        assert came == expected, (
            f"seed {entry['seed']}, {len(prompts)} prompts, {after}, predicted {predicted}; "
            f"watched: memory refused {entry['happened'][-1][2]} times, caching "
            f"{config['enable_prefix_caching']}\nexpected {expected}\ncame     {came}"
        )
        seen[came] += 1
    assert len(seen) >= 4, f"the recordings hold {dict(seen)}"
    came = lab.diagnose(lab.Reading(), lab.Reading(40, 0, 40, 0), [[5] * 20] * 2, 8, 64)
    assert came == "less found", (
        f"two equal prompts of 20, 16 tokens should be found.\nexpected less found\ncame     {came}"
    )
    came = lab.diagnose(lab.Reading(), lab.Reading(40, 24, 16, 24), [[5] * 20] * 2, 8, 64)
    assert came == "more found", f"24 were found where 16 are predicted; came {came}"


def test_readings_that_cannot_be_judged(lab):
    idle, busy = lab.Reading(), lab.Reading(10, 0, 0, 0, 0, 1, 0)
    for call, what in (
        (lambda: lab.looked_up_again(busy, busy, 64), "a first reading with a request in flight"),
        (lambda: lab.memory_refused(lab.Reading(9), lab.Reading(8), 64), "a counter that fell"),
        (lambda: lab.diagnose(idle, busy, [], 8, 64), "a last reading with a request in flight"),
        (
            lambda: lab.diagnose(idle, lab.Reading(20, 0, 20, 0), [[5] * 19], 8, 64),
            "20 tokens served, and a prompt of 19",
        ),
    ):
        refused(call, what)


def test_the_log_lines_window(lab):
    cases: tuple[tuple[list[tuple[int, int, int]], int, float, str], ...] = (
        ([], 1000, 0.0, "nothing yet"),
        ([(1, 100, 0), (1, 100, 80)], 1000, 0.4, "tokens, over both"),
        ([(1, 100, 0), (1, 100, 80)], 1, 0.8, "room for one request: the newest"),
        ([(2, 900, 0), (2, 100, 80)], 3, 0.8, "4 requests are too many: the older two go"),
        ([(1, 50, 0), (5, 100, 60)], 3, 0.6, "the newest report stays, whatever it holds"),
        ([(1, 100, 80), (0, 900, 0)], 1, 0.8, "a report of no requests pushes none out"),
        ([(1, 10, 0), (1, 30, 30), (1, 10, 5)], 2, 35 / 40, "per token, not the mean of rates"),
    )
    for updates, limit, expected, why in cases:
        came = lab.window_rate(updates, limit)
        assert came is not None and abs(came - expected) < 1e-12, (
            f"window_rate({updates}, {limit}): {why}.\nexpected {expected}\ncame     {came}"
        )


def test_a_large_report_drops_several(lab):
    came = lab.window_rate([(1, 10, 10), (1, 10, 10), (1, 10, 10), (3, 10, 0)], 3)
    assert came == 0.0, (
        "three reports of one request, then one of three, and a window of 3: all of the old ones "
        "must go, not just the oldest.\n"
        f"expected 0.0\ncame     {came}"
    )


# --- a real run, recorded ------------------------------------------------------------------------


def recorded() -> dict[str, dict[str, Any]]:
    """What vLLM's CPU build said of itself, arm by arm: two readings of its page, and its hits.

    Taken from what `run.py` printed; the prompts are `workload()`. "each" is what the engine gave
    with its answers, "rate" the per cent of its log line: other ways to the same numbers.
    """
    capture = json.loads((HERE / "captured" / "cpu.json").read_text(encoding="utf-8"))
    arms = {}
    for part in re.split("^=== ", capture["output"], flags=re.MULTILINE)[1:-1]:
        title = part.splitlines()[0]
        each = re.search(r"cached tokens per request: \[([\d, ]+)\]", part)
        rate = re.search(r"Prefix cache hit rate: ([\d.]+)%", part)
        size = re.search(r"blocks of (\d+)", title)
        assert rate and size, f"the capture has no rate or no block size in: {title}"
        arms[title] = {
            "block_size": int(size[1]),
            "before": "\n".join(re.findall(r"^  before \| (.*)$", part, re.MULTILINE)),
            "after": "\n".join(re.findall(r"^  after  \| (.*)$", part, re.MULTILINE)),
            "each": [int(number) for number in each[1].split(", ")] if each else None,
            "rate": float(rate[1]) / 100,
        }
    return arms


def test_the_meters_of_a_real_engine(lab):
    """Four arms of a real run: caching on twice, off, and a pool for three of sixteen prompts."""
    expected = ["as predicted", "as predicted", "nothing looked up", "memory"]
    found = []
    for name, arm in recorded().items():
        before, after = (lab.read_page(arm[when]) for when in ("before", "after"))
        each = lab.predict_each(workload(), arm["block_size"])
        if arm["each"] and "off" not in name:
            assert arm["each"] == each, (
                f"vLLM's CPU build, {name}, took from its cache, prompt by prompt:\n"
                f"expected {arm['each']}\ncame     {each}"
            )
        found.append(lab.diagnose(before, after, workload(), arm["block_size"], 512))
    assert found == expected, (
        f"vLLM's CPU build, {list(recorded())}\nexpected {expected}\ncame     {found}"
    )


def test_the_meters_of_a_real_engine_under_pressure(lab, record_property):
    arm = next(arm for name, arm in recorded().items() if "a pool of" in name)
    before, after = (lab.read_page(arm[when]) for when in ("before", "after"))
    grown = lab.spent(before, after)
    again = lab.looked_up_again(before, after, 512)
    assert again == (23140, 23140), (
        "the same sixteen prompts in a pool for three: 52 lookups of 445 tokens too many.\n"
        f"expected (23140, 23140)\ncame     {again}"
    )
    cost = lab.computed_again(before, after, 512)
    assert cost[0] <= 6 * 461 and cost[1] is not None and cost[1] <= 6 * 512, (
        "six preemptions of requests that hold at most 461 tokens: the meters say how many, and "
        f"not what they cost.\ncame     {cost}"
    )
    # The window of the log line holds all these lookups: fewer than 1000.
    lookups = grown.queries // 445
    rate = lab.window_rate([(lookups, grown.queries, grown.hits)])
    of_prompts = grown.cached / (grown.cached + grown.computed)
    assert rate is not None and abs(rate - arm["rate"]) <= 0.0005 + 1e-9, (
        f"the log line of this engine says {arm['rate']:.3f}, by lookups; by prompts it would be "
        f"{of_prompts:.3f}.\ncame {rate} from {lookups} lookups"
    )
    record_property("measured.pressure", "higher" if rate > of_prompts else "lower")


# --- against the pinned tree ---------------------------------------------------------------------


@pytest.mark.upstream
def test_the_window_is_upstreams(lab):
    from vllm.v1.metrics.stats import CachingMetrics, PrefixCacheStats

    rng = random.Random(8)
    for _ in range(200):
        limit = rng.randint(1, 12)
        real, updates = CachingMetrics(limit), []
        for _ in range(rng.randint(0, 20)):
            requests, queries = rng.randint(0, 5), rng.randint(1, 100)
            update = (requests, queries, rng.randint(0, queries))
            updates.append(update)
            real.observe(PrefixCacheStats(requests=update[0], queries=update[1], hits=update[2]))
        came = lab.window_rate(updates, limit)
        assert came is not None and abs(came - real.hit_rate) < 1e-12, (
            f"{updates}, at most {limit} requests: the real CachingMetrics says {real.hit_rate}, "
            f"came {came}"
        )


@pytest.mark.upstream
def test_a_refused_request_is_looked_up_in_every_step(lab):
    from conformance import real

    config = {
        "num_blocks": 9, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64,
        "long_prefill_token_threshold": 0, "enable_prefix_caching": True,
        "enable_chunked_prefill": True, "max_model_len": 64, "policy": "fcfs",
    }  # fmt: skip
    scheduler = real.make_scheduler(config)
    scheduler.kv_cache_manager.log_stats = True
    from vllm.v1.metrics.stats import PrefixCacheStats

    scheduler.kv_cache_manager.prefix_cache_stats = PrefixCacheStats()
    for name, tokens in (("a", [5] * 20), ("b", [5] * 12 + [6] * 16)):
        add = {
            "request_id": name, "prompt_token_ids": tokens, "max_tokens": 4, "priority": 0,
            "arrival_time": 0.0, "ignore_eos": True,
        }  # fmt: skip
        scheduler.add_request(real.make_request(add, 4, 2))
    admitted, steps = [], 0
    while "b" not in admitted and steps < 20:
        plan = scheduler.schedule()
        admitted += [new.req_id for new in plan.scheduled_new_reqs]
        scheduler.update_from_output(plan, real.runner_output(plan, dict.fromkeys("ab", 7)))
        steps += 1
    stats = scheduler.kv_cache_manager.make_prefix_cache_stats()
    cached = sum(lab.predict_each([[5] * 20, [5] * 12 + [6] * 16], 4))
    reading = lab.Reading(stats.queries, stats.hits, 48 - cached, cached)
    again = lab.looked_up_again(lab.Reading(), reading, 64)
    assert steps > 2 and again == (28 * (steps - 1),) * 2, (
        f"b (28 tokens) waits for memory until step {steps} and is looked up in each: the real "
        f"scheduler counted {stats.queries} queries in {stats.requests} requests.\n"
        f"expected {28 * (steps - 1)} twice\ncame     {again}"
    )


# --- on a GPU ------------------------------------------------------------------------------------


def real_run(*arguments: str) -> dict[str, Any]:
    """One engine of run.py in a process of its own; what it reports."""
    pytest.importorskip("vllm")
    result = subprocess.run(
        [sys.executable, str(HERE / "run.py"), "--one", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines = result.stdout.splitlines()
    assert result.returncode == 0, "run.py --one failed:\n" + "\n".join(lines[-15:])
    last = [line for line in lines if line.startswith("RESULT ")][-1]
    return json.loads(last.removeprefix("RESULT "))


def read_run(lab: Any, run: dict[str, Any]) -> list[Any]:
    """Cached tokens per request, queries, hits and computed tokens of a run."""
    before, after = (lab.read_page("\n".join(page)) for page in run["pages"][:2])
    spent = lab.spent(before, after)
    return [run["each"], spent.queries, spent.hits, spent.computed]


@pytest.mark.gpu
def test_the_real_engine_hits_as_predicted(lab, gpu_device):
    run = real_run()
    came = read_run(lab, run)
    expected = [lab.predict_each(run["prompts"], run["block_size"])]
    expected += lab.predict_hits(run["prompts"], run["block_size"])
    assert came == expected, (
        "cached tokens per request, and the counters' differences over the run.\n"
        f"expected {expected}\ncame     {came}"
    )


@pytest.mark.gpu
def test_the_real_engine_without_caching(lab, gpu_device):
    run = real_run("--no-caching")
    expected = [0, 0, lab.predict_hits(run["prompts"], run["block_size"])[0]]
    came = read_run(lab, run)[1:]
    assert came == expected, (
        "caching off: nothing is looked up, so there are no queries either, and every prompt token "
        f"is computed.\nexpected {expected}\ncame     {came}"
    )

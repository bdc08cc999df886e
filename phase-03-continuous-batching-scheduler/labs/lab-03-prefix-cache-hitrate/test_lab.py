"""What lab 03-03 pins: hits to the token, against engines that run, and meters read exactly."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance import recording
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

    Caching on, fcfs, no threshold, nobody preempted or aborted, room for everything. Hits are None
    for a prompt that goes on where an earlier request's answer begins: answers are cached too.
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


def test_memory_that_need_not_exist_twice(lab):
    came = lab.kv_bytes_saved(workload(), 16, 24, 2, 64, 2)
    assert came == 15 * 416 * 12_288, (
        "24 layers, 2 KV heads of 64, 2 bytes: 12 KiB a token, times 15 x 416 tokens, 73.1 MiB.\n"
        f"expected {15 * 416 * 12_288:,}\ncame     {came:,}"
    )
    came = lab.kv_bytes_saved(workload(64), 16, 80, 8, 128, 2)
    assert came == 63 * 416 * 327_680, (
        "80 layers, 8 KV heads of 128, 2 bytes, 64 prompts: 320 KiB x 63 x 416 = 8.0 GiB.\n"
        f"expected {63 * 416 * 327_680:,}\ncame     {came:,}"
    )


# --- metered -------------------------------------------------------------------------------------

PAGE = """\
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 7120.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 1.2e+06
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.795311541364368e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 6240.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 1e+06
vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.795311541364368e+09
vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 99.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 98.0
vllm:mm_cache_queries_total{engine="0",model_name="m"} 97.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 7120.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 880.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 6240.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 5.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="local_compute"} 200000.0
vllm:prompt_tokens_by_source_created{engine="0",model_name="m",source="local_compute"} 1.79e+09
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.31
"""
"""Lines as `prometheus_client` writes them; the numbers are made up, no server ran."""


def test_counters_of_a_metrics_page(lab):
    came = lab.read_counters(PAGE)
    expected = lab.Counters(1_207_120, 1_006_240, 200_880, 6_240)
    assert came == expected, (
        "two engines added up; the external and multimodal caches are other caches, `_created` is "
        f"the date of a counter, and 1.2e+06 is a number.\nexpected {expected}\ncame     {came}"
    )
    came = lab.read_counters("# vllm:prefix_cache_hits_total 5\n\n" + PAGE.splitlines()[-1] + "\n")
    assert came == lab.Counters(0, 0, 0, 0), (
        "a comment, an empty line and another meter: a counter without a line is 0.\n"
        f"expected four zeros\ncame     {came}"
    )


def test_two_readings_make_a_rate(lab):
    before, after = lab.Counters(1000, 900, 100, 900), lab.Counters(8120, 7140, 980, 7140)
    came = lab.spent(before, after)
    assert came == lab.Counters(7120, 6240, 880, 6240), (
        "counters count since the start of the server; a run is a difference.\n"
        f"expected {lab.Counters(7120, 6240, 880, 6240)}\ncame     {came}"
    )
    rate = lab.hit_rate(came)
    assert rate is not None and abs(rate - 6240 / 7120) < 1e-12, (
        "tokens found over tokens looked up: 87.6 %, though 15 of 16 requests (93.75 %) hit.\n"
        f"expected {6240 / 7120:.4f}\ncame     {rate}"
    )
    came = lab.hit_rate(lab.Counters(0, 0, 0, 0))
    assert came == 0.0, f"caching off, or nothing asked: 0.0; came {came}"


def test_lookups_that_were_repeated(lab):
    came = lab.lookup_surplus(lab.Counters(7120, 6240, 880, 6240))
    assert came == 0, f"7120 tokens looked up, 880 + 6240 prompt tokens: none twice; came {came}"
    came = lab.lookup_surplus(lab.Counters(0, 0, 50, 0))
    assert came == -50, (
        "a server without prefix caching looks nothing up: 50 tokens computed, 50 lookups short of "
        f"the prompts' own.\nexpected -50\ncame     {came}"
    )
    came = lab.lookup_surplus(lab.Counters(1000, 800, 200, 100))
    assert came == 700, (
        "300 prompt tokens and 1000 looked up: somebody stood in front of the queue and was looked "
        f"up again and again.\nexpected 700\ncame     {came}"
    )


def test_the_log_lines_window(lab):
    cases: tuple[tuple[list[tuple[int, int, int]], int, float, str], ...] = (
        ([], 1000, 0.0, "nothing yet"),
        ([(1, 100, 0), (1, 100, 80)], 1000, 0.4, "tokens, over both"),
        ([(1, 100, 0), (1, 100, 80)], 1, 0.8, "room for one request: the newest"),
        ([(2, 900, 0), (2, 100, 80)], 3, 0.8, "4 requests are too many: the older two go"),
        ([(1, 50, 0), (5, 100, 60)], 3, 0.6, "the newest report stays, whatever it holds"),
        ([(1, 100, 80), (0, 900, 0)], 1, 0.8, "a report of no requests pushes nobody out"),
        ([(1, 10, 0), (1, 30, 30), (1, 10, 5)], 2, 35 / 40, "per token, not the mean of rates"),
    )
    for updates, limit, expected, why in cases:
        came = lab.window_rate(updates, limit)
        assert came is not None and abs(came - expected) < 1e-12, (
            f"window_rate({updates}, {limit}): {why}.\nexpected {expected}\ncame     {came}"
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


def test_a_large_report_drops_several(lab):
    came = lab.window_rate([(1, 10, 10), (1, 10, 10), (1, 10, 10), (3, 10, 0)], 3)
    assert came == 0.0, (
        "three reports of one request, then one of three, and a window of 3: all of the old ones "
        "must go, not just the oldest.\n"
        f"expected 0.0\ncame     {came}"
    )


def test_the_meters_of_a_real_engine(lab):
    arms = {name: arm for name, arm in recorded().items() if arm["each"]}
    assert len(arms) == 3, f"the capture holds {list(arms)}; expected on, on, off"
    for name, arm in arms.items():
        spent = lab.spent(lab.read_counters(arm["before"]), lab.read_counters(arm["after"]))
        queries, hits, computed = lab.predict_hits(workload(), arm["block_size"])
        each = lab.predict_each(workload(), arm["block_size"])
        if "off" in name:  # nothing is looked up, and everything computed
            queries, hits, computed, each = 0, 0, queries, [0] * 16
        assert arm["each"] == each, (
            f"vLLM's CPU build, {name}, took from its cache, prompt by prompt:\n"
            f"expected {arm['each']}\ncame     {each}"
        )
        assert (spent.queries, spent.hits, spent.computed) == (queries, hits, computed), (
            f"vLLM's CPU build, {name}: the difference of two readings of its page, and the "
            f"prediction (queries, hits, computed).\nread      {spent}\n"
            f"predicted {(queries, hits, computed)}"
        )
        rate = lab.hit_rate(spent)
        assert spent.cached == sum(arm["each"]) and abs(rate - arm["rate"]) <= 0.0005 + 1e-9, (
            f"{name}: the engine's answers say {sum(arm['each'])} cached tokens, its log line a "
            f"rate of {arm['rate']:.3f}.\nread {spent}, a rate of {rate}"
        )


def test_the_meters_of_a_real_engine_under_pressure(lab):
    arm = next(arm for name, arm in recorded().items() if "a pool of" in name)
    spent = lab.spent(lab.read_counters(arm["before"]), lab.read_counters(arm["after"]))
    expected = lab.predict_hits(workload(), arm["block_size"])
    came = (spent.computed + spent.cached, spent.cached, spent.computed)
    assert came == expected, (
        "the same sixteen prompts in a pool for three: each still takes as much from the cache, "
        f"and counts once in prompt_tokens_by_source.\nexpected {expected}\ncame     {came}"
    )
    surplus = lab.lookup_surplus(spent)
    assert surplus > 0 and surplus % 445 == 0, (
        "every prompt has 445 tokens, and somebody was looked up again and again: the surplus is a "
        f"multiple of 445.\ncame {surplus} from {spent}"
    )
    # The window of the log line holds all these lookups: fewer than 1000.
    requests = spent.queries // 445
    rate = lab.window_rate([(requests, spent.queries, spent.hits)])
    assert rate is not None and abs(rate - arm["rate"]) <= 0.0005 + 1e-9, (
        f"the log line of this engine says {arm['rate']:.3f}, by lookups; by prompts it would be "
        f"{expected[1] / expected[0]:.3f}.\ncame {rate} from {requests} lookups"
    )
    rate = lab.hit_rate(spent)
    assert abs(rate - arm["rate"]) <= 0.0005 + 1e-9, (
        "tokens found over tokens looked up, however often: the log line of this engine says "
        f"{arm['rate']:.3f}. Tokens of prompts would be {expected[1] / expected[0]:.3f}.\n"
        f"came {rate} from {spent}"
    )


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
    counters = lab.Counters(stats.queries, stats.hits, 48 - cached, cached)
    assert steps > 2 and lab.lookup_surplus(counters) == 28 * (steps - 1), (
        f"b (28 tokens) waits for memory until step {steps} and is looked up in each: the real "
        f"scheduler counted {stats.queries} queries in {stats.requests} requests.\n"
        f"expected a surplus of {28 * (steps - 1)}\ncame     {lab.lookup_surplus(counters)}"
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
    before, after = (lab.read_counters("\n".join(page)) for page in run["pages"][:2])
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

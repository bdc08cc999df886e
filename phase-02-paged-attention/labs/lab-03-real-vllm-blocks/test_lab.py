"""What lab 02-03 pins: a plan equal to the engine's, hits by arithmetic, and a log read exactly."""

from __future__ import annotations

import ast
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance import parts
from mini_vllm import KVCacheManager, Request, SamplingParams

HERE = Path(__file__).parent
UPSTREAM = HERE.parents[2] / "upstream"
GIB = 2**30
OPT_125M = (12, 12, 64, 2)
"""Layers, KV heads, head dim, bytes per number."""
PREFIX = "(EngineCore pid=4242) INFO 01-01 00:00:00 [kv_cache_utils.py:1733] "


# --- Part A ---------------------------------------------------------------------------------------


def test_bytes_of_a_block(lab):
    got = lab.bytes_per_block(*OPT_125M, 16)
    assert got == 589_824, (
        "OPT-125m: (K and V) 2 x 12 layers x 12 KV heads x 64 x 2 bytes is 36,864 bytes a token, "
        f"times 16 tokens.\nexpected 589,824\ncame     {got:,}. Half means V was forgotten"
    )
    got = lab.bytes_per_block(4, 2, 64, 2, 16)
    assert got == 32_768, (
        "byte-llama has 4 layers and 2 KV heads (its 4 query heads cache nothing): "
        f"2 x 4 x 2 x 64 x 2 x 16.\nexpected 32,768\ncame     {got:,}"
    )
    got = lab.bytes_per_block(32, 8, 128, 1, 32)
    assert got == 2_097_152, f"fp8 and blocks of 32: 2 x 32 x 8 x 128 x 1 x 32; came {got:,}"


def test_a_plan_by_hand(lab):
    got = lab.plan(24 * GIB, 0.5, GIB, 589_824, 16, 2048)
    assert tuple(got or ()) == (20_024, 156.4375, 320_384), (
        "24 GiB, half of it allowed, 1 GiB fixed: 11 GiB are 20,024 blocks of 589,824 bytes and a "
        "rest; a request of 2,048 tokens takes 128; 20,024 / 128 = 156.4375, times 2,048 = "
        f"320,384 tokens.\nexpected (20024, 156.4375, 320384)\ncame     {tuple(got or ())}"
    )


def test_any_share_and_any_remainder(lab):
    got = lab.plan(1000, 0.85, 50, 100, 16, 16)
    assert tuple(got or ()) == (8, 8.0, 128), (
        "0.85 of 1000 bytes less 50: eight blocks of 100. A share is not rounded to tenths.\n"
        f"expected (8, 8.0, 128)\ncame     {got}"
    )
    got = lab.plan(8790, 1.0, 0, 1, 16, 250)
    assert tuple(got or ()) == (8790, 549.375, 137_343), (
        "8,790 blocks, 16 per request of 250 tokens: 549.375 x 250 = 137,343.75, and int() cuts "
        f"off.\nexpected (8790, 549.375, 137343)\ncame     {got}"
    )


def test_more_memory_gains_more_than_its_share(lab, record_property):
    half = lab.plan(24 * GIB, 0.5, GIB, 589_824, 16, 2048)
    most = lab.plan(24 * GIB, 0.9, GIB, 589_824, 16, 2048)
    assert tuple(most or ()) == (37_501, 37_501 / 128, 600_016), (
        "the same card at 0.9: ceil(0.9 x 24 GiB) - 1 GiB.\n"
        f"expected (37501, 292.9765625, 600016)\ncame     {tuple(most or ())}"
    )
    ratio = most.num_blocks / half.num_blocks
    assert round(ratio, 3) == 1.873, (
        "0.9 / 0.5 is 1.8, and the fixed 1 GiB comes off both, which hurts the smaller one more: "
        f"the ratio is above 1.8.\nexpected 1.873\ncame     {ratio:.3f}"
    )
    record_property("measured.ratio", ratio)


def test_model_length_changes_no_block(lab):
    short = lab.plan(24 * GIB, 0.9, GIB, 589_824, 16, 1024)
    assert tuple(short or ()) == (37_501, 37_501 / 64, 600_016), (
        "max_model_len 1,024 instead of 2,048: the same pool and twice the concurrency.\n"
        f"expected (37501, 585.953125, 600016)\ncame     {tuple(short or ())}"
    )


def test_a_request_takes_whole_blocks(lab):
    got = lab.plan(24 * GIB, 0.9, GIB, 589_824, 16, 2050)
    assert tuple(got or ()) == (37_501, 37_501 / 129, 595_946), (
        "2,050 tokens take 129 blocks, of which the last holds 2 tokens: 290.71 requests, and the "
        "printed int(290.705... x 2,050) is not 37,501 x 16 = 600,016, though no block is lost.\n"
        f"expected (37501, 290.7054, 595946)\ncame     {tuple(got or ())}"
    )


def test_no_room_is_no_block(lab):
    for fixed, why in ((12 * GIB, "exactly nothing left"), (13 * GIB, "more than allowed")):
        got = lab.plan(24 * GIB, 0.5, fixed, 589_824, 16, 2048)
        assert tuple(got or ()) == (0, 0.0, 0), (
            f"12 GiB allowed, {fixed // GIB} GiB fixed ({why}): no blocks, and never a negative "
            f"number of them.\nexpected (0, 0.0, 0)\ncame     {got}"
        )


def test_the_share_is_rounded_up(lab):
    got = lab.plan(1001, 0.5, 1, 100, 16, 16)
    assert tuple(got or ()) == (5, 5.0, 80), (
        "ceil(1001 x 0.5) = 501 bytes; less 1 are five blocks of 100. The share is rounded up to "
        f"whole bytes, the blocks down.\nexpected (5, 5.0, 80)\ncame     {got}"
    )


def test_plans_of_the_real_engine(lab):
    for case in parts.load("kv_capacity"):
        shape = [case[name] for name in ("num_layers", "num_kv_heads", "head_size", "dtype_bytes")]
        size = lab.bytes_per_block(*shape, case["block_size"])
        assert size == case["page_size_bytes"] * case["num_layers"], (
            f"layers, KV heads, head dim, bytes {shape}, block size {case['block_size']}: vLLM's "
            f"page of one layer is {case['page_size_bytes']:,} bytes, times {shape[0]} layers; "
            f"came {size:,}"
        )
        memory, longest = case["available_memory"], case["max_model_len"]
        got = lab.plan(memory, 1.0, 0, size, case["block_size"], longest)
        expected = (case["num_blocks"], case["max_concurrency"])
        assert got is not None and tuple(got)[:2] == expected, (
            f"{memory:,} bytes for blocks of {size:,} bytes, {longest:,} tokens a request at most: "
            f"recorded from vLLM.\nexpected (blocks, concurrency) {expected}\ncame     {got}"
        )


# --- Part B ---------------------------------------------------------------------------------------


def test_cached_tokens_by_length(lab):
    expected = {1: 0, 6: 0, 16: 0, 17: 16, 32: 16, 33: 32, 36: 32, 48: 32, 49: 48, 1025: 1024}
    got = {length: lab.cached_tokens(length, 16) for length in expected}
    assert got == expected, (
        "of a prompt of T tokens that was seen before, the whole blocks among the first T - 1 come "
        "from the cache: at 16 and 32 tokens the last block is whole, but its last token must be "
        f"computed, so the whole block is.\nexpected {expected}\ncame     {got}"
    )
    got = lab.cached_tokens(36, 4)
    assert got == 32, f"blocks of 4: (36 - 1) // 4 = 8 blocks, 32 tokens; came {got}"


def test_hit_rates_of_eight_prompts(lab, record_property):
    cases = (
        (6, 0.0),
        (16, 0.0),
        (17, 112 / 136),
        (32, 0.4375),
        (33, 224 / 264),
        (1025, 7168 / 8200),
    )
    for length, expected in cases:
        got = lab.hit_rate(8, length, 16)
        assert got is not None and abs(got - expected) < 1e-12, (
            f"eight equal prompts of {length} tokens: seven find (T - 1) // 16 blocks each. The "
            f"rate counts tokens, not requests.\nexpected {expected:.4f}\ncame     {got}"
        )
    record_property("measured.hit_rate", 100 * lab.hit_rate(8, 32, 16))
    got = lab.hit_rate(20, 17, 16)
    assert got is not None and abs(got - 19 * 16 / (20 * 17)) < 1e-12, (
        f"twenty prompts: nineteen find a block; expected {19 * 16 / 340:.4f}, came {got}"
    )
    got = lab.hit_rate(1, 100, 16)
    assert got == 0.0, f"a prompt alone finds nothing; came {got}"


def test_hit_rate_of_the_mini_engine(lab):
    for length in (16, 17, 40, 100):
        kv = KVCacheManager(200, 16)
        hits = 0
        for number in range(8):
            request = Request(f"r{number}", list(range(length)), SamplingParams())
            blocks, cached = kv.get_computed_blocks(request)
            request.num_computed_tokens = cached
            kv.allocate_slots(request, length - cached, blocks)
            hits += cached
        got = lab.hit_rate(8, length, 16)
        assert got is not None and abs(got - hits / (8 * length)) < 1e-12, (
            f"eight prompts of {length} tokens through the mini engine's KVCacheManager: {hits} of "
            f"{8 * length} tokens from the cache.\nexpected {hits / (8 * length):.4f}\n"
            f"came     {got}"
        )


# --- Part C ---------------------------------------------------------------------------------------


def startup_lines(available: str, tokens: int, longest: int, concurrency: float) -> list[str]:
    """The lines as the pinned formats print them. Made here; no engine ran."""
    return [
        f"(EngineCore pid=7) INFO 01-01 00:00:00 [gpu_worker.py:466] Available KV cache memory: "
        f"{available} GiB\n",
        f"{PREFIX}GPU KV cache size: {tokens:,} tokens\n",
        f"{PREFIX}Maximum concurrency for {longest:,} tokens per request: {concurrency:.2f}x\n",
    ]


def test_the_startup_lines(lab):
    lines = [
        "INFO 01-01 00:00:00 [cuda.py:378] Using FLASH_ATTN attention backend out of potential "
        "backends: ['FLASH_ATTN', 'FLASHINFER'].",
        *startup_lines("20.6", 600_016, 2048, 37_501 / 128),
        "INFO 01-01 00:00:00 [core.py:309] init engine (profile, create kv cache, warmup model) "
        "took 9.99 s",
    ]
    got = lab.read_startup(lines)
    assert tuple(got or ()) == (20.6, 600_016, 2048, 292.98), (
        "three lines among others: GiB as a float, tokens and length as int without commas, the "
        "concurrency as printed.\nexpected (20.6, 600016, 2048, 292.98)\n"
        f"came     {tuple(got or ())}"
    )


def test_a_log_is_read_once(lab):
    lines = startup_lines("20.6", 600_016, 2048, 37_501 / 128)
    got = lab.read_startup(line for line in lines)
    assert tuple(got or ()) == (20.6, 600_016, 2048, 292.98), (
        "a log comes line by line, as from an open file: it has no length and cannot be read "
        f"twice.\nexpected (20.6, 600016, 2048, 292.98)\ncame     {tuple(got or ())}"
    )
    got = lab.read_startup(
        ["Auto set (12.5/40.25) GiB for KV cache on node 0, with 40.25 GiB free"]
    )
    assert tuple(got or ()) == (12.5, None, None, None), (
        "the CPU's line on a larger machine: 12.5 GiB for the cache.\n"
        f"expected (12.5, None, None, None)\ncame     {tuple(got or ())}"
    )
    period = "GPU KV cache usage: 1.0%, Prefix cache hit rate: 50.0%"
    got = lab.read_usage(line for line in (period, "", period))
    assert [tuple(usage) for usage in got or ()] == [(0.01, 0.5)] * 2, (
        "two periods in which nothing changed are two lines, and their mean weighs them both.\n"
        f"expected [(0.01, 0.5), (0.01, 0.5)]\ncame     {got}"
    )


def test_startup_lines_missing_or_twice(lab):
    got = lab.read_startup(["GPU KV cache size: 960 tokens"])
    assert tuple(got or ()) == (None, 960, None, None), (
        f"one line of the three: the other numbers are None, not 0.\n"
        f"expected (None, 960, None, None)\ncame     {tuple(got or ())}"
    )
    lines = [*startup_lines("1.0", 16, 16, 1.0), *startup_lines("-0.35", 32, 8, 4.0)]
    got = lab.read_startup(lines)
    assert tuple(got or ()) == (-0.35, 32, 8, 4.0), (
        "two starts in one file: the last counts. Available memory below 0 is what the engine "
        f"prints before it gives up.\nexpected (-0.35, 32, 8, 4.0)\ncame     {tuple(got or ())}"
    )
    lines = ["# GPU blocks: 20024, # CPU blocks: 0", "KV cache size: 12 tokens", "size: 3 GiB"]
    got = lab.read_startup(lines)
    assert tuple(got or ()) == (None, None, None, None), (
        "none of these is a line of this version (the first is an older one's); expected four "
        f"None, came {tuple(got or ())}"
    )


def test_the_periodic_lines(lab):
    stats = (
        "Engine 000: Avg prompt throughput: 820.0 tokens/s, Avg generation throughput: 51.2 "
        "tokens/s, Running: 8 reqs, Waiting: 0 reqs, {}GPU KV cache usage: {}%, "
        "Prefix cache hit rate: {}%{}"
    )
    lines = [
        PREFIX + stats.format("", "0.2", "87.4", ""),
        PREFIX + "GPU KV cache size: 960 tokens",
        PREFIX + stats.format("Deferred: 3 reqs, ", "99.6", "0.0", ""),
        PREFIX + stats.format("", "1.0", "50.0", ", External prefix cache hit rate: 12.5%"),
    ]
    got = [tuple(round(share, 6) for share in usage) for usage in lab.read_usage(lines) or ()]
    expected = [(0.002, 0.874), (0.996, 0.0), (0.01, 0.5)]
    assert got == expected, (
        "three periodic lines, one with a further counter before, one with one behind; shares of "
        f"1, not per cent.\nexpected {expected}\ncame     {got}"
    )


def test_blocks_behind_the_printed_tokens(lab):
    cases = (
        ((600_016, 2048, 16), 37_501, "600,016 / 16, for 2,048 is a multiple of 16"),
        ((595_946, 2050, 16), 37_501, "37,501 / 129 x 2,050 = 595,946.1, cut off"),
        ((0, 2048, 16), 0, "nothing"),
        ((32_112, 2000, 16), 2_007, "32,112 x 125 / 2,000 is 2,007 exactly, and in floats above"),
        ((140_608, 256, 16), 8_788, "140,608 / 16"),
        ((137_312, 250, 16), 8_788, "250 tokens take 16 blocks: 8,788 / 16 x 250 = 137,312.5"),
    )
    for arguments, expected, why in cases:
        got = lab.blocks_of_log(*arguments)
        assert got == expected, (
            f"blocks_of_log{arguments} (printed tokens, max_model_len, block size): {why}.\n"
            f"expected {expected:,}\ncame     {got}"
        )


def test_every_printed_number_leads_back(lab):
    for case in parts.load("kv_capacity"):
        tokens = int(case["max_concurrency"] * case["max_model_len"])
        got = lab.blocks_of_log(tokens, case["max_model_len"], case["block_size"])
        assert got == case["num_blocks"], (
            f"vLLM planned {case['num_blocks']:,} blocks of {case['block_size']} for requests of "
            f"{case['max_model_len']:,} tokens, and its line would say {tokens:,} tokens.\n"
            f"expected {case['num_blocks']:,}\ncame     {got}"
        )


def test_a_second_run_from_the_first_log(lab):
    first = lab.read_startup(startup_lines("11.0", 320_384, 2048, 20_024 / 128))
    got = lab.predict_second_run(24 * GIB, first, 0.5, 0.9, OPT_125M, 16)
    assert tuple(got or ()) == (37_501, 37_501 / 128, 600_016), (
        "at 0.5 of 24 GiB 11.0 GiB were left, so 1 GiB is fixed. At 0.9 that 1 GiB stays and all "
        "the rest goes to the cache.\nexpected (37501, 292.9765625, 600016)\n"
        f"came     {tuple(got or ())}"
    )
    got = lab.predict_second_run(24 * GIB, first, 0.5, 0.04, OPT_125M, 16)
    assert tuple(got or ()) == (0, 0.0, 0), (
        f"at 0.04 the fixed 1 GiB does not fit into 0.96 GiB: no block.\ncame     {got}"
    )
    nothing = lab.Startup(0.0, 0, 2048, 0.0)
    got = lab.predict_second_run(24 * GIB, nothing, 0.5, 0.5, OPT_125M, 16)
    assert tuple(got or ()) == (0, 0.0, 0), (
        "a first run that had exactly 0.0 GiB left has a number, and its like has no block either."
        f"\nexpected (0, 0.0, 0)\ncame     {got}"
    )


def logging_templates(path: Path) -> list[str]:
    """First arguments of the logging calls of a source file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            first = node.args[0]
            if "info" in node.func.attr and isinstance(first, ast.Constant):
                found.append(str(first.value))
    return found


def test_the_formats_are_those_of_the_pinned_tree(lab):
    if not (UPSTREAM / "vllm").is_dir():
        pytest.skip("the pinned tree is not here: course upstream fetch")
    worker = logging_templates(UPSTREAM / "vllm/v1/worker/gpu_worker.py")
    utils = logging_templates(UPSTREAM / "vllm/v1/core/kv_cache_utils.py")
    lines = [
        next(t for t in worker if t.startswith("Available KV cache")) % "4.83",
        next(t for t in utils if t.startswith("GPU KV cache size")) % f"{140_608:,}",
        next(t for t in utils if t.startswith("Maximum concurrency for")) % (f"{2048:,}", 68.65625),
    ]
    got = lab.read_startup(lines)
    assert tuple(got or ()) == (4.83, 140_608, 2048, 68.66), (
        f"the pinned tree's own templates, filled in: {lines}.\n"
        f"expected (4.83, 140608, 2048, 68.66)\ncame     {tuple(got or ())}"
    )


# --- a real run, recorded -------------------------------------------------------------------------


def recorded() -> list[dict[str, Any]]:
    """What vLLM's CPU build printed, engine by engine; `run.py` was recorded, not this file.

    "lines" is everything. The other fields are what the engine's own objects held, which run.py
    prints beside the log: shape, block size, bytes of memory, blocks, hits.
    """
    capture = json.loads((HERE / "captured" / "cpu.json").read_text(encoding="utf-8"))
    engines = []
    for part in re.split("^=== ", capture["output"], flags=re.MULTILINE)[1:]:
        title = part.splitlines()[0]

        def numbers(pattern: str, text: str = part) -> list[int]:
            match = re.search(pattern, text)
            assert match, f"the capture has no {pattern!r} in: {text.splitlines()[0]}"
            return [int(n.replace(",", "")) for group in match.groups() for n in group.split(", ")]

        *shape, block_size, total = numbers(
            r"shape \[([\d, ]+)\], blocks of (\d+) tokens, .*share of ([\d,]+) bytes"
        )
        engines.append(
            {
                "title": title,
                "lines": part.splitlines(),
                "util": float(re.findall(r"utilization ([\d.]+)", title)[0]),
                "caching": "caching off" not in title,
                "shape": shape,
                "block_size": block_size,
                "total": total,
                "blocks": numbers(r"blocks: ([\d,]+) in the engine")[0],
                "prompts": numbers(r"(\d+) prompts of (\d+) tokens"),
                "each": numbers(r"cached tokens per prompt: \[([\d, ]+)\]"),
                "rate": numbers(r"= (\d+) / (\d+)"),
            }
        )
    return engines


def test_the_lines_of_a_real_start(lab):
    engines = recorded()
    assert len(engines) == 5, f"the capture holds {len(engines)} engines instead of 5"
    for engine in engines:
        startup = lab.read_startup(engine["lines"])
        assert None not in tuple(startup or (None,)), (
            "recorded from vLLM's CPU build, whose line about available memory reads `Auto set "
            f"(...)`.\nexpected four numbers\ncame     {startup}\nin       {engine['title']}"
        )
        size, blocks = engine["block_size"], engine["blocks"]
        got = lab.blocks_of_log(startup.tokens, startup.max_model_len, size)
        assert got == blocks, (
            f"{engine['title']}: its log says {startup.tokens:,} tokens, {startup.max_model_len:,} "
            f"a request, and its blocks hold {size}.\nexpected {blocks:,} blocks, as the engine's "
            f"own config says\ncame     {got:,}"
        )
        planned = round(startup.available_gib * GIB) / lab.bytes_per_block(*engine["shape"], size)
        off = 0.005 * blocks / startup.available_gib + 1
        assert abs(planned - blocks) <= off, (
            f"{engine['title']}: {startup.available_gib} GiB in blocks of {size} tokens of shape "
            f"{engine['shape']} must be the engine's {blocks:,} blocks, give or take the "
            f"{off:.0f} that two decimals hide. In `Auto set (A/B) GiB` A is the cache's.\n"
            f"came     {planned:,.0f}"
        )


def test_the_second_run_of_a_real_engine(lab):
    first, *others = recorded()
    startup = lab.read_startup(first["lines"])
    for engine in others:
        plan = lab.predict_second_run(
            first["total"], startup, first["util"], engine["util"], engine["shape"],
            engine["block_size"],
        )  # fmt: skip
        # Two decimals of GiB, and 1 % of what the first engine's process held: it is a process,
        # and a second one holds some pages more or less.
        held = first["total"] * first["util"] - startup.available_gib * GIB
        size = 2 * math.prod(engine["shape"]) * engine["block_size"]
        off = (0.005 * GIB + 0.01 * held) / size + 1
        assert plan is not None and abs(plan.num_blocks - engine["blocks"]) <= off, (
            f"the first engine had {first['blocks']:,} blocks of {first['block_size']} at "
            f"{first['util']}; this one is: {engine['title']}.\n"
            f"expected {engine['blocks']:,} blocks, give or take {off:.0f}\n"
            f"came     {getattr(plan, 'num_blocks', None)}"
        )
        printed = lab.read_startup(engine["lines"]).concurrency
        each = -(-startup.max_model_len // engine["block_size"])
        assert abs(plan.max_concurrency - printed) <= off / each + 0.005, (
            f"{engine['title']}: a request of {startup.max_model_len:,} tokens takes {each} blocks "
            f"of {engine['block_size']}, and the engine's own line says {printed}x.\n"
            f"expected {printed}, give or take {off / each:.2f}\ncame     {plan.max_concurrency}"
        )


def test_the_hits_of_a_real_engine(lab):
    for engine in recorded():
        (count, length), size = engine["prompts"], engine["block_size"]
        each = lab.cached_tokens(length, size) if engine["caching"] else 0
        assert engine["each"] == [0, *[each] * (count - 1)], (
            f"{engine['title']}: {count} equal prompts of {length} tokens, blocks of {size}. The "
            f"real engine took from its cache, prompt by prompt:\nexpected {engine['each']}\n"
            f"came     0, then {each} each"
        )
        hits, queries = engine["rate"]
        rate = lab.hit_rate(count, length, size) if engine["caching"] else 0.0
        assert rate is not None and abs(rate * queries - hits) < 1e-6, (
            f"{engine['title']}: the real engine counted {hits} hits in {queries} tokens of "
            f"{count} prompts of {length}.\nexpected {hits / max(1, queries):.4f}\ncame     {rate}"
        )
        usage = lab.read_usage(engine["lines"])
        assert len(usage or ()) == 1 and abs(usage[0].hit_rate - rate) <= 0.0005 + 1e-9, (
            f"{engine['title']}: one periodic line, with the same rate in per cent and one decimal."
            f"\nexpected {rate:.3f}\ncame     {usage}"
        )


# --- on a GPU -------------------------------------------------------------------------------------


def real_run(*arguments: str) -> dict:
    """One engine of run.py in a process of its own; its result and its output."""
    pytest.importorskip("vllm")
    result = subprocess.run(
        [sys.executable, str(HERE / "run.py"), "--one", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines = result.stdout.splitlines()
    assert result.returncode == 0, "run.py --one failed:\n" + "\n".join(lines[-15:])
    last = [line for line in lines if line.startswith("RESULT ")][-1]
    return {**json.loads(last.removeprefix("RESULT ")), "lines": lines}


@pytest.mark.gpu
def test_the_real_log_leads_back_to_the_real_blocks(lab, gpu_device):
    run = real_run("--util", "0.3")
    startup = lab.read_startup(run["lines"])
    got = lab.blocks_of_log(startup.tokens, startup.max_model_len, run["block_size"])
    assert got == run["num_gpu_blocks"], (
        f"the engine has {run['num_gpu_blocks']:,} blocks of {run['block_size']}; its log says "
        f"{startup.tokens:,} tokens, which leads back to {got:,}"
    )
    size = lab.bytes_per_block(*run["shape"], run["block_size"])
    rounding = math.ceil(0.005 * GIB / size) + 1
    planned = round(startup.available_gib * GIB) // size
    assert abs(planned - got) <= rounding, (
        f"{startup.available_gib} GiB in blocks of {size:,} bytes are {planned:,}; the engine has "
        f"{got:,}. Two decimals of GiB explain {rounding} blocks, not more"
    )


@pytest.mark.gpu
def test_the_real_hit_rate(lab, gpu_device):
    run = real_run("--util", "0.3", "--prompt-tokens", "33")
    expected = [0, *[lab.cached_tokens(33, run["block_size"])] * 7]
    assert sorted(run["num_cached_tokens"]) == expected, (
        f"eight equal prompts of 33 tokens: expected {expected} cached tokens, came "
        f"{run['num_cached_tokens']}"
    )
    rate = run["hits"] / run["queries"]
    assert abs(rate - lab.hit_rate(8, 33, run["block_size"])) < 1e-9, (
        f"the engine counted {run['hits']} hits in {run['queries']} tokens"
    )

"""What lab 13-04 pins: prices by the processors of transformers, steps by the real scheduler."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

from labkit import refused, same

HERE = Path(__file__).resolve().parent / "recordings"


@cache
def lines(name):
    with gzip.open(HERE / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def parts_of(lab, case):
    return [p if isinstance(p, int) else lab.Price(*p, 4 * p[1]) for p in case["parts"]]


# --- prices ---------------------------------------------------------------------------------------


def test_worked_example(lab, record_property):
    """A token for every patch and none for the ends of rows."""
    same(
        tuple(lab.price("pixtral", 1280, 960)),
        (3120, 3072, 3072),
        "pixtral, 1280 x 960: 1024 x 768 pixels, 64 x 48 patches, 48 ends of rows (C1)",
    )
    square = lab.price("pixtral", 1024, 1024)
    record_property("measured.breaks", square.tokens - square.embeds)


def test_prices_of_pixtral_are_the_processors(lab):
    """A side that is rounded, or a ratio taken from the wrong side."""
    for case in lines("processors")[1:]:
        told = case["pixtral"]
        patches = told["size"][0] // 16 * (told["size"][1] // 16)
        same(
            tuple(lab.price("pixtral", *case["size"])),
            (told["tokens"], told["embeds"], patches),
            f"pixtral, {case['size'][0]} x {case['size'][1]} pixels: tokens, embeds, patches; "
            f"the processor brings them to {told['size'][1]} x {told['size'][0]}",
        )


def test_prices_of_qwen2_vl_are_the_processors(lab):
    """Patches told as tokens; a limit that is not handed on."""
    head, *cases = lines("processors")
    for case in cases:
        for (low, limit), (rows, columns) in zip(head["limits"], case["qwen2_vl"], strict=True):
            if low == 3136:
                same(
                    tuple(lab.price("qwen2-vl", *case["size"], limit)),
                    (rows * columns, rows * columns, 4 * rows * columns),
                    f"qwen2-vl, {case['size'][0]} x {case['size'][1]}, at most {limit:,} pixels",
                )


def test_llava_1_5_has_one_price(lab):
    """A small picture taken for a cheap one."""
    for case in lines("processors")[1:]:
        same(case["llava_1_5"], 336, "the processor's square")
        got = lab.price("llava-1.5", *case["size"])
        same(tuple(got), (576, 576, 576), f"llava-1.5, {case['size']}: 24 x 24 patches, always")
    same(tuple(lab.price("pixtral", 1, 1)), (2, 1, 1), "pixtral, one pixel: a patch and an end")
    refused(lambda: lab.price("gpt-2", 5, 5), "another model")
    refused(lambda: lab.price("pixtral", 0, 5), "a picture without columns")


# --- steps ----------------------------------------------------------------------------------------


def test_steps_of_one_picture(lab, record_property):
    """A picture encoded in parts, or in the step in which it ends."""
    picture = lab.Price(15552, 15552, 62208)
    found = lab.steps_to_first_token([20, picture, 10], 8192, 16384)
    same(
        [tuple(step) for step in found],
        [(8192, (0,)), (7390, ())],
        "20 words, a picture of 15,552, 10 words; 8,192 tokens a step (C2)",
    )
    record_property("measured.encoded", "the first")
    refused(lambda: lab.steps_to_first_token([picture], 8192, 8192), "15,552 for a budget of 8,192")


def test_steps_are_the_real_schedulers(lab, record_property):
    """Tokens charged for embeddings; a picture held too short or too long."""
    more = 0
    for case in lines("first_token"):
        parts = parts_of(lab, case)
        pictures = [part for part in parts if not isinstance(part, int)]
        steps = lab.steps_to_first_token(
            parts, case["max_num_batched_tokens"], case["encoder_budget"]
        )
        same(
            [[s.tokens, sum(pictures[i].embeds for i in s.encodes)] for s in steps],
            case["steps"],
            f"seed {case['seed']}: words and [tokens, embeddings] {case['parts']}, "
            f"{case['max_num_batched_tokens']:,} tokens a step, {case['encoder_budget']:,} "
            "embeddings: tokens and embeddings of each step",
        )
        total = sum(part if isinstance(part, int) else part.tokens for part in parts)
        more += len(steps) > -(-total // case["max_num_batched_tokens"])
    record_property("measured.more", more)


# --- time, and what to do about it ----------------------------------------------------------------

COSTS = {"per_megapixel": 10.0, "per_patch": 0.01, "per_token": 0.02, "per_step": 5.0}
"""Round numbers, of no machine."""


def test_time_is_the_sum_of_what_is_done(lab):
    """The encoder charged per embedding; a step's own cost forgotten."""
    picture = lab.Price(1564, 1564, 6256)
    parts = [17, picture]
    steps = lab.steps_to_first_token(parts, 1024, 2048)
    same(
        round(lab.time_to_first_token(parts, steps, 1.2288, lab.Costs(**COSTS)), 3),
        round(12.288 + 62.56 + 1581 * 0.02 + 10, 3),
        "1280 x 960 for qwen2-vl, 17 words, 1,024 tokens a step: 12.288 ms to read, 62.56 to "
        "encode, 31.62 to prefill, two steps of 5",
    )
    text = lab.steps_to_first_token([100], 1024, 2048)
    same(lab.time_to_first_token([100], text, 0, lab.Costs(**COSTS)), 7.0, "a text of 100 words")


def test_the_largest_limit_within_the_target(lab, record_property):
    """A limit chosen by its pixels, not by what comes of them."""
    costs = lab.Costs(**COSTS)
    candidates = [12_845_056, 3_211_264, 1_003_520, 262_144]
    expected = {
        5000: 12_845_056, 500: 3_211_264, 300: 1_003_520, 150: 262_144, 120: None,
    }  # fmt: skip
    for target, limit in expected.items():
        same(
            lab.largest_max_pixels(4032, 3024, 17, target, candidates, costs),
            limit,
            f"a photo of 12 megapixels and 17 words within {target} ms, of which reading it takes "
            f"122; of {candidates}",
        )
    same(
        lab.largest_max_pixels(640, 480, 17, 60, candidates, costs),
        12_845_056,
        "a picture below every limit costs the same under all but the smallest of them",
    )
    small = lab.largest_max_pixels(4032, 3024, 17, 120, candidates, costs)
    record_property("measured.knob", "the client's resize" if small is None else "max_pixels")

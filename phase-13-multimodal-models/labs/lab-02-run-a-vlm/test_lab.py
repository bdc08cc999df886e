"""What lab 13-02 pins: sizes by Qwen2-VL's processor, lengths and caches by a run of real vLLM."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path

import numpy as np

from labkit import refused, same
from mini_vllm import LLM, SamplingParams

HERE = Path(__file__).resolve().parent
LIMITS = {"the checkpoints'": (3136, 12_845_056), "768 x 768": (3136, 768 * 768)}


@functools.cache
def recorded():
    """Sizes, and what Qwen2-VL's image processor made of them."""
    with gzip.open(HERE / "recordings" / "processors.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def captured():
    """What the run on vLLM printed, line by line."""
    lines = json.loads((HERE / "captured" / "cpu.json").read_text())["output"].splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


# --- the size -------------------------------------------------------------------------------------


def test_worked_example(lab, record_property):
    """Rounding up where the processor rounds to the nearest; width and height exchanged."""
    same(lab.smart_resize(876, 1300), (868, 1288), "876 rows of 1300 pixels")
    same(lab.qwen2_vl_tokens(1300, 876), (31, 46, 1426), "1300 x 876: rows, columns, tokens (R1)")
    same(
        lab.qwen2_vl_tokens(1300, 876, 64**2, 512**2),
        (15, 22, 330),
        "the same with at most 512 x 512 pixels; both are in vLLM's own tests",
    )
    record_property("measured.tokens", lab.qwen2_vl_tokens(1280, 960)[2])


def test_known_sizes(lab):
    """Patches told as tokens; a limit that acts below the picture's size or not at all."""
    for (width, height, most), tokens in {
        (336, 336, None): 144, (337, 337, None): 144, (14, 14, None): 4, (640, 480, None): 391,
        (1280, 960, None): 1564, (3840, 2160, None): 10549, (4032, 3024, None): 15552,
        (1280, 960, 768 * 768): 713, (1280, 960, 1280 * 784): 1230, (640, 480, 768 * 768): 391,
        (1125, 900, 1280 * 784): 1280,  # exactly at the limit is within it
    }.items():  # fmt: skip
        arguments = (width, height) if most is None else (width, height, 3136, most)
        same(lab.qwen2_vl_tokens(*arguments)[2], tokens, f"{width} x {height}, limit {most}")


def test_sizes_are_the_processors(lab):
    """140 sizes under four limits: halves, floors, ceilings, and sides that come to nothing."""
    head, *cases = recorded()
    for case in cases:
        width, height = case["size"]
        for (low, high), grid in zip(head["limits"], case["qwen2_vl"], strict=True):
            rows, columns, tokens = lab.qwen2_vl_tokens(width, height, low, high)
            same(
                ([rows, columns], tokens),
                (grid, grid[0] * grid[1]),
                f"{width} x {height} with {low:,} to {high:,} pixels: the processor's grid",
            )


def test_what_is_refused(lab):
    """A strip of one row, brought to a size that no encoder takes."""
    refused(lambda: lab.smart_resize(1, 201), "201 x 1")
    refused(lambda: lab.smart_resize(402, 2), "2 x 402")
    same(lab.qwen2_vl_tokens(200, 1)[:2], (1, 29), "200 x 1 is the last that is taken")
    refused(lambda: lab.prompt_length(1, [4, 4]), "two pictures and one word")


# --- the prompt -----------------------------------------------------------------------------------


def test_lengths_of_prompts(lab):
    """A marker counted beside its picture."""
    same(lab.prompt_length(18, [1564]), 1581, "17 words and a marker, 1280 x 960 pixels (R2)")
    same(lab.prompt_length(21, [1564, 1564]), 3147, "two of them, 19 words")
    same(lab.prompt_length(17, []), 17, "no picture")
    same(lab.prompt_length(1, [64]), 64, "a picture and not a word")
    same([lab.kv_blocks(n) for n in (0, 1, 16, 17, 1581)], [0, 1, 1, 2, 99], "blocks of 16")


def test_the_real_engines_lengths(lab):
    """Any of it: each prompt that real vLLM took."""
    runs = [line for line in captured() if "tokens" in line]
    assert len(runs) >= 8, "the capture has eight prompts"
    for run in runs:
        words = run["tokens"] - 63 * run["pictures"]  # byte-sees: 64 tokens for each marker
        came = lab.prompt_length(words, [64] * run["pictures"])
        same((came, lab.kv_blocks(came)), (run["tokens"], run["blocks"]), run["prompt"])


# --- the second time ------------------------------------------------------------------------------


@functools.cache
def mini():
    """Requests on the mini engine: encoder runs, hit, and the token behind the picture."""
    llm = LLM("byte-sees", block_size=16, num_blocks=64)
    engine = llm.llm_engine
    picture, other = (np.full((56, 56, 3), shade, np.uint8) for shade in (40, 200))
    found = []
    for text, shown in (
        ("<image>what is this?\n", picture), ("<image>what is this?\n", picture),
        ("look: <image>what is this?\n", picture), ("<image>what is this?\n", other),
    ):  # fmt: skip
        before = engine.feature("multimodal").stats()["encoder_runs"]
        prompt = {"prompt": text, "multi_modal_data": {"image": shown}}
        [output] = llm.generate([prompt], SamplingParams(max_tokens=1))
        runs = engine.feature("multimodal").stats()["encoder_runs"] - before
        found.append((runs, output.num_cached_tokens, text.index("<") + 64))
    return found


def test_who_answered(lab, record_property):
    """An encoder that did not run, taken for a prefill that did not."""
    came = [lab.answered_by(*each) for each in mini()]
    same(
        came,
        ["nobody", "prefix cache", "encoder cache", "nobody"],
        "a picture, the same prompt again, the picture behind other words, another picture: "
        f"(encoder runs, tokens hit, end of the picture) {mini()} (R3)",
    )
    same(lab.answered_by(0, 63, 64), "encoder cache", "a hit that ends one token inside")
    same(lab.answered_by(0, 64, 64), "prefix cache", "a hit that ends with the picture")
    record_property("measured.again", came[2])

"""Workloads with pictures: what an encoder's budget and its cache let be scheduled.

A recording's `config` has both sizes in embeddings, `add.mm` the pictures of a prompt. A step adds
`encoder_inputs` (whose encoder runs), `freed_encoder_hashes` (what was evicted since the step
before, in order) and `encoder_free` (free and freeable embeddings after scheduling).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from conformance import recording, workloads
from conformance.recorders.run import run
from conformance.recorders.source import Real

PLACEHOLDER = 1


def generate(seed: int) -> dict[str, Any]:
    """The workload of a seed: that of `workloads.generate`, with pictures in most prompts."""
    workload = workloads.generate(seed)
    rng = random.Random(seed * 23 + 13)
    config = workload["config"]
    pictures = [_picture(rng, index) for index in range(rng.choice((1, 2, 4, 8)))]
    for event in workload["events"]:
        for add in event["add"]:
            add["mm"] = _place(rng, add["prompt_token_ids"], pictures)
    used = [item for event in workload["events"] for add in event["add"] for item in add["mm"]]
    largest = max([1, *(_size(item) for item in used)])
    config["encoder_compute_budget"] = largest + rng.choice((0, 0, 1, 4, 40))
    config["encoder_cache_size"] = largest + rng.choice((0, 0, 1, 4, 16, 80))
    config["disable_chunked_mm_input"] = rng.random() < 0.25
    longest = max([1, *(item["length"] for item in used)])
    if config["disable_chunked_mm_input"]:  # a longer picture could never be scheduled
        config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], longest)
        if 0 < config["long_prefill_token_threshold"] < longest:
            config["long_prefill_token_threshold"] = 0
    return workload


def _picture(rng: random.Random, index: int) -> dict[str, Any]:
    """A picture: always the same length and mask."""
    length = rng.choice((1, 2, 3, 5, 8, 12))
    picture: dict[str, Any] = {"hash": f"picture{index}", "length": length}
    if length > 1 and rng.random() < 0.3:  # some placeholders take no embedding
        mask = [rng.randint(0, 1) for _ in range(length)]
        mask[rng.randrange(length)] = 1
        if 0 in mask:
            picture["is_embed"] = mask
    return picture


def _place(
    rng: random.Random, prompt: list[int], pictures: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Put some pictures into a prompt, in order and apart."""
    placed, start = [], 0
    while rng.random() < 0.6:
        picture = rng.choice(pictures)
        offset = start + rng.choice((0, 0, 1, 3))
        end = offset + picture["length"]
        if end > len(prompt):
            break
        prompt[offset:end] = [PLACEHOLDER] * picture["length"]
        placed.append({"hash": picture["hash"], "offset": offset, **picture})
        start = end
    return placed


def _size(item: dict[str, Any]) -> int:
    """How many embeddings a picture has."""
    return sum(item["is_embed"]) if "is_embed" in item else int(item["length"])


def record(seeds: Iterable[int], real: Real | None = None) -> Iterator[recording.Recording]:
    """Each seed on the real scheduler, every field of every step."""
    for seed in seeds:
        yield run(generate(seed), real)

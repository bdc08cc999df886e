"""Recordings with pictures: what an encoder's budget and its cache let be scheduled.

    python -m conformance.record encoder encoder_async encoder_ec --core

A recording's `config` has both sizes in embeddings, `add.mm` the pictures of a prompt. A step adds
`encoder_inputs` (whose encoder runs), `freed_encoder_hashes` (what was evicted since the step
before, in order) and `encoder_free` (free and freeable embeddings after scheduling).

With an `ec_connector` the `config` has `ec_role` and `ec_has`: by hash the steps at which "are its
rows outside?" changes its answer, the first being no. A step adds `ec_loads`: what the pin's own
`ECExampleConnector` tells the worker to load, hash and rows, in order.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from conformance import recording, workloads
from conformance.recorders.run import run
from conformance.recorders.source import Real

PLACEHOLDER = 1
SEEDS = range(130_000, 131_000)
ASYNC_SEEDS = range(132_000, 132_400)
WITHDRAWN = (134_492, 134_588, 135_299, 135_660, 135_833, 136_064, 136_547)
"""Of some 2,600 seeds those in which a victim is withdrawn whose encoder was to run."""
RELEASED_TOGETHER = (134_398, 134_799, 135_103, 135_130, 135_167, 135_186, 135_390, 135_827)
"""Of the same those in which it matters who is released first in one update."""
DENSE_SEEDS = (*range(134_000, 134_360), *WITHDRAWN, *RELEASED_TOGETHER)

EC_SEEDS = range(140_000, 140_400)


def generate(seed: int) -> dict[str, Any]:
    """The workload of a seed: that of `workloads.generate`, with pictures in most prompts."""
    workload = workloads.generate(seed)
    rng = random.Random(seed * 23 + 13)
    pictures = [_picture(rng, index) for index in range(rng.choice((1, 2, 4, 8)))]
    for event in workload["events"]:
        for add in event["add"]:
            add["mm"] = _place(rng, add["prompt_token_ids"], pictures)
    return _with_sizes(rng, workload)


def generate_dense(seed: int) -> dict[str, Any]:
    """One picture after another in every prompt, and requests that end with their first token.

    Encoders run at every step of a long prompt, so also for victims that are withdrawn from it. A
    text may hold the placeholder's id itself: then only its place tells a picture from the same one
    some tokens further on.
    """
    profile = ("withdrawal", "withdrawal", "prefix", "priority")[seed % 4]
    number = len(workloads.PROFILES) * seed + workloads.PROFILES.index(profile)
    workload = {**workloads.generate(number), "seed": seed}
    rng = random.Random(seed * 31 + 7)
    pictures = [_picture(rng, index) for index in range(rng.choice((1, 2, 12, 40)))]
    for event in workload["events"]:
        for add in event["add"]:
            prompt = add["prompt_token_ids"]
            if rng.random() < 0.5:
                first = rng.randint(0, 4)
                prompt[:first] = [PLACEHOLDER] * len(prompt[:first])
            else:
                first = 0
            add["mm"] = _place(rng, prompt, pictures, 0.97, first)
            if rng.random() < 0.4:
                add["max_tokens"] = 1
                del workload["outputs"][add["request_id"]][1:]
    return _with_sizes(rng, workload)


def _with_sizes(rng: random.Random, workload: dict[str, Any]) -> dict[str, Any]:
    """The workload with a budget and a cache for its pictures."""
    config = workload["config"]
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
    rng: random.Random,
    prompt: list[int],
    pictures: list[dict[str, Any]],
    more: float = 0.6,
    start: int = 0,
) -> list[dict[str, Any]]:
    """Put some pictures into a prompt, in order and apart; `more` says how likely another is."""
    placed = []
    while rng.random() < more:
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


def record(seeds: Iterable[int] = SEEDS, real: Real | None = None) -> Iterator[recording.Recording]:
    """Each seed on the real scheduler, every field of every step."""
    for seed in seeds:
        yield _run(generate(seed), real)


def record_dense(
    seeds: Iterable[int] = DENSE_SEEDS, real: Real | None = None
) -> Iterator[recording.Recording]:
    """Each seed of `generate_dense` on the real scheduler."""
    for seed in seeds:
        yield _run(generate_dense(seed), real)


def record_async(
    seeds: Iterable[int] = ASYNC_SEEDS, real: Real | None = None
) -> Iterator[recording.Recording]:
    """Each seed on the real `AsyncScheduler`, whose pictures are released by a later plan."""
    for seed in seeds:
        workload = generate(seed)
        workload["config"]["async_scheduling"] = True
        yield run(workload, real)


def generate_ec(seed: int) -> dict[str, Any]:
    """The workload of `generate` or `generate_dense`, with pictures whose rows are outside: some
    always, some from a step on, some come and go."""
    workload = generate_dense(seed) if seed % 2 else generate(seed)
    rng = random.Random(seed * 43 + 11)
    adds = [add for event in workload["events"] for add in event["add"]]
    has: dict[str, list[int]] = {}
    for mm_hash in sorted({item["hash"] for add in adds for item in add["mm"]}):
        changes = rng.choice((0, 1, 1, 1, 2, 5))
        steps = [rng.choice((0, 0, 1, 2, 4, 8, 16, 30)) for _ in range(changes)]
        has[mm_hash] = sorted(set(steps))
    roles = ("ec_consumer", "ec_consumer", "ec_consumer", "ec_both", "ec_producer")
    workload["config"] |= {"ec_role": rng.choice(roles), "ec_has": has}
    workload["config"]["async_scheduling"] = rng.random() < 0.25
    return workload


def record_ec(
    seeds: Iterable[int] = EC_SEEDS, real: Real | None = None
) -> Iterator[recording.Recording]:
    """Each seed of `generate_ec` on the real scheduler, with the pin's example connector."""
    for seed in seeds:
        workload = generate_ec(seed)
        if workload["config"]["async_scheduling"]:
            yield run(workload, real)
        else:
            del workload["config"]["async_scheduling"]
            yield _run(workload, real)


def _run(workload: dict[str, Any], real: Real | None) -> recording.Recording:
    entry = run(workload, real)
    for step in entry["steps"]:
        step.pop("sampled_token_ids", None)  # `outputs` says it
    return entry

"""Two pictures that do not fit the encoder's cache together: which requests never end.

    python -m conformance.features.multimodal.spins FILE

writes the file of lab 13-05: chunk by chunk what the scheduler of each release makes of one
request, alone, on its own code (`course upstream fetch --version`). What spins is known after
`STALL` empty plans in a row: nothing else is there that could change anything.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.real_core import RealCore, core_of

RELEASES = ("0.22.1", "0.27.1", "0.33.0")
STALL = 3
"""Empty plans after which the real scheduler is taken to stand still."""


def case(seed: int) -> dict[str, Any]:
    """One prompt: its pictures [offset, length], its length, and the sizes it meets.

    `block_size` is that of a model with states in align mode; 0: there are none. `eagle`: a drafter
    that reads one token ahead.
    """
    rng = random.Random(seed)
    kind = rng.choice(("states", "states", "drafter", "drafter", "plain"))
    lengths = [rng.randint(2, 9) for _ in range(rng.choice((2, 2, 2, 3)))]
    pictures, at = [], rng.choice((0, 0, 1, 3, 7))
    for length in lengths:
        pictures.append([at, length])
        at += length + rng.choice((0, 0, 1, 1, 2, 5, 9))
    return {
        "seed": seed,
        "pictures": pictures,
        "num_tokens": max(at, pictures[-1][0] + pictures[-1][1]) + rng.randint(1, 9),
        "encoder_cache_size": max(lengths) + rng.choice((0, 0, 1, 3, 6, 12)),
        "max_num_batched_tokens": rng.choice((16, 32, 64)),
        "block_size": rng.choice((4, 8, 16)) if kind == "states" else 0,
        "eagle": kind == "drafter",
    }


def chunks(
    version: str, given: Mapping[str, Any], most: int = 200, core: RealCore | None = None
) -> dict[str, Any]:
    """What a release schedules: [[tokens, pictures encoded], ...], and whether it came to an end.

    The chunks are those up to the first token of the answer, or up to the first of `STALL` empty
    plans in a row. `core` is the release's where it is loaded already.
    """
    core = core or core_of(version)
    size = given["block_size"] or 16
    config: dict[str, Any] = {
        "num_blocks": 200, "block_size": size, "max_num_seqs": 4,
        "max_num_batched_tokens": given["max_num_batched_tokens"],
        "long_prefill_token_threshold": 0, "enable_prefix_caching": True,
        "enable_chunked_prefill": True, "max_model_len": 1024, "policy": "fcfs",
        "encoder_compute_budget": given["encoder_cache_size"],
        "encoder_cache_size": given["encoder_cache_size"], "disable_chunked_mm_input": False,
    }  # fmt: skip
    if given["block_size"]:
        config["kv_groups"] = [
            {"kind": "mamba", "block_size": size, "mode": "align"},
            {"kind": "full", "block_size": size},
        ]
    if given["eagle"]:
        config["speculative"] = {"method": "eagle", "num_speculative_tokens": 1}
    prompt = list(range(100, 100 + given["num_tokens"]))
    for offset, length in given["pictures"]:
        prompt[offset : offset + length] = [1] * length
    add = {
        "request_id": "a", "prompt_token_ids": prompt, "max_tokens": 1, "priority": 0,
        "arrival_time": 0.0, "ignore_eos": True,
        "mm": [
            {"hash": f"p{i}", "offset": offset, "length": length}
            for i, (offset, length) in enumerate(given["pictures"])
        ],
    }  # fmt: skip
    scheduler = core.make_scheduler(config)
    scheduler.add_request(core.make_request(add, size, 2))
    found: list[list[Any]] = []
    empty = 0
    while scheduler.requests and len(found) < most:
        plan = scheduler.schedule()
        count = dict(plan.num_scheduled_tokens).get("a", 0)
        empty = 0 if count else empty + 1
        if empty == STALL:
            return {"chunks": found[: len(found) - STALL + 2], "ends": False}
        found.append([count, list(dict(plan.scheduled_encoder_inputs).get("a", ()))])
        request = scheduler.requests["a"]
        samples = count and request.num_computed_tokens >= request.num_prompt_tokens
        scheduler.update_from_output(plan, core.runner_output(plan, {"a": 7} if samples else {}))
    assert not scheduler.requests, f"{given}: {most} steps and neither an end nor a stall"
    return {"chunks": found, "ends": True}


SEEDS = (*range(400), 578, 621, 644, 666, 698)
"""In the last five only the drafter reaches a picture in some step."""


def by_hand(
    pictures: Sequence[tuple[int, int]], num_tokens: int, size: int, block_size: int = 0
) -> dict[str, Any]:
    """A prompt under a cache of `size`; without a block size it has a drafter."""
    return {
        "seed": -num_tokens, "pictures": [list(each) for each in pictures],
        "num_tokens": num_tokens, "encoder_cache_size": size, "max_num_batched_tokens": 64,
        "block_size": block_size, "eagle": not block_size,
    }  # fmt: skip


KNOWN = (
    by_hand([(0, 5), (6, 5)], 20, 6, 8),  # that of the pull request, 51603
    by_hand([(0, 1), (1, 1)], 2, 1, 2),  # no prompt that spins is shorter
    by_hand([(0, 1), (1, 1)], 2, 1),  # nor one with a drafter
    by_hand([(0, 5), (5, 5)], 20, 6),
)


def cases(seeds: Sequence[int] = SEEDS) -> Iterator[dict[str, Any]]:
    """Each prompt, and what each release makes of it."""
    for given in (*KNOWN, *map(case, seeds)):
        yield given | {"releases": {version: chunks(version, given) for version in RELEASES}}


if __name__ == "__main__":
    with gzip.GzipFile(Path(sys.argv[1]), "wb", mtime=0) as file:
        for line in cases():
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

"""How one prompt with pictures gets to its first token, chunk by chunk, on the pin's own scheduler.

`python -m conformance.features.multimodal.first_token FILE` writes the second file of lab 13-04.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from conformance.real_core import core_of

SEEDS = range(200)


def case(seed: int) -> dict[str, Any]:
    """Texts and pictures [tokens, embeddings] in turn, and the step's budget.

    Sizes are those of real pictures: a mask takes some of a picture's tokens, as breaks do.
    """
    rng = random.Random(seed)
    parts: list[Any] = [rng.randint(1, 60)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        tokens = rng.choice((64, 144, 391, 576, 1230, 1564, 3120))
        rows = rng.choice((0, 0, 1, tokens // 25))
        parts += [[tokens, tokens - rows], rng.choice((1, 1, 8, 40))]
    largest = max(part[1] for part in parts if isinstance(part, list))
    budget = rng.choice((512, 2048, 4096, 8192))
    encoder_budget = max(budget, largest)
    sizes = [part[1] for part in parts if isinstance(part, list)]
    if len(sizes) > 1 and rng.random() < 0.4:  # just enough for two of them, or not
        encoder_budget = max(largest, sizes[0] + sizes[1] - rng.choice((0, 0, 1)))
    return {
        "seed": seed, "parts": parts, "max_num_batched_tokens": budget,
        "encoder_budget": encoder_budget,
    }  # fmt: skip


def steps(given: dict[str, Any], version: str = "0.22.1") -> list[list[int]]:
    """Of each step to the first token: tokens, and embeddings whose encoder ran."""
    core = core_of(version)
    config: dict[str, Any] = {
        "num_blocks": 4096, "block_size": 16, "max_num_seqs": 4,
        "max_num_batched_tokens": given["max_num_batched_tokens"],
        "long_prefill_token_threshold": 0, "enable_prefix_caching": True,
        "enable_chunked_prefill": True, "max_model_len": 32_768, "policy": "fcfs",
        "encoder_compute_budget": given["encoder_budget"],
        "encoder_cache_size": given["encoder_budget"], "disable_chunked_mm_input": False,
    }  # fmt: skip
    prompt: list[int] = []
    pictures: list[dict[str, Any]] = []
    for part in given["parts"]:
        if isinstance(part, int):
            prompt += [100 + len(prompt) % 50] * part
            continue
        tokens, embeds = part
        item: dict[str, Any] = {
            "hash": f"p{len(pictures)}", "offset": len(prompt), "length": tokens
        }  # fmt: skip
        if embeds < tokens:  # the tokens that take none are spread over the picture
            gaps = {(i + 1) * tokens // (tokens - embeds) - 1 for i in range(tokens - embeds)}
            item["is_embed"] = [int(i not in gaps) for i in range(tokens)]
        pictures.append(item)
        prompt += [1] * tokens
    add = {
        "request_id": "a", "prompt_token_ids": prompt, "max_tokens": 1, "priority": 0,
        "arrival_time": 0.0, "ignore_eos": True, "mm": pictures,
    }  # fmt: skip
    sizes = [part[1] for part in given["parts"] if isinstance(part, list)]
    scheduler = core.make_scheduler(config)
    scheduler.add_request(core.make_request(add, 16, 2))
    found = []
    while scheduler.requests:
        plan = scheduler.schedule()
        count = dict(plan.num_scheduled_tokens)["a"]
        ran = dict(plan.scheduled_encoder_inputs).get("a", ())
        found.append([count, sum(sizes[i] for i in ran)])
        request = scheduler.requests["a"]
        samples = request.num_computed_tokens >= request.num_prompt_tokens
        scheduler.update_from_output(plan, core.runner_output(plan, {"a": 7} if samples else {}))
    return found


EDGES: tuple[dict[str, Any], ...] = (
    {"seed": -1, "parts": [10, [100, 100], [50, 50], 5], "max_num_batched_tokens": 110,
     "encoder_budget": 200},
    {"seed": -2, "parts": [10, [100, 100], [50, 50], 5], "max_num_batched_tokens": 80,
     "encoder_budget": 100},
)  # fmt: skip
"""A chunk that ends where a picture ends and the next begins, and one that is cut there."""


def cases(seeds: Sequence[int] = SEEDS) -> Iterator[dict[str, Any]]:
    """Each prompt and its steps."""
    for given in (*EDGES, *map(case, seeds)):
        yield given | {"steps": steps(given)}


if __name__ == "__main__":
    with gzip.GzipFile(Path(sys.argv[1]), "wb", mtime=0) as file:
        for line in cases():
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

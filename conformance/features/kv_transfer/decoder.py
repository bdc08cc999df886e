"""What a decode engine computes of its prompts, and what its counters say of it.

    python -m conformance.features.kv_transfer.decoder FILE

The real scheduler with a connector that a script stands for. A window is what lies between two
looks at the counters: `seen` is what can be looked at, `computed` what the plans computed of the
prompts, token by token. The counters are the scheduler's own `prefill_stats`, which
`vllm/v1/metrics/stats.py:277` `PromptTokenStats` adds up; `affected` is what it says in the log
line of a failed load; a warm prompt came before the window. As NIXL's, the connector offers its
tokens once: what is asked for again, after a failed load or a preemption, is computed here.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.real_core import core_of
from conformance.recorders.run import Run, Stalled
from conformance.recorders.source import Real

WARM = "warm"
"""Begins the ids of requests that came before the window."""
SOURCES = {
    "local_compute": "num_computed_tokens", "local_cache_hit": "num_local_cached_tokens",
    "external_kv_transfer": "num_external_cached_tokens",
}  # fmt: skip
NAMED: dict[str, dict[str, Any]] = {
    "all of it moved": {"external": 40},
    "a prompt of one token": {"prompt": 1, "external": 1},
    "whole blocks moved": {"external": 32},
    "the store knows the beginning": {"external": 16},
    "nothing was offered": {"external": 0},
    "a warm prompt, nothing offered": {"external": 0, "warm": 40},
    "a warm prompt, the rest moved": {"external": 40, "warm": 40},
    "a block in the middle failed": {"external": 40, "fails": {"blocks": [1], "times": 1}},
    "the first block failed": {"external": 40, "fails": {"blocks": [0], "times": 1}},
    "all of it moved, and then it was preempted": {"external": 40, "beside": 30, "num_blocks": 7},
}  # fmt: skip
SEEDS = range(158_000, 158_240)


def _add(name: str, prompt: list[int], outputs: int, **kv: Any) -> dict[str, Any]:
    script = {"load_async": True, "known_at": 0, "load_steps": 1, "send_steps": None, **kv}
    script["load_async"] = script["external_tokens"] > 0
    return {
        "request_id": name, "prompt_token_ids": prompt, "max_tokens": outputs, "priority": 0,
        "arrival_time": 0.0, "ignore_eos": True, "kv": script,
    }  # fmt: skip


def _workload(seed: int, block_size: int, num_blocks: int, events: Any) -> dict[str, Any]:
    adds = [add for event in events for add in event["add"]]
    return {
        "seed": seed, "eos_token_id": 2,
        "config": {
            "num_blocks": num_blocks, "block_size": block_size, "max_num_seqs": 4,
            "max_num_batched_tokens": 64, "long_prefill_token_threshold": 0,
            "enable_prefix_caching": True, "enable_chunked_prefill": True, "max_model_len": 128,
            "policy": "fcfs", "kv_load_failure_policy": "recompute",
        },
        "events": events,
        "outputs": {add["request_id"]: [7] * add["max_tokens"] for add in adds},
    }  # fmt: skip


def named(story: dict[str, Any]) -> dict[str, Any]:
    """One request of 40 tokens in blocks of 16, and what came before or beside it."""
    prompt, at = list(range(100, 100 + story.get("prompt", 40))), 0
    events = []
    if "warm" in story:
        warm = _add(WARM, prompt[: story["warm"]], 1, external_tokens=0)
        events.append({"step": 0, "add": [warm], "abort": []})
        at = 4
    if "beside" in story:  # older, so that the newer one is preempted
        beside = _add(WARM, list(range(500, 500 + story["beside"])), 24, external_tokens=0)
        events.append({"step": 0, "add": [beside], "abort": []})
        at = 1
    more = {"fails": story["fails"]} if "fails" in story else {}
    add = _add(
        "r", prompt, 24 if "beside" in story else 3, external_tokens=story["external"], **more
    )
    events.append({"step": at, "add": [add], "abort": []})
    return _workload(0, 16, story.get("num_blocks", 20), events)


def generate(seed: int) -> dict[str, Any]:
    """One to three requests, with warm beginnings, loads of any length, and loads that fail."""
    rng = random.Random(seed * 17 + 3)
    size = rng.choice((4, 8, 16))
    stem = [rng.randint(10, 60) for _ in range(48)]
    events = []
    if rng.random() < 0.4:
        warm = _add(WARM, stem[: rng.randint(4, 48)], 1, external_tokens=0)
        events.append({"step": 0, "add": [warm], "abort": []})
    longest = 0
    for number in range(rng.choice((1, 1, 2, 3))):
        length = rng.randint(1, 44)
        own = [rng.randint(70, 99) for _ in range(length)]
        prompt = [*stem[: rng.choice((0, length, rng.randint(0, length)))], *own][:length]
        most = rng.choice((0, length, length, length // size * size, rng.randint(0, length)))
        more: dict[str, Any] = {"load_steps": rng.randint(0, 4)}
        if most and rng.random() < 0.35:
            more["fails"] = {"blocks": [rng.randint(0, 2)], "times": 1}
        add = _add(f"r{number}", prompt, rng.randint(1, 12), external_tokens=most, **more)
        events.append({"step": 5 + 2 * number, "add": [add], "abort": []})
        longest = max(longest, length + add["max_tokens"])
    blocks = 1 - (-longest // size) + rng.choice((0, 1, 3, 30))
    return _workload(seed, size, max(blocks, 1 - (-48 // size)), events)


class Counting(Run):
    """A run that counts what is computed of prompts, and keeps what the scheduler counts."""

    def __init__(self, workload: dict[str, Any], real: Real) -> None:
        super().__init__(workload, real)
        self.known: dict[str, Any] = {}
        self.computed = self.affected = 0
        self.sources = dict.fromkeys(SOURCES, 0)
        update, invalid = (
            self.scheduler.update_from_output,
            self.scheduler._update_requests_with_invalid_blocks,
        )

        def update_from_output(plan: Any, output: Any) -> Any:
            given = update(plan, output)
            for outputs in given.values():
                for each in outputs.outputs:
                    if each.prefill_stats and not each.request_id.startswith(WARM):
                        for name, of in SOURCES.items():
                            self.sources[name] += getattr(each.prefill_stats, of)
            return given

        def requests_with_invalid_blocks(*arguments: Any, **named: Any) -> Any:
            found = invalid(*arguments, **named)
            self.affected += found[1]
            return found

        allocated = self.connector.update_state_after_alloc

        def update_state_after_alloc(request: Any, blocks: Any, external: int) -> None:
            allocated(request, blocks, external)
            if external:
                name = request.request_id
                self.connector.script[name] = {**self.connector.script[name], "external_tokens": 0}

        self.connector.update_state_after_alloc = update_state_after_alloc
        self.scheduler.update_from_output = update_from_output
        self.scheduler._update_requests_with_invalid_blocks = requests_with_invalid_blocks

    def _observe(self, plan: Any, held: dict[str, list[int]]) -> dict[str, Any]:
        self.known |= self.live
        for name, count in plan.num_scheduled_tokens.items():
            if name.startswith(WARM):
                continue
            request = self.live[name]
            after, most = request.num_computed_tokens, request.num_prompt_tokens
            self.computed += max(0, min(after, most) - min(after - count, most))
        return super()._observe(plan, held)


def window_of(workload: dict[str, Any], real: Real) -> dict[str, Any] | None:
    """What is seen of a workload and what was computed; None where its queue stands (45388)."""
    run = Counting(copy.deepcopy(workload), real)
    try:
        run.recorded()
    except Stalled:
        return None
    of = {name: r for name, r in run.known.items() if not name.startswith(WARM)}
    return {
        "seen": {
            "block_size": workload["config"]["block_size"],
            "prompt_lengths": [request.num_prompt_tokens for request in of.values()],
            "prompt_tokens_by_source": run.sources,
            "num_preemptions": sum(request.num_preemptions for request in of.values()),
            "affected": run.affected,
        },
        "computed": run.computed,
        "offered": [workload_kv(workload, name) for name in of],
    }


def workload_kv(workload: dict[str, Any], name: str) -> int:
    """Tokens from the prompt's beginning that the connector has of a request."""
    adds = [add for event in workload["events"] for add in event["add"]]
    count: int = next(a["kv"]["external_tokens"] for a in adds if a["request_id"] == name)
    return count


def record(real: Real | None = None) -> Iterator[dict[str, Any]]:
    """The named windows, then the random ones."""
    real = real or core_of()
    for name, story in NAMED.items():
        window = window_of(named(story), real)
        assert window is not None, name
        yield {"name": name, **window}
    for seed in SEEDS:
        if (window := window_of(generate(seed), real)) is not None:
            yield {"name": f"seed {seed}", **window}


def write(path: Path) -> int:
    """All windows into a file; how many."""
    windows = list(record())
    lines = "".join(json.dumps(window, separators=(",", ":")) + "\n" for window in windows)
    path.write_bytes(gzip.compress(lines.encode(), 9, mtime=0))
    return len(windows)


if __name__ == "__main__":
    print(write(Path(sys.argv[1])), "windows")

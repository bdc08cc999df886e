"""The priority hazard of the pinned version: a workload in which a request reads unwritten KV.

    python -m conformance.hazard                 on the mini engine
    PYTHONPATH=upstream python -m conformance.hazard --real --out FILE

`low` prefills in chunks of 8. In step 2 it gets its third chunk and, with it, the last two free
blocks; both fill up in this step, so both enter the prefix index at once. Then `high` needs a
block. `low` is the victim and is withdrawn from the step: nothing of the chunk is computed. `high`
takes the last of the freed blocks, but the other keeps its hash. In step 3 `low` resumes and
adopts it: positions 16 to 19 are read from slots that nobody wrote.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from conformance import replay, shadow
from conformance.features.core import recorder as scheduler
from mini_vllm.scheduler import Scheduler

WORKLOAD: dict[str, Any] = {
    "seed": -1,
    "eos_token_id": 2,
    "config": {
        "num_blocks": 8,
        "block_size": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "long_prefill_token_threshold": 8,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "max_model_len": 64,
        "policy": "priority",
    },
    "events": [
        {
            "step": 0,
            "add": [
                {
                    "request_id": "low",
                    "prompt_token_ids": list(range(10, 34)),
                    "max_tokens": 2,
                    "priority": 5,
                    "arrival_time": 0.0,
                    "ignore_eos": False,
                }
            ],
            "abort": [],
        },
        {
            "step": 1,
            "add": [
                {
                    "request_id": "high",
                    "prompt_token_ids": [3, 4, 5, 6],
                    "max_tokens": 2,
                    "priority": 0,
                    "arrival_time": 1.0,
                    "ignore_eos": False,
                }
            ],
            "abort": [],
        },
    ],
    "outputs": {"low": [7, 7], "high": [8, 8]},
}

WITH_A_THIRD: dict[str, Any] = {
    **WORKLOAD,
    "events": [
        {
            **WORKLOAD["events"][0],
            "add": [
                *WORKLOAD["events"][0]["add"],
                {
                    **WORKLOAD["events"][0]["add"][0],
                    "request_id": "later",
                    "prompt_token_ids": list(range(40, 65)),
                    "priority": 9,
                },
            ],
        },
        WORKLOAD["events"][1],
    ],
    "outputs": {**WORKLOAD["outputs"], "later": [9, 9]},
}
"""With somebody waiting: a release that does not cap a lone request computes `low` at once."""


def recorded() -> Iterator[Any]:
    """The workload as the real scheduler decides it."""
    yield scheduler.record(WORKLOAD)


def build(forget_withdrawn_blocks: bool) -> replay.Build:
    """The mini scheduler, as upstream or with the fix."""

    def make(config: Any) -> Scheduler:
        chosen = {**config, "forget_withdrawn_blocks": forget_withdrawn_blocks}
        return replay.mini_scheduler(chosen)

    return make


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.hazard", description="Show the priority hazard, step by step."
    )
    parser.add_argument("--real", action="store_true", help="on the real scheduler")
    arguments = parser.parse_args(argv)
    if arguments.real:
        runs = {"the real scheduler": scheduler.record(WORKLOAD)}
    else:
        runs = {
            "as upstream": replay.run(WORKLOAD, build(False)),
            "forget_withdrawn_blocks=True": replay.run(WORKLOAD, build(True)),
        }
    for name, entry in runs.items():
        print(name)
        for index, step in enumerate(entry["steps"]):
            print(f"  step {index}  {step['num_scheduled_tokens']}  tables {step['block_ids']}")
        stale = shadow.stale_reads(entry)
        first = f", first {stale[0]}" if stale else ""
        print(f"  {len(stale)} stale reads{first}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

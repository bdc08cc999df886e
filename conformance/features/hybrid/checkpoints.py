"""What releases find of the traces of lab 14-05, in each mode that they have for states.

    python -m conformance.features.hybrid.checkpoints FILE

The real scheduler serves prompt after prompt over three groups of states and one of full attention.
"align", "all" and "none" are the pin's modes; "0.33.0" is that release's "align" with the server's
default for `prefix_cache_retention_interval`, 0, and needs its archive
(`course upstream fetch --version 0.33.0`). The same of the first 400 prompts
of a real trace in Mooncake's form, its blocks of 512 tokens taken for blocks, with the lab's
solution beside them, over a pool of 20,000 blocks; printed, not kept:

    python -m conformance.features.hybrid.checkpoints --trace FILE.jsonl.gz
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from conformance import recording
from conformance.features import ROOT
from conformance.real_core import core_of
from conformance.recorders.run import Run
from labkit.modules import load_module

LAB = ROOT / "phase-14-model-architectures" / "labs" / "lab-05-where-to-checkpoint"
KEPT = LAB / "recordings" / "hits.jsonl.gz"
SEEDS = range(6)
MODES = {
    "align": ("0.22.1", "align"), "all": ("0.22.1", "all"), "none": ("0.22.1", "none"),
    "0.33.0": ("0.33.0", "align"),
}  # fmt: skip
"""By name the release and its `mamba_cache_mode`."""
traffic: Any = load_module(LAB / "traffic.py")


def workload(lines: Sequence[dict[str, Any]], num_blocks: int, mode: str) -> dict[str, Any]:
    """A trace as a workload: everything is there at once, and one request runs at a time."""
    size, longest = traffic.BLOCK_SIZE, 1 << 16
    state = {"kind": "mamba", "block_size": longest if mode == "none" else size, "mode": mode}
    adds = [
        {
            "request_id": f"r{number}", "prompt_token_ids": traffic.tokens_of(line),
            "max_tokens": 1, "priority": 0, "arrival_time": float(number), "ignore_eos": True,
        }
        for number, line in enumerate(lines)
    ]  # fmt: skip
    config = {
        "num_blocks": num_blocks, "block_size": longest if mode == "none" else size,
        "max_num_seqs": 1, "max_num_batched_tokens": traffic.BUDGET,
        "long_prefill_token_threshold": 0, "enable_prefix_caching": mode != "none",
        "enable_chunked_prefill": True, "max_model_len": longest, "policy": "fcfs",
        "kv_groups": [state] * traffic.NUM_STATES + [{"kind": "full", "block_size": size}],
    }  # fmt: skip
    outputs = {add["request_id"]: [5] for add in adds}
    return {
        "seed": 1, "eos_token_id": 2, "config": config, "outputs": outputs,
        "events": [{"step": 0, "abort": [], "add": adds}],
    }  # fmt: skip


def served(lines: Sequence[dict[str, Any]], num_blocks: int, name: str) -> dict[str, Any]:
    """Tokens that each prompt found, and the steps it took all of them."""
    version, mode = MODES[name]
    made = Run(workload(lines, num_blocks, mode), core_of(version))
    if name == "0.33.0":
        coordinator = made.scheduler.kv_cache_manager.coordinator
        assert coordinator.retention_interval is None
        coordinator.retention_interval = 0
    found: dict[str, int] = {}
    steps = 0
    for step in made.recorded()["steps"]:
        steps += bool(step["num_scheduled_tokens"])
        for request_id, planned in dict(step["num_scheduled_tokens"]).items():
            found.setdefault(request_id, step["num_computed_tokens"][request_id] - planned)
    return {"hits": [found[f"r{number}"] for number in range(len(lines))], "steps": steps}


def cases() -> Iterator[dict[str, Any]]:
    """Each kind of trace, six of each."""
    for kind, num_blocks in traffic.NUM_BLOCKS.items():
        for seed in SEEDS:
            lines = traffic.trace(kind, seed)
            yield {
                "upstream": recording.UPSTREAM, "kind": kind, "seed": seed,
                "num_blocks": num_blocks, "trace": lines,
                "modes": {name: served(lines, num_blocks, name) for name in MODES},
                "most": sum(served(lines, traffic.UNBOUNDED, "all")["hits"]),
            }  # fmt: skip


def study(path: Path, most: int = 400, num_blocks: int = 20_000) -> Iterator[str]:
    """Lines that say what each mode finds of a real trace."""
    size = traffic.BLOCK_SIZE
    with gzip.open(path, "rt") as file:
        read = [json.loads(line)["hash_ids"] for line, _ in zip(file, range(most), strict=False)]
    lines = [
        {"hash_ids": ids, "input_length": len(ids) * size - 1, "output_length": 1} for ids in read
    ]
    total = sum(line["input_length"] for line in lines)
    best = served(lines, 200_000, "all")
    most_found = sum(best["hits"]) / total
    yield f"{len(lines)} prompts, {total // size} blocks; endless pool, all: {most_found:.1%}"
    told = {name: served(lines, num_blocks, name) for name in MODES}
    lab = load_module(LAB / "solution.py")
    choose = traffic.choosing(lab, lab.Checkpoints(size))
    mine = traffic.serve(lines, num_blocks, choose)
    told["solution"] = {"hits": mine.hits, "steps": mine.steps}
    for name, found in told.items():
        share, each = sum(found["hits"]) / total, found["steps"] / len(lines)
        yield f"{name:8} {share:6.1%} of tokens, {each:.2f} steps per prompt"


def main() -> int:
    """Write the file, or print what is found of a trace."""
    if sys.argv[1] == "--trace":
        print(*study(Path(sys.argv[2])), sep="\n")
        return 0
    with gzip.GzipFile(Path(sys.argv[1]), "wb", mtime=0) as file:
        for line in cases():
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

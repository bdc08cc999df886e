"""Which of the recorded workloads lab 13-03 keeps: small ones that show every situation.

`python -m conformance.features.multimodal.lab_files FOLDER` writes its four files, workload by
workload as they stand in `conformance/recordings`.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from conformance import recording
from conformance.features.multimodal.situations import COUNTED
from conformance.prefixes import entries
from conformance.real_core import core_of
from conformance.recorders.run import run

EACH = 3
"""Workloads kept of a situation, the smallest first."""
FILES = {
    "budget": ("encoder", False),
    "whole": ("encoder", True),
    "leaving": ("encoder_dense", None),
    "ahead": ("encoder_async", None),
}
"""Of each file: where its workloads are from, and whether pictures stay whole (None: both)."""
ALSO = {"budget": (130_108, 130_221, 130_652)}
"""Seeds in which it matters that a chunk covers no embedding of a picture."""


def belongs(name: str, entry: recording.Recording) -> bool:
    """Whether a file may keep a workload. Nobody is preempted or aborted in the first two."""
    _, whole = FILES[name]
    if whole is None:
        return True
    gone = any(step["preempted"] for step in entry["steps"])
    gone |= any(event["abort"] for event in entry["events"])
    return not gone and entry["config"]["disable_chunked_mm_input"] is whole


def chosen(name: str) -> Iterator[recording.Recording]:
    """Its workloads, by seed."""
    source, _ = FILES[name]
    found: dict[str, list[recording.Recording]] = {}
    for entry in entries(source):
        if belongs(name, entry):
            for situation in COUNTED.situations_of(entry):
                found.setdefault(situation, []).append(entry)
            if entry["seed"] in ALSO.get(name, ()):
                found[str(entry["seed"])] = [entry]
    kept = {
        entry["seed"]: entry
        for each in found.values()
        for entry in sorted(each, key=lambda e: (len(e["steps"]), e["seed"]))[:EACH]
    }
    yield from (kept[seed] for seed in sorted(kept))


def victim() -> recording.Recording:
    """A victim's encoder was to run; the budget of it goes to another, on the pin's own scheduler.

    No recorded workload shows it. Three run in chunks of a block; at step 5 the last free block is
    the victim's.
    """
    from conformance.features.multimodal.test_multimodal import add, workload_of

    workload = workload_of(
        add("victim", 24, ("A", 20), priority=9), add("urgent", 20, priority=1),
        add("third", 16, ("B", 12), priority=5), together=False, num_blocks=14,
        long_prefill_token_threshold=4, policy="priority",
    )  # fmt: skip
    return run(workload, core_of())


def write(folder: Path, names: Iterable[str] = FILES) -> None:
    """One file per name, as `conformance.record` writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        kept = [*chosen(name), *([victim()] if name == "leaving" else [])]
        lines = [json.dumps(entry, separators=(",", ":")) + "\n" for entry in kept]
        with gzip.GzipFile(folder / f"{name}.jsonl.gz", "wb", compresslevel=9, mtime=0) as file:
            file.write("".join(lines).encode())


if __name__ == "__main__":
    write(Path(sys.argv[1]))

"""Ten rules of the scheduler, each broken by one edit, and the first recorded step that notices.

    python -m conformance.broken_rules --write

The edits are mutants of the core's catalogue (`features/core/mutants.py`). Each is replayed on the
recording that its catalogue entry names; `broken_rules.json` beside this file keeps how many of
its workloads leave the recording, in which fields first, and the first difference whole. The
conformance page shows it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from conformance.features import RECORDINGS
from conformance.features.core.mutants import MUTANTS
from conformance.mutants import Mutant, build
from conformance.replay import replay_files
from conformance.words import show

FILE = Path(__file__).with_suffix(".json")
RULES = {
    "preempts from the front of running":
        "A step that is short of blocks preempts the request at the end of running.",
    "queues a preempted request at the back":
        "A preempted request waits at the head of the queue.",
    "admits in a preempting step":
        "A step that preempts admits no waiting request.",
    "admits when the first chunk fits, not the whole sequence":
        "A waiting request is admitted when the blocks of its whole prompt fit.",
    "lets a hit cover the last token":
        "A cache hit never covers a prompt's last token.",
    "frees a table head first":
        "A request frees its last block first.",
    "forgets a block's content when it is freed":
        "A freed block keeps its content until it is given out again.",
    "does not count revived hits as consumed":
        "A hit on a free block counts as one free block less.",
    "reports length when EOS and the cap tie":
        "A request whose last allowed token is EOS ends with 'stop'.",
    "frees the finished in reverse":
        "Requests that end in one step free their blocks in the order of the batch.",
}  # fmt: skip
"""By mutant, the rule as vLLM has it."""


def edits(mutant: Mutant) -> str:
    """What was changed, as a diff."""
    lines = []
    for module, old, new in mutant.edits:
        before, after = old.split("\n"), new.split("\n")
        same = 0
        while same < min(len(before), len(after)) and before[same] == after[same]:
            same += 1
        tail = 0
        rest = min(len(before), len(after)) - same
        while tail < rest and before[-1 - tail] == after[-1 - tail]:
            tail += 1
        lines.append(f"# {module}.py")
        lines += [f" {line}" for line in before[:same]]
        lines += [f"-{line}" for line in before[same : len(before) - tail]]
        lines += [f"+{line}" for line in after[same : len(after) - tail]]
        lines += [f" {line}" for line in before[len(before) - tail :]]
    return "\n".join(lines)


def broken(mutant: Mutant) -> dict[str, Any]:
    """What the recording that the mutant names says of it."""
    result = replay_files([RECORDINGS / f"{mutant.profile}.jsonl.gz"], *build(mutant))
    first = result.differences[0]
    return {
        "name": mutant.name,
        "rule": RULES[mutant.name],
        "edits": edits(mutant),
        "recording": mutant.profile,
        "workloads": result.num_workloads,
        "differ": len(result.differences),
        "fields": Counter(each.field for each in result.differences).most_common(),
        "first": {
            "seed": first.seed, "step": first.step, "field": first.field,
            "expected": show(first.expected), "got": show(first.got), "before": first.context,
        },
    }  # fmt: skip


def chosen() -> list[Mutant]:
    """The mutants, in the order of `RULES`."""
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    return [by_name[name] for name in RULES]


def document() -> list[dict[str, Any]]:
    """What `--write` kept."""
    kept: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m conformance.broken_rules")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    found = [broken(mutant) for mutant in chosen()]
    for each in found:
        print(f"{each['differ']:5} of {each['workloads']:5} of {each['recording']}: {each['name']}")
    if arguments.write:
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

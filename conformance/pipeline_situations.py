"""How often each situation of several batches in flight occurs in the recordings of them.

    python -m conformance.pipeline_situations --write

Everything is read off the recordings alone. Prints in how many workloads each occurs and exits 1
when one never does.
"""

from __future__ import annotations

import argparse
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance import recording
from labkit.tables import markdown_table, write_section

README = Path(__file__).with_name("README.md")
FILE = README.parent / "recordings" / "pipeline.jsonl.gz"

SITUATIONS = {
    "two stages": "at most two batches in flight",
    "three stages": "at most three",
    "four stages": "at most four",
    "as many in flight as stages": "the oldest is waited for because the queue is full",
    "nothing to plan": "the oldest is waited for because everybody is in flight or stuck",
    "passed over": "a running request gets nothing, because its token is still to come",
    "others fill the batch": "in the same step another request is scheduled",
    "chunk after chunk": "a prompt's next chunk is planned while the one before is in flight",
    "preempted in flight": "its blocks are gone, its token is still to come",
    "resumed in flight": "and it is admitted again before that, for a chunk that samples nothing",
    "token for a waiting request": "what was in flight is appended after the preemption",
    "ends while waiting": "that token ends it in the queue",
    "aborted in flight": "its token comes for nobody",
}


def situations_of(entry: recording.Recording) -> set[str]:
    """Which of them occur in one workload."""
    depth = entry["config"]["pipeline_parallel_size"]
    seen = {("two", "three", "four")[depth - 2] + " stages"}
    queue: deque[Mapping[str, Any]] = deque()
    aborts = {e["step"]: set(e.get("abort", ())) for e in entry["events"]}
    before: Mapping[str, Any] = {"running": []}
    for index, step in enumerate(entry["steps"]):
        seen |= set(_of_step(step, before, queue, aborts.get(index, set())))
        queue.append(step)
        planned = bool(step["num_scheduled_tokens"])
        if not planned or len(queue) == depth:
            if planned:
                seen.add("as many in flight as stages")
            elif any(flown["num_scheduled_tokens"] for flown in queue):
                seen.add("nothing to plan")
            done = queue.popleft()
            came = set(done["sampled_token_ids"]) & set(step["waiting"])
            if came:
                seen.add("token for a waiting request")
            if came & set(step["finished"]):
                seen.add("ends while waiting")
        before = step
    return seen


def _of_step(
    step: Mapping[str, Any],
    before: Mapping[str, Any],
    queue: Sequence[Mapping[str, Any]] | deque[Mapping[str, Any]],
    aborted: set[str],
) -> Iterator[str]:
    """The situations of one plan, given what is in flight before it."""
    scheduled = step["num_scheduled_tokens"]
    awaited = {r for flown in queue for r in flown["sampled_token_ids"]}
    chunks = {r for flown in queue for r in flown["num_scheduled_tokens"]} - awaited
    idle = awaited & set(step["running"]) - set(scheduled)
    if idle:
        yield "passed over"
    if idle and scheduled:
        yield "others fill the batch"
    if chunks & set(scheduled) & set(before["running"]):
        yield "chunk after chunk"
    if awaited & set(step["preempted"]):
        yield "preempted in flight"
    if awaited & set(step["resumed"]):
        yield "resumed in flight"
    if aborted & awaited:
        yield "aborted in flight"


def counts(entries: Iterator[recording.Recording] | None = None) -> Counter[str]:
    """In how many workloads each occurs."""
    found: Counter[str] = Counter(dict.fromkeys(SITUATIONS, 0))
    for entry in entries or recording.read(FILE):
        found.update(situations_of(entry))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="update conformance/README.md")
    arguments = parser.parse_args(argv)
    found = counts()
    rows = [[name, meaning, str(found[name])] for name, meaning in SITUATIONS.items()]
    for name, _, count in rows:
        print(f"{count:>6}  {name}")
    if arguments.write:
        text = markdown_table(["situation", "meaning", "workloads"], rows)
        write_section("pipeline-situations", text, README)
    return 0 if all(found[name] for name in SITUATIONS) else 1


if __name__ == "__main__":
    raise SystemExit(main())

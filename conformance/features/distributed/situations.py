"""How often each situation of several batches in flight occurs in the recordings of them.

Everything is read off the recordings alone; `python -m conformance.situations` counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conformance import recording
from conformance.features import Counted

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


COUNTED = Counted("pipeline-situations", ("pipeline",), SITUATIONS, situations_of)

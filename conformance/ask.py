"""One workload, decided by vLLM's own scheduler and by ours, step by step.

    course ask workload.yaml
    course ask 4711 --release 0.33.0

Both get the same sampled tokens and drafts: those that the workload scripts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from conformance import replay
from conformance.features.core.recorder import Stalled
from conformance.recorders import combined
from conformance.recorders.source import Real
from conformance.replay import config_of
from conformance.words import show
from conformance.workloads import Workload

MEANINGS = {
    "preempted": "who loses its blocks",
    "num_scheduled_tokens": "who runs, and how many tokens each gets",
    "new": "who is listed as new",
    "resumed": "who is listed as resumed",
    "finished_before": "who has ended since the last step",
    "running": "who is in the running queue",
    "waiting": "who waits, and in which order",
    "skipped": "who is passed over, and for what",
    "skipped_waiting": "who is passed over for an adapter",
    "block_ids": "which blocks each request holds",
    "num_computed_tokens": "how many tokens each request has computed",
    "free_blocks": "how many blocks are free",
    "spec_token_ids": "which drafts each request holds",
    "scheduled_spec_decode_tokens": "which drafts are verified",
    "num_output_placeholders": "how many tokens are on their way",
    "sampled_token_ids": "whose rows sample",
    "grammar_rows": "whose rows get a mask",
    "finished": "who ends in this step",
    "finish_reasons": "why requests end",
    "exception": "an error of the engine under test",
}
"""What a field of a step says."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What both decided, up to the first difference."""

    real: list[dict[str, Any]]
    """Every step of the real scheduler."""
    ours: list[dict[str, Any]]
    """Every step of the other, up to the one that differs."""
    difference: replay.Difference | None
    fault: str = ""
    """What stopped the real scheduler, if anything did."""


def ask(
    workload: Workload,
    real: Real,
    build: replay.Build = replay.mini_scheduler,
    make_request: replay.MakeRequest = replay.mini_request,
) -> Answer:
    """Decide a workload on the real scheduler and on another.

    Args:
        workload: as `workload_file.read` gives it.
        real: the real scheduler's classes.
        build, make_request: as for `replay.replay`.

    Raises:
        ValueError: the release cannot record one of the workload's features.
    """
    fault = ""
    try:
        entry = combined.run(workload, real, grows=False)
    except combined.RefusedError as error:
        fault = str(error).split(": ", 1)[-1]
        entry = error.entry
    except Stalled:
        return Answer([], [], None, "stands still for ever: a request can never be scheduled")
    _, difference = replay.replay(entry, build, make_request)
    ours: list[dict[str, Any]] = []
    if difference is None or difference.field != "exception":
        driven = replay.Driven(entry, build(config_of(entry)), make_request)
        events = replay.events_by_step(entry)
        for index, step in enumerate(entry["steps"]):
            told = step.get("sampled_token_ids"), step.get("draft_token_ids")
            ours.append(driven.step(events.get(index, {}), *told))
            if difference is not None and index == difference.step:
                break
    return Answer(entry["steps"], ours, difference, fault)


def lines(answer: Answer, real_name: str, our_name: str) -> Iterator[str]:
    """The answer as text: a line per step, and the first difference in words."""
    width = max([24, *(len(plan_of(step)) for step in answer.real)]) + 2
    yield f"{'step':<6}{real_name:<{width}}{our_name}"
    for index, step in enumerate(answer.real):
        text = plan_of(step)
        if index >= len(answer.ours):
            beside = ""
        elif answer.difference is not None and index == answer.difference.step:
            beside = f"{plan_of(answer.ours[index])}   <- {answer.difference.field}"
        else:
            beside = "the same"
        yield f"{index:<6}{text:<{width}}{beside}".rstrip()
    if answer.fault:
        yield f"{real_name} ends here: {answer.fault}"
    difference = answer.difference
    if difference is None:
        yield f"{len(answer.real)} steps, every field of each: the same."
        return
    what = MEANINGS.get(difference.field, difference.field)
    yield f"Step {difference.step} is the first that differs, in {difference.field}: {what}."
    yield f"  {real_name:<12}{show(difference.expected)}"
    yield f"  {our_name:<12}{show(difference.got)}"


def plan_of(step: Mapping[str, Any]) -> str:
    """A step in a line: who gets how many tokens, who is preempted, who ends."""
    counts = step["num_scheduled_tokens"].items()
    text = ", ".join(f"{request_id} {count}" for request_id, count in counts) or "nothing"
    for word, ids in (("preempts", step["preempted"]), ("ends", step.get("finished", ()))):
        if ids:
            text += f"; {word} {', '.join(ids)}"
    return text

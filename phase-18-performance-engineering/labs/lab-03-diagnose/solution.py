"""Lab 18-03: ten questions of people who run vLLM, each with one right answer.

A case is a recording of vLLM's own scheduler: what was asked, and each step that it decided. You
write one function per kind. It gets a case and gives the diagnosis: the cause by name, the request
that the question asks for, a number that the recording holds, and one knob that reaches the case's
goal. Each function is given three cases of its kind, so read the number from the case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """An answer."""

    cause: str
    """One of the causes that the page lists for the kind."""
    request: str
    number: int
    fix: Mapping[str, Any]
    """One knob and its value."""


def hits(case: Mapping[str, Any]) -> Diagnosis:
    """*Why is my prefix hit rate 0 %?* The subject finds nothing in the cache.

    request: the first one whose prompt begins as the subject's. number: the tokens with which the
    two begin alike.
    """
    mine = _asked(case)[case["subject"]]["prompt_token_ids"]
    for name, add in _asked(case).items():
        pairs = zip(mine, add["prompt_token_ids"], strict=False)
        alike = next((place for place, (a, b) in enumerate(pairs) if a != b), 0)
        if alike:
            return Diagnosis("short-prefix", name, alike, {"block_size": 16})
    raise ValueError("no prompt begins as the subject's")


def queue(case: Mapping[str, Any]) -> Diagnosis:
    """*Few run, many wait, nothing moves.* The subject is short, and waits.

    request: the one that it waits behind. number: the blocks that this one needs to be admitted.
    """
    first = next(
        step for step in case["steps"] if case["subject"] in step["waiting"]
    )  # fmt: skip
    head = first["waiting"][0]
    need = -(-len(_asked(case)[head]["prompt_token_ids"]) // case["config"]["block_size"])
    return Diagnosis("head-needs-blocks", head, need, {"policy": "priority"})


def gaps(case: Mapping[str, Any]) -> Diagnosis:
    """*Which max_num_batched_tokens?* The subject streams, and stalls once.

    request: the one with the most tokens in the fullest step in which the subject gets one token.
    number: the tokens of that step.
    """
    plans = [step["num_scheduled_tokens"] for step in case["steps"]]
    decoding = [plan for plan in plans if plan.get(case["subject"]) == 1]
    fullest = max(decoding, key=lambda plan: sum(plan.values()))
    most = max(fullest, key=lambda name: fullest[name])
    return Diagnosis(
        "prefill-beside-decode", most, sum(fullest.values()), {"max_num_batched_tokens": 64}
    )


def twice(case: Mapping[str, Any]) -> Diagnosis:
    """*Am I being preempted, and what did it cost?* More is computed than was asked for.

    request: the first that is computed again. number: the tokens that were computed twice, of all.
    """
    planned = sum(sum(step["num_scheduled_tokens"].values()) for step in case["steps"])
    once = sum(
        len(add["prompt_token_ids"]) + add["max_tokens"] - 1 for add in _asked(case).values()
    )
    again = next(step["resumed"][0] for step in case["steps"] if step["resumed"])
    return Diagnosis("preemption", again, planned - once, {"max_num_seqs": 4})


def adapters(case: Mapping[str, Any]) -> Diagnosis:
    """*LoRA halves my throughput.* The subject waits while later requests are served.

    request: the one that runs in the first step that the subject waits. number: the steps that the
    subject waits.
    """
    subject = case["subject"]
    waiting = [
        step
        for step in case["steps"]
        if subject in [*step["waiting"], *step["skipped_waiting"]]
        and subject not in step["num_scheduled_tokens"]
    ]
    return Diagnosis("adapter-slots", waiting[0]["running"][0], len(waiting), {"max_loras": 2})


def upgrade(case: Mapping[str, Any]) -> Diagnosis:
    """*The other release serves the same requests differently.* `case["later"]` has its steps.

    request: the first that gets another number of tokens. number: the step in which it does.
    """
    for number, (mine, theirs) in enumerate(
        zip(case["steps"], case["later"]["steps"], strict=False)
    ):
        for name, count in mine["num_scheduled_tokens"].items():
            if theirs["num_scheduled_tokens"].get(name) != count:
                fix = {"release": case["later"]["release"]}
                return Diagnosis("cached-prefix", name, number, fix)
    raise ValueError("the two releases decide alike")


def alive(case: Mapping[str, Any]) -> Diagnosis:
    """*It hangs, and /health says 200.* The subject is short, and is never served.

    request: the first in the queue at the end. number: the first step from which on no step
    computes a token, which is what liveness is measured by.
    """
    plans = [step["num_scheduled_tokens"] for step in case["steps"]]
    stands = next(number for number in range(len(plans)) if not any(plans[number:]))
    head = case["steps"][-1]["waiting"][0]
    holds = (case["config"]["num_blocks"] - 1) * case["config"]["block_size"]
    return Diagnosis("never-fits", head, stands, {"max_model_len": holds})


def rate(case: Mapping[str, Any]) -> Diagnosis:
    """*A hit rate of a fifth on random prompts?* `case["dashboard"]` has what 0.11.0 counted.

    request: the first that is computed again. number: the tokens that requests found in the cache
    as they were resumed, of all together.
    """
    found = [
        step["num_computed_tokens"][name] - step["num_scheduled_tokens"][name]
        for step in case["steps"]
        for name in step["resumed"]
    ]
    again = next(step["resumed"][0] for step in case["steps"] if step["resumed"])
    return Diagnosis("own-blocks", again, sum(found), {"max_num_seqs": 4})


def counters(case: Mapping[str, Any]) -> Diagnosis:
    """*Counters can only be incremented by non-negative amounts.* The server died of it.

    `case["dashboard"]` has what 0.18.0 had counted, and the step in which it died. A prompt is
    counted in the step of its first token. The server has a tier that keeps blocks: of the tokens
    that an admission finds, `step["external"]` has those that the tier gives.
    request: whose first token came in that step. number: by what its `local_cache_hit` would grow.
    """
    died = case["dashboard"]["died"]["step"]
    for name, add in _asked(case).items():
        done = [
            number
            for number, step in enumerate(case["steps"])
            if step["num_computed_tokens"].get(name, 0) >= len(add["prompt_token_ids"])
        ]
        if not done or done[0] != died:
            continue
        admitted = [
            step for step in case["steps"][: died + 1] if name in [*step["new"], *step["resumed"]]
        ]
        first, last = admitted[0], admitted[-1]
        found = first["num_computed_tokens"][name] - first["num_scheduled_tokens"][name]
        grown = found - last["external"].get(name, 0)
        return Diagnosis("admitted-twice", name, grown, {"max_num_batched_tokens": 256})
    raise ValueError("no request's first token comes in that step")


def start(case: Mapping[str, Any]) -> Diagnosis:
    """*A start takes minutes. What is it doing?* `case["other"]` has the lines of a quicker start.

    A line is one of vLLM's log, with its process (`pid`), the processor seconds of that process so
    far (`cpu`) and of its children that have ended (`children`). The causes and the lines between
    which each passes are in `starts.PHASES`; `another-process` is one that only this start has.
    request: the pid in whose lines the cause passes. number: the cause's processor milliseconds.
    """
    grown = {
        cause: _spent(case["lines"], cause)[0] - _spent(case["other"], cause)[0] for cause in _FIXES
    }
    cause = max(grown, key=lambda name: grown[name])
    number, pid = _spent(case["lines"], cause)
    return Diagnosis(cause, pid, number, _FIXES[cause])


_FIXES: dict[str, Mapping[str, Any]] = {
    "imports": {"multiprocessing": False},
    "inspection": {"kept_cache": True},
    "another-process": {"multiprocessing": False},
    "weights": {"load_format": "dummy"},
    "compilation": {"kept_cache": True},
}
_BETWEEN = {
    "imports": ("begins", "vllm is imported"),
    "inspection": ("vllm is imported", "Resolved architecture"),
    "another-process": ("begins", "Initializing a V1 LLM engine"),
    "weights": ("Starting to load model", "Loading weights took"),
    "compilation": ("Warming up model", "Warming up done"),
}


def _spent(lines: Sequence[Mapping[str, Any]], cause: str) -> tuple[int, str]:
    """Processor milliseconds between a cause's two lines of one process, and its pid."""
    first, last = _BETWEEN[cause]
    began: dict[int, float] = {}
    for line in lines:
        pid, clock = line["pid"], line["cpu"] + line["children"]
        if first in line["text"] and not (cause == "another-process" and pid == lines[0]["pid"]):
            began.setdefault(pid, clock)
        if last in line["text"] and pid in began:
            return round(1000 * (clock - began[pid])), str(pid)
    return 0, ""


def _asked(case: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {add["request_id"]: add for event in case["events"] for add in event["add"]}

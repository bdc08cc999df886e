"""Lab 18-03: ten questions of people who run vLLM, each with one right answer.

A case is a recording of vLLM's own scheduler: what was asked, and each step that it decided. You
write one function per kind. It gets a case and gives the diagnosis: the cause by name, the request
that the question asks for, a number that the recording holds, and one knob that reaches the case's
goal. Each function is given three cases of its kind, so read the number from the case.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    raise NotImplementedError


def queue(case: Mapping[str, Any]) -> Diagnosis:
    """*Few run, many wait, nothing moves.* The subject is short, and waits.

    request: the one that it waits behind. number: the blocks that this one needs to be admitted.
    """
    raise NotImplementedError


def gaps(case: Mapping[str, Any]) -> Diagnosis:
    """*Which max_num_batched_tokens?* The subject streams, and stalls once.

    request: the one with the most tokens in the fullest step in which the subject gets one token.
    number: the tokens of that step.
    """
    raise NotImplementedError


def twice(case: Mapping[str, Any]) -> Diagnosis:
    """*Am I being preempted, and what did it cost?* More is computed than was asked for.

    request: the first that is computed again. number: the tokens that were computed twice, of all.
    """
    raise NotImplementedError


def adapters(case: Mapping[str, Any]) -> Diagnosis:
    """*LoRA halves my throughput.* The subject waits while later requests are served.

    request: the one that runs in the first step that the subject waits. number: the steps that the
    subject waits.
    """
    raise NotImplementedError


def upgrade(case: Mapping[str, Any]) -> Diagnosis:
    """*The other release serves the same requests differently.* `case["later"]` has its steps.

    request: the first that gets another number of tokens. number: the step in which it does.
    """
    raise NotImplementedError


def alive(case: Mapping[str, Any]) -> Diagnosis:
    """*It hangs, and /health says 200.* The subject is short, and is never served.

    request: the first in the queue at the end. number: the first step from which on no step
    computes a token, which is what liveness is measured by.
    """
    raise NotImplementedError


def rate(case: Mapping[str, Any]) -> Diagnosis:
    """*A hit rate of a fifth on random prompts?* `case["dashboard"]` has what 0.11.0 counted.

    request: the first that is computed again. number: the tokens that requests found in the cache
    as they were resumed, of all together.
    """
    raise NotImplementedError


def counters(case: Mapping[str, Any]) -> Diagnosis:
    """*Counters can only be incremented by non-negative amounts.* The server died of it.

    `case["dashboard"]` has what 0.18.0 had counted, and the step in which it died. A prompt is
    counted in the step of its first token. The server has a tier that keeps blocks: of the tokens
    that an admission finds, `step["external"]` has those that the tier gives.
    request: whose first token came in that step. number: by what its `local_cache_hit` would grow.
    """
    raise NotImplementedError


def start(case: Mapping[str, Any]) -> Diagnosis:
    """*A start takes minutes. What is it doing?* `case["other"]` has the lines of a quicker start.

    A line is one of vLLM's log, with its process (`pid`), the processor seconds of that process so
    far (`cpu`) and of its children that have ended (`children`). The causes and the lines between
    which each passes are in `starts.PHASES`; `another-process` is one that only this start has.
    request: the pid in whose lines the cause passes. number: the cause's processor milliseconds.
    """
    raise NotImplementedError

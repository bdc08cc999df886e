"""Lab 08-02: a line of the log that cannot be true, and what a true one does not say.

The engine counts, per request and step that carried drafts: one *draft*, its *draft tokens*, and
how many of them were accepted. Steps without drafts count nowhere. Source:
`vllm/v1/spec_decode/metrics.py:18` `SpecDecodingStats`. How it counts and what it prints is given;
what can stand behind a printed line is yours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

NAMES = (
    "mean_acceptance_length", "accepted_throughput", "drafted_throughput", "accepted", "drafted",
    "per_position", "acceptance_rate",
)  # fmt: skip
"""Given. The numbers of a line, as `parse_spec_line` names them."""


def count_runs(runs: Sequence[tuple[int, int]], k: int) -> dict[str, Any]:
    """Given. The engine's counters after some runs.

    A trace: the runs (3, 3), (3, 0), (0, 0), (2, 1) with k = 3 are 3 drafts, 8 draft tokens, 4
    accepted, and by position [2, 1, 1].

    Args:
        runs: for each request and step: drafts it carried, and drafts accepted.
        k: the largest number of drafts, `num_speculative_tokens`.

    Returns:
        `num_drafts`, `num_draft_tokens`, `num_accepted_tokens`, and
        `num_accepted_tokens_per_pos`, a list of k: how often draft i was accepted.

    Raises:
        ValueError: a run accepts more than it carries, carries more than k, or a number below 0.
    """
    per_pos = [0] * k
    num_drafts = num_draft_tokens = 0
    for drafted, accepted in runs:
        if not 0 <= accepted <= drafted <= k:
            raise ValueError(f"run {(drafted, accepted)}: need 0 <= accepted <= drafted <= {k}")
        num_drafts += drafted > 0
        num_draft_tokens += drafted
        for position in range(accepted):
            per_pos[position] += 1
    return {
        "num_drafts": num_drafts,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": sum(per_pos),
        "num_accepted_tokens_per_pos": per_pos,
    }


def log_line(counters: dict[str, Any], seconds: float) -> str:
    """Given. The line the engine logs, from "SpecDecoding metrics:" to its end.

    A trace: the counters of `count_runs`, in 2 seconds, are `SpecDecoding metrics: Mean acceptance
    length: 2.33, Accepted throughput: 2.00 tokens/s, Drafted throughput: 4.00 tokens/s, Accepted: 4
    tokens, Drafted: 8 tokens, Per-position acceptance rate: 0.667, 0.333, 0.333, Avg Draft
    acceptance rate: 50.0%`.

    Args:
        counters: as `count_runs` gives them, with at least one draft.
        seconds: what they were counted in, above 0.
    """
    drafts, drafted = counters["num_drafts"], counters["num_draft_tokens"]
    accepted, per_pos = counters["num_accepted_tokens"], counters["num_accepted_tokens_per_pos"]
    rates = ", ".join(f"{count / drafts:.3f}" for count in per_pos)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}, "
        f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
        f"Drafted throughput: {drafted / seconds:.2f} tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
        f"Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {accepted / drafted * 100:.1f}%"
    )


def parse_spec_line(line: str) -> dict[str, Any]:
    """Given. The numbers in a line of the log, whatever stands before "SpecDecoding metrics:".

    Returns:
        `mean_acceptance_length`, `accepted_throughput` and `drafted_throughput` (tokens per
        second), `accepted` and `drafted` (ints), `per_position` (a list) and `acceptance_rate`
        (both as shares of 1).

    Raises:
        ValueError: the line is no such line, or not the whole of one.
    """
    number = r"(\d+\.\d+)"
    match = re.search(
        rf"SpecDecoding metrics: Mean acceptance length: {number}, "
        rf"Accepted throughput: {number} tokens/s, Drafted throughput: {number} tokens/s, "
        r"Accepted: (\d+) tokens, Drafted: (\d+) tokens, "
        rf"Per-position acceptance rate: {number}((?:, {number})*), "
        rf"Avg Draft acceptance rate: {number}%\s*$",
        line,
    )
    if match is None:
        raise ValueError(f"line={line!r}: not a whole line of SpecDecoding metrics")
    first, rest = match[6], match[7]
    return {
        "mean_acceptance_length": float(match[1]),
        "accepted_throughput": float(match[2]),
        "drafted_throughput": float(match[3]),
        "accepted": int(match[4]),
        "drafted": int(match[5]),
        "per_position": [float(rate) for rate in (first + rest).split(", ")],
        "acceptance_rate": float(match[9]) / 100,
    }


def reconcile(tpot_base: float, tpot_spec: float, length: float, k: int) -> dict[str, float]:
    """Given. What two measured times and a mean acceptance length say together.

    A trace, 18.2 and 9.6 ms, 2.8, k = 5: 1.896 times faster; a run took 26.88 ms, 1.477 steps; so
    the drafts cost .477 steps, .095 each.

    Args:
        tpot_base: time per token without drafts, above 0.
        tpot_spec: with them, in the same unit, above 0.
        length: tokens per run, in [1, k + 1].
        k: drafts per run, at least 1.

    Returns:
        `speedup`; `run`, the time of a run, in the unit of the times; `run_steps`, in steps
        without drafts; `extra_steps`, beyond one; `draft_cost`, of them per draft.

    Raises:
        ValueError: an argument is outside of what it may be.
    """
    if not (tpot_base > 0 and tpot_spec > 0):
        raise ValueError(f"tpot_base={tpot_base}, tpot_spec={tpot_spec}: must be above 0")
    if k < 1:
        raise ValueError(f"k={k}: must be at least 1")
    if not 1 <= length <= k + 1:
        raise ValueError(f"length={length}: a run gives 1 to {k + 1} tokens at k={k}")
    run = length * tpot_spec
    steps = run / tpot_base
    return {
        "speedup": tpot_base / tpot_spec,
        "run": run,
        "run_steps": steps,
        "extra_steps": steps - 1,
        "draft_cost": (steps - 1) / k,
    }


def possible_drafts(line: str, k: int, most: int = 1000, without: str = "") -> list[int]:
    """Every number of drafts that could stand behind a line, from 1 to `most`, ascending.

    A number is possible where some runs with so many drafts, each of 1 to k tokens, make the engine
    print these numbers, over some number of seconds. An empty list: no engine printed this line.

    A trace, k = 3: the line of `log_line` has 3 drafts behind it and nothing else. Its 2.33 alone
    could be 3, 6 or 9 of them, 4, 8 or 12 tokens accepted; the line says 4.

    Args:
        line: a line of the log.
        k: the largest number of draft tokens in a run.
        most: the largest number of drafts that is looked at.
        without: one of `NAMES` that is not believed, or "" to believe all.

    Raises:
        ValueError: the line is not a whole one, or has not k positions; `without` names nothing.
    """
    if without not in ("", *NAMES):
        raise ValueError(f"without={without!r}: need one of {', '.join(NAMES)}")
    said = parse_spec_line(line)
    if len(said["per_position"]) != k:
        raise ValueError(f"line has {len(said['per_position'])} positions: need k={k}")
    return [drafts for drafts in range(1, most + 1) if _is_possible(said, k, drafts, without)]


def _is_possible(said: dict[str, Any], k: int, drafts: int, without: str) -> bool:
    """Whether some counters with so many drafts print what was said."""
    about = (said["mean_acceptance_length"] - 1) * drafts
    low, high = (
        max(0, int(about - 0.006 * drafts)),
        min(k * drafts, int(about + 1 + 0.006 * drafts)),
    )
    if without != "accepted":
        low = high = said["accepted"]
    if without != "drafted" and not drafts <= said["drafted"] <= k * drafts:
        return False
    fits = [
        accepted
        for accepted in range(low, high + 1)
        if without == "mean_acceptance_length"
        or f"{1 + accepted / drafts:.2f}" == f"{said['mean_acceptance_length']:.2f}"
    ]
    if not fits:
        return False
    if without != "per_position":
        sums = _sums(said["per_position"], drafts)
        if sums is None:
            return False
        fits = [accepted for accepted in fits if sums[0] <= accepted <= sums[1]]
    one = range(said["drafted"], said["drafted"] + 1)
    drafted = range(drafts, k * drafts + 1) if without == "drafted" else one
    return any(
        accepted <= tokens and _rates_fit(said, accepted, tokens, without)
        for accepted in fits
        for tokens in drafted
    )


def _sums(rates: Sequence[float], drafts: int) -> tuple[int, int] | None:
    """Least and most accepted tokens with these rates by position; None where there are none."""
    fits = [
        [
            c
            for c in _around(rate * drafts)
            if 0 <= c <= drafts and f"{c / drafts:.3f}" == f"{rate:.3f}"
        ]
        for rate in rates
    ]
    if not all(fits):
        return None
    most, least, bound = 0, 0, drafts
    for counts in fits:  # a later draft is accepted in no more runs than an earlier one
        bound = min(bound, counts[-1])
        if bound < counts[0]:
            return None
        most += bound
    bound = 0
    for counts in reversed(fits):
        bound = max(bound, counts[0])
        least += bound
    return least, most


def _around(value: float) -> range:
    return range(int(value * 0.999) - 2, int(value * 1.001) + 3)


def _rates_fit(said: dict[str, Any], accepted: int, drafted: int, without: str) -> bool:
    """Whether rate and throughputs are those of so many tokens, in some number of seconds."""
    if without != "acceptance_rate":
        printed = f"{accepted / drafted * 100:.1f}"
        if printed != f"{said['acceptance_rate'] * 100:.1f}":
            return False
    if without in ("accepted_throughput", "drafted_throughput"):
        return True
    half = 0.005 + 1e-9
    one, other = said["accepted_throughput"], said["drafted_throughput"]
    return accepted * (other - half) <= drafted * (one + half) and drafted * (
        one - half
    ) <= accepted * (other + half)


def suspects(line: str, k: int, most: int = 1000) -> list[str]:
    """Which single numbers of a line can be the wrong one, in the order of `NAMES`.

    Each is such that without it the rest can be true. Empty where the line can be true as it
    stands, or where one wrong number does not explain it.

    A trace, k = 3: with 1.33 for the 2.33 of `log_line`'s line, mean_acceptance_length alone: 4
    accepted tokens with 1.33 are 12 drafts, and 8 draft tokens are not enough for them.

    Args:
        line, k, most: as for `possible_drafts`.
    """
    if possible_drafts(line, k, most):
        return []
    return [name for name in NAMES if possible_drafts(line, k, most, name)]


def idle_runs(line: str, k: int, output_tokens: int, most: int = 1000) -> list[int]:
    """How many runs carried no draft: every number that the line and the usage allow, ascending.

    The log does not say it. A run gives its accepted drafts and one token of its own.

    A trace: `log_line`'s line and 8 output tokens: one.

    Args:
        output_tokens: tokens that all runs gave together, from the usage of the answers.
        line, k, most: as for `possible_drafts`.
    """
    runs = output_tokens - int(parse_spec_line(line)["accepted"])
    return sorted(runs - drafts for drafts in possible_drafts(line, k, most) if runs >= drafts)

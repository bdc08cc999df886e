"""Poorer sources of a server's run, where its scheduler could not be recorded.

`vllm-flight-recorder`'s stat logger writes a line of counts for each step; vLLM itself, with
`--enable-logging-iteration-details`, a line of its log. Neither names a request while it runs.
Promises: what such a file cannot say is said with what it says; a line that is cut is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
REMEDY = "vllm serve ... --scheduler-cls vllm_flight_recorder.Recording writes it."
_ITERATION = re.compile(
    r"Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens, iteration elapsed time: ([\d.]+) ms"
)
"""`vllm/v1/engine/core.py:399` `EngineCore.log_iteration_details`."""
_LOOK = 1 << 20
"""Bytes of a file that are looked at to tell what it is."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What such a file says, and what it cannot."""

    says: tuple[str, ...]
    cannot: str

    @property
    def lines(self) -> list[str]:
        return [*self.says, self.cannot, REMEDY]


def read(path: Path) -> Counted | None:
    """What a file of one of the two kinds says; None for any other file.

    Raises:
        OSError: it cannot be read.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        begin = file.read(_LOOK)
    if begin.startswith(b'{"counts":'):
        return _of_counts(path)
    if _ITERATION.search(begin.decode("utf-8", "replace")):
        return _of_log(path)
    return None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                found = json.loads(line)
            except ValueError:
                continue  # cut
            if isinstance(found, dict):
                yield found


def _of_counts(path: Path) -> Counted:
    steps = out = prompt = preempted = ran = waited = 0
    ended: list[list[float]] = []
    first = last = None
    usage = 0.0
    for line in _lines(path):
        if "counts" in line:
            if line["counts"] != FORMAT:
                return Counted((), f"{path} has counts of format {line['counts']}, not {FORMAT}.")
            continue
        steps += 1
        first = line["t"] if first is None else first
        last = line["t"]
        ran, waited = max(ran, line.get("running", 0)), max(waited, line.get("waiting", 0))
        usage = max(usage, line.get("usage", 0.0))
        out, prompt = out + line.get("out", 0), prompt + line.get("prompt", 0)
        preempted += line.get("preempted", 0)
        ended += line.get("ended", [])
    queued = max((wait for _, _, wait in ended), default=0.0)
    return Counted(
        (
            f"{steps:,} steps counted by a stat logger in {(last or 0) - (first or 0):.1f} s: "
            f"{prompt:,} prompt and {out:,} output tokens, {preempted:,} preemptions",
            f"at most {ran} ran and {waited} waited, {usage:.0%} of the blocks were held; "
            f"{len(ended)} requests ended, the longest wait was {queued:.2f} s",
        ),
        "It names no request: which one waited, was preempted or missed the cache, what a step "
        "computed for whom, and which blocks were held, is not in it, so nothing can be replayed.",
    )


def _of_log(path: Path) -> Counted:
    steps = context = generation = 0
    elapsed, longest = 0.0, (0.0, "")
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if match := _ITERATION.search(line):
                _, _, tokens, _, decodes, ms = match.groups()
                steps, context, generation = (
                    steps + 1,
                    context + int(tokens),
                    generation + int(decodes),
                )
                elapsed += float(ms)
                longest = max(longest, (float(ms), f"{int(tokens):,} context tokens"))
    return Counted(
        (
            f"{steps:,} steps of the iteration log: {context:,} context and {generation:,} "
            f"generation tokens in {elapsed / 1e3:.1f} s of steps",
            f"the longest took {longest[0]:,.1f} ms, with {longest[1]}",
        ),
        "The log has no queue, no request, no block, no hit and no preemption, so nothing of these "
        "can be explained, and nothing can be replayed.",
    )

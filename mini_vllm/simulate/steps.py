"""Steps that were timed, from whatever timed them: what a cost is fitted on.

Promises: a source says which work each time belongs to, or it is not read; what a source does not
know (context lengths in a log line) is refused rather than taken as nothing.

`flight`: a recording of `vllm-flight-recorder`, whose lines have times; it does not know which part
of a step the host took. `models`: arms with `decode_ms` by batch and `prefill` by BATCHxLENGTH.
`forward`: what `vllm bench forward --output-json` writes (of vLLM 0.33.0). It times the
model alone, so a cost fitted on it lacks sampling and the host.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from mini_vllm.observe.flight import Flight, FlightError, pairs
from mini_vllm.simulate.cost import CostError, StepWork, padded_size

DECODE_CONTEXT = 48
"""Of a `models` file: its decodes go from 16 to 80 tokens behind a prompt of one, the middle."""


@dataclass(slots=True)
class TimedSteps:
    """What a source holds."""

    source: str
    steps: list[tuple[StepWork, float]] = field(default_factory=list)
    host: float = 0.0
    """Seconds between two steps, the median; 0 where the source cannot tell."""


def read_steps(path: Path, format_name: str | None = None, arm: str | None = None) -> TimedSteps:
    """The timed steps of a file.

    Args:
        path: a recording (file or folder), or a JSON file.
        format_name: one of `SOURCES`; None: told from the file.
        arm: of a `models` file.

    Raises:
        CostError: an unknown format, or a file that is not of it.
    """
    if format_name is not None and format_name not in SOURCES:
        raise CostError(f"format={format_name!r}: need one of {', '.join(SOURCES)}")
    try:
        format_name = format_name or _format_of(path)
        return SOURCES[format_name](path, arm)
    except FlightError as error:
        raise CostError(str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, CostError):
            raise
        raise CostError(f"{path}: not a {format_name} file ({error!r})") from None


def _format_of(path: Path) -> str:
    if path.suffix != ".json":
        return "flight"
    with path.open(encoding="utf-8") as file:
        return "forward" if file.read(64).lstrip().startswith("[") else "models"


def _flight(path: Path, arm: str | None) -> TimedSteps:
    """Each plan's work, and the time until the engine had its tokens and all before it."""
    flight = Flight(path)
    head = flight.head
    found = TimedSteps(f"vLLM {head['vllm']}, recorded")
    computed: dict[int, int] = {}
    begun: dict[int, tuple[float, StepWork]] = {}
    plan: list[tuple[int, int]] = []
    last_end, pauses = 0.0, []
    for line in flight:
        if "step" in line:
            plan = pairs(line["plan"]) if "plan" in line else plan
            for name in ("new", "resumed"):
                computed |= dict(pairs(line.get(name, ())))
            for number in line.get("preempted", ()):
                computed.pop(number, None)
            work = StepWork()
            for number, count in plan:
                work.add(count, computed.get(number, 0))
                computed[number] = computed.get(number, 0) + count
            work.padded = padded_size(work.tokens)
            work.drafts = sum(count for _, count in pairs(line.get("spec", ())))
            begun[line["step"]] = (line["t"][1], work)
        elif "out" in line and line["out"] in begun:
            submitted, work = begun.pop(line["out"])
            end = line["t"][0] if isinstance(line["t"], list) else line["t"]
            begin = max(submitted, last_end)
            if last_end and submitted > last_end:
                pauses.append(submitted - last_end)
            last_end = end
            if work.tokens and end > begin:
                found.steps.append((work, end - begin))
    found.host = median(pauses) if pauses else 0.0
    return found


def _models(path: Path, arm: str | None) -> TimedSteps:
    """Decode steps by batch and prefills by length of one arm."""
    whole: Any = json.loads(path.read_text(encoding="utf-8"))
    arms = whole["arms"]
    if arm not in arms:
        raise CostError(f"arm={arm!r}: {path} has {', '.join(arms)}")
    name = arms[arm]["config"]["architectures"][0]
    found = TimedSteps(f"{whole['device']}, vLLM {whole['vllm']}, {arm}, {name}")
    for batch, times in arms[arm]["decode_ms"].items():
        for each in times:
            work = StepWork()
            for _ in range(int(batch)):
                work.add(1, DECODE_CONTEXT)
            work.padded = padded_size(work.tokens)
            found.steps.append((work, each / 1e3))
    for shape, times in arms[arm]["prefill"].items():
        batch, length = map(int, shape.split("x"))
        for each in times:
            work = StepWork()
            for _ in range(batch):
                work.add(length, 0)
            work.padded = padded_size(work.tokens)
            found.steps.append((work, each))
    return found


def _forward(path: Path, arm: str | None) -> TimedSteps:
    """Cases of exact batches, each with its median of replays."""
    whole: Any = json.loads(path.read_text(encoding="utf-8"))
    found = TimedSteps("vllm bench forward")
    for case in whole:
        work = StepWork()
        for request in case["requests"]:
            work.add(request["query_len"], request["kv_len"] - request["query_len"])
            work.drafts += request["num_draft_tokens"]
        work.padded = work.tokens  # it captures each batch as it is
        found.steps.append((work, case["median_us"] / 1e6))
    return found


SOURCES: dict[str, Callable[[Path, str | None], TimedSteps]] = {
    "flight": _flight,
    "models": _models,
    "forward": _forward,
}

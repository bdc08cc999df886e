"""The bad days of a served engine, in the page: what was recorded, and what Python here says of it.

The rules are those of `course incident`. Promises: the document has no answer; a cause is judged,
and a knob turned, by `course.incidents.judge` when the reader asks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from course.incidents import judge
from course.site.play_pins import RUNTIME_BYTES
from course.site.widgets.scheduler_desk import MODEL_BYTES

FILES = ("server.log", "metrics.txt", "trace.jsonl.gz", "requests.jsonl")


def document() -> dict[str, Any]:
    """Each day's complaint, lines of its log, values of /metrics, and what may be answered."""
    return {
        "days": [_day(name) for name in judge.NAMES],
        "causes": judge.CAUSES,
        "bytes": RUNTIME_BYTES - MODEL_BYTES,
    }


def _day(name: str) -> dict[str, Any]:
    day = judge.load(name)
    config = day.case["config"]
    return {
        "name": name, "complaint": day.told.complaint, "subject": day.told.subject,
        "limit": judge.limit(day), "log": judge.stat_lines(day),
        "moments": [moment for moment, _ in day.moments],
        "metrics": [
            [metric, *(judge.value_of(values, metric) for _, values in day.moments)]
            for metric in judge.SHOWN
        ],
        "knobs": {knob: config[knob] for knob in judge.KNOBS if knob in config},
    }  # fmt: skip


def whole(name: str, file: str) -> str:
    """One of a day's files, the trace unpacked.

    Raises:
        ValueError: there is no such file.
    """
    if file not in FILES:
        raise ValueError(f"{file!r}: need one of {', '.join(FILES)}")
    day = judge.load(name)
    lines = {"server.log": day.log, "metrics.txt": day.metrics, "trace.jsonl.gz": day.lines}
    return "\n".join(lines.get(file) or day.sent.values())


def diagnose(name: str, cause: str) -> dict[str, Any] | None:
    """What contradicts a cause; None where nothing does."""
    found = judge.contradiction(judge.load(name), cause)
    return dataclasses.asdict(found) if found else None


def turn(name: str, knob: str, value: str) -> dict[str, Any]:
    """The counts before and after, and which limit is missed."""
    day = judge.load(name)
    before, after = judge.replay(day), judge.replay(day, knob, value)
    return {"before": before.counts, "after": after.counts, "missed": after.missed}

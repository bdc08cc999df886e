"""Since when, and until when: releases to ask about a bug of the museum.

Promises: a verdict is what the release's own code did, as lab 19-04 has it; a release that cannot
be asked is not offered. No upstream counterpart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.museum import EXHIBITS, INVARIANTS

_FILE = Path(__file__).parents[3] / (
    "phase-19-capstone-maintainer-and-startup/labs/lab-04-bisect/recordings/verdicts.json"
)


def known(asked: Mapping[int, bool], count: int, bad: int) -> dict[str, Any]:
    """What verdicts say of the stretch of bad releases around one that is known to be bad.

    Args:
        asked: verdicts by place, the oldest first; true: bad.
        count: how many releases there are.
        bad: the place that is known.

    Returns:
        `first` and `last`, the outermost bad places without a good one between them and `bad`;
        `below` and `above`, the nearest good ones, -1 and `count` where there is none; `done`,
        whether nothing between is left to ask.
    """
    below = max((at for at, verdict in asked.items() if not verdict and at < bad), default=-1)
    above = min((at for at, verdict in asked.items() if not verdict and at > bad), default=count)
    inside = [bad, *(at for at, verdict in asked.items() if verdict and below < at < above)]
    first, last = min(inside), max(inside)
    done = first == below + 1 and last == above - 1
    return {"first": first, "last": last, "below": below, "above": above, "done": done}


def document() -> dict[str, Any]:
    """Each bug that at least eight releases can be asked about, with their verdicts in order."""
    verdicts: dict[str, dict[str, bool]] = json.loads(_FILE.read_text(encoding="utf-8"))
    bugs = []
    for number, exhibit in EXHIBITS.items():
        said = verdicts[str(number)]
        if len(said) < 8 or exhibit.bad not in said:
            continue
        bugs.append({
            "number": number, "title": exhibit.title, "report": exhibit.report,
            "rule": exhibit.invariant, "cause": exhibit.cause, "known": exhibit.bad,
            "verdicts": list(said.items()),
        })  # fmt: skip
    return {"bugs": bugs, "rules": list(INVARIANTS)}

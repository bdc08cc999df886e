"""Our answers to `/v1/messages` and `/v1/responses` beside vLLM's recorded ones.

    python -m conformance.serving.compare_apis       # starts our server, sends the battery

As `compare.py`: compared are status, content type, and every field of every body and event. Of a
stream that is cut otherwise the deltas that follow one another are joined first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from conformance.serving.battery_apis import asks
from conformance.serving.compare import TRIES, differences, our_server, report
from conformance.serving.recorded import kept, send
from conformance.serving.recorded_apis import KEPT

_NO_OBJECT = "a body that is no object is the client's error here, a 500 there"

DOCUMENTED: dict[str, str] = {"responses with a list": _NO_OBJECT}
"""Requests that are answered otherwise, and why."""


def _delta(event: Any) -> tuple[str, Any] | None:
    """Where a delta belongs to, and what it adds; None of other events."""
    if not isinstance(event, dict) or "delta" not in (data := event["data"]):
        return None
    if event["event"] == "content_block_delta":
        return f"{data['index']} {data['delta']['type']}", data["delta"]
    if event["event"].endswith(".delta"):
        return f"{data['output_index']} {event['event']}", data
    return None


def _texts(told: dict[str, Any]) -> dict[str, Any]:
    return {name: told[name] for name in ("text", "partial_json", "delta") if name in told}


def cuts(events: Sequence[Any]) -> list[tuple[str, list[int]]]:
    """Where a stream is cut: of each delta the block, and the characters that it adds."""
    found = (_delta(event) for event in events)
    return [(where, [len(t) for t in _texts(told).values()]) for where, told in filter(None, found)]


def whole(events: Sequence[Any]) -> list[Any]:
    """A stream whose deltas of one block are in one, as a client that is very slow gets it."""
    joined: list[Any] = []
    for place, event in enumerate(json.loads(json.dumps(events))):
        if isinstance(event, dict) and "sequence_number" in event["data"]:
            event["data"]["sequence_number"] -= place  # 0 of a stream that is numbered
        here, last = _delta(event), _delta(joined[-1]) if joined else None
        if here is None or last is None or here[0] != last[0]:
            joined.append(event)
            continue
        for name, text in _texts(here[1]).items():
            last[1][name] += text
        if "logprobs" in here[1]:
            last[1]["logprobs"] += here[1]["logprobs"]
    return joined


def compare(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Where two answers differ, in words."""
    if "events" in theirs and "events" in ours and cuts(theirs["events"]) != cuts(ours["events"]):
        theirs = theirs | {"events": whole(theirs["events"])}
        ours = ours | {"events": whole(ours["events"])}
    return list(differences(theirs, ours))


def verdict(port: int, asked: Any, theirs: dict[str, Any]) -> list[str]:
    """Where our answer differs; a stream is asked for until it is cut as theirs."""
    found: list[str] = []
    for _ in range(TRIES):
        ours = json.loads(json.dumps(send(port, asked)))
        found = compare(theirs, ours)
        if not found or cuts(theirs.get("events", [])) == cuts(ours.get("events", [])):
            break
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; returns the exit status."""
    wanted, theirs = sys.argv[1:] if argv is None else argv, kept(KEPT)
    with our_server("--block-size", "128") as port:  # as vLLM has on a CPU
        return report(
            wanted, asks(), DOCUMENTED, lambda ask: verdict(port, ask, theirs[ask.name])
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())

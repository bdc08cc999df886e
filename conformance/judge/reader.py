"""Read the recordings of the real scheduler: one file, the standard library alone.

    from reader import workloads
    for workload in workloads("basic.jsonl.gz"):
        for step in workload["steps"]:
            print(step["add"], step["sampled_token_ids"], "->", step["decided"])

Copy this file wherever you need it. README.md beside it says what every key means.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVENTS = ("add", "abort")
INPUTS = ("sampled_token_ids", "draft_token_ids")


def workloads(path: str | Path) -> Iterator[dict[str, Any]]:
    """The workloads of a `.jsonl` or `.jsonl.gz` file.

    Returns:
        Per workload `seed`, `eos_token_id`, `config`, `upstream` and `steps`. A step has what the
        scheduler is given (`add`, `abort`, `sampled_token_ids`, with drafts `draft_token_ids`) and
        `decided`, what the real one decided.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a recording; the message has its number.
    """
    path = Path(path)
    unpack = gzip.open if path.suffix == ".gz" else open
    with unpack(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                yield {
                    **{key: entry[key] for key in ("seed", "eos_token_id", "config", "upstream")},
                    "steps": list(_steps(entry)),
                }
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number}: not a recording: {error}") from error


def _steps(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a recording, events and tokens put beside what was decided."""
    events: dict[int, dict[str, list[Any]]] = {}
    for event in entry["events"]:
        both = events.setdefault(event["step"], {"add": [], "abort": []})
        for key in EVENTS:
            both[key] += event.get(key, [])
    known: dict[str, int] = {}  # tokens per request: prompt and outputs
    said: dict[str, int] = {}
    for number, decided in enumerate(entry["steps"]):
        event = events.get(number, {"add": [], "abort": []})
        for add in event["add"]:
            known[add["request_id"]], said[add["request_id"]] = len(add["prompt_token_ids"]), 0
        if "sampled_token_ids" in decided:
            sampled = decided["sampled_token_ids"]
        else:  # one token for each row that has caught up with its request
            sampled = {}
            for request_id in decided["num_scheduled_tokens"]:
                if decided["num_computed_tokens"][request_id] == known[request_id]:
                    sampled[request_id] = [entry["outputs"][request_id][said[request_id]]]
                    known[request_id] += 1
                    said[request_id] += 1
        yield {
            "step": number,
            **event,
            "sampled_token_ids": sampled,
            **(
                {"draft_token_ids": decided["draft_token_ids"]}
                if "draft_token_ids" in decided
                else {}
            ),
            "decided": {key: value for key, value in decided.items() if key not in INPUTS},
        }

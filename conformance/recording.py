"""The recordings format: read with every line checked, write reproducibly.

One JSON object per line, plain or gzipped. `read` refuses, by file and line, what is truncated,
malformed or recorded from another version, so that `replay.py` may trust what it gets.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

UPSTREAM = {"version": "0.22.1", "commit": "0decac0"}

Recording = dict[str, Any]


class RecordingError(Exception):
    """A file is not a recording of the pinned version; the message names file and line."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_ints(value: object) -> bool:
    return isinstance(value, list) and all(_is_int(item) for item in value)


def _is_map(value: object, of: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(of(item) for item in value.values())


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


# What each key must hold: a description for the message, and the test.
_Shape = dict[str, tuple[str, Callable[[Any], bool]]]
_INT = ("an integer", _is_int)


def _at_least(bound: int) -> tuple[str, Callable[[Any], bool]]:
    return f"an integer of at least {bound}", lambda value: _is_int(value) and value >= bound


_BOOL = ("true or false", lambda value: isinstance(value, bool))
_IDS = ("a list of request ids", _is_ids)

_RECORDING: _Shape = {
    "upstream": ("an object", lambda value: isinstance(value, dict)),
    "seed": _INT,
    "eos_token_id": _INT,
    "config": ("an object", lambda value: isinstance(value, dict)),
    "events": ("a list of objects", _is_objects),
    "outputs": ("token ids by request id", lambda value: _is_map(value, _is_ints)),
    "steps": ("a list of objects", _is_objects),
}
_CONFIG: _Shape = {
    "num_blocks": _at_least(2),
    "block_size": _at_least(1),
    "max_num_seqs": _at_least(1),
    "max_num_batched_tokens": _at_least(1),
    "long_prefill_token_threshold": _at_least(0),
    "enable_prefix_caching": _BOOL,
    "enable_chunked_prefill": _BOOL,
    "max_model_len": _at_least(2),
    "policy": ("fcfs or priority", lambda value: value in ("fcfs", "priority")),
}
_EVENT: _Shape = {
    "step": _at_least(0),
    "add": ("a list of objects", _is_objects),
    "abort": _IDS,
}
_OPTIONAL = ("add", "abort")
_ADD: _Shape = {
    "request_id": ("a request id", lambda value: isinstance(value, str)),
    "prompt_token_ids": ("token ids, at least one", lambda value: _is_ints(value) and value),
    "max_tokens": _at_least(1),
    "priority": _INT,
    "arrival_time": ("a number", lambda value: _is_int(value) or isinstance(value, float)),
    "ignore_eos": _BOOL,
}
_STEP: _Shape = {
    "num_scheduled_tokens": ("counts by request id", lambda value: _is_map(value, _is_int)),
    "new": _IDS,
    "resumed": _IDS,
    "preempted": _IDS,
    "finished_before": _IDS,
    "running": _IDS,
    "waiting": _IDS,
    "block_ids": ("block ids by request id", lambda value: _is_map(value, _is_ints)),
    "num_computed_tokens": ("counts by request id", lambda value: _is_map(value, _is_int)),
    "free_blocks": _INT,
    "finished": _IDS,
    "finish_reasons": (
        "stop, length or abort by request id",
        lambda value: _is_map(value, lambda reason: reason in ("stop", "length", "abort")),
    ),
}


BEYOND = 3
"""What an asynchronous recorder samples in the step planned after a request's last token."""


def read(path: Path) -> Iterator[Recording]:
    """The recordings of a `.jsonl` or `.jsonl.gz` file, one per line, each checked.

    Raises:
        RecordingError: the file cannot be read, or a line is not a recording of the pin.
    """
    count = 0
    for number, line in _lines(path):
        try:
            recording = json.loads(line)
        except json.JSONDecodeError as error:
            message = f"{path}:{number}: not JSON: {error.msg}, column {error.colno}"
            raise RecordingError(message) from error
        problem = problem_of(recording)
        if problem:
            raise RecordingError(f"{path}:{number}: {problem}")
        count += 1
        yield recording
    if count == 0:
        raise RecordingError(f"{path}:1: the file holds no recording")


def write(path: Path, recordings: Iterable[Recording]) -> None:
    """Write recordings, gzipped when the name says so; equal recordings give equal bytes."""
    text = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in recordings)
    data = text.encode()
    path.write_bytes(gzip.compress(data, 9, mtime=0) if path.suffix == ".gz" else data)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank."""
    number = 0
    try:
        with path.open("rb") as raw:
            plain = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            for number, line in enumerate(io.TextIOWrapper(plain, encoding="utf-8"), start=1):
                if line.strip():
                    yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordingError(f"{path}:{number + 1}: truncated or damaged gzip: {error}") from error
    except UnicodeDecodeError as error:
        raise RecordingError(f"{path}:{number + 1}: not UTF-8 text") from error
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error.strerror or error}") from error


def problem_of(recording: object) -> str:
    """What is wrong with one parsed line, "" when nothing is."""
    if not isinstance(recording, dict):
        return "not a JSON object"
    upstream = recording.get("upstream")
    if isinstance(upstream, dict):
        version, commit = upstream.get("version"), str(upstream.get("commit"))
        if version != UPSTREAM["version"] or not commit.startswith(UPSTREAM["commit"]):
            return (
                f"recorded from vLLM {version} ({commit}); this replays "
                f"{UPSTREAM['version']} ({UPSTREAM['commit']}) only"
            )
    problem = _misshapen(recording, _RECORDING, "") or _misshapen(
        recording["config"], _CONFIG, "config."
    )
    for index, event in enumerate(recording["events"] if not problem else ()):
        where = f"events[{index}]."
        problem = problem or _misshapen(event, _EVENT, where)
        for position, add in enumerate(event.get("add", ()) if not problem else ()):
            problem = problem or _misshapen(add, _ADD, f"{where}add[{position}].")
    for index, step in enumerate(recording["steps"] if not problem else ()):
        problem = problem or _misshapen(step, _STEP, f"steps[{index}].")
    if problem:
        return problem
    num_steps = len(recording["steps"])
    for event in recording["events"]:
        if event.get("add") and event["step"] >= num_steps:
            return f"truncated: a request arrives at step {event['step']} of {num_steps}"
    return ""


def _misshapen(value: object, shape: _Shape, where: str) -> str:
    """The first key of `shape` that `value` lacks or fills wrongly."""
    if not isinstance(value, dict):
        return f"{where.rstrip('.')} is not an object"
    for key, (description, accepts) in shape.items():
        if key not in value:
            if key in _OPTIONAL:
                continue
            return f"{where}{key} is missing"
        if not accepts(value[key]):
            return f"{where}{key}={str(value[key])[:60]} is not {description}"
    return ""

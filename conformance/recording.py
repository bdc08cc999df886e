"""The recordings format: read with every line checked, write reproducibly.

One JSON object per line, plain or gzipped. `read` refuses, by file and line, what is truncated,
malformed, endless or recorded from another version, so that `replay.py` may trust what it gets.
Recordings of one feature have keys of their own; those that are known are checked where they occur.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

UPSTREAM = {"version": "0.22.1", "commit": "0decac0"}
MOST_LINE = 1 << 25
"""Characters of a line; those of the largest kept recordings have some 100,000."""
MOST_BLOCKS = 1 << 20
"""Each is a Python object in the engine under test."""

Recording = dict[str, Any]


class RecordingError(Exception):
    """A file is not a recording of the pinned version; the message names file and line."""


# Of what `json` gives, so types are exact: a bool is no int, and whole lists are asked at once.


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and (not value or set(map(type, value)) == {str})


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_ints(value: object) -> bool:
    return isinstance(value, list) and (not value or set(map(type, value)) == {int})


def _is_counts(value: object) -> bool:
    return isinstance(value, dict) and (not value or set(map(type, value.values())) == {int})


def _is_map(value: object, of: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(map(of, value.values()))


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {dict}


def _is_tables(value: object) -> bool:
    """Block tables: of one group the ids, of several a list per group."""
    return _is_ints(value) or (isinstance(value, list) and all(map(_is_ints, value)))


# What each key must hold: a description for the message, and the test.
_Shape = dict[str, tuple[str, Callable[[Any], bool]]]
_NOTHING: _Shape = {}
_INT = ("an integer", _is_int)
_ANY = ("anything", lambda value: True)


def _at_least(bound: int) -> tuple[str, Callable[[Any], bool]]:
    return f"an integer of at least {bound}", lambda value: _is_int(value) and value >= bound


def _between(least: int, most: int) -> tuple[str, Callable[[Any], bool]]:
    return (
        f"an integer of at least {least} and at most {most}",
        lambda value: _is_int(value) and least <= value <= most,
    )


def _or_null(shape: tuple[str, Callable[[Any], bool]]) -> tuple[str, Callable[[Any], bool]]:
    return f"{shape[0]} or null", lambda value: value is None or shape[1](value)


_BOOL = ("true or false", lambda value: isinstance(value, bool))
_IDS = ("a list of request ids", _is_ids)
_COUNTS = ("counts by request id", _is_counts)
_TOKENS = ("token ids by request id", lambda value: _is_map(value, _is_ints))
_OBJECT = ("an object", lambda value: isinstance(value, dict))
_OBJECTS = ("a list of objects", _is_objects)

_RECORDING: _Shape = {
    "upstream": _OBJECT,
    "seed": _INT,
    "eos_token_id": _INT,
    "config": _OBJECT,
    "events": _OBJECTS,
    "outputs": _TOKENS,
    "steps": _OBJECTS,
}
_CONFIG: _Shape = {
    "num_blocks": _between(2, MOST_BLOCKS),
    "block_size": _between(1, MOST_BLOCKS),
    "max_num_seqs": _at_least(1),
    "max_num_batched_tokens": _at_least(1),
    "long_prefill_token_threshold": _at_least(0),
    "enable_prefix_caching": _BOOL,
    "enable_chunked_prefill": _BOOL,
    "max_model_len": _at_least(2),
    "policy": ("fcfs or priority", lambda value: value in ("fcfs", "priority")),
}
_EVENT: _Shape = {"step": _at_least(0)}
_EVENT_OPTIONAL: _Shape = {"add": _OBJECTS, "abort": _IDS}
_REASONS = ("stop", "length", "abort", "error")
_ADD: _Shape = {
    "request_id": ("a request id", _is_text),
    "prompt_token_ids": ("token ids, at least one", lambda value: _is_ints(value) and value),
    "max_tokens": _at_least(1),
    "priority": _INT,
    "arrival_time": (
        "a finite number",
        lambda value: _is_int(value) or (isinstance(value, float) and math.isfinite(value)),
    ),
    "ignore_eos": _BOOL,
}
_STEP: _Shape = {
    "num_scheduled_tokens": _COUNTS,
    "new": _IDS,
    "resumed": _IDS,
    "preempted": _IDS,
    "finished_before": _IDS,
    "running": _IDS,
    "waiting": _IDS,
    "block_ids": ("block ids by request id", lambda value: _is_map(value, _is_tables)),
    "num_computed_tokens": _COUNTS,
    "free_blocks": _INT,
    "finished": _IDS,
    "finish_reasons": (
        "stop, length, abort or error by request id",
        lambda value: _is_map(value, lambda reason: reason in _REASONS),
    ),
}

# The same for the keys of one feature each, checked where they are present.
_CONFIG_OPTIONAL: _Shape = {
    "speculative": _OBJECT,
    "async_scheduling": _BOOL,
    "pipeline_parallel_size": _at_least(1),
    "max_loras": _at_least(0),
    "kv_groups": _OBJECTS,
    "encoder_compute_budget": _at_least(0),
    "encoder_cache_size": _at_least(0),
    "disable_chunked_mm_input": _BOOL,
}
_SPECULATIVE: _Shape = {
    "method": ("the name of a method", _is_text),
    "num_speculative_tokens": _at_least(1),
    "num_lookahead_tokens": _at_least(0),
    "use_eagle": _BOOL,
}
_KV_GROUP: _Shape = {
    "kind": (
        "full, sliding_window or mamba",
        lambda value: value in ("full", "sliding_window", "mamba"),
    ),
    "block_size": _between(1, MOST_BLOCKS),
}
_ADD_OPTIONAL: _Shape = {
    "lora": _at_least(0),
    "mm": _OBJECTS,
    "kv": _or_null(_OBJECT),
    "grammar": _or_null(_OBJECT),
}
_MM: _Shape = {"hash": _ANY, "offset": _at_least(0), "length": _at_least(1)}
_MM_OPTIONAL: _Shape = {"is_embed": ("a list of integers", _is_ints)}
_KV: _Shape = {
    "external_tokens": _at_least(0),
    "load_async": _BOOL,
    "known_at": _INT,
    "load_steps": _or_null(_at_least(0)),
    "send_steps": _or_null(_at_least(0)),
}
_GRAMMAR: _Shape = {"ready_at": _INT, "reject_at": _or_null(_at_least(0))}
_STEP_OPTIONAL: _Shape = {
    "scheduled_spec_decode_tokens": _TOKENS,
    "sampled_token_ids": _TOKENS,
    "spec_token_ids": _TOKENS,
    "draft_token_ids": _TOKENS,
    "num_output_placeholders": _COUNTS,
    "skipped_waiting": _IDS,
    "encoder_inputs": _TOKENS,
    "freed_encoder_hashes": ("a list", lambda value: isinstance(value, list)),
    "encoder_free": ("two integers", lambda value: _is_ints(value) and len(value) == 2),
    "finished_recving": _IDS,
    "finished_sending": _IDS,
    "skipped": ("a status by request id", lambda value: _is_map(value, _is_text)),
    "grammar_rows": _IDS,
}


BEYOND = 3
"""What an asynchronous recorder samples in the step planned after a request's last token."""


def read(
    path: Path,
    upstream: Mapping[str, str] | None = UPSTREAM,
    wanted: Callable[[int], bool] | None = None,
) -> Iterator[Recording]:
    """The recordings of a `.jsonl` or `.jsonl.gz` file, one per line, each checked.

    Args:
        path: the file.
        upstream: version and commit that every line must have been recorded from; None: any.
        wanted: of a line's number, from 1; the others are passed over unread. None: every line.

    Raises:
        RecordingError: the file cannot be read, or a line is not a recording of that release.
    """
    count, sound = 0, None
    for number, line in _lines(path):
        if wanted and not wanted(number):
            continue
        sound = _found_sound(path, upstream) if sound is None else sound
        try:
            recording = json.loads(line)
        except json.JSONDecodeError as error:
            message = f"{path}:{number}: not JSON: {error.msg}, column {error.colno}"
            raise RecordingError(message) from error
        except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
            raise RecordingError(f"{path}:{number}: not JSON: {error}") from error
        if number not in sound:
            if problem := problem_of(recording, upstream):
                raise RecordingError(f"{path}:{number}: {problem}")
            sound.add(number)
        count += 1
        yield recording
    if count == 0:
        raise RecordingError(f"{path}:1: the file holds no recording")


_SOUND: dict[tuple[object, ...], set[int]] = {}
"""Lines that this process has checked, by file as it was then, and by release."""


def _found_sound(path: Path, upstream: Mapping[str, str] | None) -> set[int]:
    """The numbers of the lines that need no second check: a lab's tests read a file many times."""
    now = path.stat()
    release = tuple(upstream.values()) if upstream is not None else None
    return _SOUND.setdefault((path, now.st_mtime_ns, now.st_size, release), set())


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, whatever they hold: nothing in them is checked.

    Raises:
        RecordingError: the file cannot be read, is empty, or a line is no JSON object.
    """
    found = [_object(path, number, line) for number, line in _lines(path)]
    if not found:
        raise RecordingError(f"{path}:1: the file holds no recording")
    return found


def first(path: Path) -> dict[str, Any]:
    """The first object of such a file; the rest is not read.

    Raises:
        RecordingError: as of `lines`, for that line.
    """
    for number, line in _lines(path):
        return _object(path, number, line)
    raise RecordingError(f"{path}:1: the file holds no recording")


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{path}:{number}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise RecordingError(f"{path}:{number}: not a JSON object")
    return entry


def count(path: Path) -> int:
    """How many lines that are not blank a file holds, without reading what they say.

    Raises:
        RecordingError: the file cannot be read.
    """
    return sum(1 for _ in _lines(path))


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
            text = io.TextIOWrapper(plain, encoding="utf-8")
            while line := text.readline(MOST_LINE + 1):
                number += 1
                if len(line) > MOST_LINE:
                    raise RecordingError(f"{path}:{number}: longer than {MOST_LINE} characters")
                if line.strip():
                    yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordingError(f"{path}:{number + 1}: truncated or damaged gzip: {error}") from error
    except UnicodeDecodeError as error:
        raise RecordingError(f"{path}:{number + 1}: not UTF-8 text") from error
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error.strerror or error}") from error


def problem_of(recording: object, upstream: Mapping[str, str] | None = UPSTREAM) -> str:
    """What is wrong with one parsed line, "" when nothing is."""
    if not isinstance(recording, dict):
        return "not a JSON object"
    made_from = recording.get("upstream")
    if isinstance(made_from, dict) and upstream is not None:
        version, commit = made_from.get("version"), str(made_from.get("commit"))
        if version != upstream["version"] or not commit.startswith(upstream["commit"]):
            return (
                f"recorded from vLLM {version} ({commit}); this replays "
                f"{upstream['version']} ({upstream['commit']}) only"
            )
    problem = next(_problems(recording), "")
    if problem:
        return problem
    num_steps = len(recording["steps"])
    for event in recording["events"]:
        if event.get("add") and event["step"] >= num_steps:
            return f"truncated: a request arrives at step {event['step']} of {num_steps}"
    return ""


def problem_of_workload(workload: object) -> str:
    """What is wrong with a workload that has no steps yet, "" when nothing is."""
    if not isinstance(workload, dict):
        return "not an object"
    config = workload.get("config")
    if isinstance(config, dict) and isinstance(config.get("speculative"), dict):
        read_back = {"num_lookahead_tokens": 0, "use_eagle": False}  # from the real scheduler
        config = {**config, "speculative": read_back | config["speculative"]}
    whole = {"upstream": {}, "outputs": {}, **workload, "config": config, "steps": []}
    return next(_problems(whole), "")


def _problems(recording: Recording) -> Iterator[str]:
    """Every check in turn, each only once those before it have found nothing."""
    yield from _misshapen(recording, "", _RECORDING)
    config = recording["config"]
    yield from _misshapen(config, "config.", _CONFIG, _CONFIG_OPTIONAL)
    if "speculative" in config:
        yield from _misshapen(config["speculative"], "config.speculative.", _SPECULATIVE)
    for index, group in enumerate(config.get("kv_groups", ())):
        where = f"config.kv_groups[{index}]."
        yield from _misshapen(group, where, _KV_GROUP)
        if "mode" in group and group["mode"] not in ("all", "align"):
            yield f"{where}mode={_short(group['mode'])} is not all or align"
        if group["kind"] == "sliding_window":
            yield from _misshapen(group, where, {"sliding_window": _at_least(1)})
    for index, event in enumerate(recording["events"]):
        yield from _misshapen(event, f"events[{index}].", _EVENT, _EVENT_OPTIONAL)
        for position, add in enumerate(event.get("add", ())):
            where = f"events[{index}].add[{position}]."
            yield from _misshapen(add, where, _ADD, _ADD_OPTIONAL)
            for item_position, item in enumerate(add.get("mm", ())):
                yield from _misshapen(item, f"{where}mm[{item_position}].", _MM, _MM_OPTIONAL)
            if add.get("kv") is not None:
                yield from _misshapen(add["kv"], f"{where}kv.", _KV)
            if add.get("grammar") is not None:
                yield from _misshapen(add["grammar"], f"{where}grammar.", _GRAMMAR)
    for index, step in enumerate(recording["steps"]):
        if not _fits(step, _STEP, _STEP_OPTIONAL):  # nearly every line of a file is a sound step
            yield from _misshapen(step, f"steps[{index}].", _STEP, _STEP_OPTIONAL)


def _misshapen(
    value: dict[str, Any], where: str, shape: _Shape, optional: _Shape = _NOTHING
) -> Iterator[str]:
    """Each key of `shape` that `value` lacks or fills wrongly, and of `optional` that it does."""
    for key, (description, accepts) in shape.items():
        if key not in value:
            yield f"{where}{key} is missing"
        elif not accepts(value[key]):
            yield f"{where}{key}={_short(value[key])} is not {description}"
    for key, (description, accepts) in optional.items():
        if key in value and not accepts(value[key]):
            yield f"{where}{key}={_short(value[key])} is not {description}"


def _fits(value: dict[str, Any], shape: _Shape, optional: _Shape) -> bool:
    """Whether `_misshapen` would find nothing; keys that neither shape names may hold anything."""
    if not shape.keys() <= value.keys():
        return False
    for key, held in value.items():
        known = shape.get(key) or optional.get(key)
        if known is not None and not known[1](held):
            return False
    return True


def _short(value: object) -> str:
    """The beginning of a value, as deep and as long as a line can show."""
    return value[:60] if isinstance(value, str) else reprlib.repr(value)

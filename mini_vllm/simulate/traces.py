"""Requests as traces give them: when each comes, how long it is, which blocks it shares.

Promises: a file is read line by line, in memory that does not grow with it; a line that cannot be
used is refused with its number and with what was wrong, or left out and counted; what a format does
not know, such as shared prefixes, is never invented.

| format | prefixes | where its files are |
|---|---|---|
| mooncake | `hash_ids` of 512 tokens each | kvcache-ai/Mooncake, `FAST25-release/traces` |
| azure | none | Azure/AzurePublicDataset, `AzureLLMInferenceTrace_*.csv` |
| burstgpt | none | HPMLL/BurstGPT, `BurstGPT_1.csv` |
| sharegpt | none; no arrivals either | a list of conversations, lengths of bytes |
| bench | none | `vllm bench serve --save-result --save-detailed` |
| flight | keyed hashes of the server's own blocks | `vllm-flight-recorder` |
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from mini_vllm.observe.flight import Flight, FlightError, hashes_of, pairs

MOST_TOKENS = 1 << 24
"""Of a prompt or an output; more is taken for a slip."""
MOST_SECONDS = 1e10
"""Of a time; beyond it the clock could not tell two steps apart."""
MOONCAKE_BLOCK = 512
Row = Mapping[str, Any]


class TraceError(ValueError):
    """A file is not a trace of its format, or a line of it cannot be used."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival: float
    """Seconds since the trace began."""
    prompt_len: int
    output_len: int
    hash_ids: tuple[int, ...] | None = None
    """One per `hash_block` prompt tokens, the last one perhaps of fewer; equal ids stand for equal
    prefixes up to there. None: the trace says nothing about prefixes."""
    hash_block: int = 0
    """Tokens of one of `hash_ids`."""
    priority: int = 0
    lora: int = 0
    """Number of its adapter, 0 for none."""


@dataclass(slots=True)
class Skipped:
    """Lines that were left out: how many, and the first few with their reason."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def note(self, reason: str) -> None:
        """Count one; the first three keep their reason."""
        self.count += 1
        if len(self.first) < 3:
            self.first.append(reason)


def read_trace(
    path: Path | str,
    format_name: str | None = None,
    *,
    limit: int | None = None,
    skipped: Skipped | None = None,
) -> Iterator[TraceRequest]:
    """The requests of a file, in order of arrival; the first one arrives at 0.

    Args:
        path: the file, also gzipped; a recording's folder.
        format_name: one of `FORMATS`; None: told from the first line.
        limit: at most this many.
        skipped: takes the lines that cannot be used; None: the first of them is an error.

    Raises:
        TraceError: an unknown format, no file, or a line that cannot be used. The message has its
            number.
    """
    path = Path(path)
    name = format_name or format_of(path)
    if name not in FORMATS:
        raise TraceError(f"format={name!r}: need one of {', '.join(FORMATS)}")
    began, before, count = math.nan, -math.inf, 0
    try:
        for where, make in FORMATS[name](path):
            if limit is not None and count >= limit:
                return
            try:
                request = make()
                _check(request, before)
            except (
                TraceError, KeyError, TypeError, AttributeError, ValueError, OverflowError,
                RecursionError,
            ) as error:  # fmt: skip
                reason = f"no {error}" if isinstance(error, KeyError) else str(error)
                said = f"{path}, {where}: {reason}"
                if skipped is None:
                    raise TraceError(said) from None
                skipped.note(said)
                continue
            before, count = request.arrival, count + 1
            began = before if count == 1 else began
            yield _at(request, before - began)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, FlightError) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def format_of(path: Path) -> str:
    """The format that a file looks like.

    Raises:
        TraceError: none of them.
    """
    if path.is_dir():
        return "flight"
    try:
        with _open(path, "surrogateescape") as file:
            first = file.readline(1 << 20)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    for mark, name in (
        ('"flight"', "flight"), ("hash_ids", "mooncake"), ("ContextTokens", "azure"),
        ("Request tokens", "burstgpt"), ("input_lens", "bench"), ("conversations", "sharegpt"),
    ):  # fmt: skip
        if mark in first:
            return name
    whole = _head(path)
    if "input_lens" in whole or "start_times" in whole:
        return "bench"
    if "conversations" in whole:
        return "sharegpt"
    raise TraceError(f"{path}: not one of {', '.join(FORMATS)}; name it with --format")


# ------------------------------------------------------------------ formats

Line = tuple[str, Callable[[], TraceRequest]]


def _mooncake(path: Path) -> Iterator[Line]:
    """`timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids`."""

    def make(text: str) -> TraceRequest:
        row = _object(text)
        prompt_len, ids = _count(row, "input_length"), row["hash_ids"]
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise TraceError(f"hash_ids={ids!r:.60}: need a list of integers")
        need = -(-prompt_len // MOONCAKE_BLOCK)
        if len(ids) != need:
            raise TraceError(
                f"hash_ids has {len(ids)} entries: input_length={prompt_len} has {need} blocks of "
                f"{MOONCAKE_BLOCK}"
            )
        return TraceRequest(
            _seconds(row, "timestamp") / 1e3, prompt_len, _count(row, "output_length"),
            tuple(ids), MOONCAKE_BLOCK,
        )  # fmt: skip

    yield from _each_line(path, make)


def _azure(path: Path) -> Iterator[Line]:
    """`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`."""

    def make(row: Row) -> TraceRequest:
        stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])  # of seven digits the last is cut
        at = stamp.replace(tzinfo=None) - datetime(2000, 1, 1)
        lengths = _count(row, "ContextTokens"), _count(row, "GeneratedTokens")
        return TraceRequest(at.total_seconds(), *lengths)

    yield from _each_row(path, make)


def _burstgpt(path: Path) -> Iterator[Line]:
    """`Timestamp` in seconds, `Request tokens`, `Response tokens`."""

    def make(row: Row) -> TraceRequest:
        lengths = _count(row, "Request tokens"), _count(row, "Response tokens")
        return TraceRequest(_seconds(row, "Timestamp"), *lengths)

    yield from _each_row(path, make)


def _sharegpt(path: Path) -> Iterator[Line]:
    """Each conversation's first question and answer; a token is counted per byte of UTF-8.

    As `vllm bench serve` does, a conversation with fewer than two turns is not a request. All
    arrive at once: what arrivals you want, `Arrivals` gives.
    """

    def make(entry: Any) -> TraceRequest:
        turns = entry["conversations"]
        if len(turns) < 2:
            raise TraceError(f"conversations has {len(turns)} turns: need at least 2")
        asked, said = (len(turn["value"].encode()) for turn in turns[:2])
        return TraceRequest(0.0, asked, said)

    for number, entry in enumerate(_document(path, list)):
        yield f"entry {number}", lambda entry=entry: make(entry)  # type: ignore[misc]


def _bench(path: Path) -> Iterator[Line]:
    """`input_lens`, `output_lens` and `start_times` of `vllm bench serve --save-detailed`."""
    row = _document(path, dict)
    columns = [row.get(name) for name in ("start_times", "input_lens", "output_lens")]
    if not all(isinstance(column, list) for column in columns):
        raise TraceError(
            f"{path}: no start_times, input_lens and output_lens: made without --save-detailed, or "
            "by a vLLM that does not write start_times"
        )
    if len({len(column) for column in columns if column is not None}) != 1:
        raise TraceError(f"{path}: start_times, input_lens and output_lens differ in length")
    places = sorted(
        zip(*columns, range(len(columns[0] or ())), strict=True),
        key=lambda place: place[0] if isinstance(place[0], int | float) else math.inf,
    )
    for at, prompt_len, output_len, number in places:
        fields = {"at": at, "input_lens": prompt_len, "output_lens": output_len}

        def make(fields: Row = fields) -> TraceRequest:
            lengths = _count(fields, "input_lens"), _count(fields, "output_lens")
            return TraceRequest(_seconds(fields, "at"), *lengths)

        yield f"request {number}", make


def _flight(path: Path) -> Iterator[Line]:
    """The requests of a recorded server, with as many outputs as it said."""
    flight = Flight(path)
    added: dict[int, dict[str, Any]] = {}
    said: dict[int, int] = {}
    counts: list[tuple[int, int]] = []
    try:
        block = flight.head["block_size"]
        for line in flight:
            if "add" in line:
                added[line["add"]], said[line["add"]] = line, 0
            elif "out" in line:
                counts = pairs(line["said"]) if "said" in line else counts
                for number, count in counts:
                    said[number] = said.get(number, 0) + count
    except (KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"{path}: not as the flight recorder writes it ({reason})") from None
    ids: dict[int, int] = {}

    def make(number: int, line: Row) -> TraceRequest:
        prompt = _count(line, "prompt")
        hashes = tuple(ids.setdefault(h, len(ids)) for h in hashes_of(line["hashes"]))
        # Hashes are of full blocks: the rest of a prompt has one of its own.
        if prompt % block:
            hashes = (*hashes, -1 - number)
        return TraceRequest(
            _seconds(line, "at"), prompt, max(1, said[number]), hashes, block,
            line["priority"], line.get("lora", 0),
        )  # fmt: skip

    for number, line in added.items():
        yield f"request {number}", lambda number=number, line=line: make(number, line)  # type: ignore[misc]


FORMATS: dict[str, Callable[[Path], Iterator[Line]]] = {
    "mooncake": _mooncake,
    "azure": _azure,
    "burstgpt": _burstgpt,
    "sharegpt": _sharegpt,
    "bench": _bench,
    "flight": _flight,
}


# ------------------------------------------------------------------ arrivals


def arriving_at(requests: Iterable[TraceRequest], rate: float, seed: int) -> Iterator[TraceRequest]:
    """The same requests as a Poisson process of `rate` requests per second.

    Raises:
        ValueError: a rate that is not above 0.
    """
    if not rate > 0 or not math.isfinite(rate):
        raise ValueError(f"rate={rate}: need requests per second, above 0")
    draw, at = random.Random(seed), 0.0
    for number, request in enumerate(requests):
        at += draw.expovariate(rate) if number else 0.0
        yield _at(request, at)


def faster(requests: Iterable[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    """The same requests, arriving `factor` times as fast.

    Raises:
        ValueError: a factor that is not above 0.
    """
    if not factor > 0 or not math.isfinite(factor):
        raise ValueError(f"speed={factor}: need a factor above 0")
    return (_at(request, request.arrival / factor) for request in requests)


def _at(request: TraceRequest, arrival: float) -> TraceRequest:
    return TraceRequest(
        arrival, request.prompt_len, request.output_len, request.hash_ids, request.hash_block,
        request.priority, request.lora,
    )  # fmt: skip


# ------------------------------------------------------------------ reading


def _open(path: Path, errors: str = "strict") -> TextIO:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding="utf-8", newline="", errors=errors)


def _head(path: Path) -> str:
    with _open(path, "surrogateescape") as file:
        return file.read(1 << 20)


def _each_line(path: Path, make: Callable[[str], TraceRequest]) -> Iterator[Line]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield f"line {number}", lambda text=text: make(text.decode())  # type: ignore[misc]


def _each_row(path: Path, make: Callable[[Row], TraceRequest]) -> Iterator[Line]:
    with _open(path, "surrogateescape") as file:  # no number of a row is read from such bytes
        reader = csv.DictReader(file)
        for row in reader:
            number = reader.line_num
            yield f"line {number}", lambda row=row: make(row)  # type: ignore[misc]


def _document(path: Path, kind: type) -> Any:
    with _open(path) as file:
        try:
            found = json.load(file)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, kind):
        raise TraceError(f"{path}: need a JSON {'list' if kind is list else 'object'}")
    return found


def _object(text: str) -> Row:
    row = json.loads(text)
    if not isinstance(row, dict):
        raise TraceError(f"{text.strip()[:40]!r}: need a JSON object")
    return row


def _count(row: Row, name: str) -> int:
    value = row[name]
    digits = isinstance(value, str) and value.isascii() and value.strip().isdecimal()
    number = int(value) if digits else value
    if type(number) is not int or not 1 <= number <= MOST_TOKENS:
        raise TraceError(f"{name}={value!r}: need a whole number from 1 to {MOST_TOKENS}")
    return number


def _seconds(row: Row, name: str) -> float:
    value = float(row[name])
    if not 0 <= value <= MOST_SECONDS * (1e3 if name == "timestamp" else 1):
        raise TraceError(f"{name}={row[name]!r:.40}: need a time of 0 to {MOST_SECONDS:g} seconds")
    return value


def _check(request: TraceRequest, before: float) -> None:
    if request.arrival < before:
        raise TraceError(f"arrives at {request.arrival} s, before the one above ({before} s)")

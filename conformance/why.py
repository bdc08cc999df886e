"""Say of a recorded request why it waited, was preempted, missed the cache or got so few tokens.

    python -m conformance.why FILE            each request in a line
    python -m conformance.why FILE REQUEST    one request, step by step
    python -m conformance.why FILE REQUEST --prefix OTHER

FILE is a recording of `vllm-flight-recorder` (a file or its folder) or one of this project. The
mini engine goes through it with the same requests and tokens. As long as it decides as the file
says, its reasons are the server's; at the first other decision the reasons end, and that is said.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance import flight, recording, replay
from mini_vllm.observe import counts
from mini_vllm.observe.flight import Flight, FlightError, hashes_of
from mini_vllm.observe.why import Log, Span, explain
from mini_vllm.plan import SchedulerOutput
from mini_vllm.scheduler import Scheduler

Seen = Callable[[Scheduler, SchedulerOutput], None]
"""Hears of each step once it is planned."""


class WhyError(ValueError):
    """There is nothing to explain: no such request, or a file that cannot be followed."""


@dataclass(slots=True)
class Explained:
    """A file that was followed to its end, or as far as it goes."""

    log: Log
    names: dict[str, str] = field(default_factory=dict)
    """Number in the log -> the id that the server gave it."""
    times: list[float] = field(default_factory=list)
    """Of a server's recording: seconds at which each step was planned, from its first line on."""
    hashes: dict[str, list[int]] = field(default_factory=dict)
    """Block hashes of each prompt; empty where the file has tokens."""
    tokens: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    """Tokens of each prompt."""
    adapters: dict[str, int] = field(default_factory=dict)
    """Numbers of those that have one."""
    pictures: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Hash, offset and length of each; a server's recording with pictures is not followed."""
    block_size: int = 0
    ends: str = ""
    """Why the reasons end before the file does; empty if they do not."""
    head: dict[str, Any] = field(default_factory=dict)
    """Of a server's recording: its first line. Of another: its configuration."""

    def number_of(self, request: str) -> str:
        """The log's number for a request, by number or by the server's id.

        Raises:
            WhyError: neither; the message lists a few that are there.
        """
        if request in self.names:
            return request
        found = [number for number, name in self.names.items() if name == request]
        if len(found) != 1:
            some = ", ".join(list(self.names)[:8])
            why = "no request has this id" if not found else f"{len(found)} requests have this id"
            raise WhyError(f"{request!r}: {why}; there are {len(self.names)}, such as {some}")
        return found[0]


def follow(path: Path, seed: int | None = None, seen: Seen | None = None) -> Explained:
    """Go through a file.

    Args:
        seed: which workload of a file with several; None: the only one.
        seen: is called after each `schedule()`; what it raises ends the way.

    Raises:
        WhyError: it cannot be read or followed.
    """
    try:
        no_flight = "" if path.is_dir() else _no_flight(path)
        if not no_flight:
            return _follow_flight(path, seen)
    except (FlightError, flight.NotReplayable) as error:
        raise WhyError(str(error)) from None
    try:
        return _follow_recording(path, seed, seen)
    except recording.RecordingError as error:
        raise WhyError(f"{no_flight}. Nor is it a recording of this project: {error}") from None
    except OSError as error:
        raise WhyError(f"{path}: {error.strerror or error}") from None


def _no_flight(path: Path) -> str:
    """Why a file is not one of a flight recorder; empty if it is."""
    try:
        Flight(path)
    except FlightError as error:
        return str(error)
    return ""


def _show(scheduler: Scheduler, seen: Seen | None) -> None:
    """Have a scheduler's steps seen, whoever calls it."""
    if seen is None:
        return
    decide, hears = scheduler.schedule, seen

    def schedule() -> SchedulerOutput:
        plan = decide()
        hears(scheduler, plan)
        return plan

    scheduler.schedule = schedule  # type: ignore[method-assign]


def _follow_flight(path: Path, seen: Seen | None) -> Explained:
    server = Flight(path)
    pilot = flight.Pilot(server.head, takes_groups=True)
    size = server.head["hash_block_size"] if pilot.num_groups else server.head["block_size"]
    found = Explained(explain(pilot.scheduler), block_size=size, head=server.head)
    _show(pilot.scheduler, seen)
    began: float | None = None
    for line in server:
        if "add" in line:
            number = str(line["add"])
            found.names[number] = str(line.get("id", number))
            found.hashes[number] = hashes_of(line["hashes"])
            found.prompts[number] = line["prompt"]
            found.adapters[number] = line.get("lora", 0)
        if "step" in line:
            began = line["t"][0] if began is None else began
            found.times.append(line["t"][0] - began)
        pilot.take(line)
        if (difference := pilot.result.difference) is not None:
            found.ends = (
                f"in step {difference.step} the server decided otherwise than mini_vllm "
                f"({difference.field}): what comes after is not explained"
            )
            break
    if server.is_cut and not found.ends:
        found.ends = "the file is cut here"
    return found


def _follow_recording(path: Path, seed: int | None, seen: Seen | None) -> Explained:
    entries = [
        entry for entry in recording.read(path, recording.UPSTREAM)
        if seed is None or entry["seed"] == seed
    ]  # fmt: skip
    if len(entries) != 1:
        raise WhyError(f"{path}: {len(entries)} workloads; name one with --seed")
    [entry] = entries
    config = replay.config_of(entry)
    driven = replay.Driven(entry, replay.mini_scheduler(config), replay.mini_request)
    size = getattr(driven.scheduler.kv, "alignment", config["block_size"])
    try:
        log = explain(driven.scheduler)
    except ValueError as error:
        raise WhyError(f"{path}: {error}") from None
    found = Explained(log, block_size=size, head=dict(config))
    _show(driven.scheduler, seen)
    events = replay.events_by_step(entry)
    for event in events.values():
        for add in event["add"]:
            found.names[add["request_id"]] = add["request_id"]
            found.tokens[add["request_id"]] = add["prompt_token_ids"]
            found.prompts[add["request_id"]] = len(add["prompt_token_ids"])
            found.adapters[add["request_id"]] = add.get("lora") or 0
            found.pictures[add["request_id"]] = add.get("mm") or []
    for index, recorded in enumerate(entry["steps"]):
        got = driven.step(
            events.get(index, {}), recorded.get("sampled_token_ids"),
            recorded.get("draft_token_ids"),
        )  # fmt: skip
        if got["num_scheduled_tokens"] != recorded["num_scheduled_tokens"]:
            found.ends = f"in step {index} the recording has another plan"
            break
    return found


# ------------------------------------------------------------------ sentences


def lines_of(found: Explained, request: str) -> list[str]:
    """One request, step by step."""
    number = found.number_of(request)
    spans = found.log.of(number)
    lines = [_line(found, span) for span in spans]
    if not lines:
        lines.append("never reached the scheduler in this file")
    if found.ends:
        lines.append(found.ends)
    return lines


def _line(found: Explained, span: Span) -> str:
    if not found.times:
        return str(span)
    at = found.times[min(span.first, len(found.times) - 1)]
    return f"{at:9.3f} s {span}"


def summary(found: Explained) -> list[str]:
    """Each request in a line: how many steps it waited and for what, preemptions, its cache."""
    lines = []
    for number, name in found.names.items():
        waited: dict[str, int] = {}
        preempted, cached = 0, ""
        for span in found.log.of(number):
            kind = span.kind.removeprefix("waits: ")
            if kind != span.kind:
                waited[kind] = waited.get(kind, 0) + span.last - span.first + 1
            preempted += span.kind == "preempted"
            if span.kind.startswith("cache") and not cached:
                cached = span.text.partition(":")[0]
        steps = ", ".join(f"{count} for {kind}" for kind, count in waited.items())
        total = sum(waited.values())
        many = "1 step" if total == 1 else f"{total} steps"
        said = [f"waits {many} ({steps})" if waited else "never waits"]
        if preempted:
            said.append("preempted once" if preempted == 1 else f"preempted {preempted} times")
        said += [cached] if cached else []
        shown = number if name == number else f"{number} ({name})"
        lines.append(f"{shown}: {', '.join(said)}")
    if found.ends:
        lines.append(found.ends)
    return lines


def prefix_lines(found: Explained, request: str, other: str) -> list[str]:
    """Where the prompts of two requests part, as the cache sees them: by a token or by a key.

    An adapter is part of every block's key, a salt of the first block's and so of every chain's
    (`vllm/v1/core/kv_cache_utils.py:524` `generate_block_hash_extra_keys`).
    """
    mine, theirs = found.number_of(request), found.number_of(other)
    adapters = found.adapters.get(mine, 0), found.adapters.get(theirs, 0)
    if adapters[0] != adapters[1]:
        of = [f"adapter {number}" if number else "the base model" for number in adapters]
        return [
            f"{request} is of {of[0]}, {other} of {of[1]}: the adapter is part of every block's "
            "key, so no block is shared"
        ]
    shared, lines = _by_token(found, mine, theirs) if found.tokens else _by_key(found, mine, theirs)
    most = (found.prompts[mine] - 1) // found.block_size
    if shared > most:
        lines.append(
            f"at most {most} of them can hit: the last of the {found.prompts[mine]} tokens of "
            f"{request} is always computed"
        )
    return lines


def _by_token(found: Explained, mine: str, theirs: str) -> tuple[int, list[str]]:
    """Blocks that are equal, and why no more; the file has the tokens."""
    size, pair = found.block_size, (found.tokens[mine], found.tokens[theirs])
    length = min(map(len, pair))
    equal = next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), length)
    pictures = found.pictures.get(mine, []), found.pictures.get(theirs, [])
    for one, another in itertools.zip_longest(*pictures):
        if one != another:
            at = min(each["offset"] for each in (one, another) if each)
            if at < equal:
                return at // size, [f"the picture at token {at} is the first that differs: "
                                    f"{at // size} blocks of {size} can be shared"]  # fmt: skip
            break
    can = f"{equal // size} blocks of {size} can be shared"
    if equal == length:
        return equal // size, [f"one prompt begins with the other: {equal} tokens are equal, {can}"]
    values = f"{pair[0][equal]} and {pair[1][equal]}"
    return equal // size, [f"token {equal} is the first that differs ({values}): {can}"]


def _by_key(found: Explained, mine: str, theirs: str) -> tuple[int, list[str]]:
    """The same by the hashes of blocks; the file has no tokens."""
    size, hashes = found.block_size, (found.hashes[mine], found.hashes[theirs])
    length = min(map(len, hashes))
    shared = next((i for i, (a, b) in enumerate(zip(*hashes, strict=False)) if a != b), length)
    lines = [f"the first {shared} blocks of {size} are equal"]
    if shared == length:
        lines.append("one of the prompts has no further full block")
    else:
        salt = "" if shared else ", or the cache_salt, which is part of the first block's key"
        lines.append(
            f"block {shared} differs: a token between {shared * size} and {(shared + 1) * size - 1}"
            f"{salt}. The adapters are the same. The file has no tokens, so it cannot say which"
        )
    return shared, lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.why", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("request", nargs="?", metavar="REQUEST", help="its id, or its number")
    parser.add_argument("--prefix", metavar="OTHER", help="the request it was expected to hit")
    parser.add_argument("--seed", type=int, help="of a file with several workloads")
    arguments = parser.parse_args(argv)
    return run(arguments.file, arguments.request, arguments.prefix, arguments.seed)


def run(file: Path, request: str | None, prefix: str | None, seed: int | None) -> int:
    """Print; the exit code."""
    try:
        if (poorer := counts.read(file)) is not None:
            print(*poorer.lines, sep="\n")
            return 0 if request is None else 2
        found = follow(file, seed)
        if request is None:
            lines = summary(found)
        elif prefix is None:
            lines = lines_of(found, request)
        else:
            lines = prefix_lines(found, request, prefix)
    except WhyError as error:
        print(error, file=sys.stderr)
        return 2
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

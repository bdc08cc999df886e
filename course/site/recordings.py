"""The page that opens a recording: a real server, step by step, and why each request got so much.

The files are those of `vllm-flight-recorder`, or a recording of this project with one workload.
What the page shows is what `course why` says: the mini engine goes the same way (`conformance.why`)
and its queues and plans are drawn as long as it decides as the file says. Promises: a file that is
too large for a page, no recording, or of an engine that is not followed is refused by name; one
that was cut is shown to its last whole line, and said to be cut.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import tempfile
import zlib
from pathlib import Path
from typing import Any

from conformance import why
from mini_vllm.observe.why import Span
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.scheduler import Scheduler

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "conformance" / "flight_sample" / "sample.0000.jsonl.gz"
"""`course engine run -m conformance.sample_server FOLDER` recorded it."""
MOST_BYTES = 8 << 20
"""Of all files together, as they are dropped."""
MOST_UNPACKED = 64 << 20
PIECE = 1 << 20
"""Bytes that are unpacked at once to see how many there are."""
MOST_STEPS = 5000
"""What Python in a page goes through in about half a minute."""
FACTS = (
    "vllm", "scheduler", "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens",
    "enable_prefix_caching", "max_model_len", "policy",
)  # fmt: skip

_last: why.Explained | None = None
"""What was opened last, for `prefix`."""


def sample() -> dict[str, Any]:
    """The recording that is shipped: 24 requests to a real server."""
    return _opened(SAMPLE, SAMPLE.name)


def open_files(files: list[list[str]]) -> dict[str, Any]:
    """Read what was dropped.

    Args:
        files: names with contents in base64: one file, or the segments of one recording.

    Returns:
        As `_opened`.

    Raises:
        ValueError: too large, no recording, or of an engine that is not followed; by name.
    """
    if not files:
        raise ValueError("files=[]: need the files of one recording")
    with tempfile.TemporaryDirectory() as folder:
        left, room = MOST_BYTES, MOST_UNPACKED
        for name, text in files:
            try:
                data = base64.b64decode(text, validate=True)
            except (binascii.Error, ValueError):
                raise ValueError(f"{name}: the page sent bytes that are not base64") from None
            left, room = left - len(data), room - _unpacked(name, data, room)
            if left < 0 or room < 0:
                raise ValueError(
                    f"{name}: a page opens at most {MOST_BYTES >> 20} MiB, "
                    f"{MOST_UNPACKED >> 20} MiB unpacked; course why reads any"
                )
            (Path(folder) / Path(name).name).write_bytes(data)
        path = Path(folder)
        names = [Path(name).name for name, _ in files]
        if len(files) == 1:
            path = path / names[0]
        try:
            return _opened(path, names[0] if len(files) == 1 else f"{len(files)} files")
        except ValueError as error:
            raise ValueError(
                str(error).replace(f"{folder}/", "").replace(folder, names[0])
            ) from None


def prefix(request: str, other: str) -> list[str]:
    """Where two prompts of what was opened last part: as `course why --prefix`.

    Raises:
        ValueError: nothing is open, or no such request.
    """
    if _last is None:
        raise ValueError("no recording is open: open the file again")
    return why.prefix_lines(_last, request, other)


def _unpacked(name: str, data: bytes, room: int) -> int:
    """Bytes of a file once unpacked, all its members, a piece at a time: of more than `room` at
    most a piece more. Of a file that was cut, what can be unpacked."""
    if not name.endswith(".gz"):
        return len(data)
    size = 0
    try:
        with gzip.open(io.BytesIO(data)) as file:
            while size <= room and (piece := file.read1(PIECE)):
                size += len(piece)
    except (EOFError, OSError, zlib.error) as error:
        if not size and not isinstance(error, EOFError):
            raise ValueError(f"{name}: not packed by gzip ({error})") from None
    return size


def _opened(path: Path, name: str) -> dict[str, Any]:
    """A recording as a page draws it.

    Returns:
        JSON types: `name`; `facts` of the configuration; `times` of the steps in seconds, empty
        where the file has none; `totals`, per step `tokens`, `running`, `waiting`, `free` blocks
        and `preempted`; `requests`, each with `id`, `name`, `prompt` and `max` tokens, `summary`,
        `cells` [first step, last step, kind, tokens, hits] and `why` [first step, line];
        `notice`, why it ends before the file does. Kinds are those of `course.site.gantt.KINDS`.

    Raises:
        ValueError: it cannot be followed, or has too many steps.
    """
    global _last
    seen = _Seen(name)
    found = why.follow(path, seen=seen)
    _last = found
    lines = why.summary(found)
    requests = [
        {
            "id": number, "name": name, **seen.asked.get(number, {"prompt": 0, "max": 0}),
            "summary": line.partition(": ")[2], "cells": seen.cells.get(number, []),
            "why": [[span.first, _said(span)] for span in found.log.of(number)],
        }
        for (number, name), line in zip(found.names.items(), lines, strict=False)
    ]  # fmt: skip
    return {
        "name": name, "facts": {n: found.head[n] for n in FACTS if n in found.head},
        "times": [round(t, 6) for t in found.times[: seen.steps]], "totals": seen.totals,
        "requests": requests, "notice": found.ends,
    }  # fmt: skip


def _said(span: Span) -> str:
    steps = f"step {span.first}" if span.first == span.last else f"{span.first}-{span.last}"
    return f"{steps}: {span.text}{' (at first)' if span.varies else ''}"


class _Seen:
    """Notes each step's queues and plan, with runs of equal cells as one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps = 0
        self.cells: dict[str, list[list[Any]]] = {}
        self.asked: dict[str, dict[str, int]] = {}
        self.totals: dict[str, list[int]] = {
            name: [] for name in ("tokens", "running", "waiting", "free", "preempted")
        }
        self._most_computed: dict[str, int] = {}

    def __call__(self, scheduler: Scheduler, plan: SchedulerOutput) -> None:
        if self.steps == MOST_STEPS:
            raise ValueError(
                f"{self.name}: more than {MOST_STEPS:,} steps, which a page does not go through; "
                "course why reads any"
            )
        waiting = [*scheduler.skipped, *scheduler.waiting]
        for request in scheduler.running:
            self._note(request, plan, True)
        for request in waiting:
            self._note(request, plan, False)
        for name, value in (
            ("tokens", sum(plan.num_scheduled_tokens.values())),
            ("running", len(scheduler.running)), ("waiting", len(waiting)),
            ("free", scheduler.kv.block_pool.get_num_free_blocks()),
            ("preempted", len(plan.preempted_req_ids)),
        ):  # fmt: skip
            self.totals[name].append(value)
        self.steps += 1

    def _note(self, request: Request, plan: SchedulerOutput, runs: bool) -> None:
        name = request.request_id
        tokens, hit = plan.num_scheduled_tokens.get(name, 0), plan.num_cached_tokens.get(name, 0)
        start = plan.num_computed_tokens.get(name, request.num_computed_tokens)
        most = self._most_computed.get(name, 0)
        if name in plan.preempted_req_ids:
            kind = "preempted"
        elif not tokens:
            kind = "starved" if runs else "waiting"
        elif start < most:
            kind = "recompute"
        elif hit:
            kind = "hit"
        elif start >= request.num_prompt_tokens:
            kind = "decode"
        else:
            kind = "prefill"
        if tokens:
            self._most_computed[name] = max(most, start + tokens)
        if name not in self.cells:
            self.cells[name] = []
            self.asked[name] = {
                "prompt": request.num_prompt_tokens, "max": request.sampling_params.max_tokens or 0,
            }  # fmt: skip
        cells = self.cells[name]
        if cells and cells[-1][1:] == [self.steps - 1, kind, tokens, hit]:
            cells[-1][1] = self.steps
        else:
            cells.append([self.steps, self.steps, kind, tokens, hit])

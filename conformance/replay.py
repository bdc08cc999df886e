"""Drive the mini engine through recordings of the real scheduler and compare every decision.

    python -m conformance.replay conformance/recordings/*.jsonl.gz
    python -m conformance.replay --block-pool path/to/solution.py:BlockPool FILE...

Prints the first difference with its context and ends with `N workloads, M steps: K differ`; exit
status 0 when K is 0, 1 when not, 2 for no recording of the pin. Labs call `first_difference`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance import recording
from conformance.features import Find, Replayed, holding
from conformance.known_releases import release_of
from conformance.words import context, show
from mini_vllm.block_pool import BlockPool
from mini_vllm.config import SamplingParams, SchedulerConfig
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.parts import EngineParts
from mini_vllm.plan import Gate
from mini_vllm.releases import parts_of
from mini_vllm.request import Request
from mini_vllm.scheduler import Scheduler

SCHEDULE_FIELDS = (
    "preempted", "num_scheduled_tokens", "new", "resumed", "finished_before", "running", "waiting",
    "block_ids", "num_computed_tokens", "free_blocks",
)  # fmt: skip
"""Compared between `schedule` and the update, in this order."""

UPDATE_FIELDS = ("finished", "finish_reasons")
"""Compared after the update."""

FEATURES: tuple[Replayed, ...] = tuple(module.FEATURE for module in holding("replaying").values())
"""What each feature adds to a replay of the recordings that have its keys."""

FEATURE_FIELDS = tuple(dict.fromkeys(name for feature in FEATURES for name in feature.fields))
"""Compared where a recording has them."""

FIELDS = SCHEDULE_FIELDS + FEATURE_FIELDS + UPDATE_FIELDS

GATES = {"lora": "adapter_gate", "structured_output": "wait_gate"}
"""The parts of rooms that are gates, by feature."""

Build = Callable[[Mapping[str, Any]], Scheduler]
MakeRequest = Callable[[Mapping[str, Any], int], Request]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first field of the first step in which an engine left the recording."""

    seed: int
    step: int
    field: str
    expected: Any
    got: Any
    context: str
    """Configuration, events of the step and the recorded state before it, one per line."""
    path: str = ""

    def __str__(self) -> str:
        where = f" of {self.path}" if self.path else ""
        return (
            f"seed {self.seed}{where}, step {self.step}, {self.field}\n"
            f"  expected  {show(self.expected)}\n"
            f"  got       {show(self.got)}\n"
            f"{self.context}"
        )


@dataclass(frozen=True, slots=True)
class Result:
    """What a replay of some files found: counts, and one difference per workload that differs."""

    num_workloads: int
    num_steps: int
    differences: tuple[Difference, ...]

    def by_field(self) -> dict[str, list[Difference]]:
        """The differences by the field that differs first, the most frequent field first."""
        found: dict[str, list[Difference]] = {}
        for difference in self.differences:
            found.setdefault(difference.field, []).append(difference)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def __str__(self) -> str:
        lines = [
            f"  first in {field}: {len(of)} workloads, such as seed {of[0].seed}"
            for field, of in self.by_field().items()
        ]
        counted = f"{self.num_workloads} workloads, {self.num_steps} steps"
        lines.append(f"{counted}: {len(self.differences)} differ")
        return "\n".join(lines if len(self.differences) > 1 else lines[-1:])


def find_part(module: str, name: str) -> Any:
    """A class of `mini_vllm`, by the module that holds it."""
    return getattr(importlib.import_module(f"mini_vllm.{module}"), name)


def config_of(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """A workload's configuration, with what features read off its requests."""
    config = entry["config"]
    for feature in FEATURES:
        config = {**config, **feature.asked(entry)}
    return config


def mini_scheduler(
    config: Mapping[str, Any],
    scheduler: Callable[..., Scheduler] = Scheduler,
    kv_cache_manager: Callable[..., KVCacheManager] = KVCacheManager,
    block_pool: Callable[[int, bool], BlockPool] = BlockPool,
    gates: Mapping[str, Callable[..., Gate]] | None = None,
    find: Find = find_part,
) -> Scheduler:
    """A scheduler for a recording's `config`; any part may be a learner's class.

    `functools.partial(mini_scheduler, block_pool=lab.BlockPool)` is a `build` for the functions
    below; a scheduler whose constructor differs needs a function of its own. `gates` are by the
    names of features, in place of theirs. `find` gives every class that no argument names.
    """
    for feature in FEATURES:
        if feature.is_on(config):
            kv_cache_manager = feature.manager(config, kv_cache_manager, find)
    kv = kv_cache_manager(
        config["num_blocks"],
        config["block_size"],
        config["enable_prefix_caching"],
        block_pool=block_pool,
    )
    is_theirs = scheduler is find("scheduler", "Scheduler")
    opened: list[Gate] = []
    knobs = dict(config)
    for feature in FEATURES:
        if not feature.is_on(config):
            continue
        knobs |= feature.knobs(config)
        opened += feature.gates(kv, find)
        if feature.scheduler and is_theirs:
            scheduler = find(*feature.scheduler)
        if feature.gate:
            make = (gates or {}).get(feature.name) or find(*feature.gate)
            opened.append(feature.build_gate(make, config, find))
    names = {field.name for field in dataclasses.fields(SchedulerConfig)}
    made = SchedulerConfig(**{k: v for k, v in knobs.items() if k in names})
    return scheduler(kv, made, opened) if opened else scheduler(kv, made)


def mini_request(
    add: Mapping[str, Any],
    eos_token_id: int,
    request: Callable[..., Request] = Request,
    find: Find = find_part,
) -> Request:
    """The mini request, or a learner's, for one entry of `events[...].add`."""
    for feature in FEATURES:
        request = feature.request(add, request, find)
    return request(
        add["request_id"],
        add["prompt_token_ids"],
        SamplingParams(max_tokens=add["max_tokens"], ignore_eos=add["ignore_eos"]),
        eos_token_id=eos_token_id,
        arrival_time=add["arrival_time"],
        priority=add["priority"],
    )


def builders(release: str | EngineParts) -> tuple[Build, MakeRequest]:
    """`build` and `make_request` for `conformance.replay`, from a release's parts or from any."""
    parts = parts_of(release) if isinstance(release, str) else release

    def build(config: Mapping[str, Any], **named: Any) -> Scheduler:
        is_async = bool(config.get("async_scheduling"))
        gates = {
            room: gate for room, name in GATES.items() if (gate := parts.of_room(room, name, 0))
        }
        mine = {
            "scheduler": parts.async_scheduler if is_async else parts.scheduler,
            "kv_cache_manager": parts.kv_cache_manager,
            "block_pool": parts.block_pool,
            **({"gates": gates} if gates else {}),
        }
        return mini_scheduler(config, **{**mine, **named})

    return build, functools.partial(mini_request, request=parts.request)


def replay(
    entry: recording.Recording,
    build: Build = mini_scheduler,
    make_request: MakeRequest = mini_request,
    fields: Sequence[str] = FIELDS,
) -> tuple[int, Difference | None]:
    """Replay one workload up to its first difference.

    The mini counter moves in `update_from_output`, the real one in `schedule`: the step's tokens
    are added before `num_computed_tokens` is compared. A recording may leave a running request out
    of `block_ids` and `num_computed_tokens` where the step did not schedule it.

    Args:
        entry: one recording, as `recording.read` gives it.
        build: makes the scheduler under test from the recording's configuration.
        make_request: makes a request from an arrival and the EOS id.
        fields: which of `FIELDS` to compare.

    Returns:
        How many steps were compared, and the first difference or None.
    """
    events = events_by_step(entry)
    driven: Driven | None = None
    for index, expected in enumerate(entry["steps"]):
        event = events.get(index, {})
        try:
            driven = driven or Driven(entry, build(config_of(entry)), make_request)
            told = expected.get("sampled_token_ids"), expected.get("draft_token_ids")
            got = driven.step(event, *told)
        except Exception as error:  # whatever a learner's part raises is a difference, not a crash
            at = ("exception", "none", f"{type(error).__name__}: {error}")
        else:
            compared = [f for f in fields if f in expected or f not in FEATURE_FIELDS]
            first = next((f for f in compared if not _agree(f, expected, got)), None)
            if first is None:
                continue
            at = (first, expected[first], got[first])
        return index + 1, Difference(entry["seed"], index, *at, context(entry, index, event))
    return len(entry["steps"]), None


def replay_files(
    paths: Iterable[Path | str],
    build: Build = mini_scheduler,
    make_request: MakeRequest = mini_request,
    fields: Sequence[str] = FIELDS,
    select: Callable[[recording.Recording], bool] | None = None,
    stop_at_first: bool = False,
    upstream: Mapping[str, str] | None = recording.UPSTREAM,
) -> Result:
    """Replay every workload of some files.

    Args:
        paths: `.jsonl` or `.jsonl.gz` files.
        build, make_request, fields: as for `replay`.
        select: replay only recordings for which this is true (by seed, by configuration, ...).
        stop_at_first: return as soon as one workload differs.
        upstream: the release that the files must have been recorded from; None: any.

    Raises:
        RecordingError: a file is not a recording of the pinned version.
    """
    num_workloads, num_steps = 0, 0
    differences: list[Difference] = []
    for path in map(Path, paths):
        for entry in recording.read(path, upstream):
            if select and not select(entry):
                continue
            steps, difference = replay(entry, build, make_request, fields)
            num_workloads, num_steps = num_workloads + 1, num_steps + steps
            if difference:
                differences.append(replace(difference, path=str(path)))
                if stop_at_first:
                    return Result(num_workloads, num_steps, tuple(differences))
    return Result(num_workloads, num_steps, tuple(differences))


def first_difference(
    paths: Path | str | Iterable[Path | str],
    build: Build = mini_scheduler,
    make_request: MakeRequest = mini_request,
    fields: Sequence[str] = FIELDS,
    select: Callable[[recording.Recording], bool] | None = None,
    upstream: Mapping[str, str] | None = recording.UPSTREAM,
) -> Difference | None:
    """The first difference in one or more files, or None; what a lab's test asserts on."""
    if isinstance(paths, (str, Path)):
        paths = [paths]
    result = replay_files(paths, build, make_request, fields, select, True, upstream)
    return result.differences[0] if result.differences else None


def run(
    workload: Mapping[str, Any],
    build: Build = mini_scheduler,
    make_request: MakeRequest = mini_request,
    max_steps: int = 2000,
) -> recording.Recording:
    """Run a workload on its own and note it as a recording: what would differ is then visible.

    Raises:
        RuntimeError: it did not end within `max_steps`.
    """
    driven = Driven(workload, build(config_of(workload)), make_request)
    events = events_by_step(workload)
    steps: list[dict[str, Any]] = []
    while driven.is_busy() or len(steps) <= max(events):
        if len(steps) == max_steps:
            raise RuntimeError(f"seed {workload['seed']}: not finished after {max_steps} steps")
        steps.append(driven.step(events.get(len(steps), {})))
    return {"upstream": recording.UPSTREAM, **workload, "steps": steps}


# ---------------------------------------------------------------------- one step


def events_by_step(entry: Mapping[str, Any]) -> dict[int, dict[str, list[Any]]]:
    """Arrivals and aborts of each step; a file may give several events for one."""
    merged: dict[int, dict[str, list[Any]]] = {}
    for event in entry["events"]:
        both = merged.setdefault(event["step"], {"add": [], "abort": []})
        both["add"] += event.get("add", ())
        both["abort"] += event.get("abort", ())
    return merged


class Driven:
    """A scheduler under test on the way through one workload."""

    def __init__(
        self, entry: Mapping[str, Any], scheduler: Scheduler, make_request: MakeRequest
    ) -> None:
        self.entry, self.scheduler, self.make_request = entry, scheduler, make_request
        self.requests: dict[str, Request] = {}
        config = entry["config"]
        self.depth = max([1, *(each.depth(config) for each in FEATURES)])
        self.fills_up = any(each.fills_up and each.is_on(config) for each in FEATURES)
        self.in_flight: deque[tuple[Any, dict[str, list[int]]]] = deque()
        self.num_sampled: dict[str, int] = {}
        self.num_steps = 0

    def is_busy(self) -> bool:
        """Whether anything is unfinished or, with a queue, in flight."""
        waits = any(plan.num_scheduled_tokens for plan, _ in self.in_flight)
        waits = waits or any(feature.is_busy(self.scheduler) for feature in FEATURES)
        return self.scheduler.has_unfinished_requests() or waits

    def step(
        self,
        event: Mapping[str, Any],
        recorded: Mapping[str, list[int]] | None = None,
        drafts: Mapping[str, list[int]] | None = None,
    ) -> dict[str, Any]:
        """Apply the events, run one step with the scripted tokens, note what a recording notes.

        With a queue the update is that of an earlier step. Tokens are those `recorded`,
        for the rows that sample here; without a record, those of the script. After the update the
        scheduler is given the `drafts` that were recorded, if any.
        """
        scheduler, reasons = self.scheduler, self._apply(event)
        for feature in FEATURES:
            feature.begin(self.requests, self.num_steps)
        self.num_steps += 1
        before = {k: v for each in FEATURES for k, v in each.before(scheduler).items()}
        plan = scheduler.schedule()
        got = {**self._observe(plan), **before}
        for feature in FEATURES:
            got |= feature.observe(scheduler, plan)
        sampled = got["sampled_token_ids"] = self._sample(plan, recorded)
        self.in_flight.append((plan, sampled))
        full = len(self.in_flight) == self.depth
        finished: list[Request] = []
        if full or not (self.fills_up or plan.num_scheduled_tokens):
            oldest, tokens = self.in_flight.popleft()
            for feature in FEATURES:
                feature.executed(scheduler, oldest, tokens)
            finished = scheduler.update_from_output(oldest, tokens)
            for feature in FEATURES:
                finished = [*finished, *(feature.updated(scheduler, oldest) or ())]
        if drafts and plan.num_scheduled_tokens:
            scheduler.update_draft_token_ids(drafts)
        got["finished"] = sorted(request.request_id for request in finished)
        for request in finished:
            reasons[request.request_id] = str(request.finish_reason)
        got["finish_reasons"] = reasons
        return got

    def _apply(self, event: Mapping[str, Any]) -> dict[str, str]:
        reasons: dict[str, str] = {}
        for add in event.get("add", ()):
            self.requests[add["request_id"]] = self.make_request(add, self.entry["eos_token_id"])
            self.scheduler.add_request(self.requests[add["request_id"]])
        for request_id in event.get("abort", ()):
            aborted = self.scheduler.abort_request(request_id)
            if aborted is not None:
                reasons[request_id] = str(aborted.finish_reason)
        return reasons

    def _observe(self, plan: Any) -> dict[str, Any]:
        """The state between `schedule` and the update, with the real engine's counters."""
        scheduler, scheduled = self.scheduler, plan.num_scheduled_tokens
        ahead = {} if self.depth > 1 else scheduled  # tokens of the plan not in the counter yet
        get_block_ids = scheduler.kv.get_block_ids
        loaded = [r for r in getattr(scheduler, "skipped", ()) if r.num_computed_tokens]
        return {
            "num_scheduled_tokens": dict(scheduled),
            "new": list(plan.scheduled_new_req_ids),
            "resumed": sorted(plan.scheduled_resumed_req_ids),
            "preempted": sorted(plan.preempted_req_ids),
            "finished_before": sorted(plan.finished_req_ids),
            "running": [request.request_id for request in scheduler.running],
            "waiting": [request.request_id for request in scheduler.waiting],
            "block_ids": {r: list(ids) for r in self.requests if (ids := get_block_ids(r))},
            "num_computed_tokens": {
                r.request_id: r.num_computed_tokens + ahead.get(r.request_id, 0)
                for r in (*scheduler.running, *loaded)
            },
            "free_blocks": scheduler.kv.block_pool.get_num_free_blocks(),
        }

    def _sample(self, plan: Any, recorded: Mapping[str, list[int]] | None) -> dict[str, list[int]]:
        """The tokens of every row that samples, in scheduling order."""
        sampled: dict[str, list[int]] = {}
        for request_id, num_scheduled in plan.num_scheduled_tokens.items():
            request = self.requests[request_id]
            if self.depth > 1:
                samples = request_id in plan.sampling_req_ids
                position = self.num_sampled.get(request_id, 0)
            else:
                samples = request.num_computed_tokens + num_scheduled >= request.num_tokens
                position = request.num_output_tokens
            if not samples:
                continue
            script = self.entry["outputs"].get(request_id, [])
            if recorded is not None:
                sampled[request_id] = list(recorded.get(request_id, []))
            elif position < len(script):
                sampled[request_id] = [script[position]]
            elif self.depth > 1:  # one step too many: ignored, so any token will do
                sampled[request_id] = [recording.BEYOND]
            self.num_sampled[request_id] = position + 1
        return sampled


def _agree(field: str, expected: Mapping[str, Any], got: Mapping[str, Any]) -> bool:
    """Whether one field of a step is as recorded, within the format's freedom."""
    want, have = expected[field], got[field]
    if field in ("num_scheduled_tokens", "skipped"):
        return list(want.items()) == list(have.items())  # the order is part of the decision
    if want == have:
        return True
    if field in ("block_ids", "num_computed_tokens"):
        optional = set(got["running"]) - set(got["num_scheduled_tokens"])
        empty: Any = [] if field == "block_ids" else 0
        return all(have.get(key, empty) == value for key, value in want.items()) and all(
            key in want or key in optional for key in have
        )
    if field == "finish_reasons":  # an abort may be noted here or in the events alone
        return all(have.get(key) == value for key, value in want.items()) and all(
            key in want or reason == "abort" for key, reason in have.items()
        )
    return False


# ---------------------------------------------------------------------- command


def load_part(spec: str) -> Any:
    """The object named by `module:Name` or `path/to/file.py:Name`."""
    source, _, name = spec.rpartition(":")
    if not source:
        raise argparse.ArgumentTypeError(f"{spec!r}: need module:Name or path/to/file.py:Name")
    try:
        if source.endswith(".py"):
            module_spec = importlib.util.spec_from_file_location(Path(source).stem, source)
            assert module_spec and module_spec.loader
            module = importlib.util.module_from_spec(module_spec)
            sys.modules[module_spec.name] = module
            module_spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
        return getattr(module, name)
    except (ImportError, OSError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{spec!r}: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.replay",
        description="Replay recordings of the real v0.22.1 scheduler and compare every decision.",
        epilog="With --release recordings are of a later release, and so are parts not named.",
    )
    part: dict[str, Any] = {"type": load_part, "metavar": "MODULE:NAME"}
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=".jsonl or .jsonl.gz")
    parser.add_argument("--scheduler", help="scheduler class to test", **part)
    parser.add_argument("--kv-cache-manager", help="its manager", **part)
    parser.add_argument("--block-pool", help="its pool", **part)
    parser.add_argument(
        "--release", metavar="VERSION", help="its parts, on its kept recordings or on FILEs"
    )
    parser.add_argument("--seed", type=int, help="replay only this workload")
    parser.add_argument("--all", action="store_true", help="show one difference per workload")
    arguments = parser.parse_args(argv)
    build: Build = mini_scheduler
    make_request: MakeRequest = mini_request
    files: list[Path] = arguments.files
    upstream: Mapping[str, str] | None = recording.UPSTREAM
    if arguments.release:
        try:
            release = release_of(arguments.release)
        except ValueError as error:
            parser.error(str(error))
        upstream = None if files else release.upstream  # another release's, on these parts
        files = files or [release.path]
        build, make_request = builders(release.version)
    names = ("scheduler", "kv_cache_manager", "block_pool")
    named = {name: mine for name in names if (mine := getattr(arguments, name))}
    build = functools.partial(build, **named)
    if not files:
        parser.error("name at least one FILE, or a release with --release")
    select = None if arguments.seed is None else lambda entry: entry["seed"] == arguments.seed
    try:
        result = replay_files(files, build, make_request, select=select, upstream=upstream)
    except recording.RecordingError as error:
        print(error, file=sys.stderr)
        return 2
    print(*result.differences[: None if arguments.all else 1], result, sep="\n")
    return 1 if result.differences else 0


if __name__ == "__main__":
    raise SystemExit(main())

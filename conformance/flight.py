"""Drive the mini engine through a recording of a real server, and compare every decision.

    python -m conformance.flight FILE

`vllm-flight-recorder` writes the file. What came in (requests, tokens said, aborts) is given to the
mini scheduler at the same place; what vLLM decided is compared: the plan in its order, who is new,
resumed or preempted and how much of it was cached, every block table, the free blocks, the queues,
who ended and why. Tokens are not in the file: hashes of blocks are, and stand for them.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance import recording, releases
from conformance.features.hybrid.replaying import kv_specs_of
from conformance.replay import MakeRequest, mini_request, mini_scheduler
from mini_vllm.kv.coordinator import HybridKVCacheManager
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.observe import counts
from mini_vllm.observe.flight import Flight, FlightError, Line, hashes_of, pairs
from mini_vllm.releases import parts_of
from mini_vllm.request import Request
from mini_vllm.scheduler import Scheduler

SAID, ENDS = 0, 1
"""The tokens of a replay: one that says nothing, and EOS."""
ASYNC, SYNC = "AsyncScheduler", "Scheduler"


class NotReplayable(ValueError):
    """The recorded engine uses what the mini engine does not decide; the message names it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that is another one."""

    step: int
    field: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.field}\n  expected  {self.expected}\n  got       {self.got}"
        )


@dataclass(slots=True)
class Replayed:
    """What a replay found."""

    num_requests: int = 0
    num_steps: int = 0
    difference: Difference | None = None
    is_cut: bool = False

    def __str__(self) -> str:
        cut = ", cut behind its last whole line" if self.is_cut else ""
        said = f"{self.num_requests} requests, {self.num_steps} steps{cut}: "
        return said + ("0 differ" if self.difference is None else "differs")


def hashed_as_told(
    base: type[KVCacheManager], hashes: Mapping[str, list[int]]
) -> Callable[..., KVCacheManager]:
    """A manager whose block hashes are those of the recording, not those of tokens."""

    class Told(base):  # type: ignore[misc, valid-type]
        def _extend_hashes(self, request: Request) -> None:
            have, num_full = len(request.block_hashes), request.num_tokens // self.block_size
            request.block_hashes += hashes[request.request_id][have:num_full]

    return Told


KINDS = {"FullAttentionSpec": "full", "SlidingWindowSpec": "sliding_window"}
"""Kinds of cache groups that are replayed, in the words of `conformance.recording`. States are not:
the file does not hold their mode."""


def config_of(head: Mapping[str, Any], takes_groups: bool = False) -> dict[str, Any]:
    """The configuration of a recording, with the keys of `conformance.recording`.

    Args:
        takes_groups: whether several groups, and windows, are taken.

    Raises:
        NotReplayable: the engine used what the mini engine does not decide.
    """
    groups = head["groups"]
    kinds = [group["kind"] for group in groups]
    if kinds != ["FullAttentionSpec"] and not (takes_groups and set(kinds) <= set(KINDS)):
        need = f"groups of {' and '.join(KINDS)}" if takes_groups else "one of full attention"
        raise NotReplayable(f"groups of {', '.join(kinds)}: need {need}")
    for name in ("connector", "encoder"):
        if name in head:
            raise NotReplayable(
                f"{name}={head[name]}: need a recording of an engine without {name}"
            )
    if head["scheduler"] not in (ASYNC, SYNC):
        raise NotReplayable(f"scheduler={head['scheduler']}: need vLLM's {SYNC} or {ASYNC}")
    knobs = head["knobs"]
    config = {name: head[name] for name in (
        "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens",
        "enable_prefix_caching", "max_model_len", "policy",
    )}  # fmt: skip
    if kinds != ["FullAttentionSpec"]:
        for name in ("speculative", "max_loras"):
            if name in head:
                raise NotReplayable(f"{name} with several cache groups: not compared with vLLM")
        config["kv_groups"] = [{**group, "kind": KINDS[group["kind"]]} for group in groups]
    config["long_prefill_token_threshold"] = knobs.get("long_prefill_token_threshold", 0)
    config["enable_chunked_prefill"] = knobs.get("enable_chunked_prefill", True)
    if head["scheduler"] == ASYNC:
        config["async_scheduling"] = True
    if "speculative" in head:
        config["speculative"] = head["speculative"]
    if "max_loras" in head:
        config["max_loras"] = head["max_loras"]
    if knobs.get("scheduler_reserve_full_isl", True) is not True:
        raise NotReplayable("scheduler_reserve_full_isl=False: need True")
    return config


class Pilot:
    """The mini scheduler on the way through one recording."""

    def __init__(self, head: Mapping[str, Any], takes_groups: bool = False) -> None:
        """Args: head is the recording's first line; takes_groups as `config_of`."""
        self.hashes: dict[str, list[int]] = {}
        version = str(head["vllm"]).split("+")[0]
        self.is_pin = version == recording.UPSTREAM["version"]
        for name in ("speculative", "max_loras"):
            if name in head and not self.is_pin:
                raise NotReplayable(
                    f"vLLM {version} with {name}: need {recording.UPSTREAM['version']}, or "
                    "requests without it"
                )
        build, self.make_request, manager = _parts(version)
        config = {**config_of(head, takes_groups), "grammars": True}
        self.num_groups = len(config.get("kv_groups", ()))
        """0 where there is one of full attention: tables are then one list of ids."""
        if self.num_groups:
            if not self.is_pin:
                raise NotReplayable(
                    f"vLLM {version} with several cache groups: need "
                    f"{recording.UPSTREAM['version']}"
                )
            manager = HybridKVCacheManager
        told: Callable[..., KVCacheManager] = hashed_as_told(manager, self.hashes)
        if self.num_groups:
            told = functools.partial(told, kv_specs=kv_specs_of(config))
        self.scheduler: Scheduler = build(config, kv_cache_manager=told)
        self.requests: dict[int, Request] = {}
        self.tables: dict[int, list[Any]] = {}
        self.started: set[str] = set()
        self.plans: dict[int, Any] = {}
        self.queues: dict[str, list[int]] = {
            name: [0] for name in ("running", "waiting", "skipped")
        }
        self.plan: list[tuple[int, int]] = []
        self.said: list[tuple[int, int]] = []
        """Of the last line that had them: what is as before is not written again."""
        self.result = Replayed()

    def take(self, line: Line) -> None:
        """Apply one line, or compare it; `result.difference` says whether it agreed."""
        for kind in ("add", "step", "out", "drafts", "end", "reset"):
            if kind in line:
                getattr(self, f"_{kind}")(line)

    def _add(self, line: Line) -> None:
        number = line["add"]
        request_id = str(number)
        add = {
            "request_id": request_id, "prompt_token_ids": [SAID] * line["prompt"],
            "max_tokens": line["max"], "ignore_eos": False, "arrival_time": line["at"],
            "priority": line["priority"], "lora": line.get("lora", 0),
        }  # fmt: skip
        if line.get("grammar"):
            if not self.is_pin:
                raise NotReplayable(
                    f"request {number} has a grammar: need vLLM {recording.UPSTREAM['version']}"
                )
            add["grammar"] = {"ready_at": sys.maxsize, "reject_at": None}
        self.hashes[request_id] = hashes_of(line["hashes"])
        request = self.make_request(add, ENDS)
        self.requests[number] = request
        self.scheduler.add_request(request)
        self.result.num_requests += 1

    def _end(self, line: Line) -> None:
        for number in line["end"]:
            self.scheduler.abort_request(str(number))
            self._forget(number)

    def _reset(self, line: Line) -> None:
        if line["running"]:
            raise NotReplayable(
                "reset_prefix_cache(reset_running_requests=True): need a recording without it"
            )
        self._compare("reset", line["reset"], self.scheduler.kv.reset_prefix_cache())

    def _step(self, line: Line) -> None:
        for number in line.get("ready", ()):
            self.requests[number].constraint.ready_at = 0  # type: ignore[attr-defined]
        plan = self.scheduler.schedule()
        self.plans[line["step"]] = plan
        self.result.num_steps += 1
        for number in line.get("preempted", ()):
            self.tables.pop(number, None)
        fresh = {number for name in ("new", "resumed") for number, _ in pairs(line.get(name, ()))}
        for number, ids in pairs(line.get("blocks", ())):
            before = [] if number in fresh else self.tables.get(number, [])
            self.tables[number] = self._joined(before, ids)
        for name in self.queues:
            self.queues[name] = line.get(name, self.queues[name])
        planned = self.plan = pairs(line["plan"]) if "plan" in line else self.plan
        # The second model runner gets a resumed request as if it were new.
        listed = [*plan.scheduled_new_req_ids, *plan.scheduled_resumed_req_ids]
        new = [r for r in listed if r not in self.started]
        resumed = [r for r in listed if r in self.started]
        self.started.update(new)
        for name, expected, got in (
            ("preempted", line.get("preempted", []), sorted(map(int, plan.preempted_req_ids))),
            ("plan", planned, [(int(r), n) for r, n in plan.num_scheduled_tokens.items()]),
            ("new", line.get("new", []), _cached(new, plan)),
            ("resumed", sorted(pairs(line.get("resumed", []))),
             sorted(pairs(_cached(resumed, plan)))),
            ("blocks", *self._tables([n for n, _ in planned])),
            ("spec", line.get("spec", []),
             [x for r, ids in plan.spec_token_ids.items() if ids for x in (int(r), len(ids))]),
            ("free", line["free"], self.scheduler.kv.block_pool.get_num_free_blocks()),
            ("running", self.queues["running"], _queue(self.scheduler.running)),
            ("waiting", self.queues["waiting"], _queue(self.scheduler.waiting)),
            ("skipped", self.queues["skipped"], _queue(self.scheduler.skipped)),
        ):  # fmt: skip
            self._compare(name, expected, got)

    def _joined(self, before: list[Any], ids: list[Any]) -> list[Any]:
        """A table with more blocks behind it; of several groups, each with its own."""
        if self.num_groups < 2:
            return before + ids
        return [a + b for a, b in zip(before or [[]] * self.num_groups, ids, strict=True)]

    def _tables(self, numbers: Sequence[int]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Recorded and own tables of these requests. A window's blocks behind it are 0 in both: the
        file has them as they were taken, and `free` says that they were given back."""
        recorded, own = {}, {}
        kv = self.scheduler.kv
        for n in numbers:
            own[n] = [
                list(kv.get_block_ids(str(n), group)) for group in range(max(1, self.num_groups))
            ]
            tables = self.tables.get(n, [])
            tables = tables if self.num_groups > 1 and tables else [tables] * len(own[n])
            recorded[n] = [
                [theirs if ours or not self.num_groups else 0
                 for theirs, ours in zip(table, mine, strict=True)]
                if len(table) == len(mine) else table
                for table, mine in zip(tables, own[n], strict=True)
            ]  # fmt: skip
        if self.num_groups < 2:
            return {n: t[0] for n, t in recorded.items()}, {n: t[0] for n, t in own.items()}
        return recorded, own

    def _out(self, line: Line) -> None:
        plan = self.plans.pop(line["out"], None)
        ended = dict(pairs(line.get("ended", ())))
        kept = dict(pairs(line.get("kept", ())))
        said: dict[str, list[int]] = {}
        self.said = pairs(line["said"]) if "said" in line else self.said
        for number, count in self.said:
            tokens = [SAID] * count
            request = self.requests.get(number)
            stop = kept.get(number, count) - 1
            if ended.get(number) == "stop" and stop >= 0:
                tokens[stop] = ENDS
            if ended.get(number) == "error" and request is not None:
                request.constraint.reject_at = request.num_output_tokens + stop  # type: ignore[attr-defined]
            said[str(number)] = tokens
        for number, text in pairs(line.get("hashes", ())):
            self.hashes[str(number)] += hashes_of(text)
        if plan is None:
            raise NotReplayable(
                f"the file has an update of step {line['out']} and not the step itself"
            )
        finished = self.scheduler.update_from_output(plan, said)
        got = {int(r.request_id): str(r.finish_reason) for r in finished}
        self._compare("ended", ended, got)
        for number in ended:
            self._forget(number)

    def _drafts(self, line: Line) -> None:
        held = {str(number): [SAID] * count for number, count in pairs(line["drafts"])}
        self.scheduler.update_draft_token_ids(held)

    def _forget(self, number: int) -> None:
        self.hashes.pop(str(number), None)
        self.tables.pop(number, None)
        self.requests.pop(number, None)
        self.started.discard(str(number))

    def _compare(self, name: str, expected: Any, got: Any) -> None:
        if self.result.difference is None and expected != got:
            step = self.result.num_steps - 1
            self.result.difference = Difference(step, name, expected, got)


def replay(path: Path | str) -> Replayed:
    """Replay one recording up to its first difference.

    Raises:
        FlightError: it cannot be read.
        NotReplayable: the engine used what the mini engine does not decide.
    """
    flight = Flight(path)
    pilot = Pilot(flight.head, takes_groups=True)
    for line in flight:
        pilot.take(line)
        if pilot.result.difference is not None:
            break
    pilot.result.is_cut = flight.is_cut
    return pilot.result


def _parts(
    version: str,
) -> tuple[Callable[..., Scheduler], MakeRequest, type[KVCacheManager]]:
    """What makes scheduler and requests as a release does. Raises NotReplayable."""
    if version == recording.UPSTREAM["version"]:
        return mini_scheduler, mini_request, KVCacheManager
    try:
        parts = parts_of(version)
    except ValueError as error:
        raise NotReplayable(f"vLLM {version}: {error}") from None
    manager: Any = parts.kv_cache_manager
    return (*releases.builders(parts), manager)


def _cached(ids: Sequence[str], plan: Any) -> list[int]:
    """Each of these requests with the tokens of it that the prefix cache had."""
    return [x for r in ids for x in (int(r), plan.num_cached_tokens.get(r, 0))]


def _queue(requests: Iterator[Request] | Sequence[Request] | Any) -> list[int]:
    """A queue as a line has it: its length, and its first places."""
    ids = [int(request.request_id) for request in requests]
    return [len(ids), *ids[:64]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.flight", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="a segment, or a folder of them")
    arguments = parser.parse_args(argv)
    try:
        if (poorer := counts.read(arguments.file)) is not None:
            print(*poorer.lines, sep="\n", file=sys.stderr)
            return 2
        result = replay(arguments.file)
    except (FlightError, NotReplayable) as error:
        print(error, file=sys.stderr)
        return 2
    print(*([result.difference] if result.difference else []), result, sep="\n")
    return 1 if result.difference else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The same trace under many settings, on all processors; what was done is kept.

Promises: equal tables whatever the number of workers; a sweep that was stopped goes on where it
stopped, and does nothing twice; a setting that is refused is a row that says why.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any

from mini_vllm.config import EngineConfig
from mini_vllm.plan import SchedulerOutput
from mini_vllm.releases import PIN
from mini_vllm.simulate.cost import LinearCost, StepWork
from mini_vllm.simulate.report import Slo, bench_json
from mini_vllm.simulate.simulator import Drafts, Simulator
from mini_vllm.simulate.traces import Skipped, arriving_at, faster, read_trace

LOADS = ("rate", "speed", "concurrency")
CLOSED = ("turnaround", "ramp")
"""Of a closed loop."""
OTHERS = ("release", "max_loras", "num_speculative_tokens", "acceptance", *LOADS, *CLOSED)
"""Settings beside the engine's knobs."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated: everything but the settings that a sweep varies."""

    trace: Path
    cost: LinearCost
    format_name: str | None = None
    limit: int | None = None
    skip: bool = False
    seed: int = 0
    """Of arrivals at a rate, and of accepted drafts."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of `EngineConfig`, and `OTHERS`."""


@dataclass(slots=True)
class Row:
    """One setting of a sweep."""

    setting: dict[str, Any]
    report: dict[str, Any] = field(default_factory=dict)
    """As `bench_json`; empty if it was refused."""
    error: str = ""
    first_difference: int | None = None
    """The first step that this setting decides otherwise than the first one; None: there is none.
    """


class Digests:
    """An observer: 8 bytes per step, equal where the plans are."""

    def __init__(self) -> None:
        self.values: array[int] = array("Q")

    def __call__(self, begin: float, end: float, plan: SchedulerOutput, work: StepWork) -> None:
        """Note one step: who, how much, whose blocks, who lost them."""
        text = json.dumps([[*plan.num_scheduled_tokens.items()], plan.preempted_req_ids])
        self.values.append(int.from_bytes(blake2b(text.encode(), digest_size=8).digest()))


def build(setup: Setup) -> tuple[Simulator, dict[str, Any]]:
    """The server that `setup` describes, and the settings of its load.

    Raises:
        ValueError: a setting that does not exist, or is out of range.
    """
    settings = dict(setup.settings)
    other = {name: settings.pop(name) for name in OTHERS if name in settings}
    drafts = None
    if (k := other.get("num_speculative_tokens")) is not None:
        if "acceptance" not in other:
            raise ValueError(
                "num_speculative_tokens: need acceptance too, the share of drafts accepted, such "
                "as acceptance=0.7"
            )
        drafts = Drafts(k, other["acceptance"], setup.seed)
    elif "acceptance" in other:
        raise ValueError("acceptance: needs num_speculative_tokens")
    if len(loads := [name for name in LOADS if name in other]) > 1:
        raise ValueError(f"{' with '.join(loads)}: each sets the load; need one of them")
    closed = [name for name in CLOSED if name in other]
    if closed and "concurrency" not in other:
        raise ValueError(f"{closed[0]}: needs concurrency")
    simulator = Simulator(
        EngineConfig.of(settings), setup.cost, release=str(other.get("release", PIN)),
        drafts=drafts, max_loras=other.get("max_loras"),
    )  # fmt: skip
    return simulator, {name: other[name] for name in [*loads, *closed]}


def simulate(
    setup: Setup, on_end: Callable[[int], None] | None = None,
    observers: Sequence[Callable[[float, float, SchedulerOutput, StepWork], None]] = (),
) -> Any:  # fmt: skip
    """One simulation, a `Simulated`.

    Raises:
        ValueError: of a setting, a request or a step that is refused.
    """
    simulator, load = build(setup)
    simulator.observers += observers
    skipped = Skipped() if setup.skip else None
    trace = read_trace(setup.trace, setup.format_name, limit=setup.limit, skipped=skipped)
    if "rate" in load:
        trace = arriving_at(trace, load["rate"], setup.seed)
    if "speed" in load:
        trace = faster(trace, load["speed"])
    concurrency = load.get("concurrency")
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise ValueError(f"concurrency={concurrency!r}: need at least 1")
    closed = {name: load[name] for name in CLOSED if name in load}
    result = simulator.run(trace, concurrency=concurrency, on_end=on_end, skip=setup.skip, **closed)
    if skipped is not None:
        result.skipped.count += skipped.count
        result.skipped.first = (skipped.first + result.skipped.first)[:3]
    return result


def grid(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination, the last axis fastest."""
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def sweep(
    setup: Setup, axes: Mapping[str, Sequence[Any]], slo: Slo | None = None, *,
    workers: int = 1, ray: str | None = None, state: Path | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:  # fmt: skip
    """One row per combination of `axes`, in the order of `grid`.

    Args:
        workers: processes of this machine.
        ray: the address of a Ray cluster instead; see `on_ray.py`.
        state: a file of rows that are done; it is read first and grows by each row.
        on_row: called with each row, as it is done.

    Raises:
        ValueError: the state belongs to another sweep.
    """
    settings = list(grid(axes))
    done = _Done(state, setup, slo)
    first = _one(setup, settings[0], slo, None)
    digests, rows = first[1], {0: done.keep(settings[0], first[0])}
    if on_row:
        on_row(rows[0])
    missing: dict[int, dict[str, Any]] = {}
    for index, setting in enumerate(settings[1:], 1):
        if (row := done.find(setting)) is not None:
            rows[index] = row
            if on_row:
                on_row(row)
        else:
            missing[index] = setting
    if ray is not None and missing:
        from mini_vllm.simulate import on_ray

        results = on_ray.run(ray, _one, setup, missing, (slo, digests))
    elif workers == 1 or len(missing) < 2:
        results = (
            (index, _one(setup, setting, slo, digests)) for index, setting in missing.items()
        )
    else:
        results = _on_processes(workers, setup, missing, slo, digests)
    for index, (row, _) in results:
        rows[index] = done.keep(settings[index], row)
        if on_row:
            on_row(rows[index])
    return [rows[index] for index in range(len(settings))]


def _on_processes(
    workers: int, setup: Setup, settings: Mapping[int, dict[str, Any]], slo: Slo | None,
    digests: array[int],
) -> Iterator[tuple[int, tuple[Row, array[int]]]]:  # fmt: skip
    with ProcessPoolExecutor(workers) as pool:
        futures = {
            pool.submit(_one, setup, setting, slo, digests): index
            for index, setting in settings.items()
        }
        for future in as_completed(futures):
            yield futures[future], future.result()


def knee(rows: Sequence[Row], axis: str, attainment: float) -> tuple[Any, Any]:
    """The last load that holds, all lower ones holding too, and the first that does not.

    Args:
        rows: of one setting, in growing order of `axis`.
        attainment: share of requests that must keep the limits.

    Returns:
        Either is None where there is none: the knee lies between them.
    """
    last = None
    for row in rows:
        share = row.report.get("slo_attainment")
        if share is None or share < attainment:
            return last, row.setting[axis]
        last = row.setting[axis]
    return last, None


def _one(
    setup: Setup, setting: dict[str, Any], slo: Slo | None, baseline: array[int] | None
) -> tuple[Row, array[int]]:
    digests = Digests()
    row = Row(setting)
    merged = Setup(**{
        **{name: getattr(setup, name) for name in Setup.__slots__},
        "settings": {**setup.settings, **setting},
    })  # fmt: skip
    try:
        row.report = bench_json(simulate(merged, observers=[digests]), slo)
    except ValueError as error:
        row.error = str(error)
    if baseline is not None and not row.error:
        row.first_difference = _first_difference(baseline, digests.values)
    return row, digests.values


def _first_difference(these: array[int], those: array[int]) -> int | None:
    for step, (mine, theirs) in enumerate(zip(these, those, strict=False)):
        if mine != theirs:
            return step
    return None if len(these) == len(those) else min(len(these), len(those))


class _Done:
    """Rows that are kept in a file, under what they were made from."""

    def __init__(self, path: Path | None, setup: Setup, slo: Slo | None) -> None:
        self.path = path
        self.key = json.dumps([
            str(setup.trace), asdict(setup.cost), setup.format_name, setup.limit, setup.skip,
            setup.seed, dict(setup.settings), asdict(slo) if slo else None,
        ], default=str)  # fmt: skip
        self.rows: dict[str, Row] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    found = json.loads(line)
                    row = Row(**found["row"])
                except (ValueError, KeyError, TypeError):
                    continue  # a line that was being written when the sweep was stopped
                if found["of"] != self.key:
                    raise ValueError(f"{path}: holds the rows of another sweep; name a new file")
                self.rows[_name(row.setting)] = row

    def find(self, setting: Mapping[str, Any]) -> Row | None:
        """The row of a setting, if it is done."""
        return self.rows.get(_name(setting))

    def keep(self, setting: Mapping[str, Any], row: Row) -> Row:
        """Note a row that is done."""
        if self.path is not None and _name(setting) not in self.rows:
            self.rows[_name(setting)] = row
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"of": self.key, "row": asdict(row)}) + "\n")
        return row


def _name(setting: Mapping[str, Any]) -> str:
    return json.dumps(setting, sort_keys=True)

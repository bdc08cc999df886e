"""What two real schedulers decide on one workload, and where they first part.

    python -m conformance.decisions 0.22.1 0.30.0

`course drift --decisions A B` and `course bisect` (`bisect.py`) stand on this. Both need the
archives of the releases they ask, and no torch.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.features.core.recorder import Stalled
from conformance.real_core import ArchiveError, LoadError, core_of
from conformance.recorders import combined
from conformance.recorders.source import Real
from conformance.shrink import shrink
from conformance.words import show
from conformance.workload_file import shorten
from conformance.workloads import Workload

DECISIONS = (
    "fault", "num_scheduled_tokens", "scheduled_spec_decode_tokens", "preempted", "running",
    "num_computed_tokens", "block_ids", "free_blocks", "finished", "finish_reasons",
)  # fmt: skip
"""Who runs, how much, in which blocks, until when; a fault is an error of the scheduler's own."""

LABELS = (
    "new", "resumed", "finished_before", "waiting", "skipped_waiting", "skipped", "spec_token_ids",
    "num_output_placeholders", "grammar_rows",
)  # fmt: skip
"""How the plan and the queues name what was decided."""

FIELDS = DECISIONS + LABELS

FAMILIES: dict[str, frozenset[str]] = {
    "plain": frozenset(),
    "asynchronous": frozenset({"async"}),
    "drafts": frozenset({"drafts"}),
    "asynchronous drafts": frozenset({"async", "drafts"}),
    "adapters": frozenset({"adapters"}),
    "grammars": frozenset({"grammars"}),
}
"""Which workloads are drawn: `recorders.combined` without or with these features."""


@dataclass(frozen=True, slots=True)
class Parting:
    """The first step and field in which two schedulers part."""

    step: int
    field: str
    one: Any
    other: Any


def decide(workload: Workload, real: Real, most: int | None = None) -> list[dict[str, Any]]:
    """The steps of a workload, `most` at most; where the scheduler fails, a last one says so.

    Raises:
        StubError: the release asks for something that has no answer here.
        ValueError: the release cannot record one of the workload's features.
    """
    try:
        return list(combined.run(workload, real, grows=False, most=most)["steps"])
    except combined.RefusedError as error:
        kind = str(error).split(": ", 1)[-1]
        return [*error.entry["steps"], {"fault": kind}]
    except Stalled:
        return [{"fault": "stands still for ever"}]


def parting(
    one: Sequence[dict[str, Any]],
    other: Sequence[dict[str, Any]],
    fields: Sequence[str] = FIELDS,
) -> Parting | None:
    """Where two lists of steps first part in one of `fields`; of one step, the first field.

    A field that only one of them has is not compared: a release without a second queue has no
    `skipped`.
    """
    for index in range(max(len(one), len(other))):
        first, second = (steps[index] if index < len(steps) else {} for steps in (one, other))
        for field in fields:
            have, want = first.get(field), second.get(field)
            if field != "fault" and (field not in first or field not in second):
                continue
            ordered = field == "num_scheduled_tokens"  # the order is part of the decision
            if have != want or (ordered and list(first[field]) != list(second[field])):
                return Parting(index, field, have, want)
    return None


def differ(
    workload: Workload,
    one: Real,
    other: Real,
    fields: Sequence[str] = FIELDS,
    most: int | None = None,
) -> Parting | None:
    """Where two schedulers part on a workload, within `most` steps."""
    return parting(decide(workload, one, most), decide(workload, other, most), fields)


# ---------------------------------------------------------------------- two releases


@dataclass(frozen=True, slots=True)
class Family:
    """What was found in one kind of workload."""

    name: str
    num_workloads: int
    by_field: Counter[str]
    """Workloads whose decisions part, by the field in which they do first."""
    num_labels: int
    """Workloads that are decided alike and labelled another way."""
    seeds: dict[str, int]
    """The first seed of each field."""
    refused: str = ""
    """Why this kind could not be recorded."""


def survey(one: Real, other: Real, count: int, first_seed: int = 0) -> Iterator[Family]:
    """Compare `count` plain workloads, and a third as many of every other kind."""
    for name, features in FAMILIES.items():
        by_field: Counter[str] = Counter()
        seeds: dict[str, int] = {}
        num_labels, number = 0, count if name == "plain" else max(1, count // 3)
        try:
            for seed in range(first_seed, first_seed + number):
                workload = combined.generate(seed, features)
                steps = decide(workload, one), decide(workload, other)
                if found := parting(*steps, DECISIONS):
                    by_field[found.field] += 1
                    seeds.setdefault(found.field, seed)
                elif parting(*steps, LABELS):
                    num_labels += 1
        except ValueError as error:  # a release that is too old for this kind
            yield Family(name, 0, Counter(), 0, {}, str(error))
            continue
        yield Family(name, number, by_field, num_labels, seeds)


def smallest(
    seed: int, features: frozenset[str], one: Real, other: Real, field: str
) -> tuple[Workload, Parting]:
    """The smallest workload found on which two schedulers part first in `field`, and where.

    Raises:
        ValueError: they do not part in it on this seed's workload.
    """
    drawn = combined.generate(seed, features)
    found = differ(drawn, one, other, DECISIONS)
    if found is None or found.field != field:
        raise ValueError(f"seed={seed}: the two do not part first in {field}")
    # A smaller workload may preempt itself for ever: what it shows, it shows early.
    most = None if found.field == "fault" else found.step + 20

    def shows(workload: Workload) -> bool:
        parts = differ(workload, one, other, DECISIONS, most)
        return parts is not None and parts.field == field

    made = shrink(drawn, shows, tries=800)
    parts = differ(made, one, other, DECISIONS, most)
    assert parts is not None
    return made, parts


def report(versions: tuple[str, str], count: int = 240) -> Iterator[str]:
    """Lines of text: a table, then the smallest workload for each field of each kind.

    Raises:
        ArchiveError, LoadError: a release is not here, or does not load.
    """
    one, other = (core_of(version) for version in versions)
    yield f"{'workloads of vLLM ' + ' and '.join(versions):<46}{'decided':>12}{'labelled':>12}"
    yield f"{'':<46}{'another way':>12}{'another way':>12}"
    shown: set[str] = set()
    families = []
    for family in survey(one, other, count):
        families.append(family)
        if family.refused:
            yield f"{family.name:<30}{'-':>6}  {family.refused}"
            continue
        decided = sum(family.by_field.values())
        yield (
            f"{family.name:<30}{family.num_workloads:>6}          "
            f"{decided:>12}{family.num_labels:>12}"
        )
    for family in families:
        for field, number in family.by_field.most_common():
            if field in shown:
                continue
            shown.add(field)
            workload, found = smallest(
                family.seeds[field], FAMILIES[family.name], one, other, field
            )
            yield ""
            yield f"{family.name}: {number} part first in {field}. The smallest found:"
            yield ""
            yield from (f"    {line}" for line in shorten(workload).splitlines())
            yield ""
            yield f"step {found.step}, {field}"
            for version, value in zip(versions, (found.one, found.other), strict=True):
                yield f"  {version:<8}{show(value)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.decisions", description="Which decisions two releases part in."
    )
    parser.add_argument("one")
    parser.add_argument("other")
    parser.add_argument("--workloads", type=int, default=240)
    arguments = parser.parse_args(argv)
    if arguments.workloads < 1:
        parser.error(f"--workloads={arguments.workloads}: need at least 1")
    try:
        for line in report((arguments.one, arguments.other), arguments.workloads):
            print(line)
    except (ArchiveError, LoadError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""How far the rules that are known explain a release nobody has seen, feature by feature.

`course release add` prints it: for each kind of workload the fewest rules with which fewest
differ, and for the rest the smallest workload that does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from conformance import replay
from conformance.decisions import DECISIONS, FAMILIES
from conformance.features.core.recorder import Stalled
from conformance.real_core import RealCore
from conformance.recorders import combined
from conformance.releases import builders
from conformance.releases.rules import SETS, named, parts_with
from conformance.shrink import shrink
from conformance.workload_file import shorten
from conformance.workloads import Workload

DECIDED = tuple(field for field in replay.FIELDS if field in DECISIONS)
"""What counts as a difference; how queues and plans name it is counted apart."""


@dataclass(frozen=True, slots=True)
class Explained:
    """One kind of workload of a release."""

    family: str
    num_workloads: int
    num_refused: int
    """On which the release itself fails."""
    by_rules: dict[tuple[str, ...], int]
    """How many are decided another way with each of `SETS`."""
    labels: dict[tuple[str, ...], int]
    """How many more are labelled another way: queues, new and resumed, placeholders."""
    seeds: dict[tuple[str, ...], int]
    """The first that differs."""

    @property
    def best(self) -> tuple[str, ...]:
        """The rules with which fewest differ; the fewest of them, where several do."""
        return min(SETS, key=lambda rules: (self.by_rules[rules], self.labels[rules]))


def explain(core: RealCore, count: int, first_seed: int = 0) -> Iterator[Explained]:
    """Each kind of workload; `count` plain ones, a third as many of every other kind."""
    for family, features in FAMILIES.items():
        number = count if family == "plain" else max(1, count // 3)
        entries, num_refused = [], 0
        for seed in range(first_seed, first_seed + number):
            try:
                entries.append(combined.run(combined.generate(seed, features), core))
            except combined.RefusedError:
                num_refused += 1
        by_rules, labels, seeds = {}, {}, {}
        for rules in SETS:
            parts = builders(parts_with(rules))
            found = [e["seed"] for e in entries if replay.replay(e, *parts, DECIDED)[1]]
            by_rules[rules] = len(found)
            every = sum(replay.replay(e, *parts)[1] is not None for e in entries)
            labels[rules] = every - len(found)
            if found:
                seeds[rules] = found[0]
        yield Explained(family, len(entries), num_refused, by_rules, labels, seeds)


def smallest(
    core: RealCore, rules: tuple[str, ...], seed: int, features: frozenset[str]
) -> tuple[Workload, replay.Difference]:
    """The smallest workload found that differs, with these rules, in the same field."""
    parts = builders(parts_with(rules))

    def difference(workload: Workload) -> replay.Difference | None:
        try:
            entry = combined.run(workload, core, grows=False, most=most)
        except (combined.RefusedError, Stalled):
            return None
        return replay.replay(entry, *parts, DECIDED)[1]

    most: int | None = None
    drawn = combined.run(combined.generate(seed, features), core)
    first = replay.replay(drawn, *parts, DECIDED)[1]
    if first is None:
        raise ValueError(f"seed={seed}: does not differ")
    most = first.step + 20
    workload = {**combined.generate(seed, features)}
    workload["config"] = {**workload["config"], "num_blocks": drawn["config"]["num_blocks"]}

    def shows(candidate: Workload) -> bool:
        found = difference(candidate)
        return found is not None and found.field == first.field

    made = shrink(workload, shows, tries=600)
    found = difference(made)
    assert found is not None
    return made, found


def report(core: RealCore, count: int) -> Iterator[str]:
    """Lines of text: what each kind of workload needs, then the smallest that are left."""
    yield f"{'workloads of vLLM ' + core.version:<34}{'decided another way':>20}{'labelled':>10}"
    yield f"{'':<34}{'by the pin':>10}{'by rules':>10}{'':>10}  rules"
    left: list[Explained] = []
    for found in explain(core, count):
        yield (
            f"{found.family:<24}{found.num_workloads:>10}{found.by_rules[()]:>10}"
            f"{found.by_rules[found.best]:>10}{found.labels[found.best]:>10}  {named(found.best)}"
        )
        if found.num_refused:
            yield f"{'':<24}{found.num_refused:>10} on which the release itself fails"
        if found.by_rules[found.best]:
            left.append(found)
    for found in left:
        seed = found.seeds[found.best]
        workload, difference = smallest(core, found.best, seed, FAMILIES[found.family])
        yield ""
        yield f"{found.family}: no set of rules is enough. The smallest found (from seed {seed}):"
        yield ""
        yield from (f"    {line}" for line in shorten(workload).splitlines())
        yield ""
        yield from str(difference).splitlines()[:3]

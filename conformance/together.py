"""Fresh workloads with several features at once, decided by the real core and by the mini engine.

    python -m conformance.together 20000 --seed 900000
    python -m conformance.together 1 --seed 900123            one that differed

Prints every difference, then the counts. On some workloads with drafts, adapters and asynchronous
plans the real scheduler fails an assertion of its own: they are counted apart. The mini engine
refuses that combination.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from conformance import replay
from conformance.real_core import ArchiveError, LoadError, core_of
from conformance.recorders import combined
from conformance.recorders.source import Real


@dataclass(slots=True)
class Counts:
    """What became of some workloads."""

    num_workloads: int = 0
    num_steps: int = 0
    refused: list[str] = field(default_factory=list)
    """One message per workload on which the real scheduler fails an assertion."""
    differences: list[replay.Difference] = field(default_factory=list)
    by_features: Counter[frozenset[str]] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.num_workloads:,} workloads, {self.num_steps:,} steps: "
            f"{len(self.differences)} differ, {len(self.refused)} on which the real scheduler fails"
        )


def compare(seeds: Iterable[int], real: Real) -> Counts:
    """Decide each seed's workload twice."""
    counts = Counts()
    for seed in seeds:
        counts.num_workloads += 1
        counts.by_features[combined.features_of(seed)] += 1
        try:
            entry = combined.run(combined.generate(seed), real)
        except combined.RefusedError as error:
            counts.refused.append(str(error))
            continue
        steps, difference = replay.replay(entry)
        counts.num_steps += steps
        if difference is not None:
            counts.differences.append(difference)
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.together", description="Several features at once."
    )
    parser.add_argument("count", type=int, nargs="?", default=1000, help="how many workloads")
    parser.add_argument("--seed", type=int, default=900_000, help="the first one's")
    arguments = parser.parse_args(argv)
    if arguments.count < 1:
        parser.error(f"count={arguments.count}: need at least 1")
    try:
        core = core_of()
    except (ArchiveError, LoadError) as error:
        parser.error(str(error))
    counts = compare(range(arguments.seed, arguments.seed + arguments.count), core)
    for features, number in sorted(counts.by_features.items(), key=lambda item: sorted(item[0])):
        print(f"{number:>7,}  {' + '.join(sorted(features))}")
    print(*counts.refused, *counts.differences, counts, sep="\n")
    return 1 if counts.differences else 0


if __name__ == "__main__":
    raise SystemExit(main())

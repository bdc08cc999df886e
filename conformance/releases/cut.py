"""The workloads of lab 19-05: those of 0.33.0 that show one rule, and some of the others.

    python -m conformance.releases.cut [--write]

Which workloads show which rule is in `differing.json`. `--write` puts the first of each kind and
profile into the lab's `recordings/`, and the counts onto its page. The same every time.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Set
from pathlib import Path

from conformance import recording, workloads
from conformance.releases import differing, release_of
from labkit.tables import markdown_table, write_section

RELEASE = release_of("0.33.0")
LAB = (
    Path(__file__)
    .parents[2]
    .joinpath("phase-19-capstone-maintainer-and-startup", "labs", "lab-05-since-the-pin")
)


FIRST = {"blocks": 6, "chunks": 6, "labels": 6, "walk": 99, "several": 4, "same": 3}
"""How many workloads of each profile are kept, by the lab's files."""


def kinds(differ: Mapping[str, Set[int]], seeds: Set[int]) -> dict[str, list[int]]:
    """Seeds by the lab's files: mended by one rule alone, by the walk last, by several, or same."""
    found = {name: differ["pin"] - differ[name] for name in ("blocks", "chunks", "labels")}
    found["walk"] = set(differ["walk"])
    found["several"] = set(differ["pin"]).difference(*found.values())
    found["same"] = set(seeds - differ["pin"])
    return {name: sorted(of) for name, of in found.items()}


def chosen(seeds: list[int], most: int) -> list[int]:
    """The first of each profile."""
    taken: Counter[str] = Counter()
    kept = []
    for seed in seeds:
        profile = workloads.profile_of(seed)
        if taken[profile] < most:
            taken[profile] += 1
            kept.append(seed)
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.releases.cut", description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    entries = list(recording.read(RELEASE.path, RELEASE.upstream))
    by_seed = {entry["seed"]: entry for entry in entries}
    rows = []
    for name, seeds in kinds(differing.kept(RELEASE.version), by_seed.keys()).items():
        kept = chosen(seeds, FIRST[name])
        rows.append([f"`{name}`", f"{len(seeds):,}", str(len(kept))])
        if write:
            path = LAB / "recordings" / f"{name}.jsonl.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            recording.write(path, [by_seed[seed] for seed in kept])
    rows.append(["all", f"{len(entries):,}", str(sum(int(row[2]) for row in rows))])
    table = markdown_table(["file", "of all", "here"], rows)
    print(table)
    if write:
        write_section("cut", table, LAB / "README.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

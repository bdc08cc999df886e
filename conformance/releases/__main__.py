"""How many workloads each release decides another way than the pin, and with which rules none.

    python -m conformance.releases [--write]

Needs the archives of the releases that are not kept. `--write` puts the table into
SINCE_THE_PIN.md, and the rows of those that are kept into README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from conformance import recording
from conformance.real_core import ArchiveError, LoadError
from conformance.releases import RELEASES, SEEDS, builders
from conformance.releases.record import core_for, record_release
from conformance.releases.rules import DECIDED_BY, named, parts_with
from conformance.replay import replay
from labkit.tables import markdown_table, write_section

ROOT = Path(__file__).parents[2]
PAGES = {"SINCE_THE_PIN.md": tuple(DECIDED_BY), "README.md": tuple(RELEASES)}
"""Which releases each page has."""
HEADER = ["of 3,600 workloads of", "the pin decides another way", "new rules", "differ with them"]


def recorded(version: str, seeds: Iterable[int] = SEEDS) -> list[recording.Recording]:
    """What a release decides: the kept file, or its core from the archive.

    Raises:
        ArchiveError, LoadError: it is not kept, and its archive is not here.
    """
    if version in RELEASES:
        release, chosen = RELEASES[version], set(seeds)
        entries = recording.read(release.path, release.upstream, lambda line: line - 1 in chosen)
        return list(entries)
    return list(record_release(core_for(version), seeds))


def differing(entries: Iterable[recording.Recording], rules: tuple[str, ...] = ()) -> int:
    """How many workloads the pin decides another way, with these rules of later releases."""
    parts = builders(parts_with(rules))
    return sum(replay(entry, *parts)[1] is not None for entry in entries)


def counts(version: str, seeds: Iterable[int] = SEEDS) -> tuple[int, int]:
    """How many of its workloads the pin decides another way, and the pin with its rules."""
    entries = recorded(version, seeds)
    return differing(entries), differing(entries, DECIDED_BY[version])


def row(version: str) -> list[str]:
    """A release's row of the table."""
    pin, own = counts(version)
    return [version, f"{pin:,}", named(DECIDED_BY[version]), f"{own:,}"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.releases", description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    try:
        rows = {version: row(version) for version in DECIDED_BY}
    except (ArchiveError, LoadError) as error:
        parser.error(str(error))
    print(markdown_table(HEADER, list(rows.values())))
    for name, versions in PAGES.items() if write else ():
        table = markdown_table(HEADER, [rows[version] for version in versions])
        write_section("releases", table, ROOT / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

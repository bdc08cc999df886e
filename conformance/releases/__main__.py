"""How many workloads each release decides another way than the pin, and than its own parts.

    python -m conformance.releases [--write]

`--write` puts the table into SINCE_THE_PIN.md and README.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from conformance.releases import RELEASES, builders
from conformance.replay import replay_files
from labkit.tables import markdown_table, write_section

ROOT = Path(__file__).parents[2]
PAGES = ("SINCE_THE_PIN.md", "README.md")
HEADER = ["of 3,600 workloads of", "the pin decides another way", "the release's parts"]


def rows() -> list[list[str]]:
    """One row per release, counted."""
    found = []
    for version, release in RELEASES.items():
        differ = []
        for parts in ("0.22.1", version):
            result = replay_files([release.path], *builders(parts), upstream=release.upstream)
            differ.append(f"{len(result.differences):,}")
        found.append([version, *differ])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.releases", description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    table = markdown_table(HEADER, rows())
    print(table)
    for name in PAGES if write else ():
        write_section("releases", table, ROOT / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

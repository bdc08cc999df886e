"""How many workloads each release decides another way than the pin, and than its own parts.

    python -m conformance.releases [--write]

`--write` puts the table into SINCE_THE_PIN.md and README.md.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from conformance.releases import RELEASES, builders
from conformance.replay import replay_files

ROOT = Path(__file__).parents[2]
PAGES = ("SINCE_THE_PIN.md", "README.md")
MARKED = re.compile(r"(<!-- releases -->\n).*?(<!-- /releases -->)", re.DOTALL)


def rows() -> list[str]:
    """One row per release, counted."""
    found = []
    for version, release in RELEASES.items():
        differ = []
        for parts in ("0.22.1", version):
            result = replay_files([release.path], *builders(parts), upstream=release.upstream)
            differ.append(len(result.differences))
        found.append(f"| {version} | {differ[0]:,} | {differ[1]:,} differ |")
    return found


def written(text: str, found: list[str]) -> str:
    """A page with the rows between its marks."""
    return MARKED.sub(lambda m: m[1] + "\n".join(found) + f"\n{m[2]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.releases", description=__doc__)
    parser.add_argument("--write", action="store_true")
    found = rows()
    print("\n".join(found))
    if parser.parse_args().write:
        for name in PAGES:
            page = ROOT / name
            page.write_text(written(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Which kept workloads of a release are decided another way: by the pin, and with one rule mended.

    python -m conformance.releases.differing [--write]

Replays all 3,600 workloads of each release that is kept, in about a minute: once for the pin, and
those of 0.33.0 once for each of `MENDED`. `differing.json` beside this file keeps the seeds. Tests
replay a share of them, and the tables on pages count them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from conformance import recording
from conformance.releases import RELEASES, builders
from conformance.replay import replay
from mini_vllm.parts import EngineParts
from mini_vllm.releases import v0_33_0

FILE = Path(__file__).with_suffix(".json")


class _WithoutTheWalk(v0_33_0.LoneRequestUncapped, v0_33_0.ResumedAreNew):
    """0.33.0 where a request that preempts itself still ends the scan."""


MENDED = {
    "pin": EngineParts(),
    "blocks": EngineParts(block_pool=v0_33_0.UnhashedFirstAlways),
    "chunks": EngineParts(scheduler=v0_33_0.LoneRequestUncapped),
    "labels": EngineParts(scheduler=v0_33_0.ResumedAreNew),
    "walk": EngineParts(block_pool=v0_33_0.UnhashedFirstAlways, scheduler=_WithoutTheWalk),
}
"""The rule that is mended alone; of `walk` the one that is not, since it never shows alone."""


def tried(version: str) -> dict[str, EngineParts]:
    """Parts by name: the pin's, and for the release that lab 19-05 is cut from, all of `MENDED`."""
    return MENDED if version == "0.33.0" else {"pin": MENDED["pin"]}


def seeds_of(entries: Iterable[recording.Recording], parts: EngineParts) -> set[int]:
    """The seeds of the workloads that these parts decide another way."""
    build, make_request = builders(parts)
    return {e["seed"] for e in entries if replay(e, build, make_request)[1] is not None}


def kept(version: str) -> dict[str, set[int]]:
    """What `--write` kept: for each of `tried`, the seeds that differ."""
    found = json.loads(FILE.read_text(encoding="utf-8"))[version]
    return {
        name: {seed for seed, differs in enumerate(marks) if differs == "x"}
        for name, marks in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m conformance.releases.differing")
    parser.add_argument("--write", action="store_true", help=f"keep them in {FILE.name}")
    write = parser.parse_args().write
    made: dict[str, dict[str, str]] = {}
    for version, release in RELEASES.items():
        entries = list(recording.read(release.path, release.upstream))
        made[version] = {}
        for name, parts in tried(version).items():
            differ = seeds_of(entries, parts)
            print(f"{version} {name}: {len(differ):,} of {len(entries):,} differ")
            marks = ("x" if seed in differ else "." for seed in range(len(entries)))
            made[version][name] = "".join(marks)
    if write:
        FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Record what a later release decides on the pin's workloads, from its source archive.

    course upstream fetch --version 0.33.0
    python -m conformance.record release-0.33.0             # one that is kept
    python -m conformance.releases.record 0.34.0 --out FILE

Loads the release's own core (`conformance.real_core`): no torch, no installation. Same workloads,
same fields, same file format as the pin's; only `upstream` names the release.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from conformance import recording, workloads
from conformance.features.core import check_stop
from conformance.features.core import recorder as scheduler
from conformance.real_core import ArchiveError, LoadError, RealCore, core_of
from conformance.real_core.places import ROOT
from conformance.releases import RELEASES, SEEDS, release_of


def core_for(version: str, root: Path = ROOT) -> RealCore:
    """The core of a release; of one that is kept, the very archive that was kept.

    Raises:
        ArchiveError: it is not here, or another commit than the one that was recorded.
        LoadError: it does not load.
    """
    core = core_of(version, root)
    if version in RELEASES and core.upstream != RELEASES[version].upstream:
        raise ArchiveError(f"vLLM {version} here is {core.commit}, not {RELEASES[version].commit}")
    return core


def record_release(core: RealCore, seeds: Iterable[int] = SEEDS) -> Iterator[recording.Recording]:
    """One recording per seed."""
    for seed in seeds:
        yield scheduler.record(workloads.generate(seed), core)


def kept(version: str, seeds: Iterable[int] = SEEDS) -> Iterator[recording.Recording]:
    """The recordings of a release that is kept, for `conformance.record`."""
    yield from record_release(core_for(release_of(version).version), seeds)


def hazard(version: str) -> Iterator[recording.Recording]:
    """The priority hazard, somebody else waiting, as a release that is kept decides it."""
    from conformance.hazard import WITH_A_THIRD

    yield scheduler.record(WITH_A_THIRD, core_for(version))


def stops(version: str) -> Iterator[recording.Recording]:
    """When a request ends, as a release that is kept decides it, behind a line that says so."""
    core = core_for(version)
    yield {"upstream": core.upstream, "part": "check_stop", "about": check_stop.ABOUT}
    yield from check_stop.cases(core)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.releases.record", description="Record any release."
    )
    parser.add_argument("version")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    arguments = parser.parse_args(argv)
    try:
        core = core_for(arguments.version)
    except (ArchiveError, LoadError) as error:
        parser.error(str(error))
    entries = list(record_release(core, arguments.seeds))
    recording.write(arguments.out, entries)
    print(f"{arguments.out}: {len(entries)} workloads of vLLM {core.version}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Record what a later release decides on the pin's workloads, from its source archive.

    course upstream fetch --version 0.33.0
    python -m conformance.record release-0.33.0             # one that is kept
    python -m conformance.releases.record 0.34.0 --commit COMMIT --tree TREE --out FILE

Needs the packages of `requirements-upstream.txt` and the archive's tree, which it puts in front of
`sys.path` itself. Same workloads, same fields, same file format as the pin's; only `upstream` names
the release.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from conformance import recording, workloads
from conformance.releases import SEEDS, Release, release_of

ROOT = Path(__file__).parents[2]


def tree_of(version: str, root: Path = ROOT) -> Path:
    """Where `course upstream fetch --version` puts a release's tree."""
    return root / "build" / "releases" / f"vllm-{version}"


def identity(tree: Path) -> tuple[str, str]:
    """(version, commit) of an unpacked archive.

    Raises:
        FileNotFoundError: nothing is unpacked there.
    """
    text = (tree / "vllm" / "_version.py").read_text(encoding="utf-8")
    version = re.search(r"\bversion = '([^']+)'", text)
    commit = re.search(r"\bcommit_id = 'g([0-9a-f]+)'", text)
    return (version[1] if version else ""), (commit[1] if commit else "")


def import_release(release: Release, tree: Path) -> None:
    """Make `import vllm` mean this tree; once per process.

    Raises:
        RuntimeError: another vLLM is imported already, or the tree is another release.
        FileNotFoundError: the tree is absent.
    """
    if not tree.is_dir():
        how = f"course upstream fetch --version {release.version}"
        raise FileNotFoundError(f"{tree} is not there: {how}")
    if identity(tree) != (release.version, release.commit):
        raise RuntimeError(f"{tree} holds vLLM {identity(tree)}, not {release.version}")
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    if release.second_runner is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(release.second_runner))
    sys.path.insert(0, str(tree))
    inherited = os.environ.get("PYTHONPATH", "")  # a model is inspected in a child process
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tree.resolve()), inherited]))
    import vllm

    if Path(vllm.__file__).parents[1].resolve() != tree.resolve():
        raise RuntimeError(f"vllm was imported from {vllm.__file__}: start a process of its own")


def record_release(release: Release, seeds: Iterable[int]) -> Iterator[recording.Recording]:
    """One recording per seed; the release must be the `vllm` that is imported."""
    from conformance.features.core.recorder import record

    for seed in seeds:
        yield {**record(workloads.generate(seed)), "upstream": release.upstream}


def kept(version: str, seeds: Iterable[int] = SEEDS) -> Iterator[recording.Recording]:
    """The recordings of a release that is kept, for `conformance.record`."""
    import_release(release_of(version), tree_of(version))
    yield from record_release(release_of(version), seeds)


def hazard(version: str) -> Iterator[recording.Recording]:
    """The priority hazard, somebody else waiting, as a release that is kept decides it."""
    import_release(release_of(version), tree_of(version))
    from conformance.features.core.recorder import record
    from conformance.hazard import WITH_A_THIRD

    yield {**record(WITH_A_THIRD), "upstream": release_of(version).upstream}


def stops(version: str) -> Iterator[recording.Recording]:
    """When a request ends, as a release that is kept decides it, behind a line that says so."""
    import_release(release_of(version), tree_of(version))
    from conformance.features.core import check_stop

    upstream = release_of(version).upstream
    yield {"upstream": upstream, "part": "check_stop", "about": check_stop.ABOUT}
    yield from check_stop.cases()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.releases.record", description="Record any release."
    )
    parser.add_argument("version")
    parser.add_argument("--commit", required=True, help="as its vllm/_version.py says")
    parser.add_argument("--tree", type=Path, required=True, help="where its archive is unpacked")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    arguments = parser.parse_args(argv)
    release = Release(arguments.version, arguments.commit, "", second_runner=None)
    try:
        import_release(release, arguments.tree)
    except (OSError, RuntimeError) as error:
        parser.error(str(error))
    entries = list(record_release(release, arguments.seeds))
    recording.write(arguments.out, entries)
    print(f"{arguments.out}: {len(entries)} workloads of vLLM {release.version}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

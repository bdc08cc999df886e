"""Releases after the pin whose schedulers were run: which archives, and which recordings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "recordings" / "releases"
SEEDS = range(3_600)
"""The workloads each release is asked for: those of `conformance/workloads.py` by seed."""


@dataclass(frozen=True, slots=True)
class Release:
    """One release whose scheduler was run."""

    version: str
    commit: str
    """As `vllm/_version.py` of its archive names it."""
    sha256: str
    """Of the source archive on the package index."""
    second_runner: bool | None = False
    """Whether it resolves to the second model runner for the stand-in model on a processor; None:
    not known yet, the release is asked."""

    @property
    def path(self) -> Path:
        """Its recordings."""
        return FOLDER / f"{self.version}.jsonl.gz"

    @property
    def upstream(self) -> dict[str, str]:
        """What its recordings say they were made from."""
        return {"version": self.version, "commit": self.commit}


RELEASES = {
    release.version: release
    for release in (
        Release(
            "0.23.0", "91df0fad4",
            "760269db3d9611e12e524681df1bca0977d5d2f5fcb4481cc34d33efc4ae7ff5",
        ),
        Release(
            "0.27.1", "6e448d0ea",
            "eec2d54d137ac1e59cb4c39226dfee1943eefc8f4788f5821d7300d6acbdb646",
        ),
        Release(
            "0.33.0", "4ba787ec9",
            "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
            second_runner=True,
        ),
    )
}  # fmt: skip
"""Oldest first. `course release add VERSION` says what to write here for the next one."""


def release_of(version: str) -> Release:
    """The entry of a release.

    Raises:
        ValueError: it was not compared.
    """
    if version not in RELEASES:
        raise ValueError(f"release={version!r}: need one of {', '.join(RELEASES)}")
    return RELEASES[version]

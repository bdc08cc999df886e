"""Which releases lie here, and their cores: the pin in `upstream/`, the others in `build/releases`.

`course upstream fetch` and `course upstream fetch --version VERSION` put them there.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from conformance.real_core.archive import ArchiveError, number_of
from conformance.real_core.core import OLDEST, RealCore
from conformance.real_core.namespace import LIBRARIES
from conformance.recording import UPSTREAM

ROOT = Path(__file__).parents[2]
PIN = UPSTREAM["version"]


def tree_of(version: str, root: Path = ROOT) -> Path:
    """Where a release's tree belongs."""
    return root / "upstream" if version == PIN else root / "build" / "releases" / f"vllm-{version}"


def present(root: Path = ROOT) -> list[str]:
    """The releases whose trees lie here, the oldest first."""
    folders = (root / "build" / "releases").glob("vllm-*")
    found = {folder.name.removeprefix("vllm-") for folder in folders} | {PIN}
    there = [v for v in found if (tree_of(v, root) / "vllm" / "_version.py").is_file()]
    return sorted((v for v in there if number_of(v) >= OLDEST), key=number_of)


def why_not(version: str = PIN, root: Path = ROOT) -> str:
    """What keeps a release's core from loading here, "" when nothing does."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)}: uv sync --extra real-core"
    if not (tree_of(version, root) / "vllm" / "_version.py").is_file():
        wanted = "" if version == PIN else f" --version {version}"
        return f"vLLM {version} is not here: course upstream fetch{wanted}"
    return ""


@functools.cache
def core_of(version: str = PIN, root: Path = ROOT) -> RealCore:
    """The core of a release that lies here; loaded once per process.

    Raises:
        ArchiveError: it is not here, or what lies there is another release.
        LoadError: it does not load.
    """
    number_of(version)
    if problem := why_not(version, root):
        raise ArchiveError(problem)
    made = RealCore(tree_of(version, root))
    if made.version != version:
        raise ArchiveError(f"{tree_of(version, root)} holds vLLM {made.version}, not {version}")
    return made

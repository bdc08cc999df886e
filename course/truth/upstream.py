"""The pinned vLLM tree in `upstream/`: fetch it, and say whether what lies there is it.

`fetch` tries the git tag, then the sdist on the package index, whose sha256 is known. Either way
the tree is completed beside its final place and renamed into it, so a half-finished download is
never taken for the tree. `verify` trusts nothing but the version, the commit and a few files.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "0.22.1"
COMMIT = "0decac0d9"
GIT_URL = "https://github.com/vllm-project/vllm.git"
GIT_TAG = f"v{VERSION}"
SDIST_NAME = f"vllm-{VERSION}.tar.gz"
SDIST_SHA256 = "cd34902729f3767e3dfbb391956b2986bc638a54be9893e78bda9cc55669f15c"
DIRECTORY = "upstream"
NEEDED = ("vllm/v1/core/sched/scheduler.py", "tests/v1/core/test_scheduler.py", "csrc")
"""Parts of the tree that the course cites; all are in the tag and in the sdist."""

PROBE_SECONDS = 15
"""Longest wait for the git host to answer before the package index is tried."""

Progress = Callable[[str], None]


class UpstreamError(Exception):
    """The pinned tree could not be put in place; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Status:
    """Whether the pinned tree is in place, and one sentence on what was found."""

    ok: bool
    detail: str


def path(root: Path) -> Path:
    """Where the pinned tree belongs: `upstream/` in the repository at `root`."""
    return root / DIRECTORY


def verify(root: Path) -> Status:
    """Check `root/upstream` against the pin, offline, without importing it.

    Version and commit are read from `vllm/_version.py` (an sdist) or from git's HEAD (a clone).
    """
    tree = path(root)
    if not tree.is_dir():
        return Status(False, f"{DIRECTORY}/ is absent; run `course upstream fetch`")
    version, commit = _identity(tree)
    if version != VERSION or not commit.startswith(COMMIT):
        return Status(
            False,
            f"{DIRECTORY}/ holds vLLM {version or 'of unknown version'} "
            f"({commit[:9] or 'unknown commit'}), the pin is {VERSION} ({COMMIT})",
        )
    missing = [name for name in NEEDED if not (tree / name).exists()]
    if missing:
        return Status(False, f"{DIRECTORY}/ is incomplete: {', '.join(missing)} is missing")
    return Status(True, f"{DIRECTORY}/ is vLLM {version} ({commit[:9]})")


def fetch(root: Path, progress: Progress | None = None) -> str:
    """Put the pinned tree into `root/upstream`; does nothing when it is there already.

    Args:
        root: the repository root.
        progress: called with one line of text per stage.

    Returns:
        Where the tree came from: "already there", "git tag v0.22.1" or "sdist vllm-0.22.1.tar.gz".

    Raises:
        UpstreamError: neither source gave the pinned tree, or another tree is in the way.
    """
    say = progress or (lambda _line: None)
    if verify(root).ok:
        return "already there"
    tree = path(root)
    if tree.exists() and (not tree.is_dir() or any(tree.iterdir())):
        raise UpstreamError(f"{verify(root).detail}. Move it away, then fetch again.")
    with tempfile.TemporaryDirectory(prefix=f"{DIRECTORY}.partial-", dir=root) as scratch:
        candidate = Path(scratch) / DIRECTORY
        try:
            say(f"trying the git tag {GIT_TAG}")
            _clone(candidate)
            source = f"git tag {GIT_TAG}"
        except (OSError, subprocess.SubprocessError) as error:
            say(f"the git tag is not reachable ({_reason(error)}); trying the package index")
            shutil.rmtree(candidate, ignore_errors=True)
            archive = Path(scratch) / SDIST_NAME
            _download_sdist(archive, SDIST_SHA256, say)
            say("unpacking")
            _unpack(archive, candidate)
            source = f"sdist {SDIST_NAME}"
        status = verify(Path(scratch))
        if not status.ok:
            raise UpstreamError(f"the {source} is not the pinned tree: {status.detail}")
        if tree.exists():
            tree.rmdir()  # empty, checked above
        candidate.rename(tree)
    return source


def release_tree(root: Path, version: str) -> Path:
    """Where the tree of another release lies; git-ignored."""
    return root / "build" / "releases" / f"vllm-{version}"


def fetch_release(
    root: Path, version: str, sha256: str | None, progress: Progress | None = None
) -> tuple[Path, str]:
    """Put another release's source archive, unpacked, into `build/releases`.

    Args:
        root: the repository root.
        version: such as "0.33.0".
        sha256: what the archive must be; None takes what the package index says it is.
        progress: called with one line of text per stage.

    Returns:
        Its tree and the sha256 of its archive ("" when the tree was there already).

    Raises:
        UpstreamError: the index has no such archive, or it is another one.
    """
    say = progress or (lambda _line: None)
    tree = release_tree(root, version)
    if (tree / "vllm" / "_version.py").is_file():
        return tree, ""
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=tree.parent) as scratch:
        archive = Path(scratch) / f"vllm-{version}.tar.gz"
        found = _download_sdist(archive, sha256, say)
        say("unpacking")
        _unpack(archive, Path(scratch) / "tree")
        if tree.exists():
            shutil.rmtree(tree)
        (Path(scratch) / "tree").rename(tree)
    return tree, found


# ---------------------------------------------------------------------- parts


def _identity(tree: Path) -> tuple[str, str]:
    """(version, commit) of a tree, "" for what it does not say."""
    version_file = tree / "vllm" / "_version.py"
    if version_file.is_file():
        text = version_file.read_text(encoding="utf-8", errors="replace")
        version = re.search(r"\bversion = '([^']+)'", text)
        commit = re.search(r"\bcommit_id = 'g([0-9a-f]+)'", text)
        return version[1] if version else "", commit[1] if commit else ""
    if (tree / ".git").exists():  # without this, git would answer for the repository around it
        try:
            commit_id = _git("-C", str(tree), "rev-parse", "HEAD")
        except (OSError, subprocess.SubprocessError):
            return "", ""
        return (VERSION if commit_id.startswith(COMMIT) else ""), commit_id
    return "", ""


def _git(*arguments: str, timeout: float | None = 30) -> str:
    """Run git without ever asking for a password; its stdout, stripped."""
    done = subprocess.run(
        ["git", *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
    )
    return done.stdout.strip()


def _clone(target: Path) -> None:
    """Shallow clone of the tag. Raises at once when the host does not answer."""
    _git("ls-remote", "--tags", GIT_URL, f"refs/tags/{GIT_TAG}", timeout=PROBE_SECONDS)
    slow = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=30")
    branch = ("--depth", "1", "--branch", GIT_TAG)
    _git(*slow, "clone", "--quiet", *branch, GIT_URL, str(target), timeout=None)


def _download_sdist(archive: Path, sha256: str | None, say: Progress) -> str:
    """The sdist of that name from the package index, checked; returns its sha256."""
    try:
        from pypi_simple import PyPISimple
    except ImportError as error:
        raise UpstreamError(
            "the package index is read with pypi-simple, which is not installed: "
            "pip install -e '.[upstream]' (or `uv sync --extra upstream`), then fetch again"
        ) from error
    try:
        # A mirror configured for pip serves here too; else the library's own default.
        mirror = os.environ.get("PIP_INDEX_URL")
        with PyPISimple(mirror) if mirror else PyPISimple() as index:
            page = index.get_project_page("vllm", timeout=60)
            found = [package for package in page.packages if package.filename == archive.name]
            if not found:
                raise UpstreamError(f"the package index does not list {archive.name}")
            say(f"downloading {archive.name}")
            index.download_package(found[0], archive, timeout=60)
    except UpstreamError:
        raise
    except Exception as error:  # requests, urllib3 and the parser each have their own
        raise UpstreamError(f"the package index did not give {archive.name}: {error}") from error
    return _check_sha256(archive, sha256 or _listed_sha256(found[0]))


def _listed_sha256(package: Any) -> str:
    """What the index says of an archive that is not pinned."""
    if not (listed := package.digests.get("sha256")):
        raise UpstreamError(f"the package index names no sha256 of {package.filename}")
    return str(listed)


def _check_sha256(archive: Path, wanted: str) -> str:
    """Refuse an archive that is not, byte for byte, what was asked for; returns its sha256."""
    with archive.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != wanted:
        raise UpstreamError(
            f"{archive.name} has sha256 {found}, the pin is {wanted}: nothing was unpacked"
        )
    return found


def _unpack(archive: Path, target: Path) -> None:
    """Unpack the archive's single top folder as `target`."""
    inside = target.parent / "unpacked"
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and newer
            tar.extractall(inside, filter="data")
        else:
            tar.extractall(inside)
    tops = list(inside.iterdir())
    if len(tops) != 1:
        raise UpstreamError(f"{archive.name} holds {len(tops)} top folders, expected one")
    tops[0].rename(target)


def _reason(error: Exception) -> str:
    """The last line of what went wrong, for a progress line."""
    if isinstance(error, FileNotFoundError):
        return "git is not installed"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer in {error.timeout:.0f} s"
    text = getattr(error, "stderr", None) or str(error)
    return str(text).strip().splitlines()[-1]

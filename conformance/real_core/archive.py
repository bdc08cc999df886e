"""One unpacked release: its files, from a folder or a zip, and which release it says it is.

Promises: nothing is written, started or fetched; a damaged or foreign archive is refused by name
before a line of it runs.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from pathlib import Path
from typing import Protocol

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
"""Without it nothing here is of use."""


class ArchiveError(Exception):
    """A release's archive is missing, damaged, or another release; the message names it."""


class Archive(Protocol):
    """Where a release's source files are read."""

    name: str

    def read(self, path: str) -> str | None:
        """The text of a file below the archive's root, None where there is none."""
        ...


class Folder:
    """A source tree that is unpacked: the folder that holds `vllm/`."""

    def __init__(self, root: Path) -> None:
        self.root, self.name = root, str(root)

    def read(self, path: str) -> str | None:
        try:
            return (self.root / path).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ArchiveError(f"{self.name}/{path} cannot be read: {error}") from error


class Zip:
    """The same files in a zip, below its top: what a page loads in one piece."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise ArchiveError(f"{path} cannot be read: {error}") from error
        self._names = set(self._zip.namelist())

    def read(self, path: str) -> str | None:
        if path not in self._names:
            return None
        try:
            return self._zip.read(path).decode("utf-8")
        except (OSError, zipfile.BadZipFile, zlib.error, UnicodeDecodeError) as error:
            raise ArchiveError(f"{self.name}: {path} cannot be read: {error}") from error


def open_archive(path: Path) -> Archive:
    """The archive at `path`: a folder that holds `vllm/`, or a zip of one.

    Raises:
        ArchiveError: nothing is there, or it holds no scheduler.
    """
    if not path.exists():
        raise ArchiveError(
            f"{path} is not there: course upstream fetch, or fetch --version VERSION"
        )
    archive: Archive = Folder(path) if path.is_dir() else Zip(path)
    if archive.read(SCHEDULER) is None:
        raise ArchiveError(f"{path} holds no {SCHEDULER}: not a release, or half of one")
    return archive


def identity(archive: Archive) -> tuple[str, str]:
    """(version, commit) as `vllm/_version.py` says them.

    Raises:
        ArchiveError: the archive does not say its version.
    """
    text = archive.read("vllm/_version.py") or ""
    version = re.search(r"\bversion = '([^']+)'", text)
    commit = re.search(r"\bcommit_id = '?g?([0-9a-f]+|None)", text)
    if version is None:
        raise ArchiveError(f"{archive.name}: vllm/_version.py does not say which release it is")
    return version[1], (commit[1] if commit and commit[1] != "None" else "")


def number_of(version: str) -> tuple[int, ...]:
    """A release's number, for comparing: "0.27.1" is (0, 27, 1).

    Raises:
        ArchiveError: it is not three numbers.
    """
    try:
        found = tuple(int(part) for part in version.split(".")[:3])
    except ValueError:
        found = ()
    if len(found) != 3:
        raise ArchiveError(f"version={version!r}: need three numbers, such as 0.22.1")
    return found

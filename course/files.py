"""Files: written so that a reader sees the old text or the new one, and loaded as modules."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


def write_atomically(path: Path, text: str | bytes) -> None:
    """Write `path`, a text as UTF-8 with `\\n` line ends; a failure changes nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8") if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.chmod(name, path.stat().st_mode & 0o777)
        else:
            os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; another process that wants it waits. Nothing on Windows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file closes, also by a crash
        yield


def load_module(path: Path, name: str = "") -> ModuleType:
    """A Python file as a new module, by path: phases and labs are folders, not packages.

    Args:
        name: the module's name in `sys.modules`; one made of the path unless given.

    Raises:
        FileNotFoundError: there is no such file. Whatever the file raises is raised as it is, and
            no half-made module stays behind.
    """
    parts = "_".join(["_loaded", *path.resolve().with_suffix("").parts[-3:]])
    spec = importlib.util.spec_from_file_location(name or re.sub(r"\W", "_", parts), path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(spec.name, None)
        raise
    return module

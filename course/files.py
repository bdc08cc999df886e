"""Files: written so that a reader sees the old text or the new one, and loaded as modules.

Mirrors nothing upstream.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8 with `\\n` line ends; an interruption leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
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


def load_module(path: Path) -> ModuleType:
    """A Python file as a new module, by path: phases and labs are folders, not packages.

    Raises:
        FileNotFoundError: there is no such file. Whatever the file raises is raised as it is.
    """
    name = "_".join(["_loaded", *path.resolve().with_suffix("").parts[-3:]])
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", name), path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module

"""A Python file as a module, by path: phases and labs are folders, not packages."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType


def load_module(path: Path | str, name: str = "") -> ModuleType:
    """The file at `path` as a new module.

    Args:
        name: the module's name in `sys.modules`; one made of the path unless given.

    Raises:
        FileNotFoundError: there is no such file. Whatever the file raises is raised as it is, and
            no half-made module stays behind.
    """
    path = Path(path)
    spec = importlib.util.spec_from_file_location(name or _name_of(path), path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(spec.name, None)
        raise
    return module


def sibling(file: Path | str, name: str) -> ModuleType:
    """The module `name`.py beside `file`, loaded once per process, under a name of its own.

    What a script of a phase imports from its own folder: `schemes = sibling(__file__, "schemes")`.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = Path(file).resolve().with_name(f"{name}.py")
    return sys.modules.get(_name_of(path)) or load_module(path)


def _name_of(path: Path) -> str:
    parts = "_".join(["_loaded", *path.resolve().with_suffix("").parts[-3:]])
    return re.sub(r"\W", "_", parts)

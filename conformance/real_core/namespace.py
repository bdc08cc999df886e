"""A private world of modules: the core of one release runs in it, several of them in one process.

Promises: `sys.modules`, `sys.path` and `sys.meta_path` are left as they were, so that an installed
`vllm` and any number of releases live side by side. A module of the core gets an `__import__` of
its own: what `REAL` names is read from the archive, the standard library and `LIBRARIES` come as
they are, and everything else is a `Stub` (`stand_ins.py`), installed or not. No thread, no process,
no file written: it runs in a browser's Python too.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from conformance.real_core.archive import Archive, ArchiveError
from conformance.real_core.stand_ins import Stub

REAL = (
    "vllm.v1.core",
    "vllm.v1.request",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.outputs",
    "vllm.v1.engine",
    "vllm.v1.metrics.stats",
    "vllm.v1.structured_output.request",
    "vllm.utils.math_utils",
)
"""Modules, and packages with all below them, that are the release's own code."""

LIBRARIES = ("numpy", "typing_extensions")
"""Packages that the core really uses."""


class LoadError(Exception):
    """A release's core did not load; the message names the release, the module and the cause."""


class Namespace:
    """The modules of one release."""

    def __init__(
        self,
        archive: Archive,
        version: str,
        answers: Mapping[str, Mapping[str, Any]],
        real: Sequence[str] = REAL,
    ) -> None:
        """`real` are the modules that come from the archive."""
        self.real = tuple(real)
        self.archive, self.version, self.answers = archive, version, answers
        self.modules: dict[str, types.ModuleType] = {}
        self._loading = 0
        """How many module bodies are running: only they may import a name nobody answers for."""
        self._sources: dict[str, tuple[str, str, bool] | None] = {}
        self._builtins = {**vars(builtins), "__import__": self._import}

    def load(self, name: str) -> types.ModuleType:
        """The module of that name, as the core itself would import it.

        Raises:
            LoadError: the archive has no such module, or its body failed.
        """
        return self._module(name)

    @property
    def is_loading(self) -> bool:
        """Whether a module's body is running, rather than a function of the core."""
        return self._loading > 0

    @property
    def files(self) -> list[str]:
        """The files that were read, below the archive's root: what a copy of it needs."""
        return [found[0] for found in self._sources.values() if found]

    @property
    def text(self) -> str:
        """Their text."""
        return "".join(found[1] for found in self._sources.values() if found)

    # ------------------------------------------------------------------ the import statement

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        """What an import statement of the core calls (the protocol of `builtins.__import__`)."""
        if level:
            package = str((globals or {}).get("__package__", ""))
            base = package.rsplit(".", level - 1)[0] if level > 1 else package
            name = f"{base}.{name}" if name else base
        top = name.partition(".")[0]
        if top in LIBRARIES or top in sys.stdlib_module_names:
            return _library(name, fromlist)
        module = self._module(name)
        if not fromlist:
            return self._module(top)
        for attribute in fromlist:
            below = f"{name}.{attribute}"
            if below in self.answers or self._is_real(below):
                self._module(below)
        return module

    def _module(self, name: str) -> types.ModuleType:
        if name in self.modules:
            return self.modules[name]
        parent, _, last = name.rpartition(".")
        holder = self._module(parent) if parent else None
        if name not in self.modules:  # the parent may have imported it
            if self._is_real(name):
                self._execute(name)
            else:
                self.modules[name] = Stub(name, self, self.answers.get(name, {}))
        if holder is not None:
            setattr(holder, last, self.modules[name])
        return self.modules[name]

    def _is_real(self, name: str) -> bool:
        inside = any(name == real or name.startswith(real + ".") for real in self.real)
        return inside and self._source(name) is not None

    def _source(self, name: str) -> tuple[str, str, bool] | None:
        """(path, text, whether it is a package) of a module."""
        if name not in self._sources:
            self._sources[name] = None
            base = name.replace(".", "/")
            for path, is_package in ((f"{base}.py", False), (f"{base}/__init__.py", True)):
                if (text := self.archive.read(path)) is not None:
                    self._sources[name] = path, text, is_package
        return self._sources[name]

    def _execute(self, name: str) -> None:
        """Run a module's body in this namespace."""
        found = self._source(name)
        assert found is not None
        path, text, is_package = found
        # Not its public name: an installed vLLM may have a module of that name. While the body
        # runs, dataclasses look their annotations up in `sys.modules` by it.
        module = types.ModuleType(f"vllm_{self.version.replace('.', '_')}{name[len('vllm') :]}")
        module.__dict__.update(
            __builtins__=self._builtins,
            __file__=f"{self.archive.name}/{path}",
            __package__=name if is_package else name.rpartition(".")[0],
        )
        if is_package:
            module.__path__ = []
        self.modules[name] = module
        self._loading += 1
        sys.modules[module.__name__] = module
        try:
            exec(compile(text, f"{self.archive.name}/{path}", "exec"), module.__dict__)
        except Exception as error:
            del self.modules[name]
            if isinstance(error, (LoadError, ArchiveError)):
                raise
            raise LoadError(f"vLLM {self.version}: {path} does not load: {error}") from error
        finally:
            self._loading -= 1
            del sys.modules[module.__name__]


def _library(name: str, fromlist: Sequence[str] | None) -> types.ModuleType:
    """A module of the standard library or of `LIBRARIES`, as an import statement has it."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in LIBRARIES:
            raise
        raise LoadError(f"{error.name} is not installed: pip install {error.name}") from error
    if fromlist:
        for attribute in fromlist:
            if hasattr(module, "__path__") and not hasattr(module, attribute):
                importlib.import_module(f"{name}.{attribute}")
        return module
    return importlib.import_module(name.partition(".")[0])

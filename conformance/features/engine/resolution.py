"""Which platform the pin resolves to, with packages installed for the purpose, from its own code.

`vllm/platforms/__init__.py:212` `resolve_current_platform_cls_qualname` and
`vllm/plugins/__init__.py:28` `load_plugins_by_group` are taken out of the pinned source and run
alone: which built-in says that it is there is what a case says, the entry points are real ones of a
folder on the path. `python -m conformance.features.engine.resolution` writes the recording of lab
17-01; it needs `upstream/`.
"""

from __future__ import annotations

import ast
import gzip
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import invalidate_caches
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conformance.features.engine.auto_dtype import LAB
from conformance.real_core.places import tree_of

KEPT = LAB / "recordings" / "resolution.jsonl.gz"
GROUP = "vllm.platform_plugins"
MODULE = "resolution_plugins"
PLUGINS = """
def there():
    return "vendor.There"
def also():
    return "vendor.Also"
def absent():
    return None
def fails():
    raise OSError("no driver")
"""

Points = dict[str, str]

CASES: dict[str, tuple[list[str], list[Points], list[str] | None]] = {
    "a CPU wheel": (["cpu"], [], None),
    "a CUDA wheel without a GPU": ([], [], None),
    "a plugin on a GPU": (["cuda"], [{"vendor": "there"}], None),
    "two plugins": (["cpu"], [{"vendor": "there"}, {"other": "also"}], None),
    "a plugin called cpu": (["cpu"], [{"cpu": "there"}], None),
    "a plugin that fails": (["cpu"], [{"vendor": "fails"}], None),
    "a plugin that does not import": (["cpu"], [{"vendor": "nowhere"}], None),
    "a plugin without its device": (["cpu"], [{"vendor": "absent"}], None),
    "two plugins, one allowed": (["cpu"], [{"vendor": "there"}, {"other": "also"}], ["other"]),
    "a plugin, none allowed": (["cpu"], [{"vendor": "there"}], []),
    "two built-ins": (["cpu", "cuda"], [], None),
}
"""What is there: built-ins, the entry points of each package, and the names in `VLLM_PLUGINS`."""


class _Logger:
    """Notes every line that is not for debugging."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str, *told: Any) -> None:
        self.lines.append(text % told)

    exception = warning = info

    def debug(self, text: str, *told: Any) -> None:
        """Off by default at the pin."""


def _function(path: str, name: str, names: dict[str, Any]) -> Any:
    """One function of the pinned source, over `names`."""
    tree = ast.parse((tree_of("0.22.1") / path).read_text(encoding="utf-8"))
    (found,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([future, found], []))
    exec(compile(module, path, "exec"), names)
    return names[name]


def resolved(there: list[str], packages: list[Points], allowed: list[str] | None) -> dict[str, Any]:
    """The class's path or the error, and the lines of the log that name a plugin."""
    logger = _Logger()
    load = _function(
        "vllm/plugins/__init__.py", "load_plugins_by_group",
        {
            "envs": SimpleNamespace(VLLM_PLUGINS=allowed), "logger": logger, "Callable": Callable,
            "DEFAULT_PLUGINS_GROUP": "vllm.general_plugins", "Any": Any,
        },
    )  # fmt: skip

    def probe(name: str) -> Any:
        return lambda: f"built-in.{name}" if name in there else None

    resolve = _function(
        "vllm/platforms/__init__.py", "resolve_current_platform_cls_qualname",
        {
            "load_plugins_by_group": load, "PLATFORM_PLUGINS_GROUP": GROUP, "chain": chain,
            "builtin_platform_plugins": {name: probe(name) for name in ("cuda", "cpu")},
            "logger": logger,
        },
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{MODULE}.py").write_text(PLUGINS, encoding="utf-8")
        for number, points in enumerate(packages):
            info = Path(folder, f"package{number}-1.0.dist-info")
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: package{number}\nVersion: 1.0\n", encoding="utf-8"
            )
            lines = [f"{name} = {MODULE}:{function}" for name, function in points.items()]
            (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]), "utf-8")
        sys.path.insert(0, folder)
        invalidate_caches()
        try:
            came = {"platform": resolve()}
        except RuntimeError as error:
            came = {"error": str(error).partition(":")[0]}  # behind it a set's order
        finally:
            sys.path.remove(folder)
            sys.modules.pop(MODULE, None)
    said = [line for line in logger.lines if line.startswith(("Failed", "Platform plugin"))]
    return {**came, "said": said}


def cases() -> Iterator[dict[str, Any]]:
    """Every case, and what came of it."""
    for name, (there, packages, allowed) in CASES.items():
        told = {"case": name, "there": there, "packages": packages, "allowed": allowed}
        yield told | resolved(there, packages, allowed)


if __name__ == "__main__":
    with gzip.GzipFile(KEPT, "wb", mtime=0) as file:
        for case in cases():
            file.write(json.dumps(case, separators=(",", ":")).encode() + b"\n")

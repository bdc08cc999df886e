"""The licences of what a site with a runtime serves, as texts beside it."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

from course.site.play_lock import BUNDLER, EDITOR, NUMPY, PYODIDE, TOOLS

_MPL = "pathspec-1.1.1-py3-none-any.whl"
_PSF = "typing_extensions-4.15.0-py3-none-any.whl"
FROM_CARRIER = (_MPL, _PSF)
"""Wheels beside numpy's that hold the full texts of two licences whose own archives do not."""


def write(into: Path, packed: dict[str, Path], wheels: dict[str, bytes]) -> None:
    """Write `index.txt`, the list, and a text per component.

    Args:
        packed: archives of npm, by name.
        wheels: wheels, by the name of their pin.
    """
    into.mkdir()
    rows = [
        ("Pyodide", PYODIDE.version, "MPL-2.0", "https://github.com/pyodide/pyodide",
         _save(into, "pyodide", _of_wheel(wheels[_MPL]))),
        ("CPython, its standard library", "3.14", "PSF-2.0", "https://github.com/python/cpython",
         _save(into, "python", _of_wheel(wheels[_PSF]))),
        ("numpy", NUMPY.version, "BSD-3-Clause and others, all in the text",
         "https://github.com/numpy/numpy", _save(into, "numpy", _of_wheel(wheels[NUMPY.name]))),
    ]  # fmt: skip
    for pin in TOOLS:
        text = _save(into, pin.name, _of_wheel(wheels[pin.name]))
        rows.append((pin.name, pin.version, "see the text", "its page in the package index", text))
    for pin in EDITOR:
        text = _save(into, pin.name.removeprefix("@").replace("/", "-"), _of_npm(packed[pin.name]))
        rows.append((pin.name, pin.version, "MIT", "its page in npm", text))
    lines = [
        "What the pages of this site load to run Python, and its licences.",
        "",
        "The source of each, in the form its authors prefer for changing it, is at the address",
        "named. pyodide.asm.wasm and pyodide.asm.mjs are compiled from Pyodide, CPython and the C",
        "libraries these name; nothing of them was changed here. numpy lacks its tests, headers",
        "and docstrings, PyYAML its part in C. Python modules are served compiled. The editor is",
        f"bundled and made smaller by esbuild {BUNDLER.version}. The course's own files are under",
        "Apache-2.0.",
        "",
    ]
    for name, version, licence, source, text in rows:
        lines += [f"{name} {version}", f"    licence: {licence} ({text})", f"    source:  {source}"]
    (into / "index.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _save(into: Path, name: str, text: str) -> str:
    file = f"{name}.txt"
    (into / file).write_text(text, encoding="utf-8")
    return file


def _of_wheel(wheel: bytes) -> str:
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        names = [n for n in archive.namelist() if ".dist-info/" in n and _is_licence(n)]
        return _joined({n.partition("/")[2]: archive.read(n) for n in sorted(names)})


def _of_npm(path: Path) -> str:
    texts = {}
    with tarfile.open(path) as tar:
        for member in tar.getmembers():
            held = tar.extractfile(member) if member.isfile() else None
            if held is not None and member.name.count("/") == 1 and _is_licence(member.name):
                texts[member.name.partition("/")[2]] = held.read()
    return _joined(texts)


def _is_licence(name: str) -> bool:
    return name.rpartition("/")[2].upper().startswith(("LICENSE", "LICENCE", "COPYING", "AUTHORS"))


def _joined(texts: dict[str, bytes]) -> str:
    if not texts:
        raise ValueError("a shipped archive holds no licence: need at least one")
    parts = [f"{name}\n\n{text.decode('utf-8', 'replace')}" for name, text in texts.items()]
    return "\n\n".join(parts)

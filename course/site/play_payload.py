"""The course as the pages' Python sees it: archives and a catalogue, put into a site.

Promises: everything has its content's hash in its name, but `play/index.js`, which pages ask for
with a hash; a first run loads the runtime, the engine and one lab; every other file of the course
that a lab, a page's block or a module may open stands in the catalogue and is fetched when it is
opened. Without a runtime in build/play a site is left as it is.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from course.learning.labs import Lab, find_labs
from course.site import play, play_excepted, real_payload

ROOT = "/course"
"""Where the worker puts the course."""
ENGINE = ("mini_vllm/", "labkit/", "course/play/", "course/learning/")
"""Folders whose Python files come with the first run."""
APART = (
    "mini_vllm/distributed/", "mini_vllm/ec_transfer/", "mini_vllm/entrypoints/",
    "mini_vllm/kv_transfer/", "mini_vllm/multimodal/", "mini_vllm/releases/",
    "mini_vllm/simulate/", "course/learning/asking.py", "course/learning/exchange.py",
    "course/learning/exercises.py", "course/learning/interview.py", "course/learning/learner.py",
)  # fmt: skip
"""Parts of the engine that few labs use, and what only a terminal does: fetched on import."""
FILES = (
    "conftest.py", "pyproject.toml", "course/__init__.py", "course/files.py",
    "conformance/__init__.py", "conformance/parts.py", "conformance/recording.py",
    "mini_vllm/entrypoints/__init__.py",
)  # fmt: skip
OPENED = ("phase-*", "models", "conformance", "mini_vllm", "course", "labkit", "benchmarks")
"""Folders whose other files are in the catalogue."""
ALSO_OPENED = ("LICENSE",)
NEVER = {".md", ".svg", ".png", ".pyc", ".html", ".css", ".js"}
NOT_IN = {"__pycache__", "scratch", "testdata", "node_modules"}

ENVIRONMENT = {
    "HOME": "/home/pyodide",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # as `course docs check` runs the blocks of a page
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_ADDOPTS": "",
    "NO_COLOR": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def install(root: Path, site: Path) -> bool:
    """Put `play/` into a finished site and have its pages load it; False without a runtime."""
    if play.problem(root):
        return False
    version = write(root, site / "play")
    for page in sorted(site.rglob("*.html")):
        if page.name != "toc.html":
            link(page, "../" * (len(page.relative_to(site).parts) - 1), version)
    return True


def link(page: Path, up: str, version: str) -> None:
    """Have a page load `play/index.js` before the scripts of the book that may use it."""
    text = page.read_text(encoding="utf-8")
    script = f'<script src="{up}play/index.js?v={version}"></script>\n'
    place = re.search(r"[ \t]*<!-- Custom JS scripts -->", text) or re.search(r"</body>", text)
    if place:
        page.write_text(text[: place.start()] + script + text[place.start() :], encoding="utf-8")


def write(root: Path, target: Path) -> str:
    """Write everything a page needs to run Python into `target`; the hash of its `index.js`."""
    target.mkdir(parents=True, exist_ok=True)
    labs = find_labs(root)
    runtime = _runtime(play.folder(root), target)
    opened = _write_opened(root, target)
    compiled = compiled_files(root, labs)
    own = [each for each in compiled if not each[0].startswith("phase-")]
    catalogue = json.dumps(opened, separators=(",", ":")).encode()
    config: dict[str, Any] = {
        **runtime,
        "worker": _named(target, "worker.js", (root / "book/play/worker.js").read_bytes()),
        "course": _archive(target, "course", [*engine_files(root), *own]),
        "catalog": {
            "file": _named(target, "catalog.json", catalogue), "bytes": len(catalogue)
        },
        "labs": {lab.id: _lab(root, lab, target, compiled) for lab in labs},
        "models": _models(opened),
        "pages": play_excepted.BLOCKS,
        "env": ENVIRONMENT,
    }  # fmt: skip
    client = (root / "book/play/client.js").read_text(encoding="utf-8")
    script = (
        f'"use strict";\n'
        f"window.COURSE_PLAY = {json.dumps(config, separators=(',', ':'))};\n"
        "COURSE_PLAY.base = new URL('./', document.currentScript.src).href;\n" + client
    )
    (target / "index.js").write_text(script, encoding="utf-8")
    return _hash(script.encode())


def _runtime(made: Path, target: Path) -> dict[str, Any]:
    """Copy the runtime; what `index.js` says of it."""
    core = {name: (made / "core" / name).read_bytes() for name in play.CORE}
    core[play.STDLIB] = play.zipped([])  # Python would unpack it, slower than a browser
    folder = f"python-{_hash(b''.join(core.values()))}"
    (target / folder).mkdir(exist_ok=True)
    for name, data in core.items():
        (target / folder / name).write_bytes(data)
    shutil.copytree(made / "licences", target / "licences", dirs_exist_ok=True)
    runtime = {
        "folder": f"{folder}/",
        # pyodide.mjs is imported, not fetched, and so is pyodide.asm.mjs: nobody counts those.
        "files": {name: len(core[name]) for name in play.CORE if not name.endswith(".mjs")},
        "library": _archive(target, "library", _files_of(made / "core" / play.STDLIB)),
        "numpy": _archive(target, "numpy", _files_of(made / "numpy.zip")),
        "tools": _archive(target, "tools", _files_of(made / "tools.zip")),
        "lock": play.LOCK,
    }
    editor = _named(target, "editor.mjs", (made / "editor.mjs").read_bytes())
    return {"runtime": runtime, "editor": editor}


def _lab(root: Path, lab: Lab, target: Path, compiled: list[tuple[str, bytes]]) -> dict[str, Any]:
    folder = lab.folder.relative_to(root).as_posix()
    files = [
        (path.relative_to(root).as_posix(), path.read_bytes())
        for path in _below(lab.folder)
        if path.suffix not in NEVER
    ]
    files += [each for each in compiled if each[0].startswith(f"{folder}/")]
    return {
        **_archive(target, f"labs/{lab.id}", files),
        "folder": folder,
        "native": play_excepted.LABS.get(lab.id, False),
        "skip": play_excepted.TESTS.get(lab.id, {}),
    }


def engine_files(root: Path) -> list[tuple[str, bytes]]:
    """The course's own Python files that come with the first run, by their paths."""
    return [(path, (root / path).read_bytes()) for path in sorted(_first(root))]


def compiled_files(root: Path, labs: Sequence[Lab]) -> list[tuple[str, bytes]]:
    """The bytecode of those files that every grading imports, and of each lab's tests."""
    script = (
        "import sys, conformance.parts, labkit, course.play.worker, course.learning.runner\n"
        "for module in list(sys.modules.values()):\n"
        "    print(getattr(module, '__file__', None))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.split("\n"))
    sources = [(name, data) for name, data in engine_files(root) if str(root / name) in imported]
    tests = [root / "conftest.py", *(lab.test_file for lab in labs)]
    sources += [(path.relative_to(root).as_posix(), path.read_bytes()) for path in tests]
    return play.bytecode(root, sources, ROOT)


def _first(root: Path) -> Iterator[str]:
    yield from (name for name in FILES if (root / name).is_file())
    for folder in ENGINE:
        for path in _below(root / folder):
            name = path.relative_to(root).as_posix()
            if path.suffix == ".py" and not _is_test(path) and not name.startswith(APART):
                yield name


def opened_files(root: Path) -> list[str]:
    """Paths of the files that are fetched when they are opened: all others that may be.

    Those of the labs too: a block of a page opens one without grading the lab.
    """
    first = set(_first(root))
    found = [name for name in ALSO_OPENED if (root / name).is_file()]
    for pattern in OPENED:
        for folder in sorted(root.glob(pattern)):
            for path in _below(folder):
                name = path.relative_to(root).as_posix()
                if (
                    path.suffix not in NEVER
                    and name not in first
                    and not (_is_test(path) and path.suffix == ".py")
                ):
                    found.append(name)
    return found


def _write_opened(root: Path, target: Path) -> dict[str, tuple[str, int]]:
    """Copy those files under their hashes; path -> (name, bytes)."""
    (target / "files").mkdir(exist_ok=True)
    real = real_payload.archives(root)
    contents = {name: (root / name).read_bytes() for name in opened_files(root)}
    contents |= {name: play.zipped(files) for name, files in real.items()}
    for name, text in real_payload.licences(real).items():
        (target / "licences" / name).write_text(text, encoding="utf-8")
    if real:
        with (target / "licences" / "index.txt").open("a", encoding="utf-8") as index:
            index.write(real_payload.index())
    told = {}
    for name, data in contents.items():
        file = f"files/{_hash(data)}{Path(name).suffix}.bin"
        (target / file).write_bytes(data)
        told[name] = (file, len(data))
    return told


def _models(opened: dict[str, tuple[str, int]]) -> dict[str, int]:
    """Bytes of each shipped model: what its first use loads."""
    sizes: dict[str, int] = {}
    for name, (_, size) in opened.items():
        parts = name.split("/")
        if parts[0] == "models" and len(parts) > 2:
            sizes[parts[1]] = sizes.get(parts[1], 0) + size
    return sizes


def _below(folder: Path) -> Iterator[Path]:
    """The files of a folder and its folders, less what is hidden or only passes by."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in NOT_IN:
            continue
        if path.is_dir():
            yield from _below(path)
        elif path.is_file():
            yield path


def _is_test(path: Path) -> bool:
    return path.name.startswith("test_") or path.name == "conftest.py" or "tests" in path.parts


def _files_of(archive: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as held:
        return [(name, held.read(name)) for name in held.namelist()]


def _archive(target: Path, name: str, files: list[tuple[str, bytes]]) -> dict[str, Any]:
    """Pack `files` into one stream, which a browser inflates at once and beside all else."""
    return _file(target, f"{name}.bin", packed(files))


def packed(files: list[tuple[str, bytes]]) -> bytes:
    """A gzip stream of a zip archive of `files` as they are; the same files, the same bytes."""
    stored = play.zipped(files, zipfile.ZIP_STORED)
    return gzip.compress(stored, compresslevel=9, mtime=0)


def _file(target: Path, name: str, data: bytes) -> dict[str, Any]:
    return {"file": _named(target, name, data), "bytes": len(data)}


def _named(target: Path, name: str, data: bytes) -> str:
    """Write `data` with its hash in the name, before the last dot; the name."""
    stem, _, kind = name.rpartition(".")
    hashed = f"{stem}-{_hash(data)}.{kind}"
    (target / hashed).parent.mkdir(parents=True, exist_ok=True)
    (target / hashed).write_bytes(data)
    return hashed


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]

"""What runs Python in the pages: fetched once, checked, and packed into build/play.

`course book runtime` makes it: Pyodide and the editor from npm, numpy and pytest from the package
index, each archive of the version and the hash in `play_lock`. Promises: what is there is whole or
counts as nothing; a second call does nothing; nothing of it is in the repository; a failure says
what to do. `course/site/play_payload.py` puts it into a site.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from course.learning.labs import CourseError
from course.site import play_licences
from course.site.play_lock import BUNDLER, CARRIED, CARRIER, EDITOR, NUMPY, PYODIDE, TOOLS, Pin

RECIPE = 1
"""Counts the ways this file packed the same parts: another number fetches anew."""
WHOLE = "whole.json"
STDLIB = "python_stdlib.zip"
CORE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", STDLIB)
PACKAGES = "/lib/python3.14/site-packages"
"""Where the worker unpacks numpy and pytest."""
LOCK = {
    "info": {
        "abi_version": "2026_0",
        "arch": "wasm32",
        "platform": "emscripten_5_0_3",
        "python": "3.14.0",
    },
    "packages": {},
}
"""Of Pyodide's list of packages, what it needs when none is loaded by it."""
TIME_LIMIT = 900.0
"""Seconds one download, or the bundling, may take."""
ARCHIVE_DATE = (2000, 1, 1, 0, 0, 0)
"""Of every file in an archive of ours: the same content is the same bytes."""

COLOURS = {
    "__init__": "", "formatters/__init__": "", "formatters/terminal": "TerminalFormatter",
    "lexer": "Lexer", "lexers/__init__": "", "lexers/diff": "DiffLexer",
    "lexers/python": "PythonLexer",
}  # fmt: skip
"""Modules of pygments, each with the name that pytest imports of it to colour a terminal. A page
has none, so these names are all there is of it: a tenth of what the import of pytest takes."""
UNSAID = ("numpy/_core/_add_newdocs.py", "numpy/_core/_add_newdocs_scalars.py")
"""Modules of numpy that only give docstrings to what is compiled: they are empty here."""

Say = Callable[[str], None]
Run = Callable[[Sequence[str], Path], str]


def folder(root: Path) -> Path:
    """Where the runtime lies."""
    return root / "build" / "play"


def recipe(root: Path) -> str:
    """Names what `make` would make now."""
    told = repr((RECIPE, PYODIDE, BUNDLER, EDITOR, CARRIER, NUMPY, TOOLS, COLOURS, UNSAID))
    scripts = [(root / "book/play" / name).read_bytes() for name in ("editor.js", "compile.mjs")]
    return _digest(b"".join([told.encode(), *scripts]))


def problem(root: Path) -> str:
    """Why the runtime in build/play cannot be used; "" when it is whole and of these versions."""
    where = folder(root)
    try:
        told = json.loads((where / WHOLE).read_text(encoding="utf-8"))
        files, made = dict(told["files"]), told["recipe"]
    except FileNotFoundError:
        return "it is not there"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{WHOLE} cannot be read ({error})"
    if made != recipe(root):
        return "it was made of other versions"
    for name, digest in files.items():
        path = where / name
        if not path.is_file() or _digest(path.read_bytes()) != digest:
            return f"{name} is missing or was changed"
    return ""


def make(root: Path, say: Say, run: Run | None = None) -> bool:
    """Put the runtime into build/play; False when it is there already.

    Args:
        say: hears what is done.
        run: runs a command in a folder and returns its output; for tests.

    Raises:
        CourseError: npm, Node or the network is missing, or an archive is not the pinned one.
    """
    if not (why := problem(root)):
        return False
    run = run or _run
    say(f"What runs Python in the pages: {why}.")
    npm = _needed("npm", "it comes with Node.js, https://nodejs.org")
    node = _needed("node", "https://nodejs.org")
    where = folder(root)
    where.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="play-", dir=where.parent) as scratch:
        work, new = Path(scratch) / "work", Path(scratch) / "new"
        for each in (work, new):
            each.mkdir()
        say("From npm: Pyodide, CodeMirror and what bundles it ...")
        packed = {pin.name: _npm(npm, pin, work, run) for pin in _from_npm(npm, work, run)}
        say("From the package index: numpy for Pyodide, pytest ...")
        wheels = _wheels(work, run)
        _core(packed[PYODIDE.name], new / "core")
        (work / "numpy.zip").write_bytes(zipped(numpy_files(wheels[NUMPY.name])))
        (work / "tools.zip").write_bytes(zipped(tool_files(wheels)))
        say("Compiling their Python files ...")
        _compile(root, node, new, work, run)
        say("Bundling the editor ...")
        _bundle(root, node, packed, work, new / "editor.mjs", run)
        play_licences.write(new / "licences", packed, wheels)
        files = {
            path.relative_to(new).as_posix(): _digest(path.read_bytes())
            for path in sorted(new.rglob("*"))
            if path.is_file()
        }
        told = {"recipe": recipe(root), "files": files}
        (new / WHOLE).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(where, ignore_errors=True)
        new.rename(where)
    return True


# ------------------------------------------------------------------ fetching


def _needed(program: str, whence: str) -> str:
    found = shutil.which(program)
    if not found:
        raise CourseError(
            f"{program} is not installed: {whence}. Without it the site is built as pages to read."
        )
    return found


def _run(command: Sequence[str], cwd: Path) -> str:
    """Run a step; its output.

    Raises:
        CourseError: it failed or took too long; its last lines stand in the message.
    """
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            list(command), cwd=cwd, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CourseError(f"{name}: {error}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-8:]
        last = "\n".join(line[:300] for line in said)
        raise CourseError(
            f"{name} ended with {done.returncode}; is there a network, and does it reach the "
            f"package indexes?\n{last}"
        )
    return done.stdout


def _from_npm(npm: str, work: Path, run: Run) -> tuple[Pin, ...]:
    """The archives of npm, fetched into `work`."""
    pins = (PYODIDE, BUNDLER, *EDITOR)
    specs = [f"{pin.name}@{pin.version}" for pin in pins]
    run([npm, "pack", "--silent", "--pack-destination", str(work), *specs], work)
    return pins


def _npm(npm: str, pin: Pin, work: Path, run: Run) -> Path:
    path = work / pin.npm
    data = _bytes(path, pin)
    digest = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    _same(pin, digest)
    return path


def _bytes(path: Path, pin: Pin) -> bytes:
    if not path.is_file():
        raise CourseError(f"The download of {pin.name} {pin.version} brought no {path.name}.")
    return path.read_bytes()


def _same(pin: Pin, digest: str) -> None:
    if digest != pin.digest:
        raise CourseError(
            f"The archive of {pin.name} {pin.version} has another digest than the pin:\n"
            f"expected {pin.digest}\nfound    {digest}"
        )


def pip_command(work: Path, run: Run) -> list[str]:
    """How pip is called here: this environment's, uv's, or that of a new environment."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    own = work / "pip"
    run([sys.executable, "-m", "venv", str(own)], work)
    return [str(own / ("Scripts/python.exe" if os.name == "nt" else "bin/python")), "-m", "pip"]


def _wheels(work: Path, run: Run) -> dict[str, bytes]:
    """Wheels by the name of their pin; also those that `play_licences` takes a text from."""
    pip = pip_command(work, run)
    found: dict[str, bytes] = {}
    # Each for an interpreter that it allows; none of them is for the one that runs this.
    for pins, python in (((CARRIER,), "3.11"), (TOOLS, "3.14")):
        into = work / python
        into.mkdir()
        wanted = into / "requirements.txt"
        lines = [f"{pin.name}=={pin.version} --hash=sha256:{pin.digest}" for pin in pins]
        wanted.write_text("\n".join(lines) + "\n", encoding="utf-8")
        run(
            [
                *pip, "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                "--require-hashes", "--only-binary=:all:", "--python-version", python,
                "--platform", "manylinux_2_17_x86_64", "--dest", str(into), "-r", str(wanted),
            ],
            work,
        )  # fmt: skip
        for pin in pins:
            start = pin.name.replace("-", "_").lower() + f"-{pin.version}-"
            path = next((p for p in into.glob("*.whl") if p.name.lower().startswith(start)), None)
            data = _bytes(path or into / f"{start}*.whl", pin)
            _same(pin, _digest(data))
            found[pin.name] = data
    with zipfile.ZipFile(io.BytesIO(found.pop(CARRIER.name))) as carrier:
        for name in (NUMPY.name, *play_licences.FROM_CARRIER):
            found[name] = carrier.read(CARRIED + name)
    _same(NUMPY, _digest(found[NUMPY.name]))
    return found


# ------------------------------------------------------------------ packing


def zipped(
    files: Iterator[tuple[str, bytes]] | Sequence[tuple[str, bytes]],
    kind: int = zipfile.ZIP_DEFLATED,
) -> bytes:
    """An archive of (name, content), deflated or as they are; the same files, the same bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", kind, compresslevel=9) as archive:
        for name, data in sorted(files):
            info = zipfile.ZipInfo(name, ARCHIVE_DATE)
            info.compress_type = kind
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    return out.getvalue()


def numpy_files(wheel: bytes) -> Iterator[tuple[str, bytes]]:
    """numpy without its tests, its headers, what only compiles other packages and docstrings."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        for name in archive.namelist():
            parts = name.split("/")
            if parts[0] != "numpy" or {"tests", "f2py", "_pyinstaller", "include"} & set(parts):
                continue
            if name.endswith((".py", ".so")):
                yield name, b"" if name in UNSAID else archive.read(name)


def tool_files(wheels: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """pytest with what it needs, and PyYAML as far as it is Python."""
    for name, wanted in COLOURS.items():
        yield f"pygments/{name}.py", f"{wanted} = None\n".encode() if wanted else b""
    for pin in TOOLS:
        with zipfile.ZipFile(io.BytesIO(wheels[pin.name])) as archive:
            for name in archive.namelist():
                if name.endswith(".py"):
                    yield name, archive.read(name)


def _core(archive: Path, into: Path) -> None:
    """Pyodide's own files, of the archive of npm."""
    into.mkdir()
    with tarfile.open(archive) as tar:
        for name in CORE:
            held = tar.extractfile(f"package/{name}")
            assert held is not None
            (into / name).write_bytes(held.read())


def _compile(root: Path, node: str, new: Path, work: Path, run: Run) -> None:
    """Archives of compiled modules, by Pyodide's own compiler, in the place of the sources.

    The standard library and numpy lose their docstrings, which are a third of their bytes.
    """
    library = new / "core" / STDLIB
    sources = {
        work / "numpy.zip": (new / "numpy.zip", PACKAGES, 2),
        work / "tools.zip": (new / "tools.zip", PACKAGES, 0),  # pytest means its assertions
        library: (work / "compiled.zip", "/lib/python314.zip", 2),
    }
    archives = [
        {"from": str(source), "to": str(to), "place": place, "optimize": optimize, "beside": False}
        for source, (to, place, optimize) in sources.items()
    ]
    _compile_archives(root, node, new / "core", archives, work, run)
    (work / "compiled.zip").replace(library)


def _compile_archives(
    root: Path, node: str, core: Path, archives: list[dict[str, Any]], work: Path, run: Run
) -> None:
    tools = core.parent / "tools.zip"
    job = {
        "core": f"{core}{os.sep}", "lock": LOCK, "date": ARCHIVE_DATE, "archives": archives,
        "tools": str(tools) if tools.is_file() else "", "packages": PACKAGES,
    }  # fmt: skip
    (work / "job.json").write_text(json.dumps(job), encoding="utf-8")
    run([node, str(root / "book/play/compile.mjs"), str(work / "job.json")], work)
    for each in archives:
        if not Path(each["to"]).is_file():
            raise CourseError(f"{Path(each['to']).name} was not compiled.")


def bytecode(
    root: Path, sources: Sequence[tuple[str, bytes]], place: str, run: Run | None = None
) -> list[tuple[str, bytes]]:
    """The compiled modules of `sources`, each under its name in the `__pycache__` beside it.

    A compiled module names the hash of its source: what is changed in the page is compiled anew.
    Tests are compiled as pytest rewrites them, and name their source's time and size instead.
    Without Node there are none, and a page compiles what it imports.

    Args:
        place: the folder of the page's file system that the sources lie in.
        run: runs a command in a folder and returns its output; for tests.

    Raises:
        CourseError: Node or the compiler failed.
    """
    if not (node := shutil.which("node")):
        return []
    with tempfile.TemporaryDirectory(prefix="bytecode-") as scratch:
        work = Path(scratch)
        source, made = work / "sources.zip", work / "compiled.zip"
        source.write_bytes(zipped(sources))
        job = {
            "from": str(source), "to": str(made), "place": place, "optimize": 0, "beside": True
        }  # fmt: skip
        _compile_archives(root, node, folder(root) / "core", [job], work, run or _run)
        with zipfile.ZipFile(made) as archive:
            return [(name, archive.read(name)) for name in archive.namelist()]


def _bundle(
    root: Path, node: str, packed: dict[str, Path], work: Path, out: Path, run: Run
) -> None:
    """One module of `book/play/editor.js` and all it imports."""
    modules = work / "node_modules"
    for pin in (BUNDLER, *EDITOR):
        with tarfile.open(packed[pin.name]) as tar:
            unpacked = work / "unpacked"
            tar.extractall(unpacked, filter="data")
            (modules / pin.name).parent.mkdir(parents=True, exist_ok=True)
            (unpacked / "package").rename(modules / pin.name)
    shutil.copyfile(root / "book/play/editor.js", work / "editor.js")
    run(
        [
            node, str(modules / "esbuild-wasm" / "bin" / "esbuild"), "editor.js", "--bundle",
            "--minify", "--format=esm", "--target=es2022", "--legal-comments=none",
            f"--outfile={out}", "--log-level=warning",
        ],
        work,
    )  # fmt: skip
    if not out.is_file() or b"createEditor" not in out.read_bytes():
        raise CourseError("The editor could not be bundled: what came out has no createEditor.")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

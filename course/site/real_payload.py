"""vLLM's own scheduler core as the pages load it: a small zip per release that lies here.

Promises: what is packed is a release's own files, unchanged, with its licence and a note of what
they are; without a release's tree, or without what its core imports, the site simply has none.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from pathlib import Path

from conformance import workloads
from conformance.real_core import RealCore, present, why_not
from conformance.real_core.namespace import LIBRARIES
from conformance.real_core.places import PIN, tree_of
from conformance.recorders import combined

FOLDER = "build/real"
"""Where a page's Python finds the zips, below the course's root."""
LIBRARY_ZIP = f"{FOLDER}/libraries.zip"
WORKLOADS = range(9)
"""Seeds of the workloads that are decided before a core is packed: one of each profile."""
NOTE = """Files of vLLM {version}, unchanged, under the Apache License 2.0 (the text is LICENSE).
Copyright contributors to the vLLM project. Source: https://github.com/vllm-project/vllm,
tag v{version}. They are the part of the release that schedules and keeps the KV cache.
"""
Files = list[tuple[str, bytes]]


def release_zip(version: str) -> str:
    """The path of a release's zip, below the course's root."""
    return f"{FOLDER}/vllm-{version}.zip"


def offered(root: Path) -> list[str]:
    """The releases that lie here, the oldest first; none without the pinned tree or a library."""
    return [] if why_not(PIN, root) else present(root)


def archives(root: Path) -> dict[str, Files]:
    """The files of every zip, by its path: the libraries, and each release that lies here.

    Raises:
        ArchiveError, LoadError: a release that lies here is damaged or does not load.
    """
    found = {release_zip(v): core_files(tree_of(v, root)) for v in offered(root)}
    return {**found, LIBRARY_ZIP: library_files()} if found else {}


def core_files(tree: Path) -> Files:
    """The files of a release that its core reads while it decides, and its licence."""
    core = RealCore(tree)
    for seed in WORKLOADS:
        with contextlib.suppress(combined.RefusedError):  # a fault of its own: some releases stop
            combined.run(workloads.generate(seed), core)
    names = sorted({*core.namespace.files, "vllm/_version.py", "LICENSE"})
    note = NOTE.format(version=core.version).encode()
    return [("NOTICE", note), *((name, (tree / name).read_bytes()) for name in names)]


def library_files() -> Files:
    """What the core imports beside numpy, each with its licence."""
    files: Files = []
    for name in LIBRARIES:
        if name == "numpy":  # the runtime has it
            continue
        for path in importlib.metadata.files(name) or ():
            is_licence = ".dist-info/" in str(path) and path.name.upper().startswith("LICEN")
            if path.suffix == ".py" or is_licence:
                files.append((str(path), Path(str(path.locate())).read_bytes()))
    return files


def licences(files: dict[str, Files]) -> dict[str, str]:
    """The texts that `play/licences` gets, by file name."""
    texts = {}
    for path, held in files.items():
        for name, data in held:
            base = name.rpartition("/")[2]
            if base.upper().startswith("LICEN"):
                package = "vllm" if path != LIBRARY_ZIP else name.partition("-")[0]
                texts[f"{package}.txt"] = data.decode("utf-8")
    return texts


def index() -> str:
    """What `play/licences/index.txt` says of them."""
    lines = [
        "vLLM, of each release in the pages the files that schedule, unchanged",
        "    licence: Apache-2.0 (vllm.txt)",
        "    source:  https://github.com/vllm-project/vllm",
    ]
    for name in LIBRARIES:
        if name != "numpy":
            lines += [
                f"{name} {importlib.metadata.version(name)}, which they import",
                f"    licence: see the text ({name}.txt)",
                "    source:  its page in the package index",
            ]
    return "\n".join(lines) + "\n"

"""A lab's plugin package, put where the real engine finds it without an installer."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path


def put_on_path(package: Path, into: Path, *others: Path) -> None:
    """Write a package's metadata and put its modules on the path of this process and its children.

    Args:
        package: the folder with `pyproject.toml` and the modules.
        into: a folder for the metadata; it is made.
        others: further folders for the path.
    """
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project.get("version", "0")
    folder = into / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{point} = {target}" for point, target in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    paths = [str(into), str(package), *map(str, others)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = paths

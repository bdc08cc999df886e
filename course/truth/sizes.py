"""Modules and functions of unusual length, for a person to look at.

    python -m course.truth.sizes

Nothing fails on it: a file is cut where its reader would cut it, and a commit that leaves a long
one says why.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULE_LINES = 400
FUNCTION_LINES = 45
FOLDERS = ("mini_vllm", "conformance", "course", "labkit", "benchmarks")


def unusual(root: Path) -> Iterator[tuple[int, str]]:
    """Lines and name of every long module and function below `root`, tests left out."""
    for path in sorted(p for folder in FOLDERS for p in (root / folder).rglob("*.py")):
        if "testdata" in path.parts or "tests" in path.parts or path.name.startswith("test_"):
            continue
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(root).as_posix()
        if (lines := len(text.splitlines())) > MODULE_LINES:
            yield lines, name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                lines -= len((ast.get_docstring(node, clean=False) or "").splitlines())
                if lines > FUNCTION_LINES:
                    yield lines, f"{name}, {node.name}"


def main() -> None:
    """Print them, the longest first."""
    for lines, name in sorted(unusual(ROOT), reverse=True):
        print(f"{lines:5}  {name}")


if __name__ == "__main__":
    main()

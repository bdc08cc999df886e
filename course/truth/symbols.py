"""Symbols of the pinned tree: where each is defined, and where its body ends."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path


@functools.lru_cache(maxsize=4096)
def lines_of(path: Path) -> tuple[str, ...]:
    """The lines of a file."""
    return tuple(path.read_text(encoding="utf-8", errors="replace").splitlines())


@functools.lru_cache(maxsize=4096)
def symbols(path: Path) -> dict[str, list[tuple[int, int]]]:
    """Every symbol of a Python file: dotted name to its (first line, last line), in file order.

    Functions, classes, methods, nested functions; module and class level names; attributes of
    instances (`Class.name` for `self.name = ...`, its first assignment in `__init__` first).
    """
    found: dict[str, list[tuple[int, int]]] = {}
    _collect(_tree(path).body, "", "", found)
    return found


@functools.lru_cache(maxsize=4096)
def _tree(path: Path) -> ast.Module:
    return ast.parse("\n".join(lines_of(path)))


@functools.lru_cache(maxsize=4096)
def decorated(path: Path) -> dict[int, int]:
    """The line of a definition to that of its first decorator."""
    return {
        node.lineno: node.decorator_list[0].lineno
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.decorator_list
    }


@functools.lru_cache(maxsize=4096)
def classes(path: Path) -> frozenset[int]:
    """The lines at which classes are defined."""
    return frozenset(n.lineno for n in ast.walk(_tree(path)) if isinstance(n, ast.ClassDef))


def _collect(
    body: list[ast.stmt], prefix: str, owner: str, found: dict[str, list[tuple[int, int]]]
) -> None:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}"
            found.setdefault(name, []).append((node.lineno, node.end_lineno or node.lineno))
            own = name if isinstance(node, ast.ClassDef) else owner
            _collect(node.body, f"{name}.", own, found)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target in _targets(node):
                extent = (node.lineno, node.end_lineno or node.lineno)
                if isinstance(target, ast.Name):
                    found.setdefault(f"{prefix}{target.id}", []).append(extent)
                elif (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id in ("self", "cls")
                    and owner
                ):
                    found.setdefault(f"{owner}.{target.attr}", []).append(extent)
        for inner in _blocks(node):
            _collect(inner, prefix, owner, found)


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[ast.expr]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The statement lists of if, for, while, with, try and match."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for name in ("body", "orelse", "finalbody"):
        inner = getattr(node, name, None)
        if isinstance(inner, list):
            yield inner
    for handler in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield handler.body


def lookup(table: dict[str, list[tuple[int, int]]], symbol: str) -> list[tuple[int, int]]:
    """Where `symbol` is defined; a name without its class is found where it is unique."""
    name = symbol.removesuffix("()").replace("::", ".")
    if name in table:
        return table[name]
    tails = [extents for dotted, extents in table.items() if dotted.endswith(f".{name}")]
    return tails[0] if len(tails) == 1 else []


def source_of(tree: Path, symbol: str) -> list[tuple[str, int, int]]:
    """Every place under `tree/vllm` that defines `symbol`: (path, first line, last line).

    Files are parsed only when they hold the last part of the name, so this stays quick.
    """
    name = symbol.removesuffix("()").rpartition(".")[2]
    found = []
    for path in sorted((tree / "vllm").rglob("*.py")):
        if not any(name in line for line in lines_of(path)):
            continue
        table = symbols(path)
        exact = table.get(symbol.removesuffix("()"))
        extents = exact or [
            extent
            for dotted, several in table.items()
            if dotted.endswith(f".{symbol}") and dotted.count(".") <= symbol.count(".") + 1
            for extent in several[:1]
        ]
        for first, last in extents[:1] if exact else extents:
            found.append((path.relative_to(tree).as_posix(), first, last))
    return found

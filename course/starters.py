"""Starters, generated: the solution with the bodies of what is the learner's taken out.

`lab.yaml` names those in `yours:`, each a function or `Class.method`. Promises: signature,
decorators and docstring are the solution's, the body is `raise NotImplementedError`, everything
else is copied to the letter, helpers marked private to an answer (`hidden:`) are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence


def generate(solution: str, yours: Sequence[str], hidden: Sequence[str] = ()) -> str:
    """The starter of a solution.

    Args:
        solution: source text.
        yours: names whose bodies the learner writes.
        hidden: names left out whole: helpers that would give an answer away.

    Raises:
        ValueError: a name that the solution does not define.
    """
    lines = solution.splitlines(keepends=True)
    found = definitions(solution)
    missing = [name for name in (*yours, *hidden) if name not in found]
    if missing:
        raise ValueError(f"the solution defines no {', '.join(missing)}")
    edits: list[tuple[int, int, list[str]]] = []
    for name in hidden:
        node = found[name]
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        end = node.end_lineno or first
        while end < len(lines) and not lines[end].strip():
            end += 1
        edits.append((first - 1, end, []))
    for name in yours:
        node = found[name]
        body = [s for s in node.body if not _is_docstring(s, node)]
        indent = " " * (node.col_offset + 4)
        start = body[0].lineno - 1 if body else node.end_lineno or 0
        documented = node.body[0] if len(body) < len(node.body) else None
        start = (documented.end_lineno or 0) if documented is not None else _after(node)
        edits.append((start, node.end_lineno or 0, [f"{indent}raise NotImplementedError\n"]))
    for start, end, new in sorted(edits, reverse=True):
        lines[start:end] = new
    return "".join(lines)


def definitions(source: str) -> dict[str, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef]:
    """Functions, classes and methods of a module by dotted name."""
    found: dict[str, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef] = {}

    def visit(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                found[prefix + node.name] = node
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(source).body, "")
    return found


def _is_docstring(statement: ast.stmt, node: ast.AST) -> bool:
    first = getattr(node, "body", [None])[0]
    return (
        statement is first
        and isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _after(node: ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) -> int:
    """Index of the line after the signature of a function without a docstring."""
    return node.body[0].lineno - 1

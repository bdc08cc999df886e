"""A lab's starter, made from its solution and what lab.yaml calls the learner's.

Promises: a function named in `yours` keeps its signature and docstring and raises
NotImplementedError instead of its body; a class named there keeps its docstring and what it
inherits; what `hidden` names is gone, with the imports that only it used; every other line is the
solution's, comments and layout included. So `course reset` needs no git, and selfcheck can compare.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from course.learning.labs import CourseError, Lab

Function = ast.FunctionDef | ast.AsyncFunctionDef


def starter_of(lab: Lab) -> str | None:
    """The text of `lab`'s starter as shipped; None where there is no solution to make it from.

    Raises:
        CourseError: lab.yaml does not hold, or names what solution.py does not define.
    """
    spec = lab.manifest
    try:
        return generate(lab.solution.read_text(encoding="utf-8"), spec.yours, spec.hidden)
    except FileNotFoundError:
        return None
    except (ValueError, SyntaxError) as error:
        raise CourseError(f"{lab.id}: no starter can be made: {error}") from None


def is_current(lab: Lab) -> bool:
    """Whether the file in the folder is the starter as shipped, whatever its line ends."""
    text = starter_of(lab)
    if text is None or not lab.starter.is_file():
        return False
    return lab.starter.read_bytes().replace(b"\r\n", b"\n") == text.encode("utf-8")


def required(lab: Lab) -> str:
    """The same text; where there is no solution a CourseError says so."""
    text = starter_of(lab)
    if text is None:
        raise CourseError(
            f"The starter of {lab.id} is made from its solution.py, which is gone: "
            f"git checkout -- {lab.solution.parent.name}/solution.py in its phase's labs"
        )
    return text


def generate(solution: str, yours: Sequence[str], hidden: Sequence[str] = ()) -> str:
    """The starter's text.

    Args:
        solution: the text of solution.py.
        yours: functions and methods the learner writes, dotted ("BlockPool.free"), and classes
            whose methods the learner chooses.
        hidden: what the starter does not show: functions, methods, classes, constants, names bound
            by an import.

    Raises:
        ValueError: a name is not defined, or is nothing that can be left out.
        SyntaxError: the solution is not Python.
    """
    tree = ast.parse(solution)
    lines = solution.splitlines()
    new: dict[int, str | None] = {}  # 0-based line to its new text; None: gone
    gone: set[ast.AST] = set()
    for name in hidden:
        for scope, node in _defined(tree, name, "hidden"):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                gone.add(node)
                _drop(lines, new, *_extent(lines, scope, node))
    for node in _imports(tree.body):
        kept = [alias for alias in node.names if not _is_gone(alias, tree, gone, hidden)]
        if len(kept) < len(node.names):
            if not kept:
                _drop(lines, new, node.lineno - 1, node.end_lineno or 0)
                continue
            node.names = kept
            new.update(dict.fromkeys(range(node.lineno, node.end_lineno or 0)))
            new[node.lineno - 1] = ast.unparse(node)
    for name in yours:
        for _, node in _defined(tree, name, "yours"):
            if isinstance(node, ast.ClassDef):
                _empty(lines, new, node, name)
            elif isinstance(node, Function):
                _hollow(lines, new, node, name)
            else:
                raise ValueError(f"yours: {name!r}: need the name of a function, method or class")
    text = "\n".join(line for at, old in enumerate(lines) if (line := new.get(at, old)) is not None)
    ast.parse(text)
    return text.rstrip("\n") + "\n"


def _names(node: ast.stmt) -> list[str]:
    """What a statement binds, as its scope sees it."""
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [_bound(alias) for alias in node.names]
    return []


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _defined(tree: ast.Module, name: str, key: str) -> list[tuple[list[ast.stmt], ast.stmt]]:
    """Every statement that binds the dotted `name`, each with the statements it stands among."""
    scopes, found = [tree.body], []
    for part in name.split("."):
        found = [(scope, n) for body in scopes for scope, n in _all(body) if part in _names(n)]
        scopes = [n.body for _, n in found if isinstance(n, ast.ClassDef)]
    if not found:
        raise ValueError(f"{key} names {name!r}, which solution.py does not define")
    return found


def _all(body: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], ast.stmt]]:
    """The statements of one scope, those under `if`, `try` and `with` included."""
    for node in body:
        yield body, node
        for field in ("body", "orelse", "finalbody", "handlers"):
            inner = getattr(node, field, None)
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler) and inner:
                yield from _all(inner)


def _imports(body: list[ast.stmt]) -> list[ast.Import | ast.ImportFrom]:
    return [n for _, n in _all(body) if isinstance(n, ast.Import | ast.ImportFrom)]


def _is_gone(alias: ast.alias, tree: ast.Module, gone: set[ast.AST], hidden: Sequence[str]) -> bool:
    """Whether an import is hidden itself, or was used by hidden things only."""
    name = _bound(alias)
    uses = [_uses(node, name) for node in gone]
    return name in hidden or (any(uses) and sum(uses) == _uses(tree, name))


def _uses(tree: ast.AST, name: str) -> int:
    return sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))


def _first(node: ast.stmt) -> int:
    """0-based line a statement begins on, its decorators included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1


def _extent(lines: list[str], scope: list[ast.stmt], node: ast.stmt) -> tuple[int, int]:
    """Lines of a statement with the comment above it and the string that documents it."""
    start, end = _first(node), node.end_lineno or node.lineno
    while start and lines[start - 1].lstrip().startswith("#"):
        start -= 1
    following = scope[scope.index(node) + 1 :][:1]
    if following and isinstance(node, ast.Assign | ast.AnnAssign) and _is_string(following[0]):
        end = following[0].end_lineno or end
    return start, end


def _is_string(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _drop(lines: list[str], new: dict[int, str | None], start: int, end: int) -> None:
    """Take lines out, and the blank ones above where more follow below."""
    if end >= len(lines) or not lines[end].strip():
        while start and (not lines[start - 1].strip() or new.get(start - 1, "") is None):
            start -= 1
    new.update(dict.fromkeys(range(start, end)))


def _empty(lines: list[str], new: dict[int, str | None], node: ast.ClassDef, name: str) -> None:
    """Leave a class its docstring: what it inherits is all it has."""
    if not _is_string(node.body[0]) or len(node.body) == 1 or not node.bases:
        raise ValueError(f"yours: the class {name!r} needs a base, a docstring and a method")
    end = node.body[0].end_lineno or node.lineno
    new.update(dict.fromkeys(range(end, node.end_lineno or end)))


def _hollow(lines: list[str], new: dict[int, str | None], node: Function, name: str) -> None:
    """Put `raise NotImplementedError` where the body stands, behind its docstring."""
    first, end = node.body[0], node.end_lineno or node.lineno
    if _first(first) < node.lineno or (len(node.body) == 1 and _is_string(first)):
        raise ValueError(f"yours: {name!r} has no body on lines of its own")
    start = _first(first)
    if _is_string(first):
        start = first.end_lineno or start
    while not _is_string(first) and lines[start - 1].lstrip().startswith("#"):
        start -= 1
    indent = " " * first.col_offset
    while end < len(lines) and lines[end].startswith(indent + "#"):
        end += 1  # comments behind the last statement
    new.update(dict.fromkeys(range(start, end)))
    new[start] = f"{indent}raise NotImplementedError"

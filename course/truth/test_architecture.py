"""What ARCHITECTURE says is there: its paths, its names, its rooms, its moments."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")

PATH = re.compile(r"`((?:mini_vllm|course|conformance|labkit|book)/[\w./-]*)`")
SYMBOL = re.compile(PATH.pattern + r" `([A-Za-z_][\w.]*)`")


def paths(text: str) -> list[str]:
    """Files and folders of the repository that a text names."""
    return sorted(set(PATH.findall(" ".join(text.split()))))


def symbols(text: str) -> list[tuple[str, str]]:
    """Files, each with a name that a text says is in it."""
    return sorted(set(SYMBOL.findall(" ".join(text.split()))))


def names(body: list[ast.stmt], before: str = "") -> set[str]:
    """Classes, functions and variables of a module or class, those in a class with its name."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(before + node.name)
        if isinstance(node, ast.ClassDef):
            found |= names(node.body, f"{before}{node.name}.")
        elif isinstance(node, ast.Assign):
            found |= {before + each.id for each in node.targets if isinstance(each, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(before + node.target.id)
    return found


def has(path: str, symbol: str) -> bool:
    """Whether a file has a name."""
    return symbol in names(ast.parse((ROOT / path).read_text(encoding="utf-8")).body)


def moments(path: str, name: str) -> list[str]:
    """The public methods of a class, in their order."""
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    [found] = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
    return [node.name for node in found.body if isinstance(node, ast.FunctionDef)]


def first_cells(title: str) -> list[str]:
    """The names that begin the rows of the table under a title."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w/]+)` \|", section, re.MULTILINE)


@pytest.mark.parametrize("path", paths(PAGE))
def test_a_path_on_the_page_is_there(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("path", "symbol"), symbols(PAGE))
def test_a_name_on_the_page_is_in_its_file(path, symbol):
    assert has(path, symbol)


def test_a_path_and_a_name_are_found_across_a_line_and_a_wrong_name_is_not_there():
    text = "see `mini_vllm/engine.py`\n`LLMEngine.step` and `mini_vllm/engine.py` `LLMEngine.stop`"
    assert symbols(text) == [
        ("mini_vllm/engine.py", "LLMEngine.step"),
        ("mini_vllm/engine.py", "LLMEngine.stop"),
    ]
    assert [has(*each) for each in symbols(text)] == [True, False]


def test_the_page_names_every_room():
    rooms = {
        f"mini_vllm/{path.parent.name}/"
        for path in (ROOT / "mini_vllm").glob("*/__init__.py")
        if path.parent.name != "tests"
    }
    assert set(first_cells("The picture")) == rooms


@pytest.mark.parametrize(
    ("title", "path", "name"),
    [
        ("The moments of a feature", "mini_vllm/feature.py", "Feature"),
        ("The moments of a gate", "mini_vllm/plan.py", "Gate"),
    ],
)
def test_the_page_names_every_moment_in_its_order(title, path, name):
    assert first_cells(title) == moments(path, name)


def imported(module: str, body: list[ast.stmt]) -> Iterator[str]:
    """What a module imports, in functions too; what only a type checker reads is left out."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            inside = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
            yield from imported(module, inside)


@pytest.mark.slow
def test_no_two_modules_import_one_another():
    """A package that only gathers its modules is not one of them."""
    folders = ("mini_vllm", "conformance", "course", "labkit", "benchmarks")
    graph: dict[str, set[str]] = {}
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if path.name.startswith("test_") or {"tests", "testdata"} & set(parts):
            continue
        name = ".".join(parts).removesuffix(".__init__")
        graph[name] = set(imported(name, ast.parse(path.read_text(encoding="utf-8")).body))
    for name, names in graph.items():
        found = {each if each in graph else each.rpartition(".")[0] for each in names}
        graph[name] = (found & graph.keys()) - {name}
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names one

"""What the pin's runner reads of a model, counted in its source: the table of the deep dive."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNNER = ROOT / "upstream" / "vllm" / "v1" / "worker" / "gpu_model_runner.py"


def reads(source: str) -> set[str]:
    """Names read of `self.model`, directly or by `getattr` and `hasattr`; "()" for a call of it."""
    found = set()

    def is_model(node: ast.AST) -> bool:
        return ast.unparse(node) == "self.model"

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_model(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and is_model(node.func):
            found.add("()")
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("getattr", "hasattr")
            and is_model(node.args[0])
        ):
            found.add(ast.literal_eval(node.args[1]))
    return found


def test_reads_of_every_kind_are_seen():
    source = "self.model(x); self.model.a; hasattr(self.model, 'b'); other.model.c; self.model"
    assert reads(source) == {"()", "a", "b"}


def test_the_runner_reads_of_a_model_what_the_deep_dive_says():
    if not RUNNER.is_file():
        pytest.skip("needs the pinned tree: course upstream fetch")
    page = (Path(__file__).parent / "01-deep-dive.md").read_text(encoding="utf-8")
    table = page.split("| reads of the model |")[1].split("\n\n")[0]
    told = {name for line in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line)}
    assert told == reads(RUNNER.read_text(encoding="utf-8"))

"""Upstream's own tests on mini's parts: all that are in scope pass, and nothing is left unsaid.

The runs are processes of their own, because they replace classes inside `vllm`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from conformance.features.core import mutants as core
from conformance.upstream_tests import catches, harness

MUTANT = "frees a table head first"
"""One row of the table, run again."""

FILES = sorted({file for file, _ in harness.scope()})


def functions_of(file: str) -> list[str]:
    """The test functions of one of upstream's files, in order."""
    tree = ast.parse((harness.TESTS / file).read_text(encoding="utf-8"))
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    return [node.name for node in tree.body if isinstance(node, kinds) and node.name[:5] == "test_"]


def start(*command: str) -> subprocess.Popen[str]:
    """A Python process at the root, with the pinned tree importable."""
    paths = os.pathsep.join([str(harness.ROOT), str(harness.ROOT / "upstream")])
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=harness.ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def command_on_the_page(engine: str) -> list[str]:
    """What the page tells the reader to type after `python`."""
    found = re.search(
        rf"python (-m conformance\.upstream_tests {engine}.*)", catches.PAGE.read_text()
    )
    assert found, f"the page no longer says how to run the tests on the {engine} engine"
    return shlex.split(found[1])


@pytest.fixture(scope="module")
def printed() -> Iterator[dict[str, str]]:
    """What the page's two commands and one mutant's run print; all three at once."""
    code = (
        "from conformance.features.core import mutants as core\n"
        "from conformance.upstream_tests import catches, harness\n"
        f"(mutant,) = [m for m in core.MUTANTS if m.name == {MUTANT!r}]\n"
        "harness.prepare_real(); print(*catches.caught_by(mutant), sep=chr(10))"
    )
    processes = {
        "mini": start(*command_on_the_page("mini"), "-vv"),
        "real": start(*command_on_the_page("real")),
        "mutant": start("-c", code),
    }
    try:
        yield {name: process.communicate(timeout=400)[0] for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


@pytest.mark.upstream
@pytest.mark.parametrize("file", FILES)
def test_every_function_of_the_pinned_file_is_in_scope_or_out_with_a_reason(file: str) -> None:
    said = [function for function in harness.scope().values() if function.file == file]
    assert [function.name for function in said] == functions_of(file)
    assert all(function.why for function in said if not function.items)


@pytest.mark.upstream
@pytest.mark.slow
def test_every_item_in_scope_passes_on_the_mini_engine(printed: dict[str, str]) -> None:
    wanted = {name: function.items for (_, name), function in harness.scope().items()}
    assert (sum(map(bool, wanted.values())), sum(wanted.values())) == (65, 95)
    last = printed["mini"].splitlines()[-1]
    assert " 95 passed, 141 deselected in " in last, printed["mini"][-4000:]
    assert Counter(re.findall(r"::(\w+)\S* PASSED", printed["mini"])) == +Counter(wanted)


@pytest.mark.upstream
@pytest.mark.slow
def test_the_pages_command_runs_upstreams_files_on_the_real_scheduler(
    printed: dict[str, str],
) -> None:
    last = printed["real"].splitlines()[-1]
    assert last.startswith("11 passed, 225 deselected"), printed["real"][-4000:]


@pytest.mark.upstream
@pytest.mark.slow
def test_a_wrong_engine_fails_the_items_that_the_table_is_made_of(printed: dict[str, str]) -> None:
    kept = json.loads(catches.DATA.read_text(encoding="utf-8"))[MUTANT]
    assert kept and printed["mutant"].splitlines() == kept


def test_the_table_holds_every_mutant_and_is_on_the_page() -> None:
    kept = json.loads(catches.DATA.read_text(encoding="utf-8"))
    assert list(kept) == [mutant.name for mutant in core.MUTANTS]
    assert catches.section(kept) in catches.PAGE.read_text(encoding="utf-8")


def test_a_function_that_is_not_listed_is_not_in_scope() -> None:
    assert harness.in_scope("test_scheduler.py", "test_schedule[True-5]")
    assert not harness.in_scope("test_scheduler.py", "test_schedule_multimodal_requests")
    assert not harness.in_scope("test_scheduler.py", "test_no_such_function")
    blast = "test_priority_scheduling_blast[standard-5-True]"
    assert harness.in_scope("test_priority_scheduler_random.py", blast)

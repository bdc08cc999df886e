"""Upstream's own tests on mini's parts: all that are in scope pass, and nothing is left unsaid.

The run itself is in a process of its own, because it replaces classes inside `vllm`.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from conformance import mutants
from conformance.upstream_tests import catches, harness

FILES = sorted({file for file, _ in harness.scope()})


def functions_of(file: str) -> list[str]:
    """The test functions of one of upstream's files, in order."""
    tree = ast.parse((harness.TESTS / file).read_text(encoding="utf-8"))
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    return [node.name for node in tree.body if isinstance(node, kinds) and node.name[:5] == "test_"]


@functools.cache
def run(engine: str, *arguments: str) -> str:
    """What `python -m conformance.upstream_tests` prints."""
    paths = os.pathsep.join([str(harness.ROOT), str(harness.ROOT / "upstream")])
    done = subprocess.run(
        [sys.executable, "-m", "conformance.upstream_tests", engine, *arguments],
        cwd=harness.ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout + done.stderr


@pytest.mark.upstream
@pytest.mark.parametrize("file", FILES)
def test_every_function_of_the_pinned_file_is_in_scope_or_out_with_a_reason(file: str) -> None:
    said = [function for function in harness.scope().values() if function.file == file]
    assert [function.name for function in said] == functions_of(file)
    assert all(function.why for function in said if not function.items)


@pytest.mark.upstream
@pytest.mark.slow
def test_every_item_in_scope_passes_on_the_mini_engine() -> None:
    wanted = {name: function.items for (_, name), function in harness.scope().items()}
    assert sum(wanted.values()) == 68 and sum(map(bool, wanted.values())) == 54
    output = run("mini", "-v")
    assert "68 passed" in output.splitlines()[-1] and "failed" not in output, output[-4000:]
    passed = Counter(re.findall(r"::(\w+)\S* PASSED", output))
    assert passed == Counter(wanted), passed


@pytest.mark.upstream
@pytest.mark.slow
def test_the_pages_command_runs_the_same_files_on_the_real_scheduler() -> None:
    page = catches.PAGE.read_text(encoding="utf-8")
    found = re.search(r'upstream_tests real -k "([^"]+)"', page)
    assert found, "the page's command has changed"
    assert "11 passed" in run("real", "-k", found[1]), run("real", "-k", found[1])[-4000:]


@pytest.mark.upstream
@pytest.mark.slow
def test_a_broken_engine_fails_them(tmp_path: object) -> None:
    """One kept row of the table again: what passes on the right engine fails on a wrong one."""
    kept = json.loads(catches.DATA.read_text(encoding="utf-8"))
    name = "preempts from the front of running"
    code = (
        "from conformance import mutants; from conformance.upstream_tests import catches, harness\n"
        f"(mutant,) = [m for m in mutants.MUTANTS if m.name == {name!r}]\n"
        "harness.prepare_real(); print(*catches.caught_by(mutant), sep=chr(10))"
    )
    paths = os.pathsep.join([str(harness.ROOT), str(harness.ROOT / "upstream")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=harness.ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines() == kept[name], done.stderr[-4000:]


def test_the_table_holds_every_mutant_and_is_on_the_page() -> None:
    kept = json.loads(catches.DATA.read_text(encoding="utf-8"))
    assert list(kept) == [mutant.name for mutant in mutants.MUTANTS]
    assert catches.table(kept) in catches.PAGE.read_text(encoding="utf-8")


def test_a_function_that_is_not_listed_is_not_in_scope() -> None:
    assert harness.in_scope("test_scheduler.py", "test_schedule[True-5]")
    assert not harness.in_scope("test_scheduler.py", "test_schedule_multimodal_requests")
    assert not harness.in_scope("test_scheduler.py", "test_no_such_function")
    random = "test_priority_scheduling_blast[standard-{}-True]"
    assert harness.in_scope("test_priority_scheduler_random.py", random.format("None"))
    assert not harness.in_scope("test_priority_scheduler_random.py", random.format(5))

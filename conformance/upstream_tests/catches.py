"""Which wrong schedulers upstream's tests catch, and which only the recordings do.

    PYTHONPATH=.:upstream python -m conformance.upstream_tests.catches --write

Every mutant of `conformance.mutants` is written into the source of `mini_vllm` as it is imported,
in a process of its own, and the tests in scope run on it. The recordings catch all of them
(`conformance/test_replay.py`). Results: `catches.json`, and the table in this folder's
`README.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance import mutants
from conformance.features.core import mutants as core
from conformance.upstream_tests import harness
from labkit.tables import markdown_table, write_section

DATA = Path(__file__).with_name("catches.json")
PAGE = Path(__file__).with_name("README.md")
PLAIN = "not (async_scheduler or spec_decoding or no_spec_tokens or structured_output or eagle)"
"""The mutants are of plain scheduling; with drafts the random item alone takes two minutes."""
SECONDS = 400
"""A mutant may loop for ever; then the tests have noticed, too."""


class _Rewritten(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports `mini_vllm.<name>` from the given text instead of its file."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = {f"mini_vllm.{name}": text for name, text in sources.items()}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name in self.sources else None

    def exec_module(self, module: ModuleType) -> None:
        code = compile(self.sources[module.__name__], f"<mutant {module.__name__}>", "exec")
        exec(code, module.__dict__)


def _run(mutant: mutants.Mutant | None, arguments: Sequence[str], answer: Any) -> None:
    """Run the tests in scope on the mutated engine; how each item ended goes into `answer`."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "mini_vllm"]:
        del sys.modules[name]
    if mutant is not None:
        sys.meta_path.insert(0, _Rewritten(mutants.sources(mutant)))
    with contextlib.redirect_stdout(io.StringIO()):
        harness.prepare_mini()
        _, outcomes = harness.run(arguments)
    answer.put(outcomes)


def run_apart(
    mutant: mutants.Mutant | None, arguments: Sequence[str] = ()
) -> dict[str, str] | None:
    """How each item in scope ends in a process of its own; None when it does not come to an end.

    Call `harness.prepare_real` first: what vLLM imports is then imported once for all processes.

    Raises:
        RuntimeError: the process failed, not a test.
    """
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    process = context.Process(target=_run, args=(mutant, arguments, answer))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.terminate()
        process.join()
        return None
    if process.exitcode:
        raise RuntimeError(f"pytest {arguments} on {mutant}: exit status {process.exitcode}")
    return dict(answer.get())


def caught_by(mutant: mutants.Mutant) -> list[str]:
    """The items that fail on the mutant; the long random one runs only where no other fails."""
    for chosen in (f"not blast and {PLAIN}", "blast and None"):
        outcomes = run_apart(mutant, ["-k", chosen])
        if outcomes is None:
            return [f"no end within {SECONDS} seconds of -k {chosen!r}"]
        if found := sorted(item for item, outcome in outcomes.items() if outcome != "passed"):
            return found
    return []


def section(catches: Mapping[str, Sequence[str]]) -> str:
    """The part of the page: a row per mutant caught, most items first, then how many are not."""
    rows = []
    for name, items in sorted(catches.items(), key=lambda pair: -len(pair[1])):
        functions = list(dict.fromkeys(item.partition("::")[2].partition("[")[0] for item in items))
        more = f" and {len(functions) - 1} more" if len(functions) > 1 else ""
        if items:
            rows.append([name, f"`{functions[0]}`{more}"])
    missed = [name for name, items in catches.items() if not items]
    return "\n\n".join(
        [
            f"{len(rows)} of {len(catches)}:",
            markdown_table(["a scheduler that", "fails"], rows),
            f"Only the recordings catch the other {len(missed)}: `catches.json` names them.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.upstream_tests.catches")
    parser.add_argument("--write", action="store_true", help="update the data and the page")
    parser.add_argument("--missing", action="store_true", help="only mutants without data")
    arguments = parser.parse_args(argv)
    kept = json.loads(DATA.read_text(encoding="utf-8")) if arguments.missing else {}
    harness.prepare_real()
    importlib.import_module("vllm.v1.core.sched.async_scheduler")
    right = run_apart(None, ["-k", f"not blast and {PLAIN}"]) or {"": "endless"}
    assert set(right.values()) == {"passed"}, "the right engine fails"
    catches = {}
    for mutant in core.MUTANTS:
        name = mutant.name
        catches[name] = kept[name] if name in kept else caught_by(mutant)
        print(f"{len(catches[name]):3}  {name}", flush=True)
        if arguments.write:  # after each, since the whole takes a quarter of an hour
            DATA.write_text(json.dumps(catches | kept, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(map(bool, catches.values()))} of {len(catches)} caught")
    if arguments.write:
        DATA.write_text(json.dumps(catches, indent=1) + "\n", encoding="utf-8")
        write_section("catches", section(catches), PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

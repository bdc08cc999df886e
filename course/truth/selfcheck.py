"""The course grades its own labs before a learner ever sees them.

Promises, for every lab: the solution passes; the starter fails every test and breaks in none
before it; each misconception fails the test it names; every test has hints and every assertion a
message; the tests are quick; the starter is what the solution gives; nothing is left to fill in. A
lab that only looks graded does not get through.
"""

from __future__ import annotations

import ast
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from course.learning import grading, manifest, mine, starters
from course.learning.labs import CourseError, Lab, is_not_implemented, test_functions
from course.truth import new_lab

SLOWEST = 3.0
"""Processor seconds the unmarked tests of one lab may take on its solution, on an idle machine."""
BUSY = 2.0
"""How many times `SLOWEST` is a problem. A processor that two processes share, or an older one,
counts up to twice the seconds for the same work; what lies between is only shown."""


@dataclass(slots=True)
class Verdict:
    """What selfcheck found in one lab. `problems` empty means the lab is sound."""

    lab: Lab
    problems: list[str] = field(default_factory=list)
    tests: int = 0
    skipped: int = 0
    misconceptions: int = 0
    seconds: float = 0.0


def check_labs(
    root: Path,
    labs: list[Lab],
    *,
    workers: int = 2,
    time_limit: float = grading.TIME_LIMIT,
    done: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Check `labs` with `workers` child processes at a time; `done` hears of each as it ends."""

    def one(lab: Lab) -> Verdict:
        verdict = check_lab(root, lab, time_limit=time_limit)
        done(verdict)
        return verdict

    with ThreadPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(one, labs))


def check_lab(
    root: Path,
    lab: Lab,
    *,
    time_limit: float = grading.TIME_LIMIT,
) -> Verdict:
    """Apply every rule to one lab."""
    verdict = Verdict(lab)
    missing = [
        path.name
        for path in (lab.starter, lab.solution, lab.test_file, lab.folder / "README.md")
        if not path.is_file()
    ]
    if missing:
        verdict.problems.append(f"missing: {', '.join(missing)}")
    try:
        spec = lab.manifest
    except CourseError as error:
        verdict.problems += str(error).splitlines()
        return verdict
    if places := new_lab.unfilled(lab):
        shown = ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")
        verdict.problems.append(f"{len(places)} lines still say {new_lab.MARK}: {shown}")
    if {lab.starter.name, lab.solution.name, lab.test_file.name} & set(missing):
        return verdict
    try:
        tests = ast.parse(lab.test_file.read_text(encoding="utf-8"))
        names = lab.test_names()
        verdict.problems += _static_problems(lab, spec, tests, names)
    except SyntaxError as error:
        verdict.problems.append(f"{Path(error.filename or 'a file').name}: {error}")
        return verdict
    try:
        if not starters.is_current(lab):
            verdict.problems.append(
                f"starter.py is not what its solution gives: run `course starters {lab.id}`"
            )
    except CourseError as error:
        verdict.problems.append(str(error))
    _run_rules(root, lab, spec, tests, names, verdict, time_limit)
    return verdict


def _run_rules(
    root: Path,
    lab: Lab,
    spec: manifest.Manifest,
    tests: ast.Module,
    names: list[str],
    verdict: Verdict,
    time_limit: float,
) -> None:
    """The rules that need the tests to run: all variants in one child process."""
    source = lab.solution.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="course-") as scratch:
        variants: dict[str, tuple[Path, list[str] | None]] = {
            "solution": (lab.solution, None),
            "starter": (lab.starter, None),
            "hollow": (_beside(lab, Path(scratch) / "-", "starter.py", _hollow(lab)), None),
        }
        for item in spec.misconceptions:
            try:
                wrong = manifest.wrong_solution(source, item)
            except ValueError as error:
                verdict.problems.append(f"misconception {item.name!r}: {error}")
                continue
            file = _beside(lab, Path(scratch) / item.name, "solution.py", wrong)
            variants[f"wrong: {item.name}"] = (file, [item.caught_by])
        report = grading.run(
            root,
            lab.test_file,
            impl="solution",
            variants=dict(variants),
            extra_args=["-m", "not gpu"],
            time_limit=time_limit,
            memory=grading.MEMORY_LIMIT if spec.tag == "CPU-OK" else 0,
        )
    if report.trouble and not (report.trouble == "There are no tests here." and names):
        _, _, variant = report.stuck_test.removesuffix("]").partition("[variant=")
        named = f"{variant}\n" if variant in variants else ""  # which file it was that never ended
        verdict.problems.append(named + report.trouble)
    verdict.problems += _solution_problems(lab, report, verdict)
    verdict.problems += _prediction_problems(lab, spec, report)
    verdict.problems += _starter_problems(report, tests)
    put_in = [m for m in spec.misconceptions if f"wrong: {m.name}" in variants]
    verdict.problems += _misconception_problems(put_in, report, verdict, names)


def _solution_problems(lab: Lab, report: grading.Report, verdict: Verdict) -> Iterator[str]:
    results = report.of("solution")
    verdict.tests = sum(result.outcome != "skipped" for result in results)
    verdict.skipped = len(results) - verdict.tests
    marked = _marked_slow(lab)
    verdict.seconds = sum(result.seconds for result in results if result.name not in marked)
    for result in results:
        if result.outcome in ("failed", "error"):
            first = (result.message or result.error).splitlines()[:1]
            yield f"solution.py fails {_label(result)}: {''.join(first)}"
    if verdict.seconds > BUSY * SLOWEST:
        slowest = max(results, key=lambda result: result.seconds)
        yield (
            f"the tests take {verdict.seconds:.1f} s on the solution, the limit is {SLOWEST:g} s "
            f"(the slowest is {_label(slowest)}: {slowest.seconds:.1f} s)"
        )


def _prediction_problems(
    lab: Lab, spec: manifest.Manifest, report: grading.Report
) -> Iterator[str]:
    """Every prediction is measured by a test the solution passes, as an answer can be given."""
    passed = [result for result in report.of("solution") if result.outcome == "passed"]
    measured = {name: value for result in passed for name, value in result.measured.items()}
    skipped = any(result.outcome == "skipped" for result in report.of("solution"))
    source = lab.test_file.read_text(encoding="utf-8")
    for name, question in spec.predictions.items():
        if name in measured:
            try:
                question.read(measured[name])
            except ValueError as error:
                yield f"prediction {name!r}: the measured {error}"
        elif not (skipped and f"measured.{name}" in source):
            yield (
                f"prediction {name!r} is not measured: no test that passes says "
                f'record_property("measured.{name}", value)'
            )
    for name in measured.keys() - spec.predictions.keys():
        yield f"test_lab.py measures {name!r}, which lab.yaml does not ask for"


def _starter_problems(report: grading.Report, tests: ast.Module) -> Iterator[str]:
    for result in report.of("starter"):
        if result.outcome == "passed":
            yield f"starter.py already passes {_label(result)}: the test grades nothing"
        elif result.outcome == "error":
            yield (
                f"starter.py breaks before {result.name} begins, so the test is not what fails: "
                f"{' '.join(result.message.split()) or result.error}"
            )
    for result in report.of(""):
        yield f"{result.name} does not take the `lab` fixture, so it grades nothing"
    hollow = {result.name for result in report.of("hollow") if result.outcome == "passed"}
    for function in test_functions(tests):
        if function.name in hollow and not _asserts(function, tests):
            yield (
                f"{function.name} asserts nothing: it passes when every function of the starter "
                "just returns None"
            )


def _misconception_problems(
    put_in: list[manifest.Misconception],
    report: grading.Report,
    verdict: Verdict,
    names: list[str],
) -> Iterator[str]:
    for item in put_in:
        results = report.of(f"wrong: {item.name}")
        outcomes = {result.outcome for result in results}
        if item.caught_by not in names:
            yield f"misconception {item.name!r}: there is no test {item.caught_by}"
        elif outcomes & {"failed"}:
            verdict.misconceptions += 1
        elif outcomes & {"error"}:
            yield f"misconception {item.name!r}: the wrong solution cannot be loaded"
        elif not results and not report.trouble:
            yield (
                f"misconception {item.name!r}: {item.caught_by} did not run; name a test that "
                "needs no GPU"
            )
        elif "passed" in outcomes:
            yield (
                f"misconception {item.name!r} is not caught: {item.caught_by} passes on the wrong "
                "solution"
            )


def _label(result: grading.TestResult) -> str:
    """The test's name with its own parameters, without the variant's."""
    _, bracket, rest = result.test_id.rpartition("::")[2].partition("[")
    parameters = rest.removesuffix("]").replace(f"variant={result.variant}", "").strip("-")
    return f"{result.name}[{parameters}]" if bracket and parameters else result.name


# ------------------------------------------------------------------ rules read from the source


def _static_problems(
    lab: Lab, spec: manifest.Manifest, tests: ast.Module, names: list[str]
) -> Iterator[str]:
    if not names:
        yield "test_lab.py holds no test"
    for name in spec.hints:
        if name not in names:
            yield f"lab.yaml has hints for {name}, which is no test of test_lab.py"
    for name in names:
        if name not in spec.hints:
            yield f"lab.yaml has no hints for {name}"
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"test_lab.py defines {name} twice"
    for node in ast.walk(tests):
        if isinstance(node, ast.Assert) and node.msg is None:
            yield (
                f"test_lab.py:{node.lineno}: this assert has no message; say what was expected "
                "and why it matters"
            )
    solution = ast.parse(lab.solution.read_text(encoding="utf-8"), str(lab.solution))
    yield from _part_problems(spec, solution)


def _part_problems(spec: manifest.Manifest, solution: ast.Module) -> Iterator[str]:
    if spec.part is None:
        return
    try:
        name = mine.attribute_of(spec.part)
    except CourseError as error:
        yield str(error)
        return
    defined = {getattr(node, "name", "") for node in solution.body}
    if name not in defined:
        yield f"lab.yaml says part: {spec.part}, so solution.py must define {name}"


class _ReturnNone(ast.NodeTransformer):
    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        return ast.Return(value=None) if is_not_implemented(node) else node


def _hollow(lab: Lab) -> str:
    """The starter with every `raise NotImplementedError` made into `return None`."""
    tree = _ReturnNone().visit(ast.parse(lab.starter.read_text(encoding="utf-8")))
    return ast.unparse(ast.fix_missing_locations(tree))


def _beside(lab: Lab, folder: Path, name: str, text: str) -> Path:
    """`text` as file `name` in a copy of the lab's folder: it may read the files beside it."""
    ignored = shutil.ignore_patterns("__pycache__", "captured", "*.md", "*.py")
    shutil.copytree(lab.folder, folder, ignore=ignored)
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


_CHECKERS = ("raises", "fail", "warns", "same", "refused")
"""Of pytest, and the two of `labkit`: a call of one is an assertion."""


def _asserts(function: ast.FunctionDef, tests: ast.Module, depth: int = 3) -> bool:
    """Whether the test can fail by itself: an assert on something, pytest.raises, a checker."""
    helpers = {n.name: n for n in tests.body if isinstance(n, ast.FunctionDef)}
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and any(
            isinstance(n, ast.Name | ast.Attribute | ast.Call) for n in ast.walk(node.test)
        ):
            return True
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in _CHECKERS or called.startswith("assert_"):
                return True
            helper = helpers.get(called)
            if helper is not None and depth and _asserts(helper, tests, depth - 1):
                return True
    return False


def _marked_slow(lab: Lab) -> set[str]:
    """Tests whose marks exempt them from the time rule (gpu, torch, upstream, browser, slow)."""
    tree = ast.parse(lab.test_file.read_text(encoding="utf-8"))
    marks = ("gpu", "torch", "upstream", "browser", "slow")
    whole = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets)
    ]
    everything = any(f"mark.{mark}" in ast.unparse(node) for node in whole for mark in marks)
    return {
        function.name
        for function in test_functions(tree)
        if everything
        or any(f"mark.{m}" in ast.unparse(d) for d in function.decorator_list for m in marks)
    }

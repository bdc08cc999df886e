"""A new lab: three files to fill in, and a page made of them.

Promises: the skeleton is a sound lab as it stands, but for the words `FILL IN`, which selfcheck
refuses wherever they stand; nothing that exists is overwritten.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template

from course.files import write_atomically
from course.learning import predictions
from course.learning.labs import CourseError, Lab, test_functions

MARK = "FILL IN"
SKELETON = Path(__file__).parent / "skeleton"
WRITTEN = ("lab.yaml", "solution.py", "test_lab.py")
"""What is written by hand; starter.py, predictions.yaml and a first README.md are made of it."""


def create(root: Path, phase: str, slug: str, number: int = 0) -> Lab:
    """Write the skeleton of a lab.

    Args:
        root: the checkout.
        phase: "07" for the folder `phase-07-*` that is there, or the name of a new phase's folder.
        slug: lower-case words joined by hyphens.
        number: of the lab in its phase, 1 to 99; 0 takes the one after the highest.

    Raises:
        CourseError: an argument does not hold, or that lab is there already.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug):
        raise CourseError(f"slug {slug!r} must be lower-case words joined by hyphens")
    folder = _phase_folder(root, phase)
    taken = {int(path.name[4:6]): path for path in folder.glob("labs/lab-[0-9][0-9]-*")}
    number = number or max(taken, default=0) + 1
    if not 1 <= number <= 99:
        raise CourseError(f"number {number} must be 1 to 99, or 0 for the next one")
    if number in taken:
        raise CourseError(f"lab {number:02d} of {folder.name} is {taken[number].name} already")
    lab = Lab(folder / "labs" / f"lab-{number:02d}-{slug}", f"{folder.name[6:8]}-{number:02d}")
    for name in WRITTEN:
        text = (SKELETON / f"{name}.txt").read_text(encoding="utf-8")
        write_atomically(lab.folder / name, Template(text).substitute(id=lab.id))
    return lab


def _phase_folder(root: Path, phase: str) -> Path:
    if re.fullmatch(r"phase-\d\d(-[a-z0-9]+)+", phase):
        return root / phase
    folders = sorted(path for path in root.glob("phase-[0-9][0-9]-*") if path.is_dir())
    found = [path for path in folders if re.fullmatch(r"\d{1,2}", phase)
             and path.name.startswith(f"phase-{int(phase):02d}-")]  # fmt: skip
    if len(found) != 1:
        there = ", ".join(path.name[6:8] for path in folders) or "none"
        raise CourseError(
            f"There is no phase {phase!r}. There are: {there}. For a new one give its folder's "
            "name, such as phase-07-gemm-and-moe-kernels."
        )
    return found[0]


def unfilled(lab: Lab) -> list[str]:
    """Every place of the lab that still says `FILL IN`, as "file:line"."""
    places = []
    for name in (*WRITTEN, "README.md"):
        path = lab.folder / name
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        places += [f"{name}:{at}" for at, line in enumerate(lines, 1) if MARK in line]
    return places


def complete(lab: Lab) -> list[Path]:
    """Write what a lab lacks beside its starter: README.md, predictions.yaml; the paths written."""
    texts = {"README.md": readme_of}
    if lab.manifest.predictions:
        texts[predictions.FILE] = _predictions_of
    lacking = [name for name in texts if not (lab.folder / name).exists()]
    for name in lacking:
        write_atomically(lab.folder / name, texts[name](lab))
    return [lab.folder / name for name in lacking]


def _predictions_of(lab: Lab) -> str:
    names = "".join(f"{name}:\n" for name in lab.manifest.predictions)
    return f"# course predict {lab.id} asks and writes here; empty: not committed\n{names}"


def readme_of(lab: Lab) -> str:
    """The page of a lab that has none yet, made of its three files.

    It holds what they say: the task from the docstrings, the predictions, what the tests pin. The
    idea, the worked example and the notes from practice are a writer's.
    """
    spec = lab.manifest
    solution = ast.parse(lab.solution.read_text(encoding="utf-8"))
    tests = ast.parse(lab.test_file.read_text(encoding="utf-8"))
    where = f"{lab.phase}/labs/{lab.folder.name}"
    about = (ast.get_docstring(solution) or "").split(": ", 1)[-1]
    task = [f"- `{name}{_signature(node)}`: {_first_line(node)}" for name, node in
            _functions(solution, spec.yours)]  # fmt: skip
    pinned = [f"- `{node.name}`{_told(node)}" for node in test_functions(tests)]
    asked = [f"- `{name}`: {question.ask}" for name, question in spec.predictions.items()]
    predict = ["", "Commit what you expect first, with `course predict`:", "", *asked]
    lines = [
        f"# Lab {lab.id}: {spec.title} [{spec.tag}]",
        "",
        about[:1].upper() + about[1:],
        "",
        "## Files and commands",
        "",
        "| file | what it is |",
        "|---|---|",
        "| `starter.py` | your file |",
        "| `test_lab.py` | what is graded |",
        "| `solution.py` | the reference, for afterwards |",
        "",
        "```console",
        f"course check {lab.id}",
        f"course hint {lab.id}",
        f"LAB_IMPL=starter pytest {where}",
        "```",
        "",
        "## The task",
        "",
        f"About {spec.minutes} minutes. The docstrings of `starter.py` say what must hold.",
        "",
        *task,
        *(predict if asked else ()),
        "",
        "<details><summary>What the tests pin (open after passing)</summary>",
        "",
        *pinned,
        "",
        "</details>",
    ]
    return "\n".join(lines) + "\n"


def _functions(
    tree: ast.Module, names: Sequence[str]
) -> list[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    found: list[tuple[str, ast.FunctionDef | ast.ClassDef]] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            found.append((node.name, node))
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        found += [(prefix + each.name, each) for each in inner
                  if isinstance(each, ast.FunctionDef) and prefix + each.name in names]  # fmt: skip
    return found


def _signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.ClassDef):
        return f"({', '.join(map(ast.unparse, node.bases))})"
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return f"({', '.join(name for name in names if name != 'self')})"


def _first_line(node: ast.FunctionDef | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "see its docstring.").split("\n\n")[0].replace("\n", " ")


def _told(node: ast.FunctionDef) -> str:
    told = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    return f": {told}" if told else ""

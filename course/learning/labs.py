"""Where the course is, which labs it has, and which one a learner means.

Promises: labs come in course order; a name that fits none or several is refused with the
names that would do.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from course.learning import manifest


class CourseError(Exception):
    """Something a user can mend; its text is all that is shown."""


@dataclass(frozen=True)
class Lab:
    """One lab folder. Its manifest and files are read when first asked for."""

    folder: Path
    id: str

    @cached_property
    def manifest(self) -> manifest.Manifest:
        """The validated lab.yaml; raises CourseError with every problem in it."""
        try:
            return manifest.load(self.folder / "lab.yaml")
        except manifest.ManifestError as error:
            raise CourseError(str(error)) from None

    @property
    def starter(self) -> Path:
        return self.folder / "starter.py"

    @property
    def solution(self) -> Path:
        return self.folder / "solution.py"

    @property
    def test_file(self) -> Path:
        return self.folder / "test_lab.py"

    @property
    def phase(self) -> str:
        """The phase folder's name."""
        return self.folder.parent.parent.name

    def test_names(self) -> list[str]:
        """The test functions of test_lab.py in file order, without parameters or classes.

        Raises:
            SyntaxError: the file is not Python.
        """
        tree = ast.parse(self.test_file.read_text(encoding="utf-8"), str(self.test_file))
        return [function.name for function in test_functions(tree)]


def test_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """The functions pytest collects from a test module, in file order."""
    found = []
    for node in tree.body:
        body = node.body if isinstance(node, ast.ClassDef) and node.name[:4] == "Test" else [node]
        found += [n for n in body if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
    return found


def is_not_implemented(node: ast.Raise) -> bool:
    """Whether `node` is `raise NotImplementedError`, with or without a message."""
    error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return isinstance(error, ast.Name) and error.id == "NotImplementedError"


def find_root(start: Path | None = None) -> Path:
    """The repository root: the nearest folder upwards that holds the course.

    Looks from `start` (default: the working directory), then from this file.
    Raises CourseError where there is none.
    """
    for origin in (start or Path.cwd(), Path(__file__)):
        for folder in (origin, *origin.resolve().parents):
            if (folder / "conftest.py").is_file() and any(folder.glob("phase-*/labs")):
                return folder.resolve()
    raise CourseError(
        "This is not a checkout of the course: no folder above here holds conftest.py and "
        "phase-*/labs. Change into the repository and try again."
    )


def find_labs(root: Path) -> list[Lab]:
    """Every folder `phase-NN-*/labs/lab-NN-*` with a lab.yaml, in course order."""
    labs = []
    for phase in sorted(root.glob("phase-*/labs")):
        for folder in lab_folders(phase):
            lab_id = manifest.id_of(folder)
            if lab_id and (folder / "lab.yaml").is_file():
                labs.append(Lab(folder, lab_id))
    return labs


def lab_folders(labs: Path) -> list[Path]:
    """The folders `lab-NN-*` of a phase, in the order in which `labs/README.md` links them.

    That order is the phase's own, and may differ from the numbers. What is not linked comes last.
    """
    page = labs / "README.md"
    text = page.read_text("utf-8", "replace") if page.is_file() else ""
    linked = list(dict.fromkeys(re.findall(r"\((lab-\d\d-[^/()\s]*)/", text)))

    def place(folder: Path) -> tuple[int, str]:
        return linked.index(folder.name) if folder.name in linked else len(linked), folder.name

    return sorted(labs.glob("lab-[0-9][0-9]-*"), key=place)


def phase_title(folder: Path) -> str:
    """Its number and what its guide is called, else the folder's name: "02 PagedAttention"."""
    _, number, *words = folder.name.split("-")
    guide = folder / "00-guide.md"
    heading = guide.read_text("utf-8", "replace").partition("\n")[0] if guide.is_file() else ""
    name, colon, _ = heading.removeprefix("# ").partition(":")
    return f"{number} {name if colon else ' '.join(words).capitalize()}"


def pick(labs: list[Lab], name: str) -> Lab:
    """The lab called `name`: an id (`02-01`, `2-1`), a path, or part of a folder's name.

    Raises:
        CourseError: no lab or several fit, with the candidates.
    """
    path = Path(name)
    if path.exists():
        resolved = path.resolve()
        for lab in labs:
            if resolved == lab.folder.resolve() or lab.folder.resolve() in resolved.parents:
                return lab
    if match := re.fullmatch(r"(\d{1,2})[-./](\d{1,2})", name):
        wanted = f"{int(match[1]):02d}-{int(match[2]):02d}"
        found = [lab for lab in labs if lab.id == wanted]
    else:
        found = [lab for lab in labs if name and name.lower() in lab.folder.name]
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(f"{lab.id} ({lab.folder.name})" for lab in found)
        raise CourseError(f"{name!r} fits several labs: {listed}. Use the number.")
    near = ", ".join(lab.id for lab in labs) or "none"
    raise CourseError(f"There is no lab {name!r}. The labs are: {near}.")

"""`course first`: a scheduler of ten lines, one of them wrong, and the run it makes.

The same text and the same run as on the site's home page (`course/site/widgets/first_lab.py`). The
file is the reader's: it is begun once and never replaced.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from course.files import write_atomically
from course.learning.labs import CourseError
from course.learning.progress import FOLDER
from course.site.widgets import first_lab
from course.terminal import raw, relative, say

FILE = "first.py"
SIGNS = {"waiting": ".", "starved": "!"}
"""In the timeline, for a step in which a request gets no token."""


def run(console: Console, root: Path) -> bool:
    """Begin the file, or run what it holds and show its timeline; whether the run is whole.

    Raises:
        CourseError: the file cannot be read as a scheduler.
    """
    path = root / FOLDER / FILE
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, first_lab.SHIPPED)
    where = relative(path, root)
    try:
        text = path.read_text(encoding="utf-8")
        made = first_lab.run(text)
    except (OSError, ValueError) as error:
        raise CourseError(f"{where}: {error}") from None
    raw(console, text.rstrip("\n"))
    console.print()
    for each in first_lab.arrivals():
        told = f"{each.name}: prompt {len(each.prompt):>2}, outputs {each.max_tokens:>2}"
        say(console, f"  {told}  {_line(made['rows'][each.name])}")
    console.print()
    if made["same"]:
        say(console, f"Whole: {made['steps']} steps, each as vLLM's rule decides.", "green")
        say(console, "Next: course check 00-01")
        return True
    say(console, made["trouble"] or f"It ends after {made['steps']} steps, not as vLLM's.", "red")
    say(
        console,
        f"A number is the tokens of a step, . waits, ! runs and gets none. A step has "
        f"{first_lab.BUDGET} tokens.",
    )
    say(console, f"  mend    one line of {where}")
    say(console, "  again   course first")
    return False


def _line(cells: list[list[object]]) -> str:
    """A request's steps, three characters each."""
    shown = dict.fromkeys(range(int(str(cells[0][0])) if cells else 0), "")
    shown |= {int(str(step)): SIGNS.get(str(kind), str(tokens)) for step, kind, tokens in cells}
    return "".join(f"{shown[step]:>3}" for step in sorted(shown))

"""`course challenge paged` and `tile`: what the counted challenges have, but for a shared score.

Promises: a race runs in the environment that has torch and Triton; a try is written down with its
text, whatever came of it; without a GPU nothing is scored, and the way to check rightness is said.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rich.console import Console

from course import processes
from course.challenges import ledger, shown
from course.challenges.judge import Challenge, Meter, Verdict
from course.learning import gpu
from course.learning.labs import CourseError
from course.terminal import relative, say
from labkit import environment

HERE = Path(__file__).resolve().parent
VLLM = 1000
"""vLLM's own score: a race's is in thousandths of it."""
SECONDS = 600.0
TITLES = {
    "paged": "Decode attention over a paged cache, against vLLM's Triton kernel",
    "tile": "The tile of a kernel for experts, against the one tuned for your card",
}
MARKS = {
    "paged": (("bronze", 700, 1000), ("vLLM's", 1000, 1000), ("silver", 1400, 1000)),
    "tile": (("bronze", 850, 1000), ("vLLM's", 1000, 1000), ("silver", 1030, 1000)),
}


class Race(Challenge):
    """A challenge whose score is a ratio of times."""

    @property
    def folder(self) -> Path:
        return HERE / self.name


def load(name: str) -> Race:
    """The race of a name.

    Raises:
        KeyError: there is none.
    """
    meter = SimpleNamespace(
        TITLE=TITLES[name], UNIT="thousandths of vLLM's speed", FEWER=False, MARKS=MARKS[name]
    )
    return Race(name, cast(Meter, meter))


def listing(console: Console, root: Path) -> None:
    """Both, with one's best."""
    say(console, "On a CUDA GPU, and clocked:")
    for name, title in TITLES.items():
        race = load(name)
        tries = ledger.read(root, race)
        best = ledger.best(race, tries)
        yours = f", yours {best.score:,}" if best else ""
        told = f"in thousandths of vLLM's speed: vLLM's {VLLM:,}{yours}"
        say(console, f"  {name:<10} {title}", "bold" if tries else "")
        say(console, f"  {'':<10} {told}", "green" if best else "dim")


def contract(console: Console, root: Path, race: Race) -> None:
    """As `shown.contract`."""
    shown.told(console, root, race, VLLM)


def check(console: Console, root: Path, race: Race, note: str) -> bool:
    """Race the answer and write the try down; whether it scored.

    Raises:
        CourseError: no GPU answers, or the race itself did not come to its end.
    """
    path = ledger.answer_of(root, race)
    command = ["-m", "course.challenges.gpu.race", race.name, relative(path, root)]
    if gpu.hardware() is None:
        raise CourseError(
            f"{race.name} is raced on a CUDA GPU, and none answers here. Whether your file is "
            "right can be asked without one, where torch and Triton are installed: "
            f"TRITON_INTERPRET=1 python {shlex.join(command)} --dry-run"
        )
    within = gpu.choose(root, on_cpu=False)
    text = path.read_bytes()
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        out = Path(folder) / "out.json"
        ran = processes.run(
            [str(within.python), *command, "--out", str(out)],
            root,
            environment.variables(within, root),
            SECONDS,
            echo=gpu.heard(console),
        )
        found: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.is_file() else {}
    if not found:
        raise CourseError(f"the race ended with status {ran.code} and no times; nothing is scored")
    score = int(found["score"])
    verdict = Verdict(
        score=score, vllm=VLLM, fresh=score, fresh_vllm=VLLM, why=found["why"],
        marks=[] if found["why"] else race.marks(score, VLLM),
    )  # fmt: skip
    made = ledger.keep(root, race, text, verdict, note)
    if not verdict.why:
        marks = ", ".join(verdict.marks) or "none yet"
        say(console, f"{made.outcome}. Marks: {marks}.", "green")
    return not verdict.why

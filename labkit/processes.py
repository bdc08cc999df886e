"""An engine in a process of its own, as a lab's run.py starts it: heard while it runs, then gone.

Promises: what the process started ends with it, and with this process, by whatever signal
(`keeper.py` sees to that); lines that were asked for are printed when they are said, not at the
end.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

KEEPER = Path(__file__).with_name("keeper.py")
MARK = "RESULT "
"""Begins the line of a process that holds its result, as JSON."""
NEWS = "NEWS "
"""Begins a line that the run shows at once."""
LAST = 30
"""Lines shown of a process that failed."""


def tell(text: str) -> None:
    """In the process of an engine: a line that its parent shows at once."""
    print(f"{NEWS}{text}", flush=True)


def answer(result: Mapping[str, Any]) -> None:
    """In the process of an engine: its result."""
    print(MARK + json.dumps(result), flush=True)


@dataclass(frozen=True, slots=True)
class Ran:
    """A process that has ended."""

    command: tuple[str, ...]
    status: int
    text: str
    """Everything it printed, carriage returns of progress bars included."""

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def result(self) -> dict[str, Any] | None:
        """What it gave to `answer`, last; None where it did not or failed."""
        results = [line for line in self.lines if line.startswith(MARK)]
        return None if self.status or not results else json.loads(results[-1].removeprefix(MARK))

    def fail(self) -> NoReturn:
        """End the run with the process's last lines and its command."""
        ended = f"exit status {self.status}: {shlex.join(self.command)}"
        raise SystemExit("\n".join([*self.lines[-LAST:], ended]))

    def needed(self) -> dict[str, Any]:
        """Its result; without one the run ends."""
        return self.fail() if self.result is None else self.result


def start(
    command: Sequence[str], show: Collection[str] = (), env: Mapping[str, str] | None = None
) -> Ran:
    """Run a Python script to its end.

    Args:
        command: the script and its arguments; this interpreter runs it.
        show: words; a line that holds one of them is printed when it is said.
        env: the whole environment; default: this process's.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(KEEPER), sys.executable, *command],
        stdin=subprocess.PIPE,  # the keeper ends everything when it is closed, also by our death
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=None if env is None else dict(env),
    )
    assert process.stdin and process.stdout and process.stderr
    said: list[str] = []
    try:
        for raw in process.stdout:
            said.append(raw.decode(errors="replace"))
            for line in said[-1].splitlines():
                if line.startswith(NEWS):
                    print("  |", line.removeprefix(NEWS), flush=True)
                elif not line.startswith(MARK) and any(words in line for words in show):
                    print("  |", line, flush=True)
    finally:
        process.stdin.close()
        told = process.stderr.read().split()
        process.stdout.close()
        process.stderr.close()
        process.wait()
    exact = told and told[-1].lstrip(b"-").isdigit()
    status = int(told[-1]) if exact else process.returncode
    return Ran(("python", *command), status, "".join(said))

"""Runs an answer in a process of its own, and counts here what it costs.

Promises: the meter, the workloads and what is right never enter the answer's process; each workload
gets a new process, whose only way to say something is plain JSON; a wrong, a late or a silent
answer scores nothing and says why. Scores are whole numbers that follow from the answer, the
challenge and the seeds.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

NAMES = (
    "queue", "lookups", "eviction", "goodput", "sizes", "drafter", "masks", "placement",
    "rebalance",
)  # fmt: skip
"""In the order in which they are listed."""
STANDARD, FRESH = 4, 3
"""Workloads that are the same everywhere, and workloads drawn anew for each try."""
SECONDS = 30.0
"""An answer's processor time for one workload. It bounds loops; no score depends on it, nor on how
busy the machine is."""
PATIENCE = 10
"""So many times as long may an answer take by the clock: one that waits for ever ends too."""
MEMORY = 2**30
LONGEST = 4 * 2**20
"""Characters of one line that an answer may say."""
ASKED = 500_000
"""Calls of an oracle in one workload."""
PRINTED = 8
"""Lines of what a wrong answer printed that are shown."""
HERE = Path(__file__).resolve().parent


class Wrong(Exception):
    """An answer scores nothing; the text says why."""


class Meter(Protocol):
    """What a challenge's `meter.py` defines."""

    TITLE: str
    UNIT: str
    FEWER: bool
    """Whether fewer are better."""
    MARKS: tuple[tuple[str, int, int], ...]
    """Name, and the score it takes as a fraction of vLLM's: numerator, denominator."""

    def workload(self, seed: str) -> Any: ...

    def play(self, answer: Callable[..., Player], load: Any) -> int: ...

    def vllm(self, load: Any) -> int: ...


class Player:
    """An answer, in a process that lives for one workload."""

    def __init__(self, file: Path, oracles: Mapping[str, Callable[..., Any]]) -> None:
        """Start the process; `oracles` are what it may ask."""
        self.oracles = oracles
        self.asked = 0
        self.late = False
        self.folder = tempfile.mkdtemp(prefix="challenge-")
        copy = Path(self.folder) / "answer.py"
        copy.write_bytes(file.read_bytes())
        self.printed = Path(self.folder) / "printed.txt"
        kept = {n: os.environ[n] for n in ("PATH", "SYSTEMROOT", "HOME") if n in os.environ}
        with self.printed.open("wb") as printed:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-s", "-P", str(HERE / "child.py"), str(copy),
                    str(SECONDS), str(PATIENCE * SECONDS + 5), str(MEMORY),
                ],
                cwd=self.folder,
                env={
                    **kept, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1",
                    "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                start_new_session=os.name == "posix",
                text=True,
                encoding="utf-8",
                errors="replace",
            )  # fmt: skip
        self.timer = threading.Timer(PATIENCE * SECONDS, self._stop)
        self.timer.daemon = True
        self.timer.start()

    def begin(self, setup: Any) -> None:
        """Load the file and make its `Answer(setup, *oracles)`.

        Raises:
            Wrong: the file cannot be loaded, or the class refuses the setup.
        """
        self._exchange({"call": "begin", "args": [setup], "oracles": list(self.oracles)})

    def call(self, method: str, *args: Any) -> Any:
        """What a method of the answer gives back, as JSON's plain values.

        Raises:
            Wrong: it raises, says nothing, says too much, or says something that is not JSON.
        """
        return self._exchange({"call": method, "args": args})

    def _exchange(self, message: dict[str, Any]) -> Any:
        self._say(message)
        while True:
            told = self._hear(message["call"])
            if not isinstance(told, dict):
                raise Wrong(
                    f"{message['call']}: the answer's process sent {str(told)[:60]}: need a reply"
                )
            if "error" in told:
                raise Wrong(f"{message['call']}: {told['error']}")
            if "value" in told:
                return told["value"]
            self._say(self._ask(told))

    def _ask(self, told: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        if self.asked > ASKED:
            raise Wrong(f"your answer asked more than {ASKED:,} questions in one workload")
        name, args = told.get("ask"), told.get("args")
        if not isinstance(name, str) or name not in self.oracles or not isinstance(args, list):
            raise Wrong(
                f"the answer's process asked {str(name)[:40]!r}: need one of "
                f"{', '.join(self.oracles) or 'nothing'}, with a list of arguments"
            )
        try:
            return {"value": self.oracles[name](*args)}
        except (TypeError, ValueError) as error:
            return {"refused": str(error)}

    def _say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except OSError:
            self._ended(str(message.get("call", "an oracle")))

    def _hear(self, during: str) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline(LONGEST)
        if len(line) >= LONGEST:
            raise Wrong(f"{during}: more than {LONGEST:,} characters in one answer")
        if not line.endswith("\n"):
            self._ended(during)
        try:
            return json.loads(line, parse_constant=_no_number)
        except (ValueError, RecursionError):
            raise Wrong(f"{during}: the value it returned is not JSON") from None

    def _ended(self, during: str) -> NoReturn:
        if not self.late:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)  # its pipe is closed: it has ended, or is ending
        if self.late or self.process.returncode == -getattr(signal, "SIGXCPU", 0):
            raise Wrong(f"{during}: no answer after {SECONDS:g} s; look for a loop without end")
        raise Wrong(f"{during}: the answer's process ended")

    def _stop(self) -> None:
        self.late = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            if os.name == "posix":
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()

    def tail(self) -> str:
        """The last lines that the answer printed."""
        with contextlib.suppress(OSError):
            text = self.printed.read_bytes()[-4000:].decode("utf-8", errors="replace")
            return "\n".join(text.rstrip().splitlines()[-PRINTED:])
        return ""

    def close(self) -> None:
        """End the process and whatever it started."""
        self.timer.cancel()
        self._kill()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert stream
                stream.close()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _no_number(text: str) -> NoReturn:
    raise ValueError(text)


def whole(name: str, value: Any, low: int, high: int) -> int:
    """`value` as a whole number from `low` to `high`.

    Raises:
        Wrong: it is something else.
    """
    if type(value) is not int or not low <= value <= high:
        raise Wrong(f"{name} is {value!r}: need a whole number from {low} to {high}")
    return value


def wholes(name: str, value: Any, low: int, high: int, most: int) -> list[int]:
    """`value` as a list of at most `most` whole numbers.

    Raises:
        Wrong: it is something else.
    """
    if not isinstance(value, list) or len(value) > most:
        raise Wrong(f"{name} is {str(value)[:80]}: need a list of at most {most} whole numbers")
    return [whole(name, each, low, high) for each in value]


# ------------------------------------------------------------------ a challenge and its score


@dataclass(frozen=True)
class Challenge:
    """One challenge, by its name."""

    name: str
    meter: Meter

    @property
    def folder(self) -> Path:
        return HERE / self.name

    @property
    def starter(self) -> Path:
        return self.folder / "starter.py"

    @property
    def reference(self) -> Path:
        return self.folder / "reference.py"

    def marks(self, score: int, vllm: int) -> list[str]:
        """The marks that a score reaches beside vLLM's on the same workloads, easiest first."""
        return [name for name, *part in self.meter.MARKS if self._reaches(score, vllm, *part)]

    def _reaches(self, score: int, vllm: int, up: int, down: int) -> bool:
        if self.meter.FEWER:
            return score * down <= vllm * up
        return score * down >= vllm * up

    def needed(self, vllm: int) -> list[tuple[str, int]]:
        """Each mark, and the score it takes."""
        found = []
        for name, up, down in self.meter.MARKS:
            least = vllm * up // down if self.meter.FEWER else -(-vllm * up // down)
            found.append((name, least))
        return found

    def better(self, score: int, than: int) -> bool:
        """Whether a score beats another."""
        return score < than if self.meter.FEWER else score > than


@dataclass(slots=True)
class Verdict:
    """What a try came to. `why` is empty when every workload was answered rightly."""

    score: int = 0
    """Over the standard workloads."""
    vllm: int = 0
    fresh: int = 0
    """Over the workloads drawn for this try."""
    fresh_vllm: int = 0
    seed: str = ""
    why: str = ""
    marks: list[str] = field(default_factory=list)
    """Reached on the standard workloads and on the fresh ones."""
    fitted: bool = False
    """The standard workloads reach a mark that the fresh ones do not."""


def load(name: str) -> Challenge:
    """The challenge of a name.

    Raises:
        KeyError: there is none.
    """
    if name not in NAMES:
        raise KeyError(name)
    return Challenge(name, importlib.import_module(f"course.challenges.{name}.meter"))


def seeds(challenge: Challenge, fresh: str = "") -> list[str]:
    """The standard seeds, or those of a fresh set."""
    if not fresh:
        return [f"{challenge.name}:{number}" for number in range(STANDARD)]
    return [f"{challenge.name}:{fresh}:{number}" for number in range(FRESH)]


def digest(load: Any) -> str:
    """Of a workload: equal on every machine, or the scores are not."""
    return hashlib.sha256(json.dumps(load, sort_keys=True).encode()).hexdigest()[:16]


def recorded() -> dict[str, list[dict[str, Any]]]:
    """Per challenge, of each standard workload its digest and vLLM's score, from `record.py`."""
    found: dict[str, list[dict[str, Any]]] = json.loads(
        (HERE / "recorded.json").read_text(encoding="utf-8")
    )
    return found


def standard(challenge: Challenge) -> int:
    """vLLM's score over the standard workloads, as it was recorded."""
    return sum(each["vllm"] for each in recorded()[challenge.name])


def play(challenge: Challenge, file: Path, load: Any) -> int:
    """The score of the answer in `file` on one workload.

    Raises:
        Wrong: it has none.
    """
    players: list[Player] = []

    def answer(setup: Any, **oracles: Callable[..., Any]) -> Player:
        assert not players, "one process for one workload"
        player = Player(file, oracles)
        players.append(player)
        player.begin(setup)
        return player

    try:
        return challenge.meter.play(answer, load)
    except Wrong as error:
        said = players[0].tail() if players else ""
        raise Wrong(f"{error}\nYour code printed:\n{said}" if said else str(error)) from None
    finally:
        for player in players:
            player.close()


def evaluate(challenge: Challenge, file: Path, fresh: str = "") -> Verdict:
    """Score an answer on the standard workloads and on a fresh set.

    Args:
        fresh: the fresh set's seed; drawn when empty, and kept in the verdict so that the same
            numbers can be had again.

    Raises:
        ValueError: this Python draws other standard workloads than those recorded.
    """
    verdict = Verdict(seed=fresh or secrets.token_hex(6))
    known = recorded()[challenge.name]
    try:
        for place, (seed, kept) in enumerate(zip(seeds(challenge), known, strict=True)):
            load = challenge.meter.workload(seed)
            if digest(load) != kept["digest"]:
                raise ValueError(
                    f"{seed} is drawn otherwise by this Python than where vLLM was recorded, so "
                    "scores could not be compared. Python 3.11 to 3.14 draw the same."
                )
            score = play(challenge, file, load)
            if place == 0 and play(challenge, file, load) != score:
                raise Wrong("two runs on one workload scored differently: remove what is random")
            verdict.score += score
            verdict.vllm += kept["vllm"]
        for seed in seeds(challenge, verdict.seed):
            load = challenge.meter.workload(seed)
            verdict.fresh += play(challenge, file, load)
            verdict.fresh_vllm += challenge.meter.vllm(load)
    except Wrong as error:
        return Verdict(seed=verdict.seed, why=str(error))
    reached = challenge.marks(verdict.score, verdict.vllm)
    confirmed = challenge.marks(verdict.fresh, verdict.fresh_vllm)
    verdict.marks = [mark for mark in reached if mark in confirmed]
    verdict.fitted = len(verdict.marks) < len(reached)
    return verdict


def every() -> Iterator[Challenge]:
    """All challenges, in their order."""
    return (load(name) for name in NAMES)

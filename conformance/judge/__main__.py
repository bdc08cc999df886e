"""Hold a program in any language against the recordings of the real scheduler.

    python -m conformance.judge --command "python my_scheduler.py" FILE...

The program reads one JSON object per line and answers each with one; README.md has the format. The
first difference of every workload is counted; exit status 0 when there is none, 1 when there is, 2
when nothing could be judged.
"""

from __future__ import annotations

import argparse
import json
import queue
import shlex
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from conformance.judge.reader import workloads
from conformance.words import show

ORDERED = ("num_scheduled_tokens", "skipped")
"""Fields whose keys' order is part of the decision."""
PARTIAL = ("block_ids", "num_computed_tokens")
"""Fields in which a program may say more than the recording: of requests that did not run."""
ABORTS = "finish_reasons"
"""An abort may be noted there or not."""


class ProgramError(Exception):
    """The program under test cannot be asked any more; the message says why."""


@dataclass(slots=True)
class Verdict:
    """What was found."""

    num_workloads: int = 0
    num_steps: int = 0
    differences: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    compared: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        lines = [f"  passed over {count}: {reason}" for reason, count in self.skipped.most_common()]
        fields = ", ".join(sorted(self.compared)) or "none"
        lines.append(f"  fields that were answered: {fields}")
        lines.append(
            f"{self.num_workloads} workloads, {self.num_steps} steps: "
            f"{len(self.differences)} differ"
        )
        return "\n".join(lines)


class Program:
    """The program under test: a process that answers line by line."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self.seconds = seconds
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        except OSError as error:
            raise ProgramError(f"{command[0]}: {error.strerror}") from error
        assert self.process.stdin and self.process.stdout
        self._stdin: IO[str] = self.process.stdin
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """One question, one answer.

        Raises:
            ProgramError: it ended, is silent for too long, or answers something else.
        """
        try:
            self._stdin.write(json.dumps(message, separators=(",", ":")) + "\n")
            self._stdin.flush()
            line = self._lines.get(timeout=self.seconds)
        except (BrokenPipeError, queue.Empty) as error:
            if isinstance(error, queue.Empty):
                raise ProgramError(f"no answer within {self.seconds:g} s") from None
            line = ""
        if not line:
            raise ProgramError(f"the program ended with status {self.process.wait()}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise ProgramError(f"not JSON: {show(line.strip(), 200)}") from None
        if not isinstance(answer, dict):
            raise ProgramError(f"not an object: {show(answer, 200)}")
        return answer

    def close(self) -> None:
        """Let it end; it is made to where it does not."""
        try:
            self._stdin.close()
            self.process.wait(timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


def judge(program: Program, paths: Sequence[Path], seeds: Sequence[int] = ()) -> Verdict:
    """Ask about every workload of some files.

    Args:
        program: the program under test.
        paths: files of recordings.
        seeds: only these; empty: all.

    Raises:
        ProgramError: the program cannot be asked any more.
        OSError, ValueError: a file cannot be read, or is not a recording.
    """
    verdict = Verdict()
    for path in paths:
        for workload in workloads(path):
            if seeds and workload["seed"] not in seeds:
                continue
            told = {key: workload[key] for key in ("seed", "eos_token_id", "config")}
            adds = [add for step in workload["steps"] for add in step["add"]]
            if any(add.get("grammar") for add in adds):
                told["config"] = {**told["config"], "grammars": True}
            answer = program.ask({"workload": told})
            if "skip" in answer:
                verdict.skipped[str(answer["skip"])] += 1
                continue
            verdict.num_workloads += 1
            if difference := _first_difference(program, workload, verdict):
                verdict.differences.append(f"{path.name}, seed {workload['seed']}, {difference}")
    return verdict


def _first_difference(program: Program, workload: dict[str, Any], verdict: Verdict) -> str:
    """The first step and field in which the program leaves the recording, "" when none."""
    for step in workload["steps"]:
        decided = step.pop("decided")
        answer = program.ask({"step": step})
        verdict.num_steps += 1
        if "num_scheduled_tokens" not in answer:
            raise ProgramError(f"step {step['step']}: an answer without num_scheduled_tokens")
        if unknown := [key for key in answer if key not in decided]:
            raise ProgramError(
                f"step {step['step']}: {unknown[0]} is not a field of this recording; "
                f"it has {', '.join(decided)}"
            )
        verdict.compared |= answer.keys()
        for key, want in decided.items():
            if key in answer and not same(key, want, answer[key], decided):
                return (
                    f"step {step['step']}, {key}\n  expected  {show(want)}\n"
                    f"  got       {show(answer[key])}"
                )
    return ""


def same(key: str, want: Any, have: Any, decided: Mapping[str, Any]) -> bool:
    """Whether a field is as recorded, within the format's freedom."""
    if key in ORDERED:
        return isinstance(have, dict) and list(want.items()) == list(have.items())
    if key in PARTIAL and isinstance(have, dict):
        idle = set(decided["running"]) - set(decided["num_scheduled_tokens"])
        empty: Any = [] if key == "block_ids" else 0
        return all(have.get(r, empty) == value for r, value in want.items()) and all(
            r in want or r in idle for r in have
        )
    if key == ABORTS and isinstance(have, dict):
        return all(have.get(r) == reason for r, reason in want.items()) and all(
            r in want or reason == "abort" for r, reason in have.items()
        )
    return bool(want == have)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.judge",
        description="Hold a program in any language against the real scheduler's recordings.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--command", required=True, help="what starts the program, in one string")
    parser.add_argument("--seed", type=int, action="append", default=[], help="only this workload")
    parser.add_argument("--seconds", type=float, default=60.0, help="longest wait for an answer")
    parser.add_argument("--all", action="store_true", help="show every difference")
    arguments = parser.parse_args(argv)
    command = shlex.split(arguments.command)
    if not command:
        parser.error("--command='': need a program")
    if not arguments.seconds > 0:
        parser.error(f"--seconds={arguments.seconds}: need a number above 0")
    try:
        program = Program(command, arguments.seconds)
    except ProgramError as error:
        parser.error(str(error))
    try:
        verdict = judge(program, arguments.files, arguments.seed)
    except (ProgramError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        program.close()
    print(*verdict.differences[: None if arguments.all else 1], verdict, sep="\n")
    if not verdict.num_workloads:
        return 2
    return 1 if verdict.differences else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The process of an answer: loads one file, and answers calls with plain values.

Nothing of the meter and nothing of a workload is here but the arguments of the calls made so far.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import math
import os
import random
import sys
import traceback
from typing import Any

LARGEST = 16 * 2**20
"""Bytes of a file that an answer may write: what it prints is such a file too."""


def _place(error: BaseException, file: str) -> str:
    """The innermost line of the answer's file that an error passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f"line {frames[-1].lineno}: " if frames else ""


def serve(file: str, computing: float, waiting: float, memory: int) -> None:
    """Answer one line of JSON with another until the input ends.

    Args:
        computing: seconds of processor time after which the system ends this process.
        waiting: seconds of a clock after which it ends itself.
    """
    source = os.fdopen(os.dup(0), "r", encoding="utf-8")
    target = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an answer prints is not an answer
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    faulthandler.dump_traceback_later(waiting, exit=True, file=2)
    if memory and sys.platform.startswith("linux"):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
        whole = math.ceil(computing)
        resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 1))
    random.seed(0)

    def tell(message: dict[str, Any]) -> None:
        target.write(json.dumps(message) + "\n")
        target.flush()

    def oracle(name: str) -> Any:
        def asked(*args: Any) -> Any:
            tell({"ask": name, "args": args})
            line = source.readline()
            if not line:
                os._exit(1)
            told = json.loads(line)
            if "refused" in told:
                raise ValueError(told["refused"])
            return told["value"]

        return asked

    answer: Any = None
    try:
        for line in source:
            call = json.loads(line)
            if call["call"] == "begin":
                spec = importlib.util.spec_from_file_location("answer", file)
                assert spec and spec.loader
                module = importlib.util.module_from_spec(spec)
                sys.modules["answer"] = module
                spec.loader.exec_module(module)
                answer = module.Answer(*call["args"], *map(oracle, call["oracles"]))
                tell({"value": None})
            else:
                tell({"value": getattr(answer, call["call"])(*call["args"])})
    except BaseException as error:  # SystemExit too: it is an answer's way to say nothing
        text = str(error).splitlines()[0] if str(error) else ""
        tell({"error": f"{_place(error, file)}{type(error).__name__}: {text}"[:500]})
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(0)  # and no thread or exit handler of the answer goes on


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))

"""Run a command so that nothing of it outlives its caller: `python keeper.py COMMAND...`

A process between the tool and what it runs. Its standard input is a pipe that the tool holds open
and never writes to: it ends when the tool ends it or dies, by whatever signal. Promises: then, and
when the command is done, every process the command started is ended, also one with a session of
its own (on Linux; elsewhere the command and its group). The command's exit code is the only thing
written to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

POSIX = os.name == "posix"
PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Run `command`, end what it left running, and report its exit code."""
    adopting = _adopt_orphans()
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=POSIX
    )
    threading.Thread(target=_end_when_left, args=(child,), daemon=True).start()
    code = child.wait()
    _end_group(child.pid)
    if adopting:
        _end_descendants()
    with contextlib.suppress(OSError):  # nobody reads it where the tool is gone
        os.write(2, f"{code}\n".encode())
    return 0


def _end_when_left(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    _end_group(child.pid)
    child.kill()


def _end_group(leader: int) -> None:
    if POSIX:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def _adopt_orphans() -> bool:
    """Whether the system makes us the parent of every orphan of the command (Linux)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def _end_descendants() -> None:
    """Kill and collect until there are none: what a killed one had just started comes to us."""
    while True:
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # pid (name, which may hold anything) state parent ...
            parent = int(stat.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        own = children.get(waiting.pop(), [])
        found += own
        waiting += own
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Whether code answers an exercise: it runs, then the exercise's test runs on its names.

Promises: an answer that fails is told what the test says, or what went wrong on which of its own
lines; what the answer prints is kept apart from that. The page calls `judge`; the command runs this
module in a process of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import sys
import traceback
from types import ModuleType
from typing import Any

OWN = "your code"
TEST = "the test"
LONGEST = 20_000
"""Characters of output that are shown."""


def judge(code: str, test: str) -> dict[str, Any]:
    """Run an answer and its test.

    Returns:
        `right`; `said`, why not, or ""; `line` of the answer that failed, or None; `printed`.
    """
    module = ModuleType("exercise")
    out = io.StringIO()
    said, line = "", None
    ours = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module  # where a dataclass looks for its module
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            _run(code, OWN, module)
            _run(test, TEST, module)
    except BaseException as failure:
        said, line = _told(failure)
    finally:
        del sys.modules[module.__name__]
        if ours is not None:
            sys.modules[module.__name__] = ours
    return {"right": not said, "said": said, "line": line, "printed": out.getvalue()[:LONGEST]}


def _run(code: str, name: str, module: ModuleType) -> None:
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    exec(compile(code, name, "exec"), module.__dict__)


def _told(failure: BaseException) -> tuple[str, int | None]:
    """What to say of a failure, and the line of the answer it comes from."""
    if isinstance(failure, SyntaxError) and failure.filename == OWN:
        return f"line {failure.lineno}: {failure.msg}", failure.lineno
    frames = traceback.extract_tb(failure.__traceback__)
    own = [frame.lineno for frame in frames if frame.filename == OWN]
    line = own[-1] if own else None
    if isinstance(failure, NotImplementedError):
        return f"{failure or 'This'} is not written yet.", line
    in_test = bool(frames) and frames[-1].filename == TEST
    if isinstance(failure, AssertionError) and in_test:
        return str(failure) or "The test fails.", None
    words = "".join(traceback.format_exception_only(failure)).strip()
    return (f"line {line}: {words}" if line else words), line


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(json.dumps(judge(given["code"], given["test"])))

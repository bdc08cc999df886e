"""Run the python blocks of one page, one namespace, and write what each printed.

The child side of `course docs check`: `python -m course.truth.pagerunner JOB.json`. A block that
fails ends the page.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


def main(job_file: str) -> int:
    """Run the job; 0 when every block ran."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    # Classes of a page belong to __main__, as in a script; ours makes room for the page's.
    ours, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    namespace: dict[str, Any] = sys.modules["__main__"].__dict__
    status = _run(job, namespace)
    sys.modules["__main__"] = ours
    return status


def _run(job: dict[str, Any], namespace: dict[str, Any]) -> int:
    page = job["page"]
    with open(job["out"], "w", encoding="utf-8") as out:
        for text, line in job["blocks"]:
            # Blank lines in front give the block the page's own line numbers.
            source = "\n" * line + text
            name = f"{page}:{line}"  # one name per block, so that inspect finds its source
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            captured, error, at = io.StringIO(), "", 0
            with contextlib.redirect_stdout(captured):
                try:
                    exec(compile(source, name, "exec"), namespace)
                except BaseException as failure:
                    error, at = _told(failure, name)
            record = {"output": captured.getvalue(), "error": error, "line": at}
            out.write(json.dumps(record) + "\n")
            out.flush()
            if error:
                return 1
    return 0


def _told(failure: BaseException, name: str) -> tuple[str, int]:
    """An error as one line, and the page line it came from."""
    text = "".join(traceback.format_exception_only(failure)).strip().splitlines()[-1]
    if isinstance(failure, SyntaxError) and failure.filename == name:
        return f"this block is not Python: {text}", failure.lineno or 0
    lines = [
        frame.lineno or 0
        for frame in traceback.extract_tb(failure.__traceback__)
        if frame.filename == name
    ]
    return f"this block raised {text}", lines[-1] if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

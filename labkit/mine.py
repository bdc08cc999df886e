"""A course in which given labs are passed, and what `course run` says there.

For the test each phase has that its labs' parts serve the engine. Needs pytest and the course.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


class PassedCourse:
    """Copies of some labs in an empty folder, each solved and recorded as passed."""

    def __init__(
        self,
        folder: Path,
        ids: Sequence[str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Args: folder is an empty one; ids are labs such as "03-01"."""
        from course.learning.grading import Report, TestResult
        from course.learning.labs import find_labs
        from course.learning.progress import Progress, digest_of

        self.monkeypatch, self.capsys = monkeypatch, capsys
        shutil.copy(ROOT / "conftest.py", folder)
        for lab in find_labs(ROOT):
            if lab.id in ids:
                shutil.copytree(lab.folder, folder / lab.folder.relative_to(ROOT))
        results = [TestResult("starter", "test_lab.py::test", "passed")]
        for copy in find_labs(folder):
            shutil.copy(copy.solution, copy.starter)
            passed = Report(results, digest=digest_of(copy))  # graded elsewhere: selfcheck
            Progress(folder).record(copy, passed)
        monkeypatch.chdir(folder)
        monkeypatch.delenv("COURSE_ROOT", raising=False)
        monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)  # commands are said bare

    def run(self, prompt: str, *options: str, max_tokens: int = 12) -> str:
        """What `course run OPTIONS PROMPT` prints; it must succeed."""
        return self.say("run", *options, "--max-tokens", str(max_tokens), prompt)

    def say(self, *arguments: str) -> str:
        """What `course ARGUMENTS` prints; it must succeed."""
        from course import cli

        self.monkeypatch.setattr(sys, "argv", ["course", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = self.capsys.readouterr()
        assert not end.value.code, err
        return out

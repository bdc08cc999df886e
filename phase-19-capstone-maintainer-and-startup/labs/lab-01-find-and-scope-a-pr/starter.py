"""Lab 19-01: triage as code. A complete plan, a candidate that survives, the jobs of a diff.

What can be checked without judgement is checked here, so that judgement is left for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIELDS = (
    "Issue",
    "Reproduced at",
    "Cause (file:line)",
    "Fix sketch",
    "Test plan",
    "Blast radius",
    "Out of scope",
    "Open questions for maintainers",
)
"""Of a plan, in order. A field begins with its name and a colon at the beginning of a line."""
MOST_WORDS = 450
MOST_QUESTIONS = 2
MOST_LINES = 500
"""Changed lines without kernels, data, configuration and tests; more need an RFC issue first."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An issue that you might work on, and what was found out about it."""

    number: int
    open_pr: bool
    """Whether an open pull request addresses it."""
    fixed: bool
    """Whether a merged one did."""
    reproduced_at: str | None
    """The commit at which you saw it yourself; None: not yet."""
    cause_file: str | None
    """The file that has the cause; None: not known."""
    in_map: bool
    """Whether you know this part of the code."""
    changed_lines: int
    has_failing_test: bool
    """Whether a test fails without the change and passes with it."""
    busywork: bool
    """A typo, a style fix, one mutable default, alone."""
    merges_90d: int
    """Merged changes to the area in the last 90 days: whether there is a reviewer."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to go on, and if not, at which check it ended."""

    keep: bool
    failed_check: int | None
    reason: str


def lint_plan(text: str) -> list[str]:
    """What a plan lacks, as sorted codes; [] for a good one.

    Codes, each at most once (of a field that is missing only the first one is reported):

    - `missing:FIELD`: a field of `FIELDS` is not there.
    - `order`: those that are there stand in another order, or one stands twice.
    - `no-issue-number`: `Issue` has no `#N`.
    - `no-commit`: `Reproduced at` has no commit, a word of 7 to 40 hexadecimal digits. A number
      behind `#` is an issue.
    - `cause-without-location`: the cause has no `path.py:NN`.
    - `test-without-file`: the test plan has no `tests/...py`.
    - `test-without-assertion`: it has no word that begins with assert, expect or equal.
    - `blast-radius-incomplete`: TP, quant..., LoRA and spec or speculat... are not all named.
    - `empty-out-of-scope`: nothing stands behind it, no letter and no digit.
    - `too-many-questions`: more than 2 items in the list of questions. An item is a line that
      begins with `-`, `*` or a number and a point; question marks are not counted.
    - `too-long`: more than 450 words in the whole plan.

    Case does not matter, except in the names of fields.
    """
    raise NotImplementedError


def gauntlet(c: Candidate) -> Verdict:
    """The five checks in this order; the first that fails ends it.

    1. not claimed and not fixed; 2. reproduced at a commit; 3. the cause is known and lies in your
    map; 4. a small fix (at most 500 lines) with a test that fails without it, and not busywork;
    5. somebody merges in this area.

    Returns:
        `Verdict(True, None, reason)`, or `Verdict(False, the check, reason)`; the reason is a
        sentence for yourself and is not empty.
    """
    raise NotImplementedError


def jobs_for(
    paths: Sequence[str], areas: Mapping[str, Any], include_optional: bool = False
) -> list[str]:
    """The sorted labels of the CI steps that a diff selects.

    A step is selected if one of its `source_file_dependencies` is a prefix of a changed path, as
    strings: `tests/entrypoints/test_chat` is one of `tests/entrypoints/test_chat_utils.py`. A step
    without the key is always selected. All steps are if a changed path has one of
    `run_all_patterns` as a prefix and none of `run_all_exclude_patterns`. Steps with `optional` are
    left out unless they are asked for.

    Args:
        paths: changed files, from the root of the repository.
        areas: `run_all_patterns`, `run_all_exclude_patterns` and `steps`, each of which has `label`
            and `optional`, and may have `source_file_dependencies`.
        include_optional: also those that are started by hand or at night.
    """
    raise NotImplementedError

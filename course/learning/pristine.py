"""The starters as the course ships them, kept so that `course reset` works without git.

They lie in one text file, `course/starters.json`: id to lines, so that it merges and diffs by
line. A maintainer's `course selfcheck --pack` writes it, and only for labs that pass; selfcheck
fails when it is behind.
"""

from __future__ import annotations

import json
from pathlib import Path

from course.files import write_atomically
from course.learning.labs import CourseError


def path_of(root: Path) -> Path:
    """Where the pack lies in the checkout at `root`."""
    return root / "course" / "starters.json"


def read(root: Path) -> dict[str, str]:
    """Lab id to the text of its pristine starter; empty when there is no pack.

    Raises:
        CourseError: the pack is not what `write` writes.
    """
    try:
        data = json.loads(path_of(root).read_text(encoding="utf-8"))
        return {lab_id: "\n".join(lines) for lab_id, lines in data.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CourseError(
            f"course/starters.json cannot be read ({type(error).__name__}: {error}). It belongs to "
            "the repository: git checkout -- course/starters.json"
        ) from None


def write(root: Path, starters: dict[str, str]) -> Path:
    """Replace the entries of `starters` in the pack, keeping the others; the path written."""
    merged = {**read(root), **starters}
    data = {lab_id: merged[lab_id].split("\n") for lab_id in sorted(merged)}
    path = path_of(root)
    write_atomically(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    return path

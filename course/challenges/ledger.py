"""One's tries at a challenge, kept in `.course/challenges/NAME`.

Promises: no try is lost: its text lies beside its numbers; an unreadable ledger is moved aside; the
answer one works on is written once and never replaced.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from course.challenges.judge import Challenge, Verdict
from course.files import locked, write_atomically
from course.learning.labs import CourseError
from course.learning.progress import FOLDER

KEPT, REJECTED = "kept", "rejected"
FILE = "tries.json"


@dataclass(slots=True)
class Try:
    """One scored answer."""

    when: str
    digest: str
    """Of its text, which is `tries/DIGEST.py`."""
    score: int
    fresh: int
    seed: str
    """Of the fresh workloads."""
    marks: list[str] = field(default_factory=list)
    outcome: str = REJECTED
    """KEPT if it beat every try before it."""
    why: str = ""
    """Why it scored nothing; "" otherwise."""
    note: str = ""


def folder_of(root: Path, challenge: Challenge) -> Path:
    """Where a challenge's answer and tries lie."""
    return root / FOLDER / "challenges" / challenge.name


def answer_of(root: Path, challenge: Challenge) -> Path:
    """The answer one works on; the starter is copied where there is none."""
    path = folder_of(root, challenge) / "answer.py"
    if not path.exists():
        write_atomically(path, challenge.starter.read_bytes())
    return path


def read(root: Path, challenge: Challenge) -> list[Try]:
    """The tries so far, oldest first.

    Raises:
        CourseError: the ledger cannot be read; it has been moved aside.
    """
    path = folder_of(root, challenge) / FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        tries = [Try(**each) for each in data["tries"]]
        if not all(type(t.score) is int and type(t.marks) is list for t in tries):
            raise TypeError("a score that is not a whole number, or marks that are not a list")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        aside = path.with_suffix(f".unreadable-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
        path.replace(aside)
        raise CourseError(
            f"{path.name} of {challenge.name} could not be read ({error}); it was moved to "
            f"{aside.name}. A new one begins with the next try."
        ) from None
    return tries


def best(challenge: Challenge, tries: list[Try]) -> Try | None:
    """The best try that scored; of equals the first."""
    found: Try | None = None
    for each in tries:
        if not each.why and (found is None or challenge.better(each.score, found.score)):
            found = each
    return found


def marks(tries: list[Try]) -> list[str]:
    """The marks of the try that reached most."""
    return max((each.marks for each in tries), key=len, default=[])


def keep(root: Path, challenge: Challenge, text: bytes, verdict: Verdict, note: str) -> Try:
    """Write a try down, with its text."""
    folder = folder_of(root, challenge)
    digest = hashlib.sha256(text).hexdigest()[:12]
    with locked(folder / "lock"):
        tries = read(root, challenge)
        before = best(challenge, tries)
        beats = before is None or challenge.better(verdict.score, before.score)
        made = Try(
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            digest=digest,
            score=verdict.score,
            fresh=verdict.fresh,
            seed=verdict.seed,
            marks=verdict.marks,
            outcome=KEPT if beats and not verdict.why else REJECTED,
            why=verdict.why,
            note=note,
        )
        write_atomically(folder / "tries" / f"{digest}.py", text)
        _write(root, challenge, [*tries, made])
    return made


def with_texts(root: Path, challenge: Challenge) -> list[dict[str, Any]]:
    """The tries so far with what was scored, `text`; "" where that is gone."""
    found = []
    for each in read(root, challenge):
        file = folder_of(root, challenge) / "tries" / f"{each.digest}.py"
        text = file.read_bytes().decode("utf-8", "replace") if file.is_file() else ""
        found.append({**asdict(each), "text": text})
    return found


def take(root: Path, challenge: Challenge, given: list[dict[str, Any]]) -> int:
    """Put tries of another place among those that are here, each once; how many are new.

    Args:
        given: as `with_texts` gives them. A text that is not the one its digest names is left out.
    """
    names = [each.name for each in fields(Try)]
    folder = folder_of(root, challenge)
    with locked(folder / "lock"):
        tries = read(root, challenge)
        here = {(each.when, each.digest) for each in tries}
        found = {(each["when"], each["digest"]): each for each in given}
        new = [
            Try(**{name: each[name] for name in names})
            for key, each in found.items()
            if key not in here
        ]
        if not new:
            return 0
        for each in given:
            text = each["text"].encode("utf-8", "replace")
            if hashlib.sha256(text).hexdigest()[:12] == each["digest"]:
                write_atomically(folder / "tries" / f"{each['digest']}.py", text)
        _write(root, challenge, sorted([*tries, *new], key=lambda each: each.when))
    return len(new)


def _write(root: Path, challenge: Challenge, tries: list[Try]) -> None:
    data = {"version": 1, "challenge": challenge.name, "tries": [asdict(each) for each in tries]}
    path = folder_of(root, challenge) / FILE
    write_atomically(path, json.dumps(data, indent=1) + "\n")


def share(root: Path, challenge: Challenge, out: Path) -> Try:
    """Write the best try with its text to a file that others can check.

    Raises:
        CourseError: no try has scored, or the file is there.
    """
    found = best(challenge, read(root, challenge))
    if found is None:
        raise CourseError(
            f"No try at {challenge.name} has scored yet: course challenge {challenge.name} --check"
        )
    if out.exists():
        raise CourseError(f"{out} exists already: name a new file")
    text = (folder_of(root, challenge) / "tries" / f"{found.digest}.py").read_text("utf-8")
    data = {"version": 1, "challenge": challenge.name, **asdict(found), "answer": text}
    write_atomically(out, json.dumps(data, indent=1) + "\n")
    return found

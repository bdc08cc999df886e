"""What one did about the bad days, kept in `.course/incidents.json`.

Promises: nothing is lost to a file that cannot be read: it is moved aside, and that is said.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from course.files import locked, write_atomically
from course.incidents import judge
from course.learning.labs import CourseError
from course.learning.progress import FOLDER

FILE = "incidents.json"


@dataclass(slots=True)
class Entry:
    """One day."""

    wrong: list[str] = field(default_factory=list)
    """Causes that were named and contradicted, each once."""
    cause: str = ""
    """The one that nothing contradicts; "" until it is named."""
    replays: int = 0
    """Knobs turned."""
    fix: str = ""
    """With which the limit held, as "max_num_seqs=8"; "" until then."""
    at: str = ""
    """When the entry changed last."""


KEYS = tuple(each.name for each in fields(Entry))


def problem(value: Any) -> str:
    """Why a value cannot be an entry; "" where it can."""
    if not isinstance(value, dict):
        return "must be an object"
    wrong = value.get("wrong")
    if not isinstance(wrong, list) or not all(each in judge.CAUSES for each in wrong):
        return "wrong must be a list of causes"
    if value.get("cause") != "" and value.get("cause") not in judge.CAUSES:
        return "cause must be one of the list, or empty"
    if type(value.get("replays")) is not int or not 0 <= value["replays"] < 2**53:
        return "replays must be a whole number"
    fix = value.get("fix")
    if not isinstance(fix, str) or len(fix) > 100 or not fix.isprintable():
        return "fix must be a short text"
    return ""


def read(root: Path) -> dict[str, Entry]:
    """What was done, by day.

    Raises:
        CourseError: the file cannot be read; it has been moved aside.
    """
    path = root / FOLDER / FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))["days"]
        found = {}
        for name, value in data.items():
            if why := problem(value):
                raise ValueError(f"{name}: {why}")
            found[name] = Entry(**{key: value[key] for key in KEYS})
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        aside = path.with_suffix(f".unreadable-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
        path.replace(aside)
        raise CourseError(
            f"{FILE} could not be read ({error}); it was moved to {aside.name}. "
            "A new one begins with the next try."
        ) from None
    return found


def note(root: Path, name: str, change: dict[str, Any]) -> Entry:
    """Change a day's entry; the changed one.

    Args:
        change: `wrong` is one cause to add, `replays` a number to add; others replace.
    """
    with locked(root / FOLDER / f"{FILE}.lock"):
        days = read(root)
        entry = days.setdefault(name, Entry())
        for key, value in change.items():
            if key == "wrong":
                entry.wrong += [value] if value not in entry.wrong else []
            elif key == "replays":
                entry.replays += value
            else:
                setattr(entry, key, value)
        entry.at = datetime.now(UTC).isoformat(timespec="milliseconds")
        _write(root, days)
    return entry


def put(root: Path, given: dict[str, Entry]) -> int:
    """Take entries of another place where they are newer; how many are taken."""
    with locked(root / FOLDER / f"{FILE}.lock"):
        days = read(root)
        newer = {
            name: entry
            for name, entry in given.items()
            if name not in days
            or datetime.fromisoformat(entry.at) > datetime.fromisoformat(days[name].at)
        }
        if newer:
            _write(root, days | newer)
    return len(newer)


def _write(root: Path, days: dict[str, Entry]) -> None:
    data = {"version": 1, "days": {name: asdict(entry) for name, entry in days.items()}}
    write_atomically(root / FOLDER / FILE, json.dumps(data, indent=1) + "\n")

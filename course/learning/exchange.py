"""What was done in the book's pages, taken into this checkout, and the other way round.

The file is the one `book/store.js` exports. Promises: a file that does not fit is refused with
everything that is wrong with it before anything is written; a starter that gives way is kept in
`.course/backup`, and a prediction that is committed stays; where one file cannot be written all
stay as they were; a lab counts as passed only when this machine has graded it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from course.challenges import judge, ledger
from course.files import write_atomically
from course.incidents import judge as days
from course.incidents import ledger as incidents
from course.learning import exercises, hunts, predictions, quiz, starters
from course.learning.labs import CourseError, Lab
from course.learning.predictions import Answer
from course.learning.progress import FOLDER, PASSED, STARTED, Progress

FORMAT = "course-progress"
VERSION = 1
LARGEST = 64 * 2**20
"""Bytes of a file."""
LONGEST = 400_000
"""Characters of one text, as in book/store.js."""
LONGEST_LIST = 12
MOST_TRIES = 1000
"""At one challenge, as in book/store.js."""
PARTS = ("edits", "results", "answers", "predictions", "read", "hunts", "tries", "incidents")
ADDED = ("predictions", "hunts", "tries", "incidents")
"""Files from before have none."""
_LAB = re.compile(r"\d\d-\d\d")
_PREDICTION = re.compile(r"\d\d-\d\d/[a-z][a-z0-9_]{0,99}")


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer to a question of a quiz, and the time it was given."""

    given: str
    at: datetime


@dataclass(slots=True)
class Taken:
    """What an import did, by lab, question or prediction."""

    written: list[str] = field(default_factory=list)
    kept: dict[str, Path] = field(default_factory=dict)
    """Where the text stands that a lab's starter.py had before."""
    same: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """What the file has and this checkout has not."""
    answers: int = 0
    predictions: int = 0
    hunts: list[str] = field(default_factory=list)
    """Labs whose hunt was taken: it is newer than what stood here."""
    tries: int = 0
    """At challenges."""
    incidents: int = 0
    """Bad days of which the file knows more."""


# ------------------------------------------------------------------ reading


def read(path: Path) -> dict[str, Any]:
    """The content of an exported file.

    Raises:
        CourseError: it cannot be read, or does not fit; with everything that is wrong.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise CourseError(f"{path}: more than {LARGEST // 2**20} MiB: not a file of the book")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CourseError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError):
        raise CourseError(f"{path}: not JSON: choose a file exported in the book") from None
    problems = list(problems_of(data))
    if problems:
        more = len(problems) - LONGEST_LIST
        shown = problems[:LONGEST_LIST] + ([f"and {more} more"] if more > 0 else [])
        raise CourseError("\n".join(f"{path}: {problem}" for problem in shown))
    return dict(data)


def problems_of(data: Any) -> Iterator[str]:
    """What is wrong with the content of a file, each with its place."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        yield f'not a file of the book: its format must be "{FORMAT}"'
        return
    if data.get("version") != VERSION:
        yield f"version is {data.get('version')!r}: this course reads {VERSION}"
        return
    for part in PARTS:
        entries = data.get(part, {} if part in ADDED else None)
        if not isinstance(entries, dict):
            yield f"{part} must be an object, not {_short(entries)}"
            continue
        for name, entry in entries.items():
            where = f"{part}.{_short(name)}"
            if part in ("edits", "results", "hunts") and not _LAB.fullmatch(name):
                yield f'{where}: a lab is named as in "02-01"'
            elif part == "predictions" and not _PREDICTION.fullmatch(name):
                yield f'{where}: a prediction is named as in "02-01/steps"'
            elif part == "read":
                if _time(entry) is None:
                    yield f"{where} must be a time, not {_short(entry)}"
            elif not isinstance(entry, dict):
                yield f"{where} must be an object, not {_short(entry)}"
            else:
                yield from (f"{where}.{problem}" for problem in _entry_problems(part, entry))


def _entry_problems(part: str, entry: Mapping[str, Any]) -> Iterator[str]:
    if part == "tries":
        yield from _tries_problems(entry.get("tries"))
    if part == "hunts":
        yield from _hunt_problems(entry)
    if part == "incidents" and (problem := incidents.problem(entry)):
        yield problem
    text = {"edits": "text", "answers": "given", "hunts": "text"}.get(part)
    if text:
        value = entry.get(text)
        if not isinstance(value, str) or len(value) > LONGEST:
            yield f"{text} must be a text of at most {LONGEST:,} characters"
        elif any("\ud800" <= letter <= "\udfff" for letter in value):
            yield f"{text} holds half a character"
    for key in ("given", "measured", "first") if part == "predictions" else ():
        if (key == "given" or key in entry) and not _is_answer(entry.get(key)):
            yield f"{key} must be a number or a text, not {_short(entry.get(key))}"
    if _time(entry.get("at")) is None:
        yield f"at must be a time, not {_short(entry.get('at'))}"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _hunt_problems(entry: Mapping[str, Any]) -> Iterator[str]:
    if entry.get("level") not in hunts.LEVELS or type(entry["level"]) is not int:
        yield f"level must be 1, 2 or 3, not {_short(entry.get('level'))}"
    for key in ("seed", "checks", "score", "of"):
        if not _is_count(entry.get(key)):
            yield f"{key} must be a whole number, not {_short(entry.get(key))}"
    for key in ("began", "found"):
        if not (key == "found" and entry.get(key) == "") and _time(entry.get(key)) is None:
            yield f"{key} must be a time, not {_short(entry.get(key))}"


def _tries_problems(tries: Any) -> Iterator[str]:
    if not isinstance(tries, list) or len(tries) > MOST_TRIES:
        yield f"tries must be a list of at most {MOST_TRIES:,}, not {_short(tries)}"
        return
    for number, each in enumerate(tries):
        where = f"tries[{number}]"
        if not isinstance(each, dict):
            yield f"{where} must be an object, not {_short(each)}"
            continue
        for key in ("score", "fresh"):
            if not _is_count(each.get(key)):
                yield f"{where}.{key} must be a whole number, not {_short(each.get(key))}"
        for key in ("seed", "outcome", "why", "note", "text"):
            if not _is_text(each.get(key)):
                yield f"{where}.{key} must be a text, not {_short(each.get(key))}"
        if not re.fullmatch(r"[0-9a-f]{12}", str(each.get("digest"))):
            yield f"{where}.digest must be 12 letters of a hash, not {_short(each.get('digest'))}"
        marks = each.get("marks")
        if not isinstance(marks, list) or not all(map(_is_text, marks)):
            yield f"{where}.marks must be a list of names, not {_short(marks)}"
        if _time(each.get("when")) is None:
            yield f"{where}.when must be a time, not {_short(each.get('when'))}"


def _is_text(value: Any) -> bool:
    """A text that can be kept: not too long, and no half characters."""
    if not isinstance(value, str) or len(value) > LONGEST:
        return False
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_answer(value: Any) -> bool:
    """Whether a value can be the answer to a prediction."""
    if isinstance(value, str):
        return _is_text(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _time(value: Any) -> datetime | None:
    """A time as a browser writes it; None where it is none."""
    try:
        found = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:60]


# ------------------------------------------------------------------ importing


def take(root: Path, labs: Sequence[Lab], data: Mapping[str, Any]) -> Taken:
    """Put the edits and predictions into the labs and the answers into the quiz.

    A prediction that is committed here already stays. Of one that was compared in the book the
    first answer is taken: the first counts.

    Args:
        data: the content of a file, as `read` gives it.

    Raises:
        CourseError: a file could not be written; nothing is changed then.
    """
    taken = Taken()
    known = {lab.id: lab for lab in labs}
    texts: dict[str, str] = {}
    for name, entry in sorted(data["edits"].items()):
        text = entry["text"].replace("\r\n", "\n")
        if name not in known:
            taken.unknown.append(name)
        elif _text(known[name]) == text:
            taken.same.append(name)
        else:
            texts[name] = text
    committed = _new_predictions(known, data.get("predictions", {}), taken)
    challenges = [judge.load(name) for name in data.get("tries", {}) if name in judge.NAMES]
    for challenge in challenges:
        ledger.read(root, challenge)  # one that cannot be read stops here
    if data.get("incidents"):
        incidents.read(root)
    touched = [known[name].starter for name in texts]
    touched += dict.fromkeys(known[lab].folder / predictions.FILE for lab, _ in committed)
    touched += [hunts.folder_of(root, known[lab]) for lab in data.get("hunts", {}) if lab in known]
    touched += [ledger.folder_of(root, challenge) / ledger.FILE for challenge in challenges]
    touched += [quiz.Boxes(root / FOLDER).path, root / FOLDER / incidents.FILE]
    with _whole(touched):
        for name in texts:
            lab = known[name]
            if lab.starter.is_file() and not starters.is_current(lab):
                taken.kept[name] = _backup(root, name, lab.starter.read_bytes())
        for name, text in texts.items():
            write_atomically(known[name].starter, text)
            taken.written.append(name)
        for (lab_id, name), answer in committed.items():
            predictions.commit(known[lab_id].folder, name, answer)
            taken.predictions += 1
        answers = {
            name: Answered(entry["given"], _time(entry["at"]) or datetime.now(UTC))
            for name, entry in data["answers"].items()
        }
        taken.answers, unknown = take_answers(root, answers)
        taken.unknown += unknown
        _take_hunts(root, known, data.get("hunts", {}), taken)
        _take_tries(root, data.get("tries", {}), taken)
        _take_incidents(root, data.get("incidents", {}), taken)
    return taken


@contextlib.contextmanager
def _whole(paths: Sequence[Path]) -> Iterator[None]:
    """These files and folders become what they were where the body fails."""
    with tempfile.TemporaryDirectory() as folder:
        kept = {path: Path(folder) / str(number) for number, path in enumerate(paths)}
        for path, copy in kept.items():
            _copy(path, copy)
        try:
            yield
        except (OSError, ValueError, CourseError) as error:
            for path, copy in kept.items():
                _put_back(path, copy)
            why = (
                error if isinstance(error, CourseError) else f"a file could not be written: {error}"
            )
            raise CourseError(f"Nothing was changed: {why}") from None


def _take_hunts(
    root: Path, known: Mapping[str, Lab], given: Mapping[str, Any], taken: Taken
) -> None:
    """Put the hunts of a file in the place of older ones; what was written there is kept."""
    for name, entry in sorted(given.items()):
        if name not in known or not hunts.pool(known[name]):
            taken.unknown.append(f"hunt {name}")
            continue
        lab = known[name]
        here = hunts.read(root, lab)
        if here is not None and hunt_changed(root, lab) >= (
            _time(entry["at"]) or datetime.now(UTC)
        ):
            continue
        made, kept = hunts.begin(root, lab, entry["level"], entry["seed"])
        if kept is not None:
            taken.kept[f"hunt {name}"] = kept
        file = hunts.folder_of(root, lab) / (hunts.TESTS if made.level == 3 else hunts.FILE)
        write_atomically(file, entry["text"].replace("\r\n", "\n"))
        for key in ("began", "checks", "found", "score", "of"):
            setattr(made, key, entry[key])
        hunts.keep(root, lab, made)
        taken.hunts.append(name)


def hunt_changed(root: Path, lab: Lab) -> datetime:
    """When a lab's hunt was last changed here, to the millisecond."""
    folder = hunts.folder_of(root, lab)
    files = [folder / name for name in (hunts.FILE, hunts.TESTS, "hunt.json")]
    newest = max(file.stat().st_mtime for file in files if file.is_file())
    return datetime.fromtimestamp(newest, UTC)


def _take_tries(root: Path, given: Mapping[str, Any], taken: Taken) -> None:
    """Put the tries of a file among those that are here, each once."""
    for name, entry in sorted(given.items()):
        try:
            challenge = judge.load(name)
        except KeyError:
            taken.unknown.append(f"challenge {name}")
            continue
        taken.tries += ledger.take(root, challenge, entry["tries"])


def _take_incidents(root: Path, given: Mapping[str, Any], taken: Taken) -> None:
    """Put what was done about bad days in the place of what is older here."""
    found = {}
    for name, entry in sorted(given.items()):
        if name not in days.DAY:
            taken.unknown.append(f"incident {name}")
            continue
        found[name] = incidents.Entry(**{key: entry[key] for key in incidents.KEYS})
    taken.incidents = incidents.put(root, found)


def _new_predictions(
    known: Mapping[str, Lab], given: Mapping[str, Any], taken: Taken
) -> dict[tuple[str, str], Answer]:
    """By lab and name, the answers of a file that are to be committed; others go into `taken`."""
    found: dict[tuple[str, str], Answer] = {}
    for full, entry in sorted(given.items()):
        lab, _, name = full.partition("/")
        asked = known[lab].manifest.predictions if lab in known else {}
        if name in asked and name in predictions.committed(known[lab].folder, asked)[0]:
            continue
        try:
            found[lab, name] = asked[name].read(_first(entry))
        except (KeyError, ValueError):  # another course's, or a question that has changed
            taken.unknown.append(full)
    return found


def _first(entry: Mapping[str, Any]) -> Answer:
    """Of a prediction that was compared the answer that was; else the one that stands."""
    compared = entry.get("measured") is not None and entry.get("first") is not None
    answer: Answer = entry["first"] if compared else entry["given"]
    return answer


def take_answers(root: Path, answers: Mapping[str, Answered]) -> tuple[int, list[str]]:
    """Put answers into the quiz's boxes, checked here; how many, and which are to no question.

    A question that the quiz has asked already stays where it is: a file may be taken twice. Code
    goes into the file of its exercise, where there is none yet, for the command to grade.
    """
    questions = {q.id: q for path in quiz.files(root) for q in quiz.load(path)[0]}
    coded = exercises.every(root)
    folder, count = root / FOLDER, 0
    asked = quiz.Boxes(folder).cards
    for name, answer in answers.items():
        if name in coded:
            path = exercises.answer_file(folder, coded[name])
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, answer.given)
                count += 1
        if name in questions and name not in asked:
            day = answer.at.astimezone().date()
            quiz.Boxes(folder, day).put(name, questions[name].check(answer.given))
            count += 1
    return count, sorted(answers.keys() - questions.keys() - coded.keys())


def _backup(root: Path, lab: str, data: bytes) -> Path:
    stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    copy = root / FOLDER / "backup" / f"{lab}-{stamp}.py"
    write_atomically(copy, data)
    return copy


def _copy(path: Path, to: Path) -> None:
    """With its times, since a hunt's say how new it is."""
    if path.is_dir():
        shutil.copytree(path, to)
    elif path.is_file():
        shutil.copy2(path, to)


def _put_back(path: Path, copy: Path) -> None:
    if copy.is_file() and path.is_file() and path.read_bytes() == copy.read_bytes():
        return
    if path.is_dir():
        shutil.rmtree(path)
    elif path.is_file():
        path.unlink()
    _copy(copy, path)


def _bytes(lab: Lab) -> bytes | None:
    return lab.starter.read_bytes() if lab.starter.is_file() else None


def _text(lab: Lab) -> str | None:
    data = _bytes(lab)
    return None if data is None else data.decode("utf-8", "replace").replace("\r\n", "\n")


# ------------------------------------------------------------------ exporting


def _hunted(root: Path, lab: Lab) -> dict[str, Any] | None:
    """The lab's hunt as book/store.js keeps it; None where there is none."""
    hunt = hunts.read(root, lab)
    if hunt is None:
        return None
    file = hunts.folder_of(root, lab) / (hunts.TESTS if hunt.level == 3 else hunts.FILE)
    if not file.is_file():
        return None
    found = {key: value for key, value in asdict(hunt).items() if key != "lab"}
    return {**found, "text": file.read_text("utf-8"), "at": _stamp(hunt_changed(root, lab))}


def tried(root: Path) -> dict[str, Any]:
    """The tries at challenges, with their texts, as book/store.js keeps them."""
    found = {}
    for challenge in judge.every():
        if tries := ledger.with_texts(root, challenge)[-MOST_TRIES:]:
            newest = _time(tries[-1]["when"]) or datetime.now(UTC)
            found[challenge.name] = {"tries": tries, "at": _stamp(newest)}
    return found


def document(root: Path, labs: Sequence[Lab], progress: Progress) -> str:
    """What is done here as the text of a file that the book reads.

    Answers of the quiz stay: only how they went is known here, not what was given.
    """
    now = _stamp(datetime.now(UTC))
    edits: dict[str, Any] = {}
    results: dict[str, Any] = {}
    for lab in labs:
        if not lab.starter.is_file() or starters.is_current(lab):
            continue
        changed = datetime.fromtimestamp(lab.starter.stat().st_mtime, UTC)
        edits[lab.id] = {"text": _text(lab), "at": _stamp(changed)}
        entry = progress.entry(lab)
        graded = _time(entry.graded_at)
        if graded and progress.state(lab) in (PASSED, STARTED):
            results[lab.id] = {
                "passed": entry.passed,
                "total": entry.total,
                "ok": entry.ok,
                "at": _stamp(graded),
            }
    data = {
        "format": FORMAT,
        "version": VERSION,
        "exported_at": now,
        "edits": edits,
        "results": results,
        "answers": {},
        "predictions": {
            f"{lab.id}/{name}": entry
            for lab in labs
            for name, entry in predicted(lab, progress).items()
        },
        "read": {},
        "hunts": {lab.id: hunted for lab in labs if (hunted := _hunted(root, lab))},
        "tries": tried(root),
        "incidents": {name: asdict(entry) for name, entry in incidents.read(root).items()},
    }
    return json.dumps(data, indent=1) + "\n"


def predicted(lab: Lab, progress: Progress) -> dict[str, dict[str, Any]]:
    """What is committed in a lab, by name, as book/store.js keeps it: {given, at, measured, first}.

    What was compared is there though its line is empty now: the first answer counts.
    """
    asked, entry = lab.manifest.predictions, progress.entry(lab)
    compared = entry.predictions
    answers, _ = predictions.committed(lab.folder, asked)
    path = lab.folder / predictions.FILE
    if path.is_file():
        at = _stamp(datetime.fromtimestamp(path.stat().st_mtime, UTC))
    else:
        at = _stamp(_time(entry.graded_at) or datetime.now(UTC))
    found: dict[str, dict[str, Any]] = {}
    for name in asked:
        pair = compared.get(name)
        if pair:
            found[name] = {"given": answers.get(name, pair[0]), "at": at, "measured": pair[1]}
            if found[name]["given"] != pair[0]:
                found[name]["first"] = pair[0]
        elif name in answers:
            found[name] = {"given": answers[name], "at": at}
    return found


def _stamp(time: datetime) -> str:
    """A time as JavaScript writes it."""
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%S}.{time.microsecond // 1000:03d}Z"

"""Work done in the book's pages comes into a checkout whole, or not at all."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from course.challenges import judge, ledger
from course.challenges.judge import Verdict
from course.conftest import TESTDATA
from course.files import write_atomically
from course.learning import exchange, hunts, starters
from course.learning.labs import CourseError, find_labs
from course.learning.progress import PASSED, Progress
from course.learning.quiz import Boxes

AT = "2026-01-05T10:00:00.000Z"
QUEUE = judge.load("queue")
ASKS = TESTDATA / "phase-90-selfcheck" / "labs" / "lab-08-predicts"
MINE = "def num_blocks(num_tokens, block_size):\n    return -(-num_tokens // block_size)\n"


def content(**parts: Any) -> dict[str, Any]:
    return {
        "format": "course-progress",
        "version": 1,
        "edits": {},
        "results": {},
        "answers": {},
        "predictions": {},
        "read": {},
        **parts,
    }


def edits(*labs: str) -> dict[str, Any]:
    return {lab: {"text": MINE, "at": AT, "from": "x"} for lab in labs}


@pytest.fixture
def given(tmp_path):
    """Write a file as the book exports it."""

    def write(data: Any):
        path = tmp_path / "progress.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
        return str(path)

    return write


@pytest.mark.slow
def test_an_edit_becomes_the_starter_and_counts_when_it_is_graded_here(
    course, little_course, given
):
    results = {"90-00": {"passed": 1, "total": 1, "ok": True, "at": AT}}
    ran = course("import", given(content(edits=edits("90-00"), results=results)))
    lab = find_labs(little_course)[0]
    assert (ran.code, lab.starter.read_text(encoding="utf-8")) == (0, MINE)
    assert "course check --all" in ran.out
    assert Progress(little_course).state(lab) != PASSED
    assert course("check", "--all").code == 0
    assert Progress(little_course).state(lab) == PASSED


def test_a_file_that_gives_way_is_kept(course, little_course, given):
    lab = find_labs(little_course)[0]
    lab.starter.write_text("# an evening's work\n", encoding="utf-8")
    ran = course("import", given(content(edits=edits("90-00"))))
    (kept,) = (little_course / ".course" / "backup").iterdir()
    assert kept.read_text(encoding="utf-8") == "# an evening's work\n"
    assert kept.name in "".join(ran.out.split())


def test_an_untouched_starter_needs_no_copy(course, little_course, given):
    course("import", given(content(edits=edits("90-00"))))
    assert not (little_course / ".course" / "backup").exists()


def test_the_same_file_twice_changes_nothing(course, given):
    path = given(content(edits=edits("90-00")))
    course("import", path)
    ran = course("import", path)
    assert "Nothing in it is new here." in ran.out


def test_a_lab_that_is_not_here_is_named_and_the_others_are_taken(course, little_course, given):
    ran = course("import", given(content(edits=edits("90-00", "77-01"))))
    assert (ran.code, "left out: 77-01" in ran.out) == (0, True)
    assert find_labs(little_course)[0].starter.read_text(encoding="utf-8") == MINE


def test_where_one_file_cannot_be_written_all_stay_as_they_were(little_course, monkeypatch, given):
    labs = find_labs(little_course)
    labs[0].starter.write_text("# first\n", encoding="utf-8")

    def failing(path, text):
        if path == labs[1].starter:
            raise OSError(28, "No space left on device")
        write_atomically(path, text)

    monkeypatch.setattr(exchange, "write_atomically", failing)
    with pytest.raises(CourseError, match="Nothing was changed"):
        exchange.take(little_course, labs, content(edits=edits("90-00", "90-01")))
    assert labs[0].starter.read_text(encoding="utf-8") == "# first\n"
    assert starters.is_current(labs[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([], "not a file of the book"),
        ({"format": "course-progress", "version": 2}, "version is 2"),
        (content(edits=[]), "edits must be an object"),
        (content(edits={"../x": {}}), "edits.../x"),
        (content(edits={"90-00": {"text": 5, "at": AT}}), "edits.90-00.text"),
        (content(edits={"90-00": {"text": "\ud800", "at": AT}}), "half a character"),
        (content(edits={"90-00": {"text": "", "at": "soon"}}), "edits.90-00.at"),
        (content(answers={"02-ex-01": "b"}), "answers.02-ex-01 must be an object"),
        (content(read={"index.html": 5}), "read.index.html must be a time"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name_and_writes_nothing(
    course, little_course, given, data, told
):
    before = [lab.starter.read_bytes() for lab in find_labs(little_course)]
    ran = course("import", given(data))
    assert (ran.code, told in ran.err.replace("\n", " ")) == (2, True), ran.err
    assert [lab.starter.read_bytes() for lab in find_labs(little_course)] == before
    assert not (little_course / ".course").exists()


def test_everything_that_is_wrong_is_said_at_once(course, given):
    wrong = {f"90-{n:02d}": {"text": n, "at": AT} for n in range(20)}
    told = course("import", given(content(edits=wrong))).err
    assert (told.count(".text must be"), "and 8 more" in told) == (12, True)


def test_a_file_that_is_not_there_is_said_in_a_line(course):
    assert course("import", "nowhere.json").code == 2


# ------------------------------------------------------------------ answers

QUIZ = """\
- id: 90-ex-01
  source: "EXERCISES.md, 1"
  ask: How many?
  explain: Because.
  number: 12
- id: 90-ex-02
  source: "EXERCISES.md, 1"
  ask: Which?
  explain: Because.
  choices: [one, two]
  choice: two
"""


@pytest.fixture
def with_quiz(little_course):
    phase = little_course / "phase-90-little"
    (phase / "EXERCISES.md").write_text("# Exercises\n\n## 1. Count\n", encoding="utf-8")
    (phase / "quiz.yaml").write_text(QUIZ, encoding="utf-8")
    return little_course


def answers(**given: str) -> dict[str, Any]:
    """Answers by question; whether they were right is what the file claims."""
    return {
        f"90-ex-{name[1:]}": {"given": text, "right": True, "at": AT}
        for name, text in given.items()
    }


def test_answers_are_checked_here_and_put_into_the_quiz(course, with_quiz, given):
    ran = course("import", given(content(answers=answers(q01="12", q02="one"))))
    assert "2 answers are in the quiz" in ran.out
    cards = Boxes(with_quiz / ".course").cards
    assert {name: box for name, (box, _) in cards.items()} == {"90-ex-01": 1, "90-ex-02": 0}
    assert cards["90-ex-01"][1].isoformat() == "2026-01-06"


def test_what_the_quiz_has_asked_itself_stays(course, with_quiz, given):
    boxes = Boxes(with_quiz / ".course")
    for _ in range(3):
        boxes.put("90-ex-01", True)
    ran = course("import", given(content(answers=answers(q01="5"))))
    assert Boxes(with_quiz / ".course").cards["90-ex-01"][0] == 3
    assert "Nothing in it is new here." in ran.out


# ------------------------------------------------------------------ exporting


@pytest.mark.slow
def test_what_is_exported_can_be_taken_over_elsewhere(course, little_course, tmp_path):
    lab = find_labs(little_course)[0]
    lab.starter.write_text(MINE, encoding="utf-8")
    assert course("check", "90-00").code == 0
    path = tmp_path / "out.json"
    assert "1 lab in" in course("export", str(path)).out
    data = exchange.read(path)
    assert (data["edits"]["90-00"]["text"], data["results"]["90-00"]["ok"]) == (MINE, True)
    lab.starter.write_text(starters.required(lab), encoding="utf-8")
    assert course("import", str(path)).code == 0
    assert lab.starter.read_text(encoding="utf-8") == MINE


def test_an_export_replaces_no_file_unasked(course, tmp_path):
    path = tmp_path / "out.json"
    path.write_text("mine", encoding="utf-8")
    assert course("export", str(path)).code == 2
    assert path.read_text(encoding="utf-8") == "mine"
    assert course("export", str(path), "--force").code == 0


# ------------------------------------------------------------------ predictions


@pytest.fixture
def asking(little_course):
    """The lab of the little course that asks three things, 90-08."""
    folder = little_course / "phase-90-little" / "labs" / "lab-08-predicts"
    shutil.copytree(ASKS, folder)
    return folder


def said(**given: Any) -> dict[str, Any]:
    """A file with predictions of lab 90-08."""
    entries = {f"90-08/{name}": {"given": answer, "at": AT} for name, answer in given.items()}
    return content(predictions=entries)


@pytest.mark.slow
def test_predictions_are_committed_as_course_predict_writes_them(course, asking, given):
    (asking / "predictions.yaml").write_text("# asks\nblocks:   # how many\n", encoding="utf-8")
    ran = course("import", given(said(blocks=6, waste="nowhere", share=1e-7)))
    assert "3 predictions committed, each in its lab's predictions.yaml" in ran.out
    assert (asking / "predictions.yaml").read_text(encoding="utf-8") == (
        '# asks\nblocks: 6  # how many\nshare: 1.0e-07\nwaste: "nowhere"\n'
    )
    assert "blocks: you said 6; its test" in course("check", "90-08").out


@pytest.mark.slow
def test_a_prediction_that_is_committed_here_already_stays(course, asking, given):
    (asking / "predictions.yaml").write_text("blocks: 7\n", encoding="utf-8")
    path = given(said(blocks=6, share=0.9))
    assert "1 prediction committed" in course("import", path).out
    assert (asking / "predictions.yaml").read_text(encoding="utf-8") == "blocks: 7\nshare: 0.9\n"
    assert "Nothing in it is new here." in course("import", path).out


def test_of_a_prediction_that_was_compared_the_first_answer_is_taken(course, asking, given):
    entry = {"given": 7, "first": 6, "measured": 7, "at": AT}
    course("import", given(content(predictions={"90-08/blocks": entry})))
    assert (asking / "predictions.yaml").read_text(encoding="utf-8") == "blocks: 6\n"


def test_predictions_that_nobody_asks_here_are_named_and_left_out(course, asking, given):
    data = said(blocks="many", waste="upstairs", share=0.9, gone=5)
    data["predictions"]["77-01/x"] = {"given": 5, "at": AT}
    ran = course("import", given(data))
    named = "77-01/x, 90-08/blocks, 90-08/gone, 90-08/waste"
    assert (ran.code, f"left out: {named}" in ran.out) == (0, True)
    assert (asking / "predictions.yaml").read_text(encoding="utf-8") == "share: 0.9\n"


def test_a_file_from_before_there_were_predictions_is_taken(course, little_course, given):
    data = content(edits=edits("90-00"))
    del data["predictions"]
    assert course("import", given(data)).code == 0
    assert find_labs(little_course)[0].starter.read_text(encoding="utf-8") == MINE


def test_where_a_prediction_cannot_be_written_nothing_is_changed(
    course, little_course, asking, given
):
    (asking / "predictions.yaml").write_text("{share: 0.5}\n", encoding="utf-8")
    data = said(blocks=6)
    data["edits"] = edits("90-00", "90-08")
    before = {lab.id: lab.starter.read_bytes() for lab in find_labs(little_course)}
    ran = course("import", given(data))
    assert (ran.code, "Nothing was changed" in ran.err) == (2, True)
    assert "write `blocks: 6` in it" in ran.err
    assert (asking / "predictions.yaml").read_text(encoding="utf-8") == "{share: 0.5}\n"
    assert {lab.id: lab.starter.read_bytes() for lab in find_labs(little_course)} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "entry", "told"),
    [
        ("90-08", {}, "a prediction is named as in"),
        ("90-08/__proto__", {}, "a prediction is named as in"),
        ("90-08/blocks", 5, "predictions.90-08/blocks must be an object"),
        ("90-08/blocks", {"at": AT}, "blocks.given must be a number or a text"),
        ("90-08/blocks", {"given": True, "at": AT}, "blocks.given must be"),
        ("90-08/blocks", {"given": float("inf"), "at": AT}, "blocks.given must be"),
        ("90-08/blocks", {"given": 10**400, "at": AT}, "blocks.given must be"),
        ("90-08/blocks", {"given": "\ud800", "at": AT}, "blocks.given must be"),
        ("90-08/blocks", {"given": 5, "at": "soon"}, "blocks.at must be a time"),
        ("90-08/blocks", {"given": 5, "at": AT, "measured": None}, "blocks.measured must be"),
        ("90-08/blocks", {"given": 5, "at": AT, "first": []}, "blocks.first must be"),
    ],
)
def test_a_prediction_that_is_none_is_refused_by_name_and_writes_nothing(
    course, asking, given, name, entry, told
):
    ran = course("import", given(content(predictions={name: entry})))
    assert (ran.code, told in ran.err.replace("\n", " ")) == (2, True), ran.err
    assert not (asking / "predictions.yaml").exists()


@pytest.mark.slow
def test_what_was_predicted_here_is_exported_with_what_was_measured(
    course, little_course, asking, tmp_path
):
    (asking / "starter.py").write_text(MINE, encoding="utf-8")
    file = asking / "predictions.yaml"
    file.write_text("blocks: 6\nwaste: c\n", encoding="utf-8")
    course("check", "90-08")
    file.write_text("blocks: 7\nshare: 0.5\nwaste: c\n", encoding="utf-8")
    path = tmp_path / "out.json"
    assert "1 lab and 3 predictions in" in course("export", str(path)).out
    entries = exchange.read(path)["predictions"]
    assert {name: {**entry, "at": ""} for name, entry in entries.items()} == {
        "90-08/blocks": {"given": 7, "first": 6, "measured": 7, "at": ""},
        "90-08/share": {"given": 0.5, "at": ""},
        "90-08/waste": {"given": "nowhere", "measured": "in the last block", "at": ""},
    }
    file.unlink()
    course("import", str(path))
    assert file.read_text(encoding="utf-8") == 'blocks: 6\nshare: 0.5\nwaste: "nowhere"\n'


# ------------------------------------------------------------------ hunts and tries

HUNT = {
    "level": 1, "seed": 3, "text": "# half mended\n", "began": AT, "checks": 2, "found": "",
    "score": 0, "of": 0, "at": "2999-01-05T10:00:00.000Z",
}  # fmt: skip


def test_a_hunt_goes_on_where_it_was_left(course, little_course, given):
    lab = find_labs(little_course)[0]
    ran = course("import", given(content(hunts={"90-00": HUNT, "99-99": HUNT})))
    assert ran.code == 0 and "Hunt 90-00 goes on here" in ran.out and "hunt 99-99" in ran.out
    hunt = hunts.read(little_course, lab)
    assert (hunt.seed, hunt.checks, hunt.is_open) == (3, 2, True)
    file = hunts.folder_of(little_course, lab) / hunts.FILE
    assert file.read_text(encoding="utf-8") == "# half mended\n"


@pytest.mark.slow
def test_an_older_hunt_of_a_file_gives_way_to_the_one_that_is_here(course, little_course, given):
    course("hunt", "90-00", "--seed", "5")
    course("import", given(content(hunts={"90-00": HUNT | {"at": AT}})))
    assert hunts.read(little_course, find_labs(little_course)[0]).seed == 5


@pytest.mark.slow
def test_what_was_written_in_a_hunt_that_gives_way_is_kept(course, little_course, given):
    course("hunt", "90-00", "--level", "3", "--seed", "5")
    lab = find_labs(little_course)[0]
    mine = "def test_mine(lab):\n    assert lab\n"
    (hunts.folder_of(little_course, lab) / hunts.TESTS).write_text(mine, encoding="utf-8")
    course("import", given(content(hunts={"90-00": HUNT})))
    (kept,) = (little_course / ".course" / "backup").glob("hunt-90-00-*.py")
    assert kept.read_text(encoding="utf-8") == mine


def tried(root, score: int, text: str):
    verdict = Verdict(score=score, fresh=score, seed="s")
    return ledger.keep(root, QUEUE, text.encode(), verdict, "an idea")


@pytest.mark.slow
def test_hunts_and_tries_are_exported_and_taken_elsewhere_once(course, little_course, tmp_path):
    course("hunt", "90-00", "--seed", "5")
    tried(little_course, 50, "a = 1\n")
    out = tmp_path / "out.json"
    assert "1 hunt and 1 try" in course("export", str(out)).out
    shutil.rmtree(little_course / ".course")
    tried(little_course, 40, "b = 2\n")
    ran = course("import", str(out))
    assert "1 try at challenges taken" in ran.out and "Hunt 90-00" in ran.out
    tries = ledger.with_texts(little_course, QUEUE)
    assert sorted((each["score"], each["text"]) for each in tries) == [
        (40, "b = 2\n"), (50, "a = 1\n"),
    ]  # fmt: skip
    assert "new here" in course("import", str(out)).out


TRY = {
    "when": AT, "digest": "0" * 12, "score": 1, "fresh": 1, "seed": "s", "marks": [],
    "outcome": "kept", "why": "", "note": "", "text": "x",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "entry", "says"),
    [
        ("hunts", HUNT | {"level": 4}, "level must be 1, 2 or 3"),
        ("hunts", HUNT | {"seed": -1}, "seed must be a whole number"),
        ("hunts", HUNT | {"text": 5}, "text must be a text"),
        ("tries", {"at": AT, "tries": [TRY | {"digest": "../../../x"}]}, "digest must be"),
        ("tries", {"at": AT, "tries": [TRY | {"score": "9"}]}, "score must be a whole number"),
        ("tries", {"at": AT, "tries": {}}, "tries must be a list"),
    ],
)
def test_a_hunt_or_a_try_that_does_not_fit_is_refused_by_its_place(
    course, little_course, given, part, entry, says
):
    name = "90-00" if part == "hunts" else "queue"
    ran = course("import", given(content(**{part: {name: entry}})))
    assert ran.code == 2 and says in " ".join(ran.err.split())
    assert not (little_course / ".course" / "hunts").exists()


@pytest.mark.slow
@pytest.mark.parametrize("blocked", ["hunts", "challenges", "quiz.json"])
def test_where_what_comes_last_cannot_be_written_nothing_is_changed(
    course, with_quiz, given, blocked
):
    kept = with_quiz / ".course"
    course("hunt", "90-00", "--seed", "5")
    if blocked == "hunts":
        shutil.rmtree(kept / "hunts")
        (kept / "hunts").write_text("no folder", encoding="utf-8")
    elif blocked == "challenges":
        (kept / "challenges" / "queue" / "lock").mkdir(parents=True)
    else:
        (kept / "quiz.json").mkdir()

    def everything() -> dict[str, bytes]:
        files = [path for path in with_quiz.rglob("*") if path.is_file()]
        return {
            str(p): p.read_bytes() for p in files if p.name != "lock" and "backup" not in str(p)
        }

    before = everything()
    data = content(
        edits=edits("90-00"),
        hunts={"90-00": HUNT},
        tries={"queue": {"at": AT, "tries": [TRY]}},
        answers=answers(q01="12"),
    )
    ran = course("import", given(data))
    assert (ran.code, "Nothing was changed" in ran.err) == (2, True), ran.err
    assert everything() == before


def test_a_text_that_is_not_its_digests_is_left_out(course, little_course, given):
    assert course("import", given(content(tries={"queue": {"at": AT, "tries": [TRY]}}))).code == 0
    assert not list((little_course / ".course" / "challenges").rglob("*.py"))

"""Predictions on a lab's page, in a real browser: asked before the editor, compared after a run.

The first part plays the session of the page; the second runs the real one, and skips where
build/play does not hold it; the third asks the course on this machine.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from book.test_desk import FAKE, TOO_WIDE, barriers, enter, run
from course.learning import grading, predictions, show
from course.learning.labs import find_labs, pick
from course.learning.progress import Progress

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[1]
LAB = "phase-02-paged-attention/labs/lab-01-block-allocator/index.html"
SMALL = "phase-02-paged-attention/labs/lab-03-real-vllm-blocks/index.html"
MANY = "phase-16-serving-apis-and-parsers/labs/lab-01-tool-call-parser/index.html"
BEGINNING = "the beginning of the prompt"
EVERY = 'for (const lab of ["02-01", "02-03", "16-01"]) COURSE_PLAY.labs[lab] = {native: false};'


@pytest.fixture
def played(open_page):
    """Open a lab's page whose session is played by `window.play`."""

    def open_(path: str = LAB, **settings):
        page = open_page("social.png", **settings)
        page.add_init_script(FAKE + f"addEventListener('DOMContentLoaded', () => {{ {EVERY} }})")
        page.goto(page.url.replace("social.png", path))
        return page

    return open_


def measures(page, outcome: str = "passed", **measured) -> None:
    """Have the next run be of one test that measures this."""
    told = {"event": "result", "test": "t.py::test_0", "name": "test_0", "outcome": outcome}
    events = [{"event": "collected", "tests": ["t.py::test_0"]}, {**told, "measured": measured}]
    page.evaluate(f"void (play.events = {json.dumps(events)})")


def card(page, name: str):
    """The box of one question."""
    return page.locator(".desk-predict .answer-box").filter(
        has=page.locator(f"#predict-{name}-ask")
    )


def say(page, name: str, answer: str) -> None:
    """Answer one question: type a number, or take a choice."""
    box = card(page, name)
    choice = box.get_by_role("radio", name=answer, exact=True)
    if choice.count():
        choice.check()
    else:
        box.get_by_role("textbox").fill(answer)
    box.get_by_role("button", name="Commit").click()


def told(page) -> list[str]:
    """What is said of the predictions after a run."""
    return page.locator(".desk-predicted p").all_inner_texts()


def words_of(name: str, lab: str = "02-01") -> str:
    """A question as the page shows it."""
    return pick(find_labs(ROOT), lab).manifest.predictions[name].ask.replace("`", "")


def kept(page, lab: str = "02-01") -> dict:
    return page.evaluate(f"Object.fromEntries(CourseStore.predictions('{lab}'))")


# ------------------------------------------------------------------ played


def test_the_questions_stand_before_the_editor_and_what_is_committed_stays(played):
    page = played()
    desk = enter(page)
    assert desk.locator(".desk-predict summary").inner_text() == "Predict first 0 of 2 committed"
    order = "document.querySelector('.desk-predict').compareDocumentPosition"
    following = f"{order}(document.querySelector('.desk-room > .desk-editor')) & 4"
    assert page.evaluate(following) == 4
    say(page, "survivors", "1_2")
    say(page, "which", BEGINNING)
    assert "You said 12." in card(page, "survivors").inner_text()
    page.reload()
    desk = enter(page)
    summary = desk.locator(".desk-predict summary")
    assert summary.inner_text() == "Predict first 2 of 2 committed"
    assert not card(page, "which").is_visible(), "what is answered takes no room"
    summary.click()
    assert f"You said {BEGINNING}." in card(page, "which").inner_text()


def test_after_a_run_each_stands_beside_what_was_measured_with_what_it_means(played):
    page = played()
    enter(page)
    lab = pick(find_labs(ROOT), "02-01")
    say(page, "survivors", "40")
    say(page, "which", BEGINNING)
    measures(page, survivors=11, which=BEGINNING)
    assert run(page).startswith("Passed")
    asked = lab.manifest.predictions
    assert told(page) == [
        f"{words_of('survivors')} You said 40, measured 11: high.",
        asked["survivors"].means["high"],
        f"{words_of('which')} You said {BEGINNING}, measured {BEGINNING}: right.",
        asked["which"].means["right"],
    ]
    page.reload()
    desk = enter(page)
    summary = desk.locator(".desk-predict summary")
    assert summary.inner_text() == "Predict first 2 of 2 committed, 1 of 2 right"
    summary.click()
    words = card(page, "survivors").inner_text()
    assert "You said 40, measured 11: high." in words and asked["survivors"].means["high"] in words


def test_without_a_prediction_nothing_measured_is_shown_and_the_lab_passes(played):
    page = played()
    enter(page)
    say(page, "survivors", "11")
    measures(page, survivors=11, which=BEGINNING)
    assert run(page).startswith("Passed")
    last = told(page)[-1]
    assert last.startswith("One question has no committed answer, so what was measured is not")
    assert BEGINNING not in "".join(told(page))
    assert "measured" not in kept(page).get("which", {})
    page.locator(".desk-predicted").get_by_role("button", name="Commit one").click()
    focused = page.evaluate("document.activeElement.value")
    assert focused == BEGINNING, "the first choice of the open question"
    say(page, "which", "neither")
    assert told(page)[-1] == f"{words_of('which')} You said neither; run the tests to compare."
    run(page)
    outcome = f"You said neither, measured {BEGINNING}: other."
    assert f"{words_of('which')} {outcome}" in told(page)


def test_what_a_failing_test_measured_is_not_compared(played):
    page = played()
    enter(page)
    say(page, "survivors", "40")
    measures(page, "failed", survivors=11)
    run(page)
    assert told(page)[0] == f"{words_of('survivors')} You said 40; its test has not passed yet."
    assert "measured" not in kept(page)["survivors"]


def test_a_compared_answer_is_changed_only_knowingly_and_the_first_counts(played):
    page = played()
    enter(page)
    say(page, "survivors", "40")
    measures(page, survivors=11)
    run(page)
    box = card(page, "survivors")
    box.get_by_role("button", name="Change").click()
    assert "It was compared already: the first answer counts." in box.inner_text()
    box.get_by_role("button", name="Leave it").click()
    assert page.evaluate("document.activeElement.textContent") == "Change"
    assert "You said 40, measured 11: high." in box.inner_text()
    box.get_by_role("button", name="Change").click()
    say(page, "survivors", "11")
    words = "You said 11. The first answer counts: you said 40, measured 11: high."
    assert words in box.inner_text()
    run(page)
    assert told(page)[0] == f"{words_of('survivors')} You said 11, measured 11: right."
    page.reload()
    desk = enter(page)
    assert "0 of 1 right" in desk.locator(".desk-predict summary").inner_text()
    assert (kept(page)["survivors"]["first"], kept(page)["survivors"]["given"]) == (40, 11)


def test_before_a_run_an_answer_may_be_changed(played):
    page = played()
    enter(page)
    say(page, "which", "neither")
    card(page, "which").get_by_role("button", name="Change").click()
    checked = card(page, "which").get_by_role("radio", name="neither")
    assert checked.is_checked()
    assert "compared already" not in card(page, "which").inner_text()
    say(page, "which", BEGINNING)
    assert kept(page)["which"]["given"] == BEGINNING and "first" not in kept(page)["which"]


@pytest.mark.parametrize("answer", ["many", "1,5,2", "nan"])
def test_what_is_no_number_is_said_and_commits_nothing(played, answer):
    page = played()
    enter(page)
    say(page, "survivors", answer)
    assert "That cannot be read. Wanted: a number." in card(page, "survivors").inner_text()
    assert kept(page) == {}


def test_without_an_answer_it_says_what_is_wanted(played):
    page = played()
    enter(page)
    for name in ("survivors", "which"):
        card(page, name).get_by_role("button", name="Commit").click()
    assert "Wanted: a number." in card(page, "survivors").inner_text()
    assert "Wanted: one of these, and one only." in card(page, "which").inner_text()


def test_a_lab_that_asks_nothing_shows_nothing_of_it(played, url):
    quiet = next(lab for lab in find_labs(ROOT) if not lab.manifest.predictions)
    path = (quiet.folder / "index.html").relative_to(ROOT).as_posix()
    page = played(path)
    page.evaluate("0")
    assert page.locator("script[src*='desk-predict']").count() == 0
    assert page.locator(".desk-predict").count() == 0


def test_another_tab_and_an_import_are_seen(played):
    page = played()
    desk = enter(page)
    other = page.context.new_page()
    other.goto(page.url)
    other.evaluate("CourseStore.savePrediction('02-01', 'survivors', 12)")
    desk.get_by_text("You said 12.").wait_for()
    given = {"given": "neither", "at": "2026-01-05T10:00:00.000Z"}
    file = {"format": "course-progress", "version": 1, "edits": {}, "results": {}, "answers": {},
            "read": {}, "predictions": {"02-01/which": given}}  # fmt: skip
    desk.locator("input[type=file]").set_input_files(
        {"name": "x.json", "mimeType": "application/json", "buffer": json.dumps(file).encode()}
    )
    desk.get_by_text("0 answers, 1 prediction, 0 hunts").wait_for()
    assert "You said neither." in card(page, "which").inner_text()


def test_an_answer_to_a_question_that_has_changed_is_asked_for_anew(played):
    page = played()
    page.evaluate("CourseStore.savePrediction('02-01', 'which', 'the middle')")
    page.reload()
    desk = enter(page)
    assert "0 of 2 committed" in desk.locator(".desk-predict summary").inner_text()
    words = card(page, "which").inner_text()
    assert "You said the middle, and the question has changed." in words
    say(page, "which", "neither")
    assert kept(page)["which"]["given"] == "neither"


def test_the_keyboard_is_enough(played):
    page = played()
    enter(page)
    page.locator("#predict-survivors-ask").locator("xpath=..").get_by_role("textbox").focus()
    page.keyboard.type("12")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "Change"
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    page.keyboard.press("ArrowDown")
    assert page.url.endswith(LAB)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert kept(page)["which"]["given"] == "the end of the prompt"
    measures(page, survivors=12, which="neither")
    page.keyboard.press("Control+Enter")
    page.locator(".desk-verdict.desk-good").wait_for()
    assert told(page)[0] == f"{words_of('survivors')} You said 12, measured 12: right."


@pytest.mark.parametrize("path", [LAB, SMALL, MANY])
@pytest.mark.parametrize(("width", "theme"), [(390, "navy"), (1280, "light")])
def test_predictions_have_no_serious_barrier_and_fit_their_screen(played, path, width, theme):
    page = played(path, width=width, theme=theme)
    desk = enter(page)
    lab = next(lab for lab in find_labs(ROOT) if path.startswith(str(lab.folder.relative_to(ROOT))))
    assert page.evaluate(TOO_WIDE) == 0
    asked = lab.manifest.predictions
    given = {name: q.choices[1] if q.choices else 101.95121951219512 for name, q in asked.items()}
    for name in list(asked)[:-1]:
        say(page, name, str(given[name]))
    card(page, list(asked)[-1]).get_by_role("button", name="Commit").click()
    measures(page, **{name: q.choices[0] if q.choices else 1e-12 for name, q in asked.items()})
    run(page)
    desk.get_by_role("button", name="Change").first.click()
    assert page.evaluate(TOO_WIDE) == 0
    assert barriers(page, ".desk") == []


# ------------------------------------------------------------------ the real runtime


def test_the_solution_of_a_small_lab_measures_in_the_page_what_it_measures_here(site, open_page):
    if not (site / "play" / "index.js").is_file():
        pytest.skip("needs what runs Python in the pages: course book runtime")
    lab = pick(find_labs(ROOT), "02-03")
    report = grading.run(ROOT, lab.test_file, impl="solution")
    measured = {n: v for result in report.passed for n, v in result.measured.items()}
    stream = io.StringIO()
    console = Console(file=stream, highlight=False, markup=False, width=10_000)
    answers = {"ratio": 1.8, "hit_rate": 43.75}
    show.predicted(console, lab, answers, [], measured)  # type: ignore[arg-type]
    page = open_page(SMALL)
    solution = lab.solution.read_text(encoding="utf-8")
    page.evaluate("(text) => CourseStore.saveEdit('02-03', text)", solution)
    page.reload()
    enter(page)
    for name, answer in answers.items():
        say(page, name, str(answer))
    assert run(page).startswith("Passed")
    said = [line.strip() for line in stream.getvalue().splitlines()[1:] if line]
    for name in answers:  # the terminal names a question, the page repeats it
        head = f"{name}: you"
        said = [line.replace(head, f"{words_of(name, '02-03')} You") for line in said]
    assert told(page) == said
    assert kept(page, "02-03")["ratio"]["measured"] == measured["ratio"]


# ------------------------------------------------------------------ on this machine


@pytest.fixture
def checkout(checkout):
    """The same, with a starter that passes."""
    lab = find_labs(checkout)[0]
    shutil.copy(lab.solution, lab.starter)
    return checkout


def test_at_home_predictions_are_those_of_the_file_on_disk(at_home, checkout):
    lab = find_labs(checkout)[0]
    predictions.commit(lab.folder, "which", "neither")
    desk = enter(at_home)
    assert "You said neither." in card(at_home, "which").inner_text()
    say(at_home, "survivors", "40")
    desk.get_by_text("You said 40.").wait_for()
    committed, _ = predictions.committed(lab.folder, lab.manifest.predictions)
    assert committed == {"which": "neither", "survivors": 40}
    assert kept(at_home) == {}
    assert run(at_home).startswith("Passed")
    line = f"{words_of('survivors')} You said 40, measured 29: high."
    assert line.casefold() in [each.casefold() for each in told(at_home)], told(at_home)
    pairs = Progress(checkout).entry(lab).predictions
    assert pairs == {"which": ["neither", BEGINNING], "survivors": [40, 29]}
    at_home.reload()
    desk = enter(at_home)
    assert "0 of 2 right" in desk.locator(".desk-predict summary").inner_text()


def test_at_home_an_answer_that_changed_on_disk_is_shown_and_stays(at_home, checkout):
    lab = find_labs(checkout)[0]
    enter(at_home)
    predictions.commit(lab.folder, "survivors", 5)
    say(at_home, "survivors", "40")
    box = card(at_home, "survivors")
    box.get_by_text("has changed on disk since this page read it").wait_for()
    assert "You said 5." in box.inner_text()
    assert predictions.committed(lab.folder, lab.manifest.predictions)[0] == {"survivors": 5}
    box.get_by_role("button", name="Change").click()
    say(at_home, "survivors", "40")
    box.get_by_text("You said 40.").wait_for()
    assert predictions.committed(lab.folder, lab.manifest.predictions)[0] == {"survivors": 40}


def test_at_home_what_this_browser_holds_is_offered_where_the_file_has_none(at_home, checkout):
    at_home.evaluate("CourseStore.savePrediction('02-01', 'survivors', 12)")
    at_home.evaluate("CourseStore.savePrediction('02-01', 'which', 'neither')")
    at_home.reload()
    enter(at_home)
    assert card(at_home, "survivors").get_by_role("textbox").input_value() == "12"
    assert card(at_home, "which").get_by_role("radio", name="neither").is_checked()
    lab = find_labs(checkout)[0]
    assert predictions.committed(lab.folder, lab.manifest.predictions)[0] == {}

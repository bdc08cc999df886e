"""What the book keeps in a browser: nothing of a reader's is lost, by any road.

A page of its own with book/store.js alone; needs playwright and a Chromium, not the built site.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

SCRIPT = (Path(__file__).parent / "store.js").read_text(encoding="utf-8")
ADDRESS = "http://book.test/"
EARLY, LATE = "2026-01-01T00:00:00.000Z", "2999-01-01T00:00:00.000Z"
HUNT = {
    "level": 1, "seed": 3, "text": "", "began": EARLY, "checks": 0, "found": "", "score": 0,
    "of": 0, "at": EARLY,
}  # fmt: skip
EMPTY = {"edits": {}, "results": {}, "answers": {}, "predictions": {}, "read": {}}


@pytest.fixture
def tab(browser):
    """Open one more tab of the same browser on a page with the store."""
    context = browser.new_context()
    context.set_default_timeout(180_000)
    head = '<meta name="course-token" content="secret">'
    body = f"<!doctype html>{head}<script>{SCRIPT}</script>"

    def serve(path: str, text: str) -> None:
        context.route(
            ADDRESS + path, lambda route: route.fulfill(body=text, content_type="text/html")
        )

    serve("", body)
    serve("plain", body.replace(head, ""))

    def open_(script: str = "", path: str = ""):
        page = context.new_page()
        page.add_init_script(script)
        page.goto(ADDRESS + path)
        return page

    yield open_
    context.close()


def exported(page) -> dict:
    return json.loads(page.evaluate("CourseStore.exported()"))


def file_with(**parts) -> str:
    return json.dumps({"format": "course-progress", "version": 1, **EMPTY, **parts})


def test_everything_is_there_after_a_reload(tab):
    page = tab()
    page.evaluate("""() => {
        CourseStore.saveEdit("02-01", "x = 1\\n", "abc");
        CourseStore.saveResult("02-01", {passed: 3, total: 25, ok: false});
        CourseStore.saveAnswer("03-ex-04", {given: "b", right: true});
        CourseStore.saveRead("phase-02-paged-attention/00-guide.html");
    }""")
    page.reload()
    edit = page.evaluate("CourseStore.edit('02-01')")
    assert (edit["text"], edit["from"]) == ("x = 1\n", "abc")
    result = page.evaluate("CourseStore.result('02-01')")
    assert (result["passed"], result["total"], result["ok"]) == (3, 25, False)
    assert page.evaluate("CourseStore.answer('03-ex-04').right") is True
    assert page.evaluate("CourseStore.read('phase-02-paged-attention/00-guide.html')")


def test_what_was_never_kept_is_null(tab):
    page = tab()
    for call in ("edit('02-01')", "result('02-01')", "answer('02-ex-01')", "read('toString')"):
        assert page.evaluate(f"CourseStore.{call}") is None


def test_a_later_save_keeps_what_the_edit_began_with(tab):
    page = tab()
    page.evaluate("CourseStore.saveEdit('02-01', 'a', 'abc'), CourseStore.saveEdit('02-01', 'b')")
    assert page.evaluate("CourseStore.edit('02-01').from") == "abc"


def test_a_dropped_edit_is_kept_as_an_older_text(tab):
    page = tab()
    page.evaluate("CourseStore.saveEdit('02-01', 'mine'), CourseStore.dropEdit('02-01')")
    assert page.evaluate("CourseStore.edit('02-01')") is None
    assert page.evaluate("CourseStore.older('02-01')[0].text") == "mine"


def test_two_tabs_lose_nothing_of_each_other_and_are_told(tab):
    first, second = tab(), tab()
    first.evaluate("void (window.told = new Promise((done) => CourseStore.onchange(done)))")
    second.evaluate("CourseStore.saveEdit('02-01', 'of the second')")
    assert first.evaluate("window.told")["elsewhere"] is True
    first.evaluate("CourseStore.saveEdit('03-01', 'of the first')")
    second.wait_for_function(
        "CourseStore.edit('03-01')"
    )  # the browser tells other tabs in a moment
    assert set(exported(second)["edits"]) == {"02-01", "03-01"}


def test_a_change_of_this_tab_is_told_with_its_name(tab):
    page = tab()
    page.evaluate(
        "window.told = [], CourseStore.onchange((change) => void window.told.push(change))"
    )
    page.evaluate("CourseStore.saveRead('index.html')")
    assert page.evaluate("window.told") == [
        {"section": "read", "id": "index.html", "elsewhere": False}
    ]


@pytest.mark.parametrize(
    "broken",
    [
        "{",
        "[]",
        '{"version": 2}',
        '{"version": 1, "edits": {"02-01": 5}, "results": {}, "answers": {}, "read": {}}',
    ],
)
def test_a_document_that_cannot_be_read_is_set_aside_not_lost(tab, broken):
    page = tab()
    page.evaluate("(text) => localStorage.setItem('course', text)", broken)
    page.evaluate("CourseStore.saveEdit('02-01', 'new')")
    kept = page.evaluate("Object.entries({...localStorage})")
    assert [text for key, text in kept if key.startswith("course.unreadable.")] == [broken]
    assert "set aside" in page.evaluate("CourseStore.notice()")
    page.reload()
    assert page.evaluate("CourseStore.edit('02-01').text") == "new"


@pytest.mark.parametrize("method", ["getItem", "setItem"])
def test_where_nothing_can_be_stored_the_page_remembers_and_says_so(tab, method):
    page = tab(f"Storage.prototype.{method} = () => {{ throw new Error('full') }}")
    assert page.evaluate("CourseStore.saveEdit('02-01', 'mine')") is False
    assert page.evaluate("CourseStore.edit('02-01').text") == "mine"
    assert "lost when you leave" in page.evaluate("CourseStore.notice()")


def test_an_exported_file_is_the_same_in_another_browser(tab, browser):
    page = tab()
    page.evaluate("CourseStore.saveEdit('02-01', 'mine', 'abc'), CourseStore.saveRead('a.html')")
    before = exported(page)
    page.evaluate("localStorage.clear()")
    taken = page.evaluate("(text) => CourseStore.imported(text)", json.dumps(before))
    assert taken == {
        "edits": 1, "results": 0, "answers": 0, "predictions": 0, "read": 1, "hunts": 0, "tries": 0,
        "incidents": 0,
    }  # fmt: skip
    after = exported(page)
    assert {part: after[part] for part in EMPTY} == {part: before[part] for part in EMPTY}


@pytest.mark.parametrize(("at", "wins"), [(EARLY, "mine"), (LATE, "theirs")])
def test_of_two_texts_the_newer_counts_and_the_other_is_kept(tab, at, wins):
    page = tab()
    page.evaluate("CourseStore.saveEdit('02-01', 'mine')")
    text = file_with(edits={"02-01": {"text": "theirs", "at": at}})
    page.evaluate("(text) => CourseStore.imported(text)", text)
    both = [page.evaluate("CourseStore.edit('02-01').text")]
    both += [each["text"] for each in page.evaluate("CourseStore.older('02-01')")]
    assert both == [wins, "theirs" if wins == "mine" else "mine"]


def test_an_older_result_does_not_replace_a_newer_one(tab):
    page = tab()
    page.evaluate("CourseStore.saveResult('02-01', {passed: 25, total: 25, ok: true})")
    old = {"passed": 1, "total": 25, "ok": False, "at": EARLY}
    text = file_with(results={"02-01": old})
    assert page.evaluate("(text) => CourseStore.imported(text)", text)["results"] == 0
    assert page.evaluate("CourseStore.result('02-01').ok") is True


# ------------------------------------------------------------------ predictions


def predicted(page, lab: str = "02-01") -> dict:
    return page.evaluate(f"Object.fromEntries(CourseStore.predictions('{lab}'))")


def test_a_prediction_and_what_was_measured_are_there_after_a_reload(tab):
    page = tab()
    page.evaluate("CourseStore.savePrediction('02-01', 'survivors', 12)")
    page.evaluate("CourseStore.savePrediction('02-01', 'which', 'neither')")
    page.evaluate("CourseStore.savePrediction('02-05', 'hit', 0)")
    page.evaluate("CourseStore.saveMeasured('02-01', 'survivors', 11)")
    page.reload()
    kept = predicted(page)
    assert set(kept) == {"survivors", "which"}
    assert (kept["survivors"]["given"], kept["survivors"]["measured"]) == (12, 11)
    assert (kept["which"]["given"], "measured" in kept["which"]) == ("neither", False)


def test_before_it_is_compared_an_answer_gives_way_to_the_next(tab):
    page = tab()
    page.evaluate("CourseStore.savePrediction('02-01', 'x', 5)")
    page.evaluate("CourseStore.savePrediction('02-01', 'x', 6)")
    assert {**predicted(page)["x"], "at": ""} == {"given": 6, "at": ""}


def test_the_answer_that_was_compared_first_stays_beside_later_ones(tab):
    page = tab()
    page.evaluate("CourseStore.savePrediction('02-01', 'x', 5)")
    at = predicted(page)["x"]["at"]
    page.evaluate("CourseStore.saveMeasured('02-01', 'x', 0)")
    for call in ("savePrediction('02-01', 'x', 6)", "savePrediction('02-01', 'x', 7)"):
        page.evaluate(f"CourseStore.{call}")
    page.evaluate("CourseStore.saveMeasured('02-01', 'x', 8)")
    assert predicted(page)["x"] == {"given": 7, "first": 5, "measured": 0, "at": at}


def test_what_was_not_predicted_has_no_measured_value(tab):
    page = tab()
    page.evaluate("CourseStore.saveMeasured('02-01', 'x', 8)")
    assert predicted(page) == {}


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null", "true", "[]", "'x'.repeat(400001)"])
def test_a_prediction_is_a_number_or_a_text(tab, value):
    page = tab()
    with pytest.raises(Exception, match="a number or a text is wanted"):
        page.evaluate(f"CourseStore.savePrediction('02-01', 'x', {value})")
    assert predicted(page) == {}


def test_documents_and_files_from_before_there_were_predictions_are_read(tab):
    page = tab()
    old = {part: {} for part in EMPTY if part != "predictions"}
    edit = {"02-01": {"text": "mine", "at": EARLY}}
    text = json.dumps({"version": 1, **old, "edits": edit})
    page.evaluate("(text) => localStorage.setItem('course', text)", text)
    assert page.evaluate("CourseStore.edit('02-01').text") == "mine"
    assert page.evaluate("CourseStore.notice()") == ""
    page.evaluate("CourseStore.savePrediction('02-01', 'x', 5)")
    file = json.dumps({"format": "course-progress", "version": 1, **old})
    assert page.evaluate("(text) => CourseStore.imported(text)", file)["predictions"] == 0
    assert predicted(page)["x"]["given"] == 5
    assert page.evaluate("CourseStore.edit('02-01').text") == "mine"


COMPARED = {"given": 1, "measured": 9}


@pytest.mark.parametrize(
    ("mine", "theirs", "wins"),
    [
        ({"given": 1, "at": EARLY}, {"given": 2, "at": LATE}, "theirs"),
        ({"given": 1, "at": LATE}, {"given": 2, "at": EARLY}, "mine"),
        ({**COMPARED, "at": EARLY}, {"given": 2, "at": LATE}, "mine"),
        ({"given": 2, "at": LATE}, {**COMPARED, "at": EARLY}, "theirs"),
        ({**COMPARED, "at": EARLY}, {**COMPARED, "given": 2, "at": LATE}, "mine"),
        ({**COMPARED, "at": LATE}, {**COMPARED, "given": 2, "at": EARLY}, "theirs"),
        ({**COMPARED, "at": EARLY}, {**COMPARED, "first": 3, "at": EARLY}, "mine"),
    ],
)
def test_of_two_predictions_the_first_that_was_compared_counts_else_the_newer(
    tab, mine, theirs, wins
):
    page = tab()
    for entry in (mine, theirs):
        text = file_with(predictions={"02-01/x": entry})
        taken = page.evaluate("(text) => CourseStore.imported(text)", text)
    assert predicted(page)["x"] == (mine if wins == "mine" else theirs)
    assert taken["predictions"] == (wins == "theirs")
    assert exported(page)["predictions"] == {"02-01/x": predicted(page)["x"]}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("no", "not JSON"),
        ("null", "format"),
        ('{"format": "other"}', "format"),
        (json.dumps({"format": "course-progress", "version": 7, **EMPTY}), "version is 7"),
        (file_with(edits=[]), "edits"),
        (file_with(edits={"two": {"text": "", "at": EARLY}}), "edits.two"),
        (file_with(edits={"02-01": {"text": 5, "at": EARLY}}), "edits.02-01.text is 5"),
        (file_with(edits={"02-01": {"text": "x" * 400_001, "at": EARLY}}), "edits.02-01.text"),
        (file_with(results={"02-01": {"passed": -1, "total": 2}}), "results.02-01.passed is -1"),
        (file_with(answers={"__proto__": {}}), "answers.__proto__"),
        (file_with(predictions={"02-01": {"given": 5, "at": EARLY}}), "predictions.02-01"),
        (file_with(predictions={"02-01/x": {"given": True, "at": EARLY}}), "x.given is true"),
        (file_with(predictions={"02-01/x": {"given": "", "at": "now"}}), "predictions.02-01/x.at"),
        (file_with(hunts={"02-01": HUNT | {"level": 4}}), "hunts.02-01.level is 4"),
        (file_with(hunts={"02-01": HUNT | {"text": 5}}), "hunts.02-01.text is 5"),
        (file_with(tries={"../x": {"tries": [], "at": EARLY}}), "tries.../x"),
        (file_with(tries={"queue": {"tries": [{"score": 1}], "at": EARLY}}), "queue.tries"),
        (
            file_with(predictions={"02-01/x": {"given": 5, "at": EARLY, "measured": None}}),
            "predictions.02-01/x.measured is null",
        ),
        (file_with(read={"a b": EARLY}), "read.a b"),
        (file_with(read={"a.html": "yesterday"}), "read.a.html"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name_and_changes_nothing(tab, text, named):
    page = tab()
    page.evaluate("CourseStore.saveEdit('02-01', 'mine')")
    before = page.evaluate("localStorage.getItem('course')")
    told = page.evaluate(
        "(text) => { try { CourseStore.imported(text) } catch (error) { return error.message } }",
        text,
    )
    assert named in told
    assert page.evaluate("localStorage.getItem('course')") == before


@pytest.mark.parametrize(
    "call",
    [
        "saveEdit('__proto__', 'x')",
        "saveEdit('2-1', 'x')",
        """saveHunt('2-1', {level: 1, seed: 0, text: '', began: new Date().toISOString()})""",
        "saveAnswer('__proto__', {})",
        "savePrediction('02-01', '__proto__', 5)",
    ],
)
def test_a_name_that_is_none_is_refused(tab, call):
    with pytest.raises(Exception, match="no name of this course"):
        tab().evaluate(f"CourseStore.{call}")


def test_the_local_course_is_asked_with_the_token_of_the_page(tab):
    page = tab()
    asked = []

    def answer(route):
        asked.append((route.request.method, route.request.headers["x-course-token"]))
        route.fulfill(json={"ok": True})

    page.route("**/.course/*", answer)
    for body in ("undefined", "{lab: '02-01'}"):
        call = f"CourseStore.local('grade', {body}).then((answer) => answer.json())"
        assert page.evaluate(call) == {"ok": True}
    assert asked == [("GET", "secret"), ("POST", "secret")]


def test_elsewhere_there_is_no_local_course(tab):
    assert tab(path="plain").evaluate("CourseStore.local('progress')") is None


def test_a_text_that_is_too_long_is_refused_and_changes_nothing(tab):
    page = tab()
    page.evaluate("CourseStore.saveEdit('02-01', 'short')")
    for call in ("saveEdit", "keepOlder"):
        said = page.evaluate(f"""() => {{
            try {{ CourseStore.{call}("02-01", "x".repeat(400_001)); return "taken"; }}
            catch (error) {{ return error.message; }}
        }}""")
        assert said == "the text has more than 400000 characters"
    assert page.evaluate("CourseStore.edit('02-01').text") == "short"
    assert page.evaluate("CourseStore.older('02-01')") == []


def test_older_texts_travel_with_a_file_and_join_those_that_are_there(tab):
    page = tab()
    page.evaluate("['a', 'b'].forEach((text) => CourseStore.keepOlder('02-01', text))")
    file = page.evaluate("CourseStore.exported()")
    assert [each["text"] for each in json.loads(file)["older"]["02-01"]] == ["b", "a"]
    page.evaluate("localStorage.clear()")
    page.evaluate("['c', 'a'].forEach((text) => CourseStore.keepOlder('02-01', text))")
    page.evaluate("(file) => CourseStore.imported(file)", file)
    texts = page.evaluate("CourseStore.older('02-01').map((each) => each.text)")
    assert sorted(texts) == ["a", "b", "c"] and texts[0] == "a"

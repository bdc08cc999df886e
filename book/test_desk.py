"""The desk of a lab and the blocks of a page, in a real browser, as a reader uses them.

The first part plays the session of the page, so that it needs no runtime; the second runs the real
one, and skips where build/play does not hold it (`course book runtime`).
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from book.test_site import barriers
from course.learning import grading, manifest, show
from course.learning.labs import find_labs, pick
from course.learning.progress import PASSED, Progress
from course.play.judging import judge
from course.site import answers, book
from course.truth import pages

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[1]
LAB = "phase-02-paged-attention/labs/lab-01-block-allocator/index.html"
GUIDE = "phase-02-paged-attention/00-guide.html"
TOO_WIDE = "document.documentElement.scrollWidth - innerWidth"

FAKE = """
window.play = {events: [], result: {status: 0, seconds: 1}, calls: [], hold: false};
document.addEventListener("DOMContentLoaded", () => {
    let reject = null;
    const session = {
        state: "ready",
        stop: () => reject(new Error("stopped")),
        ready: () => (play.begun = true),
        async call(kind, payload, hear) {
            play.calls.push([kind, payload]);
            const told = kind === "block" ? play.blocks(payload) : play.events;
            for (const event of told.events ?? told) hear?.(event);
            if (play.hold) await new Promise((_, failed) => (reject = failed));
            return kind === "block" ? told.result : play.result;
        },
    };
    window.CoursePlay = {ready: true, session: () => session};
    window.COURSE_PLAY = {labs: {"02-01": {native: false}}, ...window.COURSE_PLAY};
    play.blocks = ({code}) => (
        {events: [{event: "out", text: code}], result: {text: code, error: null}});
});
"""


@pytest.fixture
def played(open_page):
    """Open a page whose session is played by `window.play`."""

    def open_(path: str = LAB, script: str = "", **settings):
        page = open_page("social.png", **settings)
        page.add_init_script(FAKE + script)
        page.goto(page.url.replace("social.png", path))
        return page

    return open_


def enter(page):
    """Go to the desk of a lab, as a reader does."""
    page.get_by_role("button", name="Open the lab").click()
    page.locator(".desk .cm-content, .desk textarea").first.wait_for()
    return page.locator(".desk")


def run(page) -> str:
    """Run the tests; the verdict."""
    page.get_by_role("button", name="Run the tests").click()
    return verdict(page)


def verdict(page) -> str:
    found = page.locator(".desk-verdict.desk-good, .desk-verdict.desk-bad")
    found.wait_for(timeout=120_000)
    return found.inner_text()


def events(*outcomes: str, **more) -> str:
    """A run of as many tests, as the runner writes it, set in the page."""
    names = [f"t.py::test_{place}" for place in range(len(outcomes))]
    told = [{"event": "collected", "tests": names}]
    for name, outcome in zip(names, outcomes, strict=True):
        result = {"event": "result", "test": name, "name": name[6:], "outcome": outcome}
        told += [{"event": "start", "test": name}, result | (more if outcome == "failed" else {})]
    return f"play.events = {json.dumps(told)}"


STARTER = [{"file": "/a/starter.py", "line": 91, "name": "popleft", "code": "x = 1"}]


# ------------------------------------------------------------------ a desk, played


def test_a_site_that_can_run_nothing_shows_its_pages_as_they_were(open_page, url):
    page = open_page("social.png")
    page.route("**/play/index.js*", lambda route: route.fulfill(body=""))
    for path in (LAB, GUIDE):
        page.goto(url + path)
        page.wait_for_load_state("networkidle")
        assert page.locator(".desk-opener, .desk-block, .desk:not(:empty)").count() == 0
        assert not page.locator(".desk").first.is_visible() if path == LAB else True


def test_without_javascript_there_is_nothing_to_press(open_page):
    page = open_page(LAB, javascript=False)
    assert page.get_by_role("button", name="Open the lab").count() == 0
    assert not page.locator(".desk").is_visible()


def test_a_page_loads_nothing_of_what_it_runs_before_it_is_asked(open_page, url):
    page = open_page("social.png")
    asked = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(url)))
    page.goto(url + GUIDE)
    page.wait_for_load_state("networkidle")
    heavy = [name for name in asked if name.startswith("play/") and "index.js" not in name]
    assert heavy == []
    assert not [name for name in asked if name.endswith(".json")]


def test_a_lab_that_cannot_run_in_a_page_says_why_and_gives_the_command(played):
    reason = 'COURSE_PLAY.labs["02-01"].native = "it starts processes"'
    page = played(script=f"addEventListener('DOMContentLoaded', () => ({reason}))")
    desk = page.locator(".desk-cannot")
    assert desk.inner_text() == (
        "This lab does not run in a page: it starts processes. On your machine: course check 02-01"
    )
    assert page.get_by_role("button", name="Open the lab").count() == 0


def test_opening_a_lab_begins_to_load_what_runs_it(played):
    page = played()
    page.get_by_role("button", name="Open the lab").wait_for()
    assert not page.evaluate("play.begun")
    enter(page)
    assert page.evaluate("play.begun") and page.evaluate("play.calls") == []


def test_what_is_written_is_there_after_a_reload(played):
    page = played()
    enter(page)
    page.locator(".desk .cm-content, .desk textarea").first.fill("# my own\n")
    page.reload()
    desk = enter(page)
    assert "# my own" in desk.locator(".cm-content, textarea").first.evaluate(
        "(node) => node.value ?? node.innerText"
    )


def test_the_text_of_the_editor_is_what_runs_and_the_result_is_kept(played):
    page = played()
    enter(page)
    page.locator(".desk .cm-content, .desk textarea").first.fill("# mine")
    page.evaluate(events("passed", "passed"))
    assert run(page).startswith("Passed: all 2 tests")
    kind, payload = page.evaluate("play.calls[0]")
    assert (kind, payload["lab"], payload["files"]) == ("grade", "02-01", {"starter.py": "# mine"})
    kept = page.evaluate("CourseStore.result('02-01')")
    assert (kept["passed"], kept["total"], kept["ok"]) == (2, 2, True)
    assert "next: lab 02-05" in page.locator(".desk-after").inner_text().lower()


def test_the_first_failure_is_told_with_a_way_to_its_line(played):
    page = played()
    desk = enter(page)
    page.evaluate(events("passed", "failed", error="ValueError", message="no", frames=STARTER))
    assert run(page).startswith("1 of 2 tests pass")
    assert "popleft raised ValueError: no" in desk.locator(".desk-first").inner_text()
    desk.get_by_role("button", name="Go to line 91").click()
    line = page.evaluate(
        "() => { const at = getSelection().anchorNode;"
        " return (at.closest ? at : at.parentElement).closest('.cm-line, textarea')?.textContent }"
    )
    starter = pick(find_labs(ROOT), "02-01").starter.read_text(encoding="utf-8").splitlines()
    assert line is None or line == starter[90]


def test_hints_unfold_one_after_another_and_end(played):
    page = played()
    desk = enter(page)
    name = "test_free_queue_fifo_and_count"
    hints = pick(find_labs(ROOT), "02-01").manifest.hints[name]
    page.evaluate(events("failed", message="x", error="ValueError").replace("test_0", name))
    run(page)
    for count in range(1, len(hints) + 1):
        desk.get_by_role("button", name=f"hint ({count} of {len(hints)})").click()
        assert desk.locator(".desk-hints li").all_inner_texts() == [
            hint.text for hint in hints[:count]
        ]
    assert "That was the last hint" in desk.locator(".desk-first").inner_text()
    assert desk.get_by_role("button", name="hint").count() == 0


def test_the_reference_is_fetched_when_it_is_asked_for_and_not_before(played):
    page = played()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    desk = enter(page)
    desk.get_by_text("The reference, before you have passed").click()
    assert not [name for name in asked if "-solution." in name]
    desk.get_by_role("button", name="Show the reference all the same").click()
    desk.locator(".desk-diff, .cm-mergeView").first.wait_for()
    assert len([name for name in asked if "-solution." in name]) == 1


def test_stop_ends_a_run_and_says_where_it_was(played):
    page = played()
    enter(page)
    page.evaluate("play.events = [{event: 'collected', tests: ['t.py::test_a']},"
                  " {event: 'start', test: 't.py::test_a'}]; play.hold = true")  # fmt: skip
    page.get_by_role("button", name="Run the tests").click()
    page.get_by_text("0 of 1 tests ran, now test_a.").wait_for()
    page.get_by_role("button", name="Stop").click()
    verdict(page)
    assert "Stopped in test_a." in page.locator(".desk-first").inner_text()
    assert page.evaluate("CourseStore.result('02-01')") is None


def test_a_reset_gives_the_starter_and_the_text_can_be_put_back(played):
    page = played()
    desk = enter(page)
    text = "(node) => node.value ?? node.innerText"
    area = desk.locator(".cm-content, textarea").first
    area.fill("# an evening's work")
    desk.get_by_role("button", name="Reset").click()
    assert "Lab 02-01" in area.evaluate(text)
    assert page.evaluate("CourseStore.edit('02-01')") is None
    desk.get_by_role("button", name="Put my text back").click()
    assert area.evaluate(text).strip() == "# an evening's work"


def test_a_starter_that_changed_since_is_said_and_the_text_stays(played):
    page = played()
    page.evaluate("CourseStore.saveEdit('02-01', '# mine', 'another')")
    page.reload()
    desk = enter(page)
    assert "has changed since you began" in desk.locator(".desk-notices").inner_text()
    area = desk.locator(".cm-content, textarea").first
    assert area.evaluate("(node) => node.value ?? node.innerText").strip() == "# mine"
    desk.get_by_role("button", name="I know").click()
    page.reload()
    assert "has changed" not in enter(page).locator(".desk-notices").inner_text()


def test_an_exported_file_can_be_imported(played, tmp_path):
    page = played()
    desk = enter(page)
    area = desk.locator(".cm-content, textarea").first
    area.fill("# mine")
    desk.get_by_text("Keep or move your work").click()
    with page.expect_download() as given:
        desk.get_by_role("button", name="Export").click()
    path = tmp_path / given.value.suggested_filename
    given.value.save_as(path)
    page.evaluate("localStorage.removeItem('course')")
    page.reload()
    desk = enter(page)
    desk.locator("input[type=file]").set_input_files(path)
    desk.get_by_text("Taken: 1 edit").wait_for()
    area = desk.locator(".cm-content, textarea").first
    assert area.evaluate("(node) => node.value ?? node.innerText").strip() == "# mine"
    path.write_text("{}", encoding="utf-8")
    desk.locator("input[type=file]").set_input_files(path)
    desk.get_by_text("Nothing was taken").wait_for()


def test_a_text_too_long_to_be_kept_is_said_and_stays_and_runs(played):
    page = played()
    desk = enter(page)
    page.evaluate("CourseStore.saveEdit('02-01', '# short')")
    page.reload()
    desk = enter(page)
    area = desk.locator(".cm-content, textarea").first
    area.fill("x = 1  # " + "y" * 400_001)
    page.evaluate(events("passed"))
    assert run(page)
    assert "Not kept in this browser" in desk.locator(".desk-notices").inner_text()
    assert page.evaluate("play.calls[0][1].files['starter.py'].length") > 400_000
    assert page.evaluate("CourseStore.edit('02-01').text") == "# short"
    area.fill("# shorter")
    desk.get_by_text("Not kept in this browser").wait_for(state="detached")
    assert page.complaints == []


def test_earlier_texts_are_offered(played):
    page = played()
    desk = enter(page)
    area = desk.locator(".cm-content, textarea").first
    area.fill("# mine")
    desk.get_by_role("button", name="Reset").click()
    desk.get_by_text("Keep or move your work").click()
    desk.get_by_role("button", name="Show this one").click()
    assert "# mine" in area.evaluate("(node) => node.value ?? node.innerText")


def test_the_keyboard_is_enough(played):
    page = played()
    page.evaluate(events("passed"))
    page.locator(".desk-opener").focus()
    page.keyboard.press("Enter")
    area = page.locator(".desk .cm-content, .desk textarea").first
    area.wait_for()
    area.focus()
    page.keyboard.press("Control+Enter")
    assert verdict(page).startswith("Passed")
    page.keyboard.press("ArrowRight")
    assert page.url.endswith(LAB)
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Run the tests"


@pytest.mark.parametrize(("width", "theme"), [(390, "light"), (1280, "navy")])
def test_a_desk_has_no_serious_barrier_and_fits_its_screen(played, width, theme):
    page = played(width=width, theme=theme)
    desk = enter(page)
    long = "a message with a_name_that_is_very_long_" + "and_longer_" * 12
    page.evaluate(
        events("passed", "failed", "skipped", error="ValueError", message=long, frames=STARTER)
    )
    run(page)
    desk.get_by_text("All tests").click()
    desk.get_by_text("The reference, before you have passed").click()
    desk.get_by_text("Keep or move your work").click()
    assert page.evaluate(TOO_WIDE) == 0
    assert barriers(page, ".desk") == []
    page.evaluate(events("passed"))
    run(page)
    assert barriers(page, ".desk") == []


def test_another_tab_does_not_write_over_this_one(played):
    page = played()
    desk = enter(page)
    other = page.context.new_page()
    other.goto(page.url)
    other.evaluate("CourseStore.saveEdit('02-01', '# of the other tab')")
    desk.get_by_text("Another tab has another text of this lab.").wait_for()
    area = desk.locator(".cm-content, textarea").first
    assert "of the other tab" not in area.evaluate("(node) => node.value ?? node.innerText")
    desk.get_by_role("button", name="Show that one").click()
    assert "of the other tab" in area.evaluate("(node) => node.value ?? node.innerText")


# ------------------------------------------------------------------ blocks, played


def test_the_blocks_of_every_page_are_those_that_ci_runs(open_page, url, site):
    page = open_page(GUIDE)
    found = 0
    wrong = []
    for path in pages.find(ROOT):
        runnable = pages.runnable(path)
        name = book.staged(path.relative_to(ROOT)).with_suffix(".html")
        if not runnable or not (site / name).is_file():
            continue
        told = page.evaluate(
            """async (address) => {
                const text = await (await fetch(address)).text();
                const read = new DOMParser().parseFromString(text, "text/html");
                return CourseDesk.runnable(read).map(({code, expected}) =>
                    [code.textContent, expected && expected.textContent]);
            }""",
            url + name.as_posix(),
        )
        expected = [[block.text, output and output.text] for block, output in runnable]
        found += len(runnable)
        if told != expected:
            wrong.append(name.as_posix())
    assert found > 200
    assert wrong == []


def test_a_block_runs_those_above_it_first_and_says_whether_it_printed_the_same(played):
    page = played(GUIDE)
    expected = page.evaluate(
        "CourseDesk.runnable().map(({expected}) => expected && expected.textContent)"
    )
    page.evaluate(
        "(texts) => void (play.blocks = ({index}) => ({events: [],"
        " result: {text: texts[index] ?? '', error: null}}))",
        expected,
    )
    page.get_by_role("button", name="Run block 3", exact=True).click()
    page.locator(".desk-said.desk-good").nth(2).wait_for()
    assert page.evaluate("play.calls.map(([, {index}]) => index)") == [0, 1, 2]
    page.get_by_role("button", name="Run block 2", exact=True).click()
    page.wait_for_function("play.calls.length === 5")
    states = page.evaluate("play.calls.map(([, {page}]) => page)")
    assert len(set(states[:3])) == 1 and set(states[3:]).isdisjoint(states[:3]), (
        "a block that runs again must not meet what it left behind"
    )


def test_an_edited_block_runs_as_edited_shows_the_difference_and_can_be_put_back(played):
    page = played(GUIDE)
    block = page.locator(".desk-block").first
    given = page.evaluate("CourseDesk.runnable()[0].code.textContent")
    block.get_by_role("button", name="Edit").click()
    area = page.locator("main .desk-editor .cm-content, main .desk-editor textarea").first
    area.wait_for()
    area.fill("print(1)")
    page.keyboard.press("Control+Enter")
    block.locator(".desk-diff").wait_for()
    assert page.evaluate("play.calls[0][1].code") == "print(1)\n"
    assert block.locator(".desk-plus").all_inner_texts()[-1].strip() == "+ print(1)"
    block.get_by_role("button", name="Put block 1 back").click()
    assert page.locator("main .desk-editor").count() == 0
    block.get_by_role("button", name="Run").click()
    page.wait_for_function("play.calls.length === 2")
    assert page.evaluate("play.calls[1][1].code") == given


def test_an_edit_of_a_block_is_offered_after_a_reload_until_it_is_put_back(played):
    page = played(GUIDE)
    block = page.locator(".desk-block").first
    area = page.locator("main .desk-editor .cm-content, main .desk-editor textarea").first
    block.get_by_role("button", name="Edit block 1").click()
    area.wait_for()
    area.fill("print(1)")
    page.reload()
    assert page.locator("main .desk-editor").count() == 0, "nothing is loaded unasked"
    block.get_by_role("button", name="Show my edit of block 1").click()
    area.wait_for()
    page.keyboard.press("Control+Enter")
    page.wait_for_function("play.calls.length === 1")
    assert page.evaluate("play.calls[0][1].code") == "print(1)\n"
    block.get_by_role("button", name="Put block 1 back").click()
    page.reload()
    block.get_by_role("button", name="Edit block 1").wait_for()


def test_the_buttons_of_a_lab_stay_in_sight_while_its_file_is_long(played):
    page = played()
    run = page.get_by_role("button", name="Run the tests")
    page.locator("main .desk").evaluate("(desk) => desk.scrollIntoView({block: 'start'})")
    page.locator(".desk .cm-content, .desk textarea").first.wait_for()
    bottom = run.bounding_box()["y"] + run.bounding_box()["height"]
    assert page.viewport_size["height"] - 80 < bottom <= page.viewport_size["height"]


def test_an_error_is_shown_and_the_page_begins_anew(played):
    page = played(GUIDE)
    page.evaluate(
        "void (play.blocks = () => ({events: [], result: {text: '', error: 'NameError: x'}}))"
    )
    page.get_by_role("button", name="Run block 2", exact=True).click()
    page.get_by_text("Block 1 above failed; it must run first.").wait_for()
    assert page.locator(".desk-error").inner_text() == "NameError: x"
    assert page.evaluate("play.calls.length") == 1


@pytest.mark.parametrize(("width", "theme"), [(390, "navy"), (1280, "light")])
def test_blocks_have_no_serious_barrier_and_fit_their_screen(played, width, theme):
    page = played(GUIDE, width=width, theme=theme)
    page.get_by_role("button", name="Run block 1", exact=True).click()
    page.locator(".desk-diff").wait_for()
    page.get_by_role("button", name="Edit block 2").click()
    page.locator("main .desk-editor .cm-content, main .desk-editor textarea").first.wait_for()
    assert page.evaluate(TOO_WIDE) == 0
    assert barriers(page, ".desk-block", ".desk-editor") == []


def test_a_block_that_a_page_cannot_run_says_so_and_the_others_run(played):
    reason = "it starts processes"
    table = json.dumps({GUIDE.replace(".html", ".md"): {"0": reason}})
    page = played(
        GUIDE, f"addEventListener('DOMContentLoaded', () => (COURSE_PLAY.pages = {table}))"
    )
    first = page.locator(".desk-block").first
    assert first.inner_text() == f"On your machine only: {reason}."
    assert first.locator("button").count() == 0
    page.get_by_role("button", name="Run block 3", exact=True).click()
    page.wait_for_function("play.calls.length === 3")
    assert page.evaluate("play.calls.map(([, {index}]) => index)") == [0, 1, 2]
    assert first.inner_text() == f"On your machine only: {reason}."


# ------------------------------------------------------------------ the real runtime


@pytest.fixture
def real(site, open_page):
    """Open a page that runs Python."""
    if not (site / "play" / "index.js").is_file():
        pytest.skip("needs what runs Python in the pages: course book runtime")
    return open_page


def test_a_starter_a_misconception_and_a_solution_have_in_the_page_the_verdicts_of_this_machine(
    real,
):
    """One after the other at one desk: its Python takes seconds to begin."""
    lab = pick(find_labs(ROOT), "02-01")
    solution = lab.solution.read_text(encoding="utf-8")
    report = grading.run(ROOT, lab.test_file, impl="starter")
    stream = io.StringIO()
    console = Console(file=stream, highlight=False, markup=False, width=10_000)
    show.explain(console, ROOT, lab, report.failed[0])
    page = real(LAB)
    desk = enter(page)
    assert run(page).startswith(f"{len(report.passed)} of {len(report.results)} tests pass")
    told = desk.locator(".desk-first").inner_text()
    for line in stream.getvalue().strip().splitlines():
        assert line.strip() in told
    area = desk.locator(".cm-content, textarea").first
    wrong = next(m for m in lab.manifest.misconceptions if m.name == "links-not-cleared")
    area.fill(manifest.wrong_solution(solution, wrong))
    run(page)
    desk.get_by_text("All tests").click()
    failing = desk.locator(".desk-list .desk-failed > code").all_inner_texts()
    assert wrong.caught_by in {name.partition("[")[0] for name in failing}
    native = grading.run(ROOT, lab.test_file, impl="solution")
    area.fill(solution)
    passed = f"all {len(native.passed)} tests"
    assert run(page).startswith(f"Passed: {passed}")
    page.reload()
    assert passed in enter(page).locator(".desk-notices").inner_text()


def test_the_blocks_of_a_guide_print_what_ci_has_seen(real):
    page = real(GUIDE)
    count = len(pages.runnable(ROOT / "phase-02-paged-attention" / "00-guide.md"))
    page.get_by_role("button", name=f"Run block {count}", exact=True).click()
    page.wait_for_function(
        "!document.querySelector('.desk-block button:disabled')", timeout=120_000
    )
    said = page.locator(".desk-said").all_inner_texts()
    assert len(said) == count
    assert [text for text in said if "it printed what stands below" not in text] == []


# ------------------------------------------------------------------ on this machine


def test_at_home_the_file_on_disk_is_shown_saved_and_graded(at_home, checkout):
    lab = find_labs(checkout)[0]
    lab.starter.write_text("# of the checkout\n", encoding="utf-8")
    desk = enter(at_home)
    area = desk.locator(".cm-content, textarea").first
    assert "of the checkout" in area.evaluate("(node) => node.value ?? node.innerText")
    solution = lab.solution.read_text(encoding="utf-8")
    area.fill(solution)
    assert run(at_home).startswith("Passed: all")
    assert lab.starter.read_text(encoding="utf-8").strip() == solution.strip()
    assert Progress(checkout).state(lab) == PASSED


def test_at_home_a_file_that_changed_meanwhile_is_said_and_both_are_offered(at_home, checkout):
    lab = find_labs(checkout)[0]
    desk = enter(at_home)
    area = desk.locator(".cm-content, textarea").first
    area.fill("# of the page\n")
    lab.starter.write_text("# of an editor\n", encoding="utf-8")
    run(at_home)
    assert "has changed since this page read it" in desk.locator(".desk-notices").inner_text()
    assert lab.starter.read_text(encoding="utf-8") == "# of an editor\n"
    desk.get_by_role("button", name="Take the file's text").click()
    assert "of an editor" in area.evaluate("(node) => node.value ?? node.innerText")
    area.fill("# of the page\n")
    lab.starter.write_text("# of an editor again\n", encoding="utf-8")
    run(at_home)
    desk.get_by_role("button", name="Save mine over it").click()
    at_home.wait_for_function(
        "CourseStore.older('02-01').some((each) => each.text.includes('again'))"
    )
    verdict(at_home)
    assert lab.starter.read_text(encoding="utf-8").startswith("# of the page")


def test_at_home_an_untouched_editor_follows_the_file_and_one_that_is_gone_empties_nothing(
    at_home, checkout
):
    lab = find_labs(checkout)[0]
    desk = enter(at_home)
    shown = "(node) => node.value ?? node.innerText"
    area = desk.locator(".cm-content, textarea").first
    lab.starter.write_text("# saved elsewhere\n", encoding="utf-8")
    run(at_home)  # no conflict: this text has nothing of its own
    assert "saved elsewhere" in area.evaluate(shown)
    assert "has changed; this is its text now" in desk.locator(".desk-notices").inner_text()
    lab.starter.write_text("# and once more\n", encoding="utf-8")
    at_home.evaluate("dispatchEvent(new Event('focus'))")
    area.filter(has_text="once more").wait_for()
    lab.starter.unlink()
    at_home.get_by_role("button", name="Run the tests").click()
    desk.get_by_role("button", name="Write this text there").click()
    verdict(at_home)
    assert lab.starter.read_text(encoding="utf-8") == "# and once more\n"


def test_a_link_holds_a_text_and_offers_it_before_anything_runs(played):
    page = played()
    desk = enter(page)
    area = desk.locator(".cm-content, textarea").first
    area.fill("# a way, \u00e4 \u2248\n" * 40)
    desk.get_by_text("Keep or move your work").click()
    desk.get_by_role("button", name="Link to this text").click()
    address = desk.get_by_role("textbox", name="Link to this text").input_value()
    assert len(address.partition("#")[2]) < 100, "packed"
    other = played()
    other.goto(address)
    shelf = enter(other)
    shelf.locator(".desk-notices").get_by_text("written by whoever made it").wait_for()
    text = "(node) => node.value ?? node.innerText"
    assert "# a way" not in shelf.locator(".cm-content, textarea").first.evaluate(text)
    shelf.get_by_role("button", name="Show it").click()
    assert "# a way, \u00e4 \u2248" in shelf.locator(".cm-content, textarea").first.evaluate(text)
    other.evaluate("location.hash = '#text=AAAA'")
    shelf.get_by_text("The link's text cannot be read: it is cut off or was changed.").wait_for()
    assert page.complaints == other.complaints == []


def test_at_home_an_endless_loop_is_stopped(at_home, checkout):
    desk = enter(at_home)
    desk.locator(".cm-content, textarea").first.fill("while True:\n    pass\n")
    at_home.get_by_role("button", name="Run the tests").click()
    at_home.get_by_text("tests ran, now").wait_for()
    at_home.get_by_role("button", name="Stop").click()
    verdict(at_home)
    said = desk.locator(".desk-first").inner_text()
    assert "Stopped at import: the file itself was being read." in said


# ------------------------------------------------------------------ exercises with code

EXERCISES = "phase-02-paged-attention/EXERCISES.html"


def answering(page):
    """The box of exercise 7, its editor open, with an answer in it."""
    box = page.locator("#answer-02-bu-07")
    box.get_by_role("button", name="Answer here").click()
    box.locator(".cm-content, textarea").click()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.insert_text("def fork_block(pool, block):\n    return block\n")
    return box


def test_an_exercise_is_answered_in_its_box_and_comes_back_after_days(played):
    page = played(EXERCISES)
    page.evaluate(
        "play.result = {right: false, said: 'line 2: A write would.', line: 2, printed: 'mine'}"
    )
    box = answering(page)
    box.get_by_role("button", name="Check").click()
    box.get_by_text("Not yet.").wait_for()
    assert "line 2: A write would." in box.inner_text() and "mine" in box.inner_text()
    box.get_by_role("button", name="Go to line 2").click()
    box.get_by_role("button", name="Show an answer").click()
    assert "get_new_blocks" in box.inner_text()
    (kind, payload), *_ = page.evaluate("play.calls")
    assert (kind, payload["function"], payload["timeLimit"]) == ("python", "judge", 30)
    assert payload["arguments"]["code"] == "def fork_block(pool, block):\n    return block\n"
    assert "fork_block" in payload["arguments"]["test"]
    page.evaluate("play.result = {right: true, said: '', line: null, printed: ''}")
    box.locator(".cm-content, textarea").press("Control+Enter")
    box.locator("strong", has_text="Right.").wait_for()
    kept = page.evaluate("CourseStore.answer('02-bu-07')")
    assert kept["right"] and kept["box"] == 1
    assert page.evaluate("CourseStore.allDue()") == []
    page.evaluate(
        """() => {
            const kept = JSON.parse(localStorage.course);
            kept.answers["02-bu-07"].at = new Date(Date.now() - 2 * 86400000).toISOString();
            localStorage.course = JSON.stringify(kept);
        }"""
    )
    page.reload()
    assert page.evaluate("CourseStore.allDue()") == ["02-bu-07"]
    box.get_by_role("button", name="Answer it again").click()
    box.locator(".cm-content, textarea").wait_for()
    assert "raise NotImplementedError" in box.inner_text()
    page.goto(page.url.replace("EXERCISES.html", "index.html"))
    assert "Exercises (1)" in page.locator(".place-review").inner_text()
    assert page.complaints == []


@pytest.mark.parametrize(("width", "theme"), [(390, "navy"), (1280, "light")])
def test_an_exercise_with_code_has_no_serious_barrier_and_fits_its_screen(played, width, theme):
    page = played(EXERCISES, width=width, theme=theme)
    page.evaluate("play.result = {right: false, said: 'No.', line: 2, printed: 'mine'}")
    box = answering(page)
    box.get_by_role("button", name="Check").click()
    box.get_by_text("Not yet.").wait_for()
    assert barriers(page, "#answer-02-bu-07") == []
    assert page.evaluate(TOO_WIDE) <= 0


def test_every_exercise_with_code_is_graded_in_the_page_as_at_the_terminal(real):
    """The answer passes and the first slip is told in the same words."""
    page = real(EXERCISES)
    coded = [each for phase in sorted(ROOT.glob("phase-*")) for each in answers.coded(phase)]
    for exercise in coded:
        slip = exercise.slips[0]
        for code in (exercise.code, exercise.code.replace(slip.replace, slip.instead)):
            told = page.evaluate(
                "([code, test]) => CoursePlay.session().call('python', {module: "
                "'course.play.judging', function: 'judge', arguments: {code, test}})",
                [code, exercise.test],
            )
            here = judge(code, exercise.test)
            assert (told["right"], told["said"]) == (here["right"], here["said"]), exercise.id

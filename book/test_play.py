"""Code in the page, in real browsers: what a lab page, a guide's block and a widget ask of it.

A page of two lines over the real payload: `course book runtime` must have been run. All labs are
graded by Node (`course book runtime --check`); here a few, in Chromium and in Firefox.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from course.learning import manifest
from course.learning.labs import CourseError, find_labs
from course.site import book_site, play, play_check, play_payload

sys.path.insert(0, str(Path(__file__).parent))
import firefox

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[1]
LABS = {lab.id: lab for lab in find_labs(ROOT)}
FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
PROMPT = "The scheduler "
SIXTY_FOUR = f"""
from mini_vllm import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
print(LLM(dtype="float64").generate([{PROMPT!r}], params)[0].outputs[0].text)
"""
GRADE = """async () => {
    const outcomes = {};
    const began = performance.now();
    let first = 0;
    const result = await CoursePlay.session().call("grade", %s, (event) => {
        first = first || performance.now() - began;
        if (event.event === "result") {
            outcomes[event.test.split("::").pop()] = event.outcome;
        }
    });
    return { result, outcomes, first };
}"""


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The address of a page that can run Python."""
    if why := play.problem(ROOT):
        pytest.skip(f"needs what runs Python in the pages ({why}): course book runtime")
    site = tmp_path_factory.mktemp("site")
    version = play_payload.write(ROOT, site / "play")
    script = f'<script src="play/index.js?v={version}"></script>'
    text = f"<!doctype html><html lang=en><title>t</title><link rel=icon href=data:,>{script}"
    (site / "index.html").write_text(text, encoding="utf-8")
    with book_site.serving(site, 0) as address:
        yield address


@pytest.fixture
def page(browser, played):
    opened = browser.new_page()
    opened.set_default_timeout(120_000)
    opened.asked, opened.complaints = [], []
    opened.on("request", lambda request: opened.asked.append(request.url))
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.goto(played)
    yield opened
    opened.close()
    assert opened.complaints == []
    assert [url for url in opened.asked if not url.startswith((played, "data:", "blob:"))] == []


@pytest.fixture(scope="module")
def fox(played, tmp_path_factory):
    pytest.importorskip("websockets", reason="needs websockets")
    if FIREFOX is None:
        pytest.skip("needs firefox on the PATH")
    with firefox.opened(FIREFOX, tmp_path_factory.mktemp("profile")) as opened:
        opened.goto(played)
        yield opened


def grade(lab: str, text: str | None = None, **more) -> str:
    """The call that grades `text` as the starter of a lab."""
    payload = {"lab": lab, **more}
    if text is not None:
        payload["files"] = {"starter.py": text}
    return GRADE % json.dumps(payload)


def solution(lab: str) -> str:
    return LABS[lab].solution.read_text(encoding="utf-8")


def call(kind: str, **payload) -> str:
    """The function that makes one call, and gives its result or its error."""
    told = f"{json.dumps(kind)}, {json.dumps(payload)}"
    return f"() => CoursePlay.session().call({told}).catch((error) => error.message)"


def block(code: str, index: int = 0, page: str = "guide") -> str:
    return call("block", page=page, index=index, code=code)


def test_nothing_is_loaded_before_something_is_asked_for(page, played):
    assert page.evaluate("CoursePlay.ready && CoursePlay.session().state") == "idle"
    assert [url.partition("?")[0] for url in page.asked[1:]] == [f"{played}play/index.js"]


@pytest.mark.parametrize(
    "lab", ["02-01", *(pytest.param(lab, marks=pytest.mark.slow) for lab in ("00-03", "01-05"))]
)
def test_a_lab_passes_with_its_solution_fails_with_its_starter_and_names_a_misconception(
    page, lab, record_property
):
    told = page.evaluate(grade(lab, solution(lab)))
    record_property("milliseconds to the first event", round(told["first"]))
    assert set(told["outcomes"].values()) <= {"passed", "skipped"} and told["result"]["status"] == 0
    assert "passed" not in page.evaluate(grade(lab))["outcomes"].values()
    wrong = LABS[lab].manifest.misconceptions[0]
    told = page.evaluate(grade(lab, manifest.wrong_solution(solution(lab), wrong)))
    caught = {name.partition("[")[0] for name, end in told["outcomes"].items() if end == "failed"}
    assert wrong.caught_by in caught


class InPage:
    """A page's session as the check of all labs calls a worker."""

    def __init__(self, evaluate):
        self.evaluate = evaluate

    def call(self, kind, payload):
        told = self.evaluate(
            f"""async () => {{
                const events = [];
                const ask = CoursePlay.session().call(
                    {json.dumps(kind)}, {json.dumps(payload)}, (event) => events.push(event));
                return {{ events, ...await ask.then((result) => ({{ result }}),
                                                   (error) => ({{ error: error.message }})) }};
            }}"""
        )
        if "error" in told:
            raise CourseError(told["error"])
        return told["result"], told["events"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chromium", "firefox"])
def test_every_lab_does_in_the_browser_what_it_does_here(kind, request):
    opened = request.getfixturevalue({"chromium": "page", "firefox": "fox"}[kind])
    problems = {}
    for lab in LABS.values():
        native = play_check.natively(ROOT, lab)
        verdict = play_check.check_lab(InPage(opened.evaluate), lab, native)
        print(lab.id, verdict.passed, verdict.skipped, f"{verdict.seconds:.1f} s", flush=True)
        if verdict.problems:
            problems[lab.id] = verdict.problems
    assert problems == {}


def test_64_tokens_are_those_of_the_same_engine_here(page):
    from mini_vllm import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    (expected,) = LLM(dtype="float64").generate([PROMPT], params)
    assert page.evaluate(block(SIXTY_FOUR))["text"] == expected.outputs[0].text + "\n"


def test_an_endless_loop_is_stopped_and_the_next_call_runs(page):
    told = page.evaluate(
        """async () => {
            const session = CoursePlay.session();
            await session.call("block", { page: "guide", index: 0, code: "x = 1" });
            const endless = { page: "guide", index: 1, code: "while True: pass" };
            const running = session.call("block", endless).catch((error) => error.message);
            const waiting = session.call("block", endless).catch((error) => error.message);
            session.stop();
            return [await running, await waiting, session.state];
        }"""
    )
    assert told == ["stopped", "stopped", "idle"]
    assert page.evaluate(block("print(2)")) == {"text": "2\n", "error": None}


@pytest.mark.slow
def test_a_lab_that_never_ends_is_ended_at_its_time_limit_by_the_test_it_was_in(page):
    page.evaluate(block("pass"))
    endless = "while True:\n    pass\n"
    said = page.evaluate(
        f"() => ({grade('02-01', endless, timeLimit=2)})().catch((error) => error.message)"
    )
    assert said == "out of time: no end after 2 s in test_free_queue_fifo_and_count"


@pytest.mark.slow
def test_what_ends_python_itself_is_told_and_python_begins_anew(page):
    deep = "import json\nx = []\nfor _ in range(200_000): x = [x]\nimport marshal\nrepr_of = x\n"
    deep += "import copy\nimport pickle\nprint(len(json.dumps(x)))"
    said = page.evaluate(block(deep))
    if isinstance(said, dict):  # this browser's stack had room for it, or Python refused
        assert said["error"] and "RecursionError" in said["error"]
    else:
        assert said.startswith("Python ended: ")
    assert page.evaluate(block("print(1)"))["text"] == "1\n"


@pytest.mark.slow
def test_a_worker_whose_memory_has_grown_is_begun_anew_for_the_next_grading(page):
    hungry = solution("01-05") + "\nkept = bytearray(800 * 2**20)\n"
    told = page.evaluate(grade("01-05", hungry))
    assert told["result"]["status"] == 0
    assert page.evaluate("CoursePlay.session().state") == "idle"
    assert page.evaluate(grade("01-05", solution("01-05")))["result"]["status"] == 0
    assert page.evaluate("CoursePlay.session().state") == "ready"


def test_the_blocks_of_a_page_stay_when_a_lab_is_graded_between_them(page):
    page.evaluate(block("from mini_vllm import Request\nkind = Request"))
    page.evaluate(grade("01-05"))
    code = "from mini_vllm import Request\nprint(kind is Request)"
    assert page.evaluate(block(code, 1))["text"] == "True\n"


def test_a_function_of_the_course_is_called(page):
    versions = {"module": "labkit.versions", "function": "version"}
    assert page.evaluate(call("python", **versions, arguments={"package": "-"})) == ""
    said = page.evaluate(call("python", **versions, arguments={}))
    assert "missing 1 required positional argument" in said


def test_pytest_finds_a_labs_tests_as_it_would_rewrite_them(page):
    lab = LABS["02-01"]
    page.evaluate(call("grade", lab=lab.id, files={"other.py": ""}))  # brings the lab, runs nothing
    tests = ["conftest.py", lab.test_file.relative_to(ROOT).as_posix()]
    code = f"""
from pathlib import Path
from _pytest.assertion import rewrite
for test in map(Path, {tests}):
    code = rewrite._read_pyc(test, test.parent / "__pycache__" / (test.stem + rewrite.PYC_TAIL))
    print(code.co_filename)
"""
    assert page.evaluate(block(code))["text"].split() == [f"/course/{test}" for test in tests]


@pytest.mark.slow
def test_a_part_that_does_not_come_is_named_and_the_next_call_tries_again(page):
    page.context.route("**/numpy-*.bin", lambda route: route.fulfill(status=503, body="later"))
    said = page.evaluate(block("print(1)"))
    assert "numpy-" in said and "503" in said
    assert page.evaluate("CoursePlay.session().state") == "idle"
    page.context.unroute("**/numpy-*.bin")
    assert page.evaluate(block("print(1)"))["text"] == "1\n"


@pytest.mark.slow
def test_a_file_that_does_not_come_when_it_is_opened_is_an_error_of_python(page):
    page.context.route("**/files/*.safetensors.bin", lambda route: route.abort())
    code = "from mini_vllm import LLM\nLLM()"
    assert "I/O error" in page.evaluate(block(code))["error"].splitlines()[-1]
    page.context.unroute("**/files/*.safetensors.bin")
    assert page.evaluate(block(code))["error"] is None


def test_the_progress_of_loading_ends_at_its_total(page):
    told = page.evaluate(
        """async () => {
            const session = CoursePlay.session();
            const seen = [];
            session.onprogress = (progress) => seen.push(progress);
            await session.call("grade", { lab: "00-04" });
            return seen;
        }"""
    )
    assert told[-1]["loaded"] == told[-1]["total"] > 10_000_000
    assert {"Python", "numpy", "pytest", "the course", "lab 00-04"} <= {p["what"] for p in told}
    loaded = [progress["loaded"] for progress in told]
    assert loaded == sorted(loaded)


def test_the_editor_edits_and_says_what_the_reader_changed(page):
    page.evaluate(
        """async () => {
            const { createEditor } = await import(COURSE_PLAY.base + COURSE_PLAY.editor);
            window.heard = [];
            window.editor = createEditor(document.body, {
                doc: "a = 1\\nb = 2\\n", label: "Your file", onChange: (text) => heard.push(text),
            });
            editor.set("x = 3\\n");
            editor.goTo(99);
        }"""
    )
    assert page.evaluate("heard") == [], "what the page itself puts in is no change"
    page.get_by_role("textbox", name="Your file").focus()
    page.keyboard.type("y")
    assert page.evaluate("[editor.get(), heard]") == ["x = 3\ny", ["x = 3\ny"]]
    page.evaluate("editor.destroy()")
    assert page.locator(".cm-editor").count() == 0


def test_two_texts_are_shown_beside_each_other_with_their_differences(page):
    page.evaluate(
        """async () => {
            const { createDiff } = await import(COURSE_PLAY.base + COURSE_PLAY.editor);
            window.diff = createDiff(document.body, "a\\nb\\n", "a\\nc\\n");
        }"""
    )
    assert page.locator(".cm-changedLine").all_inner_texts() == ["b", "c"]
    page.evaluate("diff.destroy()")
    assert page.locator(".cm-editor").count() == 0


def test_a_page_of_the_site_can_run_python(open_page):
    if play.problem(ROOT):
        pytest.skip("needs what runs Python in the pages: course book runtime")
    folder = LABS["02-01"].folder.relative_to(ROOT).as_posix()
    assert open_page(f"{folder}/index.html").evaluate("CoursePlay.ready")


@pytest.mark.parametrize("lab", ["02-01", pytest.param("03-04", marks=pytest.mark.slow)])
def test_firefox_grades_a_lab_as_chromium_does(fox, lab):
    told = fox.evaluate(grade(lab, solution(lab)))
    assert set(told["outcomes"].values()) <= {"passed", "skipped"} and told["result"]["status"] == 0
    assert "passed" not in fox.evaluate(grade(lab))["outcomes"].values()
    wrong = LABS[lab].manifest.misconceptions[0]
    text = manifest.wrong_solution(solution(lab), wrong)
    told = fox.evaluate(grade(lab, text, tests=[wrong.caught_by]))
    assert "failed" in told["outcomes"].values()


def test_firefox_stops_an_endless_loop_and_writes_the_same_64_tokens(fox):
    from mini_vllm import LLM, SamplingParams

    said = fox.evaluate(
        """async () => {
            const session = CoursePlay.session();
            const endless = { page: "guide", index: 0, code: "while True: pass" };
            const running = session.call("block", endless).catch((error) => error.message);
            setTimeout(() => session.stop(), 200);
            return running;
        }"""
    )
    assert said == "stopped"
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    (expected,) = LLM(dtype="float64").generate([PROMPT], params)
    assert fox.evaluate(block(SIXTY_FOUR))["text"] == expected.outputs[0].text + "\n"

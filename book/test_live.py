"""The home page and its live engine in a real browser, with Python beside the page and in it.

Most tests answer the page's calls with the same `course.site.live` in this process; those at the
end load the runtime that the site ships, and skip where it was built without one.
"""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from book import firefox
from book.beside import beside
from book.test_site import LOOKS, barriers
from conformance.real_core import why_not
from course.learning.labs import find_labs, pick
from course.site import gantt, home, live, live_real

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[1]
FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")


@pytest.fixture
def home_page(open_page):
    """The home page with Python beside it; `path` may hold a fragment."""

    def find(path: str = "index.html", **settings: Any) -> Any:
        live._current.clear()
        page = open_page(path, prepare=beside(live), **settings)
        page.wait_for_load_state("load")
        return page

    return find


@pytest.fixture
def engine(home_page):
    """The live engine, at the beginning of its run."""

    def find(**settings: Any) -> Any:
        page = home_page(**settings)
        page.locator(".home-run").click()
        box = page.locator(".live")
        box.locator(".live-step").wait_for()
        return box

    return find


def place(box: Any, at: int) -> None:
    """Wait until the engine shows the state after `at` steps."""
    box.page.wait_for_function(f"document.querySelector('.live')?.dataset.place === '{at}'")


def step(box: Any, times: int = 1) -> None:
    before = int(box.get_attribute("data-place"))
    for number in range(times):
        box.locator(".live-step").click()
        place(box, before + number + 1)


def quiet(box: Any) -> None:
    box.locator('[data-setting="predict"]').uncheck()


def to_the_end(box: Any, at: int) -> None:
    box.get_by_role("button", name="Run to the end").click()
    place(box, at)


def slide(box: Any, name: str, value: int) -> None:
    box.locator(f'input[data-setting="{name}"]').first.evaluate(
        "(field, value) => { field.value = value; field.dispatchEvent(new Event('input')); }",
        str(value),
    )


# ------------------------------------------------------------------ the home page


def test_the_home_page_says_what_this_is_and_has_one_button_to_begin(open_page):
    page = open_page("index.html")
    first = page.locator("main > p").first.inner_text()
    assert first.count(".") == 1 and len(first) < 160
    start = page.locator(".home-start a")
    assert start.count() == 1
    start.click()
    assert page.url.endswith("phase-00-foundations/00-guide.html")


def test_three_proofs_with_numbers_lead_to_what_proves_them(open_page, site):
    proofs = open_page("index.html").locator(".home-proofs li")
    assert proofs.count() == 3
    for text, path in zip(
        proofs.locator("strong").all_inner_texts(),
        proofs.locator("a").evaluate_all("(links) => links.map((a) => a.getAttribute('href'))"),
        strict=True,
    ):
        assert re.search(r"\d", text)
        assert (site / path).is_file()


def test_who_has_begun_has_continue_for_the_button(home_page):
    page = home_page()
    if page.evaluate("typeof CoursePlaces") == "undefined":
        pytest.skip("needs book/places.js")
    page.evaluate("""CourseStore.saveRead("phase-00-foundations/00-guide.html")""")
    page.reload()
    go_on = page.locator(".home-start + .place-home a")
    assert go_on.inner_text().startswith("Continue: ")
    assert go_on.evaluate("(node) => getComputedStyle(node).backgroundColor") != "rgba(0, 0, 0, 0)"
    assert not page.locator(".home-start a").is_visible()


def test_the_picture_plays_once_by_itself_and_stops_when_it_is_touched(open_page):
    page = open_page("index.html", motion=True)
    box = page.locator('[data-widget="engine-timeline"] section.widget-box')
    box.locator("button", has_text="Pause").wait_for()
    seen = "[data-widget='engine-timeline'] .widget-box"
    page.wait_for_function(f'document.querySelector("{seen}").dataset.place > 0')
    box.get_by_role("button", name="Next step").click()
    assert box.locator("button", has_text="Pause").count() == 0


def test_the_picture_stands_still_for_who_wants_no_motion(open_page):
    page = open_page("index.html")
    page.wait_for_load_state("networkidle")
    box = page.locator('[data-widget="engine-timeline"] section.widget-box')
    assert box.locator("button", has_text="Pause").count() == 0
    assert box.get_attribute("data-place") == "0"


def test_before_it_is_asked_the_page_loads_nothing_of_the_engine(home_page):
    page = home_page()
    page.wait_for_load_state("networkidle")
    loaded = page.evaluate("performance.getEntriesByType('resource').map((each) => each.name)")
    assert [name for name in loaded if re.search(r"live-(engine|views|form)|live\.css", name)] == []
    assert page.evaluate("window.theSession?.calls ?? []") == []
    assert page.locator(".home-run").inner_text() == "Run it yourself (loads " + (
        f"{round(home.RUNTIME_BYTES / 1e6)} MB)"
    )


def test_a_site_without_the_runtime_offers_nothing_and_says_so_to_a_link(open_page):
    page = open_page("index.html#live=1&r=1.0.0.a&at=0", prepare=lambda page: page.add_init_script(
        "Object.defineProperty(window, 'CoursePlay', {get: () => ({ready: false}), set: () => {}})"
    ))  # fmt: skip
    page.locator(".home-note").wait_for()
    assert "has not got" in page.locator(".home-note").inner_text()
    assert page.locator(".home-run").count() == 0


# ------------------------------------------------------------------ the live engine


def test_it_begins_as_the_recorded_run_and_shows_each_step(engine):
    box = engine()
    quiet(box)
    recorded = gantt.engine_timeline()
    step(box, 17)
    for request in recorded["requests"]:
        cells = {cell["step"]: cell for cell in request["cells"]}
        row = box.locator(f'tr[data-request="{request["id"]}"] td')
        kinds = row.evaluate_all("(nodes) => nodes.map((node) => node.dataset.kind)")
        shown = [cells.get(s, {"kind": "absent"})["kind"] for s in range(17)]
        assert kinds[:17] == shown
    assert box.page.complaints == []


def test_a_preemption_is_shown_with_its_reason_its_rule_and_its_lines(engine):
    box = engine()
    quiet(box)
    step(box, 16)
    victim = box.locator('li[data-rule="gives_way_as_the_last"]')
    said = victim.locator("summary span").inner_text()
    assert said.startswith("E is preempted: A needs 1 block, 0 are free")
    victim.locator("summary").click()
    assert "admitted last gives up its blocks" in victim.inner_text()
    link = victim.locator("a").get_attribute("href")
    assert re.search(r"/0decac0\w+/vllm/v1/core/sched/scheduler\.py#L481-L484$", link)
    assert "return self.running.pop()" in victim.locator(".live-code").inner_text()
    assert "mini_vllm/queues.py:" in victim.inner_text()


def test_the_pool_shows_owners_hits_and_the_free_queue_of_each_step(engine):
    box = engine()
    quiet(box)
    for _ in range(8):
        step(box)
        frame = live.state()["frames"][-1]
        pool = frame["pool"]
        blocks = box.locator(".live-pool > li")
        found = blocks.evaluate_all("(n) => n.map((b) => [+b.dataset.id, +b.dataset.ref])")
        assert found == [[i, ref] for i, ref in enumerate(pool["refs"]) if i]
        hits = box.locator(".live-pool > .live-is-hit").evaluate_all(
            "(nodes) => nodes.map((node) => +node.dataset.id)"
        )
        assert hits == pool["hits"]
        queue = box.locator(".live-free-queue code").inner_text()
        assert queue == " ".join(map(str, pool["free"])) or queue == "empty"
        for queued, title in (("running", 0), ("waiting", 1)):
            ids = (
                box.locator(".live-queue")
                .nth(title)
                .locator("li")
                .evaluate_all("(nodes) => nodes.map((node) => node.dataset.id)")
            )
            assert ids == frame[queued]
    assert pool["hits"] == [] and box.locator('[data-owners="BD"]').count() == 7


def test_going_back_and_forth_shows_the_same_again_and_asks_nobody(engine):
    box = engine()
    quiet(box)
    step(box, 9)
    now = box.locator(".live-columns").inner_html()
    calls = box.page.evaluate("theSession.calls.length")
    box.get_by_role("button", name="One step back").click()
    place(box, 8)
    assert box.locator(".live-columns").inner_html() != now
    step(box)
    assert box.locator(".live-columns").inner_html() == now
    assert box.page.evaluate("theSession.calls.length") == calls


def test_a_slider_replays_the_run_and_says_what_it_was(engine):
    box = engine()
    to_the_end(box, 31)
    slide(box, "blocks", 40)
    box.page.wait_for_function(
        "document.querySelector('[data-fact=preemptions]').textContent[0] === '0'"
    )
    assert box.locator("[data-fact=preemptions]").inner_text() == "0 was 1"
    assert int(box.get_attribute("data-place")) == live.state()["at"] < 31


def test_a_setting_that_cannot_be_is_refused_by_name_and_the_run_stays(engine):
    box = engine()
    quiet(box)
    step(box, 3)
    slide(box, "blocks", 5)
    box.locator(".live-trouble", has_text="request B: prompt of 69 tokens").wait_for()
    step(box)
    assert box.locator("tr[data-request] td[data-kind=prefill]").count() > 3


def test_a_prompt_of_ones_own_is_served_and_one_can_be_ended(engine):
    box = engine()
    quiet(box)
    step(box, 2)
    box.locator("summary", has_text="Change the requests").click()
    box.locator('[data-field="new"]').fill("The block pool ")
    box.locator('[data-field="new"]').press("Enter")
    box.locator('tr[data-request="H"]').wait_for()
    box.get_by_role("button", name="End A now").click()
    box.locator('.live-queue li[data-id="A"]', has_text="is ended before the next step").wait_for()
    step(box)
    assert box.locator('.live-queue li[data-id="A"]').count() == 0
    to_the_end(box, live.start(**live.live_link.read(live.state()["link"]) | {"at": 500})["at"])
    assert "The block pool " in box.locator('.live-texts li[data-id="H"]').inner_text()
    assert box.locator('.live-texts li[data-id="H"] mark').inner_text()


def test_before_a_step_it_asks_and_the_answer_is_the_engines(engine):
    box = engine()
    box.locator(".live-step").click()
    asked = box.locator(".live-question").first
    asked.locator("button").first.wait_for()
    assert box.get_attribute("data-place") == "0"
    assert "B has 69 of its 69 tokens to compute" in asked.inner_text()
    tokens = live.state()["frames"][1]["cells"]["B"]["tokens"]
    asked.locator("button", has_text=re.compile(f"^{tokens}$")).click()
    place(box, 1)
    assert asked.inner_text().startswith("Right.")


def test_a_question_can_be_passed_over_by_another_step(engine):
    box = engine()
    box.locator(".live-step").click()
    box.locator(".live-question button").first.wait_for()
    box.locator(".live-step").click()
    place(box, 1)
    assert box.locator(".live-question").first.inner_text() == ""


def test_a_link_to_a_state_gives_that_state_again(engine, home_page):
    box = engine()
    quiet(box)
    slide(box, "slots", 3)
    box.page.wait_for_function("theSession.calls.length > 1")
    step(box, 13)
    box.get_by_role("button", name="One step back").click()
    place(box, 12)
    views = (".line-scroll", ".live-batch", ".live-columns", ".live-why", ".live-texts")
    box.page.get_by_role("button", name="Link to this state").click()
    box.page.wait_for_function("location.hash.startsWith('#live=1')")
    address = box.page.url
    shown = [box.locator(name).first.inner_html() for name in views[1:]]
    assert len(urlsplit(address).fragment) < 600
    other = home_page(f"index.html#{urlsplit(address).fragment}").locator(".live")
    place(other, 12)
    assert [other.locator(name).first.inner_html() for name in views[1:]] == shown
    assert other.page.locator("input[data-setting=slots]").input_value() == "3"
    assert other.page.complaints == []


def test_a_link_of_nonsense_says_so_and_begins_the_usual_run(home_page):
    page = home_page("index.html#live=1&budget=lots")
    page.locator(".live-trouble", has_text="leads nowhere").wait_for()
    assert "cannot read 'budget=lots'" in page.locator(".live-trouble").inner_text()
    assert page.locator(".live").get_attribute("data-place") == "0"


def test_playing_goes_on_by_itself_until_it_is_paused(engine):
    box = engine()
    box.locator("select.widget-speed").select_option("4")
    box.locator(".live-play").click()
    place(box, 3)
    box.locator(".live-play").click()
    assert box.locator(".live-play").inner_text() == "Play"


def test_keys_step_and_turn_no_page(engine):
    box = engine()
    quiet(box)
    address = box.page.url
    box.locator(".live-step").focus()
    box.page.keyboard.press("Enter")
    place(box, 1)
    box.page.keyboard.press("ArrowRight")
    place(box, 2)
    box.page.keyboard.press("ArrowLeft")
    place(box, 1)
    assert box.page.url == address


def test_what_a_prompt_says_is_text_and_never_markup(engine):
    box = engine()
    box.locator("summary", has_text="Change the requests").click()
    box.locator('[data-field="new"]').fill("<img src=x onerror=alert(1)>")
    box.locator('[data-field="new"]').press("Enter")
    box.locator('.live-texts li[data-id="H"]').wait_for()
    assert box.locator("img").count() == 0
    assert "<img src=x" in box.locator('.live-texts li[data-id="H"]').inner_text()


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_it_has_no_serious_barrier_and_fits_its_screen(engine, width, theme):
    box = engine(width=width, theme=theme, touch=width == 390)
    quiet(box)
    step(box, 16)
    for fold in box.locator("details").all():
        fold.evaluate("(node) => { node.open = true; }")
    page = box.page
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    assert barriers(page, ".live") == []
    assert page.complaints == []


def test_its_buttons_have_room_for_a_finger(engine):
    box = engine(width=390, touch=True)
    box.locator(".live-step").tap()
    box.locator(".live-question button").first.wait_for()
    for fold in box.locator("details").all():
        fold.evaluate("(node) => { node.open = true; }")
    small = box.locator("button, summary").evaluate_all(
        """(nodes) => nodes.map((node) => [node.getBoundingClientRect(), node.textContent])
            .filter(([box]) => box.width && (box.width < 43.9 || box.height < 43.9))
            .map(([box, text]) => `${text}: ${box.width} x ${box.height}`)"""
    )
    assert small == []


# ------------------------------------------------------------------ with the runtime of the site


@pytest.fixture
def real(site, open_page):
    """The home page of a site that was built with the runtime."""
    if not (site / "play" / "index.js").is_file():
        pytest.skip("needs course book runtime")

    def find(path: str = "index.html", **settings: Any) -> Any:
        page = open_page(path, **settings)
        page.context.set_default_timeout(180_000)
        page.wait_for_load_state("load")
        return page

    return find


def test_in_the_page_the_same_engine_decides_says_and_writes_as_here(real):
    page = real()
    weights: dict[str, int] = {}
    page.on("response", lambda r: weights.update({r.url: len(gzip.compress(r.body(), 6))}))
    page.locator(".home-run").click()
    box = page.locator(".live")
    box.locator(".live-step").wait_for()
    quiet(box)
    step(box, 16)
    here = live.start(at=16)
    said = box.locator(".live-why li").evaluate_all("(n) => n.map((li) => li.dataset.about)")
    victim = box.locator('li[data-rule="gives_way_as_the_last"] summary span').inner_text()
    assert victim == here["frames"][-1]["why"][0]["text"] and said[0] == "E"
    slide(box, "blocks", 22)
    to_the_end(box, live.start(settings={"blocks": 22}, at=500)["at"])
    for name, text in live.state()["frames"][-1]["texts"].items():
        shown = box.locator(f'.live-texts li[data-id="{name}"] mark').text_content()
        assert shown == re.sub(r"\n+", "\u21b5", text)
    assert page.complaints == []
    loaded = sum(weights.values())
    assert 0.9 < loaded / home.RUNTIME_BYTES < 1.1, loaded


def test_in_the_page_a_link_gives_the_state_and_stop_ends_and_goes_on(real):
    live.start(at=9)
    link = live.state()["link"]
    page = real(f"index.html#{link}")
    box = page.locator(".live")
    place(box, 9)
    quiet(box)
    blocks = box.locator(".live-pool > li").evaluate_all("(n) => n.map((b) => +b.dataset.ref)")
    assert blocks == live.state()["frames"][-1]["pool"]["refs"][1:]
    page.evaluate("CoursePlay.session().stop()")
    step(box)
    assert "9" in box.locator(".widget-place").inner_text()
    shown = box.locator(".live-pool > li").evaluate_all("(n) => n.map((b) => +b.dataset.ref)")
    assert shown == live.start(at=10)["frames"][-1]["pool"]["refs"][1:]


def test_in_firefox_a_link_gives_the_state_that_this_process_has(site, url, tmp_path):
    pytest.importorskip("websockets", reason="needs websockets")
    if not (site / "play" / "index.js").is_file():
        pytest.skip("needs course book runtime")
    if FIREFOX is None:
        pytest.skip("needs firefox on the PATH")
    document = live.start(at=16)
    with firefox.opened(FIREFOX, tmp_path) as tab:
        tab.goto(f"{url}index.html#{document['link']}")
        refs, texts, said = tab.evaluate("""async () => {
            const until = Date.now() + 60000;
            const box = () => document.querySelector(".live");
            while (box()?.dataset.place !== "16" && Date.now() < until)
                await new Promise((resolve) => setTimeout(resolve, 100));
            const all = (selector) => [...box().querySelectorAll(selector)];
            return [all(".live-pool > li").map((block) => +block.dataset.ref),
                all(".live-texts mark").map((mark) => mark.textContent),
                box().querySelector(".live-why summary span").textContent];
        }""")
    frame = document["frames"][-1]
    assert refs == frame["pool"]["refs"][1:]
    assert texts == [re.sub(r"\n+", "\u21b5", text) for text in frame["texts"].values() if text]
    assert said == frame["why"][0]["text"]


@pytest.mark.parametrize(
    ("width", "theme"), [(390, "coal"), pytest.param(1280, "light", marks=pytest.mark.slow)]
)
def test_in_the_page_vllm_decides_the_readers_run_step_by_step(real, width, theme):
    if why_not():
        pytest.skip(why_not())
    page = real("index.html", width=width, theme=theme)
    before = page.evaluate("performance.getEntriesByType('resource').map((each) => each.name)")
    assert not [name for name in before if "real" in name]
    page.locator(".home-run").click()
    box = page.locator(".live")
    box.locator(".live-step").wait_for()
    quiet(box)
    slide(box, "blocks", 20)
    to_the_end(box, live.start(settings={"blocks": 20}, at=500)["at"])
    box.locator(".real-ask").click()
    verdict = box.locator(".real-verdict:not(:empty)")
    verdict.wait_for()
    told = live_real.ask()
    assert verdict.inner_text().startswith(f"{len(told['steps'])} steps, the same in vLLM 0.22.1")
    assert box.locator(".real-steps tbody tr").count() == len(told["steps"])
    box.locator(".real-steps tbody button").nth(3).click()
    place(box, 4)
    shown = box.locator(".real-beside > div").first.locator("dd").last.inner_text()
    assert shown == " ".join(map(str, told["steps"][3]["free"]))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.complaints == []


@pytest.mark.parametrize(("name", "rows"), [("02-01", 18), ("03-02", 5)])
def test_in_the_page_vllm_and_a_labs_text_decide_a_workload(real, name, rows):
    if why_not():
        pytest.skip(why_not())
    lab = pick(find_labs(ROOT), name)
    page = real(f"{lab.folder.relative_to(ROOT).as_posix()}/index.html")
    page.evaluate(
        "([lab, text]) => CourseStore.saveEdit(lab, text, '')",
        [name, lab.solution.read_text(encoding="utf-8")],
    )
    page.get_by_role("button", name="Open the lab").click()
    box = page.locator(".desk details", has_text="its own scheduler beside yours")
    box.wait_for()
    assert page.evaluate("CourseDesk.real") is None
    box.locator("summary").click()
    box.get_by_role("button", name="Ask vLLM").click()
    said = box.get_by_role("status")
    page.wait_for_function(
        "(p) => p.textContent.includes('the same in vLLM 0.22.1')", arg=said.element_handle()
    )
    assert box.locator("tbody tr").count() == rows

"""The explorables of phases 00 to 02 and 12 in a browser: moved, asked, held to the engine.

Most tests answer the page's calls with the same module in this process; those at the end load the
runtime that the site ships, and skip where it was built without one.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from book.beside import BESIDE
from book.test_site import page_with
from course.site import widgets
from course.site.test_explorables import random_story
from course.site.widgets import (
    allowed_bytes,
    attention_map,
    block_allocator,
    cache_race,
    cache_sizer,
    request_journey,
)

pytestmark = pytest.mark.browser

NAMES = (
    "attention-map", "cache-race", "request-journey", "block-allocator", "allowed-bytes",
    "cache-sizer",
)  # fmt: skip


def answer(text: str) -> str:
    call = json.loads(text)
    module = importlib.import_module(call["module"])
    try:
        return json.dumps({"result": getattr(module, call["function"])(**call["arguments"])})
    except ValueError as error:
        return json.dumps({"error": f"mini_vllm.{type(error).__name__}: {error}"})


def beside(page: Any) -> None:
    page.expose_function("__python", answer)
    page.add_init_script(BESIDE)


@pytest.fixture
def explorable(site, open_page):
    """A widget on its page, drawn, with Python beside it."""

    def find(name: str, live: bool = True, **settings: Any) -> Any:
        page = open_page(page_with(site, name), prepare=beside if live else None, **settings)
        page.locator(f'[data-widget="{name}"][data-ready]').first.wait_for(state="attached")
        assert page.complaints == []
        return page.locator(f'[data-widget="{name}"]').first

    return find


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        ("attention-map", "Show it"), ("cache-race", "Race"), ("request-journey", "Show it"),
        ("block-allocator", "Play it"), ("expert-bytes", "Show it"), ("speculation", "Show it"),
        ("layer-blocks", "Run it"), ("two-pools", "Run it"),
    ],
)  # fmt: skip
def test_a_question_is_answered_before_it_is_shown(explorable, name, verb):
    questions = widgets.document(name)["questions"]
    assert len(questions) >= 2
    host = explorable(name)
    button = host.get_by_role("button", name=verb, exact=True)
    for question in questions:
        host.get_by_text(question["ask"]).wait_for()
        button.click()
        host.get_by_text("Say a number first.").wait_for()
        host.locator('[data-input="guess"]').fill(str(question["answer"]))
        button.click()
        host.get_by_text(f"{question['answer']}, as you said. {question['because']}").wait_for()
        host.get_by_role("button", name="Next question").click()


@pytest.mark.parametrize("name", NAMES)
def test_under_a_finger_what_is_pressed_is_large_and_nothing_is_too_wide(explorable, name):
    host = explorable(name, width=390, theme="navy", touch=True)
    page = host.page
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    small = host.locator("button:visible").evaluate_all(
        """(nodes) => nodes.map((node) => [node.textContent, node.getBoundingClientRect()])
            .filter(([, box]) => box.height < 24 || box.width < 24).map(([text]) => text)"""
    )
    assert small == []


@pytest.mark.parametrize("name", NAMES)
def test_an_arrow_key_in_an_explorable_turns_no_page(explorable, name):
    host = explorable(name)
    page, address = host.page, host.page.url
    host.locator("button").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert page.url == address


def test_enter_answers_a_question_as_its_button_does(explorable):
    host = explorable("block-allocator", live=False)
    answer = block_allocator.document()["questions"][0]["answer"]
    guess = host.locator('[data-input="guess"]')
    guess.press("Enter")
    host.get_by_text("Say a number first.").wait_for()
    guess.fill(str(answer))
    guess.press("Enter")
    host.get_by_text(f"{answer}, as you said.").wait_for()


# ------------------------------------------------------------------ the allocator


def test_the_pool_in_the_page_is_the_engines_after_three_hundred_random_stories(explorable):
    host = explorable("block-allocator", live=False)
    stories = [random_story(seed) for seed in range(300)]
    found = host.page.evaluate(
        "(list) => list.map((one) => CourseWidgets.formulas.poolAfter(one.ops, one))", stories
    )
    for story, state in zip(stories, found, strict=True):
        expected = json.loads(json.dumps(block_allocator.replay(**story)))
        assert state == expected, story


def test_requests_are_added_grown_and_ended_and_blocks_follow(explorable):
    host = explorable("block-allocator", live=False)
    ops = [("add", "A", block_allocator.PROMPTS[0])]

    def check() -> None:
        state = block_allocator.replay(ops, "tail")
        queue = host.locator(".film-queue li[data-id]")
        ids = queue.evaluate_all("(nodes) => nodes.map((node) => Number(node.dataset.id))")
        assert ids == state["free"]
        keys = host.locator(".alloc-index li[data-key]")
        found = keys.evaluate_all("(nodes) => nodes.map((node) => node.dataset.key)")
        assert found == list(state["index"])
        refs = host.locator(".alloc-pool li[data-ref]")
        counts = refs.evaluate_all("(nodes) => nodes.map((node) => Number(node.dataset.ref))")
        assert counts == state["refs"][1:]

    check()
    host.locator('[data-input="prompt"]').fill(block_allocator.PROMPTS[1])
    host.locator('[data-input="prompt"]').press("Enter")
    ops.append(("add", "B", block_allocator.PROMPTS[1]))
    check()
    for character in block_allocator.REPLY[:3]:
        host.get_by_role("button", name="+1 token: request A").click()
        ops.append(("grow", "A", character))
        check()
    host.get_by_role("button", name="End: request A").press("Enter")
    ops.append(("end", "A"))
    check()
    host.get_by_role("button", name="Undo").click()
    ops.pop()
    check()


def test_a_prompt_that_does_not_fit_is_refused_and_nothing_moves(explorable):
    host = explorable("block-allocator", live=False)
    before = host.locator(".film-queue").inner_text()
    long = host.get_by_role("button", name="A␣stranger␣talks", exact=False)
    long.click()
    host.get_by_text("Refused: B needs 7 blocks").wait_for()
    assert host.locator(".film-queue").inner_text() == before


def test_the_other_order_says_what_it_would_have_found(explorable):
    host = explorable("block-allocator", live=False)
    question = block_allocator.document()["questions"][2]
    host.get_by_role("button", name="Empty the pool").click()
    for kind, name, *text in question["ops"]:
        if kind == "add":
            host.locator('[data-input="prompt"]').fill(text[0])
            host.get_by_role("button", name="Add", exact=True).click()
        else:
            host.get_by_role("button", name=f"End: request {name}").click()
    host.get_by_text("8 of 14 tokens were found").wait_for()
    host.get_by_text("Freed head first, the same story finds 0 tokens").wait_for()
    host.get_by_label("head first").check()
    host.get_by_text("Freed tail first, the same story finds 8 tokens").wait_for()


# ------------------------------------------------------------------ the attention map


def test_the_law_under_the_sliders_is_the_samplers(explorable):
    host = explorable("attention-map")
    for text in attention_map.document()["texts"].values():
        for temperature in (0, 0.1, 0.5, 1, 2):
            for top_p in (0.05, 0.5, 0.9, 1):
                law = host.page.evaluate(
                    "([z, t, p]) => CourseWidgets.formulas.nextByte(z, t, p)",
                    [text["logits"], temperature, top_p],
                )
                expected = attention_map.kept(text["logits"], temperature, top_p)
                assert law == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_layer_head_and_place_choose_the_row_that_is_told(explorable):
    host = explorable("attention-map")
    text = attention_map.RECORDED[0]
    found = attention_map.look(text)
    for layer, head, place in ((0, 0, 5), (1, 3, 17), (3, 2, 9), (2, 1, 0)):
        for name, value in (("layer", layer), ("head", head), ("place", place)):
            host.locator(f'[data-input="{name}"]').fill(str(value))
        start = place * (place + 1)
        packed = found["maps"][layer][head][start : start + 2 * (place + 1)]
        row = [int(packed[at : at + 2], 36) for at in range(0, len(packed), 2)]
        assert host.locator("[data-most]").get_attribute("data-most") == str(row.index(max(row)))
        chosen = host.locator('[data-byte][aria-pressed="true"]')
        assert chosen.get_attribute("data-byte") == str(place)
    host.locator('[data-byte="7"]').click()
    assert host.locator('[data-input="place"]').input_value() == "7"


def test_a_text_of_the_readers_own_is_looked_at_and_a_byte_is_added(explorable):
    host = explorable("attention-map")
    host.locator('[data-input="text"]').fill("return se")
    host.locator('[data-input="text"]').press("Enter")
    host.locator('[data-byte="8"]').wait_for()
    assert host.locator("[data-byte]").count() == 9
    host.get_by_role("button", name="Add l", exact=True).click()
    host.locator('[data-byte="9"]').wait_for()
    assert host.locator('[data-input="text"]').input_value() == "return sel"


def test_a_text_of_too_many_bytes_is_refused_in_the_engines_words(explorable):
    host = explorable("attention-map")
    host.locator('[data-input="text"]').fill("é" * 30)
    host.get_by_role("button", name="Run").click()
    host.get_by_text("text: 60 bytes; need 1 to 48").wait_for()
    assert host.locator("[data-byte]").count() == 18


# ------------------------------------------------------------------ the race


def test_the_recorded_race_counts_what_the_engine_computed_and_holds_no_seconds(explorable):
    host = explorable("cache-race")
    host.get_by_role("button", name="Race by positions").click()
    host.locator('[data-same="true"]').wait_for()
    race = cache_race.document()["race"]
    for lane in cache_race.LANES:
        node = host.locator(f'[data-lane="{lane}"]')
        positions = sum(count for _, count in race[lane])
        assert node.get_attribute("data-positions") == str(positions)
        assert node.get_attribute("data-steps") == str(race["num_tokens"])
        assert "measured" not in node.inner_text()


def test_a_race_on_a_clock_takes_the_readers_prompt_and_measures(explorable):
    host = explorable("cache-race")
    host.locator('[data-input="prompt"]').fill("one two")
    host.locator('[data-input="tokens"]').fill("8")
    host.get_by_role("button", name="Race on a clock").click()
    host.locator('[data-same="true"]').wait_for()
    recorded = cache_race.recorded("one two", 8)
    for lane in cache_race.LANES:
        node = host.locator(f'[data-lane="{lane}"]')
        positions = sum(count for _, count in recorded[lane])
        assert node.get_attribute("data-positions") == str(positions)
        assert "measured here" in node.inner_text()


# ------------------------------------------------------------------ a configuration of one's own


def test_a_pasted_configuration_is_sized_by_the_engine_and_a_wrong_one_refused(explorable):
    host = explorable("cache-sizer")
    first = next(iter(cache_sizer.document()["models"].values()))
    host.get_by_text(first["sized"]["lines"][0]).wait_for()
    own = json.dumps(
        {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "model_type": "x"}
    )
    host.locator('[data-input="config"]').fill(own)
    host.locator('[data-input="memory_gib"]').fill("2")
    host.get_by_role("button", name="Size it").click()
    told = cache_sizer.sized(own, **{**cache_sizer.KNOBS, "memory_gib": 2})
    host.get_by_text(told["lines"][1]).wait_for()
    assert host.locator(".widget-box").get_attribute("data-blocks") == str(told["num_blocks"])
    host.locator('[data-input="config"]').fill('{"num_kv_shared_layers": 3}')
    assert host.get_by_text(told["lines"][1]).is_hidden()
    host.get_by_role("button", name="Size it").click()
    host.get_by_text("num_kv_shared_layers=3: need a model without").wait_for()


# ------------------------------------------------------------------ the journey


def test_every_stop_shows_its_fields_and_its_line(explorable):
    host = explorable("request-journey", live=False)
    document = request_journey.document()
    card = host.locator(".hop-card")
    for number, stop in enumerate(document["stops"]):
        hop = document["hops"][stop["hop"]]
        assert card.get_attribute("data-hop") == stop["hop"]
        assert card.get_attribute("data-step") == str(stop["step"])
        told = card.locator(".hop-fields > div").evaluate_all(
            "(nodes) => nodes.map((node) => [...node.children].map((c) => c.textContent))"
        )
        assert told == [[name, value] for name, value in stop["fields"].items()]
        link = card.locator("a")
        assert (link.inner_text(), link.get_attribute("href")) == (hop["line"], hop["link"])
        if number < len(document["stops"]) - 1:
            host.get_by_role("button", name="Next hop").click()


def test_a_hop_that_is_pressed_is_the_one_of_this_step_or_the_next(explorable):
    host = explorable("request-journey", live=False)
    card = host.locator(".hop-card")
    for press, step in (("schedule", "1"), ("news", "2"), ("sample", "2"), ("call", "0")):
        host.locator(f'[data-hop="{press}"].hop').click()
        assert card.get_attribute("data-hop") == press
        assert card.get_attribute("data-step") == step


# ------------------------------------------------------------------ a constraint of one's own


def test_a_typed_constraint_is_shown_as_the_menus_are_and_a_wrong_one_is_refused(explorable):
    host = explorable("allowed-bytes")
    host.locator('[data-input="own"]').fill("(left|right)")
    host.get_by_role("button", name="Write under it").click()
    host.get_by_text("The answer is … under", exact=False).wait_for()
    film = allowed_bytes.typed("regex", "(left|right)", "The answer is ")
    told = host.locator("[data-count]")
    assert told.get_attribute("data-count") == str(allowed_bytes.count(film["places"][0]))
    assert told.get_attribute("data-forced") == str(film["forced"])
    host.locator('[data-input="own"]').fill("(left")
    host.get_by_role("button", name="Write under it").click()
    host.get_by_text("Refused: regex='(left': a '(' without ')' at position 5").wait_for()
    assert told.get_attribute("data-forced") == str(film["forced"])


def test_where_nothing_can_be_run_nothing_is_offered(site, open_page):
    off = "Object.defineProperty(window, 'COURSE_PLAY', { get: () => undefined, set() {} });"
    for name in ("attention-map", "cache-race", "allowed-bytes"):
        page = open_page(page_with(site, name), prepare=lambda p: p.add_init_script(off))
        host = page.locator(f'[data-widget="{name}"][data-ready]').first
        host.wait_for(state="attached")
        assert "loads" not in host.inner_text()


# ------------------------------------------------------------------ the real runtime


@pytest.mark.parametrize(
    ("name", "button", "seen"),
    [
        ("attention-map", "Run (loads 18 MB)", '[data-byte="6"][data-byte]:last-child'),
        ("cache-race", "Race on a clock (loads 18 MB)", '[data-same="true"]'),
        (
            "allowed-bytes",
            "Write under it (loads 18 MB)",
            '[data-input="case"] option:text("yours")',
        ),
    ],
)
def test_in_the_page_the_engine_itself_answers(site, open_page, name, button, seen):
    if not (Path(site) / "play" / "index.js").is_file():
        pytest.skip("needs course book runtime")
    page = open_page(page_with(site, name))
    page.context.set_default_timeout(120_000)
    host = page.locator(f'[data-widget="{name}"][data-ready]').first
    host.wait_for(state="attached")
    if name == "attention-map":
        host.locator('[data-input="text"]').fill("import ")
    host.get_by_role("button", name=button, exact=True).click()
    host.locator(seen).wait_for(state="attached")
    if name == "attention-map":
        bars = host.locator(".look-bars code, .look-bars button").first.inner_text()
        logits = attention_map.look("import ")["logits"]
        assert bars == chr(max(range(256), key=logits.__getitem__))
    assert host.locator(".run-trouble").inner_text() == ""
    assert page.complaints == []

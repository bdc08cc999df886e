"""The explorables of phases 03 to 06 in a real browser: arithmetic, grips, questions, looks."""

from __future__ import annotations

import random

import pytest

from book.test_site import TOO_WIDE, barriers, page_with
from course.site import backend_choice, softmax_keys, widgets

pytestmark = pytest.mark.browser


@pytest.fixture
def widget(site, open_page):
    """An explorable on its page, drawn."""

    def find(name: str, **settings):
        page = open_page(page_with(site, name), **settings)
        page.locator(f'[data-widget="{name}"][data-ready]').first.wait_for(state="attached")
        assert page.complaints == []
        return page.locator(f'[data-widget="{name}"]').first

    return find


def formula(host, name: str, *given):
    """What a formula of the page says."""
    return host.page.evaluate("([f, given]) => CourseWidgets.formulas[f](...given)", [name, given])


def same(found, expected, rel=1e-9):
    """Whether two JSON values are equal, numbers up to the last bits."""
    if isinstance(expected, dict):
        assert set(expected) <= set(found), (found, expected)
        for key, value in expected.items():
            same(found[key], value, rel)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other, rel)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=rel, abs=1e-12)
    else:
        assert found == expected


@pytest.mark.parametrize("name", sorted(widgets.NEEDS))
@pytest.mark.parametrize(("width", "theme"), [(390, "navy"), (1280, "light")])
def test_an_explorable_fits_its_screen_and_has_no_serious_barrier(widget, name, width, theme):
    host = widget(name, width=width, theme=theme)
    assert host.page.evaluate(TOO_WIDE) == []
    assert barriers(host.page) == []


@pytest.mark.parametrize("name", sorted(n for n, make in widgets.WIDGETS.items()
                                        if n in widgets.NEEDS and "questions" in make()))  # fmt: skip
def test_a_question_is_answered_only_after_a_guess_and_shows_what_is_so(widget, name):
    host = widget(name)
    asked = host.locator(".decide-ask")
    for question in widgets.WIDGETS[name]()["questions"]:
        assert question["ask"] in asked.inner_text()
        assert asked.locator(".knob-reply").inner_text() == ""
        wrong = next(c for c in question["choices"] if c != question["answer"])
        asked.locator(f'[data-choice="{wrong}"]').click()
        assert f"Not {wrong}: {question['answer']}." in asked.inner_text()
        asked.locator(f'[data-choice="{question["answer"]}"]').click()
        assert f"{question['answer']}: right." in asked.inner_text()
        asked.get_by_role("button", name="Next question").click()


# ------------------------------------------------------------------ online softmax


def test_the_walk_over_keys_is_that_of_its_document(widget):
    host = widget("softmax-keys")
    values = softmax_keys.VALUES
    for example in softmax_keys.softmax_keys()["examples"]:
        found = formula(host, "softmaxWalk", example["scores"], values, example["size"])
        same(found, example["steps"])
        two = formula(host, "softmaxTwoPass", example["scores"], values)
        assert two == pytest.approx(example["steps"][-1]["out"], rel=1e-12)


def test_a_dragged_score_changes_the_sums_and_keys_do_the_same(widget):
    host = widget("softmax-keys")
    scores = list(softmax_keys.PRESETS["rising"])
    for _ in range(8):
        host.get_by_role("button", name="Next block").click()
    grip = host.locator('[data-grip="7"]')
    grip.focus()
    for _ in range(4):
        host.page.keyboard.press("ArrowDown")
    scores[7] -= 4 * softmax_keys.STEP
    assert float(grip.get_attribute("aria-valuenow")) == scores[7]
    grip = host.locator('[data-grip="0"] .decide-dot')
    grip.scroll_into_view_if_needed()
    at = grip.bounding_box()
    host.page.mouse.move(at["x"] + 4, at["y"] + 4)
    host.page.mouse.down()
    host.page.mouse.move(at["x"] + 4, at["y"] - 60, steps=5)
    host.page.mouse.up()
    moved = float(host.locator('[data-grip="0"]').get_attribute("aria-valuenow"))
    assert moved > scores[0]
    scores[0] = moved
    expected = softmax_keys.walk(scores, softmax_keys.VALUES, 1)[-1]
    for key in ("denom", "acc", "out"):
        value = float(host.locator(f'[data-result="{key}"]').get_attribute("data-value"))
        assert value == pytest.approx(expected[key], rel=1e-12)
    assert host.locator('[data-input="preset"]').input_value() == "yours"


# ------------------------------------------------------------------ the selector


def test_the_selector_shows_what_the_real_one_said(widget):
    host = widget("backend-choice")
    document = backend_choice.backend_choice()
    combinations = backend_choice.combinations()
    given = {key: document[key] for key in ("gpus", "layers", "axes", "backends", "reasons",
                                            "outcomes", "table")}  # fmt: skip
    for picked in random.Random(4).sample(combinations, 60):
        found = formula(host, "backendOutcome", given, picked)
        expected = backend_choice.outcome(picked)
        assert found["valid"] == expected["valid"]
        assert dict(found["rejected"]) == expected["rejected"]


def test_a_pick_names_who_is_taken_now_and_who_was_before(widget):
    host = widget("backend-choice")
    told = host.locator("[data-chosen]")
    assert told.get_attribute("data-chosen") == "TRITON_MLA"
    host.locator('[data-input="block_size"]').select_option("0")
    assert told.get_attribute("data-chosen") == "FLASHMLA"
    assert "it was TRITON_MLA" in told.inner_text()
    reasons = host.locator('[data-backend="FLASH_ATTN_MLA"]').inner_text()
    assert "kv_cache_dtype not supported" in reasons

"""The explorables of phases 03 to 06 in a real browser: arithmetic, grips, questions, looks."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict

import pytest

from book.test_site import page_with, shown
from course.site import widgets
from course.site.test_decide import DECIDED, SIZES
from course.site.widgets import (
    backend_choice,
    graph_tape,
    padding_ladder,
    platform_defaults,
    scheduler_desk,
    smooth_alpha,
    softmax_keys,
    weight_grid,
)

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


@pytest.mark.parametrize("name", DECIDED)
def test_a_question_is_answered_only_after_a_guess_and_shows_what_is_so(widget, name):
    host = widget(name)
    asked = host.locator(".decide-ask")
    for question in widgets.document(name)["questions"]:
        assert question["ask"] in asked.inner_text()
        assert asked.locator(".knob-reply").inner_text() == ""
        wrong = next(c for c in question["choices"] if c != question["answer"])
        asked.locator(f'[data-choice="{wrong}"]').click()
        assert f"Not {wrong}: {question['answer']}." in asked.inner_text()
        asked.locator(f'[data-choice="{question["answer"]}"]').click()
        assert f"{question['answer']}: right." in asked.inner_text()
        asked.get_by_role("button", name="Next question").click()


def test_the_keyboard_stays_in_a_question_when_the_next_one_comes(widget):
    host = widget("softmax-keys")
    host.get_by_role("button", name="Next question").press("Enter")
    focused = host.page.evaluate("document.activeElement.dataset.choice")
    assert focused == str(widgets.document("softmax-keys")["questions"][1]["choices"][0])


def test_a_wrong_choice_is_marked_beside_the_right_one(widget):
    host = widget("graph-tape")
    question = widgets.document("graph-tape")["questions"][0]
    wrong = next(c for c in question["choices"] if c != question["answer"])
    host.locator(f'[data-choice="{wrong}"]').click()
    assert shown(host, ".decide-wrong", "data-choice") == [str(wrong)]
    assert shown(host, ".decide-right", "data-choice") == [str(question["answer"])]


# ------------------------------------------------------------------ online softmax


def test_the_walk_over_keys_is_that_of_its_document(widget):
    host = widget("softmax-keys")
    values = softmax_keys.VALUES
    for scores, size in itertools.product(softmax_keys.PRESETS.values(), SIZES):
        steps = softmax_keys.walk(scores, values, size)
        same(formula(host, "softmaxWalk", scores, values, size), steps)
        two = formula(host, "softmaxTwoPass", scores, values)
        assert two == pytest.approx(steps[-1]["out"], rel=1e-12)


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
    document = backend_choice.document()
    combinations = backend_choice.combinations()
    given = {key: document[key] for key in ("gpus", "layers", "axes", "backends", "reasons",
                                            "outcomes", "table")}  # fmt: skip
    picks = random.Random(4).sample(combinations, 60)
    every = (
        "([given, picks]) => picks.map((one) => CourseWidgets.formulas.backendOutcome(given, one))"
    )
    for picked, found in zip(picks, host.page.evaluate(every, [given, picks]), strict=True):
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


# ------------------------------------------------------------------ the platform


def test_a_platforms_settings_are_the_recorded_ones_and_what_moves_is_named(widget):
    host = widget("platform-defaults")
    assert set(host.locator("mark").all_inner_texts()) == set()
    host.locator('[data-input="platform"]').select_option("cuda")
    before, now = (platform_defaults.row(p, "vllm serve", "none") for p in ("cpu", "cuda"))
    moved = [name for name in now if now[name] != before[name]]
    assert (host.locator("[data-moved]").get_attribute("data-moved") or "") == " ".join(moved)
    for name, value in now.items():
        shows = host.locator(f'[data-setting="{name}"] span').inner_text()
        assert shows == platform_defaults.shown(value)


# ------------------------------------------------------------------ the scheduler's timeline


def test_the_recorded_run_is_predicted_and_an_arrow_shows_the_missing_block(widget):
    host = widget("scheduler-desk")
    document = scheduler_desk.document()
    step = host.get_by_role("button", name="Step", exact=True)
    while int(host.locator("[data-place]").get_attribute("data-place")) < 2:
        assert "×" not in host.locator("tbody").inner_text()
        step.click()
        if host.locator(".live-question [data-choice]").count():
            choices = shown(host, ".live-question [data-choice]", "data-choice")
            if set(choices) == {"A", "B", "C"}:
                host.locator('.live-question [data-choice="A"]').click()
                assert "Not this time: C." in host.inner_text()
            else:
                host.locator(".live-question [data-choice]").first.click()
    told = host.locator(".desk-missing")
    assert json.loads(told.get_attribute("data-taken")) == document["frames"][2]["taken"]
    assert host.locator(".desk-arrow path").count() == 2
    assert host.locator(".desk-lost").get_attribute("data-id") == "12"


def test_what_the_reader_writes_is_run_by_the_engine(widget):
    host = widget("scheduler-desk")
    if not host.page.evaluate("Boolean(window.CoursePlay?.ready)"):
        pytest.skip("needs the runtime: course book runtime")
    host.get_by_text("Write your own").click()
    host.locator('[data-id="B"] [data-field="tokens"]').fill("30")
    host.locator('[data-id="B"] [data-field="tokens"]').press("Tab")
    host.locator('[data-setting="budget"]').fill("20")
    host.locator(".desk-run").click()
    host.locator(".desk-run").wait_for(state="hidden", timeout=60_000)
    requests = [dict(one) for one in scheduler_desk.REQUESTS]
    requests[1]["tokens"] = 30
    settings = {**asdict(scheduler_desk.SETTINGS), "budget": 20}
    expected = scheduler_desk.play(settings, requests)
    host.get_by_role("button", name="To the end").click()
    for row in expected["requests"]:
        cells = host.locator(f'tr[data-request="{row["id"]}"] td:not([data-kind="absent"])')
        got = cells.evaluate_all("(n) => n.map((c) => [c.dataset.kind, Number(c.dataset.tokens)])")
        frames = [f["cells"].get(row["id"]) for f in expected["frames"]]
        assert got == [[c["kind"], c["tokens"]] for c in frames if c]
    host.locator('[data-id="B"] [data-field="tokens"]').fill("64")
    host.locator('[data-id="B"] [data-field="tokens"]').press("Tab")
    host.get_by_text("request B:").wait_for()  # refused in words, and the run before it stays


# ------------------------------------------------------------------ the tape and the ladder


def test_the_tape_is_that_of_the_engine(widget):
    host = widget("graph-tape")
    rng = random.Random(5)
    for _ in range(20):
        actions = [
            rng.choice(
                [["write", rng.choice("AB"), rng.randrange(101)], ["point", rng.choice("AB")],
                 ["copy", "B"], ["replay"], ["replay"], ["keep"], ["keep copy"]]
            )
            for _ in range(12)
        ]  # fmt: skip
        found = formula(host, "graphTape", graph_tape.START, actions)
        same(found, graph_tape.play(actions))


def test_a_reader_swaps_the_pointer_and_gets_the_old_answer(widget):
    host = widget("graph-tape")
    told = host.locator("[data-eager]")
    host.locator('[data-input="A"]').fill("7")
    for action in ("replay", "point B", "replay"):
        host.locator(f'[data-action="{action}"]').click()
    assert (told.get_attribute("data-out"), told.get_attribute("data-eager")) == ("13", "199")
    for action in ("keep", "copy B", "replay"):
        host.locator(f'[data-action="{action}"]').click()
    assert told.get_attribute("data-kept") == told.get_attribute("data-out") == "199"


def test_the_ladder_costs_what_its_document_says(widget):
    host = widget("padding-ladder")
    document = padding_ladder.document()
    _, counts = padding_ladder.served()
    more = [8, 8, 40], [3], [57, 58], list(range(1, 61))
    for sizes in (*document["ladders"].values(), *more):
        found = formula(host, "ladderCost", document["counts"], sizes)
        same(found, padding_ladder.cost(counts, sizes))


def test_a_dragged_rung_changes_the_rows(widget):
    host = widget("padding-ladder")
    sizes = padding_ladder.default_sizes()
    host.locator('[data-grip="9"]').focus()
    for _ in range(4):
        host.page.keyboard.press("ArrowRight")
    sizes[9] += 4
    host.locator('[data-input="at"]').fill("58")
    assert host.locator("[data-rung]").get_attribute("data-rung") == f"{sizes[9]}"
    _, counts = padding_ladder.served()
    expected = padding_ladder.cost(counts, sizes)
    for key in ("graphs", "padded", "without"):
        shown_value = host.locator(f'[data-result="{key}"]').get_attribute("data-value")
        assert int(shown_value) == expected[key]
    host.locator('[data-input="sizes"]').fill("4 60")
    host.locator('[data-input="sizes"]').press("Enter")
    assert host.locator("[data-grip]").count() == 2


# ------------------------------------------------------------------ formats


def test_weights_snap_as_in_their_document(widget):
    host = widget("weight-grid")
    weights = weight_grid.piece()
    spiked = weights.copy()
    spiked[3, 0] = weight_grid.MOST
    given = (weights, spiked), weight_grid.FORMATS, weight_grid.SHARED
    for W, name, shared in itertools.product(*given):
        known = weight_grid.points(name)
        found = formula(host, "snapped", known, W.tolist(), shared, weight_grid.GROUP)
        same(found["back"], weight_grid.snapped(W, name, shared).tolist(), rel=1e-12)


def test_a_loud_weight_takes_the_codes_of_its_row_and_the_text_follows_the_format(widget):
    host = widget("weight-grid")
    host.locator('[data-input="format"]').select_option("int4")
    host.locator('[data-input="shared"]').select_option("channel")
    host.get_by_role("button", name="Make the last row").click()
    weights = weight_grid.piece()
    weights[3, 0] = weight_grid.MOST
    back = weight_grid.snapped(weights, "int4", "channel")
    for row in range(4):
        cell = host.locator(f'[data-zeros][data-row="{row}"]')
        assert int(cell.get_attribute("data-zeros")) == (back[row] == 0).sum()
    assert weight_grid.texts()["int4 channel"].strip()[:40] in host.inner_text()
    grip = host.locator('[data-grip="3-0"]')
    grip.focus()
    host.page.keyboard.press("ArrowDown")
    assert float(grip.get_attribute("aria-valuenow")) == weight_grid.MOST - 0.001


def test_smoothing_follows_its_document(widget):
    host = widget("smooth-alpha")
    document = smooth_alpha.document()
    given = {key: document[key] for key in ("X", "W", "loud")}
    X, W = smooth_alpha.layer()
    for loud, alpha in itertools.product((1, 20, 80), (0.0, 0.25, 0.5, 0.75, 1.0)):
        found = formula(host, "smoothed", given, loud, alpha)
        same(found, smooth_alpha.smoothed(smooth_alpha.louder(X, loud), W, alpha))
    for loud, error in document["plain"].items():
        same(formula(host, "smoothed", given, int(loud), None)["error"], error)
    host.locator('[data-input="alpha"]').fill("0.5")
    now = float(host.locator('[data-result="error"]').get_attribute("data-value"))
    expected = smooth_alpha.smoothed(smooth_alpha.louder(X, 80), W, 0.5)
    assert now == pytest.approx(expected["error"], rel=1e-9)

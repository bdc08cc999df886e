"""Drawing a shape in a real browser, with the same Python beside the page."""

from __future__ import annotations

import pytest

from book.beside import beside
from course.site import seeing

pytestmark = pytest.mark.browser
PAGE = "phase-13-multimodal-models/00-guide.html"


@pytest.fixture
def drawing(open_page):
    page = open_page(PAGE, prepare=beside(seeing), width=390)
    page.locator('[data-widget="draw-shape"][data-ready]').wait_for()
    return page.locator('[data-widget="draw-shape"]')


def test_a_drawn_picture_is_asked_about_as_it_was_drawn(drawing):
    drawing.get_by_role("button", name="Draw one for me").click()
    told = drawing.locator("[data-answer]")
    drawing.get_by_role("button", name="What does it see?").click()
    told.wait_for()
    expected = seeing.see(seeing.example(0), "what is this?")
    assert told.get_attribute("data-answer") == expected["answer"]
    assert told.get_attribute("data-tokens") == str(expected["tokens"])
    drawing.get_by_role("button", name="What does it see?").click()
    drawing.get_by_text("64 found in the prefix cache").wait_for()


def test_a_stroke_is_a_picture(drawing):
    canvas = drawing.locator("canvas")
    canvas.scroll_into_view_if_needed()
    place = canvas.bounding_box()
    mouse = canvas.page.mouse
    mouse.move(place["x"] + 60, place["y"] + 60)
    mouse.down()
    mouse.move(place["x"] + 160, place["y"] + 160, steps=5)
    mouse.up()
    red = canvas.evaluate(
        "(c) => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
        ".filter((v, i) => i % 4 === 1 && v < 100).length"
    )
    assert red > 1000
    drawing.get_by_role("button", name="What does it see?").click()
    drawing.locator("[data-answer]").wait_for()
    drawing.get_by_role("button", name="Clear").click()

"""The chat page in a browser: it streams, it stops, it says what went wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mini_vllm.engine import LLMEngine
from mini_vllm.tests.server_support import ask, serving, wait_until

pytestmark = pytest.mark.browser

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    opened = browser.new_page(viewport={"width": 390, "height": 844})
    yield opened
    opened.close()


def engine() -> LLMEngine:
    return LLMEngine("byte-llama", num_blocks=256, max_model_len=512)


def test_a_message_is_answered_on_a_phones_page(page: Any) -> None:
    with serving(engine(), chat_page=True, chat_template=TEMPLATE) as (port, _):
        page.goto(f"http://127.0.0.1:{port}/")
        page.get_by_text("A chat with byte-llama").wait_for()
        page.fill("#text", "What is a block?")
        page.keyboard.press("Enter")
        page.locator("#send").wait_for()
        said = page.locator("li[data-role=assistant]").inner_text()
        assert len(said) > 20
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_stop_frees_the_requests_blocks(page: Any) -> None:
    running, stopped = engine(), threading.Event()
    running.observers.append(lambda plan: stopped.wait(30) and None)
    with serving(running, chat_page=True, chat_template=TEMPLATE) as (port, _):
        page.goto(f"http://127.0.0.1:{port}/")
        page.get_by_text("A chat with byte-llama").wait_for()
        page.fill("#text", "What is a block?")
        page.click("#send")
        page.click("#stop")
        page.locator("#send").wait_for()
        stopped.set()
        wait_until(lambda: not running.requests)


def test_what_is_refused_is_said_on_the_page(page: Any) -> None:
    with serving(engine(), chat_page=True, chat_template=TEMPLATE) as (port, _):
        page.goto(f"http://127.0.0.1:{port}/")
        page.get_by_text("A chat with byte-llama").wait_for()
        page.fill("#text", "w" * 600)
        page.click("#send")
        assert "tokens" in page.locator("li[data-role=error]").inner_text()


def test_there_is_no_page_unless_it_is_asked_for() -> None:
    with serving(engine(), chat_template=TEMPLATE) as (port, _):
        assert ask(port, "/")[0] == 404

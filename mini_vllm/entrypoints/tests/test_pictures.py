"""Pictures in chats: data URLs that are decoded within bounds, and everything else refused."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mini_vllm.tests.server_support import ask, events, serving  # isort: skip

pytest.importorskip("PIL.Image")
from PIL import Image  # isort: skip

from labkit.pictures import COLOURS, Scene, Thing, draw
from mini_vllm import LLM, LLMEngine, SamplingParams
from mini_vllm.entrypoints.openai import images

CHATS = "/v1/chat/completions"
RED_CIRCLE = draw(Scene((Thing("circle", "red", 0.5, 0.5, 0.35),)))
BLUE_SQUARE = draw(Scene((Thing("square", "blue", 0.4, 0.6, 0.3),)))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(LLMEngine("byte-sees", num_blocks=256), model="byte-sees") as (found, _):
        yield found


def png(pixels: np.ndarray, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    """A body; a text is a text, anything else a URL."""
    content = [
        {"type": "text", "text": part[1:]} if part.startswith("=")
        else {"type": "image_url", "image_url": {"url": part}}
        for part in parts
    ]  # fmt: skip
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "temperature": 0, "max_tokens": 24, **more}


def test_a_chat_about_a_picture_is_answered_as_the_library_answers(port: int) -> None:
    status, answer = ask(port, CHATS, chat(url(png(RED_CIRCLE)), "=what is this?"))
    text = {"prompt": "<image>what is this?\n", "multi_modal_data": {"image": RED_CIRCLE}}
    [alone] = LLM("byte-sees").generate(text, SamplingParams(max_tokens=24))
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == alone.outputs[0].text == "a red circle"
    assert answer["usage"]["prompt_tokens"] == len(alone.prompt_token_ids) == 78


def test_a_stream_about_a_picture_is_the_whole_answer(port: int) -> None:
    body = chat(url(png(BLUE_SQUARE)), "=what colour is the square?", stream=True)
    _, streamed = ask(port, CHATS, body)
    *chunks, done = events(streamed)
    assert done == "[DONE]"
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "blue"


def test_a_conversation_goes_on_about_its_pictures(port: int) -> None:
    body = chat(url(png(RED_CIRCLE)), "=what is this?")
    body["messages"] += [
        {"role": "assistant", "content": "a red circle"},
        {"role": "user", "content": [
            {"type": "image_url", "image_url": url(png(BLUE_SQUARE))},
            {"type": "text", "text": "what is this?"},
        ]},
    ]  # fmt: skip
    status, answer = ask(port, CHATS, body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "a blue square")


def test_jpeg_and_what_shines_through_are_taken(port: int) -> None:
    clear = np.dstack([RED_CIRCLE, np.full(RED_CIRCLE.shape[:2], 255, np.uint8)])
    clear[:8, :8] = (0, 0, 0, 0)  # black, and not there: white
    for data, kind in ((png(RED_CIRCLE, "JPEG"), "image/jpeg"), (png(clear), "image/png")):
        status, answer = ask(port, CHATS, chat(url(data, kind), "=what is this?"))
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "a red circle")
    [pixels] = images.pictures_of([_Message([_part(url(png(clear)))])])
    assert (pixels[:8, :8] == 255).all()


class _Message:
    def __init__(self, content: list[dict[str, Any]]) -> None:
        self.content = content


def _part(at: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": at}}


def claiming(width: int, height: int) -> bytes:
    """A PNG whose header claims this size, with a few bytes of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(64))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


WHOLE = png(RED_CIRCLE)
REFUSED = [
    ("http://there.example/x.png", "no URL is fetched"),
    ("file:///etc/passwd", "no URL is fetched"),
    ("data:image/gif;base64,R0lGODlh", "need data:image/png"),
    ("data:image/png,plain", "need data:image/png"),
    ("data:image/png;base64,***", "not base64"),
    (url(b"not a picture"), "the picture cannot be decoded"),
    (url(WHOLE[: len(WHOLE) // 2]), "the picture cannot be decoded"),
    (url(png(RED_CIRCLE, "JPEG")), "the picture cannot be decoded"),
    (url(claiming(100_000, 100_000)), "a picture of too many pixels: need at most"),
    (url(claiming(8000, 4000)), "a picture of 8000 x 4000 pixels: need at most"),
    (url(claiming(4000, 4000)), "a picture of 4000 x 4000 pixels cannot be in"),
]


@pytest.mark.parametrize(("at", "words"), REFUSED, ids=[f"{w}-{a[:20]}" for a, w in REFUSED])
def test_what_is_not_a_picture_is_refused_by_name(at: str, words: str, port: int) -> None:
    status, answer = ask(port, CHATS, chat(at, "=what is this?"))
    assert status == 400 and words in answer["error"]["message"], answer


def test_a_bomb_is_refused_before_a_pixel_is_decoded(monkeypatch) -> None:
    monkeypatch.setattr(images, "_rgb", lambda image: pytest.fail("decoded"))
    for size in ((100_000, 100_000), (4000, 4000)):
        with pytest.raises(images.APIError):
            images.pictures_of([_Message([_part(url(claiming(*size)))])])


def test_the_pictures_of_a_conversation_are_bounded_together(monkeypatch) -> None:
    from mini_vllm.multimodal import processor

    monkeypatch.setattr(processor, "MOST_PIXELS", 56 * 56 + 10)
    images.pictures_of([_Message([_part(url(WHOLE))])])
    with pytest.raises(images.APIError, match="need at most 10 in one conversation"):
        images.pictures_of([_Message([_part(url(WHOLE))] * 2)])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (chat(url(WHOLE), "=and <image>?"), "1 image(s): the prompt has 2 placeholder(s)"),
        (chat("=and <image>?"), "0 image(s): the prompt has 1 placeholder(s)"),
        (chat(*[url(WHOLE)] * 16, "=?"), "with its pictures"),
        (chat(url(WHOLE), "=?", use_beam_search=True), "use_beam_search: need false"),
        (
            chat(url(WHOLE), "=?", structured_outputs={"choice": ["yes"]}),
            "structured_outputs: need None",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "need an object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_chat_that_could_not_be_served_is_refused_by_name(
    body: dict[str, Any], words: str, port: int
) -> None:
    status, answer = ask(port, CHATS, body)
    assert status == 400 and words in answer["error"]["message"], answer


def test_a_model_that_does_not_see_takes_no_picture_and_decodes_none(monkeypatch) -> None:
    monkeypatch.setattr(images, "pictures_of", lambda messages: pytest.fail("decoded"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with serving(LLMEngine("byte-llama", num_blocks=64), chat_template=template) as (port, _):
        status, answer = ask(port, CHATS, chat(url(WHOLE), "=what is this?"))
    assert status == 400 and "content of type 'image_url': need text" in answer["error"]["message"]


def test_the_generator_draws_colours_that_the_model_knows() -> None:
    assert tuple(RED_CIRCLE[28, 28]) == COLOURS["red"]

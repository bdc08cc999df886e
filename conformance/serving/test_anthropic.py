"""The `anthropic` package against our server: what its own README shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from conformance.serving.battery import KEY, MODEL
from conformance.serving.battery_apis import TOOLS
from conformance.serving.in_process import chat_server
from mini_vllm.tests.server_support import run_alone

anthropic = pytest.importorskip("anthropic", reason="needs the anthropic package")

ASKED: dict[str, Any] = {
    "model": MODEL, "max_tokens": 12, "messages": [{"role": "user", "content": "Hello, Claude"}],
    "extra_body": {"temperature": 0},
}  # fmt: skip
USES = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 60}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    constraints = {"backend": "xgrammar", "disable_any_whitespace": True}
    knobs: dict[str, Any] = {"num_blocks": 512, "max_model_len": 512}
    with chat_server(**knobs, structured_outputs_config=constraints) as found:
        yield found


def client(port: int, kind: Any = anthropic.Anthropic) -> Any:
    """With a bearer token: vLLM's server and ours do not read the header `x-api-key`."""
    return kind(base_url=f"http://127.0.0.1:{port}", auth_token=KEY, max_retries=0)


def test_a_message_whole_streamed_and_by_the_helper(port: int) -> None:
    asking = client(port)
    whole = asking.messages.create(**ASKED)
    (block,) = whole.content
    assert (block.type, whole.stop_reason) == ("text", "max_tokens")
    assert (whole.role, whole.usage.output_tokens) == ("assistant", 12)
    events = asking.messages.create(**ASKED, stream=True)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with asking.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == block.text
        assert stream.get_final_message().usage == whole.usage


def test_the_async_client_streams(port: int) -> None:
    async def ask() -> Any:
        asking = client(port, anthropic.AsyncAnthropic)
        async with asking, asking.messages.stream(**ASKED) as stream:
            pieces = [text async for text in stream.text_stream]
            return "".join(pieces), await stream.get_final_message()

    text, message = run_alone(ask())
    assert message.content[0].text == text != ""


def test_tokens_are_counted_as_a_message_counts_them(port: int) -> None:
    counted = client(port).messages.count_tokens(model=MODEL, messages=ASKED["messages"])
    assert counted.input_tokens == client(port).messages.create(**ASKED).usage.input_tokens


def test_a_tool_is_used_and_its_answer_read(port: int) -> None:
    asking = client(port)
    with asking.messages.stream(**ASKED | USES) as stream:
        used = stream.get_final_message()
    (block,) = used.content
    assert (block.type, block.name, set(block.input)) == ("tool_use", "get_weather", {"city"})
    answer = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
    told = [*ASKED["messages"], {"role": "assistant", "content": used.content}]
    told.append({"role": "user", "content": [answer]})
    last = asking.messages.create(**ASKED | {"messages": told, "tools": TOOLS})
    assert last.usage.input_tokens > used.usage.input_tokens


def test_errors_arrive_as_the_packages_own(port: int) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client(port).messages.create(**ASKED | {"model": "nope"})
    assert unknown.value.body["error"]["type"] == "NotFoundError"
    with pytest.raises(anthropic.InternalServerError):  # which the package retries by default
        client(port).messages.create(**ASKED | {"extra_body": {"temperature": -1}})
    with pytest.raises(anthropic.AuthenticationError):
        client(port).with_options(auth_token="wrong").messages.create(**ASKED)

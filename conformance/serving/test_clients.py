"""Clients that people use, against our server: the `openai` package, and `curl`."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from conformance.serving.battery import CALL, CLOCK, KEY, MESSAGES, MODEL, WEATHER
from conformance.serving.in_process import chat_server
from mini_vllm.tests.server_support import run_alone

openai = pytest.importorskip("openai", reason="needs the openai package")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with chat_server(num_blocks=512, max_model_len=512) as found:
        yield found


def client(port: int, kind: Any = openai.OpenAI) -> Any:
    return kind(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)


def test_a_completion_whole_and_streamed(port: int) -> None:
    asked: Any = {"model": MODEL, "prompt": "The scheduler", "max_tokens": 12, "temperature": 0}
    whole = client(port).completions.create(**asked)
    pieces = client(port).completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text
    assert whole.usage.completion_tokens == 12


def test_a_chat_streamed_with_usage(port: int) -> None:
    stream = client(port).chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert (last.choices, last.usage.completion_tokens) == ([], 8)


def test_many_at_once_from_the_async_client(port: int) -> None:
    async def ask() -> list[str]:
        async with client(port, openai.AsyncOpenAI) as asking:
            calls = [
                asking.completions.create(model=MODEL, prompt="The", max_tokens=6, temperature=0)
                for _ in range(8)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    assert len(set(run_alone(ask()))) == 1


def forced(text: str) -> dict[str, Any]:
    import re

    return {"structured_outputs": {"regex": re.escape(text).replace("\\\n", r"\n")}}


def test_a_tool_is_called_whole_and_streamed(port: int) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": [WEATHER, CLOCK]}
    asked |= {"max_tokens": 120, "extra_body": forced(CALL)}
    whole = client(port).chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    with client(port).chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0].message
    assert final.tool_calls[0].function.arguments == call.function.arguments


def test_an_agent_asks_calls_its_tool_and_goes_on(port: int) -> None:
    messages: list[Any] = list(MESSAGES)
    asked: Any = {"model": MODEL, "tools": [WEATHER], "max_tokens": 120, "temperature": 0}
    first = client(port).chat.completions.create(
        **asked, messages=messages, extra_body=forced(CALL)
    )
    message = first.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        weather = {"Oslo": "rain"}[json.loads(call.function.arguments)["city"]]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": weather})
    said = {"structured_outputs": {"choice": ["Take an umbrella."]}}
    last = client(port).chat.completions.create(**asked, messages=messages, extra_body=said)
    assert last.choices[0].message.content == "Take an umbrella."
    assert last.usage.prompt_tokens > first.usage.prompt_tokens


def test_a_response_whole_streamed_and_by_the_helper(port: int) -> None:
    asked: Any = {"model": MODEL, "instructions": "You are a coding assistant.", "temperature": 0}
    asked |= {"input": "How do I check if a Python object is a list?", "max_output_tokens": 12}
    whole = client(port).responses.create(**asked)
    assert (whole.status, whole.usage.output_tokens) == ("incomplete", 12)
    events = list(client(port).responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == whole.output_text != ""
    with client(port).responses.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(pieces) == stream.get_final_response().output_text == whole.output_text


def test_a_response_calls_a_tool_and_reads_its_answer(port: int) -> None:
    tools: Any = [{"type": "function", **WEATHER["function"], "strict": True}]
    asked: Any = {"model": MODEL, "tools": tools, "max_output_tokens": 120, "temperature": 0}
    said: list[Any] = [{"role": "user", "content": "What is a block?"}]
    first = client(port).responses.create(**asked, input=said, extra_body=forced(CALL))
    (call,) = first.output
    assert json.loads(call.arguments) == {"city": "Oslo"}
    said += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    text = {"structured_outputs": {"choice": ["Take an umbrella."]}}
    last = client(port).responses.create(**asked, input=said, extra_body=text)
    assert last.output_text == "Take an umbrella."
    assert last.usage.input_tokens > first.usage.input_tokens


def test_the_async_client_streams_a_response(port: int) -> None:
    async def ask() -> list[str]:
        async with client(port, openai.AsyncOpenAI) as asking:
            stream = await asking.responses.create(
                model=MODEL, input="Say hello", max_output_tokens=6, temperature=0, stream=True
            )
            return [event.type async for event in stream]

    kinds = run_alone(ask())
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_errors_arrive_as_the_packages_own(port: int) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client(port).completions.create(model="nope", prompt="a")
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError):
        client(port).completions.create(model=MODEL, prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError):  # nothing is stored
        client(port).responses.create(model=MODEL, input="a", previous_response_id="resp_nope")
    with pytest.raises(openai.NotFoundError):
        client(port).responses.retrieve("resp_nope")
    with pytest.raises(openai.AuthenticationError):
        client(port).with_options(api_key="wrong").models.list()


def test_models_are_listed(port: int) -> None:
    assert [model.id for model in client(port).models.list()] == [MODEL]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_reads_a_stream_line_by_line(port: int) -> None:
    body = {"model": MODEL, "prompt": "The", "max_tokens": 24, "stream": True, "temperature": 0}
    heard = subprocess.run(
        ["curl", "-sN", f"http://127.0.0.1:{port}/v1/completions",
         "-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json", "-d",
         json.dumps(body)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    lines = [line for line in heard.stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    whole = client(port).completions.create(model=MODEL, prompt="The", max_tokens=24, temperature=0)
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole.choices[0].text

"""Requests that no client would send: each is answered, none harms the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mini_vllm.tests.fuzz_server import bodies, raw, send_raw
from mini_vllm.tests.server_support import ask, events, serving, wait_until  # first: it may skip

from mini_vllm.engine import LLMEngine  # isort: skip

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SAID = [{"role": "user", "content": "hi"}]
NAMED = {"type": "function", "function": {"name": "f"}}


def part(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def called(*calls: Any) -> dict[str, Any]:
    return {"messages": [*SAID, {"role": "assistant", "tool_calls": list(calls)}]}


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": SAID, "max_tokens": 1, **more}


ODD: tuple[tuple[dict[str, Any], str], ...] = (
    (part({"type": []}), "messages"),
    (part({"type": "text", "text": "a"}, {"type": None}), "messages"),
    (part({"type": {"a": 1}}), "messages"),
    (called({"function": "x"}), "messages.1.tool_calls"),
    (called(1), "messages.1.tool_calls"),
    (called(None), "messages.1.tool_calls"),
    (called({"function": {"name": "f", "arguments": "[" * 99_999}}), "tool_calls"),
    (called({"function": {"name": "f", "arguments": "{"}}), "tool_calls"),
    (chat(tools=[{"function": "x"}], tool_choice=NAMED), "tool_choice"),
    (chat(tools=[None], tool_choice=NAMED), "tool_choice"),
    (chat(tools=None, tool_choice=NAMED), "tool_choice"),
    (chat(tools=5, tool_choice=NAMED), "tools"),
    *(
        (chat(chat_template_kwargs={name: 1}), f"chat_template_kwargs: {name}")
        for name in ("messages", "tools", "self", "chat_template")
    ),
    (chat(request_id="\ud800", stream=True), "request_id"),
    (chat(model="a\udfffb"), "model"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0"),
    (chat(top_logprobs="2", logprobs=True), "top_logprobs"),
    (chat(structured_outputs={}), "structured_outputs"),
    (chat(structured_outputs={"nothing": 1}), "structured_outputs"),
    (chat(prompt_logprobs="2"), "prompt_logprobs"),
)
"""Bodies of chats, and what of them the answer names."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    engine = LLMEngine("byte-llama", num_blocks=256, max_model_len=128)
    options: dict[str, Any] = {"trust_request_chat_template": True, "tool_call_parser": "hermes"}
    with serving(engine, chat_template=TEMPLATE, **options) as (found, _):
        yield found


@pytest.mark.parametrize(("body", "named"), ODD)
def test_an_odd_body_is_refused_with_the_name_of_its_field(
    port: int, body: dict[str, Any], named: str
) -> None:
    status, answer = ask(port, "/v1/chat/completions", body)
    assert status == 400
    assert named in answer["error"]["message"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1/0 }}", "{{ 1 + 'a' }}", "{% for i in range(10**9) %}{% endfor %}",
        "{% include 'a' %}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ '%d' | format('a') }}", "{{ ''.__class__.__mro__ }}", "{% for %}",
        "{{ messages.no.no }}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_whatever_a_template_raises_is_the_clients_error(
    port: int, path: str, template: str
) -> None:
    status, answer = ask(port, path, chat(chat_template=template))
    assert status == 400
    assert "chat template" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("more", "kind", "param"),
    [
        ({"logprobs": "2"}, "BadRequestError", None),
        ({"prompt_embeds": "AA=="}, "BadRequestError", "prompt_embeds"),
        ({"prompt_logprobs": -1}, "BadRequestError", "prompt_logprobs"),
        ({"structured_outputs": {}}, "Bad Request", None),
    ],
)
def test_a_refusal_has_the_fields_of_upstreams(
    port: int, more: Any, kind: str, param: str | None
) -> None:
    status, answer = ask(port, "/v1/completions", {"prompt": "a", "max_tokens": 1, **more})
    assert status == 400
    assert (answer["error"]["type"], answer["error"]["param"]) == (kind, param)


@pytest.mark.parametrize(
    "more", [{"seed": -5}, {"seed": -1}, {"temperature": float("nan")}, {"max_tokens": None}]
)
def test_what_upstream_lets_pass_is_served(port: int, more: dict[str, Any]) -> None:
    assert ask(port, "/v1/completions", {"prompt": "a", "max_tokens": 1, **more})[0] == 200


def test_the_generation_prompt_is_the_requests_own_field(port: int) -> None:
    template = "{{ add_generation_prompt }}"
    body = chat(chat_template=template, chat_template_kwargs={"add_generation_prompt": False})
    tokens = ask(port, "/tokenize", body)[1]["tokens"]
    assert bytes(tokens) == b"True"


def test_a_constraint_can_be_rendered(port: int) -> None:
    body = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"choice": ["a", "b"]}}
    status, answer = ask(port, "/v1/completions/render", body)
    assert (status, answer[0]["sampling_params"]["structured_outputs"]) == (
        200,
        {"choice": ["a", "b"]},
    )


@pytest.mark.parametrize(
    ("count", "seed"),
    [(150, 0), pytest.param(1000, 1, marks=pytest.mark.slow)],
)
def test_every_request_is_answered_and_the_engine_is_unharmed(count: int, seed: int) -> None:
    engine = LLMEngine("byte-llama", num_blocks=256, max_model_len=128)
    answered = {"served": 0, "refused": 0}
    with serving(engine, chat_template=TEMPLATE, tool_call_parser="hermes") as (port, _):
        before = ask(port, "/v1/completions", {"prompt": "The", "temperature": 0})[1]["choices"]
        for path, content in bodies(count, seed):
            status, body = ask(port, path, content)
            assert 200 <= status < 500, (path, content, body)
            if "detail" in body:  # the framework's answer to bytes that are not text
                assert status == 400
                with pytest.raises(UnicodeDecodeError):
                    content.decode()
            elif status >= 400:
                assert {"message", "type", "param", "code"} <= body["error"].keys(), content
            elif isinstance(body, str):
                *chunks, done = events(body)
                assert done == "[DONE]"
                wrong = [c for c in chunks if c.get("error", {}).get("code", 400) >= 500]
                assert not wrong, (path, content, wrong)
            answered["served" if status < 400 else "refused"] += 1
        # An answer that ends early, in an error, aborts what else it had asked for.
        wait_until(lambda: not engine.requests)
        wait_until(lambda: engine.scheduler.kv.block_pool.get_usage() == 0)
        after = ask(port, "/v1/completions", {"prompt": "The", "temperature": 0})[1]["choices"]
    assert after == before
    assert min(answered.values()) > count // 10, answered


@pytest.mark.parametrize(
    ("count", "seed"), [(60, 5), pytest.param(1000, 6, marks=pytest.mark.slow)]
)
def test_no_bytes_harm_the_server(count: int, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = LLMEngine("byte-llama", num_blocks=256, max_model_len=128)
    with serving(engine, chat_template=TEMPLATE) as (port, served):
        said = [send_raw(port, content) for content in raw(count, seed)]
        wait_until(lambda: not engine.requests and not served.engine._streams)
        assert ask(port, "/v1/completions", {"prompt": "The", "max_tokens": 2})[0] == 200
        assert engine.scheduler.kv.block_pool.get_usage() == 0
    assert any(each.startswith(b"HTTP/1.1 200") for each in said)
    assert not [each for each in said if each.startswith(b"HTTP/1.1 5")]
    assert not [record for record in caplog.records if record.exc_info]

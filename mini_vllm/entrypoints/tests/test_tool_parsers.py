"""Families of tool parsers by name: which are served, what is refused, and one of one's own."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from mini_vllm.tests.server_support import ask, serving  # isort: skip

from mini_vllm.engine import LLMEngine  # isort: skip
from mini_vllm.entrypoints.openai import tool_parser_manager as manager  # isort: skip
from mini_vllm.entrypoints.openai.errors import APIError  # isort: skip
from mini_vllm.entrypoints.openai.harmony_prompt import render_for_completion  # isort: skip
from mini_vllm.entrypoints.openai.launch import make_engine, serve_engine  # isort: skip
from mini_vllm.entrypoints.openai.protocol_chat import Tool  # isort: skip
from mini_vllm.entrypoints.openai.tool_parsers_openai import OpenAIToolParser  # isort: skip
from mini_vllm.tokenizer import ByteTokenizer  # isort: skip

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}},
}}}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
CALL = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"

HARMONY = (
    "<|channel|>analysis<|message|>Oslo.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
)

PLUGIN = textwrap.dedent("""
    from dataclasses import dataclass

    from mini_vllm.entrypoints.openai.tool_parser_manager import register_tool_parser
    from mini_vllm.entrypoints.openai.tool_parsers import Sent, ToolCall, ToolParser, call_id


    @register_tool_parser("arrow")
    @dataclass(slots=True)
    class Arrow(ToolParser):
        '''A call is `-> name`, and the last thing that is said.'''

        def extract_tool_calls(self, text):
            content, arrow, name = text.partition("-> ")
            return (content or None, [ToolCall(name, "{}")]) if arrow else (text, [])

        def feed(self, piece, token_ids=()):
            self.text += piece
            name = self.text.partition("-> ")[2]
            if self.calls or not name.endswith("."):
                return None
            self.calls.append(Sent(name[:-1], "{}"))
            function = {"name": name[:-1], "arguments": "{}"}
            call = {"index": 0, "id": call_id(), "type": "function", "function": function}
            return {"tool_calls": [call]}
""")


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "_PLUGGED_IN", {})


def refused(**options: Any) -> str:
    """Why a server does not start."""
    with pytest.raises(ValueError) as caught:
        serve_engine(make_engine, model="byte-llama", **options)
    return str(caught.value)


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    said = refused(tool_call_parser="pythonic")
    assert said.startswith("tool_call_parser='pythonic': need one of glm45, glm47, hermes, ")


@pytest.mark.parametrize(
    ("tools", "reasoning", "said"),
    [
        ("openai", "deepseek_r1", "need 'openai_gptoss' with tool_call_parser='openai'"),
        ("hermes", "openai_gptoss", "and no other, not 'hermes'"),
        (None, "openai", "reasoning_parser='openai': need 'deepseek_r1', 'openai_gptoss', or none"),
    ],
)
def test_harmony_is_read_by_one_parser(tools: str | None, reasoning: str, said: str) -> None:
    assert said in refused(tool_call_parser=tools, reasoning_parser=reasoning)


def test_harmony_without_tokens_for_its_tags_is_the_same_at_every_cut() -> None:
    text = f"{HARMONY}<|start|>assistant<|channel|>final<|message|>a <b>| <|c<|return|>"
    for at in range(len(text)):
        parser = OpenAIToolParser()
        deltas = [parser.feed(piece) or {} for piece in (text[:at], text[at:])]
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        assert "".join(delta.get("content", "") for delta in deltas) == "a <b>| <|c", at
        assert "".join(call["arguments"] for call in calls) == '{"city": "Oslo"}', at
        assert [call["name"] for call in calls if "name" in call] == ["get_weather"], at


@pytest.mark.parametrize(
    ("message", "schema", "said"),
    [
        ({"role": "function", "content": "a"}, {}, "messages: role='function': need one of user"),
        ({"role": "user", "content": [{"type": "image_url"}]}, {}, "'image_url': need text"),
    ],
)
def test_what_no_prompt_of_harmony_can_say_is_refused(
    message: dict[str, Any], schema: dict[str, Any], said: str
) -> None:
    tool = {"function": {"name": "f", "description": "", "parameters": schema}}
    with pytest.raises(APIError, match=said):
        render_for_completion([message], [tool])


def test_a_vocabulary_without_a_family_s_tags_is_refused() -> None:
    said = refused(tool_call_parser="qwen3_coder")
    assert "this one lacks <tool_call> and </tool_call>" in said
    with pytest.raises(ValueError, match=r"this one lacks \[ARGS\]"):  # calls are a list there
        manager.get_tool_parser("mistral")({"[TOOL_CALLS]": 5})


def test_strict_calls_are_not_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENFORCE_STRICT_TOOL_CALLING", "1")
    said = refused(tool_call_parser="hermes")
    assert said.startswith("VLLM_ENFORCE_STRICT_TOOL_CALLING=1: need 0")


def test_a_template_sees_what_a_tool_says_beside_its_schema() -> None:
    given = {"function": {"strict": True, "name": "f"}, "defer_loading": False}
    function = {"name": "f", "description": None, "parameters": None, "defer_loading": False}
    expected = {
        "type": "function",
        "function": {**function, "strict": True},
        "defer_loading": False,
    }
    offered = Tool(**given).offered()
    assert json.dumps(offered) == json.dumps(expected)
    assert list(Tool(function={"name": "f"}).offered()["function"]) == list(function)[:3]


def test_tags_that_are_left_out_of_texts_are_refused(tmp_path: Path) -> None:
    """vLLM keeps special tokens where tools are offered; this engine never does."""
    vocab = {"[TOOL_CALLS]": 5, "[ARGS]": 6}
    added = [{"id": 5, "content": "[TOOL_CALLS]", "special": True}]
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"'mistral': need \[TOOL_CALLS\] in texts"):
        serve_engine(make_engine, model=str(tmp_path), tool_call_parser="mistral")


def test_a_plug_in_registers_a_parser_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "arrow.py"
    path.write_text(PLUGIN)
    manager.import_tool_parser(path)
    parser = manager.get_tool_parser("arrow")
    content, (call,) = parser().extract_tool_calls("Look. -> now")
    assert (content, call.name) == ("Look. ", "now")
    assert "arrow" in refused(tool_call_parser="other")
    assert "'arrow': this tool parser is there already" in refused(tool_parser_plugin=path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def", "SyntaxError"),
        (PLUGIN.replace('"arrow"', '"hermes"'), "'hermes': this tool parser is there already"),
        (PLUGIN.replace("(ToolParser)", ""), "need a subclass of ToolParser"),
        (PLUGIN.replace('"arrow"', '""'), "need the name that --tool-call-parser takes"),
        (None, "need a file of Python"),
    ],
)
def test_a_plug_in_that_fails_is_refused_by_name(
    text: str | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    found = refused(tool_parser_plugin=path)
    assert found.startswith(f"tool_parser_plugin={str(path)!r}: ")
    assert said in found
    assert manager.tool_parser_names() == sorted(manager._FAMILIES)


def asked(**more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Oslo?"}], "tools": [TOOL], "max_tokens": 120,
        "structured_outputs": {"choice": [CALL]}, **more,
    }  # fmt: skip


@pytest.mark.slow
def test_a_server_of_glm_reads_its_calls_and_forces_none() -> None:
    engine = LLMEngine("byte-llama", max_model_len=256)
    with serving(engine, chat_template=TEMPLATE, tool_call_parser="glm45") as (port, _):
        for choice in ("auto", "required"):  # no constraint of its own takes the client's place
            status, answer = ask(port, "/v1/chat/completions", asked(tool_choice=choice))
            assert status == 200, answer
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        status, text = ask(port, "/v1/chat/completions", asked(stream=True))
        assert status == 200
        assert '"finish_reason":"tool_calls"' in text
        status, answer = ask(port, "/v1/responses", {"input": "Oslo?"})
        assert status == 501
        assert "tool-call-parser other than hermes" in answer["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("parser", ["tool_call_parser", "reasoning_parser"])
def test_a_server_reads_harmony(parser: str) -> None:
    """Its tags are text in this vocabulary. No template is asked."""
    engine = LLMEngine("byte-llama", max_model_len=1024)
    name = "openai" if parser == "tool_call_parser" else "openai_gptoss"
    options: dict[str, Any] = {parser: name}
    stop = ["<|call|>"]  # in gpt-oss's own vocabulary it is a token that ends a request
    tool = {"type": "function", "function": {**TOOL["function"], "description": "Looks."}}
    body = asked(tools=[tool], structured_outputs={"choice": [HARMONY]}, max_tokens=300, stop=stop)
    with serving(engine, **options) as (port, _):
        status, answer = ask(port, "/v1/chat/completions", body | {"tool_choice": "required"})
        assert status == 200, answer
        (choice,) = answer["choices"]
        assert choice["message"]["reasoning"] == "Oslo."
        assert choice["message"]["content"] is None
        calls = [call["function"] for call in choice["message"]["tool_calls"]]
        if parser == "reasoning_parser":  # a server without a parser of tools streams calls alone
            assert (calls, choice["finish_reason"]) == ([], "stop")
        else:
            assert calls == [{"name": "get_weather", "arguments": '{"city": "Oslo"}'}]
            assert choice["finish_reason"] == "tool_calls"
        status, text = ask(port, "/v1/chat/completions", body | {"stream": True})
        assert status == 200
        assert '"name":"get_weather"' in text
        assert '"finish_reason":"tool_calls"' in text
        for name, more in (
            ("echo:", {"echo": True}),
            ("tools:", {"tools": [TOOL]}),
            ("reasoning_effort='none':", {"reasoning_effort": "none"}),
        ):
            status, answer = ask(port, "/v1/chat/completions", body | more)
            assert (status, answer["error"]["message"].partition(" ")[0]) == (400, name)
        wrong = body | {"structured_outputs": {"choice": ["Hello<|message|>a<|end|>b"]}}
        status, answer = ask(port, "/v1/chat/completions", wrong)
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        assert '"code":500' in ask(port, "/v1/chat/completions", wrong | {"stream": True})[1]
        status, answer = ask(port, "/v1/chat/completions/render", body)
        assert status == 200
        prompt = ByteTokenizer().decode(answer["token_ids"])
        assert prompt.startswith("<|start|>system<|message|>You are ChatGPT")
        assert "type get_weather = (_: {\ncity?: string,\n}) => any;" in prompt
        status, answer = ask(port, "/v1/responses", {"input": "Oslo?"})
        assert status == 501
        message = {
            "model": "byte-llama",
            "max_tokens": 8,
            "messages": [{"role": "user", "content": "Oslo?"}],
        }
        status, answer = ask(port, "/v1/messages", message)
        assert status == 501
        assert "harmony" in answer["error"]["message"]


@pytest.mark.slow
def test_a_server_takes_a_plug_in(tmp_path: Path) -> None:
    path = tmp_path / "arrow.py"
    path.write_text(PLUGIN)
    engine = LLMEngine("byte-llama", max_model_len=256)
    with serving(
        engine, chat_template=TEMPLATE, tool_call_parser="arrow", tool_parser_plugin=path
    ) as (port, _):
        body = asked(structured_outputs={"choice": ["Look -> now."]})
        _, answer = ask(port, "/v1/chat/completions", body)
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "now."
        _, text = ask(port, "/v1/chat/completions", body | {"stream": True})
        assert '"name":"now"' in text

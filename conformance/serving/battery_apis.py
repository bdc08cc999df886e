"""The requests of `/v1/messages` and `/v1/responses` that vLLM's server and ours must answer alike.

As `battery.py`, whose `Ask` they are. All are greedy. `stored()` are for a server that was started
with `VLLM_ENABLE_RESPONSES_API_STORE=1`, the others for one without.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from conformance.serving.battery import BASE, CALL, CLOCK, MESSAGES, MODEL, OTHER, WEATHER, Ask

PATH, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
QUESTION = "What is a block?"


def _anthropic(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    named = {name: function[name] for name in ("name", "description")}
    return named | {"input_schema": function["parameters"]}


def _flat(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", **tool["function"]}


TOOLS = [_anthropic(WEATHER), _anthropic(CLOCK)]
FUNCTIONS = [_flat(WEATHER), _flat(CLOCK)]


def _message(name: str, **body: Any) -> Ask:
    asked = {**BASE, "messages": MESSAGES, "max_tokens": 8, **body}
    return Ask(f"messages, {name}", PATH, {k: v for k, v in asked.items() if v is not ...})


def _count(name: str, **body: Any) -> Ask:
    return Ask(f"count, {name}", COUNT, {"model": MODEL, "messages": MESSAGES, **body})


def _response(name: str, **body: Any) -> Ask:
    asked = {**BASE, "input": QUESTION, "max_output_tokens": 8, **body}
    return Ask(f"responses, {name}", RESPONSES, {k: v for k, v in asked.items() if v is not ...})


def _both(ask: Ask) -> Iterator[Ask]:
    """The same answered whole and streamed."""
    yield ask
    yield replace(ask, name=f"{ask.name}, streamed", body={**ask.body, "stream": True})


def _user(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


USED = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
PICTURE = {"type": "base64", "media_type": "image/png", "data": "aGk="}


def _told(result: Any, *more: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation in which a tool was used."""
    answer = {"type": "tool_result", "tool_use_id": "toolu_1", "content": result}
    return [
        *MESSAGES, {"role": "assistant", "content": [_text("I look."), USED]},
        {"role": "user", "content": [answer, *more]},
    ]  # fmt: skip


def messages() -> Iterator[Ask]:
    """`/v1/messages`, well formed."""
    turns = [*MESSAGES, {"role": "assistant", "content": "Memory."}]
    yield from _both(_message("plain"))
    yield from _both(_message("several turns", messages=[*turns, *MESSAGES]))
    yield _message("an answer begun", messages=turns)
    yield from _both(_message("a system text", system="Be brief."))
    yield _message("an empty system text", system="")
    header = "x-anthropic-billing-header: a"
    yield _message("system blocks", system=[_text(header), _text("Be "), _text("brief.")])
    yield _message("a system of headers alone", system=[_text(header)])
    yield _message("one block", messages=_user(_text("What?")))
    yield _message("two blocks", messages=_user(_text("What is"), _text("a block?")))
    yield _message("an empty block", messages=_user(_text("")))
    yield _message("a cached block", messages=_user(
        {**_text("What?"), "cache_control": {"type": "ephemeral"}}
    ))  # fmt: skip
    yield from _both(_message("one token", max_tokens=1))
    yield from _both(_message("a stop text", max_tokens=40, stop_sequences=["e"]))
    yield _message("a stop text that is not met", stop_sequences=["@@"])
    yield _message("no stop texts", stop_sequences=[])
    yield _message("top_k and top_p", top_k=5, top_p=0.9)
    yield from _both(_message("an adapter", model="shout"))
    yield _message("metadata", metadata={"user_id": "7"})
    yield _message("thinking asked for", thinking={"type": "enabled", "budget_tokens": 1024})
    yield _message("template arguments", chat_template_kwargs={"add_generation_prompt": False})
    yield from _both(_message("tools offered", tools=TOOLS))
    yield _message("tools and automatic", tools=TOOLS, tool_choice={"type": "auto"})
    yield _message("tools and none allowed", tools=TOOLS, tool_choice={"type": "none"})
    anyone = {"type": "any"}
    yield from _both(_message("any tool", tools=TOOLS[:1], tool_choice=anyone, max_tokens=120))
    yield from _both(_message("any tool, cut off", tools=TOOLS[:1], tool_choice=anyone))
    named = {"type": "tool", "name": "get_weather"}
    yield from _both(_message("a named tool", tools=TOOLS, tool_choice=named, max_tokens=60))
    yield _message("a named tool, cut off", tools=TOOLS, tool_choice=named, max_tokens=5)
    yield _message("a schema without a type", tools=[{"name": "a", "description": "b",
                   "input_schema": {"properties": {}}}])  # fmt: skip
    yield _message("a tool's answer", messages=_told("rain"), tools=TOOLS)
    yield _message("a tool used without a word", messages=[
        *MESSAGES, {"role": "assistant", "content": [USED]}, _told("rain")[-1]
    ])  # fmt: skip
    yield _message("a tool's answer in parts", messages=_told([_text("rain"), _text("and wind")]))
    yield _message("a tool's answer and text", messages=_told("rain", _text("And then?")))
    yield _message("a tool's empty answer", messages=_told(None))
    yield _message("a tool's answer by reference", messages=_told(
        [_text("found"), {"type": "tool_reference", "tool_name": "get_time"}]
    ))  # fmt: skip
    yield _message("a tool's answer by two references", messages=_told(
        [{"type": "tool_reference", "name": name} for name in ("get_time", "get_weather")]
    ))  # fmt: skip
    odd = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
    yield _message("an assistant's tool result", messages=[
        *MESSAGES, {"role": "assistant", "content": [odd]}, *MESSAGES
    ])  # fmt: skip
    thought = {"type": "thinking", "thinking": "Well.", "signature": "s"}
    yield _message("a thought of the past", messages=[
        *MESSAGES, {"role": "assistant", "content": [thought, _text("Memory.")]}, *MESSAGES
    ])  # fmt: skip
    hidden = {"type": "redacted_thinking", "data": "aGk="}
    yield _message("a hidden thought", messages=[
        *MESSAGES, {"role": "assistant", "content": [hidden, _text("Memory.")]}, *MESSAGES
    ])  # fmt: skip


def counted() -> Iterator[Ask]:
    """`/v1/messages/count_tokens`."""
    yield _count("plain")
    yield _count("a system text", system="Be brief.")
    yield _count("tools", tools=TOOLS)
    yield _count("tools and none allowed", tools=TOOLS, tool_choice={"type": "none"})
    yield _count("a tool's answer", messages=_told("rain"), tools=TOOLS)
    yield _count("a conversation longer than the context", messages=_user(_text("a" * 600)))
    yield _count("no messages", messages=[])
    yield _count("an unknown model", model="nope")
    yield _count("no model", model="")
    yield _count("a message in words", messages="What?")


def messages_refused() -> Iterator[Ask]:
    """`/v1/messages` that are answered with an error."""
    yield _message("an unknown model", model="nope")
    yield _message("an unknown model, streamed", model="nope", stream=True)
    yield _message("an empty model", model="")
    yield _message("no model", model=...)
    yield _message("no max_tokens", max_tokens=...)
    yield _message("max_tokens of 0", max_tokens=0)
    yield _message("max_tokens beyond the context", max_tokens=4000)
    yield _message("a prompt beyond the context", messages=_user(_text("a" * 600)))
    yield _message("a prompt beyond the context, streamed", messages=_user(_text("a" * 600)),
                   stream=True)  # fmt: skip
    yield _message("no messages at all", messages=...)
    yield _message("an empty conversation", messages=[])
    yield _message("a system message", messages=[{"role": "system", "content": "a"}])
    yield _message("content of null", messages=[{"role": "user", "content": None}])
    yield _message("an unknown block", messages=_user({"type": "audio"}))
    yield _message("too hot", temperature=-1)
    yield _message("too hot, streamed", temperature=-1, stream=True)
    yield _message("a temperature in words", temperature="warm")
    yield _message("top_p of two", top_p=2)
    yield _message("top_k below", top_k=-5)
    yield _message("a stop text in words", stop_sequences="a")
    yield _message("an empty stop text", stop_sequences=[""])
    yield _message("an unknown tool", tools=TOOLS, tool_choice={"type": "tool", "name": "nope"})
    yield _message("a tool without a name", tools=TOOLS, tool_choice={"type": "tool"})
    yield _message("any tool and none offered", tool_choice={"type": "any"})
    yield _message("automatic and none offered", tool_choice={"type": "auto"})
    named = {"type": "tool", "name": "nope"}
    yield _message("a named tool and none offered", tool_choice=named)
    yield _message("no tools", tools=[])
    yield _message("no tools and any", tools=[], tool_choice={"type": "any"})
    yield _message("a tool without a schema", tools=[{"name": "a"}])
    yield _message("a schema in words", tools=[{"name": "a", "input_schema": "b"}])
    yield _message("a server's tool", tools=[{"type": "web_search_20250305", "name": "web_search"}])
    yield _message("a picture", messages=_user({"type": "image", "source": PICTURE}))
    yield _message("a picture of a tool", messages=_told([{"type": "image", "source": PICTURE}]))
    yield Ask("messages with a list", PATH, [])
    yield Ask("messages, not JSON", PATH, b"{")
    yield Ask("messages read", PATH, method="GET")
    yield Ask("messages as plain text", PATH, b"{}", headers={"Content-Type": "text/plain"})
    yield replace(_message("without a key"), key=None)
    from conformance.serving.battery import KEY

    yield replace(_message("with an Anthropic key"), key=None, headers={"x-api-key": KEY})


def _forced(text: str) -> dict[str, Any]:
    pattern = re.escape(text).replace("\\\n", r"\n").replace("\\ ", " ")
    return {"structured_outputs": {"regex": pattern}, "max_output_tokens": 200}


MADE = {"type": "function_call", "call_id": "call_1", "name": "get_weather",
        "arguments": '{"city": "Oslo"}'}  # fmt: skip
MADE_ANSWER = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
SAID = {"role": "user", "content": QUESTION}
SCHEMA = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
          "additionalProperties": False}  # fmt: skip


def responses() -> Iterator[Ask]:
    """`/v1/responses`, well formed."""
    yield from _both(_response("plain"))
    yield from _both(_response("instructions", instructions="Be brief."))
    yield from _both(_response("messages", input=[SAID]))
    yield _response(
        "instructions and messages", input=[SAID], instructions="Be brief.", max_output_tokens=40
    )
    yield _response("messages with a type", input=[{**SAID, "type": "message"}])
    parts = [{"type": "input_text", "text": "What is"}, {"type": "input_text", "text": "a block?"}]
    yield _response("parts", input=[{"role": "user", "content": parts}])
    yield _response("a developer", input=[{"role": "developer", "content": "Be brief."}, SAID])
    yield _response("a system message", input=[{"role": "system", "content": "Be brief."}, SAID])
    easy = {"role": "assistant", "content": "Memory."}
    yield _response("several turns", input=[SAID, easy, SAID])
    said = {"type": "message", "role": "assistant",
            "content": [{"type": "output_text", "text": "Memory."}]}  # fmt: skip
    yield _response("an answer of before", input=[SAID, said, SAID])
    yield _response("one token", max_output_tokens=1)
    yield from _both(_response("top_k and top_p", top_k=5, top_p=0.9))
    yield from _both(_response("a stop text", stop=["e"], max_output_tokens=40))
    yield _response("a stop text kept", stop="e", include_stop_str_in_output=True)
    yield _response("penalties", presence_penalty=0.5, frequency_penalty=0.5,
                    repetition_penalty=1.1)  # fmt: skip
    yield _response("a bias", logit_bias={"32": -100})
    yield _response("a seed", seed=7)
    yield _response("the end ignored", ignore_eos=True)
    noted = {"include": ["message.output_text.logprobs"], "max_output_tokens": 3}
    yield from _both(_response("logprobs", **noted, top_logprobs=2))
    yield from _both(_response("logprobs of the token alone", **noted))
    yield _response("logprobs that are not included", top_logprobs=2)
    form = {"type": "json_schema", "name": "switch", "schema": SCHEMA}
    yield from _both(_response("a schema", text={"format": form}, max_output_tokens=40))
    yield _response("a strict schema", text={"format": {**form, "strict": True}},
                    max_output_tokens=40)  # fmt: skip
    yield _response("text as a format", text={"format": {"type": "text"}})
    yield _response("verbosity", text={"verbosity": "low"})
    yield from _both(_response("a choice", structured_outputs={"choice": ["yes"]}))
    yield from _both(_response("an adapter", model="shout"))
    yield _response("metadata", metadata={"a": "b"}, user="7", service_tier="flex")
    yield _response("truncation", truncation="auto")
    yield _response("a prompt beyond the context, cut", input="a" * 600, truncation="auto")
    yield _response("not stored", store=False)
    yield _response("stored, as it says", store=True)
    yield _response("an id of one's own", request_id="resp_mine")
    yield _response("effort", reasoning={"effort": "low"})
    yield _response("an unknown field", nobody_knows=1)
    offered = {"tools": FUNCTIONS}
    yield from _both(_response("tools offered", **offered))
    yield from _both(_response("tools and none allowed", **offered, tool_choice="none"))
    yield from _both(_response("one call", **offered, **_forced(CALL)))
    yield from _both(_response("text and a call", **offered, **_forced(f"Let me look. {CALL}")))
    yield from _both(_response("a blank and a call", **offered, **_forced(f" \n{CALL}")))
    yield from _both(_response("two calls", **offered, **_forced(f"{CALL}\n{OTHER}")))
    broken = _forced("<tool_call>\n{name: oops}\n</tool_call>")
    yield from _both(_response("a call that is no JSON", **offered, **broken))
    yield from _both(_response("a call cut off", **offered,
                               **{**_forced(CALL), "max_output_tokens": 40}))  # fmt: skip
    yield from _both(_response("a call and no tools", **_forced(CALL)))
    named = {"type": "function", "name": "get_weather"}
    yield from _both(_response("a named tool", tools=FUNCTIONS[:1], tool_choice=named,
                               max_output_tokens=60))  # fmt: skip
    yield from _both(_response("a tool required", tools=FUNCTIONS[:1], tool_choice="required",
                               max_output_tokens=120))  # fmt: skip
    yield _response("a tool's answer", input=[SAID, MADE, MADE_ANSWER], **offered)
    yield _response("a tool's answer and text", input=[SAID, said, MADE, MADE_ANSWER, SAID],
                    **offered)  # fmt: skip
    thought = {"type": "reasoning", "summary": [],
               "content": [{"type": "reasoning_text", "text": "Well."}]}  # fmt: skip
    begun = {**said, "status": "incomplete"}
    yield _response("an answer to go on with", input=[SAID, begun])
    yield from _both(_response("a prompt in the cache", input="a b " * 90))
    yield _response("a thought of the past", input=[SAID, thought, said, SAID])


def responses_refused() -> Iterator[Ask]:
    """`/v1/responses` that are answered with an error."""
    yield _response("an unknown model", model="nope")
    yield _response("an unknown model, streamed", model="nope", stream=True)
    yield _response("no input", input=...)
    yield _response("input of null", input=None)
    yield _response("no items", input=[])
    yield _response("an unknown item", input=[{"type": "nothing"}])
    yield _response("an unknown previous answer", previous_response_id="resp_nope")
    yield _response("in the background", background=True)
    yield _response("in the background, not stored", background=True, store=False)
    yield _response("a template of prompts", prompt={"id": "p"})
    yield _response("two pasts", previous_response_id="resp_nope",
                    previous_input_messages=[{"role": "user", "content": "a"}])  # fmt: skip
    yield _response("an empty salt", cache_salt="")
    yield _response("no output", max_output_tokens=0)
    yield _response("output beyond the context", max_output_tokens=4000)
    yield _response("a prompt beyond the context", input="a" * 600)
    yield _response("a prompt beyond the context, streamed", input="a" * 600, stream=True)
    yield _response("too hot", temperature=-1)
    yield _response("too hot, streamed", temperature=-1, stream=True)
    yield _response("a temperature in words", temperature="warm")
    yield _response("top_p of two", top_p=2)
    yield _response("top_k below", top_k=-5)
    yield _response("a penalty of three", presence_penalty=3)
    yield _response("a required tool and none offered", tool_choice="required")
    named = {"type": "function", "name": "nope"}
    yield _response("an unknown tool", tools=FUNCTIONS, tool_choice=named)
    yield _response("a named tool and none offered", tool_choice=named)
    yield _response("an unknown include", include=["everything"])
    yield _response("an unknown truncation", truncation="some")
    yield _response("a format beside a constraint", text={"format": {"type": "text"}},
                    structured_outputs={"choice": ["yes"]})  # fmt: skip
    yield _response("two constraints", structured_outputs={"choice": ["yes"], "regex": "a"})
    yield _response("logprobs beyond the limit", include=["message.output_text.logprobs"],
                    top_logprobs=100)  # fmt: skip
    picture = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "auto"}
    yield _response("a picture", input=[{"role": "user", "content": [picture]}])
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "aGk="}
    yield _response("a hidden thought", input=[SAID, hidden])
    yield Ask("a response read", f"{RESPONSES}/resp_nope", method="GET")
    yield Ask("a response cancelled", f"{RESPONSES}/resp_nope/cancel", {})
    yield Ask("responses read", RESPONSES, method="GET")
    yield Ask("responses with a list", RESPONSES, [])
    yield Ask("responses, not JSON", RESPONSES, b"{")
    yield replace(_response("without a key"), key=None)


def asks() -> list[Ask]:
    """All of them for a server that stores nothing, in the order they are sent."""
    return [*messages(), *counted(), *messages_refused(), *responses(), *responses_refused()]


def stored() -> list[Ask]:
    """Those for a server that stores, in the order they are sent."""
    first, second = "resp_first", "resp_second"
    offered = {"tools": FUNCTIONS}
    return [
        _response("stored, first", request_id=first, instructions="Be brief."),
        Ask("responses, stored, read", f"{RESPONSES}/{first}", method="GET"),
        _response("stored, second", request_id=second, previous_response_id=first),
        _response("stored, third", previous_response_id=second, instructions="Be long.",
                  input=[SAID]),
        _response("stored, streamed", request_id="resp_streamed", previous_response_id=first,
                  stream=True),
        Ask("responses, stored, the streamed one read", f"{RESPONSES}/resp_streamed",
            method="GET"),
        _response("stored, a call", request_id="resp_call", **offered, **_forced(CALL)),
        _response("stored, a call answered", previous_response_id="resp_call", **offered,
                  input=[MADE_ANSWER]),
        _response("stored, not this one", request_id="resp_not", store=False),
        Ask("responses, stored, not this one, read", f"{RESPONSES}/resp_not", method="GET"),
        _response("stored, after none", previous_response_id="resp_not"),
        Ask("responses, stored, cancelled", f"{RESPONSES}/{first}/cancel", {}),
    ]  # fmt: skip

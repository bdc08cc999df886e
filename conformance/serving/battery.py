"""The requests that vLLM's server and ours must answer alike.

Each is a method, a path, headers and a body (an object to send as JSON, or bytes as they are). All
are greedy or end before a token is chosen, so both engines must say the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MODEL = "byte-llama"
KEY = "a-key-of-the-battery"
"""What `Authorization: Bearer` must hold."""
MAX_MODEL_LEN = 512

BASE: dict[str, Any] = {"model": MODEL, "temperature": 0}
PROMPT = "The scheduler"
MESSAGES = [{"role": "user", "content": "What is a block?"}]

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Lima"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time of a zone.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}, "exact": {"type": "boolean"}},
            "required": ["zone", "exact"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OTHER = (
    '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC", "exact": true}}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    key: str | None = KEY

    def content(self) -> bytes | None:
        """The bytes of the body."""
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body).encode()


def _completion(name: str, **body: Any) -> Ask:
    return Ask(name, "/v1/completions", {**BASE, "prompt": PROMPT, "max_tokens": 8, **body})


def _chat(name: str, **body: Any) -> Ask:
    return Ask(
        name, "/v1/chat/completions", {**BASE, "messages": MESSAGES, "max_tokens": 8, **body}
    )


def _without(ask: Ask, *names: str) -> Ask:
    body = {key: value for key, value in ask.body.items() if key not in names}
    return Ask(ask.name, ask.path, body)


def _both(name: str, **body: Any) -> Iterator[Ask]:
    """The same answered whole and streamed, with usage."""
    make = _chat if name.startswith("chat") else _completion
    yield make(name, **body)
    options = {"include_usage": True}
    yield make(f"{name}, streamed", **body, stream=True, stream_options=options)


def _forced(text: str) -> dict[str, Any]:
    """Decoding that can say nothing but `text`."""
    pattern = re.escape(text).replace("\\\n", r"\n").replace("\\ ", " ")
    return {"structured_outputs": {"regex": pattern}, "max_tokens": 200}


def completions() -> Iterator[Ask]:
    """`/v1/completions`, well formed."""
    yield from _both("plain")
    yield _without(_completion("sixteen tokens by default"), "max_tokens")
    yield from _both("one token", max_tokens=1)
    yield from _both("no token", max_tokens=0, echo=True)
    yield _completion("no token and no echo", max_tokens=0)
    yield from _both("token ids", prompt=list(PROMPT.encode()))
    yield from _both("two prompts", prompt=[PROMPT, "A block"])
    yield from _both("two prompts of ids", prompt=[list(b"The"), list(b"A block")])
    yield from _both("two greedy completions", n=2)
    warm = {"n": 2, "temperature": 0.7, "structured_outputs": {"choice": ["block"]}}
    yield from _both("two completions", **warm)
    yield from _both("two prompts, two completions", prompt=[PROMPT, "A block"], **warm)
    yield from _both("echo", echo=True)
    yield from _both("echo with logprobs", echo=True, logprobs=1, max_tokens=3)
    yield from _both("logprobs of the token alone", logprobs=0)
    yield from _both("logprobs", logprobs=3)
    yield _completion("logprobs as ids", logprobs=2, return_tokens_as_token_ids=True)
    yield _completion("prompt logprobs", prompt_logprobs=2, max_tokens=2)
    yield _completion("echo of the prompt's logprobs", echo=True, logprobs=2, max_tokens=0)
    yield from _both("token ids back", return_token_ids=True)
    yield from _both("echo with token ids", return_token_ids=True, echo=True)
    yield from _both("a stop text", stop="e", max_tokens=32)
    yield from _both("stop texts", stop=["is ", "the"], max_tokens=32)
    yield from _both("a stop text kept", stop=["e"], include_stop_str_in_output=True)
    yield from _both("a stop token", stop_token_ids=[101], max_tokens=32)
    yield _completion("four stop texts", stop=["q", "z", "x", "e"], max_tokens=32)
    yield _completion("at least so many tokens", stop="e", min_tokens=12, max_tokens=32)
    yield _completion("end of sequence ignored", ignore_eos=True, max_tokens=40)
    yield _completion("a token forbidden", logit_bias={"32": -100})
    yield _completion("a token forced", logit_bias={"90": 100})
    yield _completion("few tokens allowed", allowed_token_ids=[97, 98, 99])
    yield _completion("penalties", presence_penalty=1.5, frequency_penalty=0.5, max_tokens=24)
    yield _completion("a repetition penalty", repetition_penalty=1.3, max_tokens=24)
    yield _completion("beams", use_beam_search=True, n=3)
    yield _completion("a beam", use_beam_search=True, n=1, length_penalty=0.5)
    yield _completion("a seed", seed=7)
    yield _completion("masks that greedy ignores", top_k=5, top_p=0.5, min_p=0.1)
    yield _completion("a user", user="somebody")
    yield _completion("an id of the client's", request_id="mine")
    yield _completion("unknown fields", nothing=1, guided_json={"type": "object"})
    yield _completion("a salt", cache_salt="salt")
    yield _completion("priority nought", priority=0)
    yield _completion(
        "the last tokens of a long prompt", prompt="word " * 200, truncate_prompt_tokens=20
    )
    yield _completion(
        "the whole prompt, cut at the context", prompt="w" * 700, truncate_prompt_tokens=-1
    )
    yield from ends()
    yield _completion("special tokens in the prompt", add_special_tokens=True)
    yield _without(_completion("no model named"), "model")
    yield _completion("the adapter shout", model="shout", max_tokens=24)
    yield from _both("the adapter code", model="code", max_tokens=24)
    yield _completion("bytes beyond ASCII", prompt="naïve café")
    yield _completion(
        "usage in every chunk", stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    yield _completion("streamed without usage", stream=True)
    yield _completion(
        "streamed, usage refused", stream=True, stream_options={"include_usage": False}
    )
    yield from _both("a regex", structured_outputs={"regex": "[0-9]{3}-[a-f]+z"}, max_tokens=32)
    yield from _both("a choice", structured_outputs={"choice": ["block", "token"]})
    yield _completion(
        "a schema", max_tokens=60,
        structured_outputs={"json": WEATHER["function"]["parameters"]},
    )  # fmt: skip
    yield _completion(
        "a schema as response_format", max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "w", "schema": WEATHER["function"]["parameters"]},
        },
    )  # fmt: skip
    yield _completion("text as response_format", response_format={"type": "text"})
    yield _completion(
        "an adapter and a choice", model="quote", structured_outputs={"choice": ["a b", "a c"]}
    )


def ends() -> Iterator[Ask]:
    """Which end of a prompt is kept, and what is said of a character that is not whole."""
    cut = {"prompt": "def main(argv):\n", "return_token_ids": True, "max_tokens": 4}
    yield _completion("a prompt cut to five", truncate_prompt_tokens=5, **cut)
    for side in ("left", "right"):
        yield _completion(
            f"a prompt cut to five, {side}", truncate_prompt_tokens=5, truncation_side=side, **cut
        )
    said = [{"role": "user", "content": "def main(argv):"}]
    yield _chat(
        "chat, cut to seven", messages=said, truncate_prompt_tokens=7, return_token_ids=True
    )
    for name, text in (("a rocket", "ab\N{ROCKET}"), ("bytes of two", "é\N{ROCKET}")):
        only = {"structured_outputs": {"choice": [text]}}
        for most in range(3, 7):
            yield from _both(f"{name} cut at {most}", **only, max_tokens=most)
        yield from _both(f"{name} cut at 5 with logprobs", **only, max_tokens=5, logprobs=1)
    for name, prompt in (("first", "\N{ROCKET}ab"), ("second", "a\N{ROCKET}b")):
        yield from _both(
            f"echo of a rocket {name}", prompt=prompt, echo=True, logprobs=1, max_tokens=3
        )
    yield from _both("a seed below", seed=-5)


def chats() -> Iterator[Ask]:
    """`/v1/chat/completions`, well formed."""
    yield from _both("chat")
    yield _without(_chat("chat to the end of the context"), "max_tokens")
    body = {"max_completion_tokens": 5}
    yield _without(_chat("chat, max_completion_tokens", **body), "max_tokens")
    yield _chat("chat, both limits", max_completion_tokens=5)
    yield from _both("chat, two greedy completions", n=2)
    warm = {"n": 2, "temperature": 0.7, "structured_outputs": {"choice": ["block"]}}
    yield from _both("chat, two completions", **warm)
    yield from _both("chat, logprobs", logprobs=True, top_logprobs=2)
    yield _chat("chat, logprobs of the token alone", logprobs=True)
    yield _chat(
        "chat, logprobs as ids", logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True
    )
    yield _chat("chat, prompt logprobs", prompt_logprobs=1, max_tokens=2)
    system = [{"role": "system", "content": "Answer briefly."}, *MESSAGES]
    yield _chat("chat, a system message", messages=system)
    turns = [
        *system,
        {"role": "assistant", "content": "A page."},
        {"role": "user", "content": "Why?"},
    ]
    yield from _both("chat, several turns", messages=turns)
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}],
        }
    ]
    yield _chat("chat, content in parts", messages=parts)
    yield from _both("chat, a stop text", stop=["e"], max_tokens=32)
    yield _chat("chat, bad words", bad_words=["the", "a"], max_tokens=24)
    yield from _both("chat, token ids back", return_token_ids=True)
    yield _chat("chat, the prompt's text back", return_prompt_text=True)
    yield _chat("chat, no generation prompt", add_generation_prompt=False)
    open_end = [*MESSAGES, {"role": "assistant", "content": "A block is"}]
    yield _chat(
        "chat, the last message continued", messages=open_end, add_generation_prompt=False,
        continue_final_message=True,
    )  # fmt: skip
    yield from _both(
        "chat, echo",
        messages=open_end,
        echo=True,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    yield _chat("chat, the adapter quote", model="quote", max_tokens=24)
    yield _chat("chat, a name and nothing to do", messages=[{**MESSAGES[0], "name": "me"}])
    yield from _both("chat, a choice", structured_outputs={"choice": ["yes", "no"]})
    yield from _both(
        "chat, a JSON object",
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "w", "schema": WEATHER["function"]["parameters"]},
        },
        max_tokens=60,
    )
    yield _chat(
        "chat, usage in every chunk",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    yield _chat("chat, streamed without usage", stream=True)
    yield _chat("chat, beams", use_beam_search=True, n=2)
    yield _chat("chat, deprecated fields", functions=[], function_call="none")


def tools() -> Iterator[Ask]:
    """Tools offered, chosen, called."""
    offered = {"tools": [WEATHER, CLOCK]}
    yield from _both("chat, tools offered and none used", **offered)
    yield from _both("chat, tools and none allowed", **offered, tool_choice="none")
    yield from _both("chat, one call", **offered, **_forced(CALL))
    yield from _both("chat, text and a call", **offered, **_forced(f"Let me look. {CALL}"))
    yield from _both("chat, two calls", **offered, **_forced(f"{CALL}\n{OTHER}"))
    yield from _both("chat, a call and text behind", **offered, **_forced(f"{CALL} Done."))
    yield from _both("chat, something like a tag", **offered, **_forced("a <tool> and <tool_calls"))
    yield from _both(
        "chat, a call that is no JSON",
        **offered,
        **_forced("<tool_call>\n{name: oops}\n</tool_call>"),
    )
    yield from _both("chat, a call cut off", **offered, **{**_forced(CALL), "max_tokens": 40})
    yield from _both(
        "chat, a call without an end", **offered, **_forced(CALL.removesuffix("\n</tool_call>"))
    )
    yield from _both(
        "chat, a call with other letters", **offered, **_forced(CALL.replace("Oslo", "Tromsø"))
    )
    yield from _both(
        "chat, a call without arguments",
        **offered,
        **_forced('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'),
    )
    yield from _both(
        "chat, a named tool",
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=60,
    )
    yield from _both(
        "chat, a tool required", tools=[WEATHER], tool_choice="required", max_tokens=120
    )
    made = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    call = {"id": "call-1", "type": "function", "function": made}
    told = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "rain"},
    ]
    yield _chat("chat, a tool's answer", messages=told, **offered)
    yield _chat(
        "chat, a call not in parallel",
        **offered,
        **_forced(f"{CALL}\n{OTHER}"),
        parallel_tool_calls=False,
    )


def refused() -> Iterator[Ask]:
    """What is answered with an error."""
    for make, where in ((_completion, ""), (_chat, "chat, ")):
        yield make(f"{where}an unknown model", model="nope")
        yield make(f"{where}too hot", temperature=-1)
        yield make(f"{where}a temperature in words", temperature="warm")
        yield make(f"{where}top_p of two", top_p=2)
        yield make(f"{where}top_k below", top_k=-5)
        yield make(f"{where}no completion", n=0)
        yield make(f"{where}fewer than no completion", n=-1)
        yield make(f"{where}fewer than no tokens", max_tokens=-1)
        yield make(f"{where}more tokens than the context", max_tokens=99999)
        yield make(f"{where}tokens in words", max_tokens="many")
        yield make(f"{where}more at least than at most", min_tokens=20, max_tokens=4)
        yield make(f"{where}a token that is none", logit_bias={"9999": 1})
        yield make(f"{where}a token in words", logit_bias={"a": 1})
        yield make(f"{where}tokens allowed that are none", allowed_token_ids=[9999])
        yield make(f"{where}an empty list of tokens", allowed_token_ids=[])
        yield make(f"{where}an empty stop text", stop="")
        yield make(f"{where}a penalty too high", presence_penalty=3)
        yield make(f"{where}a repetition penalty of nought", repetition_penalty=0)
        yield make(f"{where}options without a stream", stream_options={"include_usage": True})
        yield make(f"{where}prompt logprobs in a stream", prompt_logprobs=1, stream=True)
        yield make(f"{where}an empty salt", cache_salt="")
        yield make(f"{where}two constraints", structured_outputs={"regex": "a", "choice": ["b"]})
        yield make(f"{where}a broken regex", structured_outputs={"regex": "("})
        lines = {"choice": ["one line\nand another"]}
        yield make(f"{where}a choice of two lines", structured_outputs=lines)
        yield make(f"{where}no choice", structured_outputs={"choice": []})
        yield make(f"{where}no constraint", structured_outputs={})
        yield make(f"{where}an unknown constraint", structured_outputs={"nothing": 1})
        yield make(f"{where}all prompt logprobs", prompt_logprobs=-1)
        yield make(f"{where}prompt logprobs in words", prompt_logprobs="2")
        yield make(f"{where}a schema missing", response_format={"type": "json_schema"})
        yield make(f"{where}an unknown format", response_format={"type": "yaml"})
        yield make(f"{where}beams in a stream", use_beam_search=True, stream=True)
        yield make(f"{where}a priority without the policy", priority=1)
    yield _completion("no prompt in the list", prompt=[])
    yield _completion("an empty prompt", prompt="")
    yield _without(_completion("no prompt"), "prompt")
    yield _completion("a prompt of objects", prompt={"a": 1})
    yield _completion("a token id out of range", prompt=[1, 2, 9999])
    yield _completion("a token id below", prompt=[-1])
    yield _completion("a prompt too long", prompt="w" * 600)
    yield _completion("a prompt and an output too long", prompt="w" * 500, max_tokens=50)
    yield _completion("logprobs below", logprobs=-1)
    yield _completion("more logprobs than allowed", logprobs=21)
    yield _completion("a suffix", suffix="end")
    yield _completion("logprobs in words", logprobs="2")
    yield _completion("prompt embeddings", prompt_embeds="AA==")
    for role in ("user", "system", "assistant", "tool", "robot"):
        yield _chat(f"chat, null of {role}", messages=[*MESSAGES, {"role": role, "content": None}])
    yield _chat("chat, top_logprobs in words", logprobs=True, top_logprobs="2")
    yield _chat("chat, all top_logprobs", logprobs=True, top_logprobs=-1)
    yield _without(_chat("chat, no messages"), "messages")
    yield _chat("chat, an empty list of messages", messages=[])
    yield _chat("chat, messages that are text", messages="hello")
    yield _chat("chat, a message without a role", messages=[{"content": "a"}])
    yield _chat("chat, a message without content", messages=[{"role": "user"}])
    yield _chat("chat, a role of one's own", messages=[{"role": "robot", "content": "a"}])
    yield _chat(
        "chat, a picture",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
                ],
            }
        ],
    )
    yield _chat("chat, more logprobs than allowed", logprobs=True, top_logprobs=21)
    yield _chat("chat, top_logprobs alone", top_logprobs=2)
    yield _chat("chat, a prompt too long", messages=[{"role": "user", "content": "w" * 600}])
    yield _chat(
        "chat, continued and begun", continue_final_message=True, add_generation_prompt=True
    )
    yield _chat("chat, a template of the client's", chat_template="{{ messages }}")
    yield _chat("chat, an empty list of tools", tools=[])
    yield _chat("chat, a choice without tools", tool_choice="auto")
    yield _chat("chat, an unknown choice", tools=[WEATHER], tool_choice="perhaps")
    yield _chat(
        "chat, a tool that is not offered",
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "other"}},
    )
    yield _chat(
        "chat, a choice without a function", tools=[WEATHER], tool_choice={"type": "function"}
    )
    yield _chat(
        "chat, a tool without a name",
        tools=[{"type": "function", "function": {"description": "a"}}],
    )
    yield _chat(
        "chat, a tool without a description",
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
    )


def transport() -> Iterator[Ask]:
    """HTTP itself: paths, methods, keys, bodies that are no JSON."""
    for path in ("/v1/completions", "/v1/chat/completions"):
        yield Ask(f"{path} with a broken body", path, b'{"model": ')
        yield Ask(f"{path} with an empty body", path, b"")
        yield Ask(f"{path} with a list", path, [])
        yield Ask(f"{path} with a text", path, "hello")
        yield Ask(f"{path} with nothing in it", path, {})
        yield Ask(f"{path} without a key", path, {"prompt": "a"}, key=None)
        yield Ask(f"{path} with another key", path, {"prompt": "a"}, key="other")
        yield Ask(f"{path} read", path, method="GET")
        form = {"Content-Type": "text/plain"}
        yield Ask(f"{path} as plain text", path, b'{"prompt": "a"}', headers=form)
    for path in ("/v1/completions", "/v1/chat/completions"):
        latin = b'{"prompt": "caf\xe9", "messages": [{"role": "user", "content": "caf\xe9"}]}'
        yield Ask(f"{path} in latin-1", path, latin)
    yield Ask("nowhere", "/v1/nowhere", {})
    yield Ask("nowhere without a key", "/v1/nowhere", {}, key=None)
    yield Ask("root", "/", method="GET")
    yield Ask("embeddings", "/v1/embeddings", {"model": MODEL, "input": "a"})
    yield Ask(
        "a request id in a header",
        "/v1/completions",
        {**BASE, "prompt": "The", "max_tokens": 2},
        headers={"X-Request-Id": "from-a-header"},
    )


def others() -> Iterator[Ask]:
    """Everything that is no generation."""
    yield Ask("models", "/v1/models", method="GET")
    yield Ask("models without a key", "/v1/models", method="GET", key=None)
    yield Ask("health", "/health", method="GET", key=None)
    yield Ask("ping", "/ping", method="GET", key=None)
    yield Ask("version", "/version", method="GET", key=None)
    yield Ask("load", "/load", method="GET", key=None)
    text = {"model": MODEL, "prompt": "café"}
    yield Ask("tokenize", "/tokenize", text)
    yield Ask("tokenize to pieces", "/tokenize", {**text, "return_token_strs": True})
    yield Ask("tokenize a chat", "/tokenize", {"model": MODEL, "messages": MESSAGES})
    yield Ask(
        "tokenize a chat with tools",
        "/tokenize",
        {"model": MODEL, "messages": MESSAGES, "tools": [WEATHER]},
    )
    yield Ask("tokenize nothing", "/tokenize", {"model": MODEL})
    yield Ask("tokenize for another model", "/tokenize", {"model": "nope", "prompt": "a"})
    yield Ask("detokenize", "/detokenize", {"model": MODEL, "tokens": [84, 104, 101]})
    yield Ask("detokenize broken bytes", "/detokenize", {"model": MODEL, "tokens": [195, 84]})
    yield Ask("detokenize the end", "/detokenize", {"model": MODEL, "tokens": [84, 256]})
    yield Ask("detokenize what is none", "/detokenize", {"model": MODEL, "tokens": [9999]})
    yield Ask("detokenize text", "/detokenize", {"model": MODEL, "tokens": "a"})
    yield Ask(
        "render a completion", "/v1/completions/render", {**BASE, "prompt": PROMPT, "max_tokens": 4}
    )
    yield Ask(
        "render a chat",
        "/v1/chat/completions/render",
        {**BASE, "messages": MESSAGES, "max_tokens": 4},
    )


def asks() -> list[Ask]:
    """All of them, in the order they are sent."""
    return [*completions(), *chats(), *tools(), *refused(), *transport(), *others()]

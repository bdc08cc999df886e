"""The figures of phase 16; `course figures` draws them.

`buffers` is what the engine's own detokenizer and tag parser hold, `chunks` a recorded stream of
the real server, `leave` a trace of `mini_vllm` on the shipped model, run here; the others are maps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.serving.recorded import kept
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from course.truth.plots import Axes
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.detokenizer import IncrementalDetokenizer
from mini_vllm.entrypoints.openai.tool_parsers import HermesStream
from mini_vllm.tokenizer import ByteTokenizer


def path() -> str:
    """A request's way in and an answer's way out."""
    svg = Svg(
        800, 250, "From a request to a token and back",
        "On the way in: HTTP, validation, chat template and tokenizer in the front end's process, "
        "then over the boundary to scheduler and model. On the way back: detokenizer, stop texts, "
        "parsers, server-sent events.",
    )  # fmt: skip
    svg.rect(12, 34, 560, 196, stroke=GREY, radius=8)
    svg.text(24, 26, "front end: one process, one event loop", css="soft")
    svg.rect(604, 34, 184, 196, stroke=GREY, radius=8)
    svg.text(612, 26, "engine core: another", css="soft")
    inward = (("HTTP", "key, body"), ("validation", "400, 404"), ("template", "one prompt"),
              ("tokenizer", "ids"))  # fmt: skip
    outward = (("events", "data: …"), ("parsers", "tags"), ("stop texts", "lag"),
               ("characters", "bytes"))  # fmt: skip
    for place, (words, below) in enumerate(inward):
        svg.box(24 + place * 138, 52, 112, 58, [words, below], fill=BLUE)
        if place:
            svg.line(138 + (place - 1) * 138, 81, 160 + (place - 1) * 138, 81, arrow=True)
    for place, (words, below) in enumerate(outward):
        svg.box(24 + place * 138, 150, 112, 58, [words, below], fill=ORANGE)
        if place:
            svg.line(160 + (place - 1) * 138, 179, 138 + (place - 1) * 138, 179, arrow=True)
    svg.box(620, 52, 152, 58, ["scheduler", "who, how many"], fill=GREEN)
    svg.box(620, 150, 152, 58, ["model, sampler", "one token each"], fill=GREEN)
    svg.line(552, 81, 616, 81, arrow=True)
    svg.line(696, 112, 696, 146, arrow=True)
    svg.line(616, 179, 552, 179, arrow=True)
    svg.text(588, 138, "pipe", anchor="middle", css="soft")
    return svg.render()


def held() -> list[tuple[str, str, str, str]]:
    """Per token of a text with an emoji and a call: its name, what goes out, and what is held as
    bytes and as a tag."""
    text = 'a 🚀 <tools> <tool_call>{"name": "f", '
    tokens = list(text.encode())
    reader, parser = IncrementalDetokenizer(ByteTokenizer()), HermesStream()
    steps, sent = [], 0
    for count in range(1, len(tokens) + 1):
        piece = reader.update(tokens[:count])
        delta = parser.feed(piece) if piece else None
        out = (delta or {}).get("content") or ""
        if delta and delta["tool_calls"]:
            out = "call f"
        shown = len(reader.text.encode())
        name = chr(tokens[count - 1]) if tokens[count - 1] < 128 else f"{tokens[count - 1]:02x}"
        body = parser.text[parser.num_sent :]
        sent += len(out)
        steps.append((name, out, "·" * (count - shown), body))
    return steps


def buffers() -> str:
    """Bytes and tags held, token by token."""
    steps = held()
    svg = Svg(
        820, 200, "What is held back while a text grows",
        "A column a token. The emoji's first three bytes are held, then <tool, which turns out to "
        "be <tools> and is released; the real tag is held until the call's name is there.",
    )  # fmt: skip
    width = 760 / len(steps)
    for row, words in enumerate(("token", "sent", "bytes held", "tag held")):
        svg.text(8, 40 + row * 40, words, size=12, css="soft")
    for place, (name, out, waiting, tag) in enumerate(steps):
        x = 62 + place * (width - 0.2)
        svg.text(x + width / 2, 40, "␣" if name == " " else name, anchor="middle", size=11,
                 css="ink mono")  # fmt: skip
        if out:
            svg.rect(x + 1, 62, width - 2, 24, fill=GREEN, opacity=0.6, radius=2, tip=repr(out))
        if waiting:
            svg.rect(x + 1, 102, width - 2, 24, fill=ORANGE, opacity=0.6, radius=2,
                     tip=f"{len(waiting)} bytes")  # fmt: skip
        if tag:
            height = min(24, 2.2 * len(tag))
            svg.rect(x + 1, 166 - height, width - 2, height, fill=PURPLE, opacity=0.6, radius=2,
                     tip=repr(tag))  # fmt: skip
    svg.text(62, 190, "height of the last row: characters held", size=11, css="soft")
    return svg.render()


def chunks() -> str:
    """A recorded stream of the real server: what each chunk brings."""
    name = "chat, text and a call, streamed"
    events = [e for e in kept()[name]["events"] if e != "[DONE]"]
    svg = Svg(
        800, 190, "A stream of vLLM's server, chunk by chunk",
        f"{len(events)} chunks of a chat that writes text and calls a tool: the role, content one "
        "character at a time, the call's name, its arguments in pieces, the finish reason, usage.",
    )  # fmt: skip
    colors = {"role": GREY, "content": BLUE, "name": ORANGE, "arguments": PURPLE, "reason": RED,
              "usage": GREEN}  # fmt: skip
    width = 772 / len(events)
    for place, event in enumerate(events):
        kind, words = _kind(event)
        x = 14 + place * width
        svg.rect(x + 0.5, 40, width - 1, 56, fill=colors[kind], opacity=0.6, radius=2, tip=words)
        svg.text(x + width / 2 + 4, 112, words[:9], size=10, css="soft mono", rotate=60)
    for place, (kind, color) in enumerate(colors.items()):
        svg.rect(14 + place * 120, 10, 14, 14, fill=color, opacity=0.6, radius=2)
        svg.text(34 + place * 120, 22, kind, size=12)
    return svg.render()


def _kind(event: dict[str, Any]) -> tuple[str, str]:
    if not event["choices"]:
        return "usage", "usage"
    choice = event["choices"][0]
    if choice["finish_reason"]:
        return "reason", str(choice["finish_reason"])
    delta = choice["delta"]
    if "role" in delta:
        return "role", "assistant"
    if delta.get("tool_calls"):
        function = delta["tool_calls"][0]["function"]
        kind = "name" if "name" in function else "arguments"
        return kind, function.get("name") or function.get("arguments") or ""
    return "content", delta.get("content") or ""


def choice() -> str:
    """What `tool_choice` does to decoding and to parsing."""
    svg = Svg(
        800, 214, "Four values of tool_choice",
        "none and auto decode freely, and only auto looks for tags; named and required constrain "
        "decoding, so that there is nothing to look for.",
    )  # fmt: skip
    rows = (
        ("none", "free", "nobody looks", "content", GREY),
        ("auto", "free", "tag parser, holds back", "content, calls", BLUE),
        ("named", "the tool's schema", "all of it is arguments", "one call, reason stop", ORANGE),
        ("required", "array of calls", "array, no tags", "calls", PURPLE),
    )
    for place, words in enumerate(("tool_choice", "decoding", "parsing", "the client gets")):
        svg.text(20 + place * 196, 24, words, css="soft")
    for row, (*cells, color) in enumerate(rows):
        for place, words in enumerate(cells):
            svg.box(16 + place * 196, 38 + row * 42, 178, 34, [words], fill=color, size=12)
            if place:
                svg.line(196 + (place - 1) * 196, 55 + row * 42, 210 + (place - 1) * 196,
                         55 + row * 42, arrow=True)  # fmt: skip
    return svg.render()


def leave() -> str:
    """Blocks in use while one of three clients leaves."""
    engine = LLMEngine(dtype="float64", num_blocks=64, block_size=4)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    names = [engine.add_request("The scheduler", params, request_id=f"r{i}") for i in range(3)]
    pool, used = engine.scheduler.kv.block_pool, [0]
    for step in range(40):
        if step == 20:
            engine.abort_request(names[1])
        engine.step()
        used.append(63 - pool.get_num_free_blocks())
    svg = Svg(
        760, 270, "A client leaves at step 20",
        f"Three requests grow to {used[20]} blocks; at step 20 one is aborted and the pool has "
        f"{used[21]} in use. Without the abort its blocks would stay taken until the request ends.",
    )  # fmt: skip
    axes = Axes(svg, (60, 30, 660, 190), (0, 40), (0, 30))
    axes.frame("step", "blocks in use", range(0, 41, 10), range(0, 31, 10))
    axes.curve([(step, float(count)) for step, count in enumerate(used)], BLUE)
    axes.rule(x=20)
    axes.label(20, 8, "its client leaves", dx=6)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "path.svg": path,
    "buffers.svg": buffers,
    "chunks.svg": chunks,
    "choice.svg": choice,
    "leave.svg": leave,
}

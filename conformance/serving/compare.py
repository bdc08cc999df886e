"""Our server's answers beside vLLM's recorded ones.

    python -m conformance.serving.compare            # starts our server, sends the battery

Compared are status, content type, and every field of every body and chunk, floats to 1e-4; how a
stream is cut does not decide. Not
compared: messages of errors (the words are ours; status, `type`, `param` and `code` are equal), and
what `DOCUMENTED` names.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from conformance.serve_stream import end, free_port, wait_for
from conformance.serving.battery import KEY, MAX_MODEL_LEN, MODEL, Ask, asks
from conformance.serving.recorded import ADAPTERS, ROOT, TEMPLATE, kept, send

_NO_OBJECT = "a body that is no object is the client's error here, a 500 there"
_CHOICE = "a choice with a line end is served here; there the grammar made of it is broken"
_PARAMS = "sampling parameters are named as this engine's own"

DOCUMENTED: dict[str, str] = {
    **{
        f"/v1/{path} with a {what}": _NO_OBJECT
        for path in ("completions", "chat/completions")
        for what in ("list", "text")
    },
    "a choice of two lines": _CHOICE,
    "chat, a choice of two lines": _CHOICE,
    "version": "the version of this engine",
    "detokenize what is none": "refused here; there an unknown token is no text",
    "render a completion": _PARAMS,
    "render a chat": _PARAMS,
}
"""Requests that are answered otherwise, and why."""


def differences(theirs: Any, ours: Any, where: str = "") -> Iterator[str]:
    """Each place where two JSON values differ, in words."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted({*theirs, *ours}):
            at = f"{where}.{key}"
            if key not in ours:
                yield f"{at}: only theirs, {theirs[key]!r}"
            elif key not in theirs:
                yield f"{at}: only ours, {ours[key]!r}"
            elif not (where.endswith(".error") and key == "message"):
                yield from differences(theirs[key], ours[key], at)
    elif isinstance(theirs, list) and isinstance(ours, list):
        if len(theirs) != len(ours):
            yield f"{where}: {len(theirs)} theirs, {len(ours)} ours"
        for index, (one, other) in enumerate(zip(theirs, ours, strict=False)):
            yield from differences(one, other, f"{where}[{index}]")
    elif isinstance(theirs, float) and isinstance(ours, int | float):
        if not math.isclose(theirs, ours, abs_tol=1e-4):
            yield f"{where}: {theirs} theirs, {ours} ours"
    elif theirs != ours:
        yield f"{where}: {theirs!r} theirs, {ours!r} ours"


@contextmanager
def our_server(*more: str) -> Iterator[int]:
    """Our server with the battery's settings, and `more` flags; its port."""
    port = free_port()
    modules = [f"--lora-modules={name}=models/adapters/{name}" for name in ADAPTERS]
    command = [
        sys.executable, "-m", "mini_vllm.entrypoints.cli", "serve", f"models/{MODEL}",
        "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN), "--served-model-name", MODEL,
        "--tool-call-parser", "hermes", "--api-key", KEY, "--disable-any-whitespace",
        "--chat-template", str(TEMPLATE.relative_to(ROOT)), *modules, *more,
    ]  # fmt: skip
    server = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_for(server, f"http://127.0.0.1:{port}")
        yield port
    finally:
        end(server)


def _choice_of(event: Any) -> dict[str, Any] | None:
    choices = event.get("choices") if isinstance(event, dict) else None
    return choices[0] if choices else None


def _length(event: Any) -> int:
    """Characters that a chunk adds to its choice."""
    choice = _choice_of(event) or {}
    delta = choice.get("delta") or {}
    calls = delta.get("tool_calls") or ()
    told = [call["function"].get("arguments") or "" for call in calls]
    names = [call["function"].get("name") or "" for call in calls]
    return sum(map(len, (choice.get("text") or delta.get("content") or "", *told, *names)))


def _joined(first: Any, second: Any) -> Any:
    """Two chunks of one choice as a slow client gets them: in one."""
    one, two = _choice_of(first), _choice_of(second)
    assert one is not None and two is not None
    both = one | {k: v for k, v in two.items() if k in ("finish_reason", "stop_reason")}
    if "text" in one:
        both["text"] = one["text"] + two["text"]
    else:
        both["delta"] = _joined_deltas(one["delta"], two["delta"])
    if one.get("token_ids") is not None:
        both["token_ids"] = one["token_ids"] + two["token_ids"]
    if one.get("logprobs") is not None:
        both["logprobs"] = {k: v + two["logprobs"][k] for k, v in one["logprobs"].items()}
    kept = {k: v for k, v in second.items() if k in ("usage", "system_fingerprint")}
    return first | kept | {"choices": [both]}


def _joined_deltas(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    both = one | {k: v for k, v in two.items() if k not in one}
    if one.get("content") is not None and two.get("content") is not None:
        both["content"] = one["content"] + two["content"]
    elif two.get("content") is not None:
        both["content"] = two["content"]
    calls = [dict(call) for call in one.get("tool_calls") or ()]
    for call in two.get("tool_calls") or ():
        if calls and calls[-1]["index"] == call["index"] and "id" not in call:
            function = dict(calls[-1]["function"])
            new = call["function"].get("arguments") or ""
            function["arguments"] = function.get("arguments", "") + new
            calls[-1]["function"] = function
        else:
            calls.append(call)
    return both | ({"tool_calls": calls} if "tool_calls" in both else {})


def _cuts(events: list[Any]) -> list[tuple[int, int]]:
    """Where a stream is cut: of each chunk the choice, and the characters that it adds."""
    return [(choice["index"], _length(e)) for e in events if (choice := _choice_of(e))]


def _whole(events: list[Any]) -> list[Any]:
    """A stream with all chunks of a choice in one, as a client that is very slow gets it."""
    joined: dict[int, Any] = {}
    for event in (event for event in events if _choice_of(event) is not None):
        index = event["choices"][0]["index"]
        joined[index] = _joined(joined[index], event) if index in joined else event
    for event in joined.values():
        logprobs = event["choices"][0].get("logprobs") or {}
        logprobs.pop("text_offset", None)  # offsets begin anew with each chunk
    rest = [event for event in events if _choice_of(event) is None]
    return [joined[index] for index in sorted(joined)] + rest


def compare(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Where two answers differ, in words.

    A client that is slow gets several tokens in one chunk, there as here. Streams that are cut
    alike are compared chunk by chunk, others by what all chunks of a choice say together.
    """
    if "events" in theirs and "events" in ours and not cut_alike(theirs, ours):
        theirs = theirs | {"events": _whole(theirs["events"])}
        ours = ours | {"events": _whole(ours["events"])}
    return list(differences(theirs, ours))


def cut_alike(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether two streams are cut at the same places."""
    return _cuts(theirs.get("events", [])) == _cuts(ours.get("events", []))


TRIES = 4
"""Times that a stream is asked for until it is cut as theirs: a parser of calls may say something
else of a piece that holds the end of one call and more, there as here."""


def verdict(theirs: dict[str, Any], asked: Callable[[], dict[str, Any]]) -> tuple[list[str], bool]:
    """Where our answer differs, and whether it was cut as theirs."""
    for _ in range(TRIES):
        ours = json.loads(json.dumps(asked()))
        alike = cut_alike(theirs, ours)
        found = compare(theirs, ours)
        if alike or not found:
            break
    return found, alike


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; returns the exit status."""
    wanted, theirs = sys.argv[1:] if argv is None else argv, kept()
    with our_server() as port:
        return report(
            wanted, asks(), DOCUMENTED,
            lambda ask: verdict(theirs[ask.name], partial(send, port, ask))[0],
        )  # fmt: skip


def report(
    wanted: Sequence[str], sent: Iterable[Ask], documented: Container[str],
    differences_of: Callable[[Ask], list[str]],
) -> int:  # fmt: skip
    """Print which requests are answered otherwise, unless that is documented; the exit status.

    Args:
        wanted: words of which a request's name holds one; all requests without.
        differences_of: asks, and says in words where the answer differs.
    """
    names, known, wrong = 0, 0, 0
    for ask in sent:
        if wanted and not any(word in ask.name for word in wanted):
            continue
        names += 1
        found = differences_of(ask)
        if found and ask.name in documented:
            known += 1
        elif found:
            wrong += 1
            print(f"{ask.name}: {'; '.join(found[:3])[:600]}")
    print(f"{names} requests, {known} differ as documented, {wrong} otherwise")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

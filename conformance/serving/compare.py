"""Our server's answers beside vLLM's recorded ones.

    python -m conformance.serving.compare            # starts our server, sends the battery

Compared are status, content type, and every field of every body and chunk, floats to 1e-4. Not
compared: messages of errors (the words are ours; status, `type`, `param` and `code` are equal), and
what `DOCUMENTED` names.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from conformance.serve_stream import end, free_port, wait_for
from conformance.serving.battery import KEY, MAX_MODEL_LEN, MODEL, asks
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
def our_server() -> Iterator[int]:
    """Our server with the battery's settings; its port."""
    port = free_port()
    modules = [f"--lora-modules={name}=models/adapters/{name}" for name in ADAPTERS]
    command = [
        sys.executable, "-m", "mini_vllm.entrypoints.cli", "serve", f"models/{MODEL}",
        "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN), "--served-model-name", MODEL,
        "--tool-call-parser", "hermes", "--api-key", KEY, "--disable-any-whitespace",
        "--chat-template", str(TEMPLATE.relative_to(ROOT)), *modules,
    ]  # fmt: skip
    server = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_for(server, f"http://127.0.0.1:{port}")
        yield port
    finally:
        end(server)


def by_choice(answer: dict[str, Any]) -> dict[str, Any]:
    """A stream with its chunks sorted by choice: which of two speaks first is a matter of time."""
    if "events" not in answer:
        return answer

    def index(event: Any) -> int:
        choices = event.get("choices") if isinstance(event, dict) else None
        return choices[0]["index"] if choices else 1 << 30

    return answer | {"events": sorted(answer["events"], key=index)}


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; returns the exit status."""
    wanted = list(sys.argv[1:] if argv is None else argv)
    theirs, wrong, count = kept(), 0, 0
    with our_server() as port:
        for ask in asks():
            if wanted and not any(word in ask.name for word in wanted):
                continue
            count += 1
            ours = json.loads(json.dumps(send(port, ask)))
            found = list(differences(by_choice(theirs[ask.name]), by_choice(ours)))
            if found and ask.name not in DOCUMENTED:
                wrong += 1
                print(f"{ask.name}: {'; '.join(found[:3])[:600]}")
    print(f"{count} requests, {len(DOCUMENTED)} documented: {wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

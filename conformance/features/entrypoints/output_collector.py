"""Record what the real v0.22.1 collector of outputs gives to readers who are late.

Random puts of one to three completions, reads and an error at times; streams of deltas.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Case = dict[str, Any]

ABOUT = (
    '`{"ops": [["put", [[index, token ids, finish reason]]] | ["fail"] | ["get"]], "got": [what '
    'each get gives]}`: a list as it was put, None for nothing, "error" for the error that was put.'
)


def script(rng: random.Random) -> list[Any]:
    """One life of a collector: tokens count up, a completion ends once."""
    open_, token = list(range(rng.randint(1, 3))), 0
    ops: list[Any] = []
    for _ in range(rng.randint(4, 40)):
        kind = rng.random()
        if kind < 0.35:
            ops.append(["get"])
        elif kind < 0.38:
            ops.append(["fail"])
        elif open_:
            parts = []
            for index in rng.sample(open_, rng.randint(1, len(open_))):
                ids = list(range(token, token := token + rng.randint(0, 3)))
                ended = rng.choice(("stop", "length")) if rng.random() < 0.1 else None
                parts.append([index, ids, ended])
                if ended:
                    open_.remove(index)
            ops.append(["put", parts])
    return [*ops, ["get"], ["get"]]


def output(parts: list[Any]) -> Any:
    """What the real engine would put."""
    from vllm.outputs import CompletionOutput, RequestOutput

    made = [
        CompletionOutput(
            index=index, text="".join(f"<{token}>" for token in ids), token_ids=list(ids),
            cumulative_logprob=None, logprobs=None, finish_reason=ended,
        )
        for index, ids, ended in parts
    ]  # fmt: skip
    return RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[], prompt_logprobs=None, outputs=made,
        finished=False,
    )  # fmt: skip


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    import asyncio

    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.output_processor import RequestOutputCollector

    async def lived(ops: list[Any]) -> list[Any]:
        made = RequestOutputCollector(RequestOutputKind.DELTA, "r")
        got: list[Any] = []
        for op, *rest in ops:
            if op == "put":
                made.put(output(*rest))
            elif op == "fail":
                made.put(RuntimeError("the engine died"))
            else:
                try:
                    found = made.get_nowait()
                except RuntimeError:
                    got.append("error")
                    continue
                got.append(
                    None if found is None
                    else [[c.index, list(c.token_ids), c.finish_reason] for c in found.outputs]
                )  # fmt: skip
        return got

    rng = random.Random(16)
    for _ in range(200):
        ops = script(rng)
        yield {"ops": ops, "got": asyncio.run(lived(ops))}

"""A captured graph and the pointers it froze: what the widget shows and computes.

Promises: every result is that of the engine's own tape; the browser's arithmetic is tested against
`play`. Mirrors `vllm/compilation/cuda_graph.py:145` `CUDAGraphWrapper`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mini_vllm.cudagraph import Tape, run_eager

NEEDS = ("decide",)

OPS = (("+ 1", lambda x: x + 1), ("× 2", lambda x: x * 2), ("− 3", lambda x: x - 3))
"""The guide's three kernels."""

START = {"A": 1.0, "B": 100.0}
"""What the two arrays hold; the graph was captured while the name `x` pointed to A."""

Action = list[Any]


def play(actions: Sequence[Action]) -> list[dict[str, Any]]:
    """The state at the beginning and after each action.

    Args:
        actions: ["write", array, value]; ["point", array]: the name x is bound to it; ["copy",
            array]: its value goes into A, as the engine does it; ["replay"]; ["keep"]: a second
            name for the output's array; ["keep copy"]: a copy of it.

    Returns:
        Per state: `arrays`, `x` (the array the name is bound to), `out`, `eager` (what running the
        code on x now would give), `kept` (None before it was kept).
    """
    arrays = {name: np.array([value]) for name, value in START.items()}
    tape, source = Tape(), arrays["A"]
    for _, op in OPS:
        target = np.zeros(1)
        tape.record(op, source, target)
        source = target
    out, x, kept = source, "A", None
    states = []
    for action in [["begin"], *actions]:
        if action[0] == "write":
            arrays[action[1]][:] = action[2]
        elif action[0] == "point":
            x = action[1]
        elif action[0] == "copy":
            np.copyto(arrays["A"], arrays[action[1]])
        elif action[0] == "replay":
            tape.replay()
        elif action[0] == "keep":
            kept = out
        elif action[0] == "keep copy":
            kept = out.copy()
        states.append(
            {
                "arrays": {name: float(array[0]) for name, array in arrays.items()},
                "x": x, "out": float(out[0]),
                "eager": float(run_eager([op for _, op in OPS], arrays[x])[0]),
                "kept": None if kept is None else float(kept[0]),
            }
        )  # fmt: skip
    return states


_SEVEN: list[Action] = [["write", "A", 7], ["replay"]]

QUESTIONS: tuple[tuple[str, list[Action], str, list[float], str], ...] = (
    ("Captured with x at A. A held 7 and was replayed. Then the name x is pointed at B, which "
     "holds 100, and the graph is replayed. What is in out?",
     [*_SEVEN, ["point", "B"], ["replay"]], "out", [13, 199, 0],
     "The graph has A's address. No error: an answer to the question before."),
    ("The same, but B's value is copied into A before the replay.",
     [*_SEVEN, ["copy", "B"], ["replay"]], "out", [13, 199, 0],
     "What lies at the address is free to change."),
    ("The 13 is kept, without a copy. Then A gets 1 and is replayed. What does kept say?",
     [*_SEVEN, ["keep"], ["write", "A", 1], ["replay"]], "kept", [13, 1, 0],
     "A second name for the same memory."),
)  # fmt: skip


def document() -> dict[str, Any]:
    """The widget's document."""
    questions = [
        {"ask": ask, "actions": actions, "choices": choices, "because": because,
         "answer": int(play(actions)[-1][field])}
        for ask, actions, field, choices, because in QUESTIONS
    ]  # fmt: skip
    return {"start": START, "ops": [name for name, _ in OPS], "questions": questions}

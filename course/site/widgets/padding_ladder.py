"""Capture sizes and what they cost a run: what the widget shows and computes.

Promises: a batch is padded as the engine's `GraphRunner` pads it, and with the default ladder as
the recorded dispatcher does; the steps are a run of the engine.
Mirrors `vllm/v1/cudagraph_dispatcher.py:239` `CudagraphDispatcher.dispatch`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance import parts
from course.files import load_module

NEEDS = ("decide",)

MOST = 60
"""Largest size that can be picked: no full graph is made above the run's `max_num_seqs`."""

_SERVED = Path(__file__).parents[3] / "phase-05-cuda-graphs-and-torch-compile/figures/served.py"


def rung(tokens: int, sizes: Sequence[int]) -> int | None:
    """The smallest size that holds `tokens`, None above the largest."""
    return min((size for size in sizes if size >= tokens), default=None)


def cost(counts: Mapping[int, int], sizes: Sequence[int]) -> dict[str, int]:
    """What a ladder costs a run of `counts[tokens]` steps.

    Returns:
        `graphs`; `rows` that the run asks for in steps with a graph; `padded`, rows added to them;
        `without`, steps without a graph.
    """
    found = {"graphs": len(set(sizes)), "rows": 0, "padded": 0, "without": 0}
    for tokens, steps in counts.items():
        size = rung(tokens, sizes)
        if size is None:
            found["without"] += steps
        else:
            found["rows"] += steps * tokens
            found["padded"] += steps * (size - tokens)
    return found


@functools.cache
def served() -> tuple[int, dict[int, int]]:
    """Seats, and the decode steps of the guide's run: how many had how many tokens."""
    module = load_module(_SERVED)
    decodes = [step for step in module.serve() if max(step) == 1]
    return module.MAX_NUM_SEQS, dict(sorted(Counter(map(len, decodes)).items()))


def default_sizes() -> list[int]:
    """vLLM's sizes of full graphs for that many seats, as recorded."""
    seats, _ = served()
    asked = {"kind": "dispatch", "mode": "FULL_AND_PIECEWISE", "max_num_seqs": seats}
    (case,) = [
        case
        for case in parts.load("cudagraph_modes")
        if all(case.get(key) == value for key, value in asked.items())
    ]
    (full,) = [sizes for mode, sizes in case["passes"] if mode == "FULL"]
    return sorted(full)


LADDERS = {"powers of two": [1, 2, 4, 8, 16, 32], "one for all": [60], "every 20": [20, 40, 60]}


def document() -> dict[str, Any]:
    """The widget's document."""
    seats, counts = served()
    usual = default_sizes()
    ladders = {"vLLM's": usual, **LADDERS}
    one = cost(counts, [60])
    more = f"{100 * one['padded'] / one['rows']:.0f} %"
    questions = [
        {"ask": "9 requests decode, vLLM's ladder. With how many rows does the step run?",
         "sizes": usual, "at": 9, "answer": f"{rung(9, usual)}", "choices": ["9", "10", "16", "24"],
         "because": "The stairs are steepest at the bottom."},
        {"ask": "58 requests decode on the same ladder. And now?", "sizes": usual, "at": 58,
         "answer": "no full graph", "choices": ["58", "64", "no full graph"],
         "because": f"64 would be next, above max_num_seqs, {seats}: it is not captured."},
        {"ask": "One rung of 60 for the whole run. How many rows more does it compute?",
         "sizes": [60], "at": 30, "answer": more,
         "choices": sorted({"10 %", "25 %", more, "300 %"}, key=lambda c: int(c.split()[0])),
         "because": "One graph only, and every step pays for 60."},
    ]  # fmt: skip
    return {
        "counts": [[tokens, steps] for tokens, steps in counts.items()], "most": MOST,
        "seats": seats, "ladders": ladders, "questions": questions,
    }  # fmt: skip

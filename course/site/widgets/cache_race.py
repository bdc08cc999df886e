"""Generation with a KV cache against generation without one, step by step.

Promises: both runners are the engine itself; the one without a cache asks for every token as a new
request, so nothing is remembered. Positions are counted by the engine's plans; seconds are taken
where this runs, and the book holds none. Mirrors `vllm/v1/core/sched/scheduler.py:351`
`Scheduler.schedule`.
"""

from __future__ import annotations

import time
from typing import Any

from course.site.play_pins import RUNTIME_BYTES
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.checks import whole

PROMPT = "Return the number of"
NUM_TOKENS = 24
MOST_BYTES = 64
MOST_TOKENS = 48
LANES = ("with", "without")


class Runner:
    """One of the two, moved a token at a time."""

    def __init__(self, lane: str, prompt: bytes, num_tokens: int) -> None:
        self.lane, self.left = lane, num_tokens
        self.ids = list(prompt)
        self.engine = LLMEngine(dtype="float64", enable_prefix_caching=False)
        self.computed = 0
        self.engine.observers.append(self._count)
        if lane == "with":
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            self.request = self.engine.requests[self.engine.add_request(self.ids, params)]

    def _count(self, plan: Any) -> None:
        self.computed += plan.total_num_scheduled_tokens

    def step(self) -> dict[str, Any]:
        """One token more: its id, positions computed for it, seconds, and whether it ended."""
        before, began = self.computed, time.perf_counter()
        if self.lane == "without":
            params = SamplingParams(max_tokens=1, ignore_eos=True)
            self.request = self.engine.requests[self.engine.add_request(self.ids, params)]
        self.engine.step()
        seconds = time.perf_counter() - began
        token = self.request.output_token_ids[-1]
        self.ids.append(token)
        self.left -= 1
        return {
            "token": token, "positions": self.computed - before, "seconds": seconds,
            "done": self.left == 0,
        }  # fmt: skip


_race: dict[str, Runner] = {}


def start(prompt: str = PROMPT, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """Line both up.

    Raises:
        ValueError: a prompt of no or more than `MOST_BYTES` bytes; a bad number of tokens.
    """
    whole("num_tokens", num_tokens, 1, MOST_TOKENS)
    if not isinstance(prompt, str) or not 1 <= len(data := prompt.encode()) <= MOST_BYTES:
        size = len(prompt.encode()) if isinstance(prompt, str) else type(prompt).__name__
        raise ValueError(f"prompt: {size} bytes; need 1 to {MOST_BYTES}")
    made = {lane: Runner(lane, data, num_tokens) for lane in LANES}
    _race.clear()
    _race.update(made)
    return {"prompt": list(data), "num_tokens": num_tokens}


def advance(lane: str) -> dict[str, Any]:
    """One token more of a lane, as `Runner.step`.

    Raises:
        ValueError: no such lane, no race, or the lane is at its end.
    """
    if lane not in LANES:
        raise ValueError(f"lane={lane!r}: need one of {', '.join(LANES)}")
    if lane not in _race:
        raise ValueError("no race: call start first")
    if not _race[lane].left:
        raise ValueError(f"lane={lane!r}: it has ended")
    return _race[lane].step()


def recorded(prompt: str, num_tokens: int) -> dict[str, Any]:
    """A whole race without its seconds."""
    told: dict[str, Any] = {"prompt": list(prompt.encode()), "num_tokens": num_tokens}
    for lane in LANES:
        runner = Runner(lane, prompt.encode(), num_tokens)
        steps = [runner.step() for _ in range(num_tokens)]
        told[lane] = [[step["token"], step["positions"]] for step in steps]
    return told


QUESTIONS = (
    ("A prompt of 20 bytes, 24 tokens more. How many positions does the cache's lane compute?",
     "with", "total",
     "20 for the prompt, then 23 of one each; the last token is never computed."),
    ("And the lane without a cache, for its first token alone?", "without", "first",
     "The whole prompt."),
    ("For its last token alone?", "without", "last",
     "The prompt and 23 tokens, all again."),
    ("And in all?", "without", "total",
     "20 + 21 + ... + 43."),
)  # fmt: skip


def document() -> dict[str, Any]:
    """The widget's document."""
    race = recorded(PROMPT, NUM_TOKENS)
    questions = []
    for ask, lane, kind, because in QUESTIONS:
        positions = [count for _, count in race[lane]]
        found = {"total": sum(positions), "first": positions[0], "last": positions[-1]}
        questions.append({"ask": ask, "answer": found[kind], "because": because})
    return {
        "race": race, "questions": questions, "bytes": RUNTIME_BYTES,
        "most": {"bytes": MOST_BYTES, "tokens": MOST_TOKENS},
    }  # fmt: skip

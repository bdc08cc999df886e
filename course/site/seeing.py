"""A picture drawn in the page, and what byte-sees says of it: the live part of a widget.

Promises: one engine per worker, loaded at the first call; every number is read off its plans.
Mirrors no upstream file.
"""

from __future__ import annotations

import base64
import functools
from typing import Any

import numpy as np

from labkit.pictures import SIZE, single_question
from mini_vllm import LLM, SamplingParams

BUDGET = 48
"""Tokens of a step; so a picture of 64 is computed in more than one."""
MOST_WORDS = 80
"""Characters of a question."""


@functools.cache
def engine() -> LLM:
    """byte-sees, with room for two pictures in the encoder's cache."""
    return LLM(
        "byte-sees", num_blocks=256, block_size=16, max_num_batched_tokens=BUDGET,
        max_num_encoder_input_tokens=64, encoder_cache_size=128,
    )  # fmt: skip


def example(seed: int) -> str:
    """A drawn thing, as `see` takes it."""
    turn = single_question(np.random.default_rng([13, seed]), "what")
    return base64.b64encode(turn.pictures[0].tobytes()).decode()


def see(pixels: str, question: str) -> dict[str, Any]:
    """Ask about a picture.

    Args:
        pixels: base64 of SIZE x SIZE x 3 bytes, row by row.
        question: put behind the picture, a line break behind it.

    Returns:
        `answer`; `tokens` of the prompt; `found` of them in the prefix cache; `steps` of the
        prompt, each with its tokens and the embeddings whose encoder ran; what is `free` and
        `freeable` in the encoder's cache of `size`.

    Raises:
        ValueError: another number of bytes, or a question that is empty or too long.
    """
    raw = base64.b64decode(pixels)
    if len(raw) != SIZE * SIZE * 3:
        raise ValueError(f"pixels has {len(raw)} bytes: need {SIZE} x {SIZE} x 3")
    question = question.strip()
    if not 0 < len(question) <= MOST_WORDS or "<image>" in question:
        raise ValueError(f"question: need 1 to {MOST_WORDS} characters, and no <image>")
    picture = np.frombuffer(raw, np.uint8).reshape(SIZE, SIZE, 3)
    llm = engine()
    steps: list[list[int]] = []

    def note(plan: Any) -> None:
        encoded, _ = plan.features["multimodal"]
        steps.append([plan.total_num_scheduled_tokens, 64 * sum(map(len, encoded.values()))])

    llm.llm_engine.observers.append(note)
    try:
        prompt = {"prompt": f"<image>{question}\n", "multi_modal_data": {"image": picture}}
        [output] = llm.generate([prompt], SamplingParams(max_tokens=48))
    finally:
        llm.llm_engine.observers.remove(note)
    tokens, found = len(output.prompt_token_ids), output.num_cached_tokens or 0
    computed, of_prompt = found, []
    for step in steps:
        if computed >= tokens:
            break
        of_prompt.append(step)
        computed += step[0]
    stats = llm.llm_engine.feature("multimodal").stats()
    return {
        "answer": output.outputs[0].text, "tokens": tokens, "found": found, "steps": of_prompt,
        "free": stats["num_free_slots"], "freeable": stats["num_freeable_slots"], "size": 128,
    }  # fmt: skip

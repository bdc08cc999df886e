"""Lab 13-04: what a picture costs before it has arrived, and which knob to turn.

From width and height follow tokens, embeddings and patches; from those the steps to the first
token; from the steps a time. What holds:

- C1: tokens are what the prompt grows by; embeddings are what the encoder gives; patches are what
  it works on. A model may have three different numbers.
- C2: a step computes at most its budget of tokens and encodes at most its budget of embeddings. A
  picture is encoded whole, in the step whose chunk first reaches it, and is held until its last
  token is computed.
- C3: a chunk ends in front of a picture that cannot be encoded in this step.

Sources: `transformers` 5.24 (the processors that grade this lab),
`vllm/model_executor/models/llava.py:274` `BaseLlavaMultiModalProcessor._get_prompt_updates`,
`vllm/v1/core/sched/scheduler.py:1096` `Scheduler._try_schedule_encoder_inputs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MODELS = ("llava-1.5", "qwen2-vl", "pixtral")


class Price(NamedTuple):
    """What a picture of some size costs a model (given)."""

    tokens: int
    embeds: int
    patches: int


class Step(NamedTuple):
    """One step on the way to the first token (given)."""

    tokens: int
    encodes: tuple[int, ...]
    """Numbers of the pictures whose encoder runs."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a machine takes, as its owner has measured it; milliseconds (given)."""

    per_megapixel: float
    """Reading and resizing on the processor, before the first step."""
    per_patch: float
    """The encoder."""
    per_token: float
    """Prefill of the language model."""
    per_step: float
    """Whatever a step takes however small it is."""


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Qwen2-VL's size for a picture (given; it is what lab 13-02 asks for)."""
    rows, columns = (round(side / factor) * factor for side in (height, width))
    if rows * columns > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        rows, columns = (
            max(factor, math.floor(side / beta / factor) * factor) for side in (height, width)
        )
    elif rows * columns < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * beta / factor) * factor for side in (height, width))
    return rows, columns


def price(model: str, width: int, height: int, max_pixels: int = 12_845_056) -> Price:
    """What a picture costs (C1).

    - llava-1.5: every picture becomes a square of 336 pixels; patches of 14, one embedding each.
    - qwen2-vl: `smart_resize` with a factor of 28 and at least 3,136 pixels; patches of 14, four of
      them to an embedding.
    - pixtral: a picture with a side above 1,024 is divided by the larger of its sides' ratios to
      1,024, each side rounded down to whole pixels; then each side is padded to whole patches of
      16. One embedding per patch. A token without one ends each row of patches.

    A trace: pixtral, 1,280 x 960: 1,024 x 768, 64 x 48 patches: 3,120 tokens, 3,072 embeddings.

    Args:
        max_pixels: qwen2-vl's limit; the others have none that can be set.

    Raises:
        ValueError: another model, or a side below 1.
    """
    raise NotImplementedError


def steps_to_first_token(
    parts: Sequence[int | Price], max_num_batched_tokens: int, encoder_budget: int
) -> list[Step]:
    """The steps of one prompt that is alone (C2, C3).

    A trace: 55 words, a picture of 3,120 tokens and 2,996 embeddings, 1 word, one of 391 and 376,
    40 words, one of 3,120 and 3,119, 40 words; 4,096 for both budgets. Step 1: 3,607 tokens, both
    first pictures. The third does not fit beside them. Step 2: 3,160 tokens.

    Args:
        parts: words (a number of tokens) and pictures, in the prompt's order.
        encoder_budget: embeddings that a step may compute, and as many are held at a time.

    Raises:
        ValueError: a picture is larger than the budget.
    """
    raise NotImplementedError


def time_to_first_token(
    parts: Sequence[int | Price], steps: Sequence[Step], megapixels: float, costs: Costs
) -> float:
    """Milliseconds from the request to its first token, nobody else being there.

    Every picture is read and resized before the first step; then step after step.

    Args:
        megapixels: of all pictures, as they came.
    """
    raise NotImplementedError


def largest_max_pixels(
    width: int, height: int, words: int, target_ms: float, candidates: Sequence[int], costs: Costs,
    max_num_batched_tokens: int = 8192,
) -> int | None:  # fmt: skip
    """The largest of qwen2-vl's `candidates` whose first token comes within the target.

    The prompt is `words` tokens, then one picture; the encoder's budget is the step's, or the
    picture's embeddings where they are more, as upstream raises it. None: none of them does.
    """
    raise NotImplementedError

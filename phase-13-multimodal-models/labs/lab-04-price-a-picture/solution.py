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
    if model not in MODELS:
        raise ValueError(f"model={model!r}: need one of {', '.join(MODELS)}")
    if width < 1 or height < 1:
        raise ValueError(f"{width} x {height} pixels: need at least 1 each")
    if model == "llava-1.5":
        return Price(576, 576, 576)
    if model == "qwen2-vl":
        rows, columns = smart_resize(height, width, 28, 3136, max_pixels)
        embeds = rows // 28 * (columns // 28)
        return Price(embeds, embeds, 4 * embeds)
    ratio = max(height / 1024, width / 1024)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    rows, columns = (-(-side // 16) for side in (height, width))
    return Price(rows * (columns + 1), rows * columns, rows * columns)


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
    places, end = list[tuple[int, int, int]](), 0  # first token, behind the last, embeddings
    for part in parts:
        size = part if isinstance(part, int) else part.tokens
        if isinstance(part, Price):
            if part.embeds > encoder_budget:
                raise ValueError(f"{part.embeds} embeddings: the budget is {encoder_budget}")
            places.append((end, end + size, part.embeds))
        end += size
    steps, computed, held = list[Step](), 0, set[int]()
    while computed < end:
        stop = min(end, computed + max_num_batched_tokens)
        room = encoder_budget - sum(places[i][2] for i in held)
        encodes = []
        for index, (first, behind, embeds) in enumerate(places):
            if first >= stop:
                break
            if behind <= computed or index in held:
                continue
            if embeds > room:
                stop = first
                break
            room -= embeds
            encodes.append(index)
        steps.append(Step(stop - computed, tuple(encodes)))
        computed = stop
        held = {i for i in {*held, *encodes} if places[i][1] > computed}
    return steps


def time_to_first_token(
    parts: Sequence[int | Price], steps: Sequence[Step], megapixels: float, costs: Costs
) -> float:
    """Milliseconds from the request to its first token, nobody else being there.

    Every picture is read and resized before the first step; then step after step.

    Args:
        megapixels: of all pictures, as they came.
    """
    pictures = [part for part in parts if isinstance(part, Price)]
    total = megapixels * costs.per_megapixel
    for step in steps:
        total += costs.per_step + step.tokens * costs.per_token
        total += sum(pictures[i].patches for i in step.encodes) * costs.per_patch
    return total


def largest_max_pixels(
    width: int, height: int, words: int, target_ms: float, candidates: Sequence[int], costs: Costs,
    max_num_batched_tokens: int = 8192,
) -> int | None:  # fmt: skip
    """The largest of qwen2-vl's `candidates` whose first token comes within the target.

    The prompt is `words` tokens, then one picture; the encoder's budget is the step's, or the
    picture's embeddings where they are more, as upstream raises it. None: none of them does.
    """
    for limit in sorted(candidates, reverse=True):
        picture = price("qwen2-vl", width, height, limit)
        parts = [words, picture]
        encoder_budget = max(max_num_batched_tokens, picture.embeds)
        steps = steps_to_first_token(parts, max_num_batched_tokens, encoder_budget)
        if time_to_first_token(parts, steps, width * height / 1e6, costs) <= target_ms:
            return limit
    return None

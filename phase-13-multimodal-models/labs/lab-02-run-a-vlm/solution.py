"""Lab 13-02: a prompt's length, to the token, and who has answered for a picture.

- R1: a picture's tokens follow from its size and the processor's limits, exactly.
- R2: a prompt has its words, less a marker per picture, and every picture's tokens.
- R3: the second request with a picture may find it in a cache; which one shows in the counts.

Sources: `vllm/model_executor/models/qwen2_vl.py:878` `Qwen2VLProcessingInfo._get_vision_info`,
`vllm/v1/core/kv_cache_utils.py:395` `_gen_mm_extra_hash_keys`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MIN_PIXELS, MAX_PIXELS = 3136, 12_845_056
"""Of Qwen2-VL's checkpoints (given)."""


def smart_resize(
    height: int, width: int, factor: int = 28, min_pixels: int = MIN_PIXELS,
    max_pixels: int = MAX_PIXELS,
) -> tuple[int, int]:  # fmt: skip
    """Height and width that Qwen2-VL brings a picture to (R1).

    Each side becomes the nearest multiple of `factor`, a half going to the even one, as Python's
    `round` has it. If both together are more than `max_pixels`, the sides as they came are divided
    by the root of (their pixels / `max_pixels`) and go down to a multiple, one at least. If they
    are fewer than `min_pixels`, the sides as they came are multiplied likewise and go up.

    A trace: 876 x 1300 becomes 868 x 1288, 31 x 46 tokens.

    Raises:
        ValueError: one side is more than 200 times the other.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"{width} x {height}: need an aspect of at most 200")
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


def qwen2_vl_tokens(
    width: int, height: int, min_pixels: int = MIN_PIXELS, max_pixels: int = MAX_PIXELS
) -> tuple[int, int, int]:
    """Rows, columns and number of a picture's tokens: one for 28 x 28 pixels (R1)."""
    rows, columns = smart_resize(height, width, 28, min_pixels, max_pixels)
    return rows // 28, columns // 28, rows // 28 * (columns // 28)


def prompt_length(num_words: int, picture_tokens: Sequence[int]) -> int:
    """Tokens that the engine schedules (R2).

    Args:
        num_words: tokens of the prompt as it was written, a marker for each picture among them.
        picture_tokens: of each picture.

    Raises:
        ValueError: fewer words than pictures.
    """
    if num_words < len(picture_tokens):
        raise ValueError(f"{num_words} tokens hold no {len(picture_tokens)} markers")
    return num_words - len(picture_tokens) + sum(picture_tokens)


def kv_blocks(num_tokens: int, block_size: int = 16) -> int:
    """Blocks of a prompt."""
    return -(-num_tokens // block_size)


def answered_by(encoder_runs: int, num_cached_tokens: int, picture_end: int) -> str:
    """Who made a picture's encoder and prefill unnecessary (R3).

    Args:
        encoder_runs: of this request.
        num_cached_tokens: prefix hit.
        picture_end: the token behind the picture.

    Returns:
        "prefix cache": its K and V were there; "encoder cache": its rows were, and some of its
        tokens are computed; "nobody": the encoder ran.
    """
    if num_cached_tokens >= picture_end:
        return "prefix cache"
    return "nobody" if encoder_runs else "encoder cache"

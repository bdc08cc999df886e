"""Lab 13-01: a picture becomes tokens, at the door and nowhere else.

A prompt comes with markers and pictures. Before anything is scheduled each marker becomes as many
equal ids as the picture has embeddings, and a range remembers where they stand. What holds:

- P1: the expanded prompt has exactly one id per embedding, and every other token in its old order.
- P2: ranges are in the coordinates of the expanded prompt, in order, and do not overlap.
- P3: as many markers as pictures, or the prompt is refused.

Sources: `vllm/multimodal/inputs.py:119` `PlaceholderRange`,
`vllm/multimodal/processing/processor.py:1528` `BaseMultiModalProcessor._apply_prompt_updates`.
"""

from __future__ import annotations

from dataclasses import dataclass

IMAGE_TOKEN_ID = -100
"""Marker and placeholder alike (given). A real one is in the vocabulary: LLaVA's is 32000."""


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """The tokens that stand for one picture: those from `offset` to `offset + length` (given)."""

    offset: int
    length: int


def image_token_count(width: int, height: int, patch_size: int = 14, merge_size: int = 2) -> int:
    """How many tokens a picture has whose partly filled patches count.

    The picture is cut into patches of `patch_size` pixels a side, and `merge_size` x `merge_size`
    patches become one token. A patch or a group at the edge that is not full is padded.

    A trace: 337 x 336 has 25 x 24 patches, 13 x 12 groups: 156 tokens.

    Args:
        width, height: pixels.

    Raises:
        ValueError: an argument below 1.
    """
    for name, value in (
        ("width", width), ("height", height), ("patch_size", patch_size), ("merge_size", merge_size)
    ):  # fmt: skip
        if value < 1:
            raise ValueError(f"{name}={value}: need at least 1")
    columns, rows = (-(-side // patch_size) for side in (width, height))
    return -(-columns // merge_size) * -(-rows // merge_size)


def expand_prompt(
    token_ids: list[int], image_counts: list[int]
) -> tuple[list[int], list[PlaceholderRange]]:
    """The prompt as the engine sees it, and where its pictures stand (P1, P2, P3).

    The k-th marker becomes `image_counts[k]` copies of `IMAGE_TOKEN_ID`. The list that is given
    stays as it is.

    A trace: [IMG, 7, IMG, IMG, 8] with counts 2, 3, 1 has 8 tokens and the ranges (0, 2), (3, 3),
    (6, 1).

    Raises:
        ValueError: another number of markers than of counts, or a count below 1.
    """
    markers = token_ids.count(IMAGE_TOKEN_ID)
    if markers != len(image_counts):
        raise ValueError(f"{markers} markers for {len(image_counts)} pictures: need one each")
    if any(count < 1 for count in image_counts):
        raise ValueError(f"image_counts={image_counts}: need at least 1 each")
    counts = iter(image_counts)
    expanded: list[int] = []
    ranges = []
    for token in token_ids:
        if token != IMAGE_TOKEN_ID:
            expanded.append(token)
            continue
        count = next(counts)
        ranges.append(PlaceholderRange(len(expanded), count))
        expanded += [IMAGE_TOKEN_ID] * count
    return expanded, ranges


def kv_blocks_needed(num_tokens: int, block_size: int = 16) -> int:
    """Blocks that hold so many tokens; the last may be filled in part.

    Raises:
        ValueError: fewer than 0 tokens, or a block of fewer than 1.
    """
    if num_tokens < 0 or block_size < 1:
        raise ValueError(f"{num_tokens} tokens in blocks of {block_size}: need 0 and 1 at least")
    return -(-num_tokens // block_size)

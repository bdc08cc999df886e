"""Lab 13-05: one request, no error, and a scheduler that plans nothing for ever.

A server with a hybrid model got a prompt with two videos. Each fits the encoder's cache, both
together do not. From then on every plan was empty: 156,000 of them in 25 minutes. Here one prompt
is alone, so whatever stops it is its own doing. What should hold:

- F1: a chunk covers no picture whose embeddings are not there.
- F2: what is there, and what is encoded for this chunk, fits the cache.
- F3: a chunk ends at a block's end, where a model keeps states; see `mended_chunk`.
- F4: a prompt whose every picture fits the cache alone comes to its end.

Sources: `vllm/v1/core/sched/scheduler.py:1096` `Scheduler._try_schedule_encoder_inputs`,
`vllm/v1/core/sched/scheduler.py:279` `Scheduler._mamba_block_aligned_split`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and the sizes it meets (given)."""

    pictures: tuple[tuple[int, int], ...]
    """Offset and length of each, in order and apart; a picture has as many embeddings as tokens."""
    num_tokens: int
    encoder_cache_size: int
    """Embeddings that are kept, and that one step may compute."""
    max_num_batched_tokens: int = 64
    block_size: int = 0
    """Of a model that keeps states at the ends of blocks; 0: it keeps none."""
    eagle: bool = False
    """A drafter reads one token ahead."""


@dataclass(frozen=True, slots=True)
class Walk:
    """What came of a prompt (given)."""

    chunks: list[tuple[int, list[int]]]
    """Tokens of each plan and the pictures that it encodes."""
    ends: bool
    """False: the last chunk is empty, and so would be all that follow."""


Rule = Callable[[Prompt, int, AbstractSet[int]], tuple[int, list[int]]]


def walk(rule: Rule, prompt: Prompt) -> Walk:
    """Chunk after chunk by a rule, until the prompt is computed or a chunk is empty (given).

    A picture is held from the chunk that encodes it until its last token is computed.
    """
    computed, held = 0, set[int]()
    chunks: list[tuple[int, list[int]]] = []
    while computed < prompt.num_tokens:
        tokens, encode = rule(prompt, computed, frozenset(held))
        if tokens <= 0:
            return Walk([*chunks, (0, [])], False)
        chunks.append((tokens, encode))
        computed += tokens
        held |= set(encode)
        held = {i for i in held if sum(prompt.pictures[i]) > computed}
    return Walk(chunks, True)


def room(prompt: Prompt, held: AbstractSet[int]) -> int:
    """Embeddings that can still be put into the cache (given)."""
    return prompt.encoder_cache_size - sum(prompt.pictures[i][1] for i in held)


def pin_chunk(prompt: Prompt, computed: int, held: AbstractSet[int]) -> tuple[int, list[int]]:
    """The next chunk as v0.22.1 plans it: tokens, and the pictures whose encoder runs.

    First the encoder cuts the chunk, then the states align it. It is faithful where the release is
    wrong: 0 tokens are an answer.

    Args:
        computed: tokens of the prompt that are computed.
        held: pictures that are encoded and not yet computed to their ends.
    """
    raise NotImplementedError


def smallest_with_states() -> Prompt:
    """The shortest prompt that never ends at v0.22.1, on a model with states and no drafter."""
    raise NotImplementedError


def smallest_with_a_drafter() -> Prompt:
    """The shortest that never ends with a drafter, on a model without states."""
    raise NotImplementedError


def mended_chunk(prompt: Prompt, computed: int, held: AbstractSet[int]) -> tuple[int, list[int]]:
    """The next chunk, so that F1 to F4 hold.

    F3 in full: a chunk ends at a multiple of `block_size`, counted from the prompt's beginning,
    except at the prompt's end, in front of a picture that cannot be encoded now, and where the
    budget does not reach to the next multiple. A chunk that would reach the prompt's end stops at
    the last multiple before it.

    Raises:
        ValueError: a picture is larger than the cache. No chunk could ever cover it.
    """
    raise NotImplementedError

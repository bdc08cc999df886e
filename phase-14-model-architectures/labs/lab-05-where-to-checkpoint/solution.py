"""Lab 14-05: where the states of a prompt are kept.

A Mamba state stands for all tokens before it and cannot be rewound, so a later prompt can begin
only where a state was kept. In mode "align" that is where a step of a prompt ended. You choose the
places, and the steps follow. Each place costs a step of its own, and a block in each group of
states, of the pool that the keys and values of prompts need as well. What holds:

- C1: a step of a prompt ends at the end of a block, or at the prompt's end. Elsewhere a state would
  be kept under the name of a block that it is not the end of.
- C2: places are ends of blocks, behind what was found, in the prompt, ascending, each once.
- C3: nothing is known of later prompts. What was seen before may be remembered.

Sources: `vllm/v1/core/sched/scheduler.py:293` `Scheduler._mamba_block_aligned_split`, the pin's
choice, and `vllm/v1/core/single_type_kv_cache_manager.py:842` `MambaManager`.
"""

from __future__ import annotations

from collections.abc import Sequence


def cut(places: Sequence[int], start: int, num_new: int, num_tokens: int, block_size: int) -> int:
    """How many of the `num_new` tokens from `start` on the next step of a prompt takes.

    It ends at the next place, if that is within reach (C1). 0 if no end of a block is: the prompt
    waits for a step with more room.

    A trace, blocks of 16, a prompt of 100 tokens, places [64]: from 0 with 100 allowed it takes 64,
    then 36. Without places, of 300 tokens from 0 with 100 allowed: 96.

    Args:
        places: as of `Checkpoints.places`.
        start: tokens computed or found, a multiple of `block_size`.
        num_new: tokens that the budget allows, at most `num_tokens - start`.
        num_tokens: of the prompt.
        block_size: tokens per block.
    """
    end = start + num_new
    for place in places:
        if start < place <= end:
            return place - start
    if end < num_tokens:
        return end // block_size * block_size - start
    return num_new


class Checkpoints:
    """Chooses the places of each prompt, in the order in which prompts are served."""

    def __init__(self, block_size: int) -> None:
        """Nothing was seen yet."""
        self.block_size = block_size
        self._seen: set[int] = set()

    def places(self, prompt: Sequence[int], found: int) -> list[int]:
        """Where states of this prompt are to be kept: numbers of tokens (C2).

        Called once for each prompt, when its first step is planned.

        Args:
            prompt: its tokens.
            found: how many of them need not be computed: a state stands there.
        """
        keys, key, size = [], 0, self.block_size
        for start in range(0, len(prompt) - size + 1, size):
            key = hash((key, tuple(prompt[start : start + size])))
            keys.append(key)
        shared = 0
        while shared < len(keys) and keys[shared] in self._seen:
            shared += 1
        self._seen.update(keys)
        parts, ends = shared * size, len(keys) * size
        return sorted({place for place in (parts, ends) if place > found})

"""Lab 19-03: is this a bug? Five reports, each with the rule that it says is broken.

Each function is given a run and returns the first place at which the rule is broken, or None. What
a function finds in the scheduler's own runs is the verdict, and the argument for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Call = tuple[str, str, list[int]]
Key = tuple[int, float, str]


def taken_between(calls: Sequence[Call]) -> int | None:
    """37076: "between look-up and allocation another request takes the block that was found".

    The rule: a block that was found for a request is handed out to nobody until that request has
    adopted it, or its allocation was allocated or refused, or it looks again. Returned is the place
    of the first call that breaks it.

    Args:
        calls: `("found", request, blocks)`, the cached blocks of its prompt;
            `("adopted", "", blocks)`, hits that the request being allocated takes over;
            `("handed out", "", blocks)`, new blocks, of which the pool forgets what they held;
            `("allocated", request, [])` and `("refused", request, [])`, the end of an allocation.

    Example: found a [1], handed out [2, 1]: 1. Found a [1], adopted [1], handed out [2]: None.
    """
    raise NotImplementedError


def overtaken(keys: Mapping[str, Key], steps: Sequence[Mapping[str, Any]]) -> int | None:
    """41951: "a preempted request is overtaken by another of the same priority".

    The rule of the priority policy: a smaller key is admitted first. Returned is the first step in
    which a request is admitted while one with a smaller key is left waiting.

    Args:
        keys: of each request `(priority, arrival_time, request_id)`, compared in this order.
        steps: each has `admitted`, `preempted` and `waiting`, the last after the step.

    Example: a (0, 1.0, "a") is left waiting and b (0, 2.0, "b") admitted in step 3: 3. With
    a (0, 3.0, "a"), which was preempted before: None.
    """
    raise NotImplementedError


def missed(asks: Sequence[tuple[list[int], int]], size: int) -> int | None:
    """51198: "with prefix caching on, a long common prefix has no hit".

    The rule: every full block that an earlier prompt computed is found again, but the last token
    is always computed. Returned is the place of the first prompt that hits fewer tokens.

    Args:
        asks: prompts in their order, each with the tokens that it hit; nothing is evicted.
        size: tokens of a block.

    Example, blocks of 16: [7] * 15, then the same and one more: 0 hits are right. [7] * 20, then
    the same and one more: 16 are.
    """
    raise NotImplementedError


def passed_over(run: Mapping[str, Any]) -> int | None:
    """26765: "a step plans nothing for a request that runs, with blocks and budget left".

    The rule: who runs gets at least a token while budget and a free block are left. One plan is in
    flight at a time, so who runs lacks at least one. Returned is the first step that breaks it.

    Args:
        run: `budget`, the tokens of a step, and `steps`, each with `num_scheduled_tokens`,
            `preempted`, and `running` and `free_blocks` after planning.
    """
    raise NotImplementedError


def stuck(run: Mapping[str, Any]) -> int | None:
    """44560: "nothing runs any more, and the server says that it is well".

    The rule: a step that plans nothing is followed by one that plans something, or nobody is left.
    Returned is the first of the steps at the end that plan nothing while somebody is left.

    Args:
        run: `steps`, each with `num_scheduled_tokens`, up to the end or to where the run was given
            up, and `left`, who had not ended then.
    """
    raise NotImplementedError

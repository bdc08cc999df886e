"""Lab 15-06: does my decoder prefill again?

A pair is paid for so that the decoder does not compute prompts. Nothing in an answer shows whether
it does: a decoder that computes every prompt again is right and slow. You have its counters, looked
at twice, and the lines of its log in between. What a window shows:

| of `seen` | what it is |
|---|---|
| `block_size` | tokens of a block |
| `prompt_lengths` | of the requests whose first token came in the window |
| `prompt_tokens_by_source` | growth of the counter: `local_compute`, `local_cache_hit`, `external_kv_transfer` |
| `num_preemptions` | growth of `vllm:num_preemptions` |
| `affected` | sum of "(N tokens affected)" in the log's lines about failed loads, policy recompute |

The connector offers its tokens once per request, as NIXL's does, and every load is asynchronous.
When the counters are written is the question; read `vllm/v1/core/sched/scheduler.py:627`
`Scheduler.schedule`.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Seen = Mapping[str, Any]
CAUSES = {
    "moved": "one token per prompt was computed, as it must be",
    "not-offered": "the connector had nothing: no parameters came, or its keys do not match",
    "cached-here": "the connector had nothing, and what was not computed was in D's own cache",
    "rounded": "the connector has whole blocks, and the prompt ends within one",
    "offered-in-part": "the connector has the beginning, and blocks behind it are missing",
    "failed": "a load failed, and what it should have brought was computed",
    "preempted": "D ran out of blocks, and computed again what it had",
}


def computed_bounds(seen: Seen) -> tuple[int, int]:
    """The least and the most prompt tokens that D may have computed in this window.

    Each time that a token of a prompt stands in a plan counts once.

    - D1: what D really computed lies within, in every recorded window.
    - D2: for one request and no preemption the two are equal.
    - D3: for n requests, without failed loads and preemptions, they are at most n - 1 apart;
      without `local_compute` they are equal.
    - D4: a failed load widens them by at most `affected`, a preemption by at most all prompts.
    """
    raise NotImplementedError


def prefills_again(seen: Seen) -> str:
    """ "no": D computed one token per prompt; "yes": it computed more; "cannot say": what is seen
    allows both."""
    raise NotImplementedError


def cause(seen: Seen) -> str:
    """One of `CAUSES` for a window of one request."""
    raise NotImplementedError

"""Lab 12-04: who waits for a grammar, and whose row is which.

A grammar is compiled in the background, so a request may stand in the queue before its grammar is
there. Once it runs, each step needs one row of bits for every position that is sampled, drafts
included, in an order that scheduler and worker share. What holds throughout:

- W1: a request without its grammar is passed over, and only it; nobody waits for its compilation.
- W2: what the grammar refuses ends the request with an error, whatever else would have ended it.
- W3: a row allows what may follow after the drafts before it; the grammar is afterwards where it
  was.
- W4: rows are in scheduling order, logits in the worker's; a row lands on its own request's logits.

Sources: `vllm/v1/core/sched/scheduler.py:2103` `Scheduler._try_promote_blocked_waiting_request`,
`vllm/v1/structured_output/__init__.py:204` `StructuredOutputManager.grammar_bitmask`,
`vllm/v1/structured_output/utils.py:44` `apply_grammar_bitmask`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.request import Request, RequestStatus
from mini_vllm.structured_output.request import constraint_of

NO_DRAFT = -1
"""Stands in a list of drafts where there is none (given)."""
FULL = -1
"""A word whose 32 tokens are all allowed (given)."""


class GrammarGate(Gate):
    """What the scheduler asks about grammars. It keeps one for its whole life.

    A request with a grammar is born with `waits_for = "grammar"` and stands in the second queue.
    `waits_for` is what the second queue shows of it, and None once it waits for room alone.
    """

    def admission(
        self, request: Request, plan: SchedulerOutput
    ) -> Literal["admit", "skip", "stop"]:
        """Whether `request` may enter `plan` (W1).

        "admit", or "skip": it keeps its place and the scan goes on. "stop" would end the scan.
        Asking a grammar that is not there whether it is costs up to 0.1 ms, so each call asks once
        at most, and a request that was told yes is not asked for again, in later steps neither.
        """
        raise NotImplementedError

    def rows(self, plan: SchedulerOutput) -> list[str]:
        """Ids of the requests whose logits get a mask, in scheduling order (W4).

        Chunks of a prompt sample nothing and have no row.

        Args:
            plan: bound, so that `plan.sampling_req_ids` is known.
        """
        raise NotImplementedError


class Constrained:
    """What is added to a request's class: `Constrained` stands before it among the bases."""

    __slots__ = ()
    constraint: Any

    def maybe_finish(self, max_model_len: int | None = None) -> bool:
        """Called when the request has been given a token; whether it has ended (W2).

        The class behind this one ends a request for EOS and for its lengths: it sets `status` and
        says whether it did. `self.constraint.follow(self)` lets the grammar read what is new and is
        False where that was refused; then the status is `RequestStatus.FINISHED_ERROR`.
        """
        raise NotImplementedError


@functools.cache
def constrained(kind: type[Request]) -> Callable[..., Request]:
    """The class of `kind` with `Constrained` before it (given)."""
    return type(f"Constrained{kind.__name__}", (Constrained, kind), {"__slots__": ("constraint",)})


def vet(grammar: Any, drafts: Sequence[int], num_scheduled: int) -> list[int]:
    """The drafts of a request as the step verifies them.

    `num_scheduled` places were planned before the drafts were known, and there are as many
    afterwards: more drafts are cut, what the grammar cannot take and all behind it is `NO_DRAFT`,
    and so is what is missing. The grammar stays where it is, and the list that was given as it was.

    A trace with `[0-9]+` (tokens as characters): drafts 1 x 2 of 3 are [1, -1, -1]; 1 2 3 of 2 are
    [1, 2].

    Args:
        grammar: has `validate_tokens`; None for a request without one, whose drafts all pass.
    """
    raise NotImplementedError


def fill_rows(
    order: Sequence[str],
    grammars: Mapping[str, Any],
    drafts: Mapping[str, Sequence[int]],
    bitmask: np.ndarray,
) -> np.ndarray:
    """The rows of a step: for each request one per draft and one more (W3).

    Row i of a request allows what may follow after its first i drafts. Everything is allowed in the
    rows behind the first `NO_DRAFT`, and once the grammar has ended. For each draft the grammar
    reads one token, and it gives all of them back in one call.

    A trace: `[0-9]+x` with drafts 7, x: digits; digits and x; EOS alone.

    Args:
        order: ids of the requests that get rows.
        grammars: by id. `accept_tokens(request_id, tokens)`, `rollback(num_tokens)`,
            `fill_bitmask(bitmask, row)` and `is_terminated()`, which is True once EOS was read.
        drafts: by id, vetted, so that the grammar takes each; a request without is not in it.
        bitmask: [at least as many rows, words] int32, with whatever the step before left in it.

    Returns:
        [rows, words], the part of `bitmask` that was written.

    Raises:
        ValueError: the grammar refused a draft. It is where it was then.
    """
    raise NotImplementedError


def rows_of_logits(
    batch: Sequence[str], order: Sequence[str], drafts: Mapping[str, Sequence[int]]
) -> list[int | None]:
    """Which row of the bitmask belongs to each row of logits (W4).

    A trace: batch b, a, c; order a, b; one draft for a, two for c: b's row is 2, a's are 0 and 1, c
    has none: [2, 0, 1, None, None, None].

    Args:
        batch: ids in the worker's order. Each has a row of logits per draft, and one more, drafts
            of requests without a grammar included.
        order: ids in the order of the bitmask's rows.

    Returns:
        By row of logits, the row of the bitmask, or None where nothing is masked.
    """
    raise NotImplementedError

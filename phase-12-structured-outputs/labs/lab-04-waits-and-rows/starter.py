"""Lab 12-04: who waits for a grammar, and whose row is which.

A grammar is compiled in the background, so a request may stand in the queue before its grammar is
there. Once it runs, each step needs one row of bits for every position that is sampled, drafts
included, in an order that scheduler and worker share. Three classes are empty: what the real
scheduler and the real manager did is recorded. What holds throughout:

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
from mini_vllm.request import Request

NO_DRAFT = -1
"""Stands in a list of drafts where there is none (given)."""
FULL = -1
"""A word whose 32 tokens are all allowed (given)."""


class OpenGate(Gate):
    """Given: what the scheduler asks about grammars. All may enter, and no logits are masked."""

    def admission(
        self, request: Request, plan: SchedulerOutput
    ) -> Literal["admit", "skip", "stop"]:
        """Whether `request` may enter `plan`: "admit"; "skip": it keeps its place and the scan of
        the queue goes on; "stop": the scan ends. Here everyone may."""
        return "admit"

    def rows(self, plan: SchedulerOutput) -> list[str]:
        """Ids of the requests whose logits get a mask. Here nobody's do.

        Args:
            plan: bound, so that `plan.sampling_req_ids` is known.
        """
        return []


class Free:
    """Given: what stands before a request's class. It asks no grammar."""

    __slots__ = ()
    constraint: Any


class NoRows:
    """Given: what a step with drafts needs of grammars. No draft is kept and no row written."""

    def vet(self, grammar: Any, drafts: Sequence[int], num_scheduled: int) -> list[int]:
        """The drafts of a request as the step verifies them. Here none is.

        Args:
            grammar: has `validate_tokens`; None for a request without one.
            drafts: as they were drafted, more or fewer than planned.
            num_scheduled: places that were planned before the drafts were known.

        Returns:
            `num_scheduled` of them, `NO_DRAFT` where a place has none.
        """
        return [NO_DRAFT] * num_scheduled

    def fill_rows(
        self,
        order: Sequence[str],
        grammars: Mapping[str, Any],
        drafts: Mapping[str, Sequence[int]],
        bitmask: np.ndarray,
    ) -> np.ndarray:
        """The rows of a step. Here there are none.

        Args:
            order: ids of the requests that get rows.
            grammars: by id. `accept_tokens(request_id, tokens)`, `rollback(num_tokens)`,
                `fill_bitmask(bitmask, row)` and `is_terminated()`, which is True once EOS was read.
            drafts: by id, vetted, so that the grammar takes each; a request without is not in it.
            bitmask: [at least as many rows, words] int32, with whatever the step before left in it.

        Returns:
            [rows, words], the part of `bitmask` that was written.

        Raises:
            ValueError: the grammar refused a draft.
        """
        return bitmask[:0]

    def rows_of_logits(
        self, batch: Sequence[str], order: Sequence[str], drafts: Mapping[str, Sequence[int]]
    ) -> list[int | None]:
        """By row of logits, the row of the bitmask that belongs to it, or None. Here no logits.

        Args:
            batch: ids in the worker's order. Each has a row of logits per draft, and one more.
            order: ids in the order of the bitmask's rows.
        """
        return []


@functools.cache
def constrained(kind: type[Request]) -> Callable[..., Request]:
    """The class of `kind` with `Constrained` before it (given)."""
    return type(f"Constrained{kind.__name__}", (Constrained, kind), {"__slots__": ("constraint",)})


class GrammarGate(OpenGate):
    """Who may enter, and whose logits get a mask. The scheduler keeps one for its whole life.

    A request with a grammar is born with `waits_for = "grammar"` and stands in the second queue,
    which shows what each in it waits for; None is room alone. Recorded, seed 70,049, threshold 5,
    three requests with grammars that are ready before step 1:

        step 0    nobody planned            second queue r0, r1, r2, each for "grammar"
        step 1    plan r0: 5, r1: 2, r2: 5  second queue empty    rows r1
        step 2    plan r0: 1, r1: 1, r2: 5                        rows r0, r1

    Must hold: every field of the recorded steps, W1 and W4. Asking a grammar that is not there
    costs up to 0.1 ms: one call asks once at most, and what said yes is not asked again, in later
    steps neither.
    """


class Constrained(Free):
    """A request with a grammar, put before the class of requests: which method changes?

    The class behind it sets `status` and says whether the request ended whenever it was given a
    token, `maybe_finish(max_model_len)`. `self.constraint.follow(self)` lets the grammar read what
    is new and is False where that was refused. Recorded: a request whose EOS the grammar refuses
    ends with `RequestStatus.FINISHED_ERROR`, and so does one at its cap.

    Must hold: W2, and the grammar reads each token once, the last one too.
    """


class GrammarRows(NoRows):
    """Drafts, rows and logits of a step, as the real manager has them in 220 recorded steps.

    Tokens as characters:

        vet [0-9]+           drafts 1 x 2, three places    1, NO_DRAFT, NO_DRAFT
        fill_rows [0-9]+x    drafts 7 x                    digits; digits and x; EOS
        fill_rows [0-9]+x    drafts 7, NO_DRAFT            digits; digits and x; everything
        rows_of_logits       batch b, a, c; order a, b; one draft for a, two for c
                                                           2, 0, 1, None, None, None

    Must hold: W3 and W4, every recorded row. A grammar that has ended is asked for nothing, and one
    that refuses a draft is where it was when the error comes. For each draft the grammar reads one
    token, and gives all of them back in one call. A list that was given stays as it was.
    """

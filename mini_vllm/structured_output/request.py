"""A request whose output a grammar constrains.

Promises: it waits aside from birth until its grammar is there (C6); every token that it is given
after the model's reasoning advances the grammar, and one that the grammar refuses ends it with an
error, whatever else would have ended it. Planned ahead, the tokens of a step are all kept: upstream
asks the grammar after it has appended them. Mirrors
`vllm/v1/structured_output/request.py:21` `StructuredOutputRequest`,
`vllm/v1/request.py:112` `Request.__init__` (the status at birth) and
`vllm/v1/core/sched/scheduler.py:1416` `Scheduler.update_from_output`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from mini_vllm.request import Request, RequestStatus
from mini_vllm.structured_output.compiler import Compilation
from mini_vllm.structured_output.expressions import Grammar, GrammarError
from mini_vllm.structured_output.matcher import Matcher
from mini_vllm.structured_output.params import Key
from mini_vllm.structured_output.reasoning import ReasoningParser

POLL_SECONDS = 0.0001
"""A look at an unfinished grammar waits so long: `vllm/v1/structured_output/request.py:42`
`StructuredOutputRequest._check_grammar_completion`."""


class Constraint:
    """One request's grammar: first on its way, then with a place in it."""

    def __init__(
        self,
        key: Key,
        grammar: Grammar,
        reasoner: ReasoningParser | None = None,
        has_drafts: bool = False,
    ) -> None:
        self.key, self.grammar = key, grammar
        self.reasoner = reasoner
        """None: the grammar reads from the first token."""
        self.reads_last_step = has_drafts and key[0] == "structural_tag"
        """Whether the grammar reads the tokens of the step that ends the reasoning: a structural
        tag does where there are drafts."""
        self.reasoning_ended: int | None = None
        """How many tokens the request had when its reasoning was seen to have ended."""
        self.reads_from = 0
        """How many tokens stand before the first that the grammar then reads."""
        self.num_begun = 0
        """How many tokens stand before those of the step that is updated next."""
        self.step_start = 0
        """How many tokens stand before the first row of the step that runs."""
        self.compilation: Compilation | None = None
        """Set when the request is queued."""
        self.matcher: Matcher | None = None
        self.error = ""
        """Why there will be no grammar."""
        self._tokens: list[int] = []  # what the matcher has accepted

    def is_ready(self) -> bool:
        """Whether the grammar is compiled; a failure is noted in `error`."""
        if self.matcher is None and not self.error and self.compilation is not None:
            future = self.compilation.future
            try:
                compiled = future.result(timeout=POLL_SECONDS)
            except Exception as error:
                if not isinstance(error, NotYet) or future.done():
                    self.error = f"the grammar cannot be compiled: {error}"
                return False
            self.matcher = compiled.matcher()
        return self.matcher is not None

    def grammar_start(self, request: Request, in_flight: Sequence[int] = ()) -> int | None:
        """How many tokens stand before the first that the grammar reads; None: it reads none yet.

        Asked before the update of the step that runs, and the real manager is asked after it: of
        tokens that no update has seen, the last one of a step can end the reasoning. As
        `vllm/v1/structured_output/__init__.py:302` `StructuredOutputManager.should_fill_bitmask`.

        Args:
            request: its tokens, which may hold those of the step before, and drafts.
            in_flight: whole steps that it does not hold.
        """
        prompt = request.num_prompt_tokens
        if self.reasoner is None:
            return prompt
        if self.reasoning_ended is not None:
            return self.reads_from
        tokens: Sequence[int] = request.all_token_ids
        steps = [(self.num_begun, self.step_start)]
        if in_flight:
            steps.append((self.step_start, len(tokens) + len(in_flight)))
            tokens = [*tokens, *in_flight]
        ended = self.reasoner.is_reasoning_end_streaming
        for start, end in steps:
            if end > prompt and ended(tokens[end - 1 : end]):
                return start if self.reads_last_step else end
        return None

    def begin_step(self, request: Request, num_tokens: int) -> None:
        """A step runs whose first row follows `num_tokens` tokens."""
        is_first, self.step_start = not self.step_start, num_tokens
        self.num_begun = request.num_tokens
        if self.reasoning_ended is not None and self.reasoning_ended > request.num_tokens:
            self.reasoning_ended = None  # a step was taken back
        if self.reasoner is not None and is_first:
            prompt = request.all_token_ids[: request.num_prompt_tokens]
            if self.reasoner.is_reasoning_end(prompt):
                self.reasoning_ended = self.reads_from = len(prompt)

    def follow(self, request: Request) -> bool:
        """Read the tokens that an update has appended; False: the grammar refuses one.

        Of a step that ends the reasoning no token is read, or all are, see `reads_last_step`. The
        step is told by its last token: the counter stands behind the drafts that were accepted. A
        request that was preempted with a step in flight is told by all its tokens. As
        `vllm/v1/structured_output/__init__.py:322` `StructuredOutputManager.should_advance`.
        """
        if self.reasoner is None or self.reasoning_ended is not None:
            return self.catch_up(request)
        num_new = request.num_tokens - self.num_begun
        num_pending = max(request.num_output_placeholders - num_new, 0)
        start = request.num_computed_tokens - num_pending
        if start < 0:
            start = max(request.num_tokens + start, 0)
        if self.reasoner.is_reasoning_end_streaming(request.all_token_ids[start:]):
            self.reasoning_ended = request.num_tokens
            self.reads_from = self.num_begun if self.reads_last_step else request.num_tokens
            return self.catch_up(request)
        return True

    def catch_up(self, request: Request, start: int | None = None) -> bool:
        """Come to the request's last token, over new ones and back over those that are gone.

        Args:
            request: its tokens.
            start: how many stand before the grammar's first; None: as `grammar_start`.
        """
        matcher, known = self.matcher, self._tokens
        if matcher is None:
            return False
        if start is None and (start := self.grammar_start(request)) is None:
            return True
        tokens = request.all_token_ids[start:]
        if known != tokens[: len(known)]:
            same = next((i for i, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b),
                        min(len(known), len(tokens)))  # fmt: skip
            matcher.rollback(len(known) - same)
            del known[same:]
        for token in tokens[len(known) :]:
            try:
                accepted = matcher.accept_tokens(request.request_id, [token])
            except GrammarError:  # too many readings
                accepted = False
            if not accepted:
                return False
            known.append(token)
        return True


class _Constrained:
    """What is added to a request."""

    __slots__ = ()
    constraint: Any

    def append_output_tokens(
        self, token_ids: Sequence[int], max_model_len: int | None = None
    ) -> bool:
        """As `Request.append_output_tokens`; a refused token ends it behind the others."""
        request: Any = self
        self.constraint.num_begun = request.num_tokens
        ended = False
        for token_id in token_ids:
            request.append_output_token(token_id)
            if ended := super().maybe_finish(max_model_len):  # type: ignore[misc]
                break
        return self._judged(ended)

    def maybe_finish(self, max_model_len: int | None = None) -> bool:
        """As `Request.maybe_finish`, and with an error where the last token was refused."""
        return self._judged(super().maybe_finish(max_model_len))  # type: ignore[misc]

    def _judged(self, ended: bool) -> bool:
        """Whether it has ended, now that the grammar has seen its tokens."""
        request: Any = self
        if not self.constraint.follow(request):
            request.status = RequestStatus.FINISHED_ERROR
            request.stop_reason = "the grammar refused a token"
            return True
        return ended


@functools.cache
def constrained(kind: Callable[..., Request]) -> Callable[..., Request]:
    """The request class that adds a `constraint` to `kind`, the engine's own or a learner's.

    Raises:
        ValueError: `kind` is no class, or its requests cannot wait aside.
    """
    name = getattr(kind, "__name__", type(kind).__name__)
    if not isinstance(kind, type) or not hasattr(kind, "waits_for"):
        raise ValueError(f"request part {name}: has no waits_for, needed for structured_outputs")
    return type(f"Constrained{name}", (_Constrained, kind), {"__slots__": ("constraint",)})


def constraint_of(request: Request) -> Any:
    """Its constraint, or None for a free request."""
    return getattr(request, "constraint", None)

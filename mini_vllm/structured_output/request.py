"""A request whose output a grammar constrains.

Promises: it waits aside from birth until its grammar is there (C6); every token that it is given
advances the grammar, and one that the grammar refuses ends it with an error, whatever else would
have ended it. Planned ahead, the tokens of a step are all kept: upstream asks the grammar after it
has appended them. Mirrors `vllm/v1/structured_output/request.py:21` `StructuredOutputRequest`,
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

POLL_SECONDS = 0.0001
"""A look at an unfinished grammar waits so long: `vllm/v1/structured_output/request.py:42`
`StructuredOutputRequest._check_grammar_completion`."""


class Constraint:
    """One request's grammar: first on its way, then with a place in it."""

    def __init__(self, key: Key, grammar: Grammar) -> None:
        self.key, self.grammar = key, grammar
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

    def follow(self, request: Request) -> bool:
        """Come to the request's last token, over new ones and back over those that are gone."""
        matcher, known = self.matcher, self._tokens
        if matcher is None:
            return False
        tokens = request.all_token_ids[request.num_prompt_tokens :]
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

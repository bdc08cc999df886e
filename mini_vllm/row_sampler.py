"""From the logits of a step to its tokens: each request's rows, processors and random numbers.

Promises: a request draws from a generator of its own, so its tokens do not depend on its batch
mates; a generator can go back to where it stood before a step that did not happen. Mirrors
`vllm/v1/worker/gpu_model_runner.py:3481` `GPUModelRunner._sample`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mini_vllm.feature import RowMask
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.sample.logprobs import RequestLogprobs, gather
from mini_vllm.sample.processors import LogitsProcessor
from mini_vllm.sampler import Sampler

TokenLists = dict[str, list[int]]
"""Per request that caught up, its tokens of a step."""
RowFn = Callable[[int], np.ndarray]
DrawFn = Callable[[np.ndarray], int]
ChooseTokens = Callable[
    # In quotes: `np.random` imports numpy's generators, which takes a page some 0.2 s.
    [Request, Sequence[int], RowFn, DrawFn, "np.random.Generator | None"], Iterable[int]
]
"""Gives a request's tokens of a step one by one, of its drafts, of what gives row i of its logits,
processed, and of what draws from a row. A row is read once the tokens before it are given."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request gets no token."""

    reason: str
    kv: Literal["valid", "unwritten", "suspect"] = "valid"
    """What it leaves in the KV cache: what was planned, or without what this step should have
    written, or K and V that may be as wrong as its logits."""


class _NoTokenAllowedError(Exception):
    """The processors left no token of a row, or nothing that can be compared."""


class RowSampler:
    """The sampler part and what it is asked with."""

    def __init__(
        self,
        sampler: Sampler,
        logits_processors: Sequence[LogitsProcessor],
        seed: int,
        choose_tokens: ChooseTokens | None = None,
        masks: list[RowMask] | None = None,
    ) -> None:
        self.sampler = sampler
        self.logits_processors = list(logits_processors)
        self.seed = seed
        self.choose_tokens = choose_tokens
        """What takes a request's tokens from several rows; None: one token from one row."""
        self.masks = [] if masks is None else masks
        self.generators: dict[str, np.random.Generator] = {}
        """Of the live requests with a temperature."""
        self._states: dict[str, dict[int, Any]] = {}  # before the draw of token number ...
        self._with_prompt_logprobs: set[str] = set()

    def add_request(self, request: Request, number: int) -> None:
        """Give a request with a temperature its generator, and room for the logprobs it wants.

        Without a seed of its own it gets a stream of its own, by its `number` in order of adding.
        """
        params = request.sampling_params
        self._states.pop(request.request_id, None)
        if params.temperature > 0.0:
            own = params.seed if params.seed is not None else (self.seed, number)
            self.generators[request.request_id] = np.random.default_rng(own)
        if params.num_logprobs is not None or params.prompt_logprobs is not None:
            request.logprobs = RequestLogprobs()
        if params.prompt_logprobs is not None:
            self._with_prompt_logprobs.add(request.request_id)

    def rewind(self, request_id: str, num_tokens: int) -> None:
        """Forget the draws after the request's first `num_tokens` tokens."""
        generator = self.generators.get(request_id)
        state = self._states.get(request_id, {}).get(num_tokens)
        if generator is not None and state is not None:
            generator.bit_generator.state = state

    def remove_request(self, request_id: str) -> None:
        """The request is gone."""
        self.generators.pop(request_id, None)
        self._states.pop(request_id, None)
        self._with_prompt_logprobs.discard(request_id)

    def failures(self) -> dict[str, Failure]:
        """The requests that will never have a row, and why."""
        if not self.masks:
            return {}
        return {r: Failure(why) for m in self.masks for r, why in m.failures().items()}

    def plan_prompt_rows(self, plan: SchedulerOutput) -> None:
        """Note in a bound plan which rows of prompts are wanted."""
        for request in plan.scheduled_requests if self._with_prompt_logprobs else ():
            request_id, last = request.request_id, request.num_prompt_tokens - 1
            if request_id not in self._with_prompt_logprobs:
                continue
            start = plan.num_computed_tokens[request_id]
            if start < last and len(request.logprobs.prompt) < last:
                plan.prompt_rows[request_id] = plan.num_scheduled_tokens[request_id] - 1

    def sample(
        self, plan: SchedulerOutput, logits: np.ndarray, in_flight: dict[str, Sequence[int]]
    ) -> tuple[TokenLists, dict[str, Failure]]:
        """Tokens for every request that caught up, and what was wrong with the other rows (S4).

        Args:
            plan: the bound plan.
            logits: [plan.num_rows, vocab_size] what the model made of it.
            in_flight: per request tokens that the scheduler does not know yet.

        Raises:
            RuntimeError: the model or the sampler part returned what it must not.
        """
        if np.ndim(logits) != 2 or len(logits) != plan.num_rows:
            raise RuntimeError(
                f"model: forward returned shape {np.shape(logits)}, need {plan.num_rows} rows: one "
                f"row of logits for each of {len(plan.scheduled_requests)} scheduled requests, and "
                "one per draft and prompt row"
            )
        # False where a row holds a NaN or +inf anywhere, or -inf everywhere.
        finite: list[bool] = np.isfinite(logits.max(axis=1)).tolist()
        all_finite = all(finite)
        sampled: TokenLists = {}
        failures: dict[str, Failure] = {}
        first = 0
        for request in plan.scheduled_requests:
            request_id = request.request_id
            count = plan.rows_of(request_id)
            rows = logits[first : first + count]
            first += count
            is_wanted = request_id in plan.sampling_req_ids or request_id in plan.prompt_rows
            if not all_finite and is_wanted and not all(finite[first - count : first]):
                failures[request_id] = Failure("the model's logits hold NaN or infinity", "suspect")
                continue
            if request_id in plan.prompt_rows:
                self._note_prompt(request, plan.num_computed_tokens[request_id], rows)
                rows = rows[plan.prompt_rows[request_id] :]
            if request_id not in plan.sampling_req_ids:
                continue
            drafts = plan.spec_token_ids.get(request_id, ())
            end = plan.num_computed_tokens[request_id] + plan.num_scheduled_tokens[request_id]
            unknown = in_flight.get(request_id, ())[: end - len(drafts) - request.num_tokens]
            num_known = request.num_tokens
            for token in unknown:
                request.append_output_token(token)
            try:
                sampled[request_id] = self._tokens(request, rows, drafts)
            except _NoTokenAllowedError as error:
                failures[request_id] = Failure(f"the request's wishes leave {error}")
            finally:  # the scheduler appends what it takes
                del request.all_token_ids[num_known:]
                request.num_tokens = num_known
        return sampled, failures

    def _tokens(self, request: Request, rows: np.ndarray, drafts: Sequence[int]) -> list[int]:
        """One token, and before it those drafts that the target agrees with.

        While a row is processed the request holds every token before it. A later row that leaves no
        token is not an error yet: a token before it may have ended the request, and if none has,
        the row comes first in the next step.
        """
        num_known = request.num_tokens
        generator = self._at(request.request_id, num_known)
        masked: list[np.ndarray] = []
        if self.choose_tokens is None:
            tokens = [self._draw(request, self._processed(request, rows[0], masked), generator)]
        else:

            def row(index: int) -> np.ndarray:
                return self._processed(request, rows[index], masked)

            def draw(row: np.ndarray) -> int:
                return self._draw(request, row, generator)

            tokens = []
            try:
                for token in self.choose_tokens(request, drafts, row, draw, generator):
                    tokens.append(token)
                    request.append_output_token(token)
            except _NoTokenAllowedError:
                if not tokens:
                    raise
        params = request.sampling_params
        if (count := params.num_logprobs) is not None:
            noted = request.logprobs.sample
            del noted[num_known - request.num_prompt_tokens :]
            which = count if params.logprob_token_ids is None else params.logprob_token_ids
            noted += [gather(masked[i], token, which) for i, token in enumerate(tokens)]
        return tokens

    @staticmethod
    def _note_prompt(request: Request, start: int, rows: np.ndarray) -> None:
        """The logprobs of the prompt tokens after positions `start`, `start` + 1, ..."""
        count, noted = request.sampling_params.prompt_logprobs, request.logprobs.prompt
        del noted[start:]
        following = request.all_token_ids[start + 1 : request.num_prompt_tokens]
        noted += [
            gather(row, token, count or 0) for row, token in zip(rows, following, strict=False)
        ]

    def _at(self, request_id: str, position: int) -> np.random.Generator | None:
        """The request's generator, its state noted for a restart before token `position`."""
        generator = self.generators.get(request_id)
        if generator is not None:
            states = self._states.setdefault(request_id, {})
            states[position] = generator.bit_generator.state
            while len(states) > 2:  # this step's, and that of the one in flight
                del states[min(states)]
        return generator

    def _processed(self, request: Request, row: np.ndarray, masked: list[np.ndarray]) -> np.ndarray:
        """The row [vocab_size] after masks and processors, in their order; `masked` gets it as it
        was in between."""
        raw = row
        for mask in self.masks:
            row = mask(request, row)
        masked.append(row)
        for processor in self.logits_processors:
            row = processor(request, row)
        if row is not raw and not np.isfinite(highest := row.max()):
            none = highest == -np.inf
            raise _NoTokenAllowedError("no token" if none else "logits that are NaN or infinite")
        return row

    def _draw(
        self, request: Request, row: np.ndarray, generator: np.random.Generator | None
    ) -> int:
        """The sampler part's token, checked."""
        token = self.sampler.sample(row, request.sampling_params, generator)
        if not isinstance(token, int | np.integer) or not 0 <= token < len(row):
            raise RuntimeError(
                f"sampler part {type(self.sampler).__name__}: returned {token!r} for request "
                f"{request.request_id!r}, need a token id from 0 to {len(row) - 1}"
            )
        return int(token)

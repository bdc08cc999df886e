"""`thinking_token_budget`: after that many tokens of reasoning, the mark that ends it is forced.

Promises: what is forced is a function of the prompt and the tokens so far, so that preemption,
undone steps and batch mates change nothing. Mirrors what
`vllm/v1/sample/thinking_budget_state.py:33` `ThinkingBudgetStateHolder` forces without drafts, of
a request that stays in its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from mini_vllm.feature import Feature
from mini_vllm.features import EngineSetup
from mini_vllm.request import Request
from mini_vllm.tokenizer import Tokenizer

FORCED_LOGIT = 1e9
"""The forced token's logit, upstream's; the others stay, and have no chance."""
MARKS = "reasoning_start_str", "reasoning_end_str"
"""What `reasoning_config` holds: the texts around the reasoning."""


class ThinkingBudget(Feature):
    """The last of the processors: no other edit can take a forced token back."""

    name = "thinking_budget"

    def __init__(self, start: Sequence[int], end: Sequence[int]) -> None:
        """The token ids of the marks; neither is empty."""
        self.start, self.end = list(start), list(end)

    @classmethod
    def of(cls, config: object, tokenizer: Tokenizer) -> Self:
        """From `reasoning_config`; as `vllm/config/reasoning.py:12` `ReasoningConfig`, of which
        the name of a parser is not taken.

        Raises:
            ValueError: not a mapping of `MARKS` to texts, or a tokenizer that adds to a text.
        """
        if not isinstance(config, Mapping) or {*config} != {*MARKS}:
            raise ValueError(f"reasoning_config={config!r}: need a dict of {' and '.join(MARKS)}")
        for name in MARKS:
            if not isinstance(config[name], str) or not config[name]:
                raise ValueError(f"{name}={config[name]!r}: need a text that is not empty")
        if tokenizer.encode(""):
            raise ValueError(
                "reasoning_config: need a tokenizer that encodes texts and adds no token"
            )
        start, end = (tokenizer.encode(config[name]) for name in MARKS)
        return cls(start, end)

    def __call__(self, request: Request, row: np.ndarray) -> np.ndarray:
        """The row [vocab_size] as given, or a new one with one token forced."""
        budget = request.sampling_params.thinking_token_budget
        if budget is None:
            return row
        tokens = request.all_token_ids[: request.num_tokens]
        count = request.num_prompt_tokens
        token = self.forced_token(tokens[:count], tokens[count:], budget)
        if token is None:
            return row
        row = row.copy()
        row[token] = FORCED_LOGIT
        return row

    def forced_token(self, prompt: list[int], output: list[int], budget: int) -> int | None:
        """The token that must come after `output`, or None where the model is free.

        Only one block is limited: the one that the prompt leaves open, or the first of the output.
        """
        opened = _find_last(prompt, self.start)
        if opened > _find_last(prompt, self.end):
            thought = len(prompt) - opened - len(self.start)
            ends_at = 0
            if thought < budget:  # each further token of a long start mark buys one more
                ends_at = budget - thought + len(self.start) - 1
            ended = _find(output, self.end)
            if ended >= 0 and ended + len(self.end) <= ends_at:
                return None
            return self._mark(len(output) - ends_at)
        opened = _find(output, self.start)
        if opened < 0:
            return None
        ends_at = opened + len(self.start) + budget
        ended = _find(output, self.end)
        if ended < 0 or opened <= ended:
            if ended >= 0 and ended + len(self.end) <= ends_at:
                return None
            return self._mark(len(output) - ends_at)
        # An end stood before the start, and upstream looks for one end only: it never sees the
        # block close, and forces the mark again and again.
        since = len(output) - ends_at
        return self._mark(since % (len(self.end) + max(budget, 1)) if since >= 0 else since)

    def _mark(self, place: int) -> int | None:
        """Token `place` of the end mark; None outside it."""
        return self.end[place] if 0 <= place < len(self.end) else None


def _find(tokens: list[int], mark: list[int]) -> int:
    """Where `mark` first stands in `tokens`, or -1."""
    at, last = -1, len(tokens) - len(mark)
    while True:
        try:
            at = tokens.index(mark[0], at + 1, last + 1) if last >= 0 else -1
        except ValueError:
            return -1
        if at < 0 or tokens[at : at + len(mark)] == mark:
            return at


def _find_last(tokens: list[int], mark: list[int]) -> int:
    """Where `mark` last stands in `tokens`, or -1."""
    at = _find(tokens[::-1], mark[::-1])
    return -1 if at < 0 else len(tokens) - at - len(mark)


def open_room(arguments: Mapping[str, Any], setup: EngineSetup) -> ThinkingBudget:
    """The budget of every request that has one.

    Raises:
        ValueError: no `reasoning_config` or a wrong one, or an argument beside it that was not
            compared.
    """
    if "reasoning_config" not in arguments:
        raise ValueError("thinking_token_budget: need an engine with reasoning_config")
    for name, value in setup.arguments.items():
        off = value is False or (value == 1 and value is not True)
        if name != "reasoning_config" and not off:
            raise ValueError(f"reasoning_config with {name}={value!r}: need {name} left out")
    budget = ThinkingBudget.of(arguments["reasoning_config"], setup.load().tokenizer)
    setup.last_processors.append(budget)
    return budget

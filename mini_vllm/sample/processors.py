"""What edits a row of logits before a token is chosen, in upstream's order.

Promises: a processor returns a new row or the one it was given, never a changed one; while it runs
the request holds every token before the one to be chosen. The order is that of
`vllm/v1/sample/sampler.py:366` `Sampler.apply_logits_processors`: allowed tokens, bad words, least
length, bias, a caller's own, penalties. All can change the greedy token, so all run before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mini_vllm.request import Request

LogitsProcessor = Callable[[Request, np.ndarray], np.ndarray]
"""(request, [vocab_size]) to a row [vocab_size]."""


def in_order(
    eos_token_ids: Sequence[int], own: Sequence[LogitsProcessor] = ()
) -> list[LogitsProcessor]:
    """The built-in processors with a caller's `own` ones at their place."""
    return [allowed_tokens, bad_words, MinTokens(eos_token_ids), logit_bias, *own, penalties]


def allowed_tokens(request: Request, row: np.ndarray) -> np.ndarray:
    """Nothing but `allowed_token_ids`.

    Mirrors the mask of `vllm/v1/sample/sampler.py:366` `Sampler.apply_logits_processors`.
    """
    allowed = request.sampling_params.allowed_token_ids
    if allowed is None:
        return row
    masked = np.full_like(row, -np.inf)
    ids = list(allowed)
    masked[ids] = row[ids]
    return masked


def bad_words(request: Request, row: np.ndarray) -> np.ndarray:
    """No last token of a bad word where the output ends with the tokens before it.

    Mirrors `vllm/v1/sample/ops/bad_words.py:30` `apply_bad_words`: the prompt does not count.
    """
    words = request.sampling_params._bad_words_token_ids
    if not words:
        return row
    longest = max(map(len, words)) - 1
    first = max(request.num_prompt_tokens, request.num_tokens - longest)
    tail = request.all_token_ids[first : request.num_tokens]
    banned = [
        word[-1]
        for word in words
        if len(word) <= len(tail) + 1 and tail[len(tail) - len(word) + 1 :] == list(word[:-1])
    ]
    return _without(row, banned)


class MinTokens:
    """No EOS and no stop token before `min_tokens` outputs.

    Mirrors `vllm/v1/sample/logits_processor/builtin.py:167` `MinTokensLogitsProcessor`.
    """

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_ids = tuple(eos_token_ids)

    def __call__(self, request: Request, row: np.ndarray) -> np.ndarray:
        params = request.sampling_params
        if request.num_output_tokens >= params.min_tokens:
            return row
        stops = (*self.eos_token_ids, *params.stop_token_ids)
        return _without(row, [token for token in stops if token < len(row)])


def logit_bias(request: Request, row: np.ndarray) -> np.ndarray:
    """`logit_bias` added.

    Mirrors `vllm/v1/sample/logits_processor/builtin.py:118` `LogitBiasLogitsProcessor`.
    """
    bias = request.sampling_params.logit_bias
    if bias is None:
        return row
    row = row.copy()
    row[list(bias)] += np.fromiter(bias.values(), row.dtype, len(bias))
    return row


def penalties(request: Request, row: np.ndarray) -> np.ndarray:
    """Repetition over prompt and output, then frequency and presence over the output.

    Mirrors `vllm/model_executor/layers/utils.py:51` `apply_penalties`, which too counts the tokens
    anew for every row.
    """
    params = request.sampling_params
    repetition = params.repetition_penalty
    frequency, presence = params.frequency_penalty, params.presence_penalty
    if repetition == 1.0 and frequency == 0.0 and presence == 0.0:
        return row
    tokens = np.array(request.all_token_ids, dtype=np.int64)
    row = row.copy()
    if repetition != 1.0:
        seen = np.bincount(tokens, minlength=len(row))[: len(row)] > 0  # [vocab_size]
        row[seen] *= np.where(row[seen] > 0, 1.0 / repetition, repetition).astype(row.dtype)
    if frequency or presence:
        counts = np.bincount(tokens[request.num_prompt_tokens :], minlength=len(row))
        row -= (frequency * counts + presence * (counts > 0)).astype(row.dtype)
    return row


def _without(row: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    """The row with these tokens impossible."""
    if not token_ids:
        return row
    row = row.copy()
    row[list(token_ids)] = -np.inf
    return row

"""Log-probabilities of tokens, taken from the logits before anything edits them.

Promises: one entry per token, the sampled token's first; float64 inside. Mirrors
`vllm/v1/sample/sampler.py:304` `Sampler.gather_logprobs`, `vllm/v1/sample/sampler.py:146`
`Sampler.gather_specific_token_logprobs` and `vllm/v1/engine/logprobs.py:30` `LogprobsProcessor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mini_vllm.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_MOST_CONTEXT = 4  # tokens before one that may hold the first bytes of its character


@dataclass(slots=True)
class Logprob:
    """One token's log-probability; fields as `vllm/logprobs.py:12` `Logprob`."""

    logprob: float
    """Natural logarithm."""
    rank: int | None = None
    """1 is the likeliest. Of `logprob_token_ids`, the place in the list, as upstream counts."""
    decoded_token: str | None = None


@dataclass(slots=True)
class TokenLogprobs:
    """What was noted of one position."""

    token_ids: list[int]
    """The token that stands there, then the likeliest ones, or those that were asked for."""
    logprobs: list[float]
    rank: int
    """Of the token that stands there: how many are at least as likely, itself counted."""


@dataclass(slots=True)
class RequestLogprobs:
    """What was noted of one request, by position; a step that is run again overwrites its own."""

    sample: list[TokenLogprobs] = field(default_factory=list)
    """Of output token i."""
    prompt: list[TokenLogprobs] = field(default_factory=list)
    """Of prompt token i + 1."""


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural log of the probabilities of logits [..., vocab_size], in float64."""
    logits = np.asarray(logits, dtype=np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def gather(logits: np.ndarray, token_id: int, which: int | Sequence[int]) -> TokenLogprobs:
    """The entry of one position.

    Args:
        logits: [vocab_size] as the model gave them.
        token_id: the token that stands there.
        which: how many of the likeliest, -1 for all, of equal ones the lower id first; or the ids.
    """
    logprobs = log_softmax(logits)
    if isinstance(which, int):
        count = len(logprobs) if which < 0 else min(which, len(logprobs))
        others = np.argsort(-logprobs, kind="stable")[:count].tolist()
    else:
        others = list(which)
    ids = [token_id, *others]
    rank = int((logprobs >= logprobs[token_id]).sum())
    return TokenLogprobs(ids, logprobs[ids].tolist(), rank)


def as_dicts(
    entries: Sequence[TokenLogprobs], before: Sequence[int], tokenizer: Tokenizer
) -> list[dict[int, Logprob]]:
    """One dict per position, token id to `Logprob`, the token that stands there first.

    Args:
        entries: of consecutive positions.
        before: the tokens before the first of them, which a character may have begun in.
        tokenizer: gives `decoded_token`.
    """
    context = list(before)
    dicts: list[dict[int, Logprob]] = []
    for entry in entries:
        ranks = [entry.rank, *range(1, len(entry.token_ids))]
        dicts.append(
            {
                token: Logprob(logprob, rank, _text(token, context, tokenizer))
                for token, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True)
            }
        )
        context.append(entry.token_ids[0])
    return dicts


def _text(token: int, context: Sequence[int], tokenizer: Tokenizer) -> str:
    """A token's text; "" while it leaves a character unfinished, and the whole character for the
    token that completes one.

    As `vllm/v1/engine/logprobs.py:249` `LogprobsProcessor._correct_decoded_token`.
    """
    text = tokenizer.decode([token])
    if not text.endswith(_UNFINISHED):
        return text
    for length in range(1, min(len(context), _MOST_CONTEXT) + 1):
        start = list(context[len(context) - length :])
        whole = tokenizer.decode([*start, token])
        if whole.endswith(_UNFINISHED):
            continue
        while start and tokenizer.decode(start[-1:]).endswith(_UNFINISHED):
            start.pop()
        return whole[len(tokenizer.decode(start)) :]
    return ""

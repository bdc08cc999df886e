"""Which drafts the target keeps, and the token it says itself.

Promises: what comes out is distributed as the target's own samples, whatever the drafter was
(arXiv 2211.17192, theorem 1); greedy output is the target's argmax, token by token. Mirrors
`vllm/v1/sample/rejection_sampler.py:392` `rejection_sample`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mini_vllm.sampler import softmax


def accepts(p: np.ndarray, q: np.ndarray | None, draft: int, uniform: float) -> bool:
    """Whether a draft is kept: with probability min(1, p/q).

    Args:
        p: [vocab_size] the target's law.
        q: [vocab_size] the law the draft was drawn from; None: it was certain.
        draft: token id.
        uniform: a draw from [0, 1).

    Returns:
        True when p/q reaches the draw. A draft of probability 0 under q is not kept.
    """
    if q is None:
        return bool(p[draft] >= uniform)
    return bool(q[draft] > 0.0 and p[draft] / q[draft] >= uniform)


def recover(p: np.ndarray, q: np.ndarray | None, draft: int, exponentials: np.ndarray) -> int:
    """A token of the residual law max(p - q, 0), in place of a draft that was not kept.

    The race of `vllm/v1/sample/rejection_sampler.py:854` `sample_recovered_tokens_kernel`: weights
    divided by exponential draws, largest first, needs no normalisation.

    Args:
        p, q, draft: as for `accepts`; without q the residual is p without the draft.
        exponentials: [vocab_size] draws from Exp(1).

    Returns:
        A token id.
    """
    if q is None:
        residual = p.copy()
        residual[draft] = 0.0
    else:
        residual = np.maximum(p - q, 0.0)
    return int((residual / exponentials).argmax())


def rejection_sample(
    draft_token_ids: Sequence[Sequence[int]],
    draft_probs: np.ndarray | None,
    target_logits: np.ndarray,
    bonus_token_ids: Sequence[int],
    is_greedy: Sequence[bool],
    uniforms: np.ndarray,
    exponentials: np.ndarray,
) -> list[list[int]]:
    """A whole batch, from logits to tokens.

    Args:
        draft_token_ids: per request its drafts, maybe none.
        draft_probs: [num_drafts, vocab_size] the laws they were drawn from, or None.
        target_logits: [num_drafts, vocab_size], temperature and filters applied.
        bonus_token_ids: per request the target's token after the last draft.
        is_greedy: per request whether only the argmax counts.
        uniforms: [num_drafts] draws from [0, 1).
        exponentials: [num_requests, vocab_size] draws from Exp(1), one row for all drafts of a
            request, of which at most one is used.

    Returns:
        Per request one token more than drafts were kept.

    Raises:
        ValueError: arrays that do not fit each other.
    """
    num_drafts = sum(map(len, draft_token_ids))
    wrong = target_logits.ndim != 2 or len(target_logits) != num_drafts
    if wrong or (draft_probs is not None and draft_probs.shape != target_logits.shape):
        raise ValueError(
            f"target_logits={target_logits.shape}: need [{num_drafts}, vocab_size], one row per "
            "draft, and draft_probs of the same shape or None"
        )
    outputs: list[list[int]] = []
    first = 0
    for row, drafts in enumerate(draft_token_ids):
        kept: list[int] = []
        for index, draft in enumerate(drafts, first):
            if is_greedy[row]:
                token = int(target_logits[index].argmax())
                keep = token == draft
            else:
                p = softmax(target_logits[index])
                q = None if draft_probs is None else draft_probs[index]
                keep = accepts(p, q, draft, uniforms[index])
                token = draft if keep else recover(p, q, draft, exponentials[row])
            kept.append(token)
            if not keep:
                break
        else:
            kept.append(bonus_token_ids[row])
        outputs.append(kept)
        first += len(drafts)
    return outputs


class RejectionSampler:
    """Decides draft by draft; holds the draws of one request and step."""

    def __init__(self, rng: np.random.Generator, num_drafts: int, vocab_size: int) -> None:
        self.uniforms = rng.random(num_drafts)
        self.exponentials = rng.exponential(size=vocab_size)

    def __call__(
        self, index: int, p: np.ndarray, q: np.ndarray | None, draft: int
    ) -> tuple[int, bool]:
        """(token, whether it is the draft) for draft number `index`."""
        if accepts(p, q, draft, self.uniforms[index]):
            return draft, True
        return recover(p, q, draft, self.exponentials), False

"""One row of logits and a request's wishes in, one token id out.

Promises: greedy at temperature 0 draws no randomness (E6); otherwise temperature, min-p, top-k,
top-p, softmax, one draw, in that order. float64 inside, whatever the logits' dtype.
Mirrors `vllm/v1/sample/sampler.py:238` `Sampler.sample`.
"""

from __future__ import annotations

import numpy as np

from mini_vllm.config import SamplingParams

__all__ = ["Sampler", "SamplingParams"]


class Sampler:
    """Stateless; the engine passes each request's own random generator."""

    def sample(
        self,
        logits: np.ndarray,
        params: SamplingParams,
        rng: np.random.Generator | None = None,
    ) -> int:
        """Choose the next token.

        Args:
            logits: shape [vocab_size], any float dtype; never changed.
            params: the request's wishes.
            rng: the request's generator; without it a fresh `default_rng(params.seed)` is used,
                which repeats the same draw at every call with the same seed.

        Returns:
            A token id. Temperature 0 gives the argmax, the lowest id on ties.
        """
        if params.temperature == 0.0:
            return int(logits.argmax())
        generator = rng if rng is not None else np.random.default_rng(params.seed)
        return int(generator.choice(len(logits), p=probabilities(logits, params)))


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The law [vocab_size], in float64, that a temperature above 0 samples from."""
    scaled = np.asarray(logits, dtype=np.float64) / params.temperature
    scaled = _apply_min_p(scaled, params.min_p)
    scaled = _apply_top_k(scaled, params.top_k)
    scaled = _apply_top_p(scaled, params.top_p)
    return softmax(scaled)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities of [vocab_size] logits; the maximum is subtracted, so 1000+ is legal."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _apply_min_p(logits: np.ndarray, min_p: float) -> np.ndarray:
    """Mask tokens less likely than `min_p` times the likeliest one; 0 leaves all.

    Runs before top-k and top-p, as upstream: `vllm/v1/sample/logits_processor/builtin.py:22`
    `MinPLogitsProcessor`.
    """
    if min_p <= 0.0:
        return logits
    probabilities = softmax(logits)
    return np.where(probabilities < min_p * probabilities.max(), -np.inf, logits)


def _apply_top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """Keep the k largest logits, others -inf; ties with the k-th survive, k <= 0 keeps all."""
    if k <= 0 or k >= len(logits):
        return logits
    threshold = np.partition(logits, -k)[-k]
    return np.where(logits < threshold, -np.inf, logits)


def _apply_top_p(logits: np.ndarray, p: float) -> np.ndarray:
    """Keep the smallest set of tokens whose probability reaches p, the crossing one included.

    At least one token survives; p >= 1 keeps all. Probabilities are over the logits given, so
    after top-k they are renormalised over its survivors. Mirrors
    `vllm/v1/sample/ops/topk_topp_sampler.py:328` `apply_top_k_top_p_pytorch`.
    """
    if p >= 1.0:
        return logits
    order = np.argsort(-logits, kind="stable")
    probabilities = softmax(logits[order])
    mass_before = np.cumsum(probabilities) - probabilities
    keep = mass_before < p
    keep[0] = True
    masked = np.full_like(logits, -np.inf)
    masked[order[keep]] = logits[order[keep]]
    return masked

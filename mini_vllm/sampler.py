"""One row of logits and a request's wishes in, one token id out.

Promises: greedy at temperature 0 draws no randomness (E6); otherwise temperature, min-p, top-k,
top-p, softmax, one draw, in that order. float64 inside, whatever the logits' dtype.
Mirrors `vllm/v1/sample/sampler.py:238` `Sampler.sample`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request asks of the sampler and the stop check.

    Greedy by default, unlike upstream, whose default temperature is 1.0:
    `vllm/sampling_params.py:168` `SamplingParams`. `top_k` 0 or -1, `top_p` 1.0 and `min_p` 0.0
    switch the filter off. Every field is validated when the object is made.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    ignore_eos: bool = False
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        number, integer = (int, float, np.integer, np.floating), (int, np.integer)
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, number) or not math.isfinite(value):
                raise ValueError(f"{name}={value!r}: need a finite number")
        for name in ("top_k", "max_tokens", "min_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, integer):
                raise ValueError(f"{name}={value!r}: need an int")
        if self.temperature < 0.0:
            raise ValueError(f"temperature={self.temperature}: need at least 0 (0 is greedy)")
        if self.top_k < -1:
            raise ValueError(f"top_k={self.top_k}: need -1 or 0 (off) or a positive count")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p}: need a value in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p}: need a value in [0, 1]")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: need at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens}: need 0 to max_tokens={self.max_tokens}"
            )
        if self.seed is not None and (not isinstance(self.seed, integer) or self.seed < 0):
            raise ValueError(f"seed={self.seed!r}: need a non-negative int or None")
        stops = self.stop_token_ids
        if not isinstance(stops, list | tuple | set | frozenset) or not all(
            isinstance(token, integer) and token >= 0 for token in stops
        ):
            raise ValueError(f"stop_token_ids={stops!r}: need a sequence of token ids, 0 or more")
        object.__setattr__(self, "stop_token_ids", tuple(stops))


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
        scaled = np.asarray(logits, dtype=np.float64) / params.temperature
        scaled = _apply_min_p(scaled, params.min_p)
        scaled = _apply_top_k(scaled, params.top_k)
        scaled = _apply_top_p(scaled, params.top_p)
        generator = rng if rng is not None else np.random.default_rng(params.seed)
        return int(generator.choice(len(scaled), p=_softmax(scaled)))


def _softmax(logits: np.ndarray) -> np.ndarray:
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
    probabilities = _softmax(logits)
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
    probabilities = _softmax(logits[order])
    mass_before = np.cumsum(probabilities) - probabilities
    keep = mass_before < p
    keep[0] = True
    masked = np.full_like(logits, -np.inf)
    masked[order[keep]] = logits[order[keep]]
    return masked

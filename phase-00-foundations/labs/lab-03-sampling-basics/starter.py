"""From one row of logits to one token id: greedy, temperature, top-k, top-p.

Pure functions in float64; no argument is ever changed. The order of the steps is the engine's:
`vllm/v1/sample/sampler.py:238` `Sampler.sample`.
"""

from __future__ import annotations

import numpy as np

from mini_vllm import SamplingParams


def softmax(logits: np.ndarray) -> np.ndarray:
    """Turn scores into probabilities.

    Args:
        logits: shape [vocab_size], any float dtype. An entry of -inf gets probability 0. Values of
            1000 and more are legal: subtract the maximum before `np.exp`. At least one entry is
            finite.

    Returns:
        float64, shape [vocab_size], each entry in [0, 1], summing to 1.
    """
    raise NotImplementedError


def apply_top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """Keep the k largest logits and set the others to -inf.

    A logit equal to the k-th largest survives too, so ties may keep more than k.
    `k <= 0` or `k >= vocab_size` keeps everything.

    Returns:
        A new float64 array, shape [vocab_size]; survivors keep their value and position.

    Source: `vllm/v1/sample/ops/topk_topp_sampler.py:328` `apply_top_k_top_p_pytorch`, which masks
    what is strictly below the threshold.
    """
    raise NotImplementedError


def apply_top_p(logits: np.ndarray, p: float) -> np.ndarray:
    """Keep the smallest set of likeliest tokens whose probabilities reach p; the others get -inf.

    Sort by probability, descending (stable). A token stays while the probability mass before it
    is less than p. The token that crosses p is therefore kept, and so is always the first one.
    `p >= 1` keeps everything. Probabilities are the softmax of the logits given: entries that are
    already -inf take no part, so after top-k the mass is shared among its survivors.

    Returns:
        A new float64 array, shape [vocab_size]; survivors keep their value and position.

    Source: `vllm/v1/sample/ops/topk_topp_sampler.py:328` `apply_top_k_top_p_pytorch`.
    """
    raise NotImplementedError


def sample(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> int:
    """Choose one token id.

    `temperature == 0` is greedy: the index of the largest logit, the lowest index on ties; no
    other knob matters and no random generator is made. Otherwise divide by the temperature, then
    top-k, then top-p, then softmax, then exactly one draw:
    `np.random.default_rng(seed).choice(vocab_size, p=probabilities)`.

    Args:
        logits: shape [vocab_size].
        temperature: 0 or more; below 1 sharpens, above 1 flattens.
        top_k: -1 or 0 for off, else how many to keep.
        top_p: in (0, 1]; 1 is off.
        seed: None draws differently at every call.

    Returns:
        A Python int.

    Raises:
        ValueError: `temperature` below 0 or nan, `top_p` outside (0, 1], `top_k` below -1; the
            message names the argument and its value. Greedy calls are checked too.

    Source: `vllm/v1/sample/sampler.py:238` `Sampler.sample`; the limits are those of
    `vllm/sampling_params.py:168` `SamplingParams`.
    """
    raise NotImplementedError


class Sampler:
    """Given. Your `sample` as an engine part: `course run --mine` generates with it.

    The engine keeps one random generator per request. `sample` takes a seed, so each step draws one
    from the request's generator: different at every step, the same in every run.
    """

    def sample(
        self, logits: np.ndarray, params: SamplingParams, rng: np.random.Generator | None = None
    ) -> int:
        """The engine's interface: `mini_vllm/sampler.py`, `Sampler.sample`.

        Raises:
            ValueError: `min_p` above 0, which this lab does not have.
        """
        if params.min_p > 0.0:
            raise ValueError(f"min_p={params.min_p}: this lab's sampler has no min-p")
        if params.temperature == 0.0:
            return sample(logits, 0.0)
        generator = rng if rng is not None else np.random.default_rng(params.seed)
        seed = int(generator.integers(2**63))
        return sample(logits, params.temperature, params.top_k, params.top_p, seed)

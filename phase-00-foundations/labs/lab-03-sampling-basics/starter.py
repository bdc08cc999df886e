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
        logits: shape [vocab_size], any float dtype. An entry of -inf gets probability 0. Any finite
            value is legal, 1000 and -3000 in one row too. At least one entry is finite.

    Returns:
        float64, shape [vocab_size], each entry in [0, 1], summing to 1. Only differences between
        logits count: [1000, 1001, 1002] gives what [0, 1, 2] gives.
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

    A token stays while the mass of the likelier ones is less than p; of two equally likely tokens
    the lower index counts as the likelier. So the token that crosses p is kept, and the likeliest
    always. Probabilities 0.5, 0.3, 0.15, 0.05 have 0, 0.5, 0.8, 0.95 before them: p=0.75 keeps
    two. `p >= 1` keeps everything. Entries that are -inf already take no part: the mass is shared
    among the others.

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
    other knob matters and no random generator is made. Any other temperature, however small,
    divides the logits; top-k acts on that, top-p on what top-k left, and the token is one draw
    from the softmax of the result: `np.random.default_rng(seed).choice(vocab_size, p=...)`.
    All in float64, whatever the dtype of `logits`.

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

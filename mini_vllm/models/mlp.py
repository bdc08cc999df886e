"""SwiGLU: the MLP of a decoder layer, and of one expert.

Promises: gate and up are one product, and each row is computed for itself. Mirrors
`vllm/model_executor/models/qwen3_moe.py:92` `Qwen3MoeMLP`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(silu(gate(x)) * up(x)), with gate and up in one product."""

    gate_up_proj: Callable[[np.ndarray], np.ndarray]
    down_proj: Callable[[np.ndarray], np.ndarray]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[num_rows, hidden_size] to the same."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))


def silu_and_mul(gate_up: np.ndarray) -> np.ndarray:
    """silu(gate) * up, from [num_tokens, 2 * size] to [num_tokens, size].

    silu(x) = x * sigmoid(x), with the sigmoid written as tanh so that no input overflows.
    """
    size = gate_up.shape[1] // 2
    gate, up = gate_up[:, :size], gate_up[:, size:]
    result = gate * gate.dtype.type(0.5)
    up = up * result
    np.tanh(result, out=result)
    result += 1
    result *= up
    return result

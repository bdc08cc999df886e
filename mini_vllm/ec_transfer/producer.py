"""What an engine computes that only encodes: its pictures, and no token.

Promises: no layer of the language model runs and nothing keeps K and V; a row whose prompt is
behind it says token 0, as at the pin: `vllm/v1/outputs.py:304`
`make_empty_encoder_model_runner_output`. A client asks it for one token.
"""

from __future__ import annotations

import numpy as np

from mini_vllm.batch import ForwardBatch


class EncoderOnlyModel:
    """Logits that leave token 0 alone."""

    def __init__(self, vocab_size: int, dtype: np.dtype) -> None:
        self.vocab_size, self.dtype = vocab_size, dtype

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """[num_rows, vocab_size]: 0 for token 0, and -inf."""
        logits = np.full((len(batch.logits_indices), self.vocab_size), -np.inf, self.dtype)
        logits[:, 0] = 0.0
        return logits

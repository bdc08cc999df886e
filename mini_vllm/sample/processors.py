"""What may change a row of logits before a token is chosen.

Promises: a processor gets the request and its row and returns a row, the same one only if it
changed nothing; the order is upstream's: `vllm/v1/sample/logits_processor/interface.py:60`
`LogitsProcessor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mini_vllm.request import Request

LogitsProcessor = Callable[[Request, np.ndarray], np.ndarray]
"""(request, [vocab_size]) to a new row [vocab_size]."""


class MinTokens:
    """No EOS and no stop token before `min_tokens` outputs.

    Mirrors `vllm/v1/sample/logits_processor/builtin.py:167` `MinTokensLogitsProcessor`.
    """

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_ids = tuple(eos_token_ids)

    def __call__(self, request: Request, row: np.ndarray) -> np.ndarray:
        params = request.sampling_params
        num_outputs = request.num_output_tokens + request.num_output_placeholders
        if num_outputs - bool(request.num_output_placeholders) >= params.min_tokens:
            return row
        stops = [t for t in (*self.eos_token_ids, *params.stop_token_ids) if t < len(row)]
        row = row.copy()
        row[stops] = -np.inf
        return row

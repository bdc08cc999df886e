"""Lab 14-01: two models that the engine has never seen, and one of them notices everything.

The engine asks a model for one thing: `forward(batch)`, rows of logits for a ragged batch. What
the rows depend on is the model's affair. A model that looks at the last token alone gives the same
text however badly the engine treats it. What holds throughout:

- C1: `forward` returns a new float array [len(batch.logits_indices), vocab_size]; row r belongs to
  the token at `batch.logits_indices[r]`.
- C2: a row depends on its own request alone, not on who else is in the batch or in which order.
- C3: tokens of earlier steps are not in the batch. What a model wants to know of them it has to
  write at `batch.slot_mapping` and to read through `batch.block_tables`.

Sources: `vllm/model_executor/models/interfaces_base.py:47` `VllmModel`,
`vllm/v1/worker/gpu_model_runner.py:3668` `GPUModelRunner._model_forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mini_vllm.batch import ForwardBatch

VOCAB = 257
"""256 bytes and EOS."""


class Bigram:
    """The next token depends on the last one alone: a table of logits, one row per token.

    With seed 0 greedy decoding goes from token 111 ("o") to 99, 217, 240, 118, 233, ...
    """

    def __init__(self, seed: int = 0) -> None:
        """`table` [VOCAB, VOCAB]: `standard_normal` of `np.random.default_rng(seed)`."""
        raise NotImplementedError

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """The table's rows of the batch's last tokens (C1)."""
        raise NotImplementedError


class Witness:
    """A model whose text is wrong as soon as the engine has made any mistake in a batch.

    It has a memory of its own, as large as it likes: the engine gives no KV cache to a model that
    does not ask for one.
    """

    def __init__(self) -> None:
        """Nothing is remembered."""
        self.memory: dict[int, tuple[int, int]] = {}

    @staticmethod
    def says(token_ids: Sequence[int]) -> int:
        """The token, 0 to 255, that follows `token_ids`, by definition: the engine is not asked.

        A test computes whole texts with it and compares them with what comes out of engines that
        are right, and of engines that are not. So it must depend on every token and on its
        place: on 500 random sequences, a change of any one token, an exchange of two neighbours,
        or one token less at the front gives another answer at least nine times in ten.
        """
        raise NotImplementedError

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """Logits, largest at what `says` gives for the tokens up to the row's own (C1 to C3).

        Which tokens those are, and where each stands, it must learn from `batch` as the fields'
        docstrings promise it, and rely on nothing else. An engine that breaks one of these
        promises must change the text: positions, slots, block tables, lengths, borders between
        requests, and which rows are wanted.
        """
        raise NotImplementedError


class Watched:
    """A model behind glass: the engine works as before, and `touched` says what it looked at.

    `Watched(model).touched` is the set of the names that were read of it or set on it, dunder
    methods left out. Whatever is read is `model`'s own; setting something sets it on `model`.
    """

    def __init__(self, model: Any) -> None:
        """Nothing has been touched."""
        raise NotImplementedError

    @property
    def touched(self) -> set[str]:
        """What the engine looked at so far, a copy. Reading this is not touching."""
        raise NotImplementedError

    def __getattribute__(self, name: str) -> Any:
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        raise NotImplementedError

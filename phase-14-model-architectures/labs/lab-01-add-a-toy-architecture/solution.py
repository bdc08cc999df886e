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
        self.table = np.random.default_rng(seed).standard_normal((VOCAB, VOCAB))

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """The table's rows of the batch's last tokens (C1)."""
        return self.table[batch.token_ids[batch.logits_indices]]


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
        return _checksum(enumerate(token_ids))

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """Logits, largest at what `says` gives for the tokens up to the row's own (C1 to C3).

        Which tokens those are, and where each stands, it must learn from `batch` as the fields'
        docstrings promise it, and rely on nothing else. An engine that breaks one of these
        promises must change the text: positions, slots, block tables, lengths, borders between
        requests, and which rows are wanted.
        """
        memory, size = self.memory, batch.block_size
        for slot, token, position in zip(
            batch.slot_mapping.tolist(), batch.token_ids.tolist(), batch.positions.tolist(),
            strict=True,
        ):  # fmt: skip
            memory[slot] = (position, token)
        bounds, rows = batch.query_start_loc, batch.logits_indices
        logits = np.zeros((len(rows), VOCAB))
        for row, place in enumerate(rows.tolist()):
            request = int(np.searchsorted(bounds, place, side="right")) - 1
            length = int(batch.seq_lens[request] - (bounds[request + 1] - 1 - place))
            table = batch.block_tables[request].tolist()
            slots = [table[p // size] * size + p % size for p in range(length)]
            seen = [memory.get(slot, (-1, -1)) for slot in slots]
            logits[row, _checksum(seen)] = 1.0
        return logits


def _checksum(tokens: Any) -> int:
    """One byte of a sum over (position, token), in order."""
    total = 7
    for position, token in tokens:
        total = (total * 1_000_003 + token * 8_191 + position * 131 + 1) % 2_147_483_647
    return total % 251


class Watched:
    """A model behind glass: the engine works as before, and `touched` says what it looked at.

    `Watched(model).touched` is the set of the names that were read of it or set on it, dunder
    methods left out. Whatever is read is `model`'s own; setting something sets it on `model`.
    """

    def __init__(self, model: Any) -> None:
        """Nothing has been touched."""
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "_touched", set())

    @property
    def touched(self) -> set[str]:
        """What the engine looked at so far, a copy. Reading this is not touching."""
        return set(object.__getattribute__(self, "_touched"))

    def __getattribute__(self, name: str) -> Any:
        if name == "touched" or name.startswith("__"):
            return object.__getattribute__(self, name)
        object.__getattribute__(self, "_touched").add(name)
        return getattr(object.__getattribute__(self, "_model"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_touched").add(name)
        setattr(object.__getattribute__(self, "_model"), name, value)

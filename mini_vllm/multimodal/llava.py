"""A language model that sees: some of its tokens' embeddings are rows of an encoder.

Promises: placeholders get their rows, one each, or the step fails by name; every other token, and
every step without a picture, is as without the encoder. Mirrors
`vllm/model_executor/models/utils.py:456` `_merge_multimodal_embeddings`, which checks one way only.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.models.transformer import Transformer


def merge_multimodal_embeddings(
    inputs_embeds: np.ndarray, multimodal_embeddings: np.ndarray, is_multimodal: np.ndarray
) -> np.ndarray:
    """Overwrite the embeddings of placeholders, in place.

    A masked assignment spreads one row over all placeholders without a word, so the counts are
    compared first, in both directions.

    Args:
        inputs_embeds: [num_tokens, hidden_size].
        multimodal_embeddings: [num_rows, hidden_size], in the order of the placeholders.
        is_multimodal: bool [num_tokens].

    Raises:
        ValueError: there are more rows than placeholders, or fewer.
    """
    num_rows, num_placeholders = len(multimodal_embeddings), int(is_multimodal.sum())
    if num_rows != num_placeholders:
        raise ValueError(
            f"{num_rows} multimodal embeddings for {num_placeholders} placeholders: need one each"
        )
    inputs_embeds[is_multimodal] = multimodal_embeddings
    return inputs_embeds


class SeeingModel:
    """A transformer whose next step may have pictures in it."""

    def __init__(self, model: Transformer) -> None:
        self.transformer = model
        self.is_multimodal: np.ndarray | None = None
        """[num_tokens] of the next step, which tokens take a row; None: no token."""
        self.rows = np.zeros((0, model.config.hidden_size), dtype=model.dtype)
        """Those rows."""

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """As `Transformer.forward`."""
        if self.is_multimodal is not None:
            embeds = self.transformer.embed_tokens[batch.token_ids]  # [num_tokens, hidden_size]
            embeds = merge_multimodal_embeddings(embeds, self.rows, self.is_multimodal)
            batch = replace(batch, inputs_embeds=embeds)
        return self.transformer.forward(batch)

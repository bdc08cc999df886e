"""What `quantization_config` says of a checkpoint in block-scaled FP8: which matrices, which block.

Promises: a matrix is quantized here exactly when the pin quantizes it. Mirrors
`vllm/model_executor/layers/quantization/fp8.py:100` `Fp8Config` and
`vllm/model_executor/layers/quantization/utils/quant_utils.py:464` `is_layer_skipped`.
"""

from __future__ import annotations

from dataclasses import dataclass

SCALE = "weight_scale_inv"
"""The tensor of a matrix's scales. A code is multiplied by it, whatever the name says."""


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """Codes of e4m3 with a scale per block, and activations quantized at run time."""

    weight_block_size: tuple[int, int]
    """Rows and columns of a block, which are equal."""
    ignored_layers: frozenset[str] = frozenset()
    """Names of modules whose weights are as without quantization."""

    def is_layer_skipped(self, module: str) -> bool:
        """Whether this matrix is not quantized.

        Args:
            module: its name in the checkpoint, such as `model.layers.0.self_attn.q_proj`. The
                experts of a layer go together: one name of theirs that is listed skips all.
        """
        block, is_expert, _ = module.partition(".experts.")
        if is_expert:
            return any(f"{block}.experts" in name for name in self.ignored_layers)
        return module in self.ignored_layers

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Of the scales of a matrix [out_features, in_features]: a block at an end may be cut."""
        rows, columns = self.weight_block_size
        return -(-shape[0] // rows), -(-shape[1] // columns)

"""Lab 14-03: from the tensors of a checkpoint to the parameters that an engine multiplies by.

A checkpoint keeps one tensor per projection, since any library must be able to read it. An engine
keeps several in one parameter, since one product of three projections reads the input once. Loading
is the translation. What holds throughout:

- M1: a name on disk belongs to one place: a parameter, or the rows of one shard in it.
- M2: rows follow from the configuration alone: q, then k, then v; gate, then up.
- M3: a tensor fills its place exactly. Nothing is broadcast, cut or repeated to fit.
- M4: after a load every place has been written once. Otherwise it was no load, and the error says
  which tensor or which place.

Sources: `vllm/model_executor/models/llama.py:436` `LlamaModel.load_weights`,
`vllm/model_executor/layers/linear.py:1139` `QKVParallelLinear.weight_loader_v2`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

Shard = str | int

STACKED: list[tuple[str, str, Shard]] = [
    ("qkv_proj", "q_proj", "q"),
    ("qkv_proj", "k_proj", "k"),
    ("qkv_proj", "v_proj", "v"),
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
]
"""Component of a parameter's name, component of the name on disk, shard."""


def map_weight_name(name: str) -> tuple[str, Shard | None]:
    """The parameter that a tensor on disk belongs to, and its shard (M1).

    `model.layers.3.self_attn.q_proj.weight` is ("model.layers.3.self_attn.qkv_proj.weight", "q");
    `model.norm.weight` is itself and None, and so is a name that is fused on disk already. Weights
    and biases alike. Applying it to what it gave changes nothing any more.
    """
    raise NotImplementedError


def qkv_slices(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, slice]:
    """The rows of q, k and v in a fused parameter (M2).

    `qkv_slices(8, 2, 16)` is q 0 to 128, k 128 to 160, v 160 to 192.

    Raises:
        ValueError: a size below 1, or KV heads that do not divide the heads.
    """
    raise NotImplementedError


def load_stacked(fused: np.ndarray, shard: np.ndarray, rows: slice) -> None:
    """Copy one tensor into its rows of a fused parameter, in place (M3).

    Args:
        fused: [all rows, ...].
        shard: [rows.stop - rows.start, ...], the other sizes as those of `fused`.
        rows: start and stop given, step None.

    Raises:
        ValueError: any other shape, or rows past the end; the message has both shapes.
    """
    raise NotImplementedError


def load_checkpoint(
    parameters: Mapping[str, np.ndarray],
    slices: Mapping[str, Mapping[Shard, slice]],
    tensors: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Fill every parameter from a checkpoint's tensors, in whatever order they come (M1 to M4).

    Args:
        parameters: by name, of any content; filled in place. Floats, in a dtype of their own.
        slices: by the component that is fused ("qkv_proj", "gate_up_proj"), the rows of its
            shards. A bias has the rows of its weight.
        tensors: name on disk and tensor. A parameter that is fused on disk comes whole.

    Raises:
        ValueError: a name that belongs to no parameter; a tensor of another shape than its
            place; a place that is written twice; one that is written by no tensor. The message
            has the tensor's name on disk, of a missing one the parameter's name and the shard.
    """
    raise NotImplementedError

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
    parts = name.split(".")
    for fused, component, shard in STACKED:
        if component in parts:
            parts[parts.index(component)] = fused
            return ".".join(parts), shard
    return name, None


def qkv_slices(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, slice]:
    """The rows of q, k and v in a fused parameter (M2).

    `qkv_slices(8, 2, 16)` is q 0 to 128, k 128 to 160, v 160 to 192.

    Raises:
        ValueError: a size below 1, or KV heads that do not divide the heads.
    """
    if min(num_heads, num_kv_heads, head_dim) < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads}, num_kv_heads={num_kv_heads}, head_dim={head_dim}: need sizes "
            "of at least 1, and KV heads that divide the heads"
        )
    q, kv = num_heads * head_dim, num_kv_heads * head_dim
    return {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}


def load_stacked(fused: np.ndarray, shard: np.ndarray, rows: slice) -> None:
    """Copy one tensor into its rows of a fused parameter, in place (M3).

    Args:
        fused: [all rows, ...].
        shard: [rows.stop - rows.start, ...], the other sizes as those of `fused`.
        rows: start and stop given, step None.

    Raises:
        ValueError: any other shape, or rows past the end; the message has both shapes.
    """
    wanted = (rows.stop - rows.start, *fused.shape[1:])
    if shard.shape != wanted or rows.stop > fused.shape[0]:
        raise ValueError(
            f"a tensor of shape {shard.shape} for rows {rows.start} to {rows.stop} of a parameter "
            f"of shape {fused.shape}: need {wanted}"
        )
    fused[rows] = shard


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
    written: set[tuple[str, Shard | None]] = set()
    for disk_name, tensor in tensors:
        name, shard = map_weight_name(disk_name)
        if name not in parameters:
            raise ValueError(f"{disk_name}: there is no parameter {name}")
        parameter, rows_of = parameters[name], _slices_of(name, slices)
        shards = [shard] if shard is not None else list(rows_of or [None])
        for each in shards:
            if (name, each) in written:
                raise ValueError(f"{disk_name}: {name}, shard {each}, is written twice")
            written.add((name, each))
        whole = slice(0, parameter.shape[0])
        rows = whole if shard is None else (rows_of or {})[shard]
        try:
            load_stacked(parameter, tensor, rows)
        except ValueError as error:
            raise ValueError(f"{disk_name}: {error}") from None
    for name in parameters:
        for shard in _slices_of(name, slices) or [None]:
            if (name, shard) not in written:
                raise ValueError(f"{name}, shard {shard}: no tensor of the checkpoint fills it")


def _slices_of(
    name: str, slices: Mapping[str, Mapping[Shard, slice]]
) -> Mapping[Shard, slice] | None:
    """The shards of a parameter, by the component of its name; None where it is not fused."""
    return next((slices[part] for part in name.split(".") if part in slices), None)

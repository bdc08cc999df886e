"""Lab 14-02: what stands in a checkpoint, where it goes, and which damage the pin lets in.

The first half reads files and needs no library. The second half is reading: from the source of
the pinned loader you write down what it checks, and 51 checkpoints that it was given say whether
you read rightly. What holds throughout:

- L1: a safetensors file is 8 bytes, the length n of the header, little-endian; n bytes of JSON;
  then the tensors' bytes. Offsets in the header count from the header's end.
- L2: of a Llama, q, k and v of a layer become one parameter, and so do gate and up. Everything else
  stays as it is. A tied head is no tensor and no parameter.
- L3: what a loader refuses, it refuses at the first tensor that is wrong, in the order of the
  file; what is missing, at the end.

Source: `vllm/model_executor/models/llama.py:436` `LlamaModel.load_weights` and whatever it calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

Shapes = Mapping[str, tuple[int, ...]]


class Place(NamedTuple):
    """Where a tensor on disk goes."""

    parameter: str
    shard: str | int | None
    rows: tuple[int, int]
    """First row in the parameter, and the one behind the last."""


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Of each tensor of a safetensors file: dtype, shape, the place of its first byte (L1).

    The entry `__metadata__` is no tensor. Only the header is read, however large the file is.

    Raises:
        ValueError: the file is shorter than it says, or its header is not a JSON object.
    """
    raise NotImplementedError


def trace(name: str, config: Mapping[str, Any]) -> Place:
    """Where the tensor `name` of a Llama with this `config.json` goes (L2).

    With 32 heads and 8 KV heads of 128, `model.layers.0.self_attn.k_proj.weight` goes to rows 4096
    to 5120 of `model.layers.0.self_attn.qkv_proj.weight`, shard "k". A tensor that stays as it is
    has the shard None and all its rows. `head_dim` counts where the configuration has it, and is
    hidden size over heads where not.
    """
    raise NotImplementedError


def counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """How many tensors a Llama's checkpoint has, and how many parameters the engine makes of them.

    32 layers with a head of their own: (291, 195).
    """
    raise NotImplementedError


def verdict(config: Mapping[str, Any], shapes: Shapes) -> str:
    """What the pinned loader makes of a checkpoint with these tensors, unquantized, on one rank.

    Returns:
        "loads", or the name of the exception that ends the load (L3). "loads" says nothing of
        whether the model is right.
    """
    raise NotImplementedError

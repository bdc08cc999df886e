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
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path}: {size} bytes, the header alone would have {length}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path}: the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is not an object")
    return {
        name: (entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def trace(name: str, config: Mapping[str, Any]) -> Place:
    """Where the tensor `name` of a Llama with this `config.json` goes (L2).

    With 32 heads and 8 KV heads of 128, `model.layers.0.self_attn.k_proj.weight` goes to rows 4096
    to 5120 of `model.layers.0.self_attn.qkv_proj.weight`, shard "k". A tensor that stays as it is
    has the shard None and all its rows. `head_dim` counts where the configuration has it, and is
    hidden size over heads where not.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    q, kv = heads * dim, config["num_key_value_heads"] * dim
    inner = config["intermediate_size"]
    *_, module, _ = ("", *name.split("."))
    stacked: dict[str, tuple[str, str | int, int, int]] = {
        "q_proj": ("qkv_proj", "q", 0, q), "k_proj": ("qkv_proj", "k", q, q + kv),
        "v_proj": ("qkv_proj", "v", q + kv, q + 2 * kv),
        "gate_proj": ("gate_up_proj", 0, 0, inner),
        "up_proj": ("gate_up_proj", 1, inner, 2 * inner),
    }  # fmt: skip
    if module in stacked:
        fused, shard, start, stop = stacked[module]
        return Place(name.replace(f".{module}.", f".{fused}."), shard, (start, stop))
    rows = config["vocab_size"] if module in ("embed_tokens", "lm_head") else hidden
    whole = {"qkv_proj": q + 2 * kv, "gate_up_proj": 2 * inner}
    return Place(name, None, (0, whole.get(module, rows)))


def counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """How many tensors a Llama's checkpoint has, and how many parameters the engine makes of them.

    32 layers with a head of their own: (291, 195).
    """
    layers, rest = config["num_hidden_layers"], 2 if config["tie_word_embeddings"] else 3
    return 9 * layers + rest, 6 * layers + rest


def verdict(config: Mapping[str, Any], shapes: Shapes) -> str:
    """What the pinned loader makes of a checkpoint with these tensors, unquantized, on one rank.

    Returns:
        "loads", or the name of the exception that ends the load (L3). "loads" says nothing of
        whether the model is right.
    """
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    tied, layers = config["tie_word_embeddings"], config["num_hidden_layers"]
    known = {"embed_tokens.weight", "norm.weight"} | {
        f"layers.{number}.{leaf}.weight"
        for number in range(layers)
        for leaf in (
            "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj",
            "input_layernorm", "post_attention_layernorm",
        )
    }  # fmt: skip
    norms = {name for name in known if "norm" in name}
    for disk_name, shape in sorted(shapes.items()):
        if tied and disk_name.startswith("lm_head."):
            continue
        inside = disk_name.removeprefix("model.")
        if inside == disk_name and disk_name != "lm_head.weight":
            return "ValueError"
        if "rotary_emb.inv_freq" in inside:
            continue
        place = trace(inside, config)
        if disk_name != "lm_head.weight" and place.parameter not in known:
            if place.parameter.endswith(".bias"):
                continue
            return "KeyError"
        norms.discard(place.parameter)
        module = disk_name.split(".")[-2]
        if module in ("embed_tokens", "lm_head"):
            if shape[0] != vocab:
                return "AssertionError"
            if shape[1] != hidden:
                return "RuntimeError"
        elif module in ("o_proj", "down_proj"):
            if shape[1] < (q if module == "o_proj" else inner):
                return "RuntimeError"
            if shape[0] != hidden:
                return "AssertionError"
        elif place.shard is not None:
            if shape[0] < place.rows[1] - place.rows[0]:
                return "RuntimeError"
            if shape[1] != hidden:
                return "AssertionError"
        elif "norm" in module and shape != (hidden,):
            return "AssertionError"
    return "ValueError" if norms else "loads"

"""How many bytes a conversation costs: the KV cache, from a model's shape to a concurrency figure.

Every function is pure; `plan` has a JSON form of its inputs and outputs. Upstream does the same
arithmetic in `vllm/v1/kv_cache_interface.py:167` `AttentionSpec.real_page_size_bytes`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What one token leaves in the KV cache.

    Attributes:
        num_layers: decoder layers; each has its own cache.
        stored_vectors: 2 when K and V are stored, 1 for MLA, which stores one shared latent.
        num_kv_heads: heads that own cached state (not query heads).
        head_dim: numbers per head and stored vector.
        dtype_bytes: bytes per stored number.
        sliding_window: tokens each layer keeps, or None when every token is kept.
        kind: "MHA", "GQA", "MQA" or "MLA".
    """

    num_layers: int
    stored_vectors: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    sliding_window: int | None
    kind: str


def _require_positive(**values: int) -> None:
    """Given. Refuse anything that is not a positive int, naming the argument and its value."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"{name}={value!r}: need a positive int")


def _cdiv(a: int, b: int) -> int:
    """Given. `a / b` rounded up, in exact integer arithmetic."""
    return -(-a // b)


# --- Given: the formula --------------------------------------------------------------------------


def kv_bytes_per_token(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype_bytes: int = 2,
    *,
    stored_vectors: int = 2,
) -> int:
    """Given. Bytes of KV cache one token needs, over all layers.

    The product of five factors: layers, stored vectors (K and V), KV heads, numbers per head,
    bytes per number.

    Raises:
        ValueError: any argument that is not a positive int.

    Source: `vllm/v1/kv_cache_interface.py:167` `AttentionSpec.real_page_size_bytes`, which is this
    product for one layer and `block_size` tokens.
    """
    _require_positive(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype_bytes=dtype_bytes,
        stored_vectors=stored_vectors,
    )
    return stored_vectors * num_layers * num_kv_heads * head_dim * dtype_bytes


def kv_bytes_per_seq(bytes_per_token: int, seq_len: int) -> int:
    """Given. Bytes of KV cache a sequence of `seq_len` tokens needs.

    Raises:
        ValueError: `bytes_per_token` or `seq_len` that is not a positive int.
    """
    _require_positive(bytes_per_token=bytes_per_token, seq_len=seq_len)
    return bytes_per_token * seq_len


def max_concurrent_seqs(gpu_bytes: int, weight_bytes: int, bytes_per_seq: int) -> int:
    """Given. Whole sequences that fit beside the weights; 0 when the weights leave no room.

    Args:
        gpu_bytes: memory you may use, in bytes.
        weight_bytes: memory the weights take, in bytes.
        bytes_per_seq: from `kv_bytes_per_seq`.

    Raises:
        ValueError: `bytes_per_seq` that is not a positive int.
    """
    _require_positive(bytes_per_seq=bytes_per_seq)
    return max(0, (gpu_bytes - weight_bytes) // bytes_per_seq)


# --- Given: the same answer in blocks, as the engine gives it ------------------------------------


def num_blocks(
    free_bytes: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype_bytes: int = 2,
    block_size: int = 16,
    *,
    stored_vectors: int = 2,
) -> int:
    """Given. KV blocks of `block_size` tokens that fit in `free_bytes`; 0 when none does.

    Raises:
        ValueError: a non-positive shape argument or `block_size`.

    Source: `vllm/v1/core/kv_cache_utils.py:935` `get_num_blocks`.
    """
    _require_positive(block_size=block_size)
    bytes_per_block = block_size * kv_bytes_per_token(
        num_layers, num_kv_heads, head_dim, dtype_bytes, stored_vectors=stored_vectors
    )
    return max(0, free_bytes // bytes_per_block)


def blocks_per_request(
    max_model_len: int,
    block_size: int = 16,
    *,
    sliding_window: int | None = None,
    max_num_batched_tokens: int = 2048,
) -> int:
    """Given. Blocks the longest allowed request can hold at once, in one KV cache group.

    Full attention keeps every token: `max_model_len` tokens, rounded up to blocks.
    A sliding window keeps the last `sliding_window - 1` computed tokens plus the ones being
    computed now (at most `max_num_batched_tokens`), never more than `max_model_len`; one extra
    block because that span rarely starts on a block boundary.

    Raises:
        ValueError: any argument given that is not a positive int.

    Source: `vllm/v1/kv_cache_interface.py:210` `FullAttentionSpec.max_memory_usage_bytes` and
    `vllm/v1/kv_cache_interface.py:463` `SlidingWindowSpec.max_admission_blocks_per_request`.
    """
    _require_positive(
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    if sliding_window is None:
        return _cdiv(max_model_len, block_size)
    _require_positive(sliding_window=sliding_window)
    tokens = min(sliding_window - 1 + max_num_batched_tokens, max_model_len)
    return _cdiv(tokens, block_size) + 1


def max_concurrency(
    num_blocks: int,
    max_model_len: int,
    block_size: int = 16,
    *,
    sliding_windows: Sequence[int | None] = (None,),
    max_num_batched_tokens: int = 2048,
) -> float:
    """Given. Longest requests the pool holds at once: the `x` in vLLM's startup log, a float.

    Args:
        num_blocks: blocks in the pool.
        max_model_len: tokens of the longest request.
        block_size: tokens per block.
        sliding_windows: one entry per KV cache group, None for full attention. A model whose
            layers are all alike has one group; a hybrid model has several, and a request needs
            blocks in each.
        max_num_batched_tokens: the step's token budget; matters to sliding windows only.

    Raises:
        ValueError: `num_blocks` negative, or no group.

    Source: `vllm/v1/core/kv_cache_utils.py:877` `get_max_concurrency_for_kv_cache_config`.
    """
    if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 0:
        raise ValueError(f"num_blocks={num_blocks!r}: need an int of at least 0")
    if not sliding_windows:
        raise ValueError(f"sliding_windows={sliding_windows!r}: need at least one group")
    needed = sum(
        blocks_per_request(
            max_model_len,
            block_size,
            sliding_window=window,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        for window in sliding_windows
    )
    return num_blocks / needed


# --- Yours: a config.json that you have never seen -----------------------------------------------


def read_geometry(config: Mapping[str, Any], kv_cache_dtype: str = "auto") -> KVGeometry:
    """The five factors, from the contents of a `config.json`.

    Recorded: what v0.22.1 reads from 36 configs of nine families. Three of them:

        llama       num_attention_heads 8, num_key_value_heads 2, hidden_size 1024
                    2 KV heads of 128
        gpt2        n_layer 34, n_head 32, n_embd 2048
                    32 KV heads of 64
        deepseek_v3 num_key_value_heads 32, kv_lora_rank 512, qk_rope_head_dim 64
                    one latent of 576 numbers for all heads (MLA), no K and no V beside it

    Must hold, besides every recorded config:

    - Bytes per number are those of `kv_cache_dtype`, of the config's `torch_dtype` (newer files say
      `dtype`) where that is "auto", of float32 where there is neither.
    - The window is `sliding_window`, unless `use_sliding_window` is there and false.
    - A key that is there and null is as left out.
    - `kind`: "MLA" where one latent is stored; "MHA" where KV heads equal query heads, "MQA" where
      there is one for several, else "GQA".

    Raises:
        ValueError: a number is missing, with a key that would have given it; or a dtype is not in
            `DTYPE_BYTES`, with those that are.
    """
    num_heads = _first(config, *HEADS)
    if config.get("kv_lora_rank") is not None:
        stored_vectors, num_kv_heads, kind = 1, 1, "MLA"
        head_dim = _first(config, "kv_lora_rank") + _first(config, "qk_rope_head_dim")
    else:
        stored_vectors = 2
        num_kv_heads = _kv_heads(config) or num_heads
        head_dim = config.get("head_dim") or _first(config, *SIZES) // num_heads
        kind = "MHA" if num_kv_heads == num_heads else "MQA" if num_kv_heads == 1 else "GQA"

    dtype = kv_cache_dtype
    if dtype == "auto":
        dtype = str(config.get("torch_dtype") or config.get("dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"kv_cache_dtype={dtype!r}: need one of {sorted(DTYPE_BYTES)}")

    window = config.get("sliding_window")
    if config.get("use_sliding_window") is False:
        window = None
    return KVGeometry(
        num_layers=_first(config, *LAYERS),
        stored_vectors=stored_vectors,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype_bytes=DTYPE_BYTES[dtype],
        sliding_window=window,
        kind=kind,
    )


LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
SIZES = ("hidden_size", "n_embd", "d_model")


def _first(config: Mapping[str, Any], *keys: str) -> int:
    """The first of the keys that is there."""
    for key in keys:
        if config.get(key) is not None:
            return int(config[key])
    raise ValueError(f"config has no {keys[0]!r}: need it to size the KV cache")


def _kv_heads(config: Mapping[str, Any]) -> int | None:
    """KV heads as a config spells them; None where each query head has its own."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return config.get("num_kv_heads") or config.get("num_key_value_heads")


def fits(
    config: Mapping[str, Any],
    free_bytes: int,
    max_model_len: int,
    *,
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
) -> float:
    """How many of the longest conversations fit: the `x` that vLLM logs, unrounded.

    All layers are alike: each keeps every token, or each has the config's window.

    A trace: Llama-3-8B with 8 GiB free and 2,048 tokens, 32.0; with an fp8 cache 64.0.

    Args:
        config: contents of a `config.json`.
        free_bytes: memory beside weights and activations; 0 or less holds none.
        max_model_len: tokens of the longest request.
        block_size: tokens per block.
        max_num_batched_tokens: the step's token budget.

    Raises:
        ValueError: as `read_geometry`; a length or a size that is not a positive int.
    """
    geometry = read_geometry(config, kv_cache_dtype)
    blocks = num_blocks(
        free_bytes,
        geometry.num_layers,
        geometry.num_kv_heads,
        geometry.head_dim,
        geometry.dtype_bytes,
        block_size,
        stored_vectors=geometry.stored_vectors,
    )
    return max_concurrency(
        blocks,
        max_model_len,
        block_size,
        sliding_windows=(geometry.sliding_window,),
        max_num_batched_tokens=max_num_batched_tokens,
    )


def factor_table(geometry: KVGeometry) -> list[tuple[str, int]]:
    """Given. The factors whose product is bytes per token, in this order, with these names.

    ("stored vectors", ...), ("layers", ...), ("KV heads", ...), ("head dim", ...),
    ("bytes per number", ...)
    """
    return [
        ("stored vectors", geometry.stored_vectors),
        ("layers", geometry.num_layers),
        ("KV heads", geometry.num_kv_heads),
        ("head dim", geometry.head_dim),
        ("bytes per number", geometry.dtype_bytes),
    ]


# --- Given: the JSON form and the command line ---------------------------------------------------


def plan(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Given. The whole calculation as one JSON object in, one JSON object out.

    Inputs: `config` (contents of a config.json), `gpu_bytes`, `weight_bytes`, `seq_len`, and
    optionally `kv_cache_dtype` ("auto") and `block_size` (16). Every layer is taken to keep every
    token: for a model with sliding windows the result is an upper limit of the memory.
    """
    geometry = read_geometry(inputs["config"], inputs.get("kv_cache_dtype", "auto"))
    block_size = inputs.get("block_size", 16)
    shape = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.dtype_bytes)
    per_token = kv_bytes_per_token(*shape, stored_vectors=geometry.stored_vectors)
    per_seq = kv_bytes_per_seq(per_token, inputs["seq_len"])
    free_bytes = inputs["gpu_bytes"] - inputs["weight_bytes"]
    blocks = num_blocks(
        max(0, free_bytes),
        *shape,
        block_size=block_size,
        stored_vectors=geometry.stored_vectors,
    )
    return {
        "kind": geometry.kind,
        "factors": [{"name": name, "value": value} for name, value in factor_table(geometry)],
        "bytes_per_token": per_token,
        "bytes_per_seq": per_seq,
        "max_concurrent_seqs": max_concurrent_seqs(
            inputs["gpu_bytes"], inputs["weight_bytes"], per_seq
        ),
        "num_blocks": blocks,
        "max_concurrency": max_concurrency(blocks, inputs["seq_len"], block_size),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Given. `python solution.py configs/llama-3-8b.json --gpu-gib 24 --weights-gib 16`."""
    parser = argparse.ArgumentParser(description="KV cache memory of a Hugging Face config.json")
    parser.add_argument("config", type=Path)
    parser.add_argument("--gpu-gib", type=float, default=24.0, help="usable GPU memory, GiB")
    parser.add_argument("--weights-gib", type=float, default=16.0, help="weights, GiB")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--kv-cache-dtype", default="auto", help=f"auto or {sorted(DTYPE_BYTES)}")
    parser.add_argument("--json", action="store_true", help="print the JSON form")
    args = parser.parse_args(argv)
    result = plan(
        {
            "config": json.loads(args.config.read_text(encoding="utf-8")),
            "gpu_bytes": int(args.gpu_gib * GIB),
            "weight_bytes": int(args.weights_gib * GIB),
            "seq_len": args.seq_len,
            "kv_cache_dtype": args.kv_cache_dtype,
        }
    )
    if args.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{args.config.name} ({result['kind']})")
    for row in result["factors"]:
        print(f"  {row['name']:<18}{row['value']:>8,}")
    print(f"  {'bytes per token':<18}{result['bytes_per_token']:>8,}")
    print(f"one sequence of {args.seq_len:,} tokens: {result['bytes_per_seq']:,} bytes")
    print(f"whole sequences that fit: {result['max_concurrent_seqs']}")
    print(
        f"in blocks: {result['num_blocks']:,}, "
        f"concurrency for {args.seq_len:,} tokens per request: {result['max_concurrency']:.2f}x"
    )


if __name__ == "__main__":
    main()

"""What a `config.json` makes of a memory: groups, pages, blocks and the two lines of the log.

Promises: every number is `mini_vllm.kv.sizing.cache_size`'s, here and in the page, which calls
`sized`; the browser computes nothing. Mirrors `vllm/v1/core/kv_cache_utils.py:1709`
`_report_kv_cache_config`.
"""

from __future__ import annotations

import json
import math
from typing import Any

from course.site.play_pins import RUNTIME_BYTES
from mini_vllm.kv.sizing import CHUNK, FULL, STATE, WINDOW, CacheSize, LayerCache, cache_size

KNOBS: dict[str, float] = {
    "memory_gib": 40.0, "max_model_len": 32_768, "block_size": 16, "max_num_batched_tokens": 8192,
    "dtype_bytes": 2, "state_dtype_bytes": 2,
}  # fmt: skip
"""What the widget begins with."""
MOST_CHARACTERS, MOST_GIB = 200_000, 1 << 16
WORDS = {FULL: "all tokens", WINDOW: "a window", CHUNK: "a chunk", STATE: "a state"}


def sized(
    config: str,
    memory_gib: float,
    max_model_len: int,
    block_size: int,
    max_num_batched_tokens: int,
    dtype_bytes: int,
    state_dtype_bytes: int,
    enable_prefix_caching: bool = True,
) -> dict[str, Any]:
    """Size a cache, and tell the way to it.

    Args:
        config: the text of a `config.json`.
        memory_gib: for the cache, in GiB.

    Raises:
        ValueError: no JSON, or what `cache_size` refuses.
    """
    if not isinstance(config, str) or len(config) > MOST_CHARACTERS:
        raise ValueError(f"config.json: need a text of at most {MOST_CHARACTERS:,} characters")
    try:
        raw = json.loads(config)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"config.json: not JSON: {error}") from None
    is_number = isinstance(memory_gib, int | float) and not isinstance(memory_gib, bool)
    if not is_number or not 0 < memory_gib <= MOST_GIB or math.isnan(memory_gib):
        raise ValueError(f"memory_gib={memory_gib!r}: need more than 0 and at most {MOST_GIB}")
    size = cache_size(
        raw, int(memory_gib * 2**30), max_model_len=max_model_len, block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens, dtype_bytes=dtype_bytes,
        state_dtype_bytes=state_dtype_bytes, enable_prefix_caching=enable_prefix_caching,
    )  # fmt: skip
    groups = [
        {
            "keeps": WORDS[layer.kind] + (f" of {layer.reach:,}" if layer.reach else ""),
            "layers": len(members), "block_size": layer.block_size,
            "most_blocks": layer.most_blocks(max_model_len, max_num_batched_tokens),
        }
        for layer, members in size.groups
    ]  # fmt: skip
    return {
        "groups": groups, "num_blocks": size.num_blocks, "lines": list(size.log_lines),
        "steps": _steps(size, groups, memory_gib, block_size),
    }  # fmt: skip


def _steps(
    size: CacheSize, groups: list[dict[str, Any]], memory_gib: float, block_size: int
) -> list[str]:
    """The arithmetic, a line each."""
    layer, per_group = size.groups[0][0], size.layers_per_group
    padding = f", {size.num_padding_layers} places empty" if size.num_padding_layers else ""
    sums = " + ".join(f"{group['most_blocks']:,}" for group in groups)
    total = f" = {size.blocks_per_request:,}" if len(groups) > 1 else ""
    return [
        f"groups: {len(groups)} of at most {per_group} layers{padding}",
        f"a page: {_page(size.groups, block_size)} = {layer.page_size_bytes:,} bytes",
        f"a block: {per_group} pages; {memory_gib:g} GiB hold {size.num_blocks:,}",
        f"a request of {size.max_model_len:,} tokens: {sums}{total} blocks",
        f"{size.num_blocks:,} / {size.blocks_per_request:,} = {size.max_concurrency:.2f} at once, "
        f"x {size.max_model_len:,} = {size.num_tokens:,} tokens",
    ]


def _page(groups: tuple[tuple[LayerCache, tuple[int, ...]], ...], asked: int) -> str:
    """Bytes of a block in one layer, as a product."""
    kept = [layer for layer, _ in groups if layer.kind != STATE]
    product = f"{kept[0].block_size} tokens x {kept[0].bytes_per_token:,}"
    states = [layer for layer, _ in groups if layer.kind == STATE]
    if states:
        longer = f" (asked for {asked})" if kept[0].block_size != asked else ""
        return f"{product}{longer}, at least a state of {states[0].state_bytes:,}"
    return product


def document() -> dict[str, Any]:
    """The widget's document: published shapes, and what the first knobs make of them."""
    from conformance.features.hybrid.kv_sizing import MODELS

    models = {}
    for name, (config, source) in MODELS.items():
        knobs = KNOBS | ({"block_size": 64} if "kv_lora_rank" in config else {})
        text = json.dumps(config, indent=1)
        models[name] = {
            "config": text, "source": source, "knobs": knobs, "sized": sized(text, **knobs),  # type: ignore[arg-type]
        }  # fmt: skip
    return {"models": models, "most": MOST_CHARACTERS, "bytes": RUNTIME_BYTES}

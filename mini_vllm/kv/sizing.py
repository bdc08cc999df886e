"""From a `config.json` and bytes of memory to groups, pages, blocks and the two lines of the log.

Promises: what `kv_cache_utils` of the pin makes of the same layers, to the digit; a recording of it
is replayed. Mirrors `vllm/v1/core/kv_cache_utils.py:1618` `get_kv_cache_groups`,
`vllm/v1/core/kv_cache_utils.py:1236` `get_kv_cache_config_from_groups` and
`vllm/v1/core/kv_cache_utils.py:1709` `_report_kv_cache_config`, for one rank and no drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mini_vllm.checks import flag, whole
from mini_vllm.models.config import Fields
from mini_vllm.models.groups import hybrid_block_size, layer_groups

FULL, WINDOW, CHUNK, STATE = "full", "sliding_window", "chunked_local", "mamba"
MOST_LAYERS = 10_000
ALL_WINDOW = ("mistral", "mixtral", "phi3", "starcoder2")
"""Types of models whose `sliding_window` is one of all layers: they give none of their own, so
`vllm/model_executor/layers/attention/attention.py:217` `Attention.__init__` takes the model's."""
ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,), "cross_attention_layers": ([],), "num_kv_shared_layers": (0,),
    "use_cla": (False,), "index_topk": (), "compress_ratios": (), "global_head_dim": (),
    "num_global_key_value_heads": (), "swa_head_dim": (), "swa_num_key_value_heads": (),
    "linear_attn_config": (), "hybrid_override_pattern": (), "attn_layer_period": (),
    "attn_layer_indices": (), "attn_type_list": (), "block_types": (), "mamba_d_ssm": (),
    "mamba_dt_rank": (),
}  # fmt: skip
"""Fields of models whose layers keep what this arithmetic does not know, and harmless values."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps."""

    kind: str
    """FULL, WINDOW, CHUNK or STATE."""
    block_size: int
    """Tokens per block."""
    bytes_per_token: int = 0
    """K and V, or the one latent vector of MLA; 0 for a state."""
    reach: int = 0
    """Tokens of the window, or of the chunk."""
    state_bytes: int = 0
    page_size_padded: int = 0
    """Bytes that a state's block takes, where that is more than the state."""
    states_per_request: int = 0
    """Blocks of states that a request holds at most; 0: one for every block of its tokens."""

    def __post_init__(self) -> None:
        if self.kind not in (kinds := (FULL, WINDOW, CHUNK, STATE)):
            raise ValueError(f"kind={self.kind!r}: need one of {', '.join(kinds)}")
        whole("block_size", self.block_size, 1)
        for name in (
            "bytes_per_token", "reach", "state_bytes", "page_size_padded", "states_per_request",
        ):  # fmt: skip
            whole(name, getattr(self, name), 0)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in this layer."""
        if self.kind == STATE:
            return max(self.state_bytes, self.page_size_padded)
        return self.block_size * self.bytes_per_token

    def most_blocks(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Blocks that one request of `max_model_len` tokens holds at most at a time."""
        if self.kind == WINDOW:  # one more, since a window may begin inside a block
            num_tokens = min(self.reach - 1 + max_num_batched_tokens, max_model_len)
            return -(-num_tokens // self.block_size) + 1
        if self.kind == CHUNK:
            num_tokens = min(self.reach + max_num_batched_tokens, max_model_len)
            return -(-num_tokens // self.block_size)
        return self.states_per_request or -(-max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What a memory holds of a model's cache."""

    groups: tuple[tuple[LayerCache, tuple[int, ...]], ...]
    """Of each what its layers keep, and which layers they are."""
    num_blocks: int
    max_model_len: int
    blocks_per_request: int
    """That a request of `max_model_len` tokens needs at most, over all groups."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in one layer; the same in every group."""
        return self.groups[0][0].page_size_bytes

    @property
    def layers_per_group(self) -> int:
        """Layers of the largest group: as many as share one pool each."""
        return max(len(layers) for _, layers in self.groups)

    @property
    def num_padding_layers(self) -> int:
        """Places in the groups that no layer has."""
        return sum(self.layers_per_group - len(layers) for _, layers in self.groups)

    @property
    def max_concurrency(self) -> float:
        """Requests of `max_model_len` tokens that fit."""
        return self.num_blocks / self.blocks_per_request

    @property
    def num_tokens(self) -> int:
        """What the log calls the size of the cache: those requests' tokens."""
        return int(self.max_concurrency * self.max_model_len)

    @property
    def log_lines(self) -> tuple[str, str]:
        """The two lines that vLLM writes when it has sized the cache."""
        return (
            f"GPU KV cache size: {self.num_tokens:,} tokens",
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: "
            f"{self.max_concurrency:.2f}x",
        )


def cache_size(
    config: Mapping[str, Any],
    memory_bytes: int,
    *,
    max_model_len: int | None = None,
    block_size: int = 16,
    max_num_batched_tokens: int = 8192,
    dtype_bytes: int = 2,
    state_dtype_bytes: int | None = None,
    enable_prefix_caching: bool = True,
    source: Path | str = "config.json",
) -> CacheSize:
    """Size the cache of the model that a `config.json` describes.

    Args:
        config: as read from the file; of a model with pictures, its `text_config` is taken.
        memory_bytes: for the cache.
        max_model_len: longest request; default what the config says.
        block_size: tokens per block, as asked for.
        max_num_batched_tokens: budget of a step, which bounds what a window holds.
        dtype_bytes: of K, V and the convolution's inputs.
        state_dtype_bytes: of the states; default `dtype_bytes`.
        enable_prefix_caching: states are kept for later requests, too.
        source: what messages begin with.

    Raises:
        ValueError: a field or argument of the wrong type or out of range; layers that keep what is
            not known here, or whose pages cannot be made equal; less memory than one request of
            `max_model_len` needs.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{source}: need an object")
    fields = Fields(config, source)
    _refuse_other_layers(fields)
    fields = fields.part("text_config") or fields
    _refuse_other_layers(fields)
    longest = fields.size("max_position_embeddings", 2048, least=2)
    max_model_len = whole("max_model_len", longest if max_model_len is None else max_model_len, 1)
    for name, value in (
        ("memory_bytes", memory_bytes), ("block_size", block_size),
        ("max_num_batched_tokens", max_num_batched_tokens), ("dtype_bytes", dtype_bytes),
    ):  # fmt: skip
        whole(name, value, 1)
    flag("enable_prefix_caching", enable_prefix_caching)
    state_dtype_bytes = whole("state_dtype_bytes", state_dtype_bytes or dtype_bytes, 1)
    layers = _layers(fields, block_size, dtype_bytes)
    if any(layer.kind == STATE for layer in layers):
        layers = _with_states(
            fields, layers, max_model_len, dtype_bytes, state_dtype_bytes, enable_prefix_caching
        )
    groups = group_layers(layers)
    size = max(len(members) for _, members in groups)
    needed = sum(layer.most_blocks(max_model_len, max_num_batched_tokens) for layer, _ in groups)
    page = groups[0][0].page_size_bytes
    if memory_bytes < size * page * needed:
        raise ValueError(
            f"memory_bytes={memory_bytes}: a request of max_model_len={max_model_len} tokens needs "
            f"{size * page * needed}"
        )
    return CacheSize(groups, memory_bytes // page // size, max_model_len, needed)


def group_layers(layers: Sequence[LayerCache]) -> tuple[tuple[LayerCache, tuple[int, ...]], ...]:
    """The groups that share block tables, with pages made equal by longer blocks.

    Raises:
        ValueError: no layers, or a page that is empty or does not divide the largest.
    """
    if not layers:
        raise ValueError(f"layers={layers!r}: need at least one")
    largest = max(layer.page_size_bytes for layer in layers)
    equal: list[LayerCache] = []
    for number, layer in enumerate(layers):
        if (
            not layer.page_size_bytes
            or largest % layer.page_size_bytes
            or (layer.kind == STATE and layer.page_size_bytes != largest)
        ):
            raise ValueError(
                f"layer {number}: a page of {layer.page_size_bytes} bytes does not divide the "
                f"largest, {largest}"
            )
        longer = layer.block_size * (largest // layer.page_size_bytes)
        equal.append(replace(layer, block_size=longer))
    return tuple((equal[found[0]], tuple(found)) for found in layer_groups(equal))


def _refuse_other_layers(fields: Fields) -> None:
    """Refuse by name what would keep something that is not counted here."""
    raw = fields.raw
    for name, harmless in ELSEWHERE.items():
        if raw.get(name) is not None and raw[name] not in harmless:
            fields.refuse(name, "a model without: what such layers keep is not known here")
    if raw.get("kv_lora_rank") is not None:
        for name in ("sliding_window", "attention_chunk_size", "layer_types", "layers_block_type"):
            if raw.get(name) is not None:
                fields.refuse(name, "null beside kv_lora_rank: MLA is known in all layers alone")
    elif raw.get("v_head_dim") not in (None, raw.get("head_dim")):
        fields.refuse("v_head_dim", "the same as head_dim")


def _layers(fields: Fields, block_size: int, dtype_bytes: int) -> list[LayerCache]:
    """What each layer keeps; states are sized later."""
    num_layers = fields.size("num_hidden_layers")
    if num_layers > MOST_LAYERS:
        fields.refuse("num_hidden_layers", f"at most {MOST_LAYERS:,}")
    if fields.raw.get("kv_lora_rank") is not None:  # MLA: one vector for all heads
        width = fields.size("kv_lora_rank") + fields.size("qk_rope_head_dim")
        return [LayerCache(FULL, block_size, width * dtype_bytes)] * num_layers
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    head_dim = fields.size("head_dim", fields.size("hidden_size") // heads or 1)
    per_token = 2 * kv_heads * head_dim * dtype_bytes
    kinds = {
        FULL: LayerCache(FULL, block_size, per_token),
        WINDOW: LayerCache(WINDOW, block_size, per_token, _reach(fields, "sliding_window")),
        CHUNK: LayerCache(CHUNK, block_size, per_token, _reach(fields, "attention_chunk_size")),
        STATE: LayerCache(STATE, block_size),
    }
    return [kinds[kind] for kind in _kinds(fields, num_layers)]


def _reach(fields: Fields, name: str) -> int:
    return fields.size(name) if fields.raw.get(name) is not None else 0


_NAMES = {
    "full_attention": FULL, "attention": FULL, "sliding_attention": WINDOW,
    "chunked_attention": CHUNK, "linear_attention": STATE, "mamba": STATE,
}  # fmt: skip


def _kinds(fields: Fields, num_layers: int) -> list[str]:
    """The kind of each layer, by `layer_types` or by how configurations said it before."""
    raw = fields.raw
    if (named := raw.get("layer_types") or raw.get("layers_block_type")) is not None:
        if not isinstance(named, list) or len(named) != num_layers or not {*named} <= {*_NAMES}:
            fields.refuse("layer_types", f"{num_layers} of {', '.join(_NAMES)}")
        kinds = [_NAMES[name] for name in named]
        if WINDOW in kinds:
            fields.size("sliding_window")
        if CHUNK in kinds:
            fields.size("attention_chunk_size")
        return kinds
    rare, common = FULL, None
    every = 0
    if raw.get("full_attention_interval") is not None:
        common, every = STATE, fields.size("full_attention_interval")
    elif raw.get("attention_chunk_size") is not None:
        common, every = CHUNK, fields.size("no_rope_layer_interval", 4)
    elif raw.get("sliding_window") is not None and raw.get("use_sliding_window") is not False:
        common, every = WINDOW, 0
        if raw.get("sliding_window_pattern") is not None or _is_gemma3(raw):
            every = fields.size("sliding_window_pattern", 6)
        elif raw.get("model_type") not in ALL_WINDOW:
            types = ", ".join(ALL_WINDOW)
            fields.refuse("layer_types", f"the kind of each layer, or a model_type of {types}")
    elif raw.get("linear_num_value_heads") is not None or raw.get("mamba_d_state") is not None:
        fields.refuse("layer_types", "the kind of each layer, since some have states")
    if common is None:
        return [FULL] * num_layers
    return [rare if every and (i + 1) % every == 0 else common for i in range(num_layers)]


def _is_gemma3(raw: Mapping[str, Any]) -> bool:
    return str(raw.get("model_type", "")).startswith("gemma3")


def _with_states(
    fields: Fields, layers: list[LayerCache], max_model_len: int, dtype_bytes: int,
    state_dtype_bytes: int, enable_prefix_caching: bool,
) -> list[LayerCache]:  # fmt: skip
    """The layers with states of their size, and blocks long enough that a page holds one.

    `vllm/platforms/interface.py:509` `Platform._align_hybrid_block_size`, for a backend whose
    blocks are multiples of the size asked for.
    """
    conv, states, chunk = _state(fields)
    state = conv * dtype_bytes + states * state_dtype_bytes
    attention = next((layer for layer in layers if layer.kind != STATE), None)
    if attention is None:
        raise ValueError(f"{fields.source}: layer_types: need a layer of attention")
    keeps_all = enable_prefix_caching and chunk is not None
    size = hybrid_block_size(
        state, attention.bytes_per_token, attention.block_size, chunk if keeps_all else None
    )
    page = size * attention.bytes_per_token
    # Mode "all" keeps a state per block, "align" the last two, "none" one for the whole sequence.
    most = 0 if keeps_all else 2 if enable_prefix_caching else 1
    block_size = size if enable_prefix_caching else max_model_len
    kept = LayerCache(STATE, block_size, 0, 0, state, page, most)
    return [kept if layer.kind == STATE else replace(layer, block_size=size) for layer in layers]


def _state(fields: Fields) -> tuple[int, int, int | None]:
    """Numbers that a layer keeps of the convolution and of the states, and tokens of a chunk.

    The chunk is None for gated delta nets, which do not keep a state per block.
    """
    if fields.raw.get("linear_num_value_heads") is not None:
        keys = fields.size("linear_num_key_heads") * (dim := fields.size("linear_key_head_dim"))
        heads, width = fields.size("linear_num_value_heads"), fields.size("linear_value_head_dim")
        conv = (2 * keys + heads * width) * (fields.size("linear_conv_kernel_dim", 4) - 1)
        return conv, heads * width * dim, None
    heads, states = fields.size("mamba_n_heads"), fields.size("mamba_d_state")
    inner = fields.size("mamba_expand", 2) * fields.size("hidden_size")
    channels = inner + 2 * fields.size("mamba_n_groups", 1) * states
    conv = channels * (fields.size("mamba_d_conv", 4, least=2) - 1)
    return conv, heads * (inner // heads) * states, fields.size("mamba_chunk_size", 256)

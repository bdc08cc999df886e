"""Record what the real v0.22.1 makes of the caches of published models, and what it logs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

Case = dict[str, Any]

ABOUT = (
    "`model` and `config` (the fields of its config.json that decide, from `source`), the "
    "arguments of `mini_vllm.kv.sizing.cache_size`, and what the real functions answer: "
    "`attention_block_size`, `groups` (kind, block size, layers), `page_size_bytes`, "
    "`num_padding_layers`, "
    "`num_blocks`, `max_concurrency`, and the two lines of the log."
)

TRANSFORMERS = "the defaults of transformers 5.24.0 {}, which are this model's"
GEMMA = (
    "`_VARIANTS` of src/transformers/models/gemma3/convert_gemma3_weights.py in huggingface/"
    "transformers at 0d7e95d, which writes this model's checkpoints; the pattern and the positions "
    "are the defaults of transformers 5.24.0 `Gemma3TextConfig`"
)
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "gemma-3-27b": (
        {
            "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376,
            "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
            "sliding_window": 1024, "sliding_window_pattern": 6, "max_position_embeddings": 131072,
        },
        GEMMA,
    ),
    "gpt-oss-120b": (
        {
            "model_type": "gpt_oss", "num_hidden_layers": 36, "hidden_size": 2880,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "sliding_window": 128, "max_position_embeddings": 131072,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
        },
        TRANSFORMERS.format("`GptOssConfig`"),
    ),
    "qwen3-next-80b-a3b": (
        {
            "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "full_attention_interval": 4, "max_position_embeddings": 32768,
        },
        TRANSFORMERS.format("`Qwen3NextConfig`"),
    ),
    "llama-4-scout": (
        {
            "model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5120,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
            "attention_chunk_size": 8192, "no_rope_layer_interval": 4,
            "max_position_embeddings": 131072,
        },
        TRANSFORMERS.format("`Llama4TextConfig`"),
    ),
    "mistral-7b-v0.1": (
        {
            "model_type": "mistral", "num_hidden_layers": 32, "hidden_size": 4096,
            "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096,
            "max_position_embeddings": 32768,
        },
        TRANSFORMERS.format("`MistralConfig`, with the 32,768 positions of the card"),
    ),
    "deepseek-v3": (
        {
            "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168,
            "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "max_position_embeddings": 163840,
        },
        TRANSFORMERS.format("`DeepseekV3Config`, with the 163,840 positions of the card"),
    ),
}  # fmt: skip
SHIPPED = ("byte-window", "byte-state")
GIB = 2**30


def asked() -> Iterator[Case]:
    """The questions: every model at several memories, lengths, blocks and budgets."""
    folder = Path(__file__).parents[3] / "models"
    for name, (config, source) in MODELS.items():
        size = 64 if name == "deepseek-v3" else 16
        for memory in (20 * GIB, 40 * GIB + 12345, 60 * GIB):
            for length, budget in ((8192, 2048), (32768, 8192), (32000, 8192)):
                for block_size in (size, 2 * size):
                    for caching in (True, False):
                        yield {
                            "model": name, "source": source, "config": config,
                            "memory_bytes": memory, "max_model_len": length,
                            "block_size": block_size, "max_num_batched_tokens": budget,
                            "dtype_bytes": 2, "enable_prefix_caching": caching,
                        }  # fmt: skip
    for name in SHIPPED:
        config = json.loads((folder / name / "config.json").read_text(encoding="utf-8"))
        for memory, block_size in ((GIB, 128), (2**26, 16), (GIB, 16)):
            for caching in (True, False):
                yield {
                    "model": name, "source": f"models/{name}/config.json", "config": config,
                    "memory_bytes": memory, "max_model_len": 4096, "block_size": block_size,
                    "max_num_batched_tokens": 4096, "dtype_bytes": 4,
                    "enable_prefix_caching": caching,
                }  # fmt: skip


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    for case in asked():
        yield case | answer(case)


def answer(case: Case) -> Case:
    """What the real functions make of one case."""
    from vllm.v1.core import kv_cache_utils

    size, specs = _specs(case)
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=case["max_model_len"]),
        cache_config=SimpleNamespace(num_gpu_blocks_override=None, mamba_cache_mode=_mode(case)),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=case["max_num_batched_tokens"],
            disable_hybrid_kv_cache_manager=False,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        speculative_config=None,
    )
    names = list(specs)
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, specs)
    config = kv_cache_utils.get_kv_cache_config_from_groups(
        vllm_config, groups, case["memory_bytes"]
    )
    lines: list[str] = []
    with mock.patch.object(kv_cache_utils, "logger") as logger:
        logger.info_once = lambda message, *arguments: lines.append(message % arguments)
        kv_cache_utils._report_kv_cache_config(vllm_config, config)
    most = max(len(group.layer_names) for group in groups)
    return {
        "attention_block_size": size,
        "groups": [
            [type(g.kv_cache_spec).__name__, g.kv_cache_spec.block_size,
             [names.index(layer) for layer in g.layer_names]]
            for g in groups
        ],
        "page_size_bytes": groups[0].kv_cache_spec.page_size_bytes,
        "num_padding_layers": sum(most - len(group.layer_names) for group in groups),
        "num_blocks": config.num_blocks,
        "max_concurrency": kv_cache_utils.get_max_concurrency_for_kv_cache_config(
            vllm_config, config
        ),
        "log_lines": lines,
    }  # fmt: skip


def _mode(case: Case) -> str:
    """By whether the model supports mode "all"."""
    if not case["enable_prefix_caching"]:
        return "none"
    return "align" if case["model"].startswith("qwen3-next") else "all"


def _specs(case: Case) -> tuple[int, dict[str, Any]]:
    """The block size of attention, and every layer's spec, as the real layers would give them."""
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    config, name = case["config"], case["model"]
    dtype = torch.float32 if case["dtype_bytes"] == 4 else torch.bfloat16
    heads = config["num_attention_heads"]
    told = {
        "block_size": case["block_size"], "dtype": dtype,
        "num_kv_heads": config["num_key_value_heads"],
        "head_size": config.get("head_dim", config["hidden_size"] // heads),
    }  # fmt: skip
    count = range(config["num_hidden_layers"])
    if name == "deepseek-v3":
        width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        told |= {"num_kv_heads": 1, "head_size": width}
        return case["block_size"], {f"layers.{i}": MLAAttentionSpec(**told) for i in count}
    if name == "qwen3-next-80b-a3b" or name == "byte-state":
        shapes = _state_shapes(name, config)
        size, padded, mamba = _aligned(case, told, shapes, dtype)
        state = MambaSpec(
            block_size=mamba, shapes=shapes, dtypes=(dtype, dtype), page_size_padded=padded,
            mamba_cache_mode=_mode(case),
        )  # fmt: skip
        every = config.get("full_attention_interval", 3)
        full = FullAttentionSpec(**told | {"block_size": size})
        return size, {f"layers.{i}": full if (i + 1) % every == 0 else state for i in count}
    full = FullAttentionSpec(**told)
    if "attention_chunk_size" in config:
        local: Any = ChunkedLocalAttentionSpec(
            **told, attention_chunk_size=config["attention_chunk_size"]
        )
    else:
        local = SlidingWindowSpec(**told, sliding_window=config["sliding_window"])
    if name == "mistral-7b-v0.1":
        return case["block_size"], {f"layers.{i}": local for i in count}
    types = config.get("layer_types")
    every = config.get("sliding_window_pattern", config.get("no_rope_layer_interval", 6))
    is_full = [types[i] == "full_attention" if types else (i + 1) % every == 0 for i in count]
    return case["block_size"], {
        f"layers.{i}": full if whole else local for i, whole in enumerate(is_full)
    }


def _state_shapes(name: str, config: Case) -> Any:
    """By the pin's own calculators."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes

    if name == "byte-state":
        return Shapes.mamba2_state_shape(
            tp_world_size=1,
            intermediate_size=config["mamba_expand"] * config["hidden_size"],
            n_groups=config["mamba_n_groups"], num_heads=config["mamba_n_heads"],
            head_dim=config["mamba_d_head"], state_size=config["mamba_d_state"],
            conv_kernel=config["mamba_d_conv"],
        )  # fmt: skip
    return Shapes.gated_delta_net_state_shape(
        1, config["linear_num_key_heads"], config["linear_num_value_heads"],
        config["linear_key_head_dim"], config["linear_value_head_dim"],
        config["linear_conv_kernel_dim"],
    )  # fmt: skip


def _aligned(case: Case, told: Case, shapes: Any, dtype: Any) -> tuple[int, int | None, int]:
    """Block size of attention, padded page and block size of the states, by the pin's own rule."""
    from vllm.model_executor import models
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backend import MultipleOf

    class Model:
        @staticmethod
        def get_mamba_state_shape_from_config(config: Any) -> Any:
            return shapes

        @staticmethod
        def get_mamba_state_dtype_from_config(config: Any) -> Any:
            return dtype, dtype

    class Backend:
        @staticmethod
        def get_supported_kernel_block_sizes() -> list[Any]:
            return [MultipleOf(16)]

    cache = SimpleNamespace(
        cache_dtype="auto", block_size=case["block_size"], mamba_cache_mode=_mode(case),
        mamba_block_size=None, user_specified_mamba_block_size=False, mamba_page_size_padded=None,
        kv_cache_dtype_skip_layers=[],
    )  # fmt: skip
    model = SimpleNamespace(
        dtype=dtype, use_mla=False, architecture="",
        get_num_kv_heads=lambda parallel: told["num_kv_heads"],
        get_head_size=lambda: told["head_size"],
        get_mamba_chunk_size=lambda: case["config"].get("mamba_chunk_size"),
    )  # fmt: skip
    config = SimpleNamespace(
        cache_config=cache, model_config=model, parallel_config=SimpleNamespace()
    )
    registry = type(models.ModelRegistry)
    with (
        mock.patch.object(registry, "resolve_model_cls", lambda *a, **k: (Model, "")),
        # It wants a whole configuration, which only a backend that asks for it would read.
        mock.patch("vllm.config.vllm.set_current_vllm_config", lambda c: contextlib.nullcontext()),
    ):
        Platform._align_hybrid_block_size(config, Backend)
    mamba = cache.mamba_block_size if _mode(case) != "none" else case["max_model_len"]
    return cache.block_size, cache.mamba_page_size_padded, mamba

"""What vLLM's own code reads from configs of many families: writes recorded.json.

    PYTHONPATH=upstream python phase-00-foundations/labs/lab-02-kv-memory-calculator/record.py

The spellings are those of the families, the numbers are drawn. Needs torch and transformers, as
the pinned tree does.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FILE = HERE / "recorded.json"
EACH = 4
"""Configs of each family."""


def drawn() -> list[dict[str, Any]]:
    """The configs, as they would stand in a config.json."""
    rng = random.Random("00-02")
    found = []
    for family in range(EACH):
        for make in (_llama, _wide, _opt, _gpt2, _bloom, _falcon, _mpt, _bigcode, _deepseek):
            heads, dim = rng.choice((8, 12, 16, 32)), rng.choice((64, 80, 128))
            layers = rng.randrange(6, 60)
            found.append(make(rng, layers, heads, dim, family))
    return found


def _llama(rng: random.Random, layers: int, heads: int, dim: int, turn: int) -> dict[str, Any]:
    kv = {"num_key_value_heads": (heads, heads // 4, 1, heads // 2)[turn]}
    size = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": heads * dim}
    return {"model_type": "llama", **size, **kv}


def _wide(rng: random.Random, layers: int, heads: int, dim: int, turn: int) -> dict[str, Any]:
    own = {"head_dim": rng.choice((128, 256)), "num_key_value_heads": heads // 2}
    return {**_llama(rng, layers, heads, dim, turn), "model_type": "qwen3", **own}


def _opt(rng: random.Random, layers: int, heads: int, dim: int, turn: int) -> dict[str, Any]:
    size = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": heads * dim}
    return {"model_type": "opt", **size}


def _gpt2(rng: random.Random, layers: int, heads: int, dim: int, turn: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_layer": layers, "n_head": heads, "n_embd": heads * dim}


def _bloom(rng: random.Random, layers: int, heads: int, dim: int, turn: int) -> dict[str, Any]:
    return {"model_type": "bloom", "n_layer": layers, "n_head": heads, "hidden_size": heads * dim}


def _falcon(rng: random.Random, layers: int, heads: int, dim: int, turn: int) -> dict[str, Any]:
    told: dict[str, Any] = {"model_type": "falcon", "num_hidden_layers": layers}
    told |= {"num_attention_heads": heads, "hidden_size": heads * dim}
    if turn % 2:
        told |= {"multi_query": True} if turn == 1 else {}  # ignored there
        return told | {"new_decoder_architecture": True, "num_kv_heads": heads // 2}
    return told | {"multi_query": turn == 0, "new_decoder_architecture": False}


def _mpt(rng: random.Random, layers: int, heads: int, dim: int, turn: int) -> dict[str, Any]:
    return {"model_type": "mpt", "n_layers": layers, "n_heads": heads, "d_model": heads * dim}


def _bigcode(rng: random.Random, layers: int, heads: int, dim: int, turn: int) -> dict[str, Any]:
    told = {"n_layer": layers, "n_head": heads, "n_embd": heads * dim}
    return {"model_type": "gpt_bigcode", **told, "multi_query": True}


def _deepseek(rng: random.Random, layers: int, heads: int, dim: int, turn: int) -> dict[str, Any]:
    latent = {"kv_lora_rank": rng.choice((256, 512)), "qk_rope_head_dim": rng.choice((32, 64))}
    size = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": heads * dim}
    return {"model_type": "deepseek_v3", **size, "num_key_value_heads": heads, **latent}


def read(config: dict[str, Any]) -> dict[str, Any]:
    """Layers, KV heads, head size and MLA, as the pinned tree takes them from a config."""
    import vllm.config  # noqa: F401 (before what it imports)
    from transformers import AutoConfig
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    rest = {key: value for key, value in config.items() if key != "model_type"}
    hf = AutoConfig.for_model(config["model_type"], **rest)
    kind = MODEL_ARCH_CONFIG_CONVERTORS.get(config["model_type"], ModelArchConfigConvertorBase)
    found = kind(hf, hf.get_text_config())
    return {
        "num_layers": found.get_num_hidden_layers(),
        "num_kv_heads": found.get_total_num_kv_heads(),
        "head_dim": found.get_head_size(),
        "mla": found.is_deepseek_mla(),
    }


def main() -> None:
    """Record every config."""
    rows = ",\n ".join(json.dumps({"config": c, "read": read(c)}) for c in drawn())
    FILE.write_text(f'{{"upstream": "0.22.1", "cases": [\n {rows}\n]}}\n', encoding="utf-8")
    print(f"{FILE.name}: {len(drawn())} configs")


if __name__ == "__main__":
    main()

"""The checkpoint of lab 14-06: a small decoder in a layout of its own, made of one seed.

Each layer feeds attention and MLP from the same norm and adds both to the residual, as GPT-J and
Command R do. On disk the names are those of Meta's files: `wq`, `wkv` with keys above values, `wo`,
and `w1` (gate), `w2` (down), `w3` (up).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

MODELS = Path(__file__).resolve().parents[3] / "models"
CONFIG: dict[str, Any] = {
    "architectures": ["ParallelLlamaForCausalLM"], "model_type": "llama", "vocab_size": 257,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "hidden_act": "silu", "parallel_block": True,
    "residual_multiplier": 0.5, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": 256, "dtype": "float32", "torch_dtype": "float32",
}  # fmt: skip


def tensors(seed: int = 14) -> dict[str, np.ndarray]:
    """Every tensor of the file, float32."""
    c, rng = CONFIG, np.random.default_rng(seed)
    hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    shapes = {"transformer.tok_embeddings.weight": (c["vocab_size"], hidden)}
    for layer in range(c["num_hidden_layers"]):
        at = f"transformer.layers.{layer}"
        shapes |= {
            f"{at}.norm.weight": (hidden,), f"{at}.attention.wq.weight": (q, hidden),
            f"{at}.attention.wkv.weight": (2 * kv, hidden),
            f"{at}.attention.wo.weight": (hidden, q),
            f"{at}.feed_forward.w1.weight": (inner, hidden),
            f"{at}.feed_forward.w2.weight": (hidden, inner),
            f"{at}.feed_forward.w3.weight": (inner, hidden),
        }  # fmt: skip
    shapes["transformer.norm.weight"] = (hidden,)
    made = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        if "norm" in name:
            made[name] = 1 + 0.2 * noise
        elif "embeddings" in name:
            made[name] = noise
        else:
            made[name] = noise * 2.5 / np.sqrt(shape[1])  # lively: each token reads its context
    return {name: array.astype(np.float32) for name, array in made.items()}


def write(folder: Path, held: dict[str, np.ndarray] | None = None, **fields: Any) -> Path:
    """A folder that both engines load; `fields` change its `config.json`.

    Args:
        held: the tensors; default those of `tensors`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | fields), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "byte-llama" / file, folder)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, body = 0, []
    for name, array in (tensors() if held is None else held).items():
        raw = np.ascontiguousarray(array, "<f4").tobytes()
        header[name] = {
            "dtype": "F32", "shape": list(array.shape), "data_offsets": [end, end + len(raw)],
        }  # fmt: skip
        end += len(raw)
        body.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(body)
    )
    return folder


def prompts() -> list[list[int]]:
    """24 prompts of bytes, 5 to 150 long; every second begins with the same 64."""
    rng = np.random.default_rng(41)
    shared = rng.integers(0, 256, 64).tolist()
    made = []
    for number in range(24):
        own = rng.integers(0, 256, int(rng.integers(5, 87))).tolist()
        made.append(shared + own if number % 2 else own)
    return made

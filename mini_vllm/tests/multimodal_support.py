"""Small checkpoints that see, with random weights, and pictures for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mini_vllm.models.config import Fields, expected_shapes, parse_config
from mini_vllm.multimodal import vision
from mini_vllm.tokenizer import MarkedByteTokenizer

SIDE, PATCH, MARKER = 14, 7, 257
TEXT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 258,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "eos_token_id": 256,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": TEXT,
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 12, "intermediate_size": 20,
        "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE, "patch_size": PATCH,
        "projection_dim": 12,
    },
    "image_token_index": MARKER, "projector_hidden_act": "gelu", "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default", "tie_word_embeddings": True, "eos_token_id": 256,
}  # fmt: skip
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor", "do_resize": True,
    "size": {"shortest_edge": SIDE}, "resample": 3, "do_center_crop": True,
    "crop_size": {"height": SIDE, "width": SIDE}, "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7],
    "do_convert_rgb": True,
}  # fmt: skip


def write_llava(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A folder in LLaVA layout whose pictures are four tokens; `changes` replace top-level fields.

    Weights are large enough for pictures to change the greedy token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw, rng = CONFIG | changes, np.random.default_rng(seed)
    fields = Fields(raw, folder / "config.json")
    text = expected_shapes(parse_config(raw["text_config"], folder / "config.json"))
    shapes = {f"language_model.{name}": shape for name, shape in text.items()}
    shapes |= vision.expected_shapes(vision.parse_vision_config(fields))
    weights = {}
    for name, shape in shapes.items():
        value = rng.normal(0.0, 0.4, shape)
        if "norm" in name and name.endswith("weight"):
            value = 1.0 + 0.1 * value
        weights[name] = value.astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    vocab = {f"b{i}": i for i in range(256)} | {"<eos>": 256, "<image>": MARKER}
    for name, data in (
        ("config.json", raw), ("preprocessor_config.json", PREPROCESSOR),
        ("generation_config.json", {"eos_token_id": 256}),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": vocab, "merges": []}}),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps(data))
    return folder


def picture(seed: int, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """A picture of noise, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def prompt(*parts: Any) -> dict[str, Any]:
    """A prompt of texts and pictures in their order."""
    text = "".join(part if isinstance(part, str) else "<image>" for part in parts)
    pictures = [part for part in parts if not isinstance(part, str)]
    return (
        {"prompt": text, "multi_modal_data": {"image": pictures}} if pictures else {"prompt": text}
    )


TOKENIZER = MarkedByteTokenizer("<image>")

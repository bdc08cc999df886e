"""A CLIP tower and LLaVA's projector in numpy: a picture becomes rows that stand for words.

Promises: the rows of `transformers` to rounding; one picture is one run, so its rows depend on
nothing else of the batch. Mirrors `vllm/model_executor/models/clip.py:635` `CLIPVisionTransformer`
and `vllm/model_executor/models/llava.py:128` `LlavaMultiModalProjector`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mini_vllm.models.config import Fields
from mini_vllm.models.loader import Shard

_erf = np.frompyfunc(math.erf, 1, 1)


def gelu(x: np.ndarray) -> np.ndarray:
    """x times the probability that a normal number is below it."""
    return x * (0.5 + 0.5 * np.asarray(_erf(x / math.sqrt(2)), dtype=x.dtype))


def quick_gelu(x: np.ndarray) -> np.ndarray:
    """The same, nearly: x times a logistic of 1.702 x."""
    return x / (1 + np.exp(-1.702 * x))


ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "gelu": gelu, "quick_gelu": quick_gelu,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Sizes of a tower and what LLaVA takes of it; names are those of `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    image_size: int
    patch_size: int
    layer_norm_eps: float
    hidden_act: str
    text_hidden_size: int
    projector_hidden_act: str
    projector_bias: bool
    vision_feature_layer: int
    """Layers that are run."""
    keeps_class_token: bool
    image_token_index: int
    """The token that stands for a picture."""

    @property
    def num_patches(self) -> int:
        """Of a picture."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_image_tokens(self) -> int:
        """Rows of a picture, and placeholders in the prompt:
        `vllm/model_executor/models/llava.py:188` `BaseLlavaProcessingInfo.get_num_image_tokens`.
        """
        return self.num_patches + self.keeps_class_token


def parse_vision_config(fields: Fields) -> VisionConfig:
    """The tower's part of a LLaVA `config.json`.

    Raises:
        ValueError: a field of the wrong type or out of range, or a variant that is not implemented.
    """
    vision, text = fields.part("vision_config"), fields.part("text_config")
    if vision is None or text is None:
        fields.refuse("vision_config", "an object, beside text_config")
    if vision.raw.get("model_type", "clip_vision_model") != "clip_vision_model":
        vision.refuse("model_type", "'clip_vision_model'")
    for part, name in ((vision, "hidden_act"), (fields, "projector_hidden_act")):
        default = "quick_gelu" if name == "hidden_act" else "gelu"
        if part.raw.get(name, default) not in ACTIVATIONS:
            part.refuse(name, " or ".join(ACTIVATIONS))
    if vision.size("num_channels", 3) != 3:
        vision.refuse("num_channels", "3")
    hidden, heads = vision.size("hidden_size"), vision.size("num_attention_heads")
    if hidden % heads:
        vision.refuse("num_attention_heads", f"a divisor of hidden_size={hidden}")
    side, patch = vision.size("image_size", 224), vision.size("patch_size", 32)
    if side % patch or side > 4096:
        vision.refuse("image_size", f"a multiple of patch_size={patch}, at most 4096")
    num_layers, layer = vision.size("num_hidden_layers"), fields.raw.get("vision_feature_layer", -2)
    if type(layer) is not int or not -num_layers - 1 <= layer <= num_layers:
        fields.refuse("vision_feature_layer", f"one layer of {num_layers}")
    strategy = fields.raw.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        fields.refuse("vision_feature_select_strategy", "'default' or 'full'")
    named = [n for n in ("image_token_index", "image_token_id") if fields.raw.get(n) is not None]
    has_bias = fields.raw.get("multimodal_projector_bias")
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=vision.size("intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        image_size=side,
        patch_size=patch,
        layer_norm_eps=vision.number("layer_norm_eps", 1e-5, least=1e-30, most=1.0),
        hidden_act=vision.raw.get("hidden_act", "quick_gelu"),
        text_hidden_size=text.size("hidden_size"),
        projector_hidden_act=fields.raw.get("projector_hidden_act", "gelu"),
        projector_bias=has_bias is None or fields.flag("multimodal_projector_bias"),
        vision_feature_layer=layer if layer >= 0 else num_layers + 1 + layer,
        keeps_class_token=strategy == "full",
        image_token_index=fields.size((named or ["image_token_index"])[0], least=0),
    )


def expected_shapes(c: VisionConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that are read, by name in a LLaVA checkpoint."""
    width, inner = c.hidden_size, c.intermediate_size
    stem, shapes = "vision_tower.vision_model", dict[str, tuple[int, ...]]()
    shapes[f"{stem}.embeddings.class_embedding"] = (width,)
    shapes[f"{stem}.embeddings.patch_embedding.weight"] = (width, 3, c.patch_size, c.patch_size)
    shapes[f"{stem}.embeddings.position_embedding.weight"] = (1 + c.num_patches, width)
    named: dict[str, tuple[int, ...]] = {f"{stem}.pre_layrnorm": (width,)}
    for layer in range(c.vision_feature_layer):
        at = f"{stem}.encoder.layers.{layer}"
        named |= {f"{at}.layer_norm1": (width,), f"{at}.layer_norm2": (width,)}
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            named[f"{at}.self_attn.{name}"] = (width, width)
        named |= {f"{at}.mlp.fc1": (inner, width), f"{at}.mlp.fc2": (width, inner)}
    named["multi_modal_projector.linear_1"] = (c.text_hidden_size, width)
    named["multi_modal_projector.linear_2"] = (c.text_hidden_size, c.text_hidden_size)
    for name, shape in named.items():
        shapes[f"{name}.weight"] = shape
        if c.projector_bias or not name.startswith("multi_modal_projector"):
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def load_vision_weights(folder: Path, config: VisionConfig) -> dict[str, np.ndarray]:
    """The tower's and the projector's tensors, as float32.

    Raises:
        ValueError: one is missing, of another shape or not finite; the file is named.
    """
    wanted = expected_shapes(config)
    weights: dict[str, np.ndarray] = {}
    files = sorted(folder.glob("*.safetensors"))
    for shard in map(Shard.open, files):
        for name in (n for n in wanted if n in shard.tensors):
            shard.check(name, wanted[name])
            weights[name] = shard.read(name)
    if missing := sorted(set(wanted) - set(weights)):
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(f"{folder}: checkpoint lacks {len(missing)} tensor(s): {names}")
    return weights


class VisionEncoder:
    """Tower and projector: `encode(pixels)` gives a picture's rows."""

    def __init__(
        self, config: VisionConfig, weights: Mapping[str, np.ndarray], dtype: np.dtype
    ) -> None:
        """`weights` as `load_vision_weights` gives them; `dtype` that of the language model."""
        self.config, self.dtype = config, dtype
        self.num_runs = 0
        """Pictures encoded so far."""
        self._weights = {name: array.astype(dtype) for name, array in weights.items()}
        self._act = ACTIVATIONS[config.hidden_act]
        self._projector_act = ACTIVATIONS[config.projector_hidden_act]

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """The rows [num_image_tokens, text_hidden_size] of one picture [3, side, side]."""
        self.num_runs += 1
        hidden = self._embed(pixels.astype(self.dtype))  # [1 + num_patches, hidden]
        for layer in range(self.config.vision_feature_layer):
            self._layer(f"vision_tower.vision_model.encoder.layers.{layer}", hidden)
        rows = hidden if self.config.keeps_class_token else hidden[1:]
        rows = self._projector_act(self._linear("multi_modal_projector.linear_1", rows))
        return self._linear("multi_modal_projector.linear_2", rows)

    def _embed(self, pixels: np.ndarray) -> np.ndarray:
        """Patches in reading order behind the class token, with their positions."""
        patch, stem = self.config.patch_size, "vision_tower.vision_model.embeddings"
        grid = self.config.image_size // patch
        tiles = pixels.reshape(3, grid, patch, grid, patch).transpose(1, 3, 0, 2, 4)
        filters = self._weights[f"{stem}.patch_embedding.weight"]
        patches = tiles.reshape(grid * grid, -1) @ filters.reshape(len(filters), -1).T
        hidden = np.concatenate([self._weights[f"{stem}.class_embedding"][None], patches])
        hidden += self._weights[f"{stem}.position_embedding.weight"]
        return self._norm("vision_tower.vision_model.pre_layrnorm", hidden)

    def _layer(self, at: str, hidden: np.ndarray) -> None:
        """Norm, attention, norm, MLP; adds both results to `hidden` in place."""
        heads = self.config.num_attention_heads
        normed = self._norm(f"{at}.layer_norm1", hidden)
        query, key, value = (
            self._linear(f"{at}.self_attn.{name}", normed)
            .reshape(len(hidden), heads, -1)
            .transpose(1, 0, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )  # [heads, n, head_dim]
        scores = query @ key.transpose(0, 2, 1) * query.shape[-1] ** -0.5
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)  # every patch looks at every other
        attended = (scores @ value).transpose(1, 0, 2).reshape(len(hidden), -1)
        hidden += self._linear(f"{at}.self_attn.out_proj", attended)
        inner = self._act(self._linear(f"{at}.mlp.fc1", self._norm(f"{at}.layer_norm2", hidden)))
        hidden += self._linear(f"{at}.mlp.fc2", inner)

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        y = x @ self._weights[f"{name}.weight"].T
        bias = self._weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt(
            (centred * centred).mean(-1, keepdims=True) + self.config.layer_norm_eps
        )
        return centred / deviation * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]

"""The checkpoints of this lab: a small Llama's tensors by name and shape, whole and damaged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Shapes = dict[str, tuple[int, ...]]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False,
    "torch_dtype": "float32", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
AT = "model.layers.0."


def shapes_of(config: dict[str, Any]) -> Shapes:
    """The tensors that a checkpoint of this configuration has on disk."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    found: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}."
        found |= {
            f"{at}self_attn.q_proj.weight": (rows, hidden),
            f"{at}self_attn.k_proj.weight": (kv_rows, hidden),
            f"{at}self_attn.v_proj.weight": (kv_rows, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, rows),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
        }
    return found


def damages() -> Iterator[tuple[str, dict[str, Any], Shapes]]:
    """(what is wrong, the configuration, the tensors on disk)."""
    whole = shapes_of(CONFIG)

    def without(*names: str) -> Shapes:
        return {name: shape for name, shape in whole.items() if name not in names}

    yield "nothing", CONFIG, whole
    yield "tied: no head on disk", CONFIG | {"tie_word_embeddings": True}, without("lm_head.weight")
    yield "tied: a head on disk", CONFIG | {"tie_word_embeddings": True}, whole
    for leaf in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj",
        "input_layernorm", "post_attention_layernorm",
    ):  # fmt: skip
        yield f"{leaf} of layer 0 missing", CONFIG, without(f"{AT}{leaf}.weight")
    attention = [f"{AT}self_attn.{name}_proj.weight" for name in "qkv"]
    yield "q, k and v of layer 0 missing", CONFIG, without(*attention)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        yield f"{name} missing", CONFIG, without(name)
    for name, shape in (
        ("foo.bar.weight", (3,)),
        ("model.foo.weight", (3,)),
        ("model.layers.2.mlp.up_proj.weight", (256, 128)),
        (f"{AT}self_attn.kk_proj.weight", (32, 128)),
        (f"{AT}self_attn.q_proj.bias", (128,)),
        (f"{AT}self_attn.rotary_emb.inv_freq", (8,)),
        ("lm_head.bias", (320,)),
        (f"{AT}self_attn.q_norm.weight", (16,)),
    ):
        yield f"{name} too many", CONFIG, whole | {name: shape}
    fused = without(*attention) | {f"{AT}self_attn.qkv_proj.weight": (192, 128)}
    yield "q, k and v of layer 0 fused on disk", CONFIG, fused
    for leaf, shape in (
        ("self_attn.q_proj", (64, 128)),
        ("self_attn.q_proj", (256, 128)),
        ("self_attn.k_proj", (128, 128)),
        ("self_attn.k_proj", (16, 128)),
        ("self_attn.v_proj", (33, 128)),
        ("self_attn.k_proj", (32, 64)),
        ("self_attn.k_proj", (32, 256)),
        ("self_attn.o_proj", (128, 256)),
        ("self_attn.o_proj", (128, 64)),
        ("self_attn.o_proj", (256, 128)),
        ("mlp.gate_proj", (512, 128)),
        ("mlp.up_proj", (128, 128)),
        ("mlp.down_proj", (128, 512)),
        ("mlp.down_proj", (64, 256)),
        ("input_layernorm", (64,)),
        ("input_layernorm", (1,)),
        ("post_attention_layernorm", (256,)),
    ):
        yield f"{leaf} of layer 0 is {shape}", CONFIG, whole | {f"{AT}{leaf}.weight": shape}
    for name, shape in (
        ("model.embed_tokens.weight", (319, 128)), ("model.embed_tokens.weight", (321, 128)),
        ("lm_head.weight", (320, 64)), ("model.norm.weight", (127,)),
    ):  # fmt: skip
        yield f"{name} is {shape}", CONFIG, whole | {name: shape}
    for key, value in (
        ("num_key_value_heads", 8), ("num_key_value_heads", 1), ("intermediate_size", 512),
        ("intermediate_size", 128), ("num_hidden_layers", 3), ("num_hidden_layers", 1),
        ("vocab_size", 300),
    ):  # fmt: skip
        yield f"the configuration says {key}={value}", CONFIG | {key: value}, whole

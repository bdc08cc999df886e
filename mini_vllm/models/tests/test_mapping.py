"""Rules from tensors to parameters: every row once, and errors that say what is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.models import families, loader
from mini_vllm.models.config import expected_shapes, parse_config
from mini_vllm.models.families import (
    Architecture,
    fused_shapes,
    llama_rules,
    parse_gemma3,
    parse_granite_hybrid,
    register_model,
)
from mini_vllm.models.hybrid import hybrid_shapes
from mini_vllm.models.loader import load_by_rules, load_checkpoint, resolve
from mini_vllm.models.mapping import (
    Place,
    Prefixed,
    Renamed,
    Split,
    Stacked,
    Tied,
    check_rules,
    load_parameters,
    places_of,
    plan_of,
)
from mini_vllm.models.tests.test_checkpoint import byte_tokenizer_json
from mini_vllm.models.transformer import Transformer

QKV = Stacked("qkv_proj", (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)))
SMALL = {
    "vocab_size": 257, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "eos_token_id": 256,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 8}
CONFIGS = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"head_dim": 6},
    "MixtralForCausalLM": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": MOE | {"mlp_only_layers": [1], "norm_topk_prob": True},
}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("l.3.self_attn.q_proj.weight", Place("l.3.self_attn.qkv_proj.weight", slice(0, 4))),
        ("l.3.self_attn.v_proj.bias", Place("l.3.self_attn.qkv_proj.bias", slice(6, 8))),
        ("l.3.self_attn.qkv_proj.weight", Place("l.3.self_attn.qkv_proj.weight")),
        ("l.3.self_attn.kv_proj.weight", Place("l.3.self_attn.kv_proj.weight")),
        ("norm.weight", Place("norm.weight")),
    ],
)
def test_a_rule_matches_whole_parts_of_a_name(name, place):
    assert places_of(name, [QKV]) == [place]


def test_rules_are_walked_in_order_and_a_split_fills_several():
    rules = [
        Prefixed("language_model", "model"), Renamed("feed_forward", "mlp"),
        Split("fused", (("gate_proj", 3), ("up_proj", 3))),
    ]  # fmt: skip
    assert places_of("language_model.0.feed_forward.fused.weight", rules) == [
        Place("model.0.mlp.gate_proj.weight", None, slice(0, 3)),
        Place("model.0.mlp.up_proj.weight", None, slice(3, 6)),
    ]
    assert places_of("lm_head.weight", [Prefixed("lm_head")]) == [Place("weight")]


def tensors_of(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def load(tensors, parameters, rules=(), **options):
    shapes = {name: array.shape for name, array in tensors.items()}
    return load_parameters(shapes, tensors.__getitem__, parameters, rules, **options)


def test_every_row_comes_from_the_tensor_that_its_rule_names():
    tensors = tensors_of({"a.q_proj.weight": (4, 3), "a.v_proj.weight": (2, 3),
                          "a.k_proj.weight": (2, 3), "e.weight": (5, 3), "g.fused": (6, 3),
                          "unused": (1,)})  # fmt: skip
    parameters = {
        "a.qkv_proj.weight": (8, 3), "e.weight": (5, 3), "head.weight": (5, 3), "g.up": (2, 3),
        "g.gate": (4, 3),
    }  # fmt: skip
    rules = [QKV, Split("fused", (("gate", 4), ("up", 2))), Tied("head.weight", "e.weight")]
    loaded = load(tensors, parameters, rules)
    q, k, v = (tensors[f"a.{n}_proj.weight"] for n in "qkv")
    np.testing.assert_array_equal(loaded["a.qkv_proj.weight"], np.concatenate([q, k, v]))
    np.testing.assert_array_equal(loaded["g.up"], tensors["g.fused"][4:])
    assert loaded["head.weight"] is loaded["e.weight"] and loaded.keys() == parameters.keys()


@pytest.mark.parametrize(
    ("tensors", "parameters", "rules", "message"),
    [
        ({"q_proj": (4, 3), "v_proj": (2, 3)}, {"qkv_proj": (8, 3)}, [QKV],
         r"file: checkpoint lacks k_proj: rows 4 to 6 of qkv_proj, \(8, 3\)"),
        ({"q_proj": (4, 3), "k_proj": (2, 3)}, {"qkv_proj": (8, 3)}, [QKV],
         r"file: checkpoint lacks v_proj: rows 6 to 8 of qkv_proj"),
        ({}, {"qkv_proj": (8, 3)}, [QKV], r"checkpoint lacks q_proj: rows 0 to 8 of qkv_proj"),
        ({}, {"norm": (3,)}, [QKV], r"file: checkpoint lacks norm, \(3,\)"),
        ({}, {"b.norm": (3,)}, [Prefixed("lm", "b")], r"checkpoint lacks lm\.norm: rows 0 to 3"),
        ({"q_proj": (4, 3), "k_proj": (4, 3), "v_proj": (2, 3)}, {"qkv_proj": (8, 3)}, [QKV],
         r"k_proj has shape \(4, 3\), need \(2, 3\) for qkv_proj"),
        ({"q_proj": (4, 5), "k_proj": (2, 3), "v_proj": (2, 3)}, {"qkv_proj": (8, 3)}, [QKV],
         r"q_proj has shape \(4, 5\), need \(4, 3\) for qkv_proj"),
        ({"norm": (1, 3)}, {"norm": (3,)}, [], r"norm has shape \(1, 3\), need \(3,\)$"),
        ({"qkv_proj": (8, 3), "k_proj": (2, 3)}, {"qkv_proj": (8, 3)}, [QKV],
         r"rows 4 to 6 of qkv_proj are written twice, by qkv_proj and k_proj"),
        ({"a": (3,), "b": (3,)}, {"c": (3,)}, [Renamed("a", "c"), Renamed("b", "c")],
         r"rows 0 to 3 of c are written twice, by a and b"),
        ({"q_proj": (4, 3), "k_proj": (2, 3), "v_proj": (2, 3)}, {"qkv_proj": (7, 3)}, [QKV],
         r"v_proj goes to rows 6 to 8 of qkv_proj, which has 7"),
        ({"q_proj": (4, 3), "k_proj": (2, 3), "v_proj": (2, 3)}, {"qkv_proj": (9, 3)}, [QKV],
         r"rows 8 to 9 of qkv_proj, \(9, 3\)"),
        ({"f": (5, 3)}, {"a": (4, 3), "b": (2, 3)}, [Split("f", (("a", 4), ("b", 2)))],
         r"f has shape \(5, 3\): need rows 4 to 6 of it, \(2, 3\), for b"),
        ({}, {"head": (2,), "e": (2,)}, [Tied("head", "e")], r"checkpoint lacks e, \(2,\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_and_nothing_is_read(tensors, parameters, rules, message):
    with pytest.raises(ValueError, match=message):
        load_parameters(tensors, lambda name: pytest.fail(name), parameters, rules, "file")


@pytest.mark.parametrize(
    "rule", ["q_proj", Stacked("", (("a", 1),)), Stacked("a", ()), Split("a", (("b", 0),)),
             Prefixed(""), Renamed("", "b")],
)  # fmt: skip
def test_what_is_not_a_rule_is_refused(rule):
    with pytest.raises(ValueError, match="rules hold"):
        check_rules([rule])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_is_loaded_by_its_rules_as_it_is_by_name(tmp_path, name):
    raw = SMALL | CONFIGS[name] | {"architectures": [name]}
    config = parse_config(raw, tmp_path)
    weights = tensors_of(expected_shapes(config))
    save_file(weights, tmp_path / "model.safetensors")
    fused = load_by_rules(tmp_path, fused_shapes(config), llama_rules(config))
    assert fused.keys() != weights.keys()
    engines = [
        LLMEngine(Transformer(config, held, "float64"), num_blocks=40, block_size=4)
        for held in (weights, fused)
    ]
    prompts, params = [[1, 2, 3] * 5, [7] * 9], SamplingParams(max_tokens=6, logprobs=5)
    found = [engine.generate(prompts, params) for engine in engines]
    for one, other in zip(*found, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


@pytest.mark.parametrize(("name", "parse"), [("byte-window", parse_gemma3),
                                             ("byte-state", parse_granite_hybrid)])  # fmt: skip
def test_a_shipped_model_fills_every_row_once(name, parse):
    folder = resolve(name)
    checkpoint = load_checkpoint(name)
    config = parse(json.loads((folder / "config.json").read_text()), folder)
    assert checkpoint.config == config
    shapes = {key: array.shape for key, array in checkpoint.weights.items()}
    assert shapes == hybrid_shapes(config)


# ------------------------------------------------------------------ an architecture of one's own


class Bigram:
    """The next token depends on the last one alone, and keeps nothing."""

    def __init__(self, config, parameters, dtype):
        self.table = parameters["table"].astype(dtype)

    def forward(self, batch):
        return self.table[batch.token_ids[batch.logits_indices]].copy()


class BigramConfig:
    def __init__(self, vocab_size):
        self.vocab_size = vocab_size


@pytest.fixture
def bigram(tmp_path, monkeypatch):
    monkeypatch.setattr(families, "ARCHITECTURES", dict(families.ARCHITECTURES))
    monkeypatch.setattr(loader, "ARCHITECTURES", families.ARCHITECTURES)

    def parse(raw, source):
        return BigramConfig(families.Fields(raw, source).size("vocab_size"))

    def parameters(config):
        return {"table": (config.vocab_size, config.vocab_size)}

    def rules(config):
        half = config.vocab_size // 2
        return [Stacked("table", (("upper", half), ("lower", config.vocab_size - half)))]

    register_model("BigramForCausalLM", Architecture(parse, parameters, Bigram, rules))
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["BigramForCausalLM"], "vocab_size": 257, "eos_token_id": 256})
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer_json()))
    table = np.random.default_rng(0).standard_normal((257, 257)).astype(np.float32)
    save_file({"upper": table[:128], "lower": table[128:]}, tmp_path / "model.safetensors")
    return tmp_path, table


def test_an_architecture_of_ones_own_is_served(bigram):
    folder, table = bigram
    engine = LLMEngine(folder, num_blocks=20, block_size=4)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    [out] = engine.generate(["hello"], params)
    token, expected = ord("o"), []
    for _ in range(6):
        token = int(table[token].argmax())
        expected.append(token)
    assert out.outputs[0].token_ids == expected


def test_its_rules_are_checked_and_their_mistakes_named(bigram):
    folder, table = bigram
    save_file({"upper": table[:128]}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensors: checkpoint lacks lower: rows 128 to 257"):
        LLMEngine(folder)
    save_file({"upper": table[:127], "lower": table[128:]}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"upper has shape \(127, 257\), need \(128, 257\)"):
        LLMEngine(folder)


def test_a_name_is_registered_once(bigram):
    for name in ("BigramForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM"):
        with pytest.raises(ValueError, match=f"name='{name}': this architecture is there already"):
            register_model(name, families.ARCHITECTURES["BigramForCausalLM"])
    with pytest.raises(ValueError, match="name='': need the name"):
        register_model("", families.ARCHITECTURES["BigramForCausalLM"])
    with pytest.raises(ValueError, match=r"architecture=<class.*: need an Architecture"):
        register_model("Other", Bigram)


def test_the_plan_says_where_every_tensor_goes():
    shapes = {"q_proj": (4, 3), "k_proj": (2, 3), "v_proj": (2, 3)}
    plan = plan_of(shapes, {"qkv_proj": (8, 3)}, [QKV])
    assert [(e.tensor, e.place.rows, e.shape) for e in plan] == [
        ("q_proj", slice(0, 4), (4, 3)), ("k_proj", slice(4, 6), (2, 3)),
        ("v_proj", slice(6, 8), (2, 3)),
    ]  # fmt: skip


# ------------------------------------------------------------------ what a config.json may say


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("byte-window", {"layer_types": ["full_attention"]}, "layer_types=.*num_hidden_layers=6"),
        ("byte-window", {"layer_types": ["mamba"] * 6}, "layer_types=.*'sliding_attention'"),
        ("byte-window", {"sliding_window": 0}, "sliding_window=0: need a positive integer"),
        ("byte-window", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("byte-window", {"hidden_activation": "relu"}, "hidden_activation='relu'"),
        ("byte-window", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("byte-window", {"num_key_value_heads": 3}, "num_key_value_heads=3: need a divisor"),
        ("byte-window", {"head_dim": 63}, "head_dim=63: need an even size"),
        ("byte-window", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ("byte-window", {"query_pre_attn_scalar": "x"}, "query_pre_attn_scalar='x'"),
        ("byte-state", {"num_local_experts": 4}, "num_local_experts=4: need 0"),
        ("byte-state", {"num_local_experts": None}, "num_local_experts=None: need 0"),
        ("byte-state", {"layer_types": None}, "layer_types=None: need the kind"),
        ("byte-state", {"layer_types": [["mamba"]] * 6}, "layer_types="),
        ("byte-state", {"mamba_d_head": 7}, "mamba_d_head=7: need mamba_expand"),
        ("byte-state", {"mamba_n_groups": 5}, "mamba_n_groups=5: need a divisor"),
        ("byte-state", {"mamba_d_conv": 1}, "mamba_d_conv=1: need an integer of at least 2"),
        ("byte-state", {"time_step_limit": [0.0, 1.0]}, "time_step_limit="),
        ("byte-state", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
        ("byte-state", {"rope_scaling": {"rope_type": "llama3"}}, "rope_type='llama3'"),
        ("byte-state", {"attention_multiplier": float("nan")}, "attention_multiplier=nan"),
        ("byte-state", {"quantization_config": {"bits": 4}}, "quantization_config="),
    ],
)  # fmt: skip
def test_a_field_that_would_change_the_model_is_refused_by_name(tmp_path, name, change, message):
    raw = json.loads((resolve(name) / "config.json").read_text()) | change
    parse = parse_gemma3 if name == "byte-window" else parse_granite_hybrid
    with pytest.raises(ValueError, match=message):
        parse(raw, tmp_path / "config.json")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (None, "rules=None: need Prefixed"), ("ab", "rules='ab': need Prefixed"),
        ([Stacked("a", (("q", 4.0),))], "at least 1 row"), ([Stacked("a", ("q", 4))], "at least 1"),
        ([Stacked("a", (("q", "4"),))], "at least 1 row"), ([Stacked(3, (("q", 4),))], "names"),
        ([Stacked("a", (("q", 4), ("q", 4)))], "each once"), ([Renamed(3, "x")], "need names"),
        ([Prefixed("a", 3)], "need names"), ([Tied("a", "a")], "need names"),
    ],
)  # fmt: skip
def test_rules_of_ones_own_are_refused_by_name(rules, message):
    with pytest.raises(ValueError, match=message):
        check_rules(rules)


@pytest.mark.parametrize(
    ("parameters", "rules", "message"),
    [
        ({"a": (2,), "b": (1,)}, [Tied("a", "b")],
         r"file: a, \(2,\), is tied to b, which has shape \(1,\)"),
        ({"a": (1,), "c": (1,), "b": (1,)}, [Tied("a", "c"), Tied("c", "b")],
         r"file: a, \(1,\), is tied to c, which is tied itself"),
        (["b"], [], "parameters=\\['b'\\]: need a mapping"),
        ({"b": 1}, [], "parameters\\['b'\\]=1: need a tuple"),
        ({"b": (-1,)}, [], "parameters\\['b'\\]=\\(-1,\\): need a tuple"),
    ],
)  # fmt: skip
def test_parameters_of_ones_own_are_refused_by_name(parameters, rules, message):
    with pytest.raises(ValueError, match=message):
        load({"b": np.zeros(1, np.float32)}, parameters, rules, source="file")


def test_an_architecture_without_a_function_is_refused():
    with pytest.raises(ValueError, match=r"architecture\.parse=1: need a function"):
        register_model("NobodyForCausalLM", Architecture(1, dict, dict))
    assert "NobodyForCausalLM" not in families.ARCHITECTURES

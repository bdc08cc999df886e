"""Experts: routing on worked values, the grouped product against loops, and the engine on top."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mini_vllm import EngineParts, LLMEngine
from mini_vllm.config import SamplingParams
from mini_vllm.models.config import expected_shapes, num_parameters, parse_config
from mini_vllm.models.loader import load_checkpoint
from mini_vllm.models.mlp import Mlp, silu_and_mul
from mini_vllm.models.moe import (
    ExpertLoads,
    MoeConfig,
    SparseMlp,
    moe_forward_grouped,
    observing_routing,
    route,
    sparse_layers,
)
from mini_vllm.models.tests.test_checkpoint import random_weights, write_checkpoint
from mini_vllm.models.transformer import Linear, Transformer
from mini_vllm.observe.trace import traced_steps

QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "norm_topk_prob": True,
    "head_dim": 4,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
LAYOUTS = {
    "qwen": QWEN,
    "mixtral": MIXTRAL,
    "every second layer": QWEN | {"decoder_sparse_step": 2},
    "first layer dense": QWEN | {"mlp_only_layers": [0]},
    "weights as they are": QWEN | {"norm_topk_prob": False},
}


def folder_of(path: Path, config: dict, scale: float = 0.3) -> Path:
    """A checkpoint with weights small enough that the softmax stays soft."""
    write_checkpoint(path, config, None)
    raw = json.loads((path / "config.json").read_text())
    weights = {name: scale * w for name, w in random_weights(raw).items()}
    return write_checkpoint(path, config, weights)


def random_experts(rng: np.random.Generator, count: int, hidden: int, inner: int) -> list[Mlp]:
    return [
        Mlp(
            Linear(rng.standard_normal((2 * inner, hidden))),
            Linear(rng.standard_normal((hidden, inner))),
        )
        for _ in range(count)
    ]


def one_by_one(x, experts, topk_ids, topk_weights) -> np.ndarray:
    """Every (token, expert) pair for itself."""
    out = np.zeros_like(x)
    for token, (ids, weights) in enumerate(zip(topk_ids, topk_weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            out[token] += weight * experts[expert](x[token : token + 1])[0]
    return out


# ------------------------------------------------------------------ routing


def test_two_of_four_experts_with_weights_that_sum_to_one():
    """Softmax of (2, 1, 0, -1) is (.644, .237, .087, .032); .644 / .881 = .731."""
    ids, weights = route(np.array([[2.0, 1.0, 0.0, -1.0]]), 2, True)
    assert ids.tolist() == [[0, 1]]
    assert np.allclose(weights, [[0.7310585786300049, 0.2689414213699951]], rtol=1e-15)


def test_without_renormalisation_the_weights_are_the_softmax_over_all():
    _, weights = route(np.array([[2.0, 1.0, 0.0, -1.0]]), 2, False)
    scores = np.exp([2.0, 1.0, 0.0, -1.0])
    assert np.allclose(weights, [scores[:2] / scores.sum()], rtol=1e-15)


def test_of_equal_scores_the_lower_id_comes_first():
    ids, _ = route(np.array([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]]), 2, True)
    assert ids.tolist() == [[1, 2], [0, 1]]


def test_logits_of_a_thousand_do_not_overflow():
    ids, weights = route(np.array([[1000.0, -1000.0, 999.0]], dtype=np.float32), 2, True)
    assert ids.tolist() == [[0, 2]]
    assert np.isfinite(weights).all()
    assert weights.dtype == np.float32


def test_no_tokens_give_no_rows():
    ids, weights = route(np.empty((0, 4)), 2, True)
    assert ids.shape == weights.shape == (0, 2)


@pytest.mark.parametrize("top_k", [0, -1, 5])
def test_a_top_k_out_of_range_is_refused(top_k):
    with pytest.raises(ValueError, match=rf"top_k={top_k}: need 1 to 4"):
        route(np.zeros((1, 4)), top_k, True)


def test_logits_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"logits of shape \(4,\)"):
        route(np.zeros(4), 1, True)


# ------------------------------------------------------------------ the grouped product


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_grouped_experts_give_what_every_pair_for_itself_gives(num_tokens, top_k):
    rng = np.random.default_rng(num_tokens * 10 + top_k)
    experts = random_experts(rng, 5, 8, 6)
    x = rng.standard_normal((num_tokens, 8))
    ids, weights = route(rng.standard_normal((num_tokens, 5)), top_k, True)
    expected = one_by_one(x, experts, ids, weights)
    assert np.abs(moe_forward_grouped(x, experts, ids, weights) - expected).max() < 1e-12


def test_a_token_that_names_an_expert_twice_gets_both_shares():
    rng = np.random.default_rng(0)
    experts, x = random_experts(rng, 4, 8, 6), rng.standard_normal((2, 8))
    ids, weights = np.array([[3, 3], [1, 3]]), np.array([[0.25, 0.5], [1.0, 2.0]])
    expected = one_by_one(x, experts, ids, weights)
    assert np.abs(moe_forward_grouped(x, experts, ids, weights) - expected).max() < 1e-12


def test_an_expert_is_called_once_if_chosen_and_never_otherwise():
    """Rows in the order of their tokens: 0 and 2 for expert 1, and 2 for expert 3."""
    calls: list[tuple[int, list[float]]] = []

    def expert(number: int) -> Mlp:
        def gate_up(rows):
            calls.append((number, rows[:, 0].tolist()))
            return np.repeat(rows, 2, axis=1)

        return Mlp(gate_up, lambda rows: rows)

    x = np.array([[10.0], [20.0], [30.0]])
    ids = np.array([[1, 0], [0, 4], [3, 1]])
    moe_forward_grouped(x, [expert(n) for n in range(5)], ids, np.ones((3, 2)))
    assert calls == [(0, [10.0, 20.0]), (1, [10.0, 30.0]), (3, [30.0]), (4, [20.0])]


def test_the_input_is_left_as_it_was_and_the_dtype_is_kept():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 8)).astype(np.float32)
    before = x.copy()
    ids, weights = route(rng.standard_normal((5, 3)), 2, True)
    experts = [Mlp(lambda rows: np.repeat(rows, 2, axis=1), lambda rows: rows)] * 3
    out = moe_forward_grouped(x, experts, ids, weights)
    assert np.array_equal(x, before)
    assert out.dtype == np.float32
    assert np.allclose(out, experts[0](x), rtol=1e-5)


def test_the_grouped_form_does_a_twelfth_of_the_calls_at_64_tokens():
    """64 tokens and 2 of 16 experts: 128 products by pairs, at most 16 by groups."""
    rng = np.random.default_rng(0)
    calls = []
    gate_up = Linear(rng.standard_normal((6, 4)))
    expert = Mlp(lambda rows: calls.append(len(rows)) or gate_up(rows), Linear(np.ones((4, 3))))
    experts = [expert] * 16
    ids, weights = route(rng.standard_normal((64, 16)), 2, True)
    moe_forward_grouped(rng.standard_normal((64, 4)), experts, ids, weights)
    assert len(calls) == len(np.unique(ids)) <= 16
    assert sum(calls) == 128


# ------------------------------------------------------------------ layouts


def dense_oracle(config, weights, hidden: np.ndarray, layer: int) -> np.ndarray:
    """One layer's MLP from the tensors themselves: every expert on every token, then a mask."""
    moe = config.moe
    block, gate, up, down = moe.names
    prefix = f"model.layers.{layer}.{block}"

    def product(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{prefix}.{name}.weight"].astype(np.float64).T

    logits = product(hidden, "gate")
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)
    bar = np.sort(scores, axis=1)[:, -moe.num_experts_per_tok][:, None]
    mask = np.where(scores >= bar, scores, 0.0)
    if moe.norm_topk_prob:
        mask /= mask.sum(axis=1, keepdims=True)
    out = np.zeros_like(hidden)
    for e in range(moe.num_experts):
        g, u = product(hidden, f"experts.{e}.{gate}"), product(hidden, f"experts.{e}.{up}")
        out += mask[:, e : e + 1] * product(g / (1 + np.exp(-g)) * u, f"experts.{e}.{down}")
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_is_every_expert_on_every_token_with_the_others_masked(tmp_path, layout):
    """The dense oracle, in float64, to 1e-10."""
    checkpoint = load_checkpoint(folder_of(tmp_path, LAYOUTS[layout]))
    model = Transformer(checkpoint.config, checkpoint.weights, "float64")
    layers = sparse_layers(model)
    assert layers
    hidden = np.random.default_rng(0).standard_normal((40, 8))
    for block in layers:
        expected = dense_oracle(checkpoint.config, checkpoint.weights, hidden, block.layer)
        assert np.abs(block(hidden) - expected).max() < 1e-10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_are_counted_by_arithmetic(tmp_path, layout):
    config = parse_config(json.loads((folder_of(tmp_path, LAYOUTS[layout]) / "config.json")
                                     .read_text()), tmp_path)  # fmt: skip
    by_shapes = sum(int(np.prod(shape)) for shape in expected_shapes(config).values())
    assert num_parameters(config) == by_shapes


def test_which_layers_have_experts():
    config = MoeConfig(4, 2, 8, True, frozenset({5}), decoder_sparse_step=3)
    assert [i for i in range(9) if config.is_sparse(i)] == [2, 8]


def test_a_replaced_linear_serves_router_and_experts_by_name(tmp_path):
    names: list[str] = []

    class Named(Linear):
        def __init__(self, weight, bias, name) -> None:
            names.append(name)
            super().__init__(weight, bias)

    LLMEngine(folder_of(tmp_path, QWEN), parts=EngineParts(linear=Named), num_blocks=16)
    assert len(set(names)) == len(names) == 2 * (2 + 1 + 6 * 2) + 1
    assert "model.layers.1.mlp.experts.5.gate_up_proj" in names
    assert "model.layers.0.mlp.gate" in names


def test_a_replaced_expert_product_serves_the_model(tmp_path):
    folder, calls = folder_of(tmp_path, MIXTRAL), []

    def mine(x, experts, topk_ids, topk_weights):
        calls.append(topk_ids.shape)
        return one_by_one(x, experts, topk_ids, topk_weights)

    params = SamplingParams(max_tokens=6, ignore_eos=True)
    outputs = [
        LLMEngine(folder, parts=parts, num_blocks=16, dtype="float64")
        .generate([b"abc".decode()], params)[0]
        .outputs[0]
        .token_ids
        for parts in (EngineParts(rooms={"models": {"experts": mine}}), EngineParts())
    ]
    assert outputs[0] == outputs[1]
    assert len(calls) == 2 * 6


# ------------------------------------------------------------------ what a config may say


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_experts", 0, "num_experts=0: need a positive integer"),
        ("num_experts", None, "num_experts=None: need a positive integer"),
        ("num_experts", 2_000_000_000, "2000000000 experts: the weights hold"),
        ("num_local_experts", 7, "num_local_experts=7: need the same as num_experts=6"),
        ("num_experts_per_tok", 7, "num_experts_per_tok=7: need at most 6"),
        ("num_experts_per_tok", None, "num_experts_per_tok=None"),
        ("moe_intermediate_size", "10", "moe_intermediate_size='10'"),
        ("norm_topk_prob", 1, "norm_topk_prob=1: need true or false"),
        ("mlp_only_layers", [-1], "mlp_only_layers=.*: need a list of layer numbers"),
        ("mlp_only_layers", {"0": 1}, "mlp_only_layers=.*: need a list of layer numbers"),
        ("decoder_sparse_step", 0, "decoder_sparse_step=0"),
        ("shared_expert_intermediate_size", 64, "shared_expert_intermediate_size=64: need 0"),
        ("n_shared_experts", 1, "n_shared_experts=1: need 0"),
        ("scoring_func", "sigmoid", "scoring_func='sigmoid': need 'softmax'"),
        ("n_group", 8, "n_group=8: need 0 or 1"),
        ("routed_scaling_factor", 2.5, "routed_scaling_factor=2.5: need 1"),
        ("first_k_dense_replace", 1, "first_k_dense_replace=1"),
        ("sliding_window", 4096, "sliding_window=4096: need null"),
        ("mlp_bias", True, "mlp_bias=True: need False"),
    ],
)
def test_a_field_that_is_wrong_or_not_supported_is_refused_by_name(tmp_path, field, value, message):
    folder = folder_of(tmp_path, QWEN)
    raw = json.loads((folder / "config.json").read_text()) | {field: value}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        load_checkpoint(folder)


def test_the_number_of_experts_may_stand_under_the_other_name(tmp_path):
    config = {k: v for k, v in QWEN.items() if k != "num_experts"} | {"num_local_experts": 6}
    assert load_checkpoint(folder_of(tmp_path, config)).config.moe.num_experts == 6


def test_a_missing_expert_is_named(tmp_path):
    folder = folder_of(tmp_path, QWEN)
    weights = random_weights(json.loads((folder / "config.json").read_text()))
    del weights["model.layers.1.mlp.experts.4.up_proj.weight"]
    write_checkpoint(folder, QWEN, weights)
    with pytest.raises(ValueError, match=r"lacks 1 tensor.*layers\.1\.mlp\.experts\.4\.up_proj"):
        load_checkpoint(folder)


# ------------------------------------------------------------------ loads


def test_the_trace_counts_the_tokens_of_every_expert_in_every_step(tmp_path):
    """Three prompts of 5, 9 and 14 tokens in chunks: k pairs for each scheduled token."""
    engine = LLMEngine(
        folder_of(tmp_path, QWEN | {"mlp_only_layers": [0]}),
        num_blocks=32,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=12,
    )
    for length in (5, 9, 14):
        engine.add_request(list(range(length)), SamplingParams(max_tokens=4, ignore_eos=True))
    records = list(traced_steps(engine))
    assert len(records) > 4
    for record in records:
        assert record.expert_loads is not None and list(record.expert_loads) == [1]
        loads = record.expert_loads[1]
        assert len(loads) == 6
        assert sum(loads) == 2 * sum(record.num_scheduled_tokens.values())
        assert json.loads(json.dumps(record.to_json()))["expert_loads"]["1"] == loads
    assert not any(layer.observers for layer in sparse_layers(engine.model))


def test_a_dense_models_trace_says_nothing_of_experts():
    engine = LLMEngine("toy")
    engine.add_request("a", SamplingParams(max_tokens=2))
    assert all("expert_loads" not in record.to_json() for record in traced_steps(engine))


def test_observing_changes_nothing_and_ends_with_the_block(tmp_path):
    checkpoint = load_checkpoint(folder_of(tmp_path, MIXTRAL))
    model = Transformer(checkpoint.config, checkpoint.weights, "float64")
    block = sparse_layers(model)[0]
    x = np.random.default_rng(1).standard_normal((9, 8))
    quiet = block(x)
    counter = ExpertLoads(model)
    with observing_routing(model, counter):
        assert np.array_equal(block(x), quiet)
    block(x)
    assert counter.loads[0].sum() == 18 and counter.loads[1].sum() == 0


def test_the_experts_of_a_step_are_asked_for_by_nobody_unless_observed():
    """No observer, no count: the router's choice goes to the experts and nowhere else."""
    config = MoeConfig(3, 1, 4, True)
    block = SparseMlp(config, 0, lambda x: x[:, :3], [], lambda x, *choice: x)
    x = np.array([[0.0, 1.0, 0.0, 5.0]])
    assert block(x).tolist() == x.tolist()
    assert block.observers == []


def test_swiglu_is_what_an_expert_computes():
    gate_up, down = np.array([[1.0], [3.0]]), np.array([[2.0]])
    expert = Mlp(Linear(gate_up), Linear(down))
    x = np.array([[0.5]])
    assert expert(x).tolist() == (2.0 * silu_and_mul(np.array([[0.5, 1.5]]))).tolist()

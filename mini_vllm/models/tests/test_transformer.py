"""The decoder's arithmetic on small worked values; parity with transformers: `test_parity.py`."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

from mini_vllm import EngineParts, LLMEngine
from mini_vllm.batch import ForwardBatch
from mini_vllm.config import SamplingParams
from mini_vllm.models.tests.test_shipped_model import TEXTS, dense_logits, model
from mini_vllm.models.transformer import (
    Linear,
    ModelConfig,
    RopeScaling,
    Transformer,
    rms_norm,
    rope_frequencies,
    rotate,
)


def make_config(**changes) -> ModelConfig:
    sizes = {
        "vocab_size": 5,
        "hidden_size": 8,
        "intermediate_size": 6,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 32,
    }
    return ModelConfig(**sizes | changes)


def test_rms_norm_divides_by_the_root_mean_square():
    """Of 3 and 4 the mean square is 12.5."""
    x = np.array([[3.0, 4.0]])
    expected = np.array([[3.0, 4.0]]) / math.sqrt(12.5) * [2.0, 1.0]
    assert np.abs(rms_norm(x, np.array([2.0, 1.0]), 0.0) - expected).max() < 1e-15


def test_rms_norm_of_zeros_is_zero():
    assert rms_norm(np.zeros((1, 4)), np.ones(4), 1e-5).tolist() == [[0.0] * 4]


def test_rotate_turns_element_i_with_element_i_plus_half():
    """A quarter turn takes (1, 0) to (0, 1) in each pair (i, i + 2)."""
    x = np.array([[[1.0, 2.0, 0.0, 0.0]]])
    cos, sin = np.zeros((1, 1, 2)), np.ones((1, 1, 2))
    assert rotate(x, cos, sin).tolist() == [[[0.0, 0.0, 1.0, 2.0]]]


def test_rotation_keeps_lengths_and_depends_on_the_distance_only():
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 1, 1, 4))
    frequencies = rope_frequencies(make_config())

    def at(x: np.ndarray, position: int) -> np.ndarray:
        angles = position * frequencies
        return rotate(x, np.cos(angles)[None, None], np.sin(angles)[None, None])[0, 0]

    assert math.isclose(np.linalg.norm(at(query, 7)), np.linalg.norm(query))
    assert math.isclose(at(query, 9) @ at(key, 4), at(query, 25) @ at(key, 20))


def test_rope_frequencies_fall_from_one_by_powers_of_theta():
    frequencies = rope_frequencies(make_config(rope_theta=10000.0))
    assert frequencies.tolist() == [1.0, 0.01]


def test_llama3_scaling_keeps_fast_waves_slows_slow_ones_and_blends_between():
    """Turns within 8192 tokens: 1304 (kept), and under 1 for the slow half (divided by 8)."""
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
    plain = make_config(head_dim=128, rope_theta=500000.0)
    scaled = make_config(head_dim=128, rope_theta=500000.0, rope_scaling=scaling)
    ratio = rope_frequencies(scaled) / rope_frequencies(plain)
    turns = 8192 * rope_frequencies(plain) / (2 * math.pi)
    assert np.all(ratio[turns > 4] == 1.0)
    assert np.allclose(ratio[turns < 1], 1 / 8, rtol=1e-15)
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between) > 0
    assert np.all((between > 1 / 8) & (between < 1))


def test_linear_multiplies_by_the_transpose_and_adds_the_bias():
    layer = Linear(np.array([[1.0, 2.0], [0.0, 3.0]]), np.array([10.0, 20.0]))
    assert layer(np.array([[1.0, 1.0]])).tolist() == [[13.0, 23.0]]


@pytest.mark.parametrize("shape", [(1536, 256), (256, 768), (512, 256)])  # [out, in] features
def test_linear_is_the_same_product_for_one_token_few_and_many(shape):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(shape)
    layer = Linear(weight)
    for num_tokens in (0, 1, 2, 7, 16, 17, 64):
        x = rng.standard_normal((num_tokens, shape[1]))
        np.testing.assert_allclose(layer(x), np.einsum("ti,oi->to", x, weight), atol=1e-11)


@pytest.mark.parametrize("dtype", ["float16", "int32", np.complex128])
def test_another_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match=r"dtype=.*need float32 or float64"):
        Transformer(make_config(), {}, dtype)


def test_kv_bytes_per_token_counts_both_k_and_v_of_all_layers():
    """2 x 32 layers x 8 KV heads x 128 x 2 bytes: the 128 KiB of an 8 B Llama."""
    config = make_config(num_hidden_layers=32, num_key_value_heads=8, head_dim=128)
    assert config.kv_bytes_per_token(2) == 131072


@pytest.mark.slow
def test_a_long_prompt_gives_the_same_logits_in_one_piece_and_in_chunks():
    """280 tokens: more than a tile of any of the fast paths."""
    prompt = (b" ".join(TEXTS) * 3)[:280]
    whole = dense_logits(list(prompt))[-1]
    for budget in (2048, 150, 64):
        engine = LLMEngine(
            num_blocks=64,
            block_size=16,
            max_num_seqs=1,
            max_num_batched_tokens=budget,
            model=model(),
        )
        seen: list[np.ndarray] = []
        inner = engine.model

        class Keep:
            def forward(self, batch: ForwardBatch, inner=inner, seen=seen) -> np.ndarray:
                seen.append(inner.forward(batch))
                return seen[-1]

        engine.model = Keep()
        engine.generate([list(prompt)], SamplingParams(max_tokens=1))
        assert np.abs(seen[-1][0] - whole).max() < 1e-10


def test_a_replaced_linear_layer_serves_every_projection():
    """Four per layer (fused QKV, O, fused gate and up, down) and the head."""
    made: list[tuple[int, ...]] = []

    class Counted(Linear):
        def __init__(self, weight, bias=None) -> None:
            made.append(weight.shape)
            super().__init__(weight, bias)

    engine = LLMEngine(parts=EngineParts(linear=Counted))
    config = copy.copy(model().config)
    assert len(made) == 4 * config.num_hidden_layers + 1
    expected = LLMEngine().generate(["The "], SamplingParams(max_tokens=3))[0].outputs[0].token_ids
    assert (
        engine.generate(["The "], SamplingParams(max_tokens=3))[0].outputs[0].token_ids == expected
    )

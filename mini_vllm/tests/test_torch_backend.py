"""The model in torch: within what rounding allows of numpy's, the same texts, the rest refused."""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np
import pytest

from mini_vllm import LLM, SamplingParams
from mini_vllm.batch import ForwardBatch
from mini_vllm.models.loader import load_checkpoint
from mini_vllm.models.transformer import Transformer
from mini_vllm.platforms import PlatformError, resolve
from mini_vllm.tests import rounding

needs_torch = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]
PROMPT = b"The KV cache is divided into blocks of tokens, and the scheduler plans a step."
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def batch_of(model, num_tokens, block_size=8):
    """One sequence whose blocks lie in another order than its tokens."""
    table = np.random.default_rng(3).permutation(np.arange(1, 2 + num_tokens // block_size))
    positions = np.arange(num_tokens)
    layers, kv_heads, size = model.kv_shape
    return ForwardBatch(
        token_ids=np.frombuffer(PROMPT[:num_tokens], np.uint8).astype(np.int64),
        positions=positions, query_start_loc=np.array([0, num_tokens]),
        slot_mapping=table[positions // block_size] * block_size + positions % block_size,
        seq_lens=np.array([num_tokens]), block_tables=table[None], logits_indices=positions,
        block_size=block_size,
        kv_cache=np.zeros((layers, 2, len(table) + 1, block_size, kv_heads, size), model.dtype),
    )  # fmt: skip


def torch_model(dtype, **changes):
    from mini_vllm.models.torch_backend import TorchTransformer

    checkpoint = load_checkpoint("byte-llama")
    return TorchTransformer(
        dataclasses.replace(checkpoint.config, **changes), checkpoint.weights, dtype
    )


def layer_by_layer(model, other, batch, u):
    """Each layer's input, what numpy makes of it in float64 with its bound, and what torch does."""
    import torch

    angles = batch.positions[:, None] * model._frequencies
    rope = [torch.from_numpy(f(angles))[:, None] for f in (np.cos, np.sin)]
    slots = torch.from_numpy(batch.slot_mapping)
    hidden = model.embed_tokens[batch.token_ids]
    for index, weights in enumerate(other._torch):
        bound = rounding.layer_of(model, index, hidden, u)
        cache = torch.from_numpy(batch.kv_cache[index])
        got = other._layer(weights, torch.from_numpy(hidden), rope, cache, slots, batch)
        yield hidden, bound, got.numpy()
        hidden = bound.value


@pytest.fixture(scope="module")
def numpy_models():
    checkpoint = load_checkpoint("byte-llama")
    return {
        name: Transformer(checkpoint.config, checkpoint.weights, name)
        for name in ("float32", "float64")
    }


class TestArithmetic:
    pytestmark = needs_torch

    @pytest.mark.parametrize("num_tokens", [1, len(PROMPT)])
    def test_of_the_same_input_a_layer_is_as_far_off_as_the_order_of_sums_allows(
        self, numpy_models, num_tokens
    ):
        model, u = numpy_models["float64"], np.finfo("float64").eps / 2
        batch = batch_of(model, num_tokens)
        for hidden, bound, got in layer_by_layer(model, torch_model("float64"), batch, u):
            assert (np.abs(got - bound.value) <= 2 * bound.error).all()
            # And the bound says something: it is small beside what a layer changes.
            assert bound.error.max() < 1e-6 * np.abs(bound.value - hidden).max()

    def test_another_epsilon_leaves_the_bound(self, numpy_models):
        model, u = numpy_models["float64"], np.finfo("float64").eps / 2
        other = torch_model("float64", rms_norm_eps=1e-3)
        for _, bound, got in layer_by_layer(model, other, batch_of(model, 23), u):
            assert (np.abs(got - bound.value) > 2 * bound.error).any()

    def test_logits_of_the_whole_model_agree_to_what_was_measured(self, numpy_models):
        """Measured: 1.8e-15 of the largest logit, torch 2.13."""
        model = numpy_models["float64"]
        expected, batch = model.forward(batch_of(model, 78)), batch_of(model, 78)
        got = torch_model("float64").forward(batch)
        assert np.abs(got - expected).max() < 1e-12 * np.abs(expected).max()
        assert (got.argmax(-1) == expected.argmax(-1)).all()

    def test_in_float32_torch_is_as_near_to_float64_as_numpy_is(self, numpy_models):
        """Measured, torch 2.13: 1.2e-6 of the largest logit, and 1.3e-6 in numpy. The factor of
        four is a rule of thumb: of a layer a bound is derived above, of a whole model none is."""
        exact = numpy_models["float64"].forward(batch_of(numpy_models["float64"], len(PROMPT)))
        gaps = []
        for model in (numpy_models["float32"], torch_model("float32")):
            got = model.forward(batch_of(numpy_models["float32"], len(PROMPT)))
            assert got.dtype == np.float32
            gaps.append(np.abs(got - exact).max() / np.abs(exact).max())
        assert gaps[1] <= 4 * gaps[0] < 1e-4, gaps

    @pytest.mark.slow
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_texts_are_numpys_through_hits_chunks_and_preemptions(self, asynchronous):
        prompts = [PROMPT[:40].decode() + tail for tail in ("", " a", " b", " the rest", " of")]
        texts, lost = [], []
        for platform in (None, "torch"):
            llm = LLM(
                "byte-llama", platform=platform, dtype="float64", num_blocks=18, block_size=8,
                max_num_batched_tokens=24, async_scheduling=asynchronous,
            )  # fmt: skip
            preempted = []
            llm.llm_engine.observers.append(
                lambda plan, seen=preempted: seen.append(len(plan.preempted_req_ids))
            )
            texts.append([each.outputs[0].token_ids for each in llm.generate(prompts, GREEDY)])
            lost.append(preempted)
        assert texts[0] == texts[1] and lost[0] == lost[1] and sum(lost[0])

    @pytest.mark.parametrize(
        ("model", "knobs", "message"),
        [
            ("toy", {}, "TorchTransformer with model='toy': need the name or folder of a"),
            ("byte-moe", {}, "need one without experts"),
            ("byte-window", {}, "not compared"),
            ("byte-state", {}, "not compared"),
            ("byte-sees", {}, "not compared"),
            ("byte-llama", {"enable_lora": True}, "'torch' with enable_lora: the two"),
            ("byte-llama", {"tensor_parallel_size": 2}, "with tensor_parallel_size: the two"),
            ("byte-llama", {"dtype": "float16"}, "float16"),
        ],
    )  # fmt: skip
    def test_what_was_not_compared_is_refused_by_name(self, model, knobs, message):
        with pytest.raises(ValueError, match=message):
            LLM(model, platform="torch", **knobs)


def test_without_torch_the_platform_says_so_and_no_other_asks_for_it(monkeypatch):
    monkeypatch.setattr("mini_vllm.platforms.find_spec", lambda name: None)
    with pytest.raises(PlatformError, match=r"torch is not installed; .*uv run --extra torch"):
        resolve("torch")
    assert resolve().name == resolve("cpu").name == "cpu"

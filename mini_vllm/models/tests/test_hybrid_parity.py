"""Parity with transformers where layers keep windows or states: the same logits at every step.

As in `test_parity.py`: random models written by `transformers`, our side under pressure, theirs one
dense pass in float64.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine
from mini_vllm.models.loader import resolve
from mini_vllm.models.tests.test_checkpoint import byte_tokenizer_json
from mini_vllm.models.tests.test_parity import (
    MAX_TOKENS,
    Recorder,
    float64_inside,
    random_prompts,
    text_prompts,
)

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SIZES = {
    "vocab_size": 257, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": None,
    "max_position_embeddings": 512, "eos_token_id": 256, "pad_token_id": None,
}  # fmt: skip
GRANITE = {
    "shared_intermediate_size": 96, "num_local_experts": 0, "num_experts_per_tok": 0,
    "position_embedding_type": "nope", "attention_multiplier": 0.2, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6, "logits_scaling": 2.0, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_d_state": 12, "mamba_chunk_size": 8,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"sliding_window": 9, "sliding_window_pattern": 3}),
    "gemma3 one in two, stretched": (
        "Gemma3",
        {
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "granite hybrid": ("GraniteMoeHybrid", GRANITE),
    "granite hybrid, rotary, in groups": (
        "GraniteMoeHybrid",
        GRANITE
        | {
            "position_embedding_type": "rope", "mamba_n_groups": 2, "mamba_proj_bias": True,
            "tie_word_embeddings": True, "mamba_conv_bias": False,
        },
    ),
}  # fmt: skip


def save_model(folder: Path, family: str) -> Path:
    """A random-weight model of a family, written by transformers; its norms and biases too."""
    import torch
    import transformers

    name, changes = FAMILIES[family]
    sizes = SIZES | changes
    if name == "Gemma3":
        config = transformers.Gemma3TextConfig(**sizes)
    else:
        kinds = ["linear_attention", "full_attention", "linear_attention"]
        sizes = {k: v for k, v in sizes.items() if k != "head_dim"}
        config = transformers.GraniteMoeHybridConfig(**sizes, layer_types=kinds)
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            noise = torch.randn_like(parameter)
            if key.endswith("A_log"):
                parameter.copy_(0.5 * noise)
            elif "norm" in key:
                parameter.copy_(0.2 * noise + (name != "Gemma3"))
            else:
                parameter.copy_(0.15 * noise)
    theirs.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer_json()))
    return folder


def load_theirs(folder: Path) -> Any:
    """The folder in transformers, float64 throughout, weights as stored."""
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    if getattr(theirs.model, "rotary_emb", None) is not None:
        with float64_inside():  # rotary frequencies are computed when the module is made
            theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    return theirs


def worst_difference(folder: Path, dtype: str, prompts: list[list[int]], theirs: Any) -> float:
    """Serve the prompts under pressure; the largest difference of any logit from a dense pass."""
    import torch

    engine = LLMEngine(
        folder, num_blocks=120, block_size=8, max_num_seqs=4, max_num_batched_tokens=24,
        long_prefill_token_threshold=10, dtype=dtype,
    )  # fmt: skip
    recorder = engine.model = Recorder(engine.model)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    requests = [engine.requests[engine.add_request(p, params)] for p in prompts]
    rows: dict[tuple[str, int], np.ndarray] = {}
    plans: list[Any] = []
    engine.observers.append(plans.append)
    hits = chunks = 0
    for step in range(9999):
        if step == 20:  # by now the first ones have left blocks to hit
            requests += [engine.requests[engine.add_request(p, params)] for p in prompts[:2]]
        if not engine.has_unfinished_requests():
            break
        engine.step()
        hits += sum(n > 0 for n in plans[-1].num_cached_tokens.values())
        for request, row in zip(plans[-1].scheduled_requests, recorder.rows, strict=True):
            position = request.num_computed_tokens - 1
            chunks += position < request.num_prompt_tokens - 1
            rows[request.request_id, position] = row
    assert hits and chunks, "the workload was meant to hit and to be cut"
    worst = 0.0
    for request in requests:
        with torch.no_grad(), float64_inside():
            ids = torch.tensor([request.all_token_ids])
            dense = theirs(ids, use_cache=False).logits[0].numpy()
        for (request_id, position), row in rows.items():
            if request_id == request.request_id:
                worst = max(worst, float(np.abs(row - dense[position]).max()))
    return worst


def check(folder: Path, prompts: list[list[int]]) -> None:
    theirs = load_theirs(folder)
    assert worst_difference(folder, "float64", prompts, theirs) < 1e-9
    assert worst_difference(folder, "float32", prompts, theirs) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_logits_of_transformers(tmp_path, family):
    check(save_model(tmp_path, family), random_prompts())


@pytest.mark.parametrize("name", ["byte-window", "byte-state"])
def test_a_shipped_model_gives_the_logits_of_transformers(name):
    check(resolve(name), [prompt * 4 for prompt in text_prompts()])

"""Small random models whose layers keep different things, and random runs of them."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.models.hybrid import (
    FULL,
    MAMBA,
    SLIDING,
    HybridConfig,
    HybridTransformer,
    hybrid_shapes,
)
from mini_vllm.models.mamba import MambaConfig

WINDOW = 10
SIZES: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 4200, "attention_scale": 0.5,
}  # fmt: skip
CONFIGS = {
    "windows": HybridConfig(
        **SIZES, layer_types=(SLIDING, SLIDING, FULL), sliding_window=WINDOW, has_outer_norms=True,
        qk_norm=True, rope_local_base_freq=100.0, activation="gelu_pytorch_tanh",
        embedding_multiplier=4.0,
    ),
    "window alone": HybridConfig(**SIZES, layer_types=(SLIDING,) * 3, sliding_window=WINDOW),
    "states": HybridConfig(
        **SIZES, layer_types=(MAMBA, MAMBA, FULL), has_rope=False,
        mamba=MambaConfig(n_heads=4, d_head=4, d_state=4, n_groups=2, chunk_size=4),
    ),
    "all three": HybridConfig(
        **SIZES, layer_types=(MAMBA, SLIDING, FULL), sliding_window=WINDOW,
        mamba=MambaConfig(n_heads=2, d_head=4, d_state=4, chunk_size=4),
    ),
}  # fmt: skip


@cache
def weights_of(kind: str) -> dict[str, np.ndarray]:
    """Random parameters, lively enough that every token reads its context."""
    rng = np.random.default_rng(len(kind))
    config, weights = CONFIGS[kind], {}
    for name, shape in hybrid_shapes(config).items():
        noise = rng.standard_normal(shape)
        base = 0.0 if config.has_outer_norms or "norm" not in name else 1.0
        weights[name] = base + 0.3 * noise
        if "embed" in name:
            weights[name] = noise / 4 if config.has_outer_norms else noise
        elif name.endswith("A_log"):
            weights[name] = np.log(0.05 + rng.random(shape))
    return weights


def model_of(kind: str, **options: Any) -> HybridTransformer:
    """One of `CONFIGS` in float64."""
    return HybridTransformer(CONFIGS[kind], weights_of(kind), "float64", **options)


def workload_of(seed: int) -> tuple[list[list[int]], list[SamplingParams], dict[str, Any]]:
    """Prompts that share beginnings, how many tokens each wants, and an engine under pressure."""
    rng = random.Random(seed)
    shared = [[rng.randrange(256) for _ in range(rng.randrange(8, 70))] for _ in range(2)]
    prompts = []
    for _ in range(rng.randrange(2, 7)):
        base = rng.choice(shared)[: rng.randrange(71)] if rng.random() < 0.7 else []
        prompts.append(base + [rng.randrange(256) for _ in range(rng.randrange(1, 25))])
    params = [SamplingParams(max_tokens=rng.randrange(1, 30), ignore_eos=True) for _ in prompts]
    budget = rng.choice((3, 7, 16, 33, 200))
    knobs = {
        "block_size": rng.choice((4, 8)), "num_blocks": rng.choice((10, 13, 50)),
        "max_num_batched_tokens": budget, "max_num_seqs": min(budget, rng.choice((2, 4, 8))),
        "long_prefill_token_threshold": rng.choice((0, 0, 5)), "max_model_len": 160,
        "enable_prefix_caching": rng.random() < 0.8, "async_scheduling": rng.random() < 0.3,
        "policy": rng.choice(("fcfs", "priority")),
    }  # fmt: skip
    return prompts, params, knobs


def run(kind: str, seed: int) -> tuple[list[list[int]], list[list[int]], dict[str, int]]:
    """Tokens of a workload under pressure and of each request alone, and what happened."""
    prompts, params, knobs = workload_of(seed)
    caching = knobs["enable_prefix_caching"]
    mode = ("align" if seed % 3 == 2 else "all") if caching else "none"
    model = model_of(kind, block_size=knobs["block_size"], max_model_len=160, mamba_cache_mode=mode)
    if mode == "align" and model.config.mamba is not None:
        budget = max(knobs["max_num_batched_tokens"], model.block_size)
        knobs |= {"max_num_batched_tokens": budget, "long_prefill_token_threshold": 0}
    longest = max(len(p) + q.max_tokens for p, q in zip(prompts, params, strict=True))
    per_group = -(-longest // model.block_size) + 1
    passing = min(per_group, (WINDOW + knobs["max_num_batched_tokens"]) // model.block_size + 3)
    # Of one request: a window holds what it sees, a state wants its whole length when admitted.
    windows = sum(spec.sliding_window is not None for spec in model.kv_specs)
    most = per_group * (len(model.kv_specs) - windows) + passing * windows
    knobs["num_blocks"] = 1 + most * knobs["num_blocks"] // 10
    engine = LLMEngine(model, **knobs)
    events = {"hits": 0, "preempted": 0, "chunks": 0}

    def observe(plan: Any) -> None:
        events["hits"] += sum(n > 0 for n in plan.num_cached_tokens.values())
        events["preempted"] += len(plan.preempted_req_ids)
        events["chunks"] += len(plan.scheduled_requests) - len(plan.sampling_req_ids)

    engine.observers.append(observe)
    ids = []
    live = {}
    for number, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        for _ in range(seed % 3 * (number % 2)):
            engine.step()
        ids.append(engine.add_request(prompt, param, priority=(seed + number) % 3))
        live[ids[-1]] = engine.requests[ids[-1]]
    while engine.has_unfinished_requests():
        engine.step()
    under_pressure = [list(live[i].output_token_ids) for i in ids]
    alone = LLMEngine(model_of(kind), num_blocks=400, block_size=16, enable_prefix_caching=False)
    expected = [
        alone.generate([p], q)[0].outputs[0].token_ids for p, q in zip(prompts, params, strict=True)
    ]
    return under_pressure, [list(tokens) for tokens in expected], events

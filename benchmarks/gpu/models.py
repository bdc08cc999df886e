"""Decode steps and prefills of models of real size in vLLM 0.22.1: an 8 B Llama, a MoE of 128.

    python -m benchmarks.gpu.models bf16 fp8 moe --out models.json        # 80 GB, vLLM
    python -m benchmarks.gpu.models bf16 moe --dry-run                    # no GPU: bytes, floors

Weights are random, so bytes and shapes are real and texts are not; a router of random weights
spreads its tokens about evenly. Each arm is an engine in a process of its own. A decode step is the
time of 80 tokens less that of 16, over 64; prefix caching is off, sampling greedy.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.provenance import provenance
from labkit import processes, versions

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": (LLAMA, {}),
    "eager": (LLAMA, {"enforce_eager": True}),
    "fp8": (LLAMA, {"quantization": "fp8"}),
    "fp8kv": (LLAMA, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "sync": (LLAMA, {"async_scheduling": False}),
    "moe": (MOE, {}),
}
"""A model, and the arguments of `LLM` that make the arm."""
BATCHES = (1, 8, 32, 64, 128, 256)
MOE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFILLS = ((1, 128), (1, 1024), (1, 2048), (1, 4000), (8, 2048))
"""Prompts, and the tokens of each."""
SHORT, LONG, REPEATS = 16, 80, 3


def parameters(config: Mapping[str, Any], experts: int | None = None) -> dict[str, int]:
    """Numbers of a model by part: "embedding", "layers", "head".

    Args:
        experts: count so many experts of each layer; default all that it has.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    width = config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * width * (2 * heads + 2 * kv_heads)
    if config["model_type"] == "qwen3_moe":
        attention += 2 * width  # a norm of queries and one of keys
        count = config["num_experts"] if experts is None else experts
        mlp = 3 * hidden * config["moe_intermediate_size"] * count
        mlp += hidden * config["num_experts"]  # the router
    else:
        mlp = 3 * hidden * config["intermediate_size"]
    table = config["vocab_size"] * hidden
    return {
        "embedding": table,
        "layers": layers * (attention + mlp + 2 * hidden) + hidden,
        "head": 0 if config["tie_word_embeddings"] else table,
    }


def experts_touched(config: Mapping[str, Any], tokens: int) -> float:
    """Experts of a layer that a batch reads when each token draws its own evenly, on average."""
    total, drawn = config["num_experts"], config["num_experts_per_tok"]
    return total * (1 - (1 - drawn / total) ** tokens)


def step_floor_ms(config: Mapping[str, Any], tokens: int, bandwidth: float) -> float:
    """Milliseconds to read what a decode step of 16-bit weights reads, at `bandwidth` bytes/s.

    The embedding is left out: a step reads one row of it per token.
    """
    moe = "num_experts" in config
    one, two = (parameters(config, count) if moe else parameters(config) for count in (0, 1))
    each = two["layers"] - one["layers"]
    read = one["layers"] + one["head"] + (each * experts_touched(config, tokens) if moe else 0)
    return 2 * read / bandwidth * 1e3


def one_arm(name: str) -> None:
    """An engine in this process; answers with every time it took."""
    config, settings = ARMS[name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        began = time.perf_counter()
        from vllm import LLM, SamplingParams

        llm = LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
            max_num_seqs=256, gpu_memory_utilization=0.9, enable_prefix_caching=False, seed=0,
            **settings,
        )  # fmt: skip
        start = time.perf_counter() - began
    processes.tell(f"{name}: started in {start:.0f} s")

    def seconds(batch: int, tokens: int, prompt: int = 128) -> float:
        ids = (
            [1000 + (i * 7919 + j * 104729) % 100000 for j in range(prompt)] for i in range(batch)
        )
        asked = [{"prompt_token_ids": each} for each in ids]
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        begun = time.perf_counter()
        llm.generate(asked, params, use_tqdm=False)
        return time.perf_counter() - begun

    decode: dict[int, list[float]] = {}
    for batch in MOE_BATCHES if config is MOE else BATCHES:
        seconds(batch, 8)  # warm-up
        pairs = [(seconds(batch, SHORT), seconds(batch, LONG)) for _ in range(REPEATS)]
        decode[batch] = [(long - short) / (LONG - SHORT) * 1e3 for short, long in pairs]
        processes.tell(f"{name}: batch {batch}, {sorted(decode[batch])[REPEATS // 2]:.2f} ms")
    prefill: dict[str, list[float]] = {}
    for batch, prompt in PREFILLS:
        seconds(batch, 1, prompt)
        prefill[f"{batch}x{prompt}"] = [seconds(batch, 1, prompt) for _ in range(REPEATS)]
        processes.tell(f"{name}: prefill {batch} x {prompt}")
    found = llm.llm_engine.vllm_config
    processes.answer(
        {
            "settings": settings,
            "config": config,
            "start_s": start,
            "decode_ms": decode,
            "prefill": prefill,
            "num_gpu_blocks": found.cache_config.num_gpu_blocks,
            "cudagraph": found.compilation_config.cudagraph_mode.name,
            "async": found.scheduler_config.async_scheduling,
        }
    )


def predict(name: str, bandwidth: float) -> None:
    """What an arm should weigh and take, before it is run."""
    config, _ = ARMS[name]
    weights = 2 * sum(parameters(config).values())
    print(f"{name}: {weights / 2**30:.2f} GiB of 16-bit weights")
    for batch in MOE_BATCHES if config is MOE else BATCHES[:1]:
        floor = step_floor_ms(config, batch, bandwidth)
        touched = f", {experts_touched(config, batch):.1f} experts" if config is MOE else ""
        print(f"  batch {batch}: a step reads for {floor:.2f} ms{touched}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.models")
    parser.add_argument("arms", nargs="+", choices=tuple(ARMS))
    parser.add_argument("--out", type=Path, help="a .json file, written after every arm")
    parser.add_argument("--bandwidth", type=float, default=3.0e12, help="bytes/s of a copy")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: predictions only")
    parser.add_argument("--one", action="store_true", help="one engine, in this process")
    arguments = parser.parse_args(argv)
    if arguments.one:
        one_arm(arguments.arms[0])
        return 0
    for name in arguments.arms:
        predict(name, arguments.bandwidth)
    if arguments.dry_run:
        return 0
    if arguments.out is None:
        parser.error("--out FILE, or --dry-run")
    versions.need_vllm("--dry-run")
    kept: dict[str, Any] = {"machine": provenance("benchmarks.gpu.models"), "arms": {}}
    failed = False
    for name in arguments.arms:
        ran = processes.start(["-m", "benchmarks.gpu.models", name, "--one"])
        if ran.result is None:
            print("\n".join([*ran.lines[-processes.LAST :], f"{name}: nothing kept"]), flush=True)
            failed = True
            continue
        kept["arms"][name] = ran.result
        arguments.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

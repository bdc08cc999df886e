"""Greedy texts of the shipped model of experts with adapters of its router and its attention.

    course engine run -m conformance.record texts-lora-moe        # the real engine
    pytest conformance/features/lora/test_experts.py              # compare: any machine

On a processor the pin has no form of experts that takes adapters, and an engine that would wrap
them does not start: `vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py:80`
`UnquantizedFusedMoEMethod.select_gemm_impl`. So the recording leaves them out by
`lora_target_modules`; the router is wrapped, and sends tokens to other experts.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from conformance import recording
from conformance.features import ROOT
from conformance.features.lora import texts
from conformance.real_engine import provenance
from mini_vllm import LLM, SamplingParams

MODEL = ROOT / "models" / "byte-moe"
PARTS = {
    "router": ("mlp.gate",), "attention": ("self_attn.q_proj", "self_attn.o_proj"),
    "both": ("mlp.gate", "self_attn.v_proj"),
}  # fmt: skip
"""What the made adapters adapt, by name."""
TARGETS = ["gate", "q_proj", "v_proj", "o_proj"]


def write(folder: Path) -> Path:
    """The adapters of `PARTS` below `folder`, the same every time."""
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    sizes = {
        "mlp.gate": (config["num_experts"], hidden), "self_attn.q_proj": (heads, hidden),
        "self_attn.v_proj": (config["num_key_value_heads"] * config["head_dim"], hidden),
        "self_attn.o_proj": (hidden, heads),
    }  # fmt: skip
    rng, rank = np.random.default_rng(6), 4
    for name, parts in PARTS.items():
        made = {}
        for layer in range(config["num_hidden_layers"]):
            for part in parts:
                (out, into), size = sizes[part], 0.3 if part == "mlp.gate" else 0.1
                base = f"base_model.model.model.layers.{layer}.{part}.lora"
                for half, shape in (("A", (rank, into)), ("B", (out, rank))):
                    made[f"{base}_{half}.weight"] = np.float32(size) * rng.standard_normal(
                        shape, np.float32
                    )
        (folder / name).mkdir()
        save_file(made, folder / name / "adapter_model.safetensors")
        raw = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none"}
        targets = sorted({part.rpartition(".")[2] for part in parts})
        (folder / name / "adapter_config.json").write_text(
            json.dumps(raw | {"target_modules": targets}), encoding="utf-8"
        )
    return folder


def recorded() -> Iterator[dict[str, Any]]:
    """What vLLM answers, float32 and greedy, a slot to spare: one line."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    import vllm
    from vllm.lora.request import LoRARequest

    from conformance.features.moe.texts import for_processors

    names = tuple(PARTS)
    with tempfile.TemporaryDirectory() as home:
        folder = write(Path(home))
        llm = vllm.LLM(
            model=str(for_processors(MODEL, Path(home))), dtype="float32", seed=0,
            max_model_len=256, max_num_seqs=64, enforce_eager=True, gpu_memory_utilization=0.4,
            enable_lora=True, max_loras=4, max_cpu_loras=4, max_lora_rank=8,
            lora_target_modules=TARGETS,
            worker_extension_cls="conformance.features.lora.worker.NoPinning",
        )  # fmt: skip
        asked = [list(prompt.encode()) for prompt in texts.PROMPTS]
        batch = texts.rows(asked, names)
        results = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in batch],
            vllm.SamplingParams(temperature=0.0, max_tokens=texts.MAX_TOKENS, ignore_eos=True),
            lora_request=[texts.adapter(name, LoRARequest, names, folder) for _, name in batch],
        )
    yield {
        "upstream": recording.UPSTREAM, "machine": provenance("float32"), "max_loras": 4,
        "prompts": asked, "outputs": [list(r.outputs[0].token_ids) for r in results],
    }  # fmt: skip


def mini(found: dict[str, Any], dtype: str = "float32", **more: Any) -> list[list[int]]:
    """What the mini engine answers to the same rows."""
    names = tuple(PARTS)
    llm = LLM(
        MODEL, dtype=dtype, num_blocks=1200, max_num_seqs=64, max_num_batched_tokens=512,
        enable_lora=True, max_loras=3, max_lora_rank=8, **more,
    )  # fmt: skip
    batch = texts.rows(found["prompts"], names)
    params = SamplingParams(max_tokens=texts.MAX_TOKENS, ignore_eos=True)
    with tempfile.TemporaryDirectory() as home:
        folder = write(Path(home))
        wanted = [texts.adapter(name, names=names, folder=folder) for _, name in batch]
        results = llm.generate([prompt for prompt, _ in batch], params, wanted)
    return [list(result.outputs[0].token_ids) for result in results]

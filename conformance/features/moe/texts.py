"""Greedy texts of models with experts, from the real engine: recorded, and compared without it.

    course engine run -m conformance.record texts-qwen3-moe      # or texts-mixtral, texts-byte-moe
    python -m conformance.texts moe                              # compare: any machine

The first two are random checkpoints that this module makes anew wherever it runs; "byte-moe" is the
shipped one. What is recorded holds the prompts, so later pages change nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conformance import recording
from conformance.features import RECORDINGS, ROOT
from conformance.real_engine import glossary_prompts, provenance
from mini_vllm import LLM, SamplingParams
from mini_vllm.models.config import expected_shapes, parse_config

KEPT = RECORDINGS / "engine"
BYTE_MOE = ROOT / "models" / "byte-moe"
NUM_PROMPTS, MAX_TOKENS = 100, 24
SIZES = {
    "vocab_size": 257, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float32",
    "bos_token_id": None, "eos_token_id": 256,
}  # fmt: skip
RANDOM: dict[str, dict[str, Any]] = {
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
        "mlp_only_layers": [1], "decoder_sparse_step": 1, "attention_bias": False,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": None,
    },
}  # fmt: skip


def random_checkpoint(name: str, folder: Path) -> Path:
    """Write one of `RANDOM` into `folder`: the same numbers on every machine, loud enough to route.

    Raises:
        ValueError: another name.
    """
    if name not in RANDOM:
        raise ValueError(f"name={name!r}: need one of {', '.join(RANDOM)}")
    return write_random(SIZES | RANDOM[name], folder)


def write_random(raw: Mapping[str, Any], folder: Path) -> Path:
    """A checkpoint with this `config.json` and random weights from one seed."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    weights = {}
    for key, shape in expected_shapes(parse_config(raw, folder)).items():
        noise = rng.standard_normal(shape)
        weight = 1.0 + 0.2 * noise if "norm" in key else 0.15 * noise
        weights[key] = weight.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((ROOT / "models" / "byte-llama" / file).read_bytes())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prompts() -> list[list[int]]:
    """The same for every model."""
    return glossary_prompts(NUM_PROMPTS, 100, 61)


def recorded(name: str) -> Iterator[dict[str, Any]]:
    """What vLLM answers, float32 and greedy, all prompts handed over at once: one line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    params = vllm.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with tempfile.TemporaryDirectory() as home:
        llm = vllm.LLM(
            model=str(for_processors(folder_of(name, Path(home)), Path(home))), dtype="float32",
            seed=0, max_model_len=256, max_num_seqs=32, enforce_eager=True,
            gpu_memory_utilization=0.4,
        )  # fmt: skip
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts()]
        outputs = [list(r.outputs[0].token_ids) for r in llm.generate(asked, params)]
    machine = provenance("float32")
    yield {
        "upstream": recording.UPSTREAM, "machine": machine, "prompts": prompts(),
        "outputs": outputs,
    }  # fmt: skip


def mini(
    folder: Path, asked: Sequence[Sequence[int]], dtype: str = "float32", **knobs: Any
) -> list[list[int]]:
    """What the mini engine answers to the same prompts, batched, in chunks, with a prefix cache."""
    llm = LLM(folder, dtype=dtype, num_blocks=400, max_num_seqs=32, max_num_batched_tokens=512,
              **knobs)  # fmt: skip
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return [list(result.outputs[0].token_ids) for result in llm.generate(asked, params)]


def models(folder: Path = KEPT) -> list[str]:
    """The models whose texts are kept."""
    return [n for n in (*RANDOM, "byte-moe") if (folder / f"texts-{n}.jsonl.gz").is_file()]


def kept(name: str, folder: Path = KEPT) -> dict[str, Any]:
    """One recording: "machine", "prompts" and "outputs"."""
    (found,) = recording.lines(folder / f"texts-{name}.jsonl.gz")
    return found


def folder_of(name: str, home: Path) -> Path:
    """The checkpoint of that name; random ones are written below `home`."""
    return BYTE_MOE if name == "byte-moe" else random_checkpoint(name, home / name)


def for_processors(folder: Path, home: Path) -> Path:
    """The same model for vLLM's CPU build: experts made wider with zeros where it needs that.

    At the pin experts whose gate and up together are no multiple of 32 go to a form that fails on
    its first call (`vllm/model_executor/layers/fused_moe/cpu_fused_moe.py:428`
    `cpu_fused_moe_torch` builds a layer outside of any configuration), and those of 32 that are no
    multiple of 64 are refused by the kernel. Zero rows of gate and up and zero columns of down add
    nothing: SiLU(0) x 0 = 0.
    """
    from safetensors.numpy import load_file, save_file

    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    key = "moe_intermediate_size" if "moe_intermediate_size" in raw else "intermediate_size"
    inner = raw[key]
    more = -inner % 32
    if not more:
        return folder
    wider = home / f"{folder.name}-wider"
    wider.mkdir(parents=True, exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    for name in [n for n in weights if ".experts." in n]:
        down = name.endswith(("down_proj.weight", "w2.weight"))
        room = ((0, 0), (0, more)) if down else ((0, more), (0, 0))
        weights[name] = np.ascontiguousarray(np.pad(weights[name], room))
    save_file(weights, wider / "model.safetensors", metadata={"format": "pt"})
    for file in folder.glob("*.json"):
        (wider / file.name).write_bytes(file.read_bytes())
    (wider / "config.json").write_text(json.dumps(raw | {key: inner + more}), encoding="utf-8")
    return wider


def differing(found: Mapping[str, Any], answers: Sequence[Sequence[int]]) -> list[int]:
    """Numbers of the prompts whose texts are not the recorded ones."""
    pairs = zip(found["outputs"], answers, strict=True)
    return [number for number, (theirs, ours) in enumerate(pairs) if theirs != list(ours)]


def main() -> int:
    """Compare; returns the exit status."""
    failed = 0
    with tempfile.TemporaryDirectory() as home:
        for name in models():
            found = kept(name)
            differ = differing(found, mini(folder_of(name, Path(home)), found["prompts"]))
            failed += bool(differ)
            print(f"{name}: {len(found['prompts'])} prompts: {len(differ)} differ")
    return 1 if failed else 0

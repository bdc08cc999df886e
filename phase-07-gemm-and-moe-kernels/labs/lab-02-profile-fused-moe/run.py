"""Profile decode steps of a mixture of experts in a real vLLM 0.22.1: predict, then measure.

    course gpu run 07-02
    python run.py --file starter.py --batch 64      your predictions
    python run.py --predict                         no GPU: predictions, labelled as such

The model is a Qwen3-MoE with random weights, so nothing is downloaded and the router spreads
tokens about evenly. Every prompt differs: equal ones would be routed alike. Prefill and warm-up
come before the profile, in the engine's own process; the backend is pinned to Triton, so kernels
have the names `categorise` knows. Counts are launches, exact on any GPU; shares hold for this one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

from course.files import load_module
from labkit import versions

HERE = Path(__file__).resolve().parent


SMALL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 64,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""About 5.2 GB in bfloat16."""


def profile(config: dict[str, Any], batch: int, steps: int) -> list[tuple[str, float]]:
    """(kernel, microseconds) of every launch in `steps` decode steps of `batch` requests."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as home:
        model, traces = Path(home, "model"), Path(home, "traces")
        model.mkdir()
        traces.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        llm = LLM(
            model=str(model), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
            moe_backend="triton", max_model_len=1024, max_num_seqs=max(batch, 8),
            gpu_memory_utilization=0.6, async_scheduling=False,
            profiler_config={"profiler": "torch", "torch_profiler_dir": str(traces)},
        )  # fmt: skip
        rng = random.Random(0)
        engine = llm.llm_engine
        params = SamplingParams(
            temperature=0.0, max_tokens=steps + 8, ignore_eos=True, detokenize=False
        )
        for number in range(batch):
            prompt = {"prompt_token_ids": [rng.randrange(2, 32000) for _ in range(64)]}
            engine.add_request(f"r{number}", prompt, params)
        for _ in range(4):  # prefill, and decode steps to warm up
            engine.step()
        llm.start_profile()
        for _ in range(steps):
            engine.step()
        llm.stop_profile()
        while engine.has_unfinished_requests():
            engine.step()
        return launches(traces)


def launches(folder: Path) -> list[tuple[str, float]]:
    """The GPU kernels of the traces in a folder."""
    rows = []
    for path in sorted(folder.rglob("*.json*")):
        data = path.read_bytes()
        events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
        rows += [(e["name"], float(e["dur"])) for e in events if e.get("cat") == "kernel"]
    return rows


def counted(rows: list[tuple[str, float]], lab: ModuleType) -> Counter[str]:
    """Launches by category."""
    return Counter(lab.categorise(name) for name, _ in rows)


def predict(lab: ModuleType, batch: int, steps: int) -> None:
    """What the lab says of the run, before it."""
    parts = lab.step_bytes(SMALL, batch)
    whole = sum(parts.values())
    print(f"predicted, not measured: batch {batch}, {whole / 1e9:.2f} GB of weights a step")
    for part, value in parts.items():
        print(f"  {part:<10} {value / whole:6.1%}")
    print(f"predicted launches in {steps} steps: {lab.expected_launches(SMALL, batch, steps)}")


def main() -> int:
    """Predict, and measure where there is a GPU; returns the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--file", type=Path, default=HERE / "solution.py")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--predict", action="store_true")
    arguments = parser.parse_args()
    lab = load_module(arguments.file.resolve())
    predict(lab, arguments.batch, arguments.steps)
    if arguments.predict:
        return 0
    versions.need_vllm()
    rows = profile(SMALL, arguments.batch, arguments.steps)
    found = counted(rows, lab)
    expected = lab.expected_launches(SMALL, arguments.batch, arguments.steps)
    for category, count in expected.items():
        print(f"launches  {category:<11} {found[category]:6}  predicted {count}")
    for category, share in lab.time_shares(rows).items():
        print(f"time      {category:<11} {share:6.1%}")
    names = Counter(name[:90] for name, _ in rows if lab.categorise(name) == "other")
    for name, count in names.most_common(8):
        print(f"other     {count:6}  {name}")
    return 0 if all(found[c] == n for c, n in expected.items()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Greedy texts of the shipped adapters in one batch, from the real engine: recorded, and compared.

    course engine run -m conformance.record texts-lora        # the real engine
    python -m conformance.texts lora                          # compare: any machine

Every prompt is asked of the base model and of each adapter, all in one call, with a slot to spare.
"texts-lora-full" has no slot to spare: there the pinned form for processors adds the last slot's
delta to base rows (`vllm/lora/ops/torch_ops/lora_ops.py:67` `bgmv_shrink` indexes with -1).
"texts-lora-ends" has adapters of the embedding and the head in their place, random ones of a seed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from conformance import recording
from conformance.features import RECORDINGS, ROOT
from conformance.real_engine import MODEL, provenance
from mini_vllm import LLM, SamplingParams
from mini_vllm.lora.request import LoRARequest

KEPT = RECORDINGS / "engine"
ADAPTERS = ROOT / "models" / "adapters"
NAMES = ("code", "quote", "shout")
ENDS = {
    "both": ("embedding", "head"), "embedding": ("embedding",), "head": ("head",),
}  # fmt: skip
"""What the made adapters adapt, by name."""
MAX_TOKENS = 32
PROMPTS = (
    "The scheduler", "The KV cache is", "Return the number of tokens", "A request waits until",
    "Open a file and", "If the pool is empty,", "Compute the hash of a block.", "Every thread",
    "The default value is None", "Raise ValueError when", "This module implements", "A model of",
    "Convert a string to a list of integers.", "The first argument", "Blocks are freed",
    "Split the path into",
)  # fmt: skip


def rows(asked: Sequence[list[int]], names: Sequence[str] = NAMES) -> list[tuple[list[int], str]]:
    """(prompt, adapter) of every row of the batch, "" for the base model, interleaved."""
    return [(prompt, name) for prompt in asked for name in ("", *names)]


def adapter(
    name: str, kind: Any = LoRARequest, names: Sequence[str] = NAMES, folder: Path = ADAPTERS
) -> Any:
    """The adapter of a name in a folder of several, for either engine; None for ""."""
    return kind(name, 1 + names.index(name), str(folder / name)) if name else None


def write_ends(folder: Path) -> Path:
    """The adapters of `ENDS` for the shipped model below `folder`, the same every time."""
    rng = np.random.default_rng(5)
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    vocab, hidden, rank = config["vocab_size"], config["hidden_size"], 4
    for name, parts in ENDS.items():
        shapes: dict[str, tuple[int, int]] = {}
        if "embedding" in parts:
            base = "base_model.model.model.embed_tokens.lora_embedding"
            shapes |= {f"{base}_A": (rank, vocab), f"{base}_B": (hidden, rank)}
        if "head" in parts:
            base = "base_model.model.lm_head.lora"
            shapes |= {f"{base}_A.weight": (rank, hidden), f"{base}_B.weight": (vocab, rank)}
        made = {n: np.float32(0.2) * rng.standard_normal(s, np.float32) for n, s in shapes.items()}
        (folder / name).mkdir()
        save_file(made, folder / name / "adapter_model.safetensors")
        raw = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none"}
        targets = [{"embedding": "embed_tokens", "head": "lm_head"}[part] for part in parts]
        (folder / name / "adapter_config.json").write_text(
            json.dumps(raw | {"target_modules": targets}), encoding="utf-8"
        )
    return folder


def recorded(max_loras: int, ends: bool = False, ranks: int = 1) -> Iterator[dict[str, Any]]:
    """What vLLM answers, float32 and greedy, all rows handed over at once: one line.

    On several tensor ranks A and B are both cut, since at the pin a processor cannot do otherwise.
    """
    with tempfile.TemporaryDirectory() as made:
        if ends:
            yield _recorded(max_loras, tuple(ENDS), write_ends(Path(made)), ranks)
        else:
            yield _recorded(max_loras, NAMES, ADAPTERS, ranks)


def _recorded(max_loras: int, names: Sequence[str], folder: Path, ranks: int) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if ranks > 1:
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    import vllm
    from vllm.lora.request import LoRARequest as RealLoRARequest

    params = vllm.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    llm = vllm.LLM(
        model=str(MODEL), dtype="float32", seed=0, max_model_len=256, max_num_seqs=64,
        enforce_eager=True, gpu_memory_utilization=0.4, enable_lora=True, max_loras=max_loras,
        max_cpu_loras=4, max_lora_rank=8, tensor_parallel_size=ranks, fully_sharded_loras=ranks > 1,
        worker_extension_cls="conformance.features.lora.worker.NoPinning",
    )  # fmt: skip
    asked = [list(prompt.encode()) for prompt in PROMPTS]
    batch: Any = [{"prompt_token_ids": prompt} for prompt, _ in rows(asked, names)]
    wanted = [adapter(name, RealLoRARequest, names, folder) for _, name in rows(asked, names)]
    outputs = [
        list(r.outputs[0].token_ids) for r in llm.generate(batch, params, lora_request=wanted)
    ]
    return {
        "upstream": recording.UPSTREAM, "machine": provenance("float32"), "max_loras": max_loras,
        "prompts": asked, "outputs": outputs,
    }  # fmt: skip


def kept(name: str = "texts-lora", folder: Path = KEPT) -> dict[str, Any]:
    """One recording: "machine", "max_loras", "prompts", and "outputs" of `rows`."""
    (found,) = recording.lines(folder / f"{name}.jsonl.gz")
    return found


def mini(
    found: Mapping[str, Any], dtype: str = "float32", names: Sequence[str] = NAMES,
    folder: Path = ADAPTERS, **more: Any,
) -> list[list[int]]:  # fmt: skip
    """What the mini engine answers to the same rows: one batch, chunks, a prefix cache."""
    llm = LLM(
        MODEL, dtype=dtype, num_blocks=1200, max_num_seqs=64, max_num_batched_tokens=512,
        enable_lora=True, max_loras=3, max_lora_rank=8, **more,
    )  # fmt: skip
    batch = rows(found["prompts"], names)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    wanted = [adapter(name, names=names, folder=folder) for _, name in batch]
    results = llm.generate([p for p, _ in batch], params, wanted)
    return [list(result.outputs[0].token_ids) for result in results]


def mini_ends(found: Mapping[str, Any]) -> list[list[int]]:
    """As `mini`, with the adapters of `ENDS`."""
    with tempfile.TemporaryDirectory() as made:
        return mini(found, names=tuple(ENDS), folder=write_ends(Path(made)))


def mini_ranks(found: Mapping[str, Any]) -> list[list[int]]:
    """As `mini`, on two tensor ranks."""
    return mini(found, tensor_parallel_size=2, fully_sharded_loras=True)


def differing(
    found: Mapping[str, Any], answers: Sequence[Sequence[int]], names: Sequence[str] = NAMES
) -> dict[str, int]:
    """By adapter, "" for the base model, how many of its texts are not the recorded ones."""
    counts = dict.fromkeys(("", *names), 0)
    batch = rows(found["prompts"], names)
    for (_, name), theirs, ours in zip(batch, found["outputs"], answers, strict=True):
        counts[name] += theirs != list(ours)
    return counts


def main() -> int:
    """Compare both; returns the exit status."""
    found, ends, ranks = kept(), kept("texts-lora-ends"), kept("texts-lora-tp2")
    compared = (
        (found, differing(found, mini(found))),
        (ranks, differing(ranks, mini_ranks(ranks))),
        (ends, differing(ends, mini_ends(ends), tuple(ENDS))),
    )
    for run, counts in compared:
        print(f"{len(run['outputs'])} texts, {len(run['prompts'])} for each adapter and the base:")
        print(", ".join(f"{name or 'base'} {count} differ" for name, count in counts.items()))
    return 1 if any(any(counts.values()) for _, counts in compared) else 0

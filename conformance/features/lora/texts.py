"""Greedy texts of the shipped adapters in one batch, from the real engine: recorded, and compared.

    course engine run -m conformance.record texts-lora        # the real engine
    python -m conformance.texts lora                          # compare: any machine

Every prompt is asked of the base model and of each adapter, all in one call, with a slot to spare.
"texts-lora-full" has no slot to spare: there the pinned form for processors adds the last slot's
delta to base rows (`vllm/lora/ops/torch_ops/lora_ops.py:67` `bgmv_shrink` indexes with -1).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance import recording
from conformance.features import RECORDINGS, ROOT
from conformance.real_engine import MODEL, provenance
from mini_vllm import LLM, SamplingParams
from mini_vllm.lora.request import LoRARequest

KEPT = RECORDINGS / "engine"
ADAPTERS = ROOT / "models" / "adapters"
NAMES = ("code", "quote", "shout")
MAX_TOKENS = 32
PROMPTS = (
    "The scheduler", "The KV cache is", "Return the number of tokens", "A request waits until",
    "Open a file and", "If the pool is empty,", "Compute the hash of a block.", "Every thread",
    "The default value is None", "Raise ValueError when", "This module implements", "A model of",
    "Convert a string to a list of integers.", "The first argument", "Blocks are freed",
    "Split the path into",
)  # fmt: skip


def rows(asked: Sequence[list[int]]) -> list[tuple[list[int], str]]:
    """(prompt, adapter) of every row of the batch, "" for the base model, interleaved."""
    return [(prompt, name) for prompt in asked for name in ("", *NAMES)]


def adapter(name: str, kind: Any = LoRARequest) -> Any:
    """The shipped adapter of a name, for either engine; None for ""."""
    return kind(name, 1 + NAMES.index(name), str(ADAPTERS / name)) if name else None


def recorded(max_loras: int) -> Iterator[dict[str, Any]]:
    """What vLLM answers, float32 and greedy, all rows handed over at once: one line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm
    from vllm.lora.request import LoRARequest as RealLoRARequest

    params = vllm.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    llm = vllm.LLM(
        model=str(MODEL), dtype="float32", seed=0, max_model_len=256, max_num_seqs=64,
        enforce_eager=True, gpu_memory_utilization=0.4, enable_lora=True, max_loras=max_loras,
        max_cpu_loras=4, max_lora_rank=8,
        worker_extension_cls="conformance.features.lora.worker.NoPinning",
    )  # fmt: skip
    asked = [list(prompt.encode()) for prompt in PROMPTS]
    batch: Any = [{"prompt_token_ids": prompt} for prompt, _ in rows(asked)]
    wanted = [adapter(name, RealLoRARequest) for _, name in rows(asked)]
    outputs = [
        list(r.outputs[0].token_ids) for r in llm.generate(batch, params, lora_request=wanted)
    ]
    yield {
        "upstream": recording.UPSTREAM, "machine": provenance("float32"), "max_loras": max_loras,
        "prompts": asked, "outputs": outputs,
    }  # fmt: skip


def kept(name: str = "texts-lora", folder: Path = KEPT) -> dict[str, Any]:
    """One recording: "machine", "max_loras", "prompts", and "outputs" of `rows`."""
    (found,) = recording.lines(folder / f"{name}.jsonl.gz")
    return found


def mini(found: Mapping[str, Any], dtype: str = "float32") -> list[list[int]]:
    """What the mini engine answers to the same rows: one batch, chunks, a prefix cache."""
    llm = LLM(
        MODEL, dtype=dtype, num_blocks=1200, max_num_seqs=64, max_num_batched_tokens=512,
        enable_lora=True, max_loras=3, max_lora_rank=8,
    )  # fmt: skip
    batch = rows(found["prompts"])
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    results = llm.generate([p for p, _ in batch], params, [adapter(name) for _, name in batch])
    return [list(result.outputs[0].token_ids) for result in results]


def differing(found: Mapping[str, Any], answers: Sequence[Sequence[int]]) -> dict[str, int]:
    """By adapter, "" for the base model, how many of its texts are not the recorded ones."""
    counts = dict.fromkeys(("", *NAMES), 0)
    batch = rows(found["prompts"])
    for (_, name), theirs, ours in zip(batch, found["outputs"], answers, strict=True):
        counts[name] += theirs != list(ours)
    return counts


def main() -> int:
    """Compare; returns the exit status."""
    found = kept()
    counts = differing(found, mini(found))
    print(f"{len(found['outputs'])} texts, {len(found['prompts'])} for each adapter and the base:")
    print(", ".join(f"{name or 'base'} {count} differ" for name, count in counts.items()))
    return 1 if any(counts.values()) else 0

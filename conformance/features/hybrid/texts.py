"""Greedy texts of the shipped model with windows, from the real engine: recorded, and compared.

    course engine run -m conformance.record texts-byte-window
    python -m conformance.texts hybrid                        # compare: any machine

Prompts are several windows long, so most of what was computed has been passed when a token is
drawn. The same model with states is not among them: see README.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from conformance import recording
from conformance.features import RECORDINGS, ROOT
from conformance.real_engine import PROMPTS, provenance
from mini_vllm import LLM, SamplingParams

KEPT = RECORDINGS / "engine" / "texts-byte-window.jsonl.gz"
MODEL = ROOT / "models" / "byte-window"
NUM_PROMPTS, MAX_TOKENS = 64, 48
SETTINGS: dict[str, Any] = {
    "max_model_len": 640, "max_num_seqs": 16, "max_num_batched_tokens": 256, "block_size": 16,
    "enable_prefix_caching": True,
}  # fmt: skip
"""The same for both: prompts are cut into chunks, and prefixes are found again."""


def prompts() -> list[list[int]]:
    """Bytes of `prompts.txt`, 60 to 400 each; every second begins with the same 200."""
    text = PROMPTS.read_bytes()
    made = []
    for number in range(NUM_PROMPTS):
        start = 300 + 113 * number
        own = text[start : start + 60 + 20 * (number % 8)]
        made.append(list(text[:200] + own if number % 2 else own))
    return made


def recorded() -> Iterator[dict[str, Any]]:
    """What vLLM answers, float32 and greedy, all prompts handed over at once: one line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    params = vllm.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    llm = vllm.LLM(
        model=str(MODEL), dtype="float32", seed=0, enforce_eager=True, gpu_memory_utilization=0.4,
        **SETTINGS,
    )  # fmt: skip
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts()]
    outputs = [list(r.outputs[0].token_ids) for r in llm.generate(asked, params)]
    yield {
        "upstream": recording.UPSTREAM, "machine": provenance("float32"), "prompts": prompts(),
        "outputs": outputs,
    }  # fmt: skip


def kept() -> dict[str, Any]:
    """The recording: "machine", "prompts" and "outputs"."""
    (found,) = recording.lines(KEPT)
    return found


def mini(dtype: str = "float32") -> list[list[int]]:
    """What the mini engine answers to the same prompts with the same settings."""
    llm = LLM(MODEL, dtype=dtype, num_blocks=600, **SETTINGS)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return [list(r.outputs[0].token_ids) for r in llm.generate(kept()["prompts"], params)]


def differing(answers: list[list[int]]) -> list[int]:
    """Numbers of the prompts whose texts are not the recorded ones."""
    pairs = enumerate(zip(kept()["outputs"], answers, strict=True))
    return [number for number, (theirs, ours) in pairs if theirs != ours]


def main() -> int:
    """Compare; returns the exit status."""
    differ = differing(mini())
    print(f"byte-window: {len(kept()['prompts'])} prompts: {len(differ)} differ")
    return 1 if differ else 0

"""Requests that end the real engine with adapters on a processor, and one that is answered.

    course engine run -m conformance.record lora-faults

Each line is a run of its own: its name in `RUNS`, and what came of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance import recording
from conformance.features.lora import texts
from conformance.real_engine import MODEL, provenance

PROMPTS = [list(b"The scheduler"), list(b"A block")]
BEHIND = [84, 257, 101]
"""The second id is just behind the vocabulary of 257: the input checks let it through."""
RUNS: dict[str, tuple[int, list[list[int]], str, int | None]] = {
    "behind": (1, [BEHIND], "", None),
    "two base prompts": (4, PROMPTS, "", 1),
    "two prompts": (4, PROMPTS, "head", 1),
    "one prompt": (4, PROMPTS[:1], "head", 1),
}
"""Slots, prompts, the adapter of all of them, and `prompt_logprobs`."""
RANK_RUNS: dict[str, tuple[int, list[list[int]], str, int | None]] = {
    "two ranks": (4, PROMPTS, "head", None),
}
"""The same on two tensor ranks."""


def recorded(ranks: bool = False) -> Iterator[dict[str, Any]]:
    """A line for each run, or for each on two ranks: its tokens and logprobs, or the error.

    Each has a process of its own, since an engine that has ended takes its process with it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        for name in RANK_RUNS if ranks else RUNS:
            command = [sys.executable, "-m", "conformance.features.lora.faults", name, str(path)]
            subprocess.run(command, timeout=200, check=False)
            yield {"upstream": recording.UPSTREAM, "machine": provenance("float32"), "run": name,
                   **json.loads(path.read_text(encoding="utf-8"))}  # fmt: skip
            path.unlink()


def _run(name: str, folder: Path) -> dict[str, Any]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    import vllm
    from vllm.lora.request import LoRARequest

    max_loras, prompts, adapter, prompt_logprobs = (RUNS | RANK_RUNS)[name]
    llm = vllm.LLM(
        model=str(MODEL), dtype="float32", seed=0, max_model_len=256, max_num_seqs=8,
        enforce_eager=True, gpu_memory_utilization=0.3, enable_lora=True, max_loras=max_loras,
        max_cpu_loras=4, max_lora_rank=8,
        worker_extension_cls="conformance.features.lora.worker.NoPinning",
        tensor_parallel_size=1 + (name in RANK_RUNS),
    )  # fmt: skip
    params = vllm.SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=prompt_logprobs)
    wanted = texts.adapter(adapter, LoRARequest, tuple(texts.ENDS), folder)
    try:
        results = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params,
            lora_request=[wanted] * len(prompts),
        )  # fmt: skip
    except RuntimeError as error:
        return {"error": str(error)}
    return {
        "outputs": [list(result.outputs[0].token_ids) for result in results],
        "prompt_logprobs": [
            [None if row is None else {token: one.logprob for token, one in row.items()}
             for row in result.prompt_logprobs or ()]
            for result in results
        ],
    }  # fmt: skip


def main() -> None:
    """One run, into a file: `NAME FILE`."""
    name, path = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        found = _run(name, texts.write_ends(Path(folder)))
    Path(path).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()

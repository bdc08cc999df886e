"""Eight tokens of the shipped model from the real engine: is it there, and does it say the same?

    python -m conformance.first_tokens            # in the environment of the real engine

Run by `course engine install` when everything is in place.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from labkit import processes

MODEL = Path(__file__).resolve().parents[1] / "models" / "byte-llama"
PROMPT = "The KV cache is"
NUM_TOKENS = 8


def main() -> int:
    """Print what `labkit.processes.Ran.result` reads: "token_ids" and "seconds" to start."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    began = time.perf_counter()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(MODEL), dtype="float32", max_model_len=64, max_num_seqs=4, enforce_eager=True,
        gpu_memory_utilization=0.1, use_tqdm_on_load=False,
    )  # fmt: skip
    started = time.perf_counter() - began
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    processes.answer({"token_ids": list(output.outputs[0].token_ids), "seconds": started})
    return 0


if __name__ == "__main__":
    sys.exit(main())

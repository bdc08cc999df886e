"""What the real engine says of lab 14-06's checkpoint, its architecture loaded from a plugin.

    course engine run -m conformance.features.hybrid.plugin FILE [LAB_FILE]

The plugin is found as an installed one is, by an entry point of the group `vllm.general_plugins`:
a folder on the path holds its metadata. `LAB_FILE` is whose `parse` and `rules` load the weights,
the lab's solution unless given.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from conformance import recording
from conformance.features import ROOT
from conformance.real_engine import provenance
from labkit.modules import load_module
from labkit.plugins import put_on_path

LAB = ROOT / "phase-14-model-architectures" / "labs" / "lab-06-add-a-model"
KEPT = LAB / "recordings" / "texts.jsonl.gz"
COMMAND = "course engine run -m conformance.features.hybrid.plugin FILE"
MAX_TOKENS, NUM_LOGPROBS = 32, 5
SETTINGS: dict[str, Any] = {
    "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 16,
    "enable_prefix_caching": True,
}  # fmt: skip


def asked(lab_file: Path | None = None) -> dict[str, Any]:
    """Greedy texts of the lab's prompts, float32, and the log probabilities of the first tokens."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if lab_file is not None:
        os.environ["PARALLEL_LLAMA"] = str(lab_file.resolve())
    checkpoint = load_module(LAB / "checkpoint.py")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "site").mkdir()
        put_on_path(LAB / "plugin", Path(folder) / "site", ROOT)
        import vllm

        model = checkpoint.write(Path(folder) / "parallel-llama")
        llm = vllm.LLM(
            model=str(model), dtype="float32", seed=0, enforce_eager=True,
            gpu_memory_utilization=0.2, **SETTINGS,
        )  # fmt: skip
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=NUM_LOGPROBS
        )
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in checkpoint.prompts()]
        outputs = [result.outputs[0] for result in llm.generate(prompts, params)]
        architecture = llm.llm_engine.vllm_config.model_config.architecture
    return {
        "upstream": recording.UPSTREAM, "machine": provenance("float32") | {"command": COMMAND},
        "architecture": architecture,  # as resolved: the name of a class, the plugin's or another
        "prompts": checkpoint.prompts(), "outputs": [list(o.token_ids) for o in outputs],
        "first": [
            {str(token): round(said.logprob, 7) for token, said in output.logprobs[0].items()}
            for output in outputs
        ],
    }  # fmt: skip


def main() -> int:
    """Write the file."""
    lab_file = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    line = json.dumps(asked(lab_file), separators=(",", ":")).encode() + b"\n"
    with gzip.GzipFile(sys.argv[1], "wb", mtime=0) as file:
        file.write(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())

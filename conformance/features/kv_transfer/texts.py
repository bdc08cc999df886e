"""Two real vLLM, one after the other, that share K and V through the pin's `ExampleConnector`.

    course engine run -m conformance.record texts-example-connector   # record: the real engine
    python -m conformance.texts kv_transfer                           # compare: any machine

Three processes: one engine alone, one that keeps the K and V of prompts in files, and one that is
asked the same prompts and loads them; "texts-example-connector-by-tokens" is the last two with
`layout.ExampleConnectorByTokens`. Recorded are their texts and what their counters say of where the
prompt tokens came from; `predicted` says that from the prompts alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance import recording
from conformance.features import RECORDINGS
from conformance.real_engine import MODEL, provenance
from mini_vllm import LLM, SamplingParams
from mini_vllm.kv_transfer.example import align_to_block_size

KEPT = RECORDINGS / "engine"
BLOCK_SIZE, MAX_TOKENS, BUDGET = 16, 24, 4096
ROLES = ("alone", "producer", "consumer")
_SAID = "recorded: "
PROMPTS = (
    "The scheduler", "Return the number of tokens that the cache holds for a request.",
    "A request waits until its blocks are there.", "If the pool is empty, the last request is "
    "preempted, and its blocks are given back one by one.", "Every thread", "exactly sixteen!",
    "exactly seventeen", "and here is a text of 33 letters,", "Compute the hash of a block, and of "
    "its parent.", "This module implements a queue of requests that keeps the order of arrival.",
)  # fmt: skip
"""Of bytes; some shorter than a block, some that end one token behind a block."""


def recorded(by_tokens: bool = False) -> Iterator[dict[str, Any]]:
    """The engines, float32 and greedy, each prompt whole in one step: one line."""
    roles = ("producer_by_tokens", "consumer_by_tokens") if by_tokens else ROLES
    with tempfile.TemporaryDirectory() as folder:
        said = {role: _in_a_process(role, folder) for role in roles}
        kept = sorted(len(os.listdir(each.path)) for each in os.scandir(folder))
    yield {
        "upstream": recording.UPSTREAM, "machine": provenance("float32"),
        "block_size": BLOCK_SIZE, "prompts": [list(prompt.encode()) for prompt in PROMPTS],
        "files": kept, **said,
    }  # fmt: skip


def _in_a_process(role: str, folder: str) -> dict[str, Any]:
    """What one engine says; its process is gone then."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, role, folder], check=True, text=True,
        stdout=subprocess.PIPE, timeout=3600,
    )  # fmt: skip
    [line] = [line for line in done.stdout.splitlines() if line.startswith(_SAID)]
    found: dict[str, Any] = json.loads(line.removeprefix(_SAID))
    return found


def answer(role: str, folder: str) -> dict[str, Any]:
    """In a process of its own: the outputs, and the counters of prompt tokens by source."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    more: dict[str, Any] = {}
    if role != "alone":
        more["kv_transfer_config"] = {
            "kv_connector": "ExampleConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        }  # fmt: skip
        if "by_tokens" in role:
            more["kv_transfer_config"] |= {
                "kv_connector": "ExampleConnectorByTokens",
                "kv_connector_module_path": "conformance.features.kv_transfer.layout",
            }
            more["num_gpu_blocks_override"] = 64  # it copies the whole cache, layer by layer
    llm = vllm.LLM(
        model=str(MODEL), dtype="float32", seed=0, max_model_len=256, max_num_seqs=16,
        max_num_batched_tokens=BUDGET, block_size=BLOCK_SIZE, enforce_eager=True,
        gpu_memory_utilization=0.4, disable_log_stats=False, **more,
    )  # fmt: skip
    tokens = 1 if "producer" in role else MAX_TOKENS
    params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    batch: Any = [{"prompt_token_ids": list(prompt.encode())} for prompt in PROMPTS]
    outputs = [list(r.outputs[0].token_ids) for r in llm.generate(batch, params)]
    counters = {
        f"{metric.name}{sorted(metric.labels.values())[-1] if 'source' in metric.labels else ''}":
            getattr(metric, "value", 0)
        for metric in llm.get_metrics()
        if "external_prefix_cache" in metric.name or "prompt_tokens_by_source" in metric.name
    }  # fmt: skip
    return {"outputs": outputs, "counters": counters}


def predicted(prompts: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """Tokens of each prompt that a second engine loads from files, by the arithmetic alone."""
    kept = {
        tuple(prompt[: align_to_block_size(len(prompt), block_size)]) for prompt in prompts
    }  # fmt: skip
    found = []
    for prompt in prompts:
        end = align_to_block_size(len(prompt) - 1, block_size)
        found.append(end if end > 0 and tuple(prompt[:end]) in kept else 0)
    return found


def kept(name: str = "texts-example-connector", folder: Path = KEPT) -> dict[str, Any]:
    """The recording: "prompts", and by role "outputs" and "counters"."""
    (found,) = recording.lines(folder / f"{name}.jsonl.gz")
    return found


def mini(found: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The same two engines here: the consumer's outputs, and the tokens that it loaded."""

    def engine() -> LLM:
        config = {
            "kv_connector": "ExampleConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        }  # fmt: skip
        return LLM(
            MODEL, num_blocks=200, block_size=found["block_size"], max_num_seqs=16,
            max_num_batched_tokens=BUDGET, kv_transfer_config=config,
        )  # fmt: skip

    engine().generate(found["prompts"], SamplingParams(max_tokens=1, ignore_eos=True))
    second = engine()
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = [list(r.outputs[0].token_ids) for r in second.generate(found["prompts"], params)]
    loaded = second.llm_engine.feature("kv_transfer").stats()["num_external_tokens"]
    return {"outputs": outputs, "loaded": loaded}


def main() -> int:
    """Compare; returns the exit status."""
    found = kept() | kept("texts-example-connector-by-tokens")
    with tempfile.TemporaryDirectory() as folder:
        ours = mini(found, folder)
    theirs = found["consumer_by_tokens"]["outputs"]
    count = sum(mine != text for mine, text in zip(ours["outputs"], theirs, strict=True))
    same = theirs == found["alone"]["outputs"]
    print(f"{len(theirs)} texts with a connector: {count} differ")
    counted = found["consumer_by_tokens"]["counters"]
    print(f"{ours['loaded']} tokens loaded here, counted there: {counted}")
    return 1 if count or not same else 0


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(_SAID + json.dumps(answer(*sys.argv[1:])), flush=True)
    else:
        raise SystemExit(main())

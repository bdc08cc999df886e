"""What becomes of a seeded request beside others: the real engine's CPU build, and this one.

    course engine run -m conformance.record seeds         # the real engine

One request with a seed and a temperature is asked four times each alone and beside another request;
then one whose prompt is computed in two pieces. Upstream's sampler for processors takes the
requests' own generators only when every row has one
(`vllm/v1/sample/ops/topk_topp_sampler.py:170` `TopKTopPSampler.forward_cpu`); this engine always
does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conformance import recording
from conformance.real_engine import MODEL, provenance

KEPT = Path(__file__).parent / "recordings" / "engine" / "seeds.jsonl.gz"
TIMES = 4
PROMPT = "The scheduler"
MATES: dict[str, dict[str, Any] | None] = {
    "nobody": None,
    "a request with a seed": {"temperature": 1.0, "seed": 11},
    "one without a seed": {"temperature": 1.0},
    "a greedy one": {"temperature": 0.0},
}
SEEDED = {"temperature": 1.0, "seed": 7, "max_tokens": 16, "ignore_eos": True}


def ask(llm: Any, make: Callable[..., Any]) -> dict[str, list[str]]:
    """The seeded request's texts by who is beside it, `TIMES` calls of one engine each."""
    found: dict[str, list[str]] = {}
    for name, mate in MATES.items():
        params = [make(**SEEDED)]
        if mate is not None:
            params.append(make(max_tokens=16, ignore_eos=True, **mate))
        prompts = [PROMPT, "The KV cache"][: len(params)]
        found[name] = [llm.generate(prompts, params)[0].outputs[0].text for _ in range(TIMES)]
    return found


def recorded() -> Iterator[dict[str, Any]]:
    """What vLLM says: one line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    llm = vllm.LLM(
        model=str(MODEL), dtype="float32", seed=0, max_model_len=512, max_num_seqs=8,
        max_num_batched_tokens=64, enable_prefix_caching=False, enforce_eager=True,
        gpu_memory_utilization=0.1,
    )  # fmt: skip
    texts = ask(llm, vllm.SamplingParams)
    try:
        llm.generate([PROMPT * 8], [vllm.SamplingParams(**SEEDED)])
        chunked = "answered"
    except Exception as error:
        chunked = f"{type(error).__name__}: {error}"
    about = {"upstream": recording.UPSTREAM, "machine": provenance("float32")}
    yield {**about, "texts": texts, "chunked": chunked[:300]}


def kept() -> dict[str, Any]:
    """The recording."""
    (line,) = recording.lines(KEPT)
    return line

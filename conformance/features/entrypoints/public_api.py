"""One script, two engines: the public API of vLLM and of mini_vllm, answer by answer.

    course engine run -m conformance.record public-api     # vLLM 0.22.1, on its GPU or CPU build

`run_script` is written against `LLM` and `SamplingParams` and takes them as arguments: the import
is all that changes. Kept is what vLLM answered, text, token ids and finish reason, and what it
refused; `test_public_api.py` runs the same script on mini_vllm. Mirrors
`vllm/entrypoints/llm.py:66` `LLM`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.features import RECORDINGS
from conformance.real_engine import MODEL, check_can_record, provenance

RECORDED = RECORDINGS / "engine" / "public-api.jsonl.gz"
CACHE = "The KV cache is divided into"
CODEC = "mappings from 'VENDORS/MICSFT/PC/CP437.TXT' with gencodec.py."
"""Of the texts the shipped model has read many end with this word."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "seed": 0,
    "block_size": 16,
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
}
"""Few slots and a small budget, so that the prompts of the script wait and are cut."""

ACCEPTED: dict[str, tuple[str | list[int], dict[str, Any]]] = {
    "greedy": (CACHE, {"temperature": 0.0}),
    "one token": (CACHE, {"temperature": 0.0, "max_tokens": 1}),
    "forty tokens": (CACHE, {"temperature": 0.0, "max_tokens": 40}),
    "token ids": (list(CACHE.encode()), {"temperature": 0.0}),
    "stop at a space": (CACHE, {"temperature": 0.0, "stop_token_ids": [32]}),
    "stop at one of two": (
        CACHE,
        {"temperature": 0.0, "max_tokens": 32, "stop_token_ids": [10, 112]},
    ),
    "not before ten": (
        CACHE,
        {"temperature": 0.0, "max_tokens": 24, "stop_token_ids": [32], "min_tokens": 10},
    ),
    "to the model's length": (CACHE * 3, {"temperature": 0.0, "max_tokens": 64}),
    "ends by itself": (CODEC, {"temperature": 0.0}),
    "EOS ignored": (CODEC, {"temperature": 0.0, "ignore_eos": True}),
    "two bytes each": ("Größe, Länge, Höhe: ", {"temperature": 0.0, "max_tokens": 12}),
    "three bytes each": ("模型 KV 缓存 ", {"temperature": 0.0, "max_tokens": 12}),
    "ends inside a character": (
        [*"Größe, L".encode(), 0xC3],
        {"temperature": 0.0, "max_tokens": 6},
    ),
    "top_k of one": (CACHE, {"temperature": 1.0, "top_k": 1, "seed": 3}),
    "a tiny top_p": (CACHE, {"temperature": 0.7, "top_p": 1e-6, "seed": 3}),
    "a min_p of one": (CACHE, {"temperature": 1.5, "min_p": 1.0, "seed": 3}),
    "top_k off, by 0": (CACHE, {"temperature": 0.0, "top_k": 0}),
    "top_k off, by -1": (CACHE, {"temperature": 0.0, "top_k": -1}),
}
"""By name: prompt and parameters. None leaves a choice to chance."""

REFUSED: dict[str, tuple[str | list[int], dict[str, Any]]] = {
    "no prompt": ("", {}),
    "a prompt of the model's length": ("x" * 96, {}),
    "an unknown token": ([65, 300], {}),
    "a negative temperature": (CACHE, {"temperature": -0.5}),
    "top_p 0": (CACHE, {"top_p": 0.0}),
    "top_p above 1": (CACHE, {"top_p": 1.5}),
    "top_k -2": (CACHE, {"top_k": -2}),
    "min_p above 1": (CACHE, {"min_p": 1.5}),
    "no tokens": (CACHE, {"max_tokens": 0}),
    "fewer than none": (CACHE, {"min_tokens": -1}),
    "min above max": (CACHE, {"min_tokens": 9, "max_tokens": 8}),
}


def run_script(
    llm_class: Any, params_class: Any, **more: Any
) -> dict[str, dict[str, dict[str, Any]]]:
    """The script: every accepted case in one batch, every refused one alone.

    Args:
        llm_class, params_class: `LLM` and `SamplingParams` of either engine.
        more: settings that only one of them has.

    Returns:
        "answers" and "refusals", by case. A case that should be refused and was not says so.
    """
    llm = llm_class(model=str(MODEL), **SETTINGS, **more)
    prompts = [prompt for prompt, _ in ACCEPTED.values()]
    params = [params_class(**wishes) for _, wishes in ACCEPTED.values()]
    answers = {}
    for name, output in zip(ACCEPTED, llm.generate(prompts, params), strict=True):
        (completion,) = output.outputs
        answers[name] = {
            "prompt_token_ids": list(output.prompt_token_ids),
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
        }
    refusals = {}
    for name, (prompt, wishes) in REFUSED.items():
        try:
            output = llm.generate([prompt], params_class(**wishes))[0]
        except Exception as error:  # whichever class: the test says what is expected
            refusals[name] = {"error": type(error).__name__, "says": str(error).splitlines()[0]}
        else:
            refusals[name] = {"error": "none", "says": output.outputs[0].text}
    return {"answers": answers, "refusals": refusals}


def recorded() -> Iterator[dict[str, Any]]:
    """One line: what vLLM answers and refuses here, and on what it ran."""
    check_can_record()
    from vllm import LLM, SamplingParams

    found = run_script(LLM, SamplingParams, enforce_eager=True, gpu_memory_utilization=0.3)
    yield {"machine": provenance("float32"), **found}

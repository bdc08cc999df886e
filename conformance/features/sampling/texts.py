"""Every wish of phase 09 on the shipped model, answered by the real engine and by the mini one.

    course engine run -m conformance.record texts-sampling      # the real engine
    python -m conformance.texts sampling                        # compare: any machine

100 greedy requests with drawn penalties, biases, bans, stop texts and logprobs, in one batch; beam
searches; completions of one prompt with a seed; and requests whose wishes leave no token. The file
holds prompts and wishes, so later pages change nothing. Real vLLM in float32, the mini engine in
both precisions; logprobs are compared to 1e-4, what float32 sums of this size differ by.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conformance import recording
from conformance.features import RECORDINGS
from conformance.real_engine import MODEL, glossary_prompts, provenance
from mini_vllm import LLM, BeamSearchParams, SamplingParams

FILE = RECORDINGS / "engine" / "texts-sampling.jsonl.gz"
NUM_REQUESTS, MAX_TOKENS = 100, 24
TOLERANCE = 1e-4
BEAMS = [(1, 8, 1.0), (2, 12, 1.0), (3, 12, 0.0), (4, 16, 2.0), (4, 10, 1.0), (8, 6, 1.0)]
"""Width, tokens, length penalty; each on four prompts."""
SEEDED = {"temperature": 0.9, "seed": 11, "max_tokens": 8}
IMPOSSIBLE = [
    {"allowed_token_ids": [65], "bad_words": ["A"]},
    {"allowed_token_ids": [10, 256], "stop_token_ids": [10], "min_tokens": 2},
]


def prompts() -> list[list[int]]:
    """As many as there are requests."""
    return glossary_prompts(NUM_REQUESTS, 300, 67)


def wishes() -> list[dict[str, Any]]:
    """What each request asks for, as keywords of either `SamplingParams`."""
    rng = np.random.default_rng(9)
    made = []
    for number in range(NUM_REQUESTS):
        wish: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
        kinds = rng.choice(8, size=1 + number % 3, replace=False)
        if 0 in kinds:
            wish["repetition_penalty"] = float(rng.choice((0.8, 1.1, 1.5, 3.0)))
        if 1 in kinds:
            wish["presence_penalty"] = float(rng.choice((-2.0, -0.5, 0.5, 2.0)))
        if 2 in kinds:
            wish["frequency_penalty"] = float(rng.choice((-0.3, 0.4, 2.0)))
        if 3 in kinds:
            ids = rng.choice(257, size=5, replace=False)
            wish["logit_bias"] = {int(i): float(rng.choice((-100, -3, 2, 6))) for i in ids}
        if 4 in kinds:
            wish["bad_words"] = [str(w) for w in rng.choice(("the", " a", "e", "re", "st"), 2)]
        if 5 in kinds:
            wish["allowed_token_ids"] = [10, 32, *range(97, 123)]
        if 6 in kinds:
            wish["stop"] = [str(w) for w in rng.choice(("th", "e ", "\n", "s", "qu"), 2)]
            wish["include_stop_str_in_output"] = bool(rng.random() < 0.5)
        if 7 in kinds:
            wish |= {"min_tokens": int(rng.integers(1, 20)), "stop_token_ids": [32, 10]}
        if number % 4 == 0:
            wish["logprobs"] = int(rng.integers(0, 6))
        if number % 8 == 0:
            wish["prompt_logprobs"] = int(rng.integers(0, 3))
        made.append(wish)
    return made


def answer(output: Any) -> dict[str, Any]:
    """A `RequestOutput` of either engine as plain data."""
    one = output.outputs[0]
    return {
        "token_ids": list(one.token_ids), "text": one.text, "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason, "cumulative_logprob": one.cumulative_logprob,
        "logprobs": _plain(one.logprobs), "prompt_logprobs": _plain(output.prompt_logprobs),
    }  # fmt: skip


def _plain(positions: Sequence[Mapping[int, Any] | None] | None) -> list[Any] | None:
    """[[token id, logprob, rank], ...] per position."""
    if positions is None:
        return None
    return [
        None if at is None else [[t, round(p.logprob, 6), p.rank] for t, p in at.items()]
        for at in positions
    ]


def ask(llm: Any, params: Any, beams: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Put everything to one engine of either kind."""

    def asked(tokens: Sequence[Sequence[int]]) -> list[Any]:
        return [{"prompt_token_ids": list(t)} for t in tokens] if llm_is_real else list(tokens)

    llm_is_real = not isinstance(llm, LLM)
    made = [params(**_keys(wish)) for wish in given["wishes"]]
    searches = []
    for number, (width, length, penalty) in enumerate(given["searches"]):
        found = llm.beam_search(
            [{"prompt_token_ids": p} for p in given["prompts"][4 * number : 4 * number + 4]],
            beams(beam_width=width, max_tokens=length, length_penalty=penalty),
        )
        searches.append([[[s.tokens, s.cum_logprob] for s in one.sequences] for one in found])
    return {
        "answers": [answer(o) for o in llm.generate(asked(given["prompts"]), made)],
        "beams": searches,
        "impossible": [
            [list(o.outputs[0].token_ids), o.outputs[0].finish_reason]
            for o in llm.generate(
                asked(given["prompts"][: len(IMPOSSIBLE)]),
                [params(temperature=0.0, max_tokens=3, **wish) for wish in IMPOSSIBLE],
            )
        ],
    }


def _keys(wish: Mapping[str, Any]) -> dict[str, Any]:
    """A wish with the integer keys that JSON has no form for."""
    found = dict(wish)
    if "logit_bias" in found:
        found["logit_bias"] = {int(t): b for t, b in found["logit_bias"].items()}
    return found


def workload() -> dict[str, Any]:
    """What both engines are asked."""
    return {"prompts": prompts(), "wishes": wishes(), "searches": [list(b) for b in BEAMS]}


def recorded() -> Iterator[dict[str, Any]]:
    """What vLLM answers, all at once: one line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm
    from vllm.sampling_params import BeamSearchParams as RealBeams

    llm = vllm.LLM(
        model=str(MODEL), dtype="float32", seed=0, max_model_len=512, max_num_seqs=32,
        max_num_batched_tokens=512, enforce_eager=True, gpu_memory_utilization=0.4,
    )  # fmt: skip
    given = workload()
    found = ask(llm, vllm.SamplingParams, RealBeams, given)
    prompt: Any = [{"prompt_token_ids": given["prompts"][0]}]
    joined = llm.generate(prompt, vllm.SamplingParams(n=3, **SEEDED))[0]
    apart = [
        llm.generate(prompt, vllm.SamplingParams(**{**SEEDED, "seed": 11 + i}))[0] for i in range(3)
    ]
    seeded = {
        "n": [list(o.token_ids) for o in joined.outputs],
        "one_by_one": [list(o.outputs[0].token_ids) for o in apart],
    }
    yield {
        "upstream": recording.UPSTREAM, "machine": provenance("float32"), **given, **found,
        "seeded": seeded,
    }  # fmt: skip


def mini(given: Mapping[str, Any], dtype: str = "float64", **knobs: Any) -> dict[str, Any]:
    """What the mini engine answers, batched, in chunks, with a prefix cache."""
    sizes: dict[str, Any] = {"num_blocks": 600, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    return ask(LLM(dtype=dtype, **(sizes | knobs)), SamplingParams, BeamSearchParams, given)


def differences(real: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Where the two differ, one line each; of the requests that nothing was left for, the real
    engine's token 0 stands beside our error and is not compared."""
    found = []
    for number, (a, b) in enumerate(zip(real["answers"], ours["answers"], strict=True)):
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            if a[name] != b[name]:
                found.append(f"request {number}, {name}: vLLM {a[name]!r}, mini_vllm {b[name]!r}")
        for name in ("logprobs", "prompt_logprobs"):
            found += [f"request {number}, {name} {w}" for w in _far(a[name], b[name])]
    for number, (one, other) in enumerate(zip(real["beams"], ours["beams"], strict=True)):
        for prompt, (a, b) in enumerate(zip(one, other, strict=True)):
            same = [s[0] for s in a] == [s[0] for s in b]
            close = all(abs(x[1] - y[1]) <= TOLERANCE * 10 for x, y in zip(a, b, strict=False))
            if not (same and close):
                found.append(f"beams {BEAMS[number]}, prompt {prompt}: vLLM {a}, mini_vllm {b}")
    return found


def _far(real: list[Any] | None, ours: list[Any] | None) -> Iterator[str]:
    """Positions whose tokens, ranks or values differ."""
    if real is None or ours is None:
        if (real is None) != (ours is None):
            yield f"vLLM {real is not None}, mini_vllm {ours is not None}"
        return
    for position, (a, b) in enumerate(zip(real, ours, strict=True)):
        if a is None or b is None:
            if a != b:
                yield f"at {position}: vLLM {a}, mini_vllm {b}"
            continue
        values = {t: p for t, p, _ in b}
        if {t for t, _, _ in a} != set(values) or a[0][0] != b[0][0]:
            yield f"at {position}: vLLM {a}, mini_vllm {b}"
        elif far := [t for t, p, _ in a if abs(p - values[t]) > TOLERANCE]:
            yield f"at {position}: of tokens {far}, vLLM {a}, mini_vllm {b}"
        elif sorted(r for _, _, r in a) != sorted(r for _, _, r in b):
            yield f"at {position}: ranks, vLLM {a}, mini_vllm {b}"


def kept(path: Path = FILE) -> dict[str, Any]:
    """The recording."""
    (line,) = recording.lines(path)
    return line


def main() -> int:
    """Compare; the exit status is 1 if anything differs."""
    real = kept()
    wrong = 0
    for dtype in ("float32", "float64"):
        found = differences(real, mini(real, dtype))
        print("\n".join(found[:20]))
        print(f"{dtype}: {NUM_REQUESTS} requests, {4 * len(BEAMS)} beam searches: "
              f"{len(found)} differ")  # fmt: skip
        wrong += len(found)
    return int(wrong > 0)

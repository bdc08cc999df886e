"""Record which outputs the real v0.22.1 ends because they repeat themselves.

Needs the pinned tree on `PYTHONPATH`, no GPU. What runs is `check_stop`, once per token as a
scheduler calls it, on upstream's own `Request` and `SamplingParams`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Case = dict[str, Any]
EOS, STOP, PROMPT = 2, 5, (7, 7, 7, 7)
DRAWN = 1200

ABOUT = (
    "A request with the prompt `[7, 7, 7, 7]`, whose tokens come one by one. `wanted`: fields of "
    "`RepetitionDetectionParams`, or null. `tokens`: what would come; `kept`: how many had come "
    "when the check ended it; `reason` and `stop_reason` then, null where it never did."
)


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    from vllm.sampling_params import RepetitionDetectionParams
    from vllm.v1.core.sched.utils import check_stop

    from conformance import real

    rng = random.Random(2249)
    for _ in range(DRAWN):
        case = _drawn(rng)
        wanted = case["wanted"] and RepetitionDetectionParams(**case["wanted"])
        params = real.SamplingParams(
            max_tokens=case["max_tokens"], min_tokens=case["min_tokens"], stop_token_ids=[STOP],
            ignore_eos=case["ignore_eos"], repetition_detection=wanted,
        )  # fmt: skip
        params.update_from_generation_config({}, EOS)
        request = real.Request("r", list(PROMPT), params, None)
        kept = 0
        for token in case["tokens"]:
            request.append_output_token_ids([token])
            kept += 1
            if check_stop(request, case["max_model_len"]):
                break
        reason = request.get_finished_reason()
        yield case | {
            "kept": kept,
            "reason": None if reason is None else str(reason),
            "stop_reason": request.stop_reason,
        }


def _drawn(rng: random.Random) -> Case:
    """Few kinds of token, and patterns of them, so that they repeat by chance and by intent."""
    most = rng.choice((0, 1, 2, 3, 3, 4, 8))
    wanted = {
        "max_pattern_size": most, "min_pattern_size": rng.randint(0, most),
        "min_count": rng.choice((2, 2, 3, 4)),
    }  # fmt: skip
    tokens: list[int] = []
    kinds = rng.choice(((7, 8), (7, 8, 9), (1, 7, 8, EOS), (STOP, 7, 8, 9, 11)))
    while len(tokens) < 14:
        piece = [rng.choice(kinds) for _ in range(rng.randint(1, 5))]
        tokens += piece * rng.choice((1, 1, 2, 3, 4))
    length = rng.choice((len(tokens) + 1, len(tokens) + 1, 4, 6, 9))
    return {
        "wanted": None if rng.random() < 0.1 else wanted,
        "tokens": tokens, "max_tokens": length,
        "min_tokens": rng.choice((0, 0, 0, min(4, length), length)),
        "ignore_eos": rng.random() < 0.5,
        "max_model_len": rng.choice((64, 64, 64, 9, 12)),
    }  # fmt: skip

"""Where drafts turn from gain to loss, and a text that is drafted by looking up."""

from __future__ import annotations

from typing import Any

import numpy as np

from course.site.widgets.hardware import GPUS
from mini_vllm.spec_decode.ngram import ngram_propose


def step(alpha: float, k: int, c: float, batch: float, ridge: float) -> dict[str, float]:
    """What `k` drafts a run are worth at a batch, where a step is bound by weights or arithmetic.

    Up to `ridge` tokens a step costs one reading of the weights, beyond it its tokens count. The
    cache is left out. Lab 08-04's model is that of small batches.

    Args:
        alpha: probability that a draft is kept if those before it were.
        c: one drafter step, in plain steps of the target at this batch.
        batch: requests.
        ridge: tokens of a step at which arithmetic takes as long as reading the weights.

    Returns:
        `tokens` per run and request; `verify`, a run in plain steps; `speedup`.
    """
    tokens = sum(alpha**i for i in range(k + 1))
    verify = max(1.0, batch * (k + 1) / ridge) / max(1.0, batch / ridge)
    return {"tokens": tokens, "verify": verify, "speedup": tokens / (verify + k * c)}


def best_k(alpha: float, c: float, batch: float, ridge: float, max_k: int = 20) -> int:
    """The number of drafts with the largest speedup, of equals the smallest."""
    return max(range(max_k + 1), key=lambda k: step(alpha, k, c, batch, ridge)["speedup"])


def drafted_runs(text: str, min_n: int, max_n: int, k: int) -> list[dict[str, Any]]:
    """n-gram drafts over a text that is taken for what the model says after its first character.

    One entry per run: `drafts`, and `accepted`, how many of them were kept. A run says the kept
    drafts and one character more, while there are any.
    """
    tokens = [ord(character) for character in text]
    runs, known = [], 1
    while known < len(tokens):
        room = min(k, len(tokens) - known - 1)
        drafts = ngram_propose(np.array(tokens[:known]), min_n, max_n, room)
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == tokens[known + accepted]:
            accepted += 1
        runs.append({"drafts": "".join(map(chr, drafts)), "accepted": accepted})
        known += accepted + 1
    return runs


SAMPLE = "for i in range(n):\n    a[i] = 0\nfor j in range(n):\n    b[j] = 0\n"


def document() -> dict[str, Any]:
    """Ridges, where the sliders begin, and questions."""
    ridges = {name: gpu["peak_flops"] / gpu["mem_bw"] for name, gpu in GPUS.items()}
    defaults = {"gpu": "H100 SXM", "alpha": 0.7, "k": 3, "c": 0.05, "batch": 8, "text": SAMPLE}
    ridge = ridges["H100 SXM"]
    asked = (
        ("alpha is 1: every draft is kept. k = 3. How many tokens does a run bring?",
         1.0, 3, 0.0, 1, 4, "Three drafts, and one token that the model says itself."),
        ("An H100, k = 3. Up to how many requests does it cost one plain step to verify?",
         0.7, 3, 0.05, 64, int(ridge // 4), "Each has 4 rows, and the ridge is 295."),
        ("alpha 0.5, a draft costs 0.1 steps, 8 requests. Which k is best?",
         0.5, best_k(0.5, 0.1, 8, ridge), 0.1, 8, best_k(0.5, 0.1, 8, ridge),
         "The next draft is kept too seldom to pay for its own cost."),
        ("The same with 512 requests. Which k is best now?",
         0.5, 3, 0.1, 512, best_k(0.5, 0.1, 512, ridge),
         "512 rows are past the ridge without drafts: every row costs, and not every one is kept."),
    )  # fmt: skip
    names = ("ask", "alpha", "k", "c", "batch", "answer", "because")
    return {
        "ridges": ridges, "defaults": defaults,
        "questions": [dict(zip(names, question, strict=True)) for question in asked],
    }  # fmt: skip

"""How many experts a decode step reads, and how many rows each of them multiplies."""

from __future__ import annotations

from typing import Any

from course.site.widgets.hardware import GPUS


def experts_touched(num_experts: int, top_k: int, batch: int) -> float:
    """Experts of a layer that a decode step of `batch` tokens reads, if all are as likely."""
    return num_experts * (1 - (1 - top_k / num_experts) ** batch)


def drawn_experts(num_experts: int, top_k: int, batch: int) -> list[list[int]]:
    """Different experts for each token, drawn by a generator that a browser has as well."""
    state, tokens = 7, []
    for _ in range(batch):
        left, chosen = list(range(num_experts)), []
        for _ in range(top_k):
            state = (state * 1664525 + 1013904223) % 2**32
            chosen.append(left.pop((state >> 8) % len(left)))
        tokens.append(chosen)
    return tokens


QUESTIONS = (
    ("8 experts, top-2, one request decodes. How many experts does the step read?",
     8, 2, 1, "drawn", "The two that its token chose: a quarter of their bytes."),
    ("16 requests decode. How many of the 8 are read now?",
     8, 2, 16, "drawn", "32 choices among 8: nobody is left out, and each is read once."),
    ("How many rows does each of the 8 multiply, on average?",
     8, 2, 16, "rows", "32 choices over 8 experts: still far below the ridge."),
    ("128 experts, top-8, and 8 requests make 64 choices. How many experts does this draw read?",
     128, 8, 8, "drawn", "Some are chosen twice or more; on average 128 x (1 - (15/16)^8) = 51.6."),
)  # fmt: skip
"""What is asked: experts, top-k, batch, and which result answers."""


def document() -> dict[str, Any]:
    """Shapes of models with experts, GPUs, and questions."""
    shapes = {
        "Mixtral 8x7B": {"experts": 8, "top_k": 2, "hidden": 4096, "inner": 14336, "layers": 32},
        "measured in phase 07": {
            "experts": 128, "top_k": 8, "hidden": 2048, "inner": 768, "layers": 24,
        },
        "Qwen1.5-MoE-A2.7B": {
            "experts": 60, "top_k": 4, "hidden": 2048, "inner": 1408, "layers": 24,
        },
    }  # fmt: skip
    questions = []
    for ask, experts, top_k, batch, kind, because in QUESTIONS:
        read = {expert for token in drawn_experts(experts, top_k, batch) for expert in token}
        answer = len(read) if kind == "drawn" else batch * top_k // len(read)
        knobs = {"experts": experts, "top_k": top_k, "batch": batch}
        questions.append({"ask": ask, "answer": answer, "because": because, **knobs})
    return {"models": shapes, "gpus": GPUS, "questions": questions}

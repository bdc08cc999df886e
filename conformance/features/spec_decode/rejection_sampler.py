"""Record the rejection sampler of the real v0.22.1, with vLLM's CPU build."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

Case = dict[str, Any]

ABOUT = (
    '`{"drafts": [[ids]], "logits", "draft_probs", "bonus", "is_greedy", "uniforms", '
    '"exponentials", "tokens": [[ids]]}`. What `rejection_sample` keeps, per request. Its '
    "draws are set to `uniforms` [num_drafts] and `exponentials` [num_requests, "
    "vocab_size]; `draft_probs` is null for drafts that were certain. Logits are "
    "multiples of 1/16; a row of draft probabilities is a softmax of such logits."
)


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    import torch
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler as real

    for name in dir(real):
        if name.endswith("_kernel") and hasattr(cpu_triton_utils, name):
            setattr(real, name, getattr(cpu_triton_utils, name))
    rng = np.random.default_rng(9)
    for number in range(240):
        num_requests, vocab_size = int(rng.integers(1, 7)), int(rng.choice((3, 5, 12)))
        counts = rng.integers(0, 5, size=num_requests).tolist()
        counts[0] = counts[0] or 2
        total = sum(counts)
        logits = rng.integers(-48, 49, size=(total, vocab_size)) / 16
        guesses = logits + rng.integers(-24, 25, size=logits.shape) / 16
        laws = torch.tensor(guesses, dtype=torch.float32).softmax(dim=-1)
        drafts = [int(rng.choice(vocab_size, p=law / law.sum())) for law in laws.double().numpy()]
        greedy = rng.random(num_requests) < (0.0, 0.5, 1.0)[number % 3]
        draft_probs = laws if number % 2 and not greedy.all() else None
        bonus = rng.integers(0, vocab_size, size=num_requests)
        uniforms = rng.integers(0, 1 << 16, size=total) / (1 << 16)
        exponentials = rng.integers(1, 1 << 12, size=(num_requests, vocab_size)) / (1 << 10)
        kept = _real_rejection(
            real, torch, drafts, counts, draft_probs, logits, bonus, greedy, uniforms, exponentials
        )
        cuts = np.cumsum(counts)[:-1]
        yield {
            "drafts": [part.tolist() for part in np.split(np.array(drafts), cuts)],
            "logits": logits.tolist(),
            "draft_probs": None if draft_probs is None else draft_probs.double().tolist(),
            "bonus": bonus.tolist(),
            "is_greedy": greedy.tolist(),
            "uniforms": uniforms.tolist(),
            "exponentials": exponentials.tolist(),
            "tokens": kept,
        }


def _real_rejection(
    real: Any,
    torch: Any,
    drafts: Sequence[int],
    counts: Sequence[int],
    draft_probs: Any,
    logits: np.ndarray,
    bonus: np.ndarray,
    greedy: np.ndarray,
    uniforms: np.ndarray,
    exponentials: np.ndarray,
) -> list[list[int]]:
    """`rejection_sample` with these draws, its rejected places dropped."""
    kept_draw, kept_uniform = torch.Tensor.exponential_, real.generate_uniform_probs
    table = torch.tensor(exponentials, dtype=torch.float32)
    torch.Tensor.exponential_ = lambda self, **_: self.copy_(table)
    real.generate_uniform_probs = lambda *_: torch.tensor(uniforms, dtype=torch.float64)
    try:
        output = real.rejection_sample(
            torch.tensor(drafts, dtype=torch.int32),
            list(counts),
            max(counts),
            torch.tensor(np.cumsum(counts), dtype=torch.int32),
            draft_probs,
            torch.tensor(logits, dtype=torch.float32),
            torch.tensor(bonus, dtype=torch.int32)[:, None],
            SimpleNamespace(
                all_greedy=bool(greedy.all()),
                all_random=not greedy.any(),
                temperature=torch.tensor(np.where(greedy, 0.0, 1.0), dtype=torch.float32),
                generators={},
            ),
        )
    finally:
        torch.Tensor.exponential_, real.generate_uniform_probs = kept_draw, kept_uniform
    tokens, _ = real.RejectionSampler.parse_output(output, logits.shape[1])
    return [[int(token) for token in row] for row in tokens]

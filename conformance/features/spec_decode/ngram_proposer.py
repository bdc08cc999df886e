"""Record the n-gram drafter of the real v0.22.1, with vLLM's CPU build."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

Case = dict[str, Any]

ABOUT = (
    '`{"min_n", "max_n", "k", "max_model_len", "contexts": [[ids]], "drafts": [[ids]]}`. '
    "What `NgramProposer.propose` answers to a batch of contexts, each of which has just "
    "sampled."
)


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    rng = random.Random(8)
    for _ in range(160):
        low = rng.choice((1, 1, 2, 3, 4))
        high, k = low + rng.choice((0, 0, 1, 2, 4)), rng.choice((1, 2, 3, 5, 8))
        limit = rng.choice((24, 64, 160))
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(
                prompt_lookup_min=low, prompt_lookup_max=high, num_speculative_tokens=k
            ),
            model_config=SimpleNamespace(max_model_len=limit),
            scheduler_config=SimpleNamespace(max_num_seqs=1024),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        proposer = NgramProposer(config)
        vocabulary = rng.choice((1, 2, 3, 5, 20))
        contexts = [rng.choices(range(vocabulary), k=rng.randint(1, limit)) for _ in range(16)]
        for context in contexts[::4]:  # text that repeats, with a slip
            period = rng.randint(1, 9)
            context[:] = [context[i % period % len(context)] for i in range(len(context))]
            context[rng.randrange(len(context))] = rng.randrange(vocabulary)
        lengths = np.array([len(context) for context in contexts], dtype=np.int32)
        table = np.zeros((len(contexts), limit), dtype=np.int32)
        for row, context in zip(table, contexts, strict=True):
            row[: len(context)] = context
        drafts = proposer.propose([[1]] * len(contexts), lengths, table)
        yield {
            "min_n": low, "max_n": high, "k": k, "max_model_len": limit,
            "contexts": contexts, "drafts": [[int(t) for t in tokens] for tokens in drafts],
        }  # fmt: skip

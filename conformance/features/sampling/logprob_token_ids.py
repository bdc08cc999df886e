"""Record what the real v0.22.1 notes of chosen tokens, for requests alone and beside others.

Needs the pinned tree on `PYTHONPATH`, no GPU. The real `SamplingParams`, input batch,
`Sampler.forward` and the front end's `LogprobsProcessor` run on one batch at a time; a case is a
batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from conformance.features.sampling.sampler import _real_params, _real_sampler, written

Case = dict[str, Any]

ABOUT = (
    "One batch, every row greedy. `params`: `logprobs`, `logprob_token_ids` or neither, by row. "
    "`logits` in, [rows, vocab_size], multiples of 1/16, no two of a row equal. `tokens`: sampled. "
    "`said`: what the front end's `LogprobsProcessor` says of the row's token, as [token id, "
    "logprob, rank] in its order, a logprob of -inf as null; null where it was not asked."
)


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    rng = np.random.default_rng(649)
    for _ in range(80):
        shape = int(rng.integers(1, 5)), int(rng.choice((6, 12, 24)))
        steps = np.array([rng.permutation(200)[: shape[1]] for _ in range(shape[0])])
        yield _batch(rng, (steps - 100) / 16)


def _wanted(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.15:
        return {}
    if kind < 0.5:
        return {"logprobs": int(rng.integers(0, 4))}
    ids = rng.permutation(vocab)[: int(rng.integers(1, 5))].tolist()
    return {"logprob_token_ids": ids} | ({"logprobs": len(ids)} if kind < 0.6 else {})


def _batch(rng: np.random.Generator, logits: np.ndarray) -> Case:
    import torch

    fields = [_wanted(rng, logits.shape[1]) for _ in logits]
    params = [_real_params({"temperature": 0.0, **each}, [[0, 0, 0]], 0) for each in fields]
    _, output = _real_sampler(
        torch.tensor(logits, dtype=torch.float32), params, [([1], []) for _ in params],
        np.ones(logits.shape),
    )  # fmt: skip
    return {
        "params": fields,
        "logits": [written(row) for row in logits],
        "tokens": output.sampled_token_ids[:, 0].tolist(),
        "said": [_said(output.logprobs_tensors, row, each) for row, each in enumerate(params)],
    }


def _said(tensors: Any, row: int, params: Any) -> list[list[Any]] | None:
    """What the front end makes of a row, as the core sends it."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    if params.num_logprobs is None:
        return None
    heard = LogprobsProcessor.from_new_request(None, SimpleNamespace(sampling_params=params))
    heard.update_from_output(
        SimpleNamespace(
            new_logprobs=tensors.tolists().slice_request(row, 1), new_prompt_logprobs_tensors=None
        )
    )
    (position,) = heard.logprobs
    numbers = written(np.array([noted.logprob for noted in position.values()]))
    return [
        [token, number, noted.rank]
        for (token, noted), number in zip(position.items(), numbers, strict=True)
    ]

"""Record which tokens the real v0.22.1 forces because a request's thinking budget is used up.

Needs the pinned tree on `PYTHONPATH`, no GPU. The real input batch, `ThinkingBudgetStateHolder` and
`Sampler.forward` choose every token, greedily, of batches whose requests come and leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from conformance.features.sampling.sampler import _real_params

Case = dict[str, Any]
VOCAB, EOS, ROWS, BATCHES = 8, 7, 6, 170
MARKS = (
    ([1], [2]), ([1], [2, 3]), ([1, 4], [2]), ([1, 4], [2, 3]), ([1, 4, 5], [2, 3, 5]),
    ([1, 1], [2, 2]), ([1], [1]), ([1, 2], [2]), ([2], [1, 2]), ([1, 2], [1]),
)  # fmt: skip
"""Start and end, of which one may be part of the other."""

ABOUT = (
    f"A greedy request of a batch, {VOCAB} tokens in the vocabulary, EOS {EOS}. `start`, `end`: "
    "token ids of the marks. `budget`: `thinking_token_budget`, null for a request without. "
    "`params`: what else it asks; `bad_words_token_ids` beside it. `script`: what the model would "
    "say, see `row`. `tokens`: what the real sampler chose instead. `edited`: by step the row that "
    "it chose from where the end was forced, null elsewhere (in rows: null is -inf). `taken_out`: "
    "before these steps the request left the batch and came back, as after preemption; "
    "`moved_at`: before these it moved to the row of one that had left."
)


def row(token: int) -> np.ndarray:
    """The model's logits [VOCAB] where its script says `token`."""
    logits = (np.arange(VOCAB) * 5 % 7) / 4
    logits[token] += 8.0
    return logits


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    rng = np.random.default_rng(313)
    for number in range(BATCHES):
        yield from _batch(rng, *MARKS[number % len(MARKS)])


def _drawn(rng: np.random.Generator, start: list[int], end: list[int]) -> Case:
    """Prompt and script of few tokens and of the marks, so that all orders of them occur."""

    def said(pieces: int) -> list[int]:
        found: list[int] = []
        for _ in range(pieces):
            kind = rng.random()
            mark = start if kind < 0.2 else end if kind < 0.3 else None
            found += mark or [int(rng.choice((0, 0, 3, 4, 5, 6)))]
        return found

    steps = int(rng.integers(6, 25))
    script = (start if rng.random() < 0.3 else []) + said(steps)
    taken_out = []
    if rng.random() < 0.15:
        taken_out = sorted({int(n) for n in rng.integers(1, steps, size=2)})
    params: dict[str, Any] = {}
    kind = rng.random()
    if kind < 0.1:
        params = {"min_tokens": steps, "stop_token_ids": [end[0]]}
    elif kind < 0.2:
        params = {"allowed_token_ids": [t for t in range(VOCAB) if t != end[-1]]}
    elif kind < 0.3:
        params = {"logit_bias": {end[0]: -100.0}}
    elif kind < 0.4:
        params = {"repetition_penalty": 2.0, "frequency_penalty": 1.0}
    return {
        "start": start, "end": end,
        "budget": None if rng.random() < 0.08 else int(rng.choice((0, 0, 1, 2, 3, 4, 6, 9))),
        "params": params, "bad_words_token_ids": [end] if 0.4 <= kind < 0.5 else [],
        "prompt": [0, *said(int(rng.integers(0, 6)))], "script": script[:steps],
        "taken_out": taken_out,
    }  # fmt: skip


def _batch(rng: np.random.Generator, start: list[int], end: list[int]) -> Iterator[Case]:
    import torch
    from vllm.v1.sample import sampler as real
    from vllm.v1.sample import thinking_budget_state
    from vllm.v1.sample.logits_processor import build_logitsprocs
    from vllm.v1.sample.ops import penalties
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

    device = torch.device("cpu")
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=ROWS), speculative_config=None
    )
    marks = SimpleNamespace(reasoning_start_token_ids=start, reasoning_end_token_ids=end)
    drawn = [_drawn(rng, start, end) for _ in range(ROWS)]
    states = {}
    for number, case in enumerate(drawn):
        params = _real_params({"temperature": 0.0, "max_tokens": 64, **case["params"]}, [], EOS)
        params.thinking_token_budget = case["budget"]
        params._bad_words_token_ids = case["bad_words_token_ids"]
        name = f"r{number}"
        states[name] = CachedRequestState(
            name, case["prompt"], [], params, None, ([],), len(case["prompt"]), []
        )
        case |= {"tokens": states[name].output_token_ids, "edited": [], "moved_at": []}
    by_name = dict(zip(states, drawn, strict=True))
    to_device = thinking_budget_state.async_tensor_h2d
    with (
        mock.patch.object(penalties, "is_pin_memory_available", lambda: False),
        mock.patch.object(real, "is_pin_memory_available", lambda: False),
        mock.patch.object(
            thinking_budget_state, "async_tensor_h2d",
            to_device if torch.cuda.is_available()
            else lambda data, dtype, device: torch.tensor(data, dtype=dtype),
        ),
        torch.compiler.set_stance("force_eager"),
    ):  # fmt: skip
        batch = InputBatch(
            ROWS, 64, 64, device, False, VOCAB, [16], [16],
            logitsprocs=build_logitsprocs(config, device, False, False), reasoning_config=marks,
        )  # fmt: skip
        for state in states.values():
            batch.add_request(state)
        sampler = real.Sampler()
        edit, rows = sampler.apply_logits_processors, []

        def keeping(*arguments: Any) -> Any:
            rows.append(edit(*arguments))
            return rows[-1]

        with mock.patch.object(sampler, "apply_logits_processors", keeping):
            for step in range(max(len(case["script"]) for case in drawn)):
                for name, case in by_name.items():
                    if name in batch.req_id_to_index and (
                        step == len(case["script"]) or step in case["taken_out"]
                    ):
                        batch.remove_request(name)
                for name, case in by_name.items():
                    if step in case["taken_out"] and step < len(case["script"]):
                        batch.add_request(states[name])
                before = dict(batch.req_id_to_index)
                batch.condense()
                for name, place in batch.req_id_to_index.items():
                    if place != before[name]:
                        by_name[name]["moved_at"].append(step)
                batch.refresh_metadata()
                names = list(batch.req_ids)
                logits = np.array([row(by_name[name]["script"][step]) for name in names])
                output = sampler(torch.tensor(logits, dtype=torch.float32), batch.sampling_metadata)
                for index, name in enumerate(names):
                    edited = rows[-1][index].numpy().astype(np.float64)
                    by_name[name]["edited"].append(
                        [float(x) if np.isfinite(x) else None for x in edited]
                        if edited.max() > 1e8 else None
                    )  # fmt: skip
                    token = int(output.sampled_token_ids[index, 0])
                    states[name].output_token_ids.append(token)
    for case in drawn:
        bias = case["params"].get("logit_bias")
        if bias:
            case["params"]["logit_bias"] = {str(token): value for token, value in bias.items()}
        yield case

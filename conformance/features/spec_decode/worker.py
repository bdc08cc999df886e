"""Loaded by vLLM's worker process where an MTP module drafts: `worker_extension_cls`.

Notes the logits from which each draft of a batch of one request is taken, before the argmax:
`vllm/v1/spec_decode/llm_base_proposer.py:397` `SpecDecodeBaseProposer._greedy_sample`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

_noted: list[list[float]] = []


def _noting(self: Any, hidden_states: Any) -> Any:
    logits = self.model.compute_logits(hidden_states)
    if len(logits) == 1:
        _noted.append(logits[0].tolist())
    return logits.argmax(dim=-1)


SpecDecodeBaseProposer._greedy_sample = _noting


class DraftLogits:
    """What the drafter computed. vLLM's worker class gets this method."""

    def take_draft_logits(self) -> list[list[float]]:
        """[vocab_size] of each draft since the last call, where one request alone drafted."""
        taken = [*_noted]
        _noted.clear()
        return taken

"""What a caller gets back: one record for `LLM` and `LLMEngine`.

Promises: the names of `vllm/outputs.py:85` `RequestOutput`; a token that stopped a request is in
`token_ids` and not in `text`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mini_vllm.request import Request
from mini_vllm.tokenizer import Tokenizer


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request; `finish_reason` is None while it runs."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """"stop", "length", "abort", or "error": then `stop_reason` says what was wrong."""
    stop_reason: int | str | None = None
    """The stop token id that ended it; None for EOS and for the length."""


@dataclass(slots=True)
class RequestOutput:
    """A request as the caller sees it; `outputs` holds one completion."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; None while it waits for its first step."""

    @classmethod
    def of(
        cls, request: Request, prompt: str | Sequence[int], tokenizer: Tokenizer
    ) -> RequestOutput:
        """The record of a request as it stands now."""
        completion = CompletionOutput(
            index=0,
            text=tokenizer.decode(request.text_token_ids),
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        return cls(
            request_id=request.request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=request.is_finished,
            num_cached_tokens=request.num_cached_tokens,
        )

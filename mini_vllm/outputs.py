"""What a caller gets back: one record for `LLM` and `LLMEngine`.

Promises: the names of `vllm/outputs.py:85` `RequestOutput`; a token or text that stopped a request
is in `token_ids` and not in `text`, unless the request asks to keep it; nor are the bytes of a
character that was not finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mini_vllm.detokenizer import finished_text
from mini_vllm.request import Request
from mini_vllm.sample.logprobs import Logprob, as_dicts
from mini_vllm.tokenizer import Tokenizer


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request; `finish_reason` is None while it runs."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """"stop", "length", "abort", "repetition" or "error", of which `stop_reason` says the cause."""
    stop_reason: int | str | None = None
    """The stop token id or text that ended it; None for EOS and for the length."""
    cumulative_logprob: float | None = None
    """Sum over the output tokens, natural logarithm; None unless `logprobs` were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Per output token: token id to `Logprob`, the sampled token first."""

    @classmethod
    def of(cls, index: int, request: Request, tokenizer: Tokenizer) -> CompletionOutput:
        """The completion of a request as it stands now."""
        token_ids, noted = request.output_token_ids, None
        if request.sampling_params.num_logprobs is not None:
            noted = request.logprobs.sample[: len(token_ids)]
        return cls(
            index=index,
            text=text_of(request, tokenizer),
            token_ids=token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            cumulative_logprob=None if noted is None else sum(n.logprobs[0] for n in noted),
            logprobs=None if noted is None else as_dicts(noted, (), tokenizer),
        )


@dataclass(slots=True)
class RequestOutput:
    """A prompt as the caller sees it; `outputs` holds its `n` completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    """Prompt tokens that its first completion found in the prefix cache; None while that waits for
    its first step."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per prompt token, None for the first; None unless asked for."""

    @classmethod
    def of(
        cls,
        request_id: str,
        requests: Sequence[Request],
        prompt: str | Sequence[int],
        tokenizer: Tokenizer,
    ) -> RequestOutput:
        """The record of a prompt's requests, one per completion, as they stand now."""
        first = requests[0]
        noted = None
        if first.sampling_params.prompt_logprobs is not None:
            # The first token is no context of the others, as upstream: nothing was noted of it.
            noted = [None, *as_dicts(first.logprobs.prompt, (), tokenizer)]
        return cls(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=first.prompt_token_ids,
            outputs=[CompletionOutput.of(i, r, tokenizer) for i, r in enumerate(requests)],
            finished=all(request.is_finished for request in requests),
            num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=noted,
        )


def text_of(request: Request, tokenizer: Tokenizer) -> str:
    """The output's text as it stands now, without what stopped it."""
    text = getattr(request, "text", None)
    return finished_text(request.text_token_ids, tokenizer) if text is None else text

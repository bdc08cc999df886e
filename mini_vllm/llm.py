"""The offline API, shaped like vLLM's: `LLM(model=...).generate(prompts, SamplingParams(...))`.

Promises: a script written against it runs on the real engine after changing one import. Mirrors
`vllm/entrypoints/llm.py:66` `LLM` and `vllm/outputs.py:85` `RequestOutput`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mini_vllm.engine import EngineParts, LLMEngine
from mini_vllm.model_runner import Model
from mini_vllm.sampler import SamplingParams


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request; `finish_reason` is None while it runs.

    A token that stopped it is in `token_ids` and not in `text`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclass(slots=True)
class RequestOutput:
    """A request as the caller sees it; `outputs` holds one completion."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool


class LLM:
    """A loaded model ready for offline generation; `llm_engine` is the engine underneath."""

    def __init__(
        self,
        model: str | Path | Model = "byte-llama",
        *,
        dtype: str = "float32",
        seed: int = 0,
        num_blocks: int = 256,
        block_size: int = 16,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = 2048,
        long_prefill_token_threshold: int = 0,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        scheduling_policy: str = "fcfs",
        parts: EngineParts | None = None,
    ) -> None:
        """Same meanings as `LLMEngine`; argument names are those of vLLM's `EngineArgs`.

        vLLM sizes its cache from free GPU memory; here `num_blocks` says it.

        Raises:
            ValueError: see `LLMEngine`.
        """
        self.llm_engine = LLMEngine(
            num_blocks,
            block_size,
            max_num_seqs,
            max_num_batched_tokens,
            long_prefill_token_threshold,
            enable_prefix_caching,
            seed,
            model=model,
            dtype=dtype,
            max_model_len=max_model_len,
            policy=scheduling_policy,
            enable_chunked_prefill=enable_chunked_prefill,
            parts=parts,
        )

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts together; results in prompt order.

        Args:
            prompts: one text, several texts, or several lists of token ids.
            sampling_params: one for all, or one per prompt; default greedy, 16 tokens.

        Raises:
            ValueError: any prompt is refused (none is run).
        """
        if not isinstance(prompts, Sequence):
            raise ValueError(f"prompts={prompts!r}: need a text, texts, or lists of token ids")
        many: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else [*prompts]
        results = self.llm_engine.generate(many, sampling_params)
        encode = self.llm_engine.tokenizer.encode
        return [
            RequestOutput(
                request_id=result.request_id,
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=encode(prompt) if isinstance(prompt, str) else list(prompt),
                outputs=[CompletionOutput(0, result.text, result.token_ids, result.finish_reason)],
                finished=True,
            )
            for prompt, result in zip(many, results, strict=True)
        ]

    def stream(self, prompt: str, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Generate for one prompt, yielding text as it is produced.

        Bytes of an unfinished UTF-8 character are held back until it is complete.
        """
        return stream_text(self.llm_engine, prompt, sampling_params)

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        sampling_params: SamplingParams | None = None,
    ) -> RequestOutput:
        """Format messages with the checkpoint's chat template, then generate.

        Args:
            messages: `{"role": ..., "content": ...}` in order.

        Raises:
            ValueError: the checkpoint has no chat template, or jinja2 is absent (extra `hf`).
        """
        template = self.llm_engine.chat_template
        if template is None:
            raise ValueError("messages: this checkpoint has no chat template; use generate()")
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise ValueError("messages: chat templates need the 'hf' extra (jinja2)") from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        text = environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True
        )
        return self.generate(text, sampling_params)[0]


def stream_text(
    engine: LLMEngine, prompt: str, sampling_params: SamplingParams | None = None
) -> Iterator[str]:
    """Step `engine` until this prompt is done, yielding its text as it grows.

    Bytes of an unfinished UTF-8 character are held back until it is complete. Leaving the loop
    early aborts the request.
    """
    request_id = engine.add_request(prompt, sampling_params)
    request = engine.scheduler.requests[request_id]
    shown = 0
    try:
        while not request.is_finished:
            engine.step()
            text = engine.tokenizer.decode(request.text_token_ids)
            ready = text if request.is_finished else text.rstrip("\ufffd")
            if len(ready) > shown:
                yield ready[shown:]
                shown = len(ready)
    finally:
        engine.abort_request(request_id)

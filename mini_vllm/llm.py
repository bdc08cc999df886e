"""The offline API, shaped like vLLM's: `LLM(model=...).generate(prompts, SamplingParams(...))`.

Promises: a script written against it runs on the real engine after changing one import. Mirrors
`vllm/entrypoints/llm.py:66` `LLM` and `vllm/outputs.py:85` `RequestOutput`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mini_vllm.batch import Model
from mini_vllm.config import EngineConfig, SamplingParams
from mini_vllm.engine import LLMEngine
from mini_vllm.input_processor import Prompt
from mini_vllm.outputs import CompletionOutput, RequestOutput
from mini_vllm.parts import EngineParts
from mini_vllm.sample.beam_search import BeamSearchOutput, beam_search
from mini_vllm.sampling_params import BeamSearchParams
from mini_vllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mini_vllm.lora.request import LoRARequest

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "stream_text"]


class LLM:
    """A loaded model ready for offline generation; `llm_engine` is the engine underneath."""

    def __init__(
        self,
        model: str | Path | Model = "byte-llama",
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        parts: EngineParts | None = None,
        release: str | None = None,
        platform: str | None = None,
        **knobs: Any,
    ) -> None:
        """As `LLMEngine`; the names of `knobs` are those of vLLM's `EngineArgs`.

        vLLM sizes its cache from free GPU memory; here `num_blocks` says it. With `release`, such
        as "0.33.0", the engine decides as that release does; without, as the pin. With
        `platform`, "auto" or a name, defaults and attention are a platform's; see `platforms`.

        Raises:
            ValueError: see `LLMEngine`; an unknown release; `release` together with `parts`; a
                platform that cannot be used, or `platform` together with `config`.
        """
        if release is not None:
            from mini_vllm.releases import parts_of

            if parts is not None:
                raise ValueError(f"parts and release={release!r}: need one or the other")
            parts = replace(parts_of(release), origin=f"release={release!r}")
        resolved = None
        if platform is not None:
            from mini_vllm.platforms import check_memory, fit, resolve

            if config is not None:
                raise ValueError(
                    f"config and platform={platform!r}: need the config's fields as arguments "
                    "instead, so that the platform's defaults come first"
                )
            resolved = resolve(platform)
            parts, config, knobs = fit(resolved, parts, knobs)
        self.llm_engine = LLMEngine(model, config, tokenizer=tokenizer, parts=parts, **knobs)
        if resolved is not None:
            try:
                check_memory(resolved, sum(c.nbytes for c in self.llm_engine.runner.kv_caches))
            except ValueError:
                self.close()
                raise

    def close(self) -> None:
        """End the processes that the engine has started, if any; it then serves no more.

        They also end with the `with` block, with the last reference, and with the program.
        """
        self.llm_engine.close()

    def collective_rpc(
        self, method: str | Callable[..., Any], args: Sequence[Any] = ()
    ) -> list[Any]:
        """Call `method` in every rank, such as a function of the rank's worker; see `Ranks`.

        Raises:
            ValueError: the engine has no ranks, or there is no such method.
        """
        workers = self.llm_engine.feature("distributed")
        if workers is None:
            raise ValueError(
                f"method={method!r}: need an engine with ranks, such as tensor_parallel_size=2"
            )
        return workers.collective_rpc(method, args)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts together; results in prompt order.

        Args:
            prompts: one text, several texts, or several lists of token ids; for what comes with a
                prompt, such as pictures, `{"prompt": text, "multi_modal_data": ...}`.
            sampling_params: one for all, or one per prompt; default greedy, 16 tokens.
            lora_request: with `enable_lora`, an adapter for all or one (or None) per prompt.

        Raises:
            ValueError: any prompt is refused (none is run).
        """
        return self.llm_engine.generate(
            [prompts] if isinstance(prompts, str | Mapping) else prompts,
            sampling_params,
            lora_request=lora_request,
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[str]:
        """Generate for one prompt, yielding text as it is produced.

        Bytes of an unfinished UTF-8 character are held back until it is complete.
        """
        return stream_text(self.llm_engine, prompt, sampling_params, lora_request)

    def beam_search(
        self, prompts: Sequence[Any], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt; see `sample/beam_search.py`.

        Raises:
            ValueError: see `beam_search`; nothing is run.
        """
        return beam_search(self.llm_engine, prompts, params)

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
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
            raise ValueError(
                "messages: chat templates need the 'hf' extra (jinja2): put `uv run --extra hf` "
                "before the command"
            ) from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        text = environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True
        )
        return self.generate(text, sampling_params, lora_request)[0]


def stream_text(
    engine: LLMEngine,
    prompt: Prompt,
    sampling_params: SamplingParams | None = None,
    lora_request: LoRARequest | None = None,
) -> Iterator[str]:
    """Step `engine` until this prompt is done, yielding its text as it grows.

    Bytes of an unfinished UTF-8 character are held back until it is complete, and so is what may
    be the beginning of a stop text. Leaving the loop early aborts the request.
    """
    request_id, requests = engine.inputs.process(prompt, sampling_params, lora_request=lora_request)
    request, params = requests[0], requests[0].sampling_params
    if len(requests) > 1:
        raise ValueError(f"n={len(requests)}: need 1 to stream; use generate()")
    hold = max(map(len, params.stop), default=1) - 1  # characters that may begin a stop text
    hold *= not params.include_stop_str_in_output
    detokenizer = engine.parts.detokenizer(engine.tokenizer)
    num_shown = 0
    with engine.owning([request]), engine.owning([request]):
        engine.queue_requests(request_id, requests)
        is_last = False
        while not is_last:
            is_last = request.is_finished  # as of now: other calls may step during the `yield`
            detokenizer.update(request.text_token_ids)
            text = detokenizer.text if request.text is None else request.text
            shown = text if is_last else text[: len(text) - hold]
            if len(shown) > num_shown:
                start, num_shown = num_shown, len(shown)
                yield shown[start:]
            if not request.is_finished:
                engine.step()

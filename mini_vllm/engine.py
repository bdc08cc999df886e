"""The loop: schedule, execute, sample, update, until nothing is unfinished.

Promises E1-E6: output does not depend on budget, threshold, pool, caching or batch mates; a refused
request leaves the engine as it was; an engine that cannot make progress raises. Mirrors
`vllm/v1/engine/core.py:428` `EngineCore.step`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mini_vllm.attention import paged_attention
from mini_vllm.block_pool import BlockPool
from mini_vllm.checkpoint import Tokenizer, load_checkpoint
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.model import ToyModel
from mini_vllm.model_runner import Model, ModelRunner
from mini_vllm.request import Request
from mini_vllm.sampler import Sampler, SamplingParams
from mini_vllm.scheduler import Scheduler, SchedulerOutput
from mini_vllm.tokenizer import ByteTokenizer
from mini_vllm.transformer import AttentionFn, Linear, LinearFactory, Transformer

_request_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Replaceable parts, so that a learner's own class can serve the real model."""

    block_pool: Callable[[int, bool], BlockPool] = BlockPool
    kv_cache_manager: Callable[..., KVCacheManager] = KVCacheManager
    scheduler: Callable[..., Scheduler] = Scheduler
    sampler: Callable[[], Sampler] = Sampler
    attention: AttentionFn = paged_attention
    linear: LinearFactory = Linear


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One finished generation of `LLMEngine.generate`."""

    request_id: str
    prompt: str | list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None


class LLMEngine:
    """One model, one scheduler, one KV cache, stepped by the caller."""

    def __init__(
        self,
        num_blocks: int = 256,
        block_size: int = 16,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = 2048,
        long_prefill_token_threshold: int = 0,
        enable_caching: bool = True,
        seed: int = 0,
        *,
        model: str | Path | Model = "byte-llama",
        tokenizer: Tokenizer | None = None,
        dtype: str = "float32",
        max_model_len: int | None = None,
        policy: str = "fcfs",
        enable_chunked_prefill: bool = True,
        forget_withdrawn_blocks: bool = False,
        parts: EngineParts | None = None,
    ) -> None:
        """Load the model and build an idle engine.

        Args:
            num_blocks, block_size: size of the KV cache; block 0 is reserved.
            max_num_seqs, max_num_batched_tokens, long_prefill_token_threshold, policy,
                enable_chunked_prefill, forget_withdrawn_blocks: see `Scheduler`. The last is off
                as upstream; under the priority policy E1 holds only with it on.
            enable_caching: share full blocks between equal prefixes.
            seed: seeds requests that sample without a seed of their own, and `ToyModel`.
            model: "byte-llama" (shipped), a Hugging Face folder, a hub id, "toy", or an object
                with `forward(batch)` (a `Transformer` brings its own shapes and dtype).
            tokenizer: replaces the checkpoint's; objects as `model` default to bytes.
            dtype: "float32", or "float64" where outputs of different batch shapes are compared.
            max_model_len: longest sequence in tokens; default is the checkpoint's.
            parts: replacements for pool, scheduler, sampler and so on.

        Raises:
            ValueError: an argument out of range, or a checkpoint that cannot be loaded.
        """
        parts = parts or EngineParts()
        if seed < 0:
            raise ValueError(f"seed={seed}: need 0 or more")
        self.seed = seed
        kv = parts.kv_cache_manager(num_blocks, block_size, enable_caching, parts.block_pool)
        loaded = _load(model, tokenizer, dtype, seed, parts)
        longest = loaded.max_model_len
        if max_model_len is not None and longest is not None and max_model_len > longest:
            raise ValueError(f"max_model_len={max_model_len}: the model supports {longest}")
        if max_model_len is None:
            max_model_len = longest
        self.tokenizer = loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self.chat_template = loaded.chat_template
        self.max_model_len = max_model_len
        self.scheduler = parts.scheduler(
            kv,
            max_num_seqs,
            max_num_batched_tokens,
            long_prefill_token_threshold,
            max_model_len=max_model_len,
            policy=policy,
            enable_chunked_prefill=enable_chunked_prefill,
            forget_withdrawn_blocks=forget_withdrawn_blocks,
        )
        self.sampler = parts.sampler()
        self.runner = ModelRunner(
            loaded.model, num_blocks, block_size, loaded.kv_shape, loaded.dtype
        )
        self.on_schedule: Callable[[SchedulerOutput], None] | None = None
        """Called with each plan before it runs; for traces and probes."""
        self._generators: dict[str, np.random.Generator] = {}
        self._num_added = 0

    @property
    def model(self) -> Model:
        """What computes the logits; assign another at any step boundary."""
        return self.runner.model

    @model.setter
    def model(self, model: Model) -> None:
        self.runner.model = model

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> str:
        """Queue a prompt (text or token ids); returns its request id.

        Args:
            prompt: text to encode, or token ids to take as they are.
            sampling_params: default `SamplingParams()`: greedy, 16 tokens.
            request_id: default "req-N" from a counter shared by all engines.
            priority: smaller is served first under the priority policy.
            arrival_time: breaks ties between priorities; default is the order of adding.

        Raises:
            ValueError: empty prompt, unknown token id, a prompt or request that could never fit,
                or a duplicate id. The engine is as it was.
        """
        params = sampling_params if sampling_params is not None else SamplingParams()
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.check_fits(token_ids, params)
        number = next(_request_numbers)
        request = Request(
            request_id if request_id is not None else f"req-{number}",
            token_ids,
            self._with_extra_stop_ids(params),
            self.eos_token_ids[0] if self.eos_token_ids else None,
            float(number) if arrival_time is None else arrival_time,
            priority,
        )
        self.scheduler.add_request(request)
        if params.temperature > 0.0:
            # Without a seed of its own a request gets a stream of its own, by order of adding.
            own = params.seed if params.seed is not None else (self.seed, self._num_added)
            self._generators[request.request_id] = np.random.default_rng(own)
        self._num_added += 1
        return request.request_id

    def _with_extra_stop_ids(self, params: SamplingParams) -> SamplingParams:
        """Checkpoints with several EOS ids: the first is EOS, the others stop ids."""
        extra = self.eos_token_ids[1:]
        if not extra or params.ignore_eos:
            return params
        fields = {name: getattr(params, name) for name in params.__slots__}
        return SamplingParams(**fields | {"stop_token_ids": (*params.stop_token_ids, *extra)})

    def check_fits(self, token_ids: list[int], params: SamplingParams) -> None:
        """Refuse what no schedule could ever finish, with a ValueError; changes nothing."""
        if not token_ids:
            raise ValueError("prompt is empty: need at least one token")
        vocab_size = self.tokenizer.vocab_size
        for token in token_ids:
            if not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"prompt holds token id {token!r}: need integers from 0 to {vocab_size - 1}"
                )
        limit = self.max_model_len
        if limit is not None and len(token_ids) >= limit:
            raise ValueError(
                f"prompt has {len(token_ids)} tokens: need fewer than max_model_len={limit}, "
                "so that one output token fits"
            )
        longest = len(token_ids) + params.max_tokens
        if limit is not None:
            longest = min(longest, limit)
        kv = self.scheduler.kv
        num_usable = len(kv.block_pool.blocks) - 1
        num_needed = -(-(longest - 1) // kv.block_size)  # the last token is never computed
        if num_needed > num_usable:
            raise ValueError(
                f"prompt of {len(token_ids)} tokens with max_tokens={params.max_tokens} needs "
                f"{num_needed} blocks of {kv.block_size}: the pool has {num_usable}"
            )

    def abort_request(self, request_id: str) -> None:
        """End a request now and free its blocks; an unknown id is a no-op."""
        self.scheduler.abort_request(request_id)
        self._generators.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        """Whether a further `step` has anything to do."""
        return self.scheduler.has_unfinished_requests()

    # ------------------------------------------------------------------ the loop

    def step(self) -> list[Request]:
        """Schedule, execute, sample, update; returns the requests that finished in this step.

        Raises:
            RuntimeError: work is left but nothing can be scheduled (S13).
        """
        output = self.scheduler.schedule()
        if self.on_schedule is not None:
            self.on_schedule(output)
        if not output.scheduled_requests:
            if self.scheduler.has_unfinished_requests() and not output.preempted_req_ids:
                raise RuntimeError("no progress: requests are unfinished but none can be scheduled")
            return []
        logits = self.runner.execute(output, self.scheduler.kv)
        sampled = self._sample(output, logits)
        finished = self.scheduler.update_from_output(output, sampled)
        for request in finished:
            self._generators.pop(request.request_id, None)
        return finished

    def _sample(self, output: SchedulerOutput, logits: np.ndarray) -> dict[str, int]:
        """A token for every request that caught up; rows of partial prefills are dropped (S4)."""
        sampled = {}
        needs_sample, sample = self.scheduler.needs_sample, self.sampler.sample
        for request, row in zip(output.scheduled_requests, logits, strict=True):
            request_id, params = request.request_id, request.sampling_params
            if not needs_sample(request, output.num_scheduled_tokens[request_id]):
                continue
            if params.min_tokens > request.num_output_tokens:
                row = row.copy()
                stops = (*self.eos_token_ids, *params.stop_token_ids)
                row[[token for token in stops if token < len(row)]] = -np.inf
            sampled[request_id] = sample(row, params, self._generators.get(request_id))
        return sampled

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationResult]:
        """Run all prompts to the end; results in prompt order.

        Args:
            prompts: texts or token-id lists.
            sampling_params: one for all, or one per prompt.

        Raises:
            ValueError: any prompt is refused (none is run), or the two lengths differ.
        """
        if isinstance(sampling_params, SamplingParams) or sampling_params is None:
            all_params = [sampling_params or SamplingParams()] * len(prompts)
        else:
            all_params = list(sampling_params)
        if len(all_params) != len(prompts):
            raise ValueError(f"sampling_params: got {len(all_params)} for {len(prompts)} prompts")
        ids: list[str] = []
        try:
            for prompt, params in zip(prompts, all_params, strict=True):
                ids.append(self.add_request(prompt, params))
        except ValueError:
            for request_id in ids:
                self.abort_request(request_id)
            raise
        requests = {request_id: self.scheduler.requests[request_id] for request_id in ids}
        while self.has_unfinished_requests():
            self.step()
        return [
            GenerationResult(
                request_id,
                prompt if isinstance(prompt, str) else list(prompt),
                requests[request_id].output_token_ids,
                self.tokenizer.decode(requests[request_id].text_token_ids),
                requests[request_id].finish_reason,
            )
            for request_id, prompt in zip(ids, prompts, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    """What the engine needs to know of whatever `model` was."""

    model: Model
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    kv_shape: tuple[int, int, int] | None = None
    dtype: np.dtype | type | str = np.float32
    max_model_len: int | None = None
    chat_template: str | None = None


def _load(
    model: str | Path | Model,
    tokenizer: Tokenizer | None,
    dtype: str,
    seed: int,
    parts: EngineParts,
) -> _LoadedModel:
    """Resolve the `model` argument of `LLMEngine`."""
    if isinstance(model, str | Path) and str(model) != "toy":
        checkpoint = load_checkpoint(model)
        transformer = Transformer(
            checkpoint.config,
            checkpoint.weights,
            dtype,
            attention=parts.attention,
            linear=parts.linear,
        )
        return _LoadedModel(
            transformer,
            tokenizer or checkpoint.tokenizer,
            checkpoint.eos_token_ids or _eos_of(checkpoint.tokenizer),
            transformer.kv_shape,
            transformer.dtype,
            checkpoint.config.max_position_embeddings,
            checkpoint.chat_template,
        )
    tokens = tokenizer or ByteTokenizer()
    if isinstance(model, str | Path):
        return _LoadedModel(ToyModel(tokens.vocab_size, seed), tokens, _eos_of(tokens))
    if isinstance(model, Transformer):
        longest = model.config.max_position_embeddings
        return _LoadedModel(model, tokens, _eos_of(tokens), model.kv_shape, model.dtype, longest)
    return _LoadedModel(model, tokens, _eos_of(tokens))


def _eos_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokenizer's EOS as a tuple, empty when it has none."""
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)

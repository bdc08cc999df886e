"""The loop: schedule, execute, sample, update, until nothing is unfinished.

Promises E1-E6: output does not depend on budget, threshold, pool, caching or batch mates; a refused
request leaves the engine as it was; an engine that cannot make progress raises. A step that raises,
or is interrupted anywhere, did not happen. Mirrors `vllm/v1/engine/core.py:428` `EngineCore.step`
and, with `async_scheduling`, `vllm/v1/engine/core.py:469` `EngineCore.step_with_batch_queue`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_vllm.batch import Model
from mini_vllm.config import EngineConfig, SamplingParams
from mini_vllm.input_processor import InputProcessor, one_each
from mini_vllm.interrupts import held_back
from mini_vllm.model_runner import ModelRunner
from mini_vllm.models.registry import load_model
from mini_vllm.outputs import RequestOutput
from mini_vllm.parallel_sampling import Parents
from mini_vllm.parts import EngineParts
from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.request import Request, RequestStatus
from mini_vllm.rooms import adapter_knobs, constraints_of, open_adapters, open_drafts
from mini_vllm.row_sampler import Failure, RowSampler, Sampled, end
from mini_vllm.sample.processors import LogitsProcessor, in_order
from mini_vllm.sample.stop_strings import StopStrings
from mini_vllm.sampler import Sampler
from mini_vllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mini_vllm.lora.request import LoRARequest

__all__ = ["EngineParts", "LLMEngine"]

Observer = Callable[[SchedulerOutput], None]


class LLMEngine:
    """One model, one scheduler, one KV cache, stepped by the caller."""

    def __init__(
        self,
        model: str | Path | Model = "byte-llama",
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        parts: EngineParts | None = None,
        gates: Sequence[Gate] = (),
        logits_processors: Sequence[LogitsProcessor] = (),
        speculative_config: Mapping[str, Any] | None = None,
        enable_lora: bool = False,
        structured_outputs_config: Mapping[str, Any] | None = None,
        **knobs: Any,
    ) -> None:
        """Load the model and build an idle engine.

        Args:
            model: "byte-llama" (shipped), a Hugging Face folder, a hub id, "toy", or an object
                with `forward(batch)` (a `Transformer` brings its own shapes and dtype).
            config: everything else, or pass the fields of `EngineConfig`, `CacheConfig` and
                `SchedulerConfig` by name: `LLMEngine(num_blocks=64, block_size=4)`.
            tokenizer: replaces the checkpoint's; objects as `model` default to bytes.
            parts: replacements for pool, scheduler, sampler and so on.
            gates: what features ask of the scheduler.
            logits_processors: change each row before a token is chosen, in this order, between
                the built-in ones (see `sample/processors.py`).
            speculative_config: who drafts and how many tokens, in vLLM's keys:
                `{"method": "ngram", "num_speculative_tokens": 4}`.
            enable_lora: serve adapters; it adds the knobs of `lora.config.LoRAConfig`.
            structured_outputs_config: how constraints are read, in vLLM's keys:
                `{"backend": "xgrammar", "disable_any_whitespace": True}`.

        Raises:
            ValueError: an argument unknown or out of range, or a checkpoint that cannot be loaded.
        """
        of_adapters = adapter_knobs(knobs) if enable_lora else None
        if config is not None and knobs:
            raise ValueError(f"config and {', '.join(knobs)}: give one or the other")
        config = EngineConfig.of(knobs) if config is None else config
        self.parts = parts or EngineParts()
        loaded = load_model(
            model, tokenizer, config.dtype, config.seed, self.parts.attention,
            self.parts.named_linear, self.parts.experts,
        )  # fmt: skip
        self.config = config.with_max_model_len(loaded.max_model_len)
        self.speculator, self.config = open_drafts(
            speculative_config, self.config, loaded, self.parts
        )
        self.adapters, loaded = open_adapters(of_adapters, self.config, loaded, self.parts)
        gates = gates if self.adapters is None else (*gates, self.adapters.gate)
        self.max_model_len = self.config.scheduler.max_model_len
        self.tokenizer = loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self.constraints = constraints_of(self, structured_outputs_config, loaded)
        self.inputs = InputProcessor(
            self.config, loaded, self.parts.request, self.adapters, self.constraints
        )
        self.chat_template = loaded.chat_template
        self.gates = tuple(gates)
        self.scheduler = self.parts.build_scheduler(self.config, self.gates)
        processors = in_order(self.eos_token_ids, logits_processors)
        self.rows = RowSampler(self.parts.sampler(), processors, self.config.seed, self.speculator)
        blocks = self.config.cache.num_blocks, self.config.cache.block_size
        self.runner = ModelRunner(loaded.model, *blocks, loaded.kv_shape, loaded.dtype)
        self.observers: list[Observer] = []
        """Each is called with every plan before it runs; for traces and probes."""
        self._known: set[str] = set()  # ids of requests whose end has not been noted yet
        self._parents = Parents()
        self._stops = StopStrings(self.tokenizer)
        self._num_added = 0
        self._in_flight: tuple[SchedulerOutput, Sampled] | None = None
        if structured_outputs_config is not None:
            self.constraints()

    @property
    def model(self) -> Model:
        """What computes the logits; assign another at any step boundary."""
        return self.runner.model

    @model.setter
    def model(self, model: Model) -> None:
        self.runner.model = model

    @property
    def sampler(self) -> Sampler:
        """What chooses tokens; assign another at any step boundary."""
        return self.rows.sampler

    @sampler.setter
    def sampler(self, sampler: Sampler) -> None:
        self.rows.sampler = sampler

    @property
    def logits_processors(self) -> list[LogitsProcessor]:
        """What changes each row before a token is chosen, in this order."""
        return self.rows.logits_processors

    @property
    def requests(self) -> dict[str, Request]:
        """The live requests by id, in order of arrival."""
        return self.scheduler.requests

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Queue a prompt (text or token ids); returns its request id.

        With `n` > 1 it becomes n requests, "0_ID", "1_ID" and so on, which `step` returns one by
        one; `abort_request` takes either id.

        Args:
            prompt: text to encode, or token ids to take as they are.
            sampling_params: default `SamplingParams()`: greedy, 16 tokens.
            request_id: default "req-N" from a counter shared by all engines.
            priority: smaller is served first under the priority policy.
            arrival_time: breaks ties between priorities; default is the order of adding.
            cache_salt: shares cached blocks only with requests of the same salt.
            lora_request: the adapter to answer with; None is the base model.

        Raises:
            ValueError: an argument of the wrong type, an empty prompt, an unknown token id, a
                prompt or request that could never fit, or a duplicate id. The engine is as it was.
        """
        request_id, requests = self.inputs.process(
            prompt, sampling_params, request_id, priority, arrival_time, cache_salt, lora_request
        )
        self.queue_requests(request_id, requests)
        return request_id

    def queue_requests(self, request_id: str, requests: Sequence[Request]) -> None:
        """Queue what `inputs.process` made; all of it or, when interrupted, nothing.

        Raises:
            ValueError: a live request has one of the ids.
        """
        for taken in (request_id, *(request.request_id for request in requests)):
            if taken in self.requests or taken in self._parents:
                raise ValueError(f"request_id={taken!r}: a live request has this id")
        with self._all_or_nothing(without=requests):
            if len(requests) > 1:
                self._parents.add(request_id, [request.request_id for request in requests])
            for request in requests:
                self._known.add(request.request_id)
                self.rows.begin(request, self._num_added)
                self._stops.begin(request)
                self.scheduler.add_request(request)
                self._num_added += 1

    def abort_request(self, request_id: str) -> None:
        """End a request now and free its blocks; an unknown id is a no-op."""
        live = [self.requests.get(child) for child in self._parents.children(request_id)]
        requests = [request for request in live if request is not None]
        if not requests:
            return
        with held_back(), self._all_or_nothing(without=requests):
            for request in requests:
                self.scheduler.abort_request(request.request_id)
                self._forget(request.request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether a further `step` has anything to do."""
        return self.scheduler.has_unfinished_requests()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every cached prefix; see `Scheduler.reset_prefix_cache`.

        Raises:
            ValueError: `reset_running_requests` while drafts may be in flight, whose frames the
                scheduler's count of stale ones does not fit.
        """
        if reset_running_requests and self.speculator and self.config.scheduler.async_scheduling:
            raise ValueError(
                "reset_running_requests=True: need async_scheduling=False with speculative_config"
            )
        with self._all_or_nothing():
            return self.scheduler.reset_prefix_cache(reset_running_requests)

    # ------------------------------------------------------------------ the loop

    def step(self) -> list[Request]:
        """Schedule, execute, sample, update; returns the requests that finished in this step.

        With `async_scheduling` the update is that of the step before, whose tokens only now become
        known to the scheduler.

        Raises:
            RuntimeError: work is left but nothing can be scheduled (S13), or a part returned
                what it must not; the part is named.
        """
        with self._all_or_nothing(before=self._live()):
            finished = self._step()
            for request in finished:
                self._forget(request.request_id)
            return finished

    def _step(self) -> list[Request]:
        plan = self.scheduler.schedule()
        plan.bind(self.scheduler.kv)
        previous = self._in_flight
        if self.speculator is not None and previous is not None:
            plan.settle(*previous)
            self.speculator.fill(plan)
        for observer in self.observers:
            observer(plan)
        stuck = not plan.scheduled_requests and not plan.preempted_req_ids
        failed = self.rows.failed()
        if stuck and not (previous and previous[0].scheduled_requests):
            awaited = any(getattr(r, "waits_for", None) for r in self.requests.values())
            if self.scheduler.has_unfinished_requests() and not awaited:
                raise RuntimeError("no progress: requests are unfinished but none can be scheduled")
            return self._end(failed)
        sampled: Sampled = {}
        if plan.scheduled_requests:
            self.rows.ask(plan)
            if self.adapters is not None:
                self.adapters.prepare(plan)
            in_flight = self.runner.in_flight = (
                previous[0].still_wanted(previous[1]) if previous else {}
            )
            sampled, found = self.rows.sample(plan, self.runner.execute(plan), in_flight)
            failed |= found
        if self.config.scheduler.async_scheduling:
            self._in_flight = plan, sampled
            if self.speculator is not None:
                self.speculator.propose(plan, sampled, self.runner.in_flight)
            if previous is None:
                return self._end(failed)
            plan, sampled = previous
        if self.speculator is not None:
            self.speculator.observe(plan, sampled)
        finished = self.scheduler.update_from_output(plan, sampled)
        finished += self._stops.end(plan, self.scheduler) + self._end(failed)
        if self.speculator is not None and self._in_flight is None and not failed:
            self.scheduler.update_draft_token_ids(self.speculator.propose(plan, sampled))
        return finished

    def _end(self, failed: dict[str, Failure]) -> list[Request]:
        """End the requests that got no token. If what they left in the cache may be as wrong as
        their logits, everybody else starts over."""
        ended = end(failed, self.scheduler)
        if any(failed[request.request_id].in_cache for request in ended):
            self._restart(self._live())
        return ended

    # ------------------------------------------------------------------ whole again

    def _live(self) -> list[tuple[Request, int]]:
        """The live requests and how many tokens each has."""
        return [(request, request.num_tokens) for request in self.requests.values()]

    @contextmanager
    def _all_or_nothing(
        self, without: Sequence[Request] = (), before: list[tuple[Request, int]] | None = None
    ) -> Iterator[None]:
        """Run a change of the engine; if it raises, or is interrupted, it did not happen.

        Args:
            without: requests that are gone when the change fails: being added or aborted.
            before: the live requests of before, where the change gives them tokens.
        """
        try:
            yield
        except BaseException:
            for request in without:
                request.status = RequestStatus.FINISHED_ABORTED
            live = self._live() if before is None else before
            self._restart([entry for entry in live if not any(entry[0] is r for r in without)])
            raise

    @contextmanager
    def owning(self, requests: Sequence[Request]) -> Iterator[None]:
        """Abort the requests that are still live at the end of the block.

        An interrupt may hit the cleanup itself: whoever must leave nothing behind enters it twice,
        and the outer one finishes what the inner one could not.
        """
        try:
            yield
        finally:
            for request in requests:  # those that are finished are not known any more
                if self.requests.get(request.request_id) is request:
                    self.abort_request(request.request_id)

    def _restart(self, live: list[tuple[Request, int]]) -> None:
        """Start over with these requests, as they were, in an empty cache.

        After an exception nobody knows which of pool, tables, queues and index are half changed, so
        nothing of them is kept: new parts, and the requests queued again with the tokens they had.
        """
        with held_back():
            self.scheduler = self.parts.build_scheduler(self.config, self.gates)
            self._in_flight = None
            if self.adapters is not None:
                self.adapters.reset()
            for request, num_tokens in live:
                del request.all_token_ids[num_tokens:]
                request.start_over()
                if self.speculator is not None:
                    self.speculator.forget(request.request_id)
                self.scheduler.add_request(request)
                self.rows.rewind(request.request_id, num_tokens)
                self._stops.begin(request)
            for request_id in self._known - self.requests.keys():
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._known.discard(request_id)
        self._parents.forget(request_id)
        self._stops.forget(request_id)
        self.rows.forget(request_id)
        if self.speculator is not None:
            self.speculator.forget(request_id)

    # ------------------------------------------------------------------ all at once

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Run all prompts to the end; results in prompt order.

        Args:
            prompts: texts or token-id lists.
            sampling_params: one for all, or one per prompt.
            lora_request: an adapter for all, one (or None) per prompt, or none.

        Raises:
            ValueError: any prompt is refused (none is run), or the two lengths differ.
        """
        each = one_each(prompts, sampling_params, lora_request)
        asked = [self.inputs.process(p, params, lora_request=a) for p, params, a in each]
        requests = [request for _, children in asked for request in children]
        with self.owning(requests), self.owning(requests):
            for request_id, children in asked:
                self.queue_requests(request_id, children)
            while not all(request.is_finished for request in requests):
                self.step()
            return [
                RequestOutput.of(request_id, children, prompt, self.tokenizer)
                for (request_id, children), (prompt, *_) in zip(asked, each, strict=True)
            ]

"""The loop: schedule, execute, sample, update, until nothing is unfinished.

Promises E1-E6: output does not depend on budget, threshold, pool, caching or batch mates; a refused
request leaves the engine as it was; an engine that cannot make progress raises. A step that raises,
or is interrupted anywhere, did not happen. Mirrors `vllm/v1/engine/core.py:428` `EngineCore.step`
and, with `async_scheduling`, `vllm/v1/engine/core.py:469` `EngineCore.step_with_batch_queue`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mini_vllm.batch import Model
from mini_vllm.checks import has_methods
from mini_vllm.config import EngineConfig, SamplingParams
from mini_vllm.feature import Feature
from mini_vllm.features import open_features
from mini_vllm.input_processor import InputProcessor, Prompt, one_each
from mini_vllm.interrupts import held_back
from mini_vllm.model_runner import ModelRunner
from mini_vllm.outputs import RequestOutput
from mini_vllm.parallel_sampling import Parents
from mini_vllm.parts import EngineParts
from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.request import Request, RequestStatus
from mini_vllm.row_sampler import RowSampler
from mini_vllm.sample.processors import LogitsProcessor, in_order
from mini_vllm.sample.stop_strings import StopStrings
from mini_vllm.sampler import Sampler
from mini_vllm.tokenizer import Tokenizer

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
            knobs: besides, what opens a room, such as `tensor_parallel_size=2`; see `features`.

        Raises:
            ValueError: an argument unknown or out of range, or a checkpoint that cannot be loaded.
        """
        parts = EngineParts() if parts is None else parts
        _check_kinds(parts, tokenizer, gates, logits_processors)
        setup = open_features(model, config, knobs, tokenizer, parts)
        loaded = setup.load()
        self.config, self.parts = setup.config, setup.parts
        self.max_model_len = self.config.scheduler.max_model_len
        self.tokenizer = loaded.tokenizer
        self.chat_template = loaded.chat_template
        self.eos_token_ids = loaded.eos_token_ids
        stop_strings = StopStrings(self.tokenizer, self.parts.detokenizer)
        self.features: list[Feature] = [stop_strings, *setup.features]
        self.inputs = InputProcessor(self.config, loaded, self.parts.request, self.features)
        self.gates = (*gates, *(f.gate for f in self.features if f.gate is not None))
        self.scheduler = self.parts.build_scheduler(self.config, self.gates)
        self.row_sampler = RowSampler(
            self.parts.sampler(),
            [*in_order(self.eos_token_ids, logits_processors), *setup.last_processors],
            self.config.seed,
            setup.choose_tokens,
            setup.masks,
        )
        self.runner = ModelRunner(
            loaded.model,
            self.config.cache.num_blocks,
            self.config.cache.block_size,
            loaded.kv_specs,
            loaded.dtype,
        )
        self.executor = setup.build_executor(self.runner, self.row_sampler, self.features)
        at_once = self.executor.batch_queue_size == 1
        if self.parts.step is not None and not (at_once and not self.inputs.takes_drafts):
            raise ValueError(
                f"parts.step={self.parts.step!r}: takes in each plan at once, one token a row; "
                "need no async_scheduling, stages or drafts"
            )
        self.observers: list[Observer] = []
        """Each is called with every plan before it runs; for traces and probes."""
        self._known: set[str] = set()  # ids of requests whose end has not been noted yet
        self._parents = Parents()
        self._num_added = 0
        setup.join = self.join

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
        return self.row_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Sampler) -> None:
        self.row_sampler.sampler = sampler

    @property
    def logits_processors(self) -> list[LogitsProcessor]:
        """What changes each row before a token is chosen, in this order."""
        return self.row_sampler.logits_processors

    def feature(self, name: str) -> Any:
        """The open room of this name, such as "lora"; None if it is not open."""
        return next((feature for feature in self.features if feature.name == name), None)

    def join(self, feature: Feature) -> None:
        """A room that opens while the engine serves.

        Raises:
            ValueError: it has a gate, and the scheduler part takes none.
        """
        if feature.gate is not None:
            if not hasattr(self.scheduler, "gates"):
                part = type(self.scheduler).__name__
                raise ValueError(
                    f"scheduler part {part}: takes no gates, needed for {feature.name}"
                )
            self.gates = self.scheduler.gates = (*self.gates, feature.gate)
        if feature.mask is not None:
            self.row_sampler.masks.append(feature.mask)
        self.features.append(feature)

    def close(self) -> None:
        """End what was started for this engine, such as processes."""
        for feature in self.features:
            feature.close()

    @property
    def requests(self) -> dict[str, Request]:
        """The live requests by id, in order of arrival."""
        return self.scheduler.requests

    # ------------------------------------------------------------------ requests

    def prepare(self, sampling_params: SamplingParams) -> None:
        """Do what of `add_request` takes long; in any thread, while others step the engine.

        Raises:
            ValueError: what `add_request` would refuse for the same reason.
        """
        for feature in tuple(self.features):
            feature.prepare(sampling_params)

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        **options: Any,
    ) -> str:
        """Queue a prompt (text or token ids); returns its request id.

        With `n` > 1 it becomes n requests, "0_ID", "1_ID" and so on, which `step` returns one by
        one; `abort_request` takes either id.

        Args:
            prompt: text to encode, token ids to take as they are, or a mapping of one of them and
                of what a room takes with it.
            sampling_params: default `SamplingParams()`: greedy, 16 tokens.
            request_id: default "req-N" from a counter shared by all engines.
            priority: smaller is served first under the priority policy.
            arrival_time: breaks ties between priorities; default is the order of adding.
            cache_salt: shares cached blocks only with requests of the same salt.
            options: what an open room understands, such as `lora_request`.

        Raises:
            ValueError: an argument of the wrong type, an empty prompt, an unknown token id, a
                prompt or request that could never fit, or a duplicate id. The engine is as it was.
        """
        request_id, requests = self.inputs.process(
            prompt, sampling_params, request_id, priority, arrival_time, cache_salt, **options
        )
        self.queue_requests(request_id, requests)
        return request_id

    def queue_requests(self, request_id: str, requests: Sequence[Request]) -> None:
        """Queue what `inputs.process` made; all of it or, when interrupted, nothing.

        Raises:
            ValueError: a live request has one of the ids.
        """
        for new_id in (request_id, *(request.request_id for request in requests)):
            if new_id in self.requests or new_id in self._parents:
                raise ValueError(f"request_id={new_id!r}: a live request has this id")
        with self._all_or_nothing(without=requests):
            self._known |= {request.request_id for request in requests}
            if len(requests) > 1:
                self._parents.add(request_id, [request.request_id for request in requests])
            for request in requests:
                self.row_sampler.add_request(request, self._num_added)
                for feature in self.features:
                    feature.add_request(request)
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
                self._remove(request.request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether a further `step` has anything to do."""
        if self.scheduler.has_unfinished_requests():
            return True
        return any(feature.is_busy() for feature in self.features)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every cached prefix; see `Scheduler.reset_prefix_cache`.

        With `async_scheduling` and `reset_running_requests` the tokens in flight are dropped and
        drawn again, as upstream: a request with a seed then goes on with later random numbers, so
        its text is not the one that the seed gives without the reset.

        Raises:
            ValueError: `reset_running_requests` while drafts may be in flight, whose frames the
                scheduler's count of stale ones does not fit.
        """
        config = self.config.scheduler
        if reset_running_requests and config.num_speculative_tokens and config.async_scheduling:
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
            finished = (self.parts.step or LLMEngine._step)(self)
            for request in finished:
                self._remove(request.request_id)
            return finished

    def _step(self) -> list[Request]:
        plan = self.scheduler.schedule()
        self.bind(plan)
        if not (plan.scheduled_requests or plan.preempted_req_ids or self.executor.is_busy):
            self.check_progress()
            return self.finish_failed()
        output = self.executor.submit(plan)
        if output is None:
            return self.finish_failed()
        plan, sampled = output
        finished = self.scheduler.update_from_output(plan, sampled)
        for feature in self.features:
            feature.after_update(plan, sampled, finished, self.scheduler)
        return finished + self.finish_failed()

    def bind(self, plan: SchedulerOutput) -> None:
        """Bind a plan, have the rooms complete it, and show it to observers."""
        plan.bind(self.scheduler.kv, len(self.runner.kv_specs) or 1)
        for feature in self.features:
            feature.after_schedule(plan)
        self.row_sampler.plan_prompt_rows(plan)
        for observer in self.observers:
            observer(plan)

    def check_progress(self) -> None:
        """Nothing can be planned and nothing is in flight: then every request waits for something
        that only time brings (S13)."""
        awaited = any(request.waits_for for request in self.requests.values())
        awaited = awaited or any(feature.is_busy() for feature in self.features)
        if self.scheduler.has_unfinished_requests() and not awaited:
            raise RuntimeError("no progress: requests are unfinished but none can be scheduled")

    def finish_failed(self) -> list[Request]:
        """End the requests that got no token. If what they left in the cache may be as wrong as
        their logits, all others start over."""
        finished: list[Request] = []
        if not (failures := self.executor.take_failures()):
            return finished
        for request_id, failure in failures.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            if failure.kv == "unwritten":
                self.scheduler.kv.forget_uncomputed(request)
            self.scheduler.abort_request(request_id)
            request.status, request.stop_reason = RequestStatus.FINISHED_ERROR, failure.reason
            finished.append(request)
        if any(failures[request.request_id].kv == "suspect" for request in finished):
            self._restart(self._live())
        return finished

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

        An interrupt may hit the cleanup itself. A caller that must leave nothing behind enters it
        twice, and the outer one finishes what the inner one could not.
        """
        try:
            yield
        finally:
            for request in requests:  # those that are finished are not known any more
                if self.requests.get(request.request_id) is request:
                    self.abort_request(request.request_id)

    def _restart(self, live: list[tuple[Request, int]]) -> None:
        """Start over with these requests, as they were, in an empty cache.

        After an exception any of pool, tables, queues and index may be half changed, so nothing of
        them is kept: the parts are new, and the requests are queued again with the tokens they had.
        """
        with held_back():
            self.scheduler = self.parts.build_scheduler(self.config, self.gates)
            self.executor.restart()
            for feature in self.features:
                feature.restart()
            for request, num_tokens in live:
                del request.all_token_ids[num_tokens:]
                request.start_over()
                self.scheduler.add_request(request)
                self.row_sampler.rewind(request.request_id, num_tokens)
                for feature in self.features:
                    feature.requeue_request(request)
            for request_id in self._known - self.requests.keys():
                self._remove(request_id)

    def _remove(self, request_id: str) -> None:
        self._parents.remove(request_id)
        self.row_sampler.remove_request(request_id)
        for feature in self.features:
            feature.remove_request(request_id)
        self._known.discard(request_id)  # last: until then a restart forgets it once more

    # ------------------------------------------------------------------ all at once

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Run all prompts to the end; results in prompt order.

        Args:
            prompts: as of `add_request`.
            sampling_params: one for all, or one per prompt.
            options: as of `add_request`, each one for all or a list, one (or None) per prompt.

        Raises:
            ValueError: any prompt is refused (none is run), or the two lengths differ.
        """
        each = one_each(prompts, sampling_params, options)
        inputs = [self.inputs.process(p, params, **own) for p, params, own in each]
        requests = [request for _, children in inputs for request in children]
        with self.owning(requests), self.owning(requests):
            for request_id, children in inputs:
                self.queue_requests(request_id, children)
            while not all(request.is_finished for request in requests):
                self.step()
            return [
                RequestOutput.of(request_id, children, prompt, self.tokenizer)
                for (request_id, children), (prompt, *_) in zip(inputs, each, strict=True)
            ]


def _check_kinds(parts: Any, tokenizer: Any, gates: Any, logits_processors: Any) -> None:
    """Refuse what is not of the kind that its argument says."""
    if not isinstance(parts, EngineParts):
        raise ValueError(f"parts={parts!r}: need EngineParts")
    if tokenizer is not None:
        has_methods("tokenizer", tokenizer, "encode", "decode")
    for name, values in (("gates", gates), ("logits_processors", logits_processors)):
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise ValueError(f"{name}={values!r}: need a sequence")
    for gate in gates:
        has_methods("gates", gate, "admission", "limit", "scheduled", "leaves")
    for processor in logits_processors:
        if not callable(processor):
            raise ValueError(f"logits_processors holds {processor!r}: need a function")

"""The scheduler of this engine, or a learner's, inside the real engine.

    vllm serve MODEL --no-async-scheduling \\
        --scheduler-cls mini_vllm.entrypoints.vllm_scheduler.MiniScheduler

Promises: every plan is the mini scheduler's, over its own block tables; vLLM's model runner,
sampler, front end and server do the rest. What was not compared with vLLM's own scheduler is
refused by name: a configuration when the engine starts, a request when it comes. Implements
`vllm/v1/core/sched/interface.py:36` `SchedulerInterface` as that of vLLM 0.22.1 is, and needs vLLM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

from mini_vllm.config import EngineConfig
from mini_vllm.parts import EngineParts
from mini_vllm.plan import SchedulerOutput as Plan
from mini_vllm.request import Request
from mini_vllm.sampling_params import SamplingParams

logger = init_logger(__name__)


class MiniScheduler(SchedulerInterface):
    """What `--scheduler-cls` names. A subclass with other `parts` serves a learner's classes."""

    parts: ClassVar[EngineParts] = EngineParts()
    """Of which the scheduler, the KV cache manager and the block pool are used."""
    connector = None
    """`vllm/v1/engine/core.py:158` `EngineCore.__init__` asks for it beside the interface."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        structured_output_manager: Any,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: Any = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        """An idle scheduler over the blocks that the real engine has sized.

        Raises:
            ValueError: the configuration asks for something that was not compared; all of it is
                named.
        """
        if unserved := list(
            _not_compared(vllm_config, kv_cache_config, block_size, hash_block_size)
        ):
            raise ValueError(f"{type(self).__name__} does not serve {'; '.join(unserved)}")
        self.mini = self.parts.build_scheduler(
            _config_of(vllm_config, kv_cache_config.num_blocks, block_size)
        )
        self.theirs: dict[str, Any] = {}
        """The real engine's requests that are not finished."""
        self.ours: dict[str, Request] = {}
        self.sent: dict[str, int] = {}
        """How many blocks of its table the runner knows, per request that holds any."""
        self.last: set[str] = set()
        """Who was in the previous plan."""
        self.plan = Plan()
        """The plan that is being executed."""
        self.refused: list[Any] = []
        """Requests that are to be answered with an error."""
        self.has_finished = False
        self.log_stats = log_stats
        self.finished_of: dict[int, set[str]] | None = (
            defaultdict(set) if include_finished_set else None
        )

    # ------------------------------------------------------------------ what comes in

    def add_request(self, request: Any) -> None:
        """Queue a request; one that asks for what was not compared is answered with an error, and
        the log says what it was. So is one with the id of a live request: an exception here ends
        the engine core, and every other request with it."""
        unserved = [name for name, value in _unserved(request).items() if value]
        if request.request_id in self.theirs:
            unserved.append("the id of a live request")
        if unserved:
            logger.error("%s: not served: %s", request.request_id, ", ".join(unserved))
            self.refused.append(request)
            return
        params = request.sampling_params
        mini = Request(
            request.request_id,
            request.prompt_token_ids,
            SamplingParams(
                max_tokens=request.max_tokens,
                min_tokens=params.min_tokens,
                ignore_eos=params.eos_token_id is None,
                stop_token_ids=tuple(params.stop_token_ids or ()),
                skip_reading_prefix_cache=request.skip_reading_prefix_cache,
            ),
            params.eos_token_id,
            request.arrival_time,
            request.priority,
            request.cache_salt,
        )
        self.mini.add_request(mini)
        self.ours[mini.request_id], self.theirs[mini.request_id] = mini, request
        self._note(request, EngineCoreEventType.QUEUED)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: Any
    ) -> list[tuple[str, int]]:
        """End requests from outside; (id, client) of those that were live, in the order given."""
        if request_ids is None:
            request_ids = list(self.theirs)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        ended = []
        for request_id in dict.fromkeys(request_ids):
            if request_id in self.theirs:
                self.mini.abort_request(request_id)
                ended.append((request_id, self._forget(request_id).client_index))
        return ended

    # ------------------------------------------------------------------ a step

    def schedule(self) -> Any:
        """The mini scheduler's plan, as the real model runner reads it."""
        plan = self.plan = self.mini.schedule()
        self.has_finished = False
        for request_id in plan.preempted_req_ids:
            self.sent.pop(request_id, None)
            self._note(self.theirs[request_id], EngineCoreEventType.PREEMPTED)
        admitted = {*plan.scheduled_new_req_ids, *plan.scheduled_resumed_req_ids}
        for request_id in (r.request_id for r in plan.scheduled_requests):
            if request_id in admitted:
                self._admitted(request_id, plan.num_cached_tokens[request_id])
        blocks = {request_id: self._new_blocks(request_id) for request_id in _ids(plan)}
        new = [
            self._new_request(request_id, blocks[request_id])
            for request_id in plan.scheduled_new_req_ids
        ]
        output = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=self._known_requests(plan, admitted, blocks),
            num_scheduled_tokens=dict(plan.num_scheduled_tokens),
            total_num_scheduled_tokens=plan.total_num_scheduled_tokens,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0],  # a hint for cascade attention, which is not compared
            finished_req_ids=set(plan.finished_req_ids),
            free_encoder_mm_hashes=[],
            preempted_req_ids=set(plan.preempted_req_ids),
        )
        self.last = set(plan.num_scheduled_tokens)
        return output

    def _admitted(self, request_id: str, num_cached: int) -> None:
        """What the real engine's metrics want to know of an admission."""
        request = self.theirs[request_id]
        self._note(request, EngineCoreEventType.SCHEDULED)
        if request.prefill_stats is not None:
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=num_cached,
                num_external_cached_tokens=0,
            )

    def _new_blocks(self, request_id: str) -> list[int]:
        """The block ids of its table that the runner does not know yet."""
        table = list(self.mini.kv.get_block_ids(request_id))
        known, self.sent[request_id] = self.sent.get(request_id, 0), len(table)
        return table[known:]

    def _new_request(self, request_id: str, blocks: list[int]) -> Any:
        request = self.theirs[request_id]
        return NewRequestData(
            req_id=request_id,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=[],
            sampling_params=request.sampling_params,
            pooling_params=None,
            block_ids=(blocks,),
            num_computed_tokens=self.ours[request_id].num_computed_tokens,
            lora_request=None,
        )

    def _known_requests(
        self, plan: Plan, admitted: set[str], blocks: Mapping[str, list[int]]
    ) -> Any:
        """Requests that the runner has seen: the running ones, then those that come back."""
        running = [request_id for request_id in _ids(plan) if request_id not in admitted]
        ids = [*running, *plan.scheduled_resumed_req_ids]
        resumed = set(plan.scheduled_resumed_req_ids)
        ours = self.ours
        return CachedRequestData(
            req_ids=ids,
            resumed_req_ids=resumed,
            new_token_ids=[],
            all_token_ids={r: list(ours[r].all_token_ids) for r in ids if r not in self.last},
            new_block_ids=[(blocks[r],) if blocks[r] else None for r in ids],
            num_computed_tokens=[ours[r].num_computed_tokens for r in ids],
            num_output_tokens=[ours[r].num_output_tokens for r in ids],
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Hand the sampled tokens to the mini scheduler; what each client hears.

        As `vllm/v1/core/sched/scheduler.py:1283` `Scheduler.update_from_output`.
        """
        rows, index = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        planned = [r for r in _ids(self.plan) if r in self.ours]
        before = {r: self.ours[r].num_output_tokens for r in planned}
        sampled = {r: list(rows[index[r]]) for r in planned if rows and len(rows[index[r]])}
        self.mini.update_from_output(self.plan, sampled)
        messages: dict[int, list[Any]] = defaultdict(list)
        for request_id in planned:
            request = self.ours[request_id]
            if tokens := request.output_token_ids[before[request_id] :]:
                theirs = self.theirs[request_id]
                if request.is_finished:
                    self._forget(request_id)
                row = index[request_id]
                messages[theirs.client_index].append(
                    _news(request, theirs, tokens, row, model_runner_output)
                )
        for theirs in self.refused:
            messages[theirs.client_index].append(
                EngineCoreOutput(
                    request_id=theirs.request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                )
            )
            if self.finished_of is not None:
                self.finished_of[theirs.client_index].add(theirs.request_id)
        self.refused = []
        return self._messages(messages)

    def _messages(self, outputs_of: Mapping[int, list[Any]]) -> dict[int, Any]:
        """A message per client; one of them carries the step's statistics."""
        found = {
            client: EngineCoreOutputs(outputs=outputs) for client, outputs in outputs_of.items()
        }
        for client, ended in (self.finished_of or {}).items():
            found.setdefault(client, EngineCoreOutputs()).finished_requests = ended
        if self.finished_of:
            self.finished_of = defaultdict(set)
        if (stats := self.make_stats()) is not None:
            first = next(iter(found.values()), None)
            if first is None:
                first = found[0] = EngineCoreOutputs()
            first.scheduler_stats = stats
        return found

    def _forget(self, request_id: str) -> Any:
        """A request has ended; the real engine's record of it."""
        request = self.theirs.pop(request_id)
        del self.ours[request_id]
        self.sent.pop(request_id, None)
        self.has_finished = True
        if self.finished_of is not None:
            self.finished_of[request.client_index].add(request_id)
        return request

    def _note(self, request: Any, event: Any) -> None:
        if self.log_stats:
            request.record_event(event)

    # ------------------------------------------------------------------ what it is asked

    def get_num_unfinished_requests(self) -> int:
        """Waiting, running, and still to be refused."""
        return len(self.theirs) + len(self.refused)

    def has_finished_requests(self) -> bool:
        """Whether the runner is yet to hear of requests that ended."""
        return self.has_finished

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        running = len(self.mini.running)
        return running, len(self.theirs) - running

    def make_stats(self) -> Any:
        """What the front end logs and counts, of the step that has just ended."""
        if not self.log_stats:
            return None
        running, waiting = self.get_request_counts()
        kv, cached = self.mini.kv, PrefixCacheStats()
        if (seen := getattr(kv, "stats", None)) is not None:  # a learner's manager may count none
            for name in seen.__dataclass_fields__:
                setattr(cached, name, getattr(seen, name))
            kv.stats = type(seen)()
        return SchedulerStats(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            kv_cache_usage=getattr(kv, "usage", 0.0),
            prefix_cache_stats=cached,
        )

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget every cached prefix; False, and nothing changed, while blocks are in use.

        Raises:
            NotImplementedError: `reset_running_requests`, which was not compared.
        """
        if reset_running_requests:
            raise NotImplementedError(
                "reset_running_requests=True: need False; this scheduler was not compared with it"
            )
        return bool(self.mini.kv.reset_prefix_cache()) and not reset_connector

    def reset_encoder_cache(self) -> None:
        """There is none."""

    @property
    def pause_state(self) -> Any:
        """It does not pause."""
        return PauseState.UNPAUSED

    def set_pause_state(self, pause_state: Any) -> None:
        """Raises NotImplementedError: pausing was not compared."""
        if pause_state != PauseState.UNPAUSED:
            raise NotImplementedError(
                f"pause_state={pause_state!r}: need UNPAUSED; this scheduler does not pause"
            )

    def get_grammar_bitmask(self, scheduler_output: Any) -> None:
        """None: requests with a grammar are refused."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Never called: drafts are refused at the start."""
        raise NotImplementedError("drafts: not served")

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        """Never called: drafts are refused at the start."""
        raise NotImplementedError("drafts: not served")

    def shutdown(self) -> None:
        """Nothing was opened."""


# ---------------------------------------------------------------------- in vLLM's words


def _ids(plan: Plan) -> list[str]:
    """Who is planned, in the order of scheduling."""
    return list(plan.num_scheduled_tokens)


def _news(request: Request, theirs: Any, tokens: list[int], row: int, said: Any) -> Any:
    """What a client hears of one request after a step."""
    logprobs = None
    if theirs.sampling_params.num_logprobs is not None and said.logprobs:
        logprobs = said.logprobs.slice_request(row, len(tokens))
    reason = request.finish_reason
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=tokens,
        new_logprobs=logprobs,
        new_prompt_logprobs_tensors=said.prompt_logprobs_dict.get(request.request_id),
        finish_reason=FinishReason[reason.upper()] if reason else None,
        stop_reason=request.stop_reason,
        events=theirs.take_events(),
        trace_headers=theirs.trace_headers,
        prefill_stats=theirs.take_prefill_stats(),
    )


def _config_of(config: Any, num_blocks: int, block_size: int) -> EngineConfig:
    """The knobs that both engines have."""
    scheduler = config.scheduler_config
    return EngineConfig.of(
        {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "enable_prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_scheduled_tokens
            or scheduler.max_num_batched_tokens,
            "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
            "max_model_len": config.model_config.max_model_len,
            "policy": getattr(scheduler.policy, "value", scheduler.policy),
            "enable_chunked_prefill": bool(scheduler.enable_chunked_prefill),
        }
    )


def _not_compared(
    config: Any, kv_cache_config: Any, block_size: int, hash_block_size: int | None
) -> Iterator[str]:
    """What a configuration asks for beyond one rank, one full-attention group and plain text."""
    scheduler, parallel = config.scheduler_config, config.parallel_config
    if scheduler.async_scheduling:
        yield "asynchronous scheduling (pass --no-async-scheduling)"
    for name in ("speculative_config", "lora_config", "kv_transfer_config", "ec_transfer_config"):
        if getattr(config, name) is not None:
            yield name
    events = config.kv_events_config
    if events is not None and events.enable_kv_cache_events:
        yield "kv_events_config"
    kinds = [type(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    if kinds != [FullAttentionSpec]:
        names = ", ".join(kind.__name__ for kind in kinds) or "none"
        yield f"cache groups {names} (one FullAttentionSpec is served)"
    if hash_block_size not in (None, block_size):
        yield f"hash_block_size={hash_block_size} beside block_size={block_size}"
    for name in (
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
        "decode_context_parallel_size", "prefill_context_parallel_size",
    ):  # fmt: skip
        if (size := getattr(parallel, name)) != 1:
            yield f"{name}={size}"
    if config.use_v2_model_runner:
        yield "the second model runner (VLLM_USE_V2_MODEL_RUNNER)"
    if config.model_config.is_encoder_decoder:
        yield "models with an encoder and a decoder"
    if config.model_config.enable_return_routed_experts:
        yield "enable_return_routed_experts"
    if not scheduler.scheduler_reserve_full_isl:
        yield "scheduler_reserve_full_isl=False"


def _unserved(request: Any) -> dict[str, Any]:
    """What a request may ask for that was not compared; false where it does not ask."""
    params = request.sampling_params
    return {
        "pooling_params": request.pooling_params is not None,
        "lora_request": request.lora_request is not None,
        "structured_outputs": request.use_structured_output,
        "mm_features": request.mm_features,
        "prompt_embeds": request.prompt_embeds is not None,
        "a session that goes on with more input": request.resumable,
        "kv_transfer_params": request.kv_transfer_params is not None,
        "repetition_detection": params is not None and params.repetition_detection is not None,
    }

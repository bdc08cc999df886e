"""Labs whose contract is smaller than the engine's slot: what stands between the two.

Promises: the learner's function decides, and what the engine needs besides is taken from the
engine; an answer that a slot cannot use is an error that names the part. Of the engine only slots
are known here, and the engine knows nothing of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from mini_vllm.config import SamplingParams
from mini_vllm.detokenizer import IncrementalDetokenizer
from mini_vllm.engine import LLMEngine
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request, RequestStatus
from mini_vllm.row_sampler import TokenLists
from mini_vllm.scheduler import Scheduler
from mini_vllm.tokenizer import ByteTokenizer, Tokenizer

_UNFINISHED = "\ufffd"


def step(engine_step: Callable[..., list[Request]]) -> Callable[[LLMEngine], list[Request]]:
    """The slot `step`, from `engine_step(scheduler, runner, sampler)` of lab 01-03.

    The lab's three arguments are `_Planned`, `_Rows` and `_Tokens`. What rooms and observers do in
    between, masks, processors and random numbers are the engine's own.
    """

    def run(engine: LLMEngine) -> list[Request]:
        taken = _Step(engine)
        finished = engine_step(_Planned(taken), _Rows(taken), _Tokens(taken))
        if not isinstance(finished, list) or finished != taken.finished:
            raise RuntimeError(
                f"step part: returned {finished!r}, need the requests that finished in it, as "
                f"update_from_output gave them: {taken.finished!r}"
            )
        if taken.plan is None:
            raise RuntimeError("step part: made no plan, need one call of scheduler.schedule()")
        if not taken.is_run:
            taken.run_nothing()
        return finished + engine.finish_failed()

    return run


class _Step:
    """One step on its way: its plan, the rows of its requests and their tokens."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.plan: SchedulerOutput | None = None
        self.rows = np.empty((0, 0))
        self.sampled: TokenLists = {}
        self.finished: list[Request] = []
        self.is_run = False

    def run(self, plan: SchedulerOutput) -> np.ndarray:
        """Run the plan; [num_scheduled_requests, vocab_size] the last row of each request."""
        engine = self.engine
        if plan is not self.plan or self.is_run or (plan.scheduled_requests and not plan.block_ids):
            raise RuntimeError("step part: need this step's plan, bound, once in runner.execute")
        engine.bind(plan)
        self.is_run = True
        engine.executor.prepare(plan)
        if not plan.scheduled_requests:  # none of them can be computed
            return self.rows
        logits = engine.runner.execute(plan)
        self.sampled = engine.executor.sample_tokens(plan, logits, {})
        for feature in engine.features:
            feature.after_execute(plan, self.sampled, {})
        ends = np.cumsum([plan.rows_of(r) for r in plan.num_scheduled_tokens]) - 1
        self.rows = logits[ends]
        return self.rows

    def run_nothing(self) -> None:
        """An empty plan is shown as well, and must not be all that is ever planned."""
        plan = self.plan
        assert plan is not None
        if plan.scheduled_requests:
            raise RuntimeError("step part: ended without running the plan of its requests")
        self.engine.bind(plan)
        if not plan.preempted_req_ids:
            self.engine.check_progress()

    def token_of(self, row: np.ndarray, params: SamplingParams) -> int:
        """The token of one of the rows, which is found by where it lies in memory."""
        assert self.plan is not None
        first, width = self.rows.ctypes.data, self.rows.strides[0] or 1
        number, rest = divmod(row.ctypes.data - first, width)
        if rest or not 0 <= number < len(self.rows) or row.shape != self.rows.shape[1:]:
            raise RuntimeError(
                f"step part: sampled an array of shape {row.shape}: need one of the "
                f"{len(self.rows)} rows that runner.execute returned, not a copy"
            )
        request = self.plan.scheduled_requests[number]
        if params is not request.sampling_params:
            raise RuntimeError(
                f"step part: sampled {request.request_id!r} with other parameters: need its own "
                "request.sampling_params"
            )
        if request.request_id not in self.plan.sampling_req_ids:
            raise RuntimeError(
                f"step part: sampled {request.request_id!r}, which has not caught up: need only "
                "requests of which needs_sample(request) is true"
            )
        return self.sampled.get(request.request_id, [0])[0]  # one that failed ends with the step


class _Planned:
    """The scheduler as the lab has it."""

    def __init__(self, step: _Step) -> None:
        self._step, self.kv = step, step.engine.scheduler.kv

    needs_sample = staticmethod(Scheduler.needs_sample)

    def schedule(self) -> SchedulerOutput:
        if self._step.plan is not None:
            raise RuntimeError("step part: called scheduler.schedule() twice: need one call a step")
        self._step.plan = self._step.engine.scheduler.schedule()
        return self._step.plan

    def update_from_output(
        self, plan: SchedulerOutput, sampled: dict[str, list[int]]
    ) -> list[Request]:
        step = self._step
        if not step.is_run and plan.scheduled_requests:
            raise RuntimeError(
                "step part: called update_from_output before the plan ran: need runner.execute "
                "first"
            )
        tokens = {name: token for name, token in sampled.items() if name in step.sampled}
        if tokens != step.sampled:
            raise RuntimeError(
                f"step part: gave the scheduler {sampled!r}, need the token of every request that "
                f"caught up: {step.sampled!r}"
            )
        finished = step.engine.scheduler.update_from_output(plan, tokens)
        for feature in step.engine.features:
            feature.after_update(plan, tokens, finished, step.engine.scheduler)
        step.finished = list(finished)
        return finished


class _Rows:
    """The runner as the lab has it."""

    def __init__(self, step: _Step) -> None:
        self._step = step

    def execute(self, plan: SchedulerOutput) -> np.ndarray:
        return self._step.run(plan)


class _Tokens:
    """The sampler as the lab has it."""

    def __init__(self, step: _Step) -> None:
        self._step = step

    def sample(self, row: np.ndarray, params: SamplingParams) -> int:
        return self._step.token_of(row, params)


def request(stop_status: Callable[..., RequestStatus | None]) -> type[Request]:
    """The slot `request`, from `stop_status(request, max_model_len)` of lab 01-05.

    The lab answers with a status. Which token id stopped the request, `stop_reason`, is added here,
    and a repetition, of which the lab does not speak, still ends what asks for that.
    """

    class StopChecked(Request):
        """A request that ends when the learner's check says so."""

        __slots__ = ()

        def maybe_finish(self, max_model_len: int | None = None) -> bool:
            status = stop_status(self, max_model_len)
            if status is None:
                return self.finish_repetitive()
            if status not in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH):
                raise RuntimeError(
                    f"stop_check part: returned {status!r}, need FINISHED_STOPPED, FINISHED_LENGTH "
                    "or None"
                )
            last, params = self.all_token_ids[-1], self.sampling_params
            is_eos = last == self.eos_token_id and not params.ignore_eos
            if status == RequestStatus.FINISHED_STOPPED and not is_eos:
                self.stop_reason = last
            self.status = status
            return True

    return StopChecked


def detokenizer(streaming: Callable[[], Any]) -> Callable[[Tokenizer], Any]:
    """The slot `detokenizer`, from `StreamingDetokenizer` of lab 16-03.

    The lab's tokens are bytes. With a tokenizer whose tokens are not, the engine's own serves.
    """

    class ByByte:
        """`update` of all tokens so far, by `feed` of each new one."""

        def __init__(self) -> None:
            self.text = ""
            self._stream, self._fed, self._num_fed = streaming(), "", 0

        def update(self, token_ids: Sequence[int]) -> str:
            """As `IncrementalDetokenizer.update`.

            A replacement character at the end is not shown before something follows it: the
            engine drops it where the output ends.
            """
            for token_id in token_ids[self._num_fed :]:
                piece = self._stream.feed(token_id)
                if not isinstance(piece, str):
                    raise RuntimeError(
                        f"detokenizer part: feed({token_id}) returned {piece!r}, need a str"
                    )
                self._fed += piece
            self._num_fed = len(token_ids)
            before, self.text = len(self.text), self._fed.rstrip(_UNFINISHED)
            return self.text[before:]

    def make(tokenizer: Tokenizer) -> Any:
        return (
            ByByte() if isinstance(tokenizer, ByteTokenizer) else IncrementalDetokenizer(tokenizer)
        )

    return make


def shards(lab: ModuleType) -> Callable[..., dict[str, np.ndarray]]:
    """The slot `shards` of the ranks, from the functions of lab 10-01.

    The lab cuts q, k and v stored as one, and gate and up stored as one. A checkpoint holds each by
    itself, so they are put together before they are cut, and taken apart after.
    """

    def cut(
        tensors: dict[str, np.ndarray], num_heads: int, num_kv_heads: int, rank: int, world: int
    ) -> dict[str, np.ndarray]:
        if len(tensors) == 1:
            [(name, tensor)] = tensors.items()
            cut_one = lab.shard_rows if name in ("o_proj", "down_proj", "w2") else lab.shard_columns
            return {name: cut_one(tensor, rank, world)}
        whole = list(tensors.values())
        sizes = [len(each) for each in whole]
        stacked = np.concatenate([each.reshape(len(each), -1) for each in whole])
        if len(whole) == 3:
            held = lab.shard_qkv(stacked, num_heads, num_kv_heads, rank, world)
            copies = max(1, world // num_kv_heads)  # ranks that hold the same KV head
            sizes = [sizes[0], *(size * copies for size in sizes[1:])]
        else:
            held = lab.shard_merged(stacked, sizes, rank, world)
        parts = np.split(np.asarray(held), np.cumsum(sizes)[:-1] // world)
        return {
            name: part.reshape(-1, *tensor.shape[1:])
            for (name, tensor), part in zip(tensors.items(), parts, strict=True)
        }

    return cut

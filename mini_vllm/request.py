"""One request: its tokens, its two counters, its status.

Promises: `num_computed_tokens` chases `num_tokens` (S10); a finished status compares greater than
PREEMPTED; the stop check runs in upstream's order. Mirrors `vllm/v1/request.py:59` `Request` and
`vllm/v1/core/sched/utils.py:94` `check_stop`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from enum import IntEnum
from typing import Any

from mini_vllm.config import SamplingParams


class RequestStatus(IntEnum):
    """Life of a request. The order is load-bearing: anything after PREEMPTED is finished."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6
    FINISHED_REPETITION = 7


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
    RequestStatus.FINISHED_REPETITION: "repetition",
}


class Request:
    """Mutable state of one request, shared by scheduler, KV manager and engine.

    `num_tokens` counts prompt and outputs; it is kept as a plain attribute because the scheduler
    reads it for every request at every step. `num_computed_tokens` counts those whose K and V are
    in the cache; only the scheduler moves it.
    """

    __slots__ = (
        "all_token_ids", "arrival_time", "block_hashes", "block_keys", "eos_token_id",
        "extra_keys", "logprobs", "num_cached_tokens", "num_computed_tokens",
        "num_output_placeholders", "num_preemptions", "num_prompt_tokens", "num_tokens",
        "num_tokens_to_discard", "priority",
        "request_id", "sampling_params", "spec_token_ids", "status", "stop_reason", "text",
        "waits_for",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        eos_token_id: int | None = None,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        extra_keys: tuple[Hashable, ...] = (),
    ) -> None:
        """Start WAITING with nothing computed.

        Args:
            request_id: unique among live requests.
            prompt_token_ids: at least one id.
            sampling_params: sampling and stop wishes.
            eos_token_id: id that ends generation unless `ignore_eos`; None means no such id.
            arrival_time: seconds on any clock; breaks ties between equal priorities.
            priority: smaller is served first under the priority policy.
            cache_salt: shares the prefix cache only with requests of the same salt.
            extra_keys: what else its K and V depend on, such as an adapter's name; part of
                every block hash.

        Raises:
            ValueError: the prompt is empty.
        """
        if len(prompt_token_ids) == 0:
            raise ValueError("prompt_token_ids is empty: need at least one token")
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.eos_token_id = eos_token_id
        self.arrival_time = arrival_time
        self.priority = priority
        self.status = RequestStatus.WAITING
        self.all_token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.num_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.block_hashes: list[int] = []
        self.extra_keys = extra_keys if cache_salt is None else (*extra_keys, cache_salt)
        self.block_keys: Callable[[int, int], tuple[Hashable, ...]] | None = None
        """What else the K and V of positions start to stop depend on, such as a picture there; part
        of that block's hash and so of all behind it."""
        self.stop_reason: int | str | None = None
        """The stop token id or text that ended it, the text of an error, or "repetition_detected";
        None for EOS and length."""
        self.text: str | None = None
        """Its text where a stop text ended it; None: the text of `text_token_ids`."""
        self.logprobs: Any = None
        """What was noted of each token's probability, if the request asks for that."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens that the prefix cache had at the first admission."""
        self.spec_token_ids: Sequence[int] = ()
        """Drafts to be verified when it is scheduled next."""
        self.num_output_placeholders = 0
        """Tokens of steps in flight: sampled or to be sampled, not yet appended."""
        self.num_tokens_to_discard = 0
        """Steps in flight whose tokens `reset_prefix_cache` has made stale."""
        self.waits_for: str | None = None
        """What it needs, besides room, before it can run: it is born among the skipped, and a gate
        clears this; upstream has a status for each (`vllm/v1/request.py:315` `RequestStatus`)."""

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt, a copy."""
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far, a copy, EOS included once sampled."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def text_token_ids(self) -> list[int]:
        """The output tokens that are text: without the one that stopped the request, unless
        `include_stop_str_in_output`.

        As `vllm/v1/engine/detokenizer.py:95` `BaseIncrementalDetokenizer.update`.
        """
        ids = self.output_token_ids
        kept = self.sampling_params.include_stop_str_in_output
        return ids[:-1] if self.finish_reason == "stop" and not kept else ids

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been generated."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the status is one of the finished ones."""
        return self.status > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "abort", "error" or "repetition" once finished, else None."""
        return _FINISH_REASONS.get(self.status)

    def start_over(self) -> None:
        """Wait again: nothing of it is computed any more, nothing in flight; its tokens stay."""
        self.status = RequestStatus.WAITING
        self.stop_reason = None
        self.num_tokens = len(self.all_token_ids)
        self.num_computed_tokens = self.num_output_placeholders = self.num_tokens_to_discard = 0
        self.block_hashes = []
        self.spec_token_ids = ()

    def append_output_token(self, token_id: int) -> None:
        """Add one sampled token; `num_tokens` moves ahead of `num_computed_tokens`."""
        self.all_token_ids.append(token_id)
        self.num_tokens += 1

    def append_output_tokens(
        self, token_ids: Sequence[int], max_model_len: int | None = None
    ) -> bool:
        """Add the tokens of one step, up to the first that ends the request; whether one did.

        As `vllm/v1/core/sched/scheduler.py:1649` `Scheduler._update_request_with_output`.
        """
        for token_id in token_ids:
            self.all_token_ids.append(token_id)
            self.num_tokens += 1
            if self.maybe_finish(max_model_len):
                return True
        return False

    def maybe_finish(self, max_model_len: int | None = None) -> bool:
        """Set a finished status if the last output ends the request (E5).

        Order: nothing before `min_tokens`; then EOS and stop ids ("stop"); then the model length
        and `max_tokens` ("length"); then `repetition_detection`. So a tie between EOS and the cap
        reports "stop".

        Args:
            max_model_len: longest sequence in tokens, prompt included; None means no bound.

        Returns:
            True when the request is now finished.
        """
        params = self.sampling_params
        num_output_tokens = self.num_tokens - self.num_prompt_tokens
        if num_output_tokens == 0 or num_output_tokens < params.min_tokens:
            return False
        last = self.all_token_ids[-1]
        if last == self.eos_token_id and not params.ignore_eos:
            self.status = RequestStatus.FINISHED_STOPPED
            return True
        if last in params.stop_token_ids:
            self.status = RequestStatus.FINISHED_STOPPED
            self.stop_reason = last
            return True
        if num_output_tokens >= params.max_tokens or (
            max_model_len is not None and self.num_tokens >= max_model_len
        ):
            self.status = RequestStatus.FINISHED_LENGTH
            return True
        return params.repetition_detection is not None and self.finish_repetitive()

    def finish_repetitive(self) -> bool:
        """Set the finished status if the output ends in a repetition that is to end it.

        As `vllm/v1/core/sched/utils.py:28` `check_sequence_repetition`.
        """
        wanted = self.sampling_params.repetition_detection
        length = self.num_tokens - self.num_prompt_tokens
        if wanted is None or length < self.sampling_params.min_tokens:
            return False
        for size in range(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1):
            if size * wanted.min_count > length:
                return False
            last = self.all_token_ids[-size * wanted.min_count :]
            if last[size:] == last[:-size]:
                self.status = RequestStatus.FINISHED_REPETITION
                self.stop_reason = "repetition_detected"
                return True
        return False

    def __lt__(self, other: Request) -> bool:
        """Whether it goes before the other under "priority": `vllm/v1/request.py:301`
        `Request.__lt__`."""
        mine = self.priority, self.arrival_time, self.request_id
        return mine < (other.priority, other.arrival_time, other.request_id)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens})"
        )

"""Texts that end a request: looked for in what each step adds to its output.

Promises: only new text is searched, so the cost of a step does not grow with the output; a text
that spans tokens is found. Mirrors `vllm/v1/engine/detokenizer.py:309` `check_stop_strings`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mini_vllm.detokenizer import IncrementalDetokenizer
from mini_vllm.feature import Feature, SampledTokenIds
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request, RequestStatus
from mini_vllm.scheduler import Scheduler
from mini_vllm.tokenizer import Tokenizer


@dataclass(slots=True)
class _State:
    detokenizer: IncrementalDetokenizer
    num_seen: int = 0
    """Output tokens whose text has been searched."""


class StopStrings(Feature):
    """The requests that have `stop` texts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        detokenizer: Callable[[Tokenizer], IncrementalDetokenizer] = IncrementalDetokenizer,
    ) -> None:
        self._tokenizer, self._detokenizer = tokenizer, detokenizer
        self._states: dict[str, _State] = {}

    def add_request(self, request: Request) -> None:
        """Watch a request, if it has stop texts; what it has generated already counts as seen."""
        if not request.sampling_params.stop:
            return
        state = _State(self._detokenizer(self._tokenizer), request.num_output_tokens)
        for count in range(1, state.num_seen + 1):
            state.detokenizer.update(request.output_token_ids[:count])
        self._states[request.request_id] = state

    requeue_request = add_request

    def remove_request(self, request_id: str) -> None:
        """The request is gone."""
        self._states.pop(request_id, None)

    def after_update(
        self,
        plan: SchedulerOutput,
        sampled: SampledTokenIds,
        finished: list[Request],
        scheduler: Scheduler,
    ) -> None:
        """End the requests of a plan whose new text holds a stop text.

        The scheduler knows no text: it sees an abort, as upstream's does
        (`vllm/v1/engine/output_processor.py:576` `OutputProcessor.process_outputs`).
        """
        for request in plan.scheduled_requests if self._states else ():
            if request.request_id not in self._states or not (found := self.find(request)):
                continue
            if not request.is_finished:
                scheduler.abort_request(request.request_id)
                finished.append(request)
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason, request.text = found

    def find(self, request: Request) -> tuple[str, str] | None:
        """The stop text in what the request has generated since the last call, and its whole text
        up to there; None if there is none.

        Of several, the first in the request's own order. Nothing is found before `min_tokens`.
        """
        params, state = request.sampling_params, self._states[request.request_id]
        tokens = request.text_token_ids
        text_before = len(state.detokenizer.text)
        for count in range(state.num_seen + 1, len(tokens) + 1):
            state.detokenizer.update(tokens[:count])
            if count <= params.min_tokens:
                text_before = len(state.detokenizer.text)
        state.num_seen = len(tokens)
        text = state.detokenizer.text
        if text_before == len(text) or request.num_output_tokens <= params.min_tokens:
            return None
        for stop in params.stop:
            at = text.find(stop, max(0, text_before + 1 - len(stop)))
            if at >= 0:
                return stop, text[: at + len(stop) * params.include_stop_str_in_output]
        return None

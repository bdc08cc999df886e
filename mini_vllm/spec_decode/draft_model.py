"""Drafts from a smaller model that reads the same blocks of a cache of its own.

Promises: one ragged pass over what each request has gained, then k - 1 passes of one token per
request; block tables are the target's, so a prefix hit is one for the drafter too, and nothing is
ever freed twice. Mirrors `vllm/v1/spec_decode/llm_base_proposer.py:427`
`SpecDecodeBaseProposer.propose` as `vllm/v1/spec_decode/draft_model.py:17` `DraftModelProposer`
uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mini_vllm.model_runner import ModelRunner
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.sampler import softmax


class DraftModelProposer:
    """A model runner of its own, fed after the target's."""

    def __init__(
        self, runner: ModelRunner, num_speculative_tokens: int, rng: np.random.Generator | None
    ) -> None:
        """An idle drafter.

        Args:
            runner: holds the draft model and a KV cache with as many blocks as the target's.
            num_speculative_tokens: k.
            rng: draws the drafts of requests with a temperature; None: every draft is the argmax.
        """
        self.runner = runner
        self.k = num_speculative_tokens
        self.rng = rng
        self.laws: dict[str, np.ndarray] = {}
        """[k, vocab_size] per request: what its last drafts were drawn from."""
        self.num_passes = 0
        """Forward passes of the draft model so far."""
        self._written: dict[str, tuple[int, list[int]]] = {}
        # Per request how many of its tokens have K and V in the drafter's cache, and the drafts
        # whose K and V follow, which may have been rejected since.

    def propose(
        self, plan: SchedulerOutput, contexts: Mapping[str, Sequence[int]]
    ) -> dict[str, list[int]]:
        """k drafts for each of `contexts`, in the step whose plan is given.

        Args:
            plan: the bound plan that the target has just run.
            contexts: all tokens of each request that sampled, the new ones included.

        Returns:
            k token ids per request. Requests mid-prefill only have their chunk read.
        """
        admitted = {*plan.scheduled_new_req_ids, *plan.scheduled_resumed_req_ids}
        step = SchedulerOutput()
        tokens: dict[str, Sequence[int]] = {}
        for request in plan.scheduled_requests:
            request_id = request.request_id
            start = plan.num_computed_tokens[request_id]
            known = contexts.get(request_id)
            if known is None:  # mid-prefill; or it ended, and others may find its blocks
                known = request.all_token_ids[: start + plan.num_scheduled_tokens[request_id]]
            if request_id in admitted or request_id not in self._written:
                self._written[request_id] = start, []
            written = min(self._num_written(request_id, known), len(known) - 1)
            enter(step, request, written, len(known) - written)
            tokens[request_id] = known
        logits = self._run(step, tokens, plan)
        for request_id, known in tokens.items():
            self._written[request_id] = min(len(known), self._room(request_id, plan)), []
        rows = [i for i, r in enumerate(step.scheduled_requests) if r.request_id in contexts]
        requests = [step.scheduled_requests[i] for i in rows]
        return self._continue(requests, logits[rows], dict(tokens), plan) if rows else {}

    def remove_request(self, request_id: str) -> None:
        """The request is gone."""
        self._written.pop(request_id, None)
        self.laws.pop(request_id, None)

    def _continue(
        self,
        requests: Sequence[Request],
        logits: np.ndarray,
        tokens: dict[str, Sequence[int]],
        plan: SchedulerOutput,
    ) -> dict[str, list[int]]:
        """Draft from the first logits [num_requests, vocab_size], then k - 1 times one token."""
        drafts: dict[str, list[int]] = {request.request_id: [] for request in requests}
        laws: list[np.ndarray] = []
        for position in range(self.k):
            chosen, law = choose_drafts(requests, logits, self.rng)
            laws += [law] if law is not None else []
            for request_id, token in zip(drafts, chosen, strict=True):
                drafts[request_id].append(token)
            if position == self.k - 1:
                break
            step = SchedulerOutput()
            for request, token in zip(requests, chosen, strict=True):
                request_id = request.request_id
                enter(step, request, len(tokens[request_id]), 1)
                tokens[request_id] = [*tokens[request_id], token]
                self._note_written(request_id, token, plan)
            logits = self._run(step, tokens, plan)
        if laws:
            stacked = np.stack(laws, axis=1)  # [num_requests, k, vocab_size]
            self.laws |= dict(zip(drafts, stacked, strict=True))
        return drafts

    def _note_written(self, request_id: str, token: int, plan: SchedulerOutput) -> None:
        """Remember a draft whose K and V have a slot."""
        num_known, drafts = self._written[request_id]
        if num_known + len(drafts) < self._room(request_id, plan):
            drafts.append(token)

    def _room(self, request_id: str, plan: SchedulerOutput) -> int:
        """Positions that have a slot; an admission got none ahead of its tokens."""
        return len(plan.block_ids[request_id]) * self.runner.block_size

    def _num_written(self, request_id: str, known: Sequence[int]) -> int:
        """How many of the `known` tokens have their K and V in the drafter's cache."""
        count, drafts = self._written[request_id]
        for draft in drafts:
            if count >= len(known) or known[count] != draft:
                break
            count += 1
        return count

    def _run(
        self, step: SchedulerOutput, tokens: Mapping[str, Sequence[int]], plan: SchedulerOutput
    ) -> np.ndarray:
        """One forward pass: logits [num_requests, vocab_size] of each request's last token."""
        pad_tables(step, plan, self.runner.block_size)
        self.runner.in_flight = {
            request.request_id: tokens[request.request_id][request.num_tokens :]
            for request in step.scheduled_requests
        }
        self.num_passes += 1
        return self.runner.execute(step)


def choose_drafts(
    requests: Sequence[Request], logits: np.ndarray, rng: np.random.Generator | None
) -> tuple[list[int], np.ndarray | None]:
    """One token per row of logits [num_requests, vocab_size], and the laws they were drawn from.

    Without `rng` every token is the argmax, and there are no laws.
    """
    greedy = logits.argmax(axis=1).tolist()
    if rng is None:
        return greedy, None
    laws = np.empty(logits.shape)
    for row, request in enumerate(requests):
        temperature = request.sampling_params.temperature
        laws[row] = softmax(logits[row] / (temperature or 1.0))
        if temperature > 0.0:
            greedy[row] = int((laws[row] / rng.exponential(size=len(laws[row]))).argmax())
    return greedy, laws


def enter(step: SchedulerOutput, request: Request, start: int, count: int) -> None:
    """Have the pass compute `count` tokens of the request from position `start` on."""
    step.scheduled_requests.append(request)
    step.num_computed_tokens[request.request_id] = start
    step.num_scheduled_tokens[request.request_id] = count


def pad_tables(step: SchedulerOutput, plan: SchedulerOutput, block_size: int) -> None:
    """Give the pass the block tables of the plan. Beyond a table, a draft's K and V go to
    the null block, where none are kept."""
    for request_id, start in step.num_computed_tokens.items():
        table = plan.block_ids[request_id]
        missing = -(-(start + step.num_scheduled_tokens[request_id]) // block_size) - len(table)
        step.block_ids[request_id] = [*table, *[0] * missing] if missing > 0 else table

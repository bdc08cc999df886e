"""What an engine holds when it speculates: a drafter, a verifier, and the counts.

Promises: output is that of plain decoding, greedy token for token and sampled in law; drafts never
outlive what they were made for. As upstream, a stop text ends a request after the step in which it
appears, so its token ids may run on to the end of the accepted drafts, while its text stops where
plain decoding's does. Mirrors the part that `vllm/v1/worker/gpu_model_runner.py:4750`
`GPUModelRunner.propose_draft_token_ids` and `vllm/v1/sample/rejection_sampler.py:37`
`RejectionSampler` play in the real engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mini_vllm.attention import paged_attention
from mini_vllm.config import EngineConfig, SchedulerConfig
from mini_vllm.feature import Feature, RowMask, SampledTokenIds
from mini_vllm.model_runner import ModelRunner
from mini_vllm.models.registry import LoadedModel, load_model
from mini_vllm.models.transformer import Linear, Transformer
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.sampler import probabilities
from mini_vllm.spec_decode.config import ASYNC_METHODS, WITH_WEIGHTS, SpeculativeConfig
from mini_vllm.spec_decode.draft_model import DraftModelProposer
from mini_vllm.spec_decode.metrics import SpecDecodingStats
from mini_vllm.spec_decode.mtp import HiddenStatesModel, MtpProposer, load_module
from mini_vllm.spec_decode.ngram import Lookup, NgramProposer, ngram_propose
from mini_vllm.spec_decode.rejection import RejectionSampler

if TYPE_CHECKING:
    from mini_vllm.features import EngineSetup
    from mini_vllm.scheduler import Scheduler

NOT_WITH_MTP = ("enable_lora",)
"""Arguments whose output beside the module's drafts was not compared. Ranks, pictures and
connectors refuse every `speculative_config`."""


class Verifier(Protocol):
    """Functions on laws [vocab_size] that a learner may write; `rejection` has the engine's own."""

    def accept_prob(self, p_x: float, q_x: float) -> float: ...
    def residual_distribution(self, p: np.ndarray, q: np.ndarray) -> np.ndarray: ...
    def speculative_token(
        self, p: np.ndarray, q: np.ndarray, rng: np.random.Generator
    ) -> tuple[int, bool]: ...


class Speculator(Feature):
    """Drafts after each step, checks them in the next."""

    name = "spec_decode"

    def __init__(
        self,
        config: SpeculativeConfig,
        proposer: NgramProposer | DraftModelProposer | MtpProposer,
        max_model_len: int | None,
        vocab_size: int,
        verifier: Verifier | None = None,
        masks: Sequence[RowMask] = (),
        is_async: bool = False,
    ) -> None:
        self.config = config
        self.k = config.num_speculative_tokens
        self.proposer = proposer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.verifier = verifier
        self.stats = SpecDecodingStats(self.k)
        self.masks = masks
        self.is_async = is_async
        """Drafts are made before the scheduler knows the tokens they follow."""
        self._before: tuple[SchedulerOutput, SampledTokenIds] | None = None  # in flight
        self._drafts: dict[str, list[int]] = {}
        self._laws: dict[str, np.ndarray] = getattr(proposer, "laws", {})

    # ------------------------------------------------------------------ moments

    def after_schedule(self, plan: SchedulerOutput) -> None:
        """With a plan in flight: take back what it rejects. Put drafts in for placeholders."""
        if self._before is not None:
            plan.subtract_rejected(*self._before)
        self._fill_placeholders(plan)

    def after_execute(
        self,
        plan: SchedulerOutput,
        sampled: SampledTokenIds,
        in_flight: Mapping[str, Sequence[int]],
    ) -> None:
        """Draft now, where the scheduler is updated a step later."""
        if self.is_async:
            self._before = plan, sampled
            self.propose(plan, sampled, in_flight)

    def after_update(
        self,
        plan: SchedulerOutput,
        sampled: SampledTokenIds,
        finished: list[Request],
        scheduler: Scheduler,
    ) -> None:
        """Count; draft now, where the scheduler plans with the drafts themselves."""
        self.observe(plan, sampled, finished)
        if not self.is_async:
            scheduler.update_draft_token_ids(self.propose(plan, sampled))

    def requeue_request(self, request: Request) -> None:
        """Its drafts followed what may be gone."""
        self.remove_request(request.request_id)

    def restart(self) -> None:
        """Nothing is in flight."""
        self._before = None

    # ------------------------------------------------------------------ what they do

    def _fill_placeholders(self, plan: SchedulerOutput) -> None:
        """Put the drafts into a plan made before they were known, which has -1 in their place.

        Where fewer were found than were planned, token 0 stands in: a guess like any other, drawn
        from no law. A release that pads who is admitted plans them where there are none.
        """
        for request_id, planned in plan.spec_token_ids.items():
            if planned[0] == -1:
                if request_id not in self._drafts:
                    self._laws.pop(request_id, None)
                found = [*self._drafts.get(request_id, ()), *[0] * len(planned)]
                plan.spec_token_ids[request_id] = found[: len(planned)]

    def propose(
        self,
        plan: SchedulerOutput,
        sampled: Mapping[str, Sequence[int]],
        in_flight: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, list[int]]:
        """Drafts for the next step, at most k per live request that sampled.

        Where one sequence of the step ends within k of the drafter's length, all drafts are zeros
        and the drafter reads nothing: `vllm/v1/worker/gpu_model_runner.py:4320`
        `GPUModelRunner.sample_tokens`.

        Args:
            plan: the bound plan that has just run.
            sampled: its tokens.
            in_flight: the tokens of the plan before it, where the scheduler knows neither; None:
                it knows both.
        """
        contexts: dict[str, Sequence[int]] = {}
        for request in plan.scheduled_requests:
            request_id = request.request_id
            if request_id in sampled and not request.is_finished:
                contexts[request_id] = known = request.all_token_ids
                if in_flight is not None:
                    before = in_flight.get(request_id, ())
                    contexts[request_id] = [*known, *before, *sampled[request_id]]
        longest = max(
            (plan.num_computed_tokens[r] + n for r, n in plan.num_scheduled_tokens.items()),
            default=0,
        )
        if self.max_model_len is not None and longest + self.k > self.max_model_len:
            drafts = {request_id: [0] * self.k for request_id in contexts}
            for request_id in contexts:
                self._laws.pop(request_id, None)
        elif isinstance(self.proposer, NgramProposer):
            drafts = self.proposer.propose(contexts)
        else:
            drafts = self.proposer.propose(plan, contexts)
        for request in plan.scheduled_requests if self.masks else ():
            if (request_id := request.request_id) in drafts:
                unknown = contexts[request_id][request.num_tokens :]
                for mask in self.masks:
                    drafts[request_id] = mask.validate_drafts(request, unknown, drafts[request_id])
        self._drafts |= drafts
        return drafts

    def verify(
        self,
        request: Request,
        drafts: Sequence[int],
        row: Callable[[int], np.ndarray],
        sample: Callable[[np.ndarray], int],
        rng: np.random.Generator | None,
    ) -> Iterator[int]:
        """The tokens of one request's step, one by one: accepted drafts, and one more.

        Args:
            request: whose step it is.
            drafts: what was verified, in order.
            row: gives row i of the target's logits [vocab_size] after draft i - 1, processed; asked
                in order, and no further than drafts are accepted.
            sample: one token from such a row.
            rng: its generator; None at temperature 0.
        """
        if rng is None or not drafts:
            yield from self._verify_greedy(drafts, row, sample)
            return
        laws = self._laws.get(request.request_id)
        decide: RejectionSampler | None = None
        for index, draft in enumerate(drafts):
            p = probabilities(row(index), request.sampling_params)
            q = None if laws is None else laws[index]
            if self.verifier is not None:
                token, keep = self._verify_with_part(p, q, draft, rng)
            else:
                decide = decide or RejectionSampler(rng, len(drafts), len(p))
                token, keep = decide(index, p, q, draft)
            yield token
            if not keep:
                return
        yield sample(row(len(drafts)))

    def observe(
        self, plan: SchedulerOutput, sampled: SampledTokenIds, finished: Sequence[Request]
    ) -> None:
        """Count what the scheduler has taken; requests that were gone before do not count."""
        for request in plan.scheduled_requests if plan.spec_token_ids else ():
            drafts = plan.spec_token_ids.get(request.request_id)
            tokens = sampled.get(request.request_id)
            if drafts and tokens and (not request.is_finished or request in finished):
                self.stats.observe_draft(len(drafts), len(tokens) - 1)

    def remove_request(self, request_id: str) -> None:
        """The request is gone, or starts over."""
        self._drafts.pop(request_id, None)
        self.proposer.remove_request(request_id)

    @staticmethod
    def _verify_greedy(
        drafts: Sequence[int], row: Callable[[int], np.ndarray], sample: Callable[[np.ndarray], int]
    ) -> Iterator[int]:
        """The target's choices, up to the first that is not the draft."""
        yield (token := sample(row(0)))
        for index, draft in enumerate(drafts, 1):
            if token != draft:
                return
            yield (token := sample(row(index)))

    def _verify_with_part(
        self, p: np.ndarray, q: np.ndarray | None, draft: int, rng: np.random.Generator
    ) -> tuple[int, bool]:
        """The verifier part's verdict; without a law of its own the draft was certain."""
        verifier = self.verifier
        assert verifier is not None
        if q is None:
            one_hot = np.zeros(len(p))
            one_hot[draft] = 1.0
            token, kept = verifier.speculative_token(p, one_hot, rng)
        elif rng.random() < verifier.accept_prob(float(p[draft]), float(q[draft])):
            token, kept = draft, True
        else:
            residual = np.asarray(verifier.residual_distribution(p, q))
            token, kept = int(rng.choice(len(p), p=residual)), False
        if not isinstance(token, int | np.integer) or not 0 <= token < len(p):
            raise RuntimeError(f"verifier part: returned {token!r}, need a token id")
        return int(token), bool(kept)


def open_room(arguments: Mapping[str, Any], setup: EngineSetup) -> Speculator:
    """Speculation, as `speculative_config` says. Raises ValueError as `open_speculator`.

    Its parts: `drafter(context, n, k)`, at most k tokens that followed the context's last n tokens
    before; `verifier`, see `Verifier`; `pads_admissions`, whether the scheduler gives placeholders
    to who is admitted. Such a one may cut their tokens and not the placeholders, so that rows are
    read that were not computed (PR 54028, open): that threshold is refused.
    """
    loaded, of_room = setup.load(), setup.parts.of_room
    speculator, setup.config = open_speculator(
        arguments["speculative_config"], setup.config, loaded,
        of_room("spec_decode", "drafter"), of_room("spec_decode", "verifier"), setup.masks,
    )  # fmt: skip
    threshold = setup.config.scheduler.long_prefill_token_threshold
    if of_room("spec_decode", "pads_admissions", False) and 0 < threshold <= speculator.k:
        raise ValueError(
            f"{setup.parts.origin} with long_prefill_token_threshold={threshold}: need 0, or more "
            f"than num_speculative_tokens={speculator.k}, since a scheduler of this "
            "release gives a request that it admits placeholders for drafts"
        )
    if isinstance(speculator.proposer, MtpProposer):
        for name in NOT_WITH_MTP:
            if value := setup.arguments.get(name):
                raise ValueError(
                    f"{name}={value!r} with method='mtp': the two were not compared together; "
                    "need one of them"
                )
        setup.loaded = replace(loaded, model=speculator.proposer.target)
    setup.choose_tokens = speculator.verify
    return speculator


def open_speculator(
    given: Mapping[str, Any] | SpeculativeConfig,
    config: EngineConfig,
    target: LoadedModel,
    drafter: Callable[..., Sequence[int]] | None = None,
    verifier: Verifier | None = None,
    masks: Sequence[RowMask] = (),
) -> tuple[Speculator, EngineConfig]:
    """What `LLM(speculative_config=...)` asks for, and the engine's configuration with it.

    Args:
        given: vLLM's dict, see `SpeculativeConfig`.
        config: the engine's; its scheduler learns how many drafts and slots to plan for.
        target: the loaded target model.
        drafter: a part `(context, n, k) -> tokens` in place of the n-gram lookup.
        verifier: a part in place of the rejection sampler.
        masks: of the engine's rows; they say which drafts are possible.

    Raises:
        ValueError: see `SpeculativeConfig.of`; a draft model with another vocabulary; or a budget
            that leaves nothing beside the drafts.
    """
    spec = SpeculativeConfig.of(given)
    scheduler = config.scheduler
    if scheduler.async_scheduling and spec.method not in ASYNC_METHODS:
        need = ", ".join(ASYNC_METHODS)
        raise ValueError(f"method={spec.method!r}: async_scheduling=True needs one of {need}")
    if drafter is not None and spec.method in WITH_WEIGHTS:
        raise ValueError(f"method={spec.method!r}: need method='ngram' with a drafter part")
    proposer: NgramProposer | DraftModelProposer | MtpProposer
    longest = scheduler.max_model_len
    if spec.method == "draft_model":
        proposer, longest = _draft_model(spec, config, target)
        scheduler = _with_draft_slots(scheduler)
    elif spec.method == "mtp":
        proposer, longest = _mtp(spec, config, target)
    else:
        proposer = NgramProposer(_lookup(spec, scheduler.max_model_len, target, drafter))
    scheduler = replace(
        scheduler,
        num_speculative_tokens=spec.num_speculative_tokens,
        num_lookahead_tokens=spec.num_lookahead_tokens,
        use_eagle=spec.use_eagle,
    )
    speculator = Speculator(
        spec, proposer, longest, target.vocab_size, verifier, masks,
        scheduler.async_scheduling,
    )  # fmt: skip
    return speculator, replace(config, scheduler=scheduler)


def _with_draft_slots(scheduler: SchedulerConfig) -> SchedulerConfig:
    """A draft model takes one slot per sequence off the budget: `vllm/config/vllm.py:1547`
    `VllmConfig._set_max_num_scheduled_tokens`."""
    given = scheduler.max_num_batched_tokens
    num_seqs = scheduler.max_num_seqs or 0
    budget = given - num_seqs
    if budget < num_seqs:
        raise ValueError(
            f"max_num_batched_tokens={given}: with a draft model need at least "
            f"{2 * num_seqs}, twice max_num_seqs={num_seqs}, once for its slots"
        )
    return replace(scheduler, max_num_batched_tokens=budget)


def _draft_model(
    spec: SpeculativeConfig, config: EngineConfig, target: LoadedModel
) -> tuple[DraftModelProposer, int | None]:
    """Load the draft model and give it a cache of its own, with the target's blocks; its context
    comes with it."""
    assert spec.model is not None
    loaded = load_model(spec.model, None, config.dtype, config.seed, paged_attention, Linear)
    if loaded.kv_cache_manager is not None:
        raise ValueError(
            f"model={spec.model!r}: need a draft model with one kind of KV cache in all layers"
        )
    if loaded.vocab_size != target.vocab_size:
        raise ValueError(
            f"model={spec.model!r}: the draft model has {loaded.vocab_size} tokens, need the "
            f"target's {target.vocab_size}"
        )
    longest = spec.max_model_len_of(loaded.max_model_len, config.scheduler.max_model_len)
    cache = config.cache
    runner = ModelRunner(
        loaded.model, cache.num_blocks, cache.block_size, loaded.kv_specs, loaded.dtype
    )
    return DraftModelProposer(runner, spec.num_speculative_tokens, _rng(spec, config)), longest


def _mtp(
    spec: SpeculativeConfig, config: EngineConfig, target: LoadedModel
) -> tuple[MtpProposer, int | None]:
    """Load the module for the target's hidden states; its context comes with it."""
    assert isinstance(spec.model, str | Path)
    module, longest = load_module(spec.model, target.model)
    assert isinstance(target.model, Transformer)
    proposer = MtpProposer(
        HiddenStatesModel(target.model), module, config.cache.num_blocks, config.cache.block_size,
        spec.num_speculative_tokens, _rng(spec, config),
    )  # fmt: skip
    return proposer, spec.max_model_len_of(longest, config.scheduler.max_model_len)


def _rng(spec: SpeculativeConfig, config: EngineConfig) -> np.random.Generator | None:
    """What draws drafts, where they are drawn."""
    draws = spec.draft_sample_method == "probabilistic"
    return np.random.default_rng((config.seed, 1)) if draws else None


def _lookup(
    spec: SpeculativeConfig,
    max_model_len: int | None,
    target: LoadedModel,
    drafter: Callable[..., Sequence[int]] | None,
) -> Lookup:
    """The engine's own n-gram lookup, or a part's, which knows one length at a time."""
    k, (low, high) = spec.num_speculative_tokens, spec.lookup
    if drafter is None:
        return lambda context: ngram_propose(context, low, high, k, max_model_len)

    def lookup(context: np.ndarray) -> list[int]:
        room = k if max_model_len is None else min(k, max_model_len - len(context))
        tokens = context.tolist()
        found: list[int] = []
        for n in range(high, low - 1, -1):
            if room > 0 and not found:
                found = list(drafter(tokens, n, room))
        if len(found) > room or not all(
            isinstance(t, int | np.integer) and 0 <= t < target.vocab_size for t in found
        ):
            raise RuntimeError(
                f"drafter part {getattr(drafter, '__name__', drafter)}: returned {found!r}, need "
                f"at most {room} token ids from 0 to {target.vocab_size - 1}"
            )
        return [int(token) for token in found]

    return lookup

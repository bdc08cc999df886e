"""What an engine holds when it constrains outputs: the door, the pool, the masks, the gate.

Promises: a request's row is masked by what its own tokens, drafts and tokens in flight included,
leave possible (C3); a free request's row is not touched, nor that of one whose model still reasons;
one whose grammar cannot be made ends alone (C5).
Mirrors `vllm/v1/structured_output/__init__.py:36` `StructuredOutputManager`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mini_vllm.config import EngineConfig
from mini_vllm.feature import Feature, RequestInput
from mini_vllm.models.registry import LoadedModel
from mini_vllm.parts import EngineParts
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.sampling_params import SamplingParams
from mini_vllm.structured_output.compiler import Compilation, GrammarCompiler, GrammarParser
from mini_vllm.structured_output.gate import GrammarGate, structured_output_request_ids
from mini_vllm.structured_output.masks import allocate_bitmask
from mini_vllm.structured_output.params import StructuredOutputsConfig, StructuredOutputsParams
from mini_vllm.structured_output.reasoning import ReasoningParser
from mini_vllm.structured_output.request import Constraint, constrained, constraint_of
from mini_vllm.structured_output.vocabulary import Vocabulary

if TYPE_CHECKING:
    from mini_vllm.features import EngineSetup


class StructuredOutputManager(Feature):
    """Opened by the first request with `structured_outputs`, or by `structured_outputs_config`."""

    name = "structured_outputs"
    gate: Any

    def __init__(
        self,
        config: Mapping[str, Any] | StructuredOutputsConfig,
        engine: EngineConfig,
        loaded: LoadedModel,
        parts: EngineParts,
    ) -> None:
        """Nothing is compiled yet.

        Raises:
            ValueError: see `StructuredOutputsConfig.of`.
        """
        self.config = StructuredOutputsConfig.of(config)
        self.gate = parts.of_room("structured_output", "wait_gate", GrammarGate)()
        token_masks = parts.of_room("structured_output", "token_masks")
        self.num_drafts = engine.scheduler.num_speculative_tokens
        self.vocab_size = loaded.vocab_size
        self._make_request = parts.request
        self.parser = GrammarParser(refuse_as_xgrammar=self.config.backend == "xgrammar")
        self.compiler = GrammarCompiler(
            lambda: Vocabulary.of(
                loaded.tokenizer, loaded.eos_token_ids, loaded.vocab_size, token_masks
            )
        )
        self.mask = self
        self.reasoner: ReasoningParser | None = None
        """What holds constraints back; None: nothing does."""
        if self.config.reasoning_parser:
            parser = ReasoningParser.of(self.config.reasoning_parser, loaded.tokenizer)
            self.reasoner = None if self.config.enable_in_reasoning else parser
        self._live: dict[str, tuple[Request, Compilation]] = {}

    # ------------------------------------------------------------------ at the door

    def prepare(self, params: SamplingParams) -> None:
        """Parse its constraint, so that the door finds it parsed."""
        if isinstance(params.structured_outputs, StructuredOutputsParams):
            self.parser.parse(params.structured_outputs.key(self.config))

    def process_input(self, inputs: RequestInput) -> None:
        """Its request waits for its grammar."""
        if inputs.params.structured_outputs is not None:
            inputs.make_request = self.request_factory(inputs.params.structured_outputs)

    def request_factory(self, params: Any) -> Callable[..., Request]:
        """What makes the requests of one constraint.

        Raises:
            ValueError: not `StructuredOutputsParams`, or a constraint that cannot be served, as
                `vllm/sampling_params.py:794` `SamplingParams._validate_structured_outputs` has it.
        """
        if not isinstance(params, StructuredOutputsParams):
            raise ValueError(f"structured_outputs={params!r}: need StructuredOutputsParams")
        key = params.key(self.config)
        grammar = self.parser.parse(key)
        kind = constrained(self._make_request)

        def make(*arguments: Any, **named: Any) -> Request:
            request: Any = kind(*arguments, **named)
            request.constraint = Constraint(key, grammar, self.reasoner, self.num_drafts > 0)
            request.waits_for = "grammar"
            return request

        return make

    # ------------------------------------------------------------------ as a mask of rows

    def add_request(self, request: Request) -> None:
        """Start to compile, when a request is queued."""
        constraint: Constraint | None = constraint_of(request)
        if constraint is not None:
            compilation = self.compiler.submit(constraint.key, constraint.grammar)
            constraint.compilation = compilation
            self._live[request.request_id] = request, compilation

    def remove_request(self, request_id: str) -> None:
        """The request is gone, and its grammar if it is not ready and no other request wants it."""
        if request_id in self._live:
            self.compiler.release(self._live.pop(request_id)[1])

    def failures(self) -> dict[str, str]:
        """Why requests that wait will never run. Upstream raises out of `schedule`: there the
        engine dies of one grammar (`vllm/v1/structured_output/request.py:48`
        `StructuredOutputRequest._check_grammar_completion` lets the exception through)."""
        waiting = (r for r, _ in self._live.values() if r.waits_for is not None)
        return {r.request_id: e for r in waiting if (e := constraint_of(r).error)}

    def before_execute(self, plan: SchedulerOutput) -> Mapping[str, str]:
        """With a reasoning parser: where each request's step begins."""
        if self.reasoner is not None:
            for request in plan.scheduled_requests:
                if (constraint := constraint_of(request)) is not None:
                    constraint.begin_step(request, _step_start(plan, request.request_id))
        return {}

    def __call__(self, request: Request, row: np.ndarray) -> np.ndarray:
        """The row [vocab_size] with what the grammar forbids at -inf."""
        constraint = constraint_of(request)
        if constraint is None or constraint.grammar_start(request) is None:
            return row
        if not constraint.catch_up(request):
            return np.full_like(row, -np.inf)
        forbidden = constraint.matcher.forbidden()
        if forbidden is None:
            return row
        row = row.copy()
        row[forbidden] = -np.inf
        return row

    # ------------------------------------------------------------------ drafts, and the whole batch

    def validate_drafts(
        self, request: Request, in_flight: Sequence[int], drafts: Sequence[int]
    ) -> list[int]:
        """The drafts that the grammar could take after the request's tokens and those in flight.

        As `vllm/v1/core/sched/scheduler.py:1691` `Scheduler.update_draft_token_ids`.
        """
        constraint = constraint_of(request)
        if constraint is None:
            return list(drafts)
        start = constraint.grammar_start(request, in_flight)
        if start is None:
            return list(drafts)
        if not constraint.catch_up(request, start):
            return []
        in_flight = in_flight[max(start - request.num_tokens, 0) :]
        matcher, before = constraint.matcher, constraint.matcher.num_accepted
        accepted = matcher.accept_tokens(request.request_id, in_flight)
        valid = matcher.validate_tokens(drafts) if accepted else []
        if self.config.jump_ahead and accepted:
            valid = matcher.forced_tokens(self.num_drafts) or valid
        matcher.rollback(matcher.num_accepted - before)
        return valid

    def grammar_bitmask(self, plan: SchedulerOutput) -> tuple[list[str], np.ndarray]:
        """Whose rows are masked and their masks, a row per draft and one more for each of them.

        What the real scheduler hands to the runner
        (`vllm/v1/structured_output/__init__.py:204` `StructuredOutputManager.grammar_bitmask`); the
        mini engine asks row by row instead, while a request holds the tokens before the row.

        Args:
            plan: bound and not yet updated.

        Returns:
            The request ids in scheduling order, and [rows, words] int32.
        """
        request_ids = structured_output_request_ids(self.gate, plan)
        requests = {request.request_id: request for request in plan.scheduled_requests}
        num_rows = sum(1 + len(plan.spec_token_ids.get(r, ())) for r in request_ids)
        bitmask, index = allocate_bitmask(num_rows, self.vocab_size), 0
        for request_id in request_ids:
            request = requests[request_id]
            constraint = constraint_of(request)
            constraint.begin_step(request, _step_start(plan, request_id))
            constraint.catch_up(request)
            matcher, num_taken = constraint.matcher, 0
            alive = constraint.grammar_start(request) is not None
            for token in (*plan.spec_token_ids.get(request_id, ()), None):
                if alive:
                    matcher.fill_bitmask(bitmask, index)
                index += 1
                alive = alive and token is not None and matcher.accept_tokens(request_id, [token])
                num_taken += alive
            matcher.rollback(num_taken)
        return request_ids, bitmask


def _step_start(plan: SchedulerOutput, request_id: str) -> int:
    """How many tokens stand before a request's first row that samples."""
    known = plan.num_computed_tokens[request_id] + plan.num_scheduled_tokens[request_id]
    return known - len(plan.spec_token_ids.get(request_id, ()))


def _refuse_beside_reasoning(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError: an argument beside which the reasoning gate was not compared."""
    for name, value in arguments.items():
        if name == "speculative_config":
            method = value.get("method") if isinstance(value, Mapping) else None
            if method not in ("ngram", "ngram_gpu"):
                raise ValueError(
                    f"reasoning_parser with speculative_config method {method!r}: need ngram or "
                    "ngram_gpu"
                )
        elif name != "structured_outputs_config" and (value is True or value not in (False, 1)):
            raise ValueError(f"reasoning_parser with {name}={value!r}: need {name} left out")


def open_room(arguments: Mapping[str, Any], setup: EngineSetup) -> StructuredOutputManager:
    """Constraints; the first request with one opens them too. Raises ValueError as the manager.

    Its parts: `token_masks(table, state, texts)`, the ids of the tokens whose text lives in a state
    of a grammar; `wait_gate()`, a gate with `rows`, which holds requests back until their grammar
    is compiled.
    """
    config = arguments.get("structured_outputs_config", {})
    if StructuredOutputsConfig.of(config).reasoning_parser:
        _refuse_beside_reasoning(setup.arguments)
    return StructuredOutputManager(config, setup.config, setup.load(), setup.parts)

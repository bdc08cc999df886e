"""Record where the real manager begins to constrain a model that reasons first.

    course engine run -m conformance.record grammar_reasoning

The scheduler (synchronous or asynchronous, with drafts or without, in a cache that may be small),
the manager with its reasoning parser and the grammars are real. The loop around them takes the
calls of `vllm/v1/engine/core.py:428` `EngineCore.step` and, with two batches in flight, of
`vllm/v1/engine/core.py:469` `EngineCore.step_with_batch_queue`. A seed draws what the model says:
any tokens while a row is free, and tokens that the mask allows where there is one.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

ABOUT = (
    'One line per run: `"config"` (of the scheduler; `"parser"`, `"enable_in_reasoning"`), '
    '`"requests": [{request_id, prompt_token_ids, max_tokens, regex}]`, `"steps": '
    '[[num_scheduled_tokens, {id: drafts}]]` (-1: refused by the grammar), `"offered": {id: '
    '{number of outputs: [token]}}` (what the drafter said), `"outputs": {id: [token]}`, '
    '`"masks": {id: [hex]}` (under which each output was sampled; bit t is token t), `"read": '
    '{id: [token]}` (what the grammar has taken at the end), `"reasons": {id: reason}`.'
)
RUNS = 240
SIZE, EOS, START, END = 257, 256, 1, 2
REGEXES = ("(ab|cd)+", "[ab]{2,9}", "(yes|no|maybe)", "a[a-d]*b")
PARSERS = {
    "deepseek_r1": ("deepseek_r1_reasoning_parser", "DeepSeekR1ReasoningParser"),
    "ernie45": ("ernie45_reasoning_parser", "Ernie45ReasoningParser"),
    "seed_oss": ("seedoss_reasoning_parser", "SeedOSSReasoningParser"),
}


def cases() -> Iterator[dict[str, Any]]:
    """The runs; the same every time."""
    from conformance.features.structured_output import peers

    logging.disable(logging.ERROR)
    peer = peers.XGrammar()
    for seed in range(RUNS):
        yield Run(peer, random.Random(f"reasoning {seed}"), seed).recorded()


def config_of(rng: random.Random, seed: int) -> dict[str, Any]:
    """A scheduler's config; every fourth seed has the same kind of steps."""
    is_async, k = bool(seed & 1), (0, 3)[seed >> 1 & 1]
    config = {
        "parser": list(PARSERS)[seed % 3],
        "enable_in_reasoning": rng.random() < 0.1,
        "async_scheduling": is_async,
        "num_blocks": rng.choice((12, 16, 20, 64)),
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": rng.choice((9, 24, 64)),
        "max_model_len": 512,
        "long_prefill_token_threshold": 0,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": rng.random() < 0.5,
        "policy": "fcfs",
    }
    if k:
        method = "ngram_gpu" if is_async else "ngram"
        config["speculative"] = {"method": method, "num_speculative_tokens": k}
    return config


def _requests(rng: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "request_id": f"r{number}",
            "prompt_token_ids": [
                110 + number,
                *rng.choices((97, 98, 32, START, END), (5, 5, 5, 1, 1), k=rng.randint(2, 10)),
            ],
            "max_tokens": rng.randint(6, 24),
            "regex": rng.choice(REGEXES),
        }
        for number in range(rng.randint(1, 4))
    ]


class Run:
    """One run of the real scheduler; what it draws and which grammars it has can be overridden."""

    def __init__(self, peer: Any, rng: random.Random, seed: int) -> None:
        from conformance import real

        self.rng, self.real, self.peer = rng, real, peer
        self.config, self.requests = self.drawn(seed)
        self.k = self.config.get("speculative", {}).get("num_speculative_tokens", 0)
        self.acceptance = rng.choice((0.3, 0.7, 0.95))
        self.scheduler = real.make_scheduler(self.config, self.config["async_scheduling"])
        self.open_manager()
        self.live: dict[str, Any] = {}
        for asked in self.requests:
            add = {"arrival_time": 0.0, "priority": 0, "ignore_eos": False, "grammar": True}
            request = real.make_request({**asked, **add}, self.config["block_size"], EOS)
            self.constrain(request, asked)
            self.live[asked["request_id"]] = request
            self.scheduler.add_request(request)
        ids = list(self.live)
        self.steps: list[Any] = []
        self.offered: dict[str, dict[str, list[int]]] = {each: {} for each in ids}
        self.masks: dict[str, list[str]] = {each: [] for each in ids}

    def drawn(self, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The scheduler's config, and the requests."""
        return config_of(self.rng, seed), _requests(self.rng)

    def open_manager(self) -> None:
        """Give the real manager a backend that makes rows of bits, and its parser if it has one."""
        from importlib import import_module

        import xgrammar

        manager = self.scheduler.structured_output_manager
        manager.backend = SimpleNamespace(
            allocate_token_bitmask=lambda rows: xgrammar.allocate_token_bitmask(rows, SIZE)
        )
        if "parser" not in self.config:
            return
        module, name = PARSERS[self.config["parser"]]
        kind = getattr(import_module(f"vllm.reasoning.{module}"), name)
        around = "seed:think" if self.config["parser"] == "seed_oss" else "think"
        vocab = {f"<{around}>": START, f"</{around}>": END}
        manager.tokenizer = SimpleNamespace(get_vocab=lambda: vocab)
        manager.reasoner_cls = kind
        manager.enable_in_reasoning = self.config["enable_in_reasoning"]

    def matcher(self, asked: dict[str, Any]) -> Any:
        """xgrammar's matcher of a request."""
        return self.peer.matcher("regex", asked["regex"])

    def constrain(self, request: Any, asked: dict[str, Any]) -> None:
        """Give a real request its grammar."""
        request.structured_output_request.grammar = self._grammar(asked)

    def _grammar(self, asked: dict[str, Any]) -> Any:
        """The real grammar, which says what it has taken."""
        from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

        class Grammar(XgrammarGrammar):
            def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
                before = self.num_processed_tokens
                taken = super().accept_tokens(request_id, tokens)
                self.read += tokens[: self.num_processed_tokens - before]
                return bool(taken)

            def rollback(self, num_tokens: int) -> None:
                super().rollback(num_tokens)
                del self.read[len(self.read) - num_tokens :]

        grammar = Grammar(vocab_size=SIZE, matcher=self.matcher(asked), ctx=None)
        grammar.read = []
        return grammar

    def recorded(self) -> dict[str, Any]:
        """All steps."""
        step = self._step_ahead if self.config["async_scheduling"] else self._step
        self.queue: deque[Any] = deque()
        while self.scheduler.has_unfinished_requests() or self.queue:
            assert len(self.steps) < 500
            step()
        found = {r: list(q.output_token_ids) for r, q in self.live.items()}
        return {
            "config": self.config, "requests": self.requests, "steps": self.steps,
            "offered": self.offered, "outputs": found,
            "masks": {r: masks[: len(found[r])] for r, masks in self.masks.items()},
            "read": {r: q.structured_output_request.grammar.read for r, q in self.live.items()},
            "reasons": {r: str(q.get_finished_reason()) for r, q in self.live.items()},
        }  # fmt: skip

    def _plan(self) -> tuple[Any, list[str]]:
        plan = self.scheduler.schedule()
        samples = [r for r in plan.num_scheduled_tokens if not self.live[r].is_prefill_chunk]
        return plan, samples

    def _step(self) -> None:
        plan, samples = self._plan()
        self._note(plan)
        sampled = self._sample(plan, samples)
        self.scheduler.update_from_output(plan, self.real.runner_output(plan, sampled))
        if self.k:
            told = self.real.draft_token_ids(self._drafts(samples))
            self.scheduler.update_draft_token_ids(told)

    def _step_ahead(self) -> None:
        plan, samples = (None, []) if not self.scheduler.has_requests() else self._plan()
        waits = plan is not None and plan.pending_structured_output_tokens
        if plan is not None and plan.num_scheduled_tokens and not waits:
            assert not any(plan.scheduled_spec_decode_tokens.values())
            self._note(plan)
            self.queue.append((plan, self._sample(plan, samples), samples))
            if len(self.queue) < 2:
                return
        if not self.queue:
            return
        before, sampled, sampled_ids = self.queue.popleft()
        self.scheduler.update_from_output(before, self.real.runner_output(before, sampled))
        drafts = self._drafts(sampled_ids) if self.k else {}
        if waits:
            if self.k:
                told = self.real.draft_token_ids(drafts)
                self.scheduler.update_draft_token_ids_in_output(told, plan)
            self._note(plan)
            self.queue.append((plan, self._sample(plan, samples), samples))

    def _note(self, plan: Any) -> None:
        drafts = {r: list(found) for r, found in plan.scheduled_spec_decode_tokens.items() if found}
        self.steps.append([dict(plan.num_scheduled_tokens), drafts])

    def _sample(self, plan: Any, samples: list[str]) -> dict[str, list[int]]:
        """What the model says under the real rows."""
        output = self.scheduler.get_grammar_bitmask(plan)
        rows = iter(() if output is None else output.grammar_bitmask.copy())
        masks: dict[str, list[int]] = {}
        for request_id in () if output is None else output.structured_output_request_ids:
            count = 1 + len(plan.scheduled_spec_decode_tokens.get(request_id, ()))
            masks[request_id] = [_bits(next(rows)) for _ in range(count)]
        sampled: dict[str, list[int]] = {}
        for request_id in samples:
            drafts = plan.scheduled_spec_decode_tokens.get(request_id, ())
            said = sampled[request_id] = []
            if self.live[request_id].is_finished():  # by the step before
                said.append(EOS)
                continue
            for mask, draft in zip(masks[request_id], [*drafts, None], strict=True):
                said.append(self.say(mask, draft))
                self.masks[request_id].append(hex(mask)[2:])
                if said[-1] != draft:
                    break
        return sampled

    def say(self, mask: int, draft: int | None) -> int:
        """The draft, often, where it is possible; else a token that is."""
        possible = draft is not None and draft >= 0 and mask >> draft & 1
        if draft is not None and possible and self.rng.random() < self.acceptance:
            return draft
        if mask == (1 << SIZE) - 1:
            [token] = self.rng.choices((97, 98, 32, START, END, EOS), (8, 8, 8, 2, 4, 1))
            return token
        return self.possible(mask)

    def possible(self, mask: int) -> int:
        """A token that is allowed."""
        return self.rng.choice([token for token in range(SIZE) if mask >> token & 1])

    def is_read(self, request: Any) -> bool:
        """Whether the grammar reads what the request says next."""
        return bool(request.structured_output_request.reasoning_ended)

    def _drafts(self, samples: list[str]) -> dict[str, list[int]]:
        """What a drafter says after an update: thoughts, or what the grammar could take."""
        offered = {}
        for request_id in samples:
            request = self.live[request_id]
            if request.is_finished():
                continue
            drafts = self.rng.choices((97, 98, 32, END), (4, 4, 2, 3), k=self.k)
            grammar = request.structured_output_request.grammar
            if self.is_read(request) and self.rng.random() < 0.8:
                matcher = grammar.matcher.fork()
                for index in range(self.k):
                    mask = self.peer.mask(matcher)
                    drafts[index] = self.possible(mask)
                    if drafts[index] == EOS or not matcher.accept_token(drafts[index]):
                        break
            self.offered[request_id][str(request.num_output_tokens)] = drafts
            offered[request_id] = list(drafts)
        return offered


def _bits(row: Any) -> int:
    return int.from_bytes(row.tobytes(), "little") & ((1 << SIZE) - 1)

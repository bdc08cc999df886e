"""Why a request waited, was preempted, missed the cache or got so few tokens, step by step.

    log = explain(engine.scheduler)
    ...                                # steps
    for span in log.of("req-3"): print(span)

Promises: watching changes no decision; every reason is read where the decision is taken, and none
is guessed: lifting the limit that it names, and nothing else, changes what the request gets in that
step (a test does so). Works for every scheduler that decides as `Scheduler` does, so also for a
recording of a real server that is driven through it. Of several cache groups, blocks are those of
all groups, and of a prefix that is not hit it says how far every group has it, not which one lacks
it. A group of states is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mini_vllm.block_pool import KVCacheBlock, KVEvent
from mini_vllm.kv_cache_interface import MambaSpec
from mini_vllm.plan import ExternalTokens, SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.scheduler import Scheduler

WAITS = {
    "blocks": "too few free blocks for its whole sequence",
    "budget": "the step's budget of tokens is used up",
    "max_num_seqs": "as many requests run as may",
    "preemption": "a step that preempts admits no request",
    "behind": "a request in front of it cannot be admitted",
    "adapters": "every adapter slot of the step is taken",
    "grammar": "its grammar is not compiled",
    "whole prompt": "chunked prefill is off and its prompt does not fit into the budget",
    "gate": "a feature holds it back",
}
"""Why a request that could run gets nothing, by kind."""
GETS = {
    "all": "all that it lacks",
    "threshold": "long_prefill_token_threshold bounds its chunk",
    "budget": "the rest of the budget bounds its chunk",
    "length": "max_model_len bounds it",
    "gate": "a feature bounds it",
    "decode": "one token per step",
}
"""Why it gets as many tokens as it does."""


@dataclass(slots=True)
class Span:
    """One reason, over the steps in which it held without a break."""

    first: int
    last: int
    kind: str
    """A key of `WAITS` ("waits: "), of `GETS` ("gets: "), "preempted", "cache" or "ends"."""
    text: str
    key: tuple[Any, ...] = ()
    """What two steps must have in common to be one span."""
    varies: bool = False
    """Whether numbers in `text` are those of its first step alone."""

    def __str__(self) -> str:
        steps = f"step {self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"{steps:>12}  {self.text}{' (at first)' if self.varies else ''}"


@dataclass(slots=True)
class _Refused:
    """Blocks that were asked for and not there."""

    request_id: str
    needed: int
    free: int


@dataclass(slots=True)
class Log:
    """What was seen, by request."""

    spans: dict[str, list[Span]] = field(default_factory=dict)
    num_steps: int = 0

    def of(self, request_id: str) -> list[Span]:
        """The reasons of one request in order; empty for one that was never there."""
        return self.spans.get(request_id, [])

    def add(self, request_id: str, kind: str, text: str, key: tuple[Any, ...] = ()) -> None:
        """Note a reason of this step, or that the one before still holds."""
        spans = self.spans.setdefault(request_id, [])
        step = self.num_steps
        last = spans[-1] if spans else None
        if last is not None and (last.kind, last.key) == (kind, key) and last.last >= step - 1:
            last.last = step
            last.varies |= last.text != text
        else:
            spans.append(Span(step, step, kind, text, key))


def explain(scheduler: Scheduler) -> Log:
    """Have a scheduler say why, from its next step on.

    Raises:
        ValueError: a scheduler that does not decide by `Scheduler`'s methods, or a group of states.
    """
    if not isinstance(scheduler, Scheduler):
        raise ValueError(f"scheduler={type(scheduler).__name__}: need one derived from Scheduler")
    if any(isinstance(group.spec, MambaSpec) for group in getattr(scheduler.kv, "groups", ())):
        raise ValueError(
            "scheduler.kv: has a group of states; need groups of full attention and windows alone"
        )
    kind = type(scheduler)
    scheduler.__class__ = type(f"Explained{kind.__name__}", (_Explained, kind), {})
    explained: Any = scheduler
    explained.begin_explaining()
    log: Log = explained.log
    return log


class _Explained(Scheduler):
    """Notes at each turn what it turned on."""

    log: Log

    def begin_explaining(self) -> None:
        self.log = Log()
        self._removed: dict[int, tuple[int, str]] = {}
        self._gone: tuple[int, str] | None = None
        """Of the first block of a prompt that was not hit: when it was evicted, and for what."""
        self._allocating = ""
        self._refused: _Refused | None = None
        self._verdicts: dict[str, tuple[str, str, tuple[Any, ...]]] = {}
        """Of those admission looked at in this step and refused."""
        self._victims: dict[str, tuple[_Refused | None, int, int]] = {}
        self._before: Callable[[KVEvent], None] | None = getattr(
            self.kv.block_pool, "on_event", None
        )
        self.kv.block_pool.on_event = self._note_event

    # ------------------------------------------------------------------ the step

    def schedule(self) -> SchedulerOutput:
        """As the scheduler below, and why."""
        self._verdicts, self._victims, self._refused = {}, {}, None
        running = [(r, self._lacks(r)) for r in self.running]
        queued = [*self.skipped, *self.waiting]
        kv: Any = self.kv
        allocate = kv.allocate_slots

        def noting(request: Request, num_new: int, *args: Any, **named: Any) -> Any:
            self._allocating = request.request_id
            blocks = allocate(request, num_new, *args, **named)
            if blocks is None:
                hits = args[0] if args else named.get("new_computed_blocks") or ()
                slots = request.num_computed_tokens + num_new
                slots += named.get("num_lookahead_tokens", 0)
                needed = self._num_needed(request, slots, hits)
                self._refused = _Refused(request.request_id, needed, self._free_blocks())
            return blocks

        kv.allocate_slots = noting
        try:
            plan = super().schedule()
        finally:
            del kv.allocate_slots
        self._explain(plan, running, queued)
        self.log.num_steps += 1
        return plan

    def _lacks(self, request: Request) -> int:
        return self._num_wanted(request)

    def _explain(
        self, plan: SchedulerOutput, running: list[tuple[Request, int]], queued: list[Request]
    ) -> None:
        counts, left = plan.num_scheduled_tokens, self.config.max_num_batched_tokens
        wanted = {request.request_id: lacks for request, lacks in running}
        used: list[str] = []
        for request in plan.scheduled_requests:
            name, count = request.request_id, counts[request.request_id]
            if name in plan.num_cached_tokens:
                lacks = request.num_tokens - plan.num_cached_tokens[name]
            else:
                lacks = wanted.get(name, count)
            self._explain_count(request, count, lacks, left, used, name in plan.num_cached_tokens)
            left -= count
            used.append(name)
        for request, lacks in running:
            if request.request_id in self._victims:
                self._explain_victim(request)
            elif request.request_id not in counts:
                self._explain_idle(request, lacks, left, used, plan)
        for request in queued:
            name = request.request_id
            if name not in counts and name in self.requests:
                self.log.add(name, *self._why_waiting(request, plan, left, used))

    def _explain_count(
        self, request: Request, count: int, lacks: int, left: int, used: list[str], new: bool
    ) -> None:
        """Why a planned request gets `count` of the `lacks` tokens it lacks."""
        threshold = self.config.long_prefill_token_threshold
        name, of = request.request_id, f"{count} of {lacks} tokens"
        if count == lacks == 1 and not new:
            self.log.add(name, "gets: decode", "gets one token per step")
        elif count == lacks:
            text = f"gets all {count} tokens that it lacks"
            self.log.add(name, "gets: all", text, (count,))
        elif count == left:
            before = f", after {_names(used)}" if used else ""
            text = f"gets {of}: the step has {left} left of {self.config.max_num_batched_tokens}"
            self.log.add(name, "gets: budget", text + before, (self.log.num_steps,))
        elif threshold and count == threshold:
            text = f"gets {of}: long_prefill_token_threshold={threshold}"
            self.log.add(name, "gets: threshold", text, ())
        elif self.max_model_len is not None and lacks > count >= self._room(request, count):
            text = f"gets {of}: max_model_len={self.max_model_len}"
            self.log.add(name, "gets: length", text, ())
        else:
            self.log.add(name, "gets: gate", f"gets {of}: a feature bounds it", ())

    def _room(self, request: Request, count: int) -> int:
        computed = request.num_computed_tokens
        limit = self.max_model_len or 0
        return min(limit - 1 - computed, limit - 1 - (computed - count))

    def _explain_victim(self, request: Request) -> None:
        refused, computed, held = self._victims[request.request_id]
        lost = f"loses {_blocks(held)} with {computed} computed tokens"
        if refused is None:
            self.log.add(
                request.request_id, "preempted", f"is preempted by a reset of the cache and {lost}"
            )
            return
        whose = "it" if refused.request_id == request.request_id else refused.request_id
        rule = (
            "it came last" if self.config.policy == "fcfs" else "it is the least urgent that runs"
        )
        text = (
            f"is preempted and {lost}: {whose} needs {_blocks(refused.needed)} more and "
            f"{_are(refused.free)} free; {rule}"
        )
        key = (self.log.num_steps, refused.request_id)
        self.log.add(request.request_id, "preempted", text, key)

    def _explain_idle(
        self, request: Request, lacks: int, left: int, used: list[str], plan: SchedulerOutput
    ) -> None:
        """A running request that got nothing."""
        name = request.request_id
        if lacks <= 0:
            text = "gets nothing: what is in flight reaches its max_tokens"
            self.log.add(name, "waits: in flight", text, ())
        elif left <= 0:
            text = f"gets nothing: the budget of {self.config.max_num_batched_tokens} went to "
            self.log.add(name, "waits: budget", text + _names(used), (_names(used),))
        elif plan.preempted_req_ids:
            text = f"gets nothing: the step ended when {plan.preempted_req_ids[-1]} was preempted"
            self.log.add(name, "waits: preemption", text, (self.log.num_steps,))
        else:
            self.log.add(name, "waits: gate", "gets nothing: a feature holds it back", ())

    # ------------------------------------------------------------------ admission

    def _why_waiting(
        self, request: Request, plan: SchedulerOutput, left: int, used: list[str]
    ) -> tuple[str, str, tuple[Any, ...]]:
        """Of one that stays in a queue: kind, sentence, key."""
        if plan.preempted_req_ids:
            names = _names(plan.preempted_req_ids)
            text = f"waits: {names} lost their blocks in this step, which then admits nobody"
            if len(plan.preempted_req_ids) == 1:
                text = f"waits: {names} was preempted in this step, which then admits nobody"
            return "waits: preemption", text, (*plan.preempted_req_ids,)
        if verdict := self._verdicts.get(request.request_id):
            kind, text, key = verdict
            return f"waits: {kind}", f"waits: {text}", key
        stopped = [name for name, (kind, *_) in self._verdicts.items() if kind in _STOPS]
        if stopped:
            head = stopped[-1]
            kind, text, key = self._verdicts[head]
            return "waits: behind", f"waits behind {head}, where {text}", (head, kind, *key)
        if left <= 0:
            limit = self.config.max_num_batched_tokens
            text = f"waits: the budget of {limit} tokens went to {_names(used)}"
            return "waits: budget", text, (_names(used),)
        many = "1 request runs" if len(self.running) == 1 else f"{len(self.running)} requests run"
        return "waits: max_num_seqs", f"waits: {many}, max_num_seqs={self.max_num_seqs}", ()

    def _admit(self, request: Request, plan: SchedulerOutput, budget: int) -> int | None:
        self._refused = None
        name = request.request_id
        self._allocating = name
        num_new = super()._admit(request, plan, budget)
        if num_new:
            self._explain_cache(request, plan.num_cached_tokens[name])
        elif num_new is None and request.num_computed_tokens:
            self._verdicts[name] = "gate", "what it needs is being loaded", ()
        elif self._refused is not None:
            needed, free = self._refused.needed, self._refused.free
            text = f"its whole sequence needs {_blocks(needed)} and {_are(free)} free"
            self._verdicts[name] = "blocks", text + self._holders(), (needed,)
        else:
            self._verdicts[name] = self._held_back(request, plan, budget)
        return num_new

    def _find_computed(self, request: Request) -> Any:
        found = super()._find_computed(request)
        self._gone = None
        if hasattr(self.kv, "groups"):
            return found
        hits = len(found[0])  # before its own blocks enter the index
        missing = request.block_hashes[hits] if hits < len(request.block_hashes) else None
        self._gone = None if missing is None else self._removed.get(missing)
        return found

    def _held_back(
        self, request: Request, plan: SchedulerOutput, budget: int
    ) -> tuple[str, str, tuple[Any, ...]]:
        for gate in self.gates:
            if gate.admission(request, plan) == "admit":
                continue
            if request.waits_for == "grammar":
                return "grammar", WAITS["grammar"], ()
            if request.waits_for is not None:
                return "gate", f"it waits for its {request.waits_for}", ()
            slots = getattr(gate, "max_loras", None)
            if slots is not None:
                text = f"{slots} adapters are in this step, max_loras={slots}"
                return "adapters", text, ()
            return "gate", f"{type(gate).__name__} holds it back", ()
        if not self.config.enable_chunked_prefill:
            lacks = request.num_tokens
            text = f"chunked prefill is off, its {lacks} tokens exceed the {budget} left"
            return "whole prompt", text, ()
        return "gate", "a feature allows it no token", ()

    def _allocate(
        self, request: Request, num_new: int, hits: Sequence[KVCacheBlock],
        external: ExternalTokens, was_loaded: bool,
    ) -> bool:  # fmt: skip
        fits = super()._allocate(request, num_new, hits, external, was_loaded)
        if not fits and self._refused is None:
            needed = self._num_needed(request, request.num_tokens, hits, is_capped=True)
            self._refused = _Refused(request.request_id, needed, self._free_blocks())
        return fits

    def _holders(self) -> str:
        """Who holds the most blocks."""
        held = sorted(
            ((self._num_held(r.request_id), r.request_id) for r in self.running),
            key=lambda pair: -pair[0],
        )
        if not held:
            return ""
        most = ", ".join(f"{name} {number}" for number, name in held[:3])
        return f"; of the running ones hold {most}"

    # ------------------------------------------------------------------ preemption and cache

    def _preempt(self, request: Request) -> None:
        held = self._num_held(request.request_id)
        self._victims[request.request_id] = self._refused, request.num_computed_tokens, held
        super()._preempt(request)

    def _explain_cache(self, request: Request, num_cached: int) -> None:
        """What of a prompt was in the cache, and why not more."""
        size = getattr(self.kv, "alignment", self.kv.block_size)
        most, hits = (request.num_tokens - 1) // size, num_cached // size
        if not self.kv.enable_caching or request.sampling_params.skip_reading_prefix_cache:
            self.log.add(request.request_id, "cache: off", "the prefix cache is not read", ())
            return
        found = f"the cache has {num_cached} of {request.num_tokens} tokens"
        if most == 0:
            text = f"{found}: it has no full block before its last token (blocks of {size})"
            self.log.add(request.request_id, "cache: short", text, (self.log.num_steps,))
        elif hits >= most:
            self.log.add(
                request.request_id, "cache: all", f"{found}: all that may be hit, since the last "
                "token is always computed", (self.log.num_steps,),
            )  # fmt: skip
        elif self.kv.use_eagle and hits + 1 >= most:
            text = f"{found}: the drafter needs the last block hit computed again"
            self.log.add(request.request_id, "cache: drafter", text, (self.log.num_steps,))
        else:
            self._explain_miss(request, hits, found)

    def _explain_miss(self, request: Request, hits: int, found: str) -> None:
        step = self.log.num_steps
        if hasattr(self.kv, "groups"):
            text, kind = f"{found}: no longer prefix is cached in every group", "cache: groups"
        elif self._gone is not None:
            when, who = self._gone
            taken = f"evicted in step {when}" + (f", taken by {who}" if who else "")
            text, kind = f"{found}: block {hits} was there and was {taken}", "cache: evicted"
        elif hits == 0:
            text = f"{found}: no request computed its first block before"
            kind = "cache: new"
        else:
            text = f"{found}: it parts from every earlier prompt in block {hits}"
            kind = "cache: parts"
        self.log.add(request.request_id, kind, text, (step,))

    def _note_event(self, event: KVEvent) -> None:
        if event.kind == "stored":
            for block_hash in event.block_hashes:
                self._removed.pop(block_hash, None)
        elif event.kind == "removed":
            for block_hash in event.block_hashes:
                if self.kv.block_pool.get_cached_block(block_hash) is None:
                    self._removed[block_hash] = self.log.num_steps, self._allocating
        else:
            self._removed = {}
        if self._before is not None:
            self._before(event)

    def _release(self, request: Request) -> None:
        self.log.num_steps -= 1  # it ended with the step that was planned last
        self.log.add(request.request_id, "ends", f"ends: {request.finish_reason}")
        self.log.num_steps += 1
        super()._release(request)

    def _num_needed(
        self, request: Request, num_tokens: int, hits: Any, is_capped: bool = False
    ) -> int:
        """Free blocks that a refused request asked for, of all groups."""
        kv: Any = self.kv
        if not hasattr(kv, "groups"):
            return int(kv.get_num_blocks_to_allocate(request.request_id, num_tokens, hits))
        if kv.max_model_len is not None:
            num_tokens = min(num_tokens, kv.max_model_len)
        computed = request.num_computed_tokens
        return int(kv.num_needed(request.request_id, num_tokens, hits, computed, is_capped))

    def _num_held(self, request_id: str) -> int:
        """Blocks of a request in all groups, without those that a window has passed."""
        if not (groups := getattr(self.kv, "groups", ())):
            return len(self.kv.get_block_ids(request_id))
        return sum(not b.is_null for group in groups for b in group.tables.get(request_id, ()))

    def _free_blocks(self) -> int:
        number: int = self.kv.block_pool.get_num_free_blocks()
        return number


_STOPS = ("blocks", "whole prompt", "gate")
"""Verdicts that end the scan: who stands behind is not looked at."""


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _blocks(number: int) -> str:
    return "1 block" if number == 1 else f"{number} blocks"


def _are(number: int) -> str:
    return {0: "none is", 1: "1 is"}.get(number, f"{number} are")

"""Why a step of the engine decided as it did: each decision with its numbers, its rule, its source.

Every rule is a function: its docstring says the rule in a sentence and cites upstream, what it
returns says the same with the numbers of one decision. Promises: every number was noted when the
engine decided (`live_watch`), none is guessed; every decision of a step is there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course.site.live_watch import Call, Step
from course.truth import citations
from mini_vllm.block_pool import BlockPool
from mini_vllm.engine import LLMEngine
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.observe.trace import StepRecord
from mini_vllm.request import Request
from mini_vllm.scheduler import Scheduler

ROOT = Path(__file__).resolve().parents[2]
_HERE = Path(__file__)


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision about one request."""

    about: str
    name: str
    """Of the rule."""
    text: str
    rule: str
    numbers: dict[str, Any]
    vllm: dict[str, Any]
    """`path`, `first`, `last`, `symbol` of the pinned source."""
    mini: dict[str, Any]
    """`path`, `line`, `symbol`, `code` of ours."""


# ---------------------------------------------------------------------- the rules


def decodes(id: str) -> str:
    """A request whose tokens are all computed but the newest computes that one.

    `vllm/v1/core/sched/scheduler.py:385-389` `Scheduler.schedule`
    """
    return f"{id} computes 1 token: the one sampled last."


def catches_up(id: str, tokens: int, known: int) -> str:
    """A request computes every token it lacks, if threshold and budget allow.

    `vllm/v1/core/sched/scheduler.py:385-392` `Scheduler.schedule`
    """
    return f"{id} computes {_tokens(tokens)}, all it lacks of its {known}."


def is_held_to_the_threshold(id: str, tokens: int, lacks: int) -> str:
    """No request gets more tokens of one step than the threshold for long prompts.

    `vllm/v1/core/sched/scheduler.py:390-391` `Scheduler.schedule`
    """
    return f"{id} computes {_tokens(tokens)} of the {lacks} it lacks: the threshold is {tokens}."


def takes_the_rest(id: str, tokens: int, lacks: int, budget: int) -> str:
    """No request gets more tokens than the step's budget has left at its turn.

    `vllm/v1/core/sched/scheduler.py:392` `Scheduler.schedule`
    """
    return (
        f"{id} computes {_tokens(tokens)} of the {lacks} it lacks: no more is left of the "
        f"step's {budget}."
    )


def adopts(id: str, blocks: int, tokens: int, most: int) -> str:
    """Blocks of a known prefix are adopted, up to the first unknown one and never the last token.

    `vllm/v1/core/kv_cache_manager.py:219-224` `KVCacheManager.get_computed_blocks`
    """
    why = "its last token must be computed" if blocks == most else "the next is not there"
    return (
        f"{id} finds {_blocks(blocks)} of its prefix in the cache, {_tokens(tokens)} it need not "
        f"compute. It could have been {most}; {why}."
        if blocks < most
        else f"{id} finds {_blocks(blocks)} of its prefix in the cache, {_tokens(tokens)} it need "
        f"not compute. More than {most} it may not adopt, because {why}."
    )


def is_admitted(id: str, slot: int, slots: int, needed: int, known: int, free: int) -> str:
    """The head of the queue is admitted if a slot is free and its whole sequence fits.

    `vllm/v1/core/kv_cache_manager.py:346-360` `KVCacheManager.allocate_slots`
    """
    return (
        f"{id} is admitted to slot {slot} of {slots}: its {_tokens(known)} need {_blocks(needed)}, "
        f"{free} {_are(free)} free."
    )


def overwrites(id: str, blocks: list[int]) -> str:
    """A free block keeps its cached content until it is the first of the free queue and taken.

    `vllm/v1/core/block_pool.py:365` `BlockPool._maybe_evict_cached_block`
    """
    one = len(blocks) == 1
    names = f"block {blocks[0]}" if one else f"blocks {', '.join(map(str, blocks))}"
    return (
        f"{id} takes {names}, free but still cached: what {'it' if one else 'they'} held is gone."
    )


def waits_for_blocks(id: str, known: int, needed: int, revived: int, free: int) -> str:
    """A request is not admitted while its whole sequence does not fit into the free blocks.

    `vllm/v1/core/kv_cache_manager.py:359-360` `KVCacheManager.allocate_slots`
    """
    cached = f" ({revived} of them cached and free)" if revived else ""
    return (
        f"{id} waits: its {_tokens(known)} need {_blocks(needed)}{cached}, {free} {_are(free)} "
        "free."
    )


def waits_for_a_whole_chunk(id: str, chunk: int, left: int) -> str:
    """Without chunked prefill a request is admitted only if its tokens fit the rest of the budget.

    `vllm/v1/core/sched/scheduler.py:661-667` `Scheduler.schedule`
    """
    return (
        f"{id} waits: it wants {_tokens(chunk)} at once, {left} {_are(left)} left of this step, "
        "and chunked prefill is off."
    )


def waits_for_budget(id: str, budget: int) -> str:
    """No request is admitted once the step's budget is spent.

    `vllm/v1/core/sched/scheduler.py:548` `Scheduler.schedule`
    """
    return f"{id} waits: all {_tokens(budget)} of the step are handed out."


def waits_for_a_slot(id: str, slots: int) -> str:
    """No request is admitted while as many run as there are slots.

    `vllm/v1/core/sched/scheduler.py:549-550` `Scheduler.schedule`
    """
    taken = "the only slot is" if slots == 1 else f"all {slots} slots are"
    return f"{id} waits: {taken} taken."


def waits_after_preemption(id: str, victims: str) -> str:
    """A step that preempts a request admits none.

    `vllm/v1/core/sched/scheduler.py:545` `Scheduler.schedule`
    """
    return f"{id} waits: {victims} lost its blocks in this step, so nobody is admitted."


def waits_behind(id: str, head: str) -> str:
    """The first request that cannot be admitted ends the round; none overtakes it.

    `vllm/v1/core/sched/scheduler.py:733-740` `Scheduler.schedule`
    """
    return f"{id} waits behind {head}, which cannot be admitted."


def is_not_reached(id: str, victim: str) -> str:
    """A request that gives up its own blocks ends the round of the running ones.

    `vllm/v1/core/sched/scheduler.py:485-491` `Scheduler.schedule`
    """
    return f"{id} gets nothing: the round ended when {victim} gave up its own blocks."


def gives_way_as_the_last(id: str, to: str, needed: int, free: int, blocks: int) -> str:
    """Served in order, the request admitted last gives up its blocks when one needs more.

    `vllm/v1/core/sched/scheduler.py:481-484` `Scheduler.schedule`
    """
    return _gives_way(id, to, needed, free, blocks, "was admitted last")


def gives_way_as_least_urgent(id: str, to: str, needed: int, free: int, blocks: int) -> str:
    """Under priorities, the least urgent running request gives up its blocks when one needs more.

    `vllm/v1/core/sched/scheduler.py:456-461` `Scheduler.schedule`
    """
    return _gives_way(id, to, needed, free, blocks, "is the least urgent, of equals the latest")


def is_withdrawn(id: str, tokens: int) -> str:
    """A victim that this step had planned already is taken out, and its tokens go back.

    `vllm/v1/core/sched/scheduler.py:462-465` `Scheduler.schedule`
    """
    back = "it goes" if tokens == 1 else "they go"
    return f"{id} had {_tokens(tokens)} of this step already; {back} back to the budget."


def ends(id: str, outputs: int) -> str:
    """A request ends with the last of the tokens it may have, and its blocks are free.

    `vllm/v1/core/sched/utils.py:112-115` `check_stop`
    """
    return f"{id} ends: it has its {_tokens(outputs)} of output."


def _gives_way(id: str, to: str, needed: int, free: int, blocks: int, why: str) -> str:
    who = "it" if id == to else to
    return (
        f"{id} is preempted: {who} needs {_blocks(needed)}, {free} {_are(free)} free, and {id} "
        f"{why}. It gives up its {_blocks(blocks)} and starts over."
    )


def _tokens(count: int) -> str:
    return f"{count} {'token' if count == 1 else 'tokens'}"


def _blocks(count: int) -> str:
    return f"{count} {'block' if count == 1 else 'blocks'}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


Rule = Callable[..., str]

OURS: dict[Rule, tuple[Callable[..., Any], str]] = {
    decodes: (Scheduler._schedule_running, "request.num_tokens - request.num_computed_tokens"),
    catches_up: (Scheduler._schedule_running, "request.num_tokens - request.num_computed_tokens"),
    is_held_to_the_threshold: (Scheduler._clamp_new_tokens, "num_new_tokens = threshold"),
    takes_the_rest: (Scheduler._clamp_new_tokens, "else token_budget"),
    adopts: (KVCacheManager.get_computed_blocks, "request.num_tokens - 1"),
    is_admitted: (KVCacheManager.full_sequence_fits, "needed <="),
    overwrites: (BlockPool.get_new_blocks, "self.evict(block)"),
    waits_for_blocks: (KVCacheManager.full_sequence_fits, "needed <="),
    waits_for_a_whole_chunk: (Scheduler._num_admitted, "enable_chunked_prefill"),
    waits_for_budget: (Scheduler._schedule_waiting, "budget > 0"),
    waits_for_a_slot: (Scheduler._schedule_waiting, "self.max_num_seqs"),
    waits_after_preemption: (Scheduler.schedule, "not plan.preempted_req_ids"),
    waits_behind: (Scheduler._schedule_waiting, "if num_new == 0"),
    is_not_reached: (Scheduler._schedule_running, "self._after_own_preemption"),
    gives_way_as_the_last: (Scheduler._pop_victim, "self.running.pop()"),
    gives_way_as_least_urgent: (Scheduler._pop_victim, "max(self.running"),
    is_withdrawn: (Scheduler._withdraw, "plan.num_scheduled_tokens.pop"),
    ends: (Request.maybe_finish, "params.max_tokens"),
}
"""Where `mini_vllm` keeps each rule: the function, and a part of the line in it."""


@functools.cache
def sources(rule: Rule) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The rule's sentence, its place upstream, and its line here."""
    says = inspect.getdoc(rule) or ""
    (cited,), problems = citations.in_text(f'"""{says}"""', _HERE, ROOT)
    assert not problems
    function, part = OURS[rule]
    lines, first = inspect.getsourcelines(function)
    (at,) = (number for number, line in enumerate(lines) if part in line)
    path = Path(inspect.getfile(function)).resolve().relative_to(ROOT).as_posix()
    return (
        says.partition("\n")[0],
        {"path": cited.path, "first": cited.first, "last": cited.last, "symbol": cited.symbol},
        {
            "path": path,
            "line": first + at,
            "symbol": function.__qualname__,
            "code": lines[at].strip(),
        },
    )


# ---------------------------------------------------------------------- one step


def explain(
    step: Step, record: StepRecord, engine: LLMEngine, requests: dict[str, Request]
) -> list[Decision]:
    """Every decision of a step, in the order in which they fell."""
    walk = _Walk(step, record, engine, requests)
    for call in step.calls:
        walk.take(call)
    walk.close()
    return walk.decisions


class _Walk:
    """Follows the calls of one `schedule()`, with the budget that was left at each."""

    def __init__(
        self, step: Step, record: StepRecord, engine: LLMEngine, requests: dict[str, Request]
    ) -> None:
        self.step, self.record, self.requests = step, record, requests
        self.scheduler, self.cache = engine.config.scheduler, engine.config.cache
        self.budget = step.budget
        self.planned: dict[str, int] = {}
        self.admitted = 0
        self.refused: Call | None = None
        self.looked: Call | None = None
        self.decisions: list[Decision] = []
        self.own_victim = ""

    def decide(self, rule: Rule, about: str, **numbers: Any) -> None:
        """Note one decision."""
        sentence, vllm, mini = sources(rule)
        text = rule(about, **numbers)
        self.decisions.append(Decision(about, rule.__name__, text, sentence, numbers, vllm, mini))

    def take(self, call: Call) -> None:
        """The next call of the step."""
        if call.kind == "lookup":
            self.looked = call
        elif call.kind == "fits":
            self._whole_sequence(call)
        elif call.kind == "free":
            self._preempts(call)
        elif call.ok:
            self._schedules(call)
        else:
            self.refused = call

    def _whole_sequence(self, call: Call) -> None:
        if not call.ok:
            self.decide(
                waits_for_blocks, call.request_id, known=call.num_tokens, needed=call.needed,
                revived=call.revived, free=call.free,
            )  # fmt: skip
            return
        self.admitted += 1
        running = len(self.step.running) - len(self._admitted_ids()) + self.admitted
        self.decide(
            is_admitted, call.request_id, slot=running, slots=self.step.slots,
            needed=call.needed, known=call.num_tokens, free=call.free,
        )  # fmt: skip
        assert self.looked is not None
        if self.looked.blocks:
            found, size = len(self.looked.blocks), self.cache.block_size
            self.decide(
                adopts, call.request_id, blocks=found, tokens=found * size,
                most=(call.num_tokens - 1) // size,
            )  # fmt: skip

    def _admitted_ids(self) -> list[str]:
        return [*self.record.new, *self.record.resumed]

    def _schedules(self, call: Call) -> None:
        name, lacks = call.request_id, call.num_tokens - call.num_computed
        threshold = self.scheduler.long_prefill_token_threshold
        if call.num_new == lacks:
            request = self.requests[name]
            newest = lacks == 1 and call.num_tokens > request.num_prompt_tokens
            if newest:
                self.decide(decodes, name)
            else:
                self.decide(catches_up, name, tokens=lacks, known=call.num_tokens)
        elif call.num_new == threshold <= self.budget:
            self.decide(is_held_to_the_threshold, name, tokens=threshold, lacks=lacks)
        else:
            assert call.num_new == self.budget
            self.decide(
                takes_the_rest, name, tokens=call.num_new, lacks=lacks, budget=self.step.budget
            )
        if call.lost:
            self.decide(overwrites, name, blocks=list(call.lost))
        self.planned[name] = call.num_new
        self.budget -= call.num_new

    def _preempts(self, call: Call) -> None:
        """A call of `free` inside `schedule()` is a preemption, for the allocation refused last."""
        victim, refused = call.request_id, self.refused
        assert refused is not None
        last = self.scheduler.policy == "fcfs"
        self.decide(
            gives_way_as_the_last if last else gives_way_as_least_urgent, victim,
            to=refused.request_id, needed=refused.needed, free=refused.free,
            blocks=len(call.blocks),
        )  # fmt: skip
        if victim == refused.request_id:
            self.own_victim = victim
        if victim in self.planned:
            kept = {"gives_way_as_least_urgent"}
            self.decisions = [d for d in self.decisions if d.about != victim or d.name in kept]
            self.budget += (tokens := self.planned.pop(victim))
            self.decide(is_withdrawn, victim, tokens=tokens)

    def close(self) -> None:
        """Who got nothing, and who ended.

        Only a round cut short leaves a running request out: what is behind it in the list was
        admitted with what those before it had left, and they never want more than then.
        """
        for name in self.step.running:
            if name not in self.planned:
                assert self.own_victim
                self.decide(is_not_reached, name, victim=self.own_victim)
        for place, name in enumerate(self.step.waiting):
            self._waits(place, name)
        for name in self.record.finished:
            self.decide(ends, name, outputs=self.requests[name].num_output_tokens)

    def _waits(self, place: int, name: str) -> None:
        if self.record.preempted:
            victims = " and ".join(self.record.preempted)
            self.decide(waits_after_preemption, name, victims=victims)
        elif self.budget == 0:
            self.decide(waits_for_budget, name, budget=self.step.budget)
        elif len(self.step.running) == self.step.slots:
            self.decide(waits_for_a_slot, name, slots=self.step.slots)
        elif place:
            self.decide(waits_behind, name, head=self.step.waiting[0])
        elif not any(d.about == name and d.name == "waits_for_blocks" for d in self.decisions):
            assert self.looked is not None and self.looked.request_id == name
            chunk = self.looked.num_tokens - len(self.looked.blocks) * self.cache.block_size
            if 0 < self.scheduler.long_prefill_token_threshold < chunk:
                chunk = self.scheduler.long_prefill_token_threshold
            self.decide(waits_for_a_whole_chunk, name, chunk=chunk, left=self.budget)

"""What a scheduler can get wrong, and how often each occurs in the recordings of plain workloads.

What the recordings themselves do not show (evictions, refused allocations) is observed on the mini
engine while it replays them; that is sound because its decisions are the recorded ones, and a
workload that differs is an error. `python -m conformance.situations` counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from conformance import recording, replay
from conformance.features import Counted
from conformance.workloads import PROFILES
from mini_vllm import Scheduler, SchedulerOutput
from mini_vllm.block_pool import BlockPool, KVCacheBlock
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.request import Request, RequestStatus

SITUATIONS = {
    # one step, one budget
    "chunk cut by the threshold": "a request gets exactly the threshold and wants more",
    "chunk cut by the budget": "a request gets the rest of the budget and wants more",
    "decode and prefill in one step": "one request gets 1 token, another its first chunk",
    "running request starved": "the budget ends before every running request had a turn",
    "head blocked by budget": "requests wait, slots are free, the budget is spent",
    "head blocked by slots": "requests wait, budget is left, every slot is taken",
    "head blocked by memory": "requests wait, budget and slots are left, the head does not fit",
    "head behind a gap": "the head does not fit but a request behind it would",
    "first chunk fits, sequence does not": "admission is refused for the whole sequence alone",
    "whole prompt waits": "chunked prefill is off and the prompt exceeds the rest of the budget",
    "several wait": "two requests or more are queued, so their order matters",
    "idle step": "nothing is scheduled",
    # preemption
    "preemption": "a running request loses its blocks",
    "two victims in one step": "one allocation, or two, preempt several requests",
    "self-preemption": "the request that needs the block is itself the victim",
    "preempted mid-prefill": "the victim had not finished its prompt",
    "preempted twice": "the same request is preempted a second time",
    "resumed": "a preempted request is admitted again",
    "resumed with hits": "a resumed request finds blocks of its own first life",
    "resumed with hits on outputs": "the hits reach past the prompt into generated tokens",
    "preempting step could admit": "a preempting step leaves budget, a slot and room for the head",
    # prefix cache
    "table of several blocks freed": "the order of freeing decides what is reused first",
    "indexed before it is computed": "a block fills up in the step that plans it",
    "hit on a running request": "an adopted block is in use by another request",
    "hit revives a free block": "an adopted block sat in the free queue",
    "hit capped before the last token": "every block is cached; the last is computed again",
    "same content in two blocks": "two blocks hold the same hash",
    "eviction": "a cached block is reused for something else",
    "eviction leaves a duplicate": "one of two blocks with the same hash is evicted",
    "earlier duplicate evicted, later one hit": "a lookup finds the survivor",
    "refused because hits were free": "the need fits, but not with the revived hits counted",
    # endings
    "ends by EOS": "the EOS token is sampled below every bound",
    "ends by max_tokens": "the cap is reached without EOS",
    "ends by max_model_len": "the model's length is reached below the cap, without EOS",
    "EOS at max_tokens": "both at once: the reason is stop",
    "EOS at max_model_len": "both at once: the reason is stop",
    "max_tokens at max_model_len": "both bounds at once",
    "EOS ignored": "the EOS token is sampled and generation goes on",
    "two end in one step": "their blocks are freed in scheduling order",
    # aborts
    "abort before arrival": "an id that is not known yet: nothing happens",
    "abort on arrival": "a request is aborted in the step it arrives",
    "abort while waiting": "a request that never ran",
    "abort while prefilling": "a running request whose prompt is not computed",
    "abort while decoding": "a running request that has outputs",
    "abort while preempted": "a request back in the waiting queue",
    "abort after the end": "an id that has finished: nothing happens",
    "abort of the head that never fits": "the queue moves again",
    # priority
    "urgent request overtakes": "an arrival is queued before requests that arrived earlier",
    "equal priority, earlier arrival first": "arrival times decide in the queue",
    "equal keys, smaller id first": "priority and arrival time tie in the queue",
    "victim is not the last": "the least urgent request is not the last to be admitted",
    "victim withdrawn from the plan": "the victim was scheduled in this very step: budget refunded",
    "refund spent": "more is scheduled in the step than the budget without the refund would allow",
    "equal keys among victims": "several requests are least urgent: the first in order goes",
}
"""Name and meaning of each situation, grouped as the README lists them."""


class _Watch:
    """Notes of one workload, shared by the watched parts."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.ever_evicted_duplicate: set[int] = set()
        self.refunded = 0
        self.refused = ""

    def note(self, name: str, happened: bool = True) -> None:
        if happened:
            assert name in SITUATIONS, name
            self.seen.add(name)


class _WatchedPool(BlockPool):
    """A pool that notes hits, duplicates and evictions."""

    watch: _Watch

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        for block in self.free_queue.get_all_free_blocks()[:num_blocks]:
            if block.block_hash is None:
                continue
            self.watch.note("eviction")
            holders = self.cached_block_hash_to_block[block.block_hash]
            if len(holders) > 1:
                self.watch.note("eviction leaves a duplicate")
                if next(iter(holders.values())) is block:
                    self.watch.ever_evicted_duplicate.add(block.block_hash)
        return super().get_new_blocks(num_blocks)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(blocks)
        for block in blocks:
            self.watch.note("hit on a running request", block.ref_cnt > 0)
            self.watch.note("hit revives a free block", block.ref_cnt == 0)
            evicted = block.block_hash in self.watch.ever_evicted_duplicate
            self.watch.note("earlier duplicate evicted, later one hit", evicted)
        super().touch(blocks)

    def cache_full_blocks(self, blocks: Sequence[KVCacheBlock], hashes: Sequence[int]) -> None:
        super().cache_full_blocks(blocks, hashes)
        doubled = any(len(self.cached_block_hash_to_block.get(value, ())) > 1 for value in hashes)
        self.watch.note("same content in two blocks", doubled)
        self.watch.note("indexed before it is computed")


class _WatchedManager(KVCacheManager):
    """A manager that notes whom it refused last, capped hits and freed tables."""

    watch: _Watch

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        blocks, num_cached = super().get_computed_blocks(request)
        if self.enable_caching and num_cached == request.num_tokens - self.block_size:
            last = self.block_pool.get_cached_block(request.block_hashes[-1])
            self.watch.note("hit capped before the last token", last is not None)
        return blocks, num_cached

    def free(self, request: Request) -> None:
        several = len(self.get_block_ids(request.request_id)) > 1
        self.watch.note("table of several blocks freed", several)
        super().free(request)

    def allocate_slots(self, request: Request, *rest: Any) -> list[KVCacheBlock] | None:
        new_blocks = super().allocate_slots(request, *rest)
        if new_blocks is None:
            self.watch.refused = request.request_id
        return new_blocks


class _WatchedScheduler(Scheduler):
    """A scheduler that notes what it refuses and whom it preempts."""

    watch: _Watch

    def schedule(self) -> SchedulerOutput:
        self.watch.refunded = 0
        output = super().schedule()
        watch, budget = self.watch, self.config.max_num_batched_tokens
        left = budget - output.total_num_scheduled_tokens
        slots = self.max_num_seqs - len(self.running)
        scheduled = output.num_scheduled_tokens
        watch.note("idle step", not scheduled)
        watch.note("two victims in one step", len(output.preempted_req_ids) > 1)
        # The last refusal of a step has the last victim: the same request, or another.
        watch.note("self-preemption", output.preempted_req_ids[-1:] == [watch.refused])
        starved = any(r.request_id not in scheduled for r in self.running)
        watch.note("running request starved", starved)
        watch.note("refund spent", self.watch.refunded > 0 and left < self.watch.refunded)
        for request in output.scheduled_requests:
            self._note_scheduled(request, scheduled[request.request_id], left)
        if self.waiting and output.preempted_req_ids:
            hits, _ = self.kv.get_computed_blocks(self.waiting[0])
            fits = self.kv.full_sequence_fits(self.waiting[0], hits)
            watch.note("preempting step could admit", left > 0 and slots > 0 and fits)
        elif self.waiting:
            watch.note("head blocked by budget", left == 0 and slots > 0)
            watch.note("head blocked by slots", left > 0 and slots == 0)
            if left > 0 and slots > 0:
                self._note_refusal(left)
        new = set(output.scheduled_new_req_ids)
        mixed = new and any(scheduled[r] == 1 for r in scheduled if r not in new)
        watch.note("decode and prefill in one step", bool(mixed))
        for request_id in output.scheduled_resumed_req_ids:
            cached = output.num_cached_tokens[request_id]
            watch.note("resumed")
            watch.note("resumed with hits", cached > 0)
            past_prompt = cached > self.requests[request_id].num_prompt_tokens
            watch.note("resumed with hits on outputs", past_prompt)
        return output

    def _note_scheduled(self, request: Request, num_scheduled: int, left: int) -> None:
        more = request.num_computed_tokens + num_scheduled < request.num_tokens
        at_threshold = num_scheduled == self.config.long_prefill_token_threshold
        self.watch.note("chunk cut by the threshold", more and at_threshold)
        self.watch.note("chunk cut by the budget", more and not at_threshold and left == 0)

    def _note_refusal(self, left: int) -> None:
        """The head stayed in the queue although budget and a slot were left."""
        head, pool, size = self.waiting[0], self.kv.block_pool, self.kv.block_size
        hits, num_cached = self.kv.get_computed_blocks(head)
        wanted = head.num_tokens - num_cached
        chunk = self._clamp_new_tokens(wanted, left)
        if not self.config.enable_chunked_prefill and chunk < self._clamp_new_tokens(
            wanted, wanted
        ):
            self.watch.note("whole prompt waits")
            return
        self.watch.note("head blocked by memory")
        free = pool.get_num_free_blocks()
        need = -(-head.num_tokens // size) - len(hits)
        need_first = -(-(num_cached + chunk) // size) - len(hits)
        revived = sum(block.ref_cnt == 0 for block in hits)
        self.watch.note("refused because hits were free", need <= free < need + revived)
        self.watch.note(
            "first chunk fits, sequence does not",
            need_first + revived <= free and -(-head.num_tokens // size) <= pool.num_blocks - 1,
        )
        others = list(self.waiting)[1:]
        behind = any(-(-other.num_tokens // size) <= free for other in others)
        self.watch.note("head behind a gap", behind)

    def _pop_victim(self) -> Request:
        running = list(self.running)
        victim = super()._pop_victim()
        watch = self.watch
        watch.note("preemption")
        watch.note("preempted mid-prefill", victim.num_output_tokens == 0)
        watch.note("preempted twice", victim.num_preemptions > 0)
        if self.config.policy == "priority":
            watch.note("victim is not the last", victim is not running[-1])
            key = (victim.priority, victim.arrival_time)
            tied = sum((other.priority, other.arrival_time) == key for other in running)
            watch.note("equal keys among victims", tied > 1)
        return victim

    def _withdraw(self, victim: Request, output: SchedulerOutput) -> int:
        refund = super()._withdraw(victim, output)
        self.watch.note("victim withdrawn from the plan")
        self.watch.refunded += refund
        return refund

    def _enqueue(self, request: Request) -> None:
        before = list(self.waiting)
        super()._enqueue(request)
        self.watch.note("several wait", len(before) > 0)
        if self.config.policy == "priority":
            behind = list(self.waiting)[self.waiting.index(request) + 1 :]
            overtaken = [r for r in before if r in behind and r.status == RequestStatus.WAITING]
            watch = self.watch
            arrives = request.status == RequestStatus.WAITING
            watch.note("urgent request overtakes", arrives and bool(overtaken))
            for other in before:
                if other.priority == request.priority:
                    tied = other.arrival_time == request.arrival_time
                    watch.note("equal priority, earlier arrival first", not tied)
                    watch.note("equal keys, smaller id first", tied)

    def abort_request(self, request_id: str) -> Request | None:
        request, watch = self.requests.get(request_id), self.watch
        if request is not None:
            if request.status == RequestStatus.WAITING:
                watch.note("abort while waiting")
            elif request.status == RequestStatus.PREEMPTED:
                watch.note("abort while preempted")
            else:
                prefilling = request.num_computed_tokens < request.num_prompt_tokens
                watch.note("abort while prefilling", prefilling)
                watch.note("abort while decoding", not prefilling)
            if request in self.waiting and self.waiting[0] is request and len(self.waiting) > 1:
                blocks = -(-request.num_tokens // self.kv.block_size)
                never = blocks > self.kv.block_pool.num_blocks - 1
                watch.note("abort of the head that never fits", never)
        return super().abort_request(request_id)


def situations_of(entry: recording.Recording) -> set[str]:
    """The situations one workload holds.

    Raises:
        ValueError: the mini engine's decisions are not the recorded ones.
    """
    watch = _Watch()

    def build(config: Mapping[str, Any]) -> Scheduler:
        scheduler = replay.mini_scheduler(config, _WatchedScheduler, _WatchedManager, _WatchedPool)
        for part in (scheduler, scheduler.kv, scheduler.kv.block_pool):
            assert isinstance(part, _WatchedScheduler | _WatchedManager | _WatchedPool)
            part.watch = watch
        return scheduler

    _, difference = replay.replay(entry, build)
    if difference:
        raise ValueError(f"situations need equal decisions, but: {difference}")
    for name in _endings(entry) | _outside_aborts(entry):
        watch.note(name)
    return watch.seen


def _endings(entry: recording.Recording) -> set[str]:
    """Which bounds the last token of each finished request met."""
    adds = {add["request_id"]: add for event in entry["events"] for add in event.get("add", ())}
    max_model_len, eos = entry["config"]["max_model_len"], entry["eos_token_id"]
    seen: set[str] = set()
    for step in entry["steps"]:
        if len(step["finished"]) > 1:
            seen.add("two end in one step")
        for request_id in step["finished"]:
            add, said = adds[request_id], entry["outputs"][request_id]
            at_eos = said[-1] == eos and not add["ignore_eos"]
            at_cap = len(said) == add["max_tokens"]
            at_length = len(said) + len(add["prompt_token_ids"]) == max_model_len
            bounds = [
                name
                for name, met in (
                    ("EOS", at_eos),
                    ("max_tokens", at_cap),
                    ("max_model_len", at_length),
                )
                if met
            ]
            seen.add(f"ends by {bounds[0]}" if len(bounds) == 1 else " at ".join(bounds[:2]))
            if add["ignore_eos"] and eos in said[:-1]:
                seen.add("EOS ignored")
    return seen


def _outside_aborts(entry: recording.Recording) -> set[str]:
    """Aborts the scheduler cannot place: of ids it does not know, or knows since this step."""
    arrival = {
        add["request_id"]: event["step"]
        for event in entry["events"]
        for add in event.get("add", ())
    }
    seen: set[str] = set()
    for event in entry["events"]:
        reasons = entry["steps"][event["step"]]["finish_reasons"]
        for request_id in event.get("abort", ()):
            if request_id not in arrival or arrival[request_id] > event["step"]:
                seen.add("abort before arrival")
            elif reasons.get(request_id) != "abort":
                seen.add("abort after the end")
            elif arrival[request_id] == event["step"]:
                seen.add("abort on arrival")
    return seen


COUNTED = Counted("situations", tuple(PROFILES), SITUATIONS, situations_of)

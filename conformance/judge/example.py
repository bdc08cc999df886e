"""A small scheduler and its blocks, held against the real one.

    python -m conformance.judge --command "python conformance/judge/example.py" FILE...

First come, first served, without prefix caching, drafts, adapters or grammars: it says so, and
those workloads are passed over. Nothing here knows this repository.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from typing import Any


class Request:
    """One request and the blocks it holds."""

    def __init__(self, add: dict[str, Any]) -> None:
        self.id, self.tokens = add["request_id"], len(add["prompt_token_ids"])
        self.left, self.ignore_eos = add["max_tokens"], add["ignore_eos"]
        self.computed, self.preempted = 0, False
        self.blocks: list[int] = []


class Scheduler:
    """Running requests first, then the waiting ones, until the budget or the blocks are gone."""

    def __init__(self, workload: dict[str, Any]) -> None:
        self.knobs, self.eos = workload["config"], workload["eos_token_id"]
        self.free = deque(range(1, self.knobs["num_blocks"]))  # block 0 is nobody's
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.ended: list[str] = []

    def step(
        self, add: list[Any], abort: list[str], sampled_token_ids: dict[str, list[int]], **_: Any
    ) -> dict[str, Any]:
        for each in add:
            request = self.requests[each["request_id"]] = Request(each)
            self.waiting.append(request)
        reasons = {id: "abort" for id in abort if id in self.requests}
        for id in reasons:
            self.release(self.requests[id])
        before, self.ended = sorted(self.ended), []
        plan, new, resumed, preempted = self.schedule()
        answer = {
            "num_scheduled_tokens": plan,
            "new": new,
            "resumed": sorted(resumed),
            "preempted": sorted(preempted),
            "finished_before": before,
            "running": [r.id for r in self.running],
            "waiting": [r.id for r in self.waiting],
            "block_ids": {r.id: list(r.blocks) for r in self.running},
            "num_computed_tokens": {r.id: r.computed for r in self.running},
            "free_blocks": len(self.free),
        }
        finished = self.update(sampled_token_ids, reasons)
        return {**answer, "finished": sorted(finished), "finish_reasons": reasons}

    def schedule(self) -> tuple[dict[str, int], list[str], list[str], list[str]]:
        plan: dict[str, int] = {}
        new: list[str] = []
        resumed: list[str] = []
        preempted: list[str] = []
        budget = self.knobs["max_num_batched_tokens"]
        for request in list(self.running):
            if request not in self.running or budget == 0:
                continue
            count = self.clamp(request.tokens - request.computed, budget)
            count = min(count, self.knobs["max_model_len"] - 1 - request.computed)
            while count > 0 and not self.allocate(request, count):
                victim = self.running.pop()
                self.preempt(victim)
                preempted.append(victim.id)
                if victim is request:
                    break
            else:
                if count > 0:
                    plan[request.id], budget = count, budget - count
                    request.computed += count
        while self.waiting and budget and not preempted:
            request = self.waiting[0]
            if len(self.running) == self.knobs["max_num_seqs"]:
                break
            count = self.clamp(request.tokens, 10**9)
            if count > budget and not self.knobs["enable_chunked_prefill"]:
                break
            count = min(count, budget)
            whole = min(request.tokens, self.knobs["max_model_len"])
            if self.blocks_for(whole) > len(self.free) or not self.allocate(request, count):
                break
            self.running.append(self.waiting.popleft())
            (resumed if request.preempted else new).append(request.id)
            plan[request.id], budget, request.computed = count, budget - count, count
        return plan, new, resumed, preempted

    def clamp(self, count: int, budget: int) -> int:
        threshold = self.knobs["long_prefill_token_threshold"]
        return min(count, budget, threshold or count)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.knobs["block_size"])

    def allocate(self, request: Request, count: int) -> bool:
        need = self.blocks_for(request.computed + count) - len(request.blocks)
        if need > len(self.free):
            return False
        request.blocks += [self.free.popleft() for _ in range(need)]
        return True

    def preempt(self, request: Request) -> None:
        self.free.extend(reversed(request.blocks))
        request.blocks, request.computed, request.preempted = [], 0, True
        self.waiting.appendleft(request)

    def release(self, request: Request) -> None:
        self.free.extend(reversed(request.blocks))
        self.running = [r for r in self.running if r is not request]
        self.waiting = deque(r for r in self.waiting if r is not request)
        self.ended.append(request.id)
        del self.requests[request.id]

    def update(self, sampled: dict[str, list[int]], reasons: dict[str, str]) -> list[str]:
        finished = []
        for id, tokens in sampled.items():
            request = self.requests[id]
            request.tokens, request.left = request.tokens + 1, request.left - 1
            if tokens[0] == self.eos and not request.ignore_eos:
                reasons[id] = "stop"
            elif not request.left or request.tokens >= self.knobs["max_model_len"]:
                reasons[id] = "length"
            else:
                continue
            self.release(request)
            finished.append(id)
        return finished


def cannot(config: dict[str, Any]) -> str:
    """Why a workload is beyond this scheduler, "" when it is not."""
    beyond = ("speculative", "async_scheduling", "max_loras", "pipeline_parallel_size", "grammars")
    named = [key for key in beyond if config.get(key)]
    if config["enable_prefix_caching"]:
        named.append("enable_prefix_caching")
    if config["policy"] != "fcfs":
        named.append("policy=priority")
    return ", ".join(named)


def main() -> None:
    scheduler: Any = None
    for line in sys.stdin:
        message = json.loads(line)
        if "workload" in message:
            if reason := cannot(message["workload"]["config"]):
                print(json.dumps({"skip": reason}), flush=True)
                continue
            scheduler = Scheduler(message["workload"])
            print(json.dumps({"ready": True}), flush=True)
        else:
            print(json.dumps(scheduler.step(**message["step"])), flush=True)


if __name__ == "__main__":
    main()

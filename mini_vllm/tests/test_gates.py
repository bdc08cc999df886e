"""What a gate may ask of the scheduler: a budget of its own per step, and K and V from outside."""

from __future__ import annotations

import pytest

from mini_vllm import KVCacheManager, Request, SamplingParams, Scheduler, SchedulerConfig
from mini_vllm.plan import ExternalTokens, Gate, SchedulerOutput

BLOCK = 4


def scheduler(*gates: Gate, num_blocks: int = 32, **knobs: int) -> Scheduler:
    return Scheduler(KVCacheManager(num_blocks, BLOCK), SchedulerConfig(**knobs), gates)


def request(name: str, num_tokens: int = 8, first: int = 3) -> Request:
    tokens = list(range(first, first + num_tokens))
    return Request(name, tokens, SamplingParams(max_tokens=4, ignore_eos=True))


def step(of: Scheduler, token: int = 99) -> dict[str, int]:
    """Plan and update; what was planned."""
    plan = of.schedule()
    plan.bind(of.kv)
    of.update_from_output(plan, {r: [token] for r in plan.sampling_req_ids})
    return plan.num_scheduled_tokens


class Budget(Gate):
    """At most `most` tokens per step over all requests; what was taken is given back."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.left = 0
        self.taken: dict[str, int] = {}
        self.given_up: list[str] = []

    def begins(self, plan: SchedulerOutput) -> None:
        self.left, self.taken = self.most, {}

    def limit(self, request: Request, start: int, num_new: int) -> int:
        self.taken[request.request_id] = allowed = min(num_new, self.left)
        self.left -= allowed
        return allowed

    def refused(self, request: Request) -> None:
        self.given_up.append(request.request_id)
        self.left += self.taken.pop(request.request_id)


def test_a_budget_of_a_gate_starts_anew_with_each_step():
    of = scheduler(Budget(6))
    of.add_request(request("a"))
    of.add_request(request("b", first=50))
    assert [step(of), step(of), step(of)] == [{"a": 6}, {"a": 2, "b": 4}, {"a": 1, "b": 4}]


def test_who_finds_no_blocks_gives_up_what_the_gate_had_granted():
    budget = Budget(12)
    of = scheduler(budget, num_blocks=4)
    of.add_request(request("a"))
    of.add_request(request("b", 8, first=50))
    assert step(of) == {"a": 8}
    assert budget.given_up == ["b"] and budget.left == 4


class Remote(Gate):
    """A connector without a network: what it has of each request, and which loads are done."""

    def __init__(self, has: dict[str, int | None], load_async: bool) -> None:
        self.has, self.load_async = has, load_async
        self.asked: list[tuple[str, int]] = []
        self.loading: dict[str, int] = {}
        self.arrived: set[str] = set()

    def admission(self, request, plan):
        if request.waits_for is None:
            return "admit"
        if request.request_id not in self.arrived:
            return "skip"
        request.waits_for = None
        return "admit"

    def found(self, request: Request, num_cached: int) -> ExternalTokens | None:
        self.asked.append((request.request_id, num_cached))
        has = self.has.get(request.request_id, 0)
        if has is None:
            return None
        return ExternalTokens(max(0, has - num_cached), self.load_async and has > num_cached)

    def scheduled(self, request: Request, num_new: int, plan: SchedulerOutput) -> None:
        if num_new == 0:
            self.loading[request.request_id] = request.num_computed_tokens
            request.waits_for = "remote_kvs"


def test_tokens_from_outside_are_not_computed():
    of = scheduler(Remote({"a": 8}, load_async=False))
    of.add_request(request("a", 10))
    assert step(of) == {"a": 2}
    assert of.requests["a"].num_computed_tokens == 10
    assert len(of.kv.get_block_ids("a")) == 3


def test_a_gate_that_cannot_say_yet_holds_up_nobody_else():
    remote = Remote({"a": None}, load_async=False)
    of = scheduler(remote)
    of.add_request(request("a"))
    of.add_request(request("b", first=50))
    assert step(of) == {"b": 8}
    assert [r.request_id for r in of.skipped] == ["a"] and not of.waiting
    remote.has["a"] = 4
    assert step(of) == {"b": 1, "a": 4}


def test_a_request_that_loads_has_its_blocks_and_takes_no_budget_and_no_slot():
    remote = Remote({"a": 8}, load_async=True)
    of = scheduler(remote, max_num_seqs=1, max_num_batched_tokens=8)
    of.add_request(request("a", 10))
    of.add_request(request("b", first=50))
    assert step(of) == {"b": 8}
    assert remote.loading == {"a": 8}
    assert len(of.kv.get_block_ids("a")) == 2 and [r.request_id for r in of.skipped] == ["a"]


def test_what_is_loading_cannot_be_hit_before_it_is_there():
    remote = Remote({"a": 8}, load_async=True)
    of = scheduler(remote)
    of.add_request(request("a", 10))
    step(of)
    of.add_request(request("twin", 10))
    step(of)
    assert ("twin", 0) in remote.asked
    remote.arrived.add("a")
    step(of)  # a is admitted: its blocks are in the index now
    of.add_request(request("late", 10))
    step(of)
    assert remote.asked[-1] == ("late", 8)


def test_a_loaded_request_is_admitted_without_being_asked_for_again():
    remote = Remote({"a": 8}, load_async=True)
    of = scheduler(remote)
    of.add_request(request("a", 10))
    assert step(of) == {}
    assert step(of) == {}
    remote.arrived.add("a")
    assert step(of) == {"a": 2}
    assert remote.asked == [("a", 0)]


def test_of_a_prompt_that_is_loaded_whole_the_last_token_is_computed_again():
    remote = Remote({"a": 8}, load_async=True)
    of = scheduler(remote)
    of.add_request(request("a", 8))
    step(of)
    remote.arrived.add("a")
    assert step(of) == {"a": 1}
    assert of.requests["a"].num_output_tokens == 1


def test_a_load_waits_for_blocks_like_any_admission():
    remote = Remote({"b": 8}, load_async=True)
    of = scheduler(remote, num_blocks=4)
    of.add_request(request("a", 10))
    of.add_request(request("b", first=50))
    assert step(of) == {"a": 10}
    assert of.requests["b"].num_computed_tokens == 0 and not remote.loading
    assert of.kv.get_block_ids("b") == []


def test_a_gate_that_says_nothing_changes_nothing():
    plans = []
    for gates in ((), (Gate(),)):
        of = scheduler(*gates, num_blocks=6, max_num_batched_tokens=6)
        for index, name in enumerate("abc"):
            of.add_request(request(name, 7, first=3 + 20 * index))
        plans.append([step(of) for _ in range(14)])
    assert plans[0] == plans[1]
    assert any(len(plan) > 1 for plan in plans[0])


def test_no_new_tokens_are_an_error_where_nothing_comes_from_outside():
    kv, a = KVCacheManager(8, BLOCK), request("a")
    with pytest.raises(ValueError, match="num_new_tokens=0"):
        kv.allocate_slots(a, 0)

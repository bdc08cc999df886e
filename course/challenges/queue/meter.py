"""Comparisons of a priority queue. vLLM's: `vllm/v1/core/sched/request_queue.py:131`
`PriorityRequestQueue`, whose heap operations are made here on keys that count.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from course.challenges.judge import Player, Wrong, whole

TITLE = "A priority queue that compares little"
UNIT = "comparisons"
FEWER = True
MARKS = (("bronze", 5, 4), ("vLLM's", 1, 1), ("silver", 1, 3))

OPS = 130


def workload(seed: str) -> dict[str, Any]:
    """`{"ranks": {ticket: urgency}, "ops": [[name, ...]]}`; urgencies are all different."""
    rng = random.Random(seed)
    tickets = rng.sample(range(10**6), OPS)
    ranks = rng.sample(range(10**6), OPS)
    order = dict(zip(tickets, ranks, strict=True))
    ops: list[list[Any]] = []
    inside: list[int] = []
    taken: list[int] = []  # may come back
    while tickets or inside:
        draw = rng.randrange(100)
        if tickets and (draw < 50 or len(inside) < 20):
            for _ in range(rng.choice((1, 1, 1, 2, 8))):
                if tickets:
                    inside.append(tickets.pop())
                    ops.append(["add", inside[-1]])
        elif taken and draw < 58:
            inside.append(taken.pop())
            ops.append(["add", inside[-1]])
        elif inside and draw < 61:
            gone = rng.sample(inside, min(len(inside), rng.choice((1, 1, 2, 4))))
            inside = [ticket for ticket in inside if ticket not in gone]
            ops.append(["remove", gone])
        elif inside:
            first = min(inside, key=order.__getitem__)
            inside.remove(first)
            taken.append(first)
            ops.append(["pop"])
    return {"ranks": [[ticket, rank] for ticket, rank in order.items()], "ops": ops}


def play(answer: Callable[..., Player], load: dict[str, Any]) -> int:
    """Calls of `less`."""
    ranks = dict(load["ranks"])
    count = 0

    def less(a: Any, b: Any) -> bool:
        nonlocal count
        count += 1
        if type(a) is not int or type(b) is not int or a not in ranks or b not in ranks:
            raise ValueError(f"less({a!r}, {b!r}): need two tickets")
        return ranks[a] < ranks[b]

    player = answer({}, less=less)
    inside: set[int] = set()
    for number, (name, *args) in enumerate(load["ops"]):
        came = player.call(name, *args)
        if name == "add":
            inside.add(args[0])
        elif name == "remove":
            inside -= set(args[0])
        else:
            first = min(inside, key=ranks.__getitem__)
            if whole("pop()", came, 0, 10**6) != first:
                raise Wrong(f"operation {number}: pop() gave {came}: need {first}, the most urgent")
            inside.remove(first)
    return count


class Counted:
    """A ticket that counts how often it is compared."""

    def __init__(self, ticket: int, rank: int, count: list[int]) -> None:
        self.ticket, self.rank, self.count = ticket, rank, count

    def __lt__(self, other: Counted) -> bool:
        self.count[0] += 1
        return self.rank < other.rank


class Heap:
    """vLLM's heap: pushed, popped, and built anew without those who leave."""

    def __init__(self) -> None:
        self.heap: list[Counted] = []

    def add_request(self, request: Counted) -> None:
        heapq.heappush(self.heap, request)

    def pop_request(self) -> Counted:
        return heapq.heappop(self.heap)

    def remove_requests(self, requests: set[Counted]) -> None:
        self.heap = [request for request in self.heap if request not in requests]
        heapq.heapify(self.heap)


def on(queue: Any, load: dict[str, Any]) -> int:
    """Comparisons of a queue with the methods of vLLM's."""
    count = [0]
    requests = {ticket: Counted(ticket, rank, count) for ticket, rank in load["ranks"]}
    for name, *args in load["ops"]:
        if name == "add":
            queue.add_request(requests[args[0]])
        elif name == "remove":
            queue.remove_requests({requests[ticket] for ticket in args[0]})
        else:
            queue.pop_request()
    return count[0]


def vllm(load: dict[str, Any]) -> int:
    """vLLM's comparisons."""
    return on(Heap(), load)


def real() -> Callable[[dict[str, Any]], int]:
    """The same by the pinned tree's own class."""
    from vllm.v1.core.sched.request_queue import PriorityRequestQueue

    return lambda load: on(PriorityRequestQueue(), load)

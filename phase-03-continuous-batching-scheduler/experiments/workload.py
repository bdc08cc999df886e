"""Requests over time: an arrival process, two kinds of requests, shared prefixes.

Promises: the same workload and seed give the same jobs; the rate changes only the times. No
upstream counterpart; `vllm bench serve` of the pinned tree does this for a server.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Kind:
    """Lengths of one kind of request: log-normal around a median, cut off at both ends."""

    name: str
    share: float
    """Of all requests; the shares of a workload add up to 1."""
    prompt: tuple[int, float, int, int]
    """Median, sigma of the logarithm, least, most."""
    output: tuple[int, float, int, int]
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """What arrives."""

    kinds: tuple[Kind, ...]
    rate: float
    """Requests per second, on average."""
    num_requests: int = 200
    burstiness: float = 1.0
    """Shape of the gamma-distributed gaps: 1 is a Poisson process, smaller comes in bursts."""
    prefix_len: int = 0
    """Tokens of a system prompt in front of the prompts of the first kind."""
    num_prefixes: int = 1
    """Different system prompts, each as likely as the other."""

    def at(self, rate: float) -> Workload:
        """The same requests at another rate."""
        return replace(self, rate=rate)


@dataclass(frozen=True, slots=True)
class Job:
    """One request to come."""

    name: str
    kind: str
    arrival: float
    """Seconds."""
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int


def jobs_of(workload: Workload, seed: int) -> list[Job]:
    """The requests of one run, in order of arrival.

    Lengths, kinds and tokens come from the seed alone; arrival times are the seed's gaps divided
    by the rate, so that rates are compared on the same requests.

    Raises:
        ValueError: the shares of the kinds do not add up to 1, or the rate is not above 0.
    """
    if abs(sum(kind.share for kind in workload.kinds) - 1) > 1e-9:
        raise ValueError("kinds: their shares must add up to 1")
    if workload.rate <= 0:
        raise ValueError(f"rate={workload.rate}: need more than 0")
    rng = random.Random(seed)
    prefixes = [
        [rng.randrange(256) for _ in range(workload.prefix_len)]
        for _ in range(workload.num_prefixes)
    ]
    shares = [kind.share for kind in workload.kinds]
    now, jobs = 0.0, []
    for number in range(workload.num_requests):
        now += rng.gammavariate(workload.burstiness, 1 / workload.burstiness) / workload.rate
        (kind,) = rng.choices(workload.kinds, shares)
        prefix = rng.choice(prefixes) if kind is workload.kinds[0] else []
        own = [rng.randrange(256) for _ in range(_length(rng, kind.prompt))]
        jobs.append(
            Job(
                f"{kind.name}-{number}",
                kind.name,
                now,
                (*prefix, *own),
                _length(rng, kind.output),
                kind.priority,
            )
        )
    return jobs


def _length(rng: random.Random, shape: tuple[int, float, int, int]) -> int:
    """A whole number from a log-normal distribution with bounds."""
    median, sigma, least, most = shape
    return min(most, max(least, round(rng.lognormvariate(math.log(median), sigma))))


LAPTOP = Workload(
    kinds=(
        Kind("chat", 0.9, (60, 0.5, 8, 240), (60, 0.5, 8, 200)),
        Kind("document", 0.1, (640, 0.3, 300, 900), (16, 0.4, 4, 60), priority=5),
    ),
    rate=20.0,
    prefix_len=48,
    num_prefixes=2,
)
"""Chats with one of two system prompts, and one document in ten; fits the shipped model."""

SERVER = Workload(
    kinds=(
        Kind("chat", 0.9, (300, 0.6, 16, 2000), (200, 0.5, 16, 800)),
        Kind("document", 0.1, (8000, 0.3, 4000, 16000), (100, 0.4, 16, 300), priority=5),
    ),
    rate=4.0,
    prefix_len=256,
    num_prefixes=2,
)
"""The same shape at the lengths of a server."""

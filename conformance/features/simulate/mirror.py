"""The simulator with vLLM's own scheduler beside it: every plan on its way through a trace.

    python -m conformance.features.simulate.mirror TRACE --limit 200

The real core (of any release whose archive is here) gets the same requests and tokens at the same
moments. A plan agrees when everything that the recordings compare of a step does: who computes how
many tokens, who is new, resumed or preempted, the queues, every block table, the free blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.real_core import ArchiveError, LoadError, RealCore, core_of
from conformance.recorders.run import observe
from mini_vllm.config import EngineConfig
from mini_vllm.plan import SchedulerOutput
from mini_vllm.releases import PIN
from mini_vllm.request import Request
from mini_vllm.simulate.cost import StepCost, load_cost
from mini_vllm.simulate.simulator import SimulatedRequest, Simulator, prompt_hashes
from mini_vllm.simulate.traces import TraceRequest, read_trace

EOS = 2
SAID = 7


@dataclass(slots=True)
class Compared:
    """What a mirrored simulation came to."""

    num_requests: int = 0
    num_steps: int = 0
    difference: str = ""

    def __str__(self) -> str:
        said = f"{self.num_requests:,} requests, {self.num_steps:,} steps: "
        return said + (self.difference or "0 differ")


class Differs(Exception):
    """The first plan that is another one; the two no longer stand at the same moment."""


@dataclass(slots=True)
class Mirror:
    """Stands where the simulator's scheduler stood, and asks the real one as well."""

    mini: Any
    core: RealCore
    real: Any
    block_size: int
    compared: Compared = field(default_factory=Compared)
    plans: dict[int, Any] = field(default_factory=dict)

    def add_request(self, request: SimulatedRequest) -> None:
        """Queue it with both; the real one gets tokens that hash as the trace says."""
        self.mini.add_request(request)
        ahead = getattr(self.real, "num_hash_lookahead_tokens", 0)
        add = {
            "request_id": request.request_id, "arrival_time": request.arrival_time,
            "prompt_token_ids": tokens_of(request, self.block_size),
            "max_tokens": request.sampling_params.max_tokens, "ignore_eos": True,
            "priority": request.priority,
        }  # fmt: skip
        known = {"num_hash_lookahead_tokens": ahead} if ahead else {}
        self.real.add_request(self.core.make_request(add, self.block_size, EOS, **known))
        self.compared.num_requests += 1

    def schedule(self) -> SchedulerOutput:
        """Both plan; what differs first is noted. Raises Differs."""
        plan, theirs = self.mini.schedule(), self.real.schedule()
        self.plans[id(plan)] = theirs
        self.compared.num_steps += 1
        expected = observe(self.real, theirs)
        for name, value in self._observe(plan).items():
            if expected[name] != value:
                step = self.compared.num_steps - 1
                self.compared.difference = (
                    f"step {step}, {name}\n  expected  {expected[name]}\n  got       {value}"
                )
                raise Differs
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, said: Mapping[str, Sequence[int]]
    ) -> list[Request]:
        """Both hear the same tokens."""
        theirs = self.plans.pop(id(plan))
        known_values = {name: [SAID] * len(tokens) for name, tokens in said.items()}
        if theirs.num_scheduled_tokens:
            self.real.update_from_output(theirs, self.core.runner_output(theirs, known_values))
        return self.mini.update_from_output(plan, said)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mini, name)

    def _observe(self, plan: SchedulerOutput) -> dict[str, Any]:
        mini = self.mini
        counts = plan.num_scheduled_tokens
        ahead = bool(plan.num_computed_tokens)  # counters of an asynchronous plan have moved
        return {
            "num_scheduled_tokens": dict(counts),
            "new": list(plan.scheduled_new_req_ids),
            "resumed": sorted(plan.scheduled_resumed_req_ids),
            "preempted": sorted(plan.preempted_req_ids),
            "running": [request.request_id for request in mini.running],
            "waiting": [request.request_id for request in mini.waiting],
            "block_ids": {
                r.request_id: list(mini.kv.get_block_ids(r.request_id)) for r in mini.running
            },
            "num_computed_tokens": {
                r.request_id: r.num_computed_tokens + (0 if ahead else counts.get(r.request_id, 0))
                for r in mini.running
            },
            "free_blocks": mini.kv.block_pool.get_num_free_blocks(),
        }


def tokens_of(request: SimulatedRequest, block_size: int) -> list[int]:
    """Prompt tokens that are equal, block by block, where the trace's ids are, and else nowhere."""
    length = request.source.prompt_len
    found: list[int] = []
    for number in prompt_hashes(request.source, block_size):
        found += [1000 + number % 997, number, *[11] * (block_size - 2)][:block_size]
    own = -1 - int(request.request_id)
    return found + [own] * (length - len(found))


def mirrored(
    trace: Iterable[TraceRequest],
    config: Mapping[str, Any],
    cost: StepCost,
    release: str = PIN,
    concurrency: int | None = None,
) -> Compared:
    """Simulate a trace with the release's own scheduler beside the mini one.

    Raises:
        ArchiveError, LoadError: the release is not here, or does not load.
    """
    core = core_of(release)
    simulator = Simulator(EngineConfig.of(config), cost, release=release)
    known = simulator.config
    known_values = {
        "num_blocks": known.cache.num_blocks, "block_size": known.cache.block_size,
        "max_num_seqs": known.scheduler.max_num_seqs,
        "max_num_batched_tokens": known.scheduler.max_num_batched_tokens,
        "long_prefill_token_threshold": known.scheduler.long_prefill_token_threshold,
        "enable_prefix_caching": known.cache.enable_prefix_caching,
        "enable_chunked_prefill": known.scheduler.enable_chunked_prefill,
        "max_model_len": known.scheduler.max_model_len, "policy": known.scheduler.policy,
    }  # fmt: skip
    real = core.make_scheduler(known_values, known.scheduler.async_scheduling)
    mirror = Mirror(simulator.scheduler, core, real, known.cache.block_size)
    simulator.scheduler = mirror  # type: ignore[assignment]
    with suppress(Differs):
        simulator.run(trace, concurrency=concurrency)
    return mirror.compared


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.features.simulate.mirror", description=__doc__.split("\n")[0]
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--limit", type=int, default=100, help="how many requests")
    parser.add_argument("--release", default=PIN)
    parser.add_argument("--cost", default="step=6e-3,tokens=1e-5")
    parser.add_argument("--num-blocks", type=int, default=12_801)
    parser.add_argument("--block-size", type=int, default=16)
    arguments = parser.parse_args(argv)
    config = {
        "num_blocks": arguments.num_blocks, "block_size": arguments.block_size,
        "max_num_batched_tokens": 8192, "max_num_seqs": 256, "max_model_len": 131_072,
        "async_scheduling": True,
    }  # fmt: skip
    try:
        compared = mirrored(
            read_trace(arguments.trace, limit=arguments.limit), config, load_cost(arguments.cost),
            arguments.release,
        )  # fmt: skip
    except (ArchiveError, LoadError, ValueError) as error:
        parser.error(str(error))
    print(compared)
    return 1 if compared.difference else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What the tests share: a tiny model, pairs of engines over a simulated network, their client."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.kv_transfer.simulated import SimulatedNetwork
from mini_vllm.models.transformer import ModelConfig, Transformer
from mini_vllm.request import Request
from mini_vllm.tests.lora_support import weights
from mini_vllm.tests.support import TinyTokenizer

CONFIG = ModelConfig(
    vocab_size=8, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, max_position_embeddings=64,
)  # fmt: skip
NUM_BLOCKS = 24


@functools.cache
def _weights() -> dict[str, np.ndarray]:
    return weights(CONFIG)


def engine(**knobs: Any) -> LLMEngine:
    """An engine of the tiny model in float64, whose cache begins with nonsense: what is read before
    it is written changes the output."""
    model = Transformer(CONFIG, _weights(), np.float64)
    knobs = {"num_blocks": NUM_BLOCKS, "block_size": 4, "dtype": "float64", **knobs}
    made = LLMEngine(model, tokenizer=TinyTokenizer(), **knobs)
    cache = made.runner.kv_cache
    assert cache is not None
    cache[...] = np.random.default_rng(1).normal(size=cache.shape) * 3
    return made


@functools.cache
def alone(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """What one engine says."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return engine().generate([list(prompt)], params)[0].outputs[0].token_ids


def transfer_of(of: LLMEngine) -> Any:
    """Its room."""
    return of.feature("kv_transfer")


@dataclass
class Job:
    """One prompt on its way through a producer and a consumer."""

    prompt: tuple[int, ...]
    max_tokens: int
    name: str
    aborts_at: int = -1
    """The step in which its client goes away; -1: never."""
    params: dict[str, Any] | None = None
    request: Request | None = None
    """At the consumer."""


@dataclass
class Pair:
    """A producer, a consumer, a network, and a client that hands the parameters over."""

    network: SimulatedNetwork
    producer: LLMEngine
    consumer: LLMEngine
    jobs: dict[str, Job] = field(default_factory=dict)
    dies_at: int = -1
    """The step in which the producer's process is gone."""
    restarts_at: int = -1
    """The step in which both engines start over, as after an exception."""
    steps: int = 0
    orders: Counter[str] = field(default_factory=Counter)
    """In which order two transfers of a request that was aborted were reported."""

    def step(self) -> None:
        """One step of each engine and of the network."""
        self.steps += 1
        if self.steps == self.dies_at:
            self.network.dead.add(("simulated", 1))
            self.happened("death")
        if self.steps == self.restarts_at:
            for of in (self.producer, self.consumer):
                of._restart(of._live())
            self.happened("restart")
        for of in (self.producer, self.consumer):
            if of is self.producer and self.is_dead:
                continue
            if of.has_unfinished_requests():
                of.step()
        self.network.tick()
        for job in self.jobs.values():
            if job.params is None and not self.is_dead:
                job.params = transfer_of(self.producer).take_kv_transfer_params(job.name)
            if job.params is not None and job.request is None:
                self.hand_over(job)
            if job.aborts_at == self.steps:
                self.happened("abort")
                self.producer.abort_request(job.name)
                self.consumer.abort_request(job.name)

    def happened(self, fault: str) -> None:
        """Count a fault."""
        self.network.happened[fault] = self.network.happened.get(fault, 0) + 1

    @property
    def is_dead(self) -> bool:
        """Whether the producer's process is gone."""
        return ("simulated", 1) in self.network.dead

    def add(self, job: Job) -> None:
        """A prompt for the producer."""
        self.jobs[job.name] = job
        self.producer.add_request(
            list(job.prompt), SamplingParams(max_tokens=1, ignore_eos=True),
            request_id=job.name, kv_transfer_params={"do_remote_decode": True},
        )  # fmt: skip

    def hand_over(self, job: Job) -> None:
        """The same prompt for the consumer, with what the producer gave."""
        self.consumer.add_request(
            list(job.prompt), SamplingParams(max_tokens=job.max_tokens, ignore_eos=True),
            request_id=job.name, kv_transfer_params=job.params,
        )  # fmt: skip
        job.request = self.consumer.requests[job.name]

    def run(self, most: int = 600) -> None:
        """Step until nothing is left."""
        for _ in range(most):
            busy = [self.consumer] if self.is_dead else [self.producer, self.consumer]
            waits = [j for j in self.jobs.values() if j.request is None and j.params is None]
            if not any(of.has_unfinished_requests() for of in busy):
                assert self.is_dead or all(job.aborts_at >= 0 for job in waits), waits
                return
            self.step()
        raise AssertionError(f"not finished after {most} steps")


def pair(
    seed: int = 0, policy: str = "recompute", lease: int = 40, timeout: int = 30,
    slowest: int = 0, fault_rate: float = 0.0, per_tick: int = 1_000,
    producer: dict[str, Any] | None = None, consumer: dict[str, Any] | None = None,
    stream: bool = False,
) -> Pair:  # fmt: skip
    """An idle pair; leases and timeouts are in steps."""
    network = SimulatedNetwork(seed, slowest, fault_rate, per_tick)

    def config(role: str) -> dict[str, Any]:
        extra = {"network": network, "lease_s": lease, "load_timeout_s": timeout, "stream": stream}
        return {
            "kv_connector": "SimulatedConnector", "kv_role": role,
            "kv_load_failure_policy": policy, "kv_connector_extra_config": extra,
        }  # fmt: skip

    p = engine(kv_transfer_config=config("kv_producer"), **(producer or {}))
    half = transfer_of(p).worker_half
    saved = half.save_kv_layer

    def save_kv_layer(*arguments: Any) -> None:
        saved(*arguments)
        network.deliver()  # between two layers of the producer, as a thread would

    half.save_kv_layer = save_kv_layer
    d = engine(kv_transfer_config=config("kv_consumer"), **(consumer or {}))
    return Pair(network, p, d)


RECEIVED, SENT, BOTH = "received, then sent", "sent, then received", "received and sent at once"
ORDERS = RECEIVED, SENT, BOTH


def store_what_ends(made: Pair, rng: random.Random) -> None:
    """Let the consumer's connector store what ends, aborted or not, for a drawn number of steps.

    So a request whose client goes away while it loads is written and read at once, and the two
    reports come in any order (46240). After a restart a report may be about nothing (43226).
    """
    room, ends = transfer_of(made.consumer), dict[str, int]()
    half, worker = room.scheduler_half, room.worker_half
    finished, reported = half.request_finished, worker.get_finished

    def request_finished(request: Request, block_ids: Any) -> tuple[bool, Any]:
        is_kept, params = finished(request, block_ids)
        if not is_kept and block_ids and rng.random() < 0.7:
            ends[request.request_id] = made.steps + rng.randint(1, 9)
            half._busy.add(request.request_id)
            is_kept = True
        return is_kept, params

    def get_finished(finished_req_ids: set[str]) -> Any:
        output = reported(finished_req_ids)
        stored = [name for name, when in ends.items() if when <= made.steps]
        for name in stored:
            del ends[name]
        for name, (_, why) in room.gate.held.items():
            if why == {"recving", "sending"}:
                heard = name in output.finished_recving, name in stored
                made.orders.update([ORDERS[heard[0] + 2 * heard[1] - 1]] if any(heard) else [])
        output.finished_sending = [*output.finished_sending, *stored]
        return output

    half.request_finished, worker.get_finished = request_finished, get_finished


def random_pair(seed: int, fault_rate: float = 0.0) -> Pair:
    """A pair of a seed, with its jobs: pools, blocks, delays, orders, aborts, deaths are drawn."""
    rng = random.Random(seed * 13 + 1)

    def knobs() -> dict[str, Any]:
        size = rng.choice((2, 4, 8))
        return {
            "block_size": size,
            "num_blocks": 1 + -(-24 // size) + rng.choice((0, 2, 8, 24)),
            "max_num_seqs": rng.choice((1, 2, 4)),
            "max_num_batched_tokens": rng.choice((4, 9, 64)),
            "enable_prefix_caching": rng.random() < 0.7,
            "async_scheduling": rng.random() < 0.3,
        }  # fmt: skip

    made = pair(
        seed, rng.choice(("recompute", "fail")) if fault_rate else "recompute",
        lease=rng.choice((15, 60)) if fault_rate else 10_000,
        timeout=rng.choice((6, 30)) if fault_rate else 10_000,
        slowest=rng.choice((0, 2, 9)), fault_rate=fault_rate, per_tick=rng.choice((1, 2, 9)),
        producer=knobs(), consumer=knobs(), stream=random.Random(f"stream {seed}").random() < 0.5,
    )  # fmt: skip
    if fault_rate and rng.random() < 0.15:
        made.dies_at = rng.randint(1, 12)
    if fault_rate and rng.random() < 0.15:
        made.restarts_at = rng.randint(1, 12)
    if fault_rate:
        store_what_ends(made, random.Random(seed))
    stem = [rng.randint(0, 6) for _ in range(16)]
    for index in range(rng.randint(1, 6)):
        length = rng.randint(1, 16)
        prompt = stem[:length] if rng.random() < 0.5 else [rng.randint(0, 6) for _ in range(length)]
        aborts = fault_rate and rng.random() < 0.2
        made.add(
            Job(tuple(prompt), rng.randint(1, 6), f"r{index}", rng.randint(1, 12) if aborts else -1)
        )
    return made

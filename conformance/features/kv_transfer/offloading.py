"""The real scheduler with the real scheduler's half of `OffloadingConnector` and its manager.

    PYTHONPATH=upstream python -m conformance.record offloading     # with torch, for a processor

`config.offload` has `factor` (blocks of the cache in an offloaded one), `num_cpu_blocks`, and the
steps that a load and a store take. A step adds `offload_jobs`, the transfers that begin in it:
`["load" or "store", request, blocks of the host, blocks of the cache]`, and `completed_jobs`, how
many its update reports.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from conformance import recording, workloads
from conformance.recorders.run import RefusedError, Run, Stalled
from conformance.recorders.source import Real, installed
from conformance.recorders.stand_ins import Connector

SEEDS = range(157_000, 157_240)


def generate(seed: int) -> dict[str, Any]:
    """The workload of a seed, with prefixes that come back after they have left the cache."""
    rng = random.Random(seed * 43 + 11)
    profile = rng.choice(("prefix", "prefix", "pressure", "mixed", "aborts"))
    number = len(workloads.PROFILES) * seed + workloads.PROFILES.index(profile)
    workload = {**workloads.generate(number), "seed": seed}
    config = workload["config"]
    config["enable_prefix_caching"] = True
    config["offload"] = {
        "factor": rng.choice((1, 1, 2, 3)), "num_cpu_blocks": rng.choice((2, 5, 12, 60)),
        "load_steps": rng.choice((0, 0, 1, 3)), "store_steps": rng.choice((0, 0, 1, 2)),
    }  # fmt: skip
    stems = [[rng.randint(10, 40) for _ in range(rng.randint(8, 28))] for _ in range(4)]
    for event in workload["events"]:
        event["step"] *= 2
        for add in event["add"]:
            stem = rng.choice(stems)
            own = [rng.randint(10, 40) for _ in range(rng.choice((0, 0, 1, 4)))]
            add["prompt_token_ids"] = [*stem[: rng.randint(4, len(stem))], *own]
    longest = max(
        len(add["prompt_token_ids"]) + add["max_tokens"]
        for event in workload["events"] for add in event["add"]
    )  # fmt: skip
    config["block_size"] = size = rng.choice((1, 2, 4))
    config["num_blocks"] = 1 - (-longest // size) + rng.choice((0, 2, 6))
    config["max_model_len"] = longest + 1
    config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], longest + 1)
    return workload


class _Offloading(Connector):
    """The real half, and a worker whose transfers take steps."""

    def __init__(self, config: dict[str, Any]) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
            OffloadingConnectorScheduler,
        )
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        from conformance.real import FullAttentionSpec, _spec

        super().__init__({})
        told, size = config["offload"], config["block_size"]
        spec = _spec({"kind": "full", "block_size": size})
        assert isinstance(spec, FullAttentionSpec)
        self.load_steps, self.store_steps = told["load_steps"], told["store_steps"]
        self._made = OffloadingWorkerMetadata
        self._real = OffloadingConnectorScheduler(
            SimpleNamespace(
                gpu_block_size=(size,), block_size_factor=told["factor"], hash_block_size=size,
                kv_cache_config=SimpleNamespace(
                    kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]
                ),
                vllm_config=SimpleNamespace(
                    parallel_config=SimpleNamespace(world_size=1),
                    cache_config=SimpleNamespace(enable_prefix_caching=True),
                ),
                get_manager=lambda: CPUOffloadingManager(told["num_cpu_blocks"]),
            )
        )  # fmt: skip
        self.jobs: list[list[Any]] = []
        """Those that begin in the step under way."""
        self.under_way: dict[int, tuple[int, str]] = {}
        """By number: the step whose update reports it, and the request of a load."""
        self.completed: list[int] = []
        self.flushes = False
        """Whether a transfer had to end at once, since its blocks are to be overwritten."""

    def get_num_new_matched_tokens(self, request: Any, found: int) -> tuple[int | None, bool]:
        count, is_async = self._real.get_num_new_matched_tokens(request, found)
        return count, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        self._real.update_state_after_alloc(request, blocks, external)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._real.request_finished(request)
        return False, None

    def build_connector_meta(self, plan: Any) -> None:
        meta = self._real.build_connector_meta(plan)
        self.flushes = self.flushes or any(n in self.under_way for n in meta.jobs_to_flush)
        self.jobs = []
        for number, job in meta.load_jobs.items():
            host, cache = (list(map(int, spec.block_ids)) for spec in job.transfer_spec)
            self.jobs.append(["load", job.req_id, host, cache])
            self.under_way[number] = self.now + self.load_steps, job.req_id
            self.loads[job.req_id] = self.now + self.load_steps
        for number, job in meta.store_jobs.items():
            cache, host = (list(map(int, spec.block_ids)) for spec in job.transfer_spec)
            self.jobs.append(["store", job.req_id, host, cache])
            self.under_way[number] = self.now + self.store_steps, ""

    def reports(self) -> tuple[list[str], list[str]]:
        self.completed = [n for n, (due, _) in self.under_way.items() if due <= self.now]
        for number in self.completed:
            del self.under_way[number]
        return super().reports()

    def output(self, recving: list[str], sending: list[str], invalid: Any = ()) -> Any:
        output = super().output(recving, sending, invalid)
        output.kv_connector_worker_meta = self._made(dict.fromkeys(self.completed, 1))
        return output

    def update_connector_output(self, output: Any) -> None:
        self._real.update_connector_output(output)


class _RunOffloading(Run):
    """A run with the real connector attached."""

    def __init__(self, workload: dict[str, Any], real: Real) -> None:
        super().__init__(workload, real)
        self.connector = self.scheduler.connector = _Offloading(self.config)

    def _observe_connector(self, step: dict[str, Any]) -> None:
        super()._observe_connector(step)
        step["offload_jobs"] = self.connector.jobs
        step["completed_jobs"] = len(self.connector.completed)


def record(seeds: Iterable[int] = SEEDS, real: Real | None = None) -> Iterator[recording.Recording]:
    """Each seed on the real scheduler.

    Left out are those where its queue stands for ever, and those in which a store under way must
    end at once since its blocks are given to another: here a store copies before that can be.
    """
    for seed in seeds:
        run = _RunOffloading(generate(seed), real or installed())
        try:
            entry = run.recorded()
        except (Stalled, RefusedError):
            if run.connector.flushes or not run.steps[-1]["num_scheduled_tokens"]:
                continue
            raise
        if run.connector.flushes:
            continue
        for step in entry["steps"]:
            step.pop("sampled_token_ids", None)
        yield entry

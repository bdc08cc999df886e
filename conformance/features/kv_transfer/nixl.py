"""A prefill and a decode engine's real schedulers, each with the real scheduler's half of NIXL.

    PYTHONPATH=upstream python -m conformance.features.kv_transfer.nixl FILE     # with torch

No NIXL and no GPU: what a worker would report is said here. Each leg is what the pinned `Scheduler`
and `vllm/distributed/kv_transfer/kv_connector/v1/nixl/scheduler.py:51` `NixlConnectorScheduler`
decide, with blocks of 16 tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conformance.recorders.source import installed
from conformance.recorders.stand_ins import Connector

BLOCK = 16
ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
"""What a proxy sends with the prefill leg."""


class _Nixl(Connector):
    """The real half; the worker's is said by the caller."""

    def __init__(self, scheduler: Any, engine_id: str) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import (
            NixlConnectorScheduler,
        )

        super().__init__({})
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK),
            parallel_config=SimpleNamespace(data_parallel_index=0, tensor_parallel_size=1),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
            kv_transfer_config=SimpleNamespace(
                get_from_extra_config=lambda name, default: default, kv_buffer_device="cuda"
            ),
        )
        self.real = NixlConnectorScheduler(config, engine_id, scheduler.kv_cache_config)
        self.received: dict[str, Any] = {}
        """Reads that begin: per request the blocks here."""

    def get_num_new_matched_tokens(self, request: Any, found: int) -> tuple[int | None, bool]:
        count, is_async = self.real.get_num_new_matched_tokens(request, found)
        return count, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        self.real.update_state_after_alloc(request, blocks, external)

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        return self.real.request_finished(request, (block_ids,))

    def build_connector_meta(self, plan: Any) -> None:
        meta = self.real.build_connector_meta(plan)
        for name, each in meta.reqs_to_recv.items():
            self.received[name] = [list(group) for group in each.local_block_ids]

    def on_new_request(self, request: Any) -> None:
        self.real.on_new_request(request)

    def update_connector_output(self, output: Any) -> None:
        self.real.update_connector_output(output)


class Engine:
    """One scheduler with its half of NIXL."""

    def __init__(self, name: str, num_blocks: int = 20, policy: str = "fail") -> None:
        self.real = installed()
        self.scheduler = self.real.make_scheduler({
            "num_blocks": num_blocks, "block_size": BLOCK, "max_num_seqs": 4,
            "max_num_batched_tokens": 256, "long_prefill_token_threshold": 0,
            "enable_prefix_caching": True, "enable_chunked_prefill": True, "max_model_len": 256,
            "policy": "fcfs",
        })  # fmt: skip
        self.connector = self.scheduler.connector = _Nixl(self.scheduler, name)
        self.scheduler.recompute_kv_load_failures = policy != "fail"
        self.requests: dict[str, Any] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int, params: Any) -> Any:
        """Queue a request with its `kv_transfer_params`."""
        add = {
            "request_id": name, "prompt_token_ids": prompt, "max_tokens": max_tokens,
            "priority": 0, "arrival_time": 0.0, "ignore_eos": True,
        }  # fmt: skip
        request = self.requests[name] = self.real.make_request(add, BLOCK, 2)
        request.kv_transfer_params = None if params is None else dict(params)
        self.scheduler.add_request(request)
        return request

    def step(self, recving: Any = (), sending: Any = (), invalid: Any = ()) -> dict[str, int]:
        """Plan, sample 7 in each row that is complete, update; the plan."""
        plan = self.scheduler.schedule()
        planned = dict(plan.num_scheduled_tokens)
        sampled = {name: [7] for name in planned if not self.requests[name].is_prefill_chunk}
        output = self.real.runner_output(plan, sampled)
        output.kv_connector_output = self.connector.output(list(recving), list(sending), invalid)
        given = self.scheduler.update_from_output(plan, output)
        self.params = next(
            (o.kv_transfer_params for of in given.values() for o in of.outputs
             if o.kv_transfer_params), None,
        )  # fmt: skip
        return planned

    def blocks(self, name: str) -> list[int]:
        """The blocks that a request holds, none where it is gone."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(name)[0])


def prefill(num_tokens: int) -> tuple[Engine, dict[str, Any]]:
    """The prefill leg: the engine, and what came."""
    engine = Engine("P")
    prompt = list(range(100, 100 + num_tokens))
    request = engine.add("p", prompt, 1, ASKED)
    plan = engine.step()
    params = json.loads(json.dumps(engine.params))
    return engine, {
        "plan": plan, "status": request.status.name, "held": engine.blocks("p"), "params": params,
    }  # fmt: skip


def decode(
    num_tokens: int, params: dict[str, Any], warm: bool = False, num_blocks: int = 20,
    policy: str = "fail", invalid: int | None = None, aborts: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The decode leg, up to its first token."""
    engine = Engine("D", num_blocks, policy)
    prompt = list(range(100, 100 + num_tokens))
    if warm:
        engine.add("before", prompt, 1, None)
        engine.step()
    request = engine.add("d", prompt, 3, params)
    if aborts:
        engine.real.abort(engine.scheduler, "d")
        engine.step()
        return {"status": request.status.name, "read": engine.connector.received.get("d")}
    plans, statuses = [engine.step()], [request.status.name]
    held, read = engine.blocks("d"), engine.connector.received.get("d")
    if held:
        bad = {held[invalid]} if invalid is not None else set()
        plans.append(engine.step(recving=["d"], invalid=bad))
        statuses.append(request.status.name)
        computed = request.num_computed_tokens
        plans.append(engine.step())
        statuses.append(request.status.name)
    else:
        computed = request.num_computed_tokens
    return {
        "plans": plans, "statuses": statuses, "held": held, "read": read,
        "computed_when_reported": computed,
    }  # fmt: skip


def lines() -> list[dict[str, Any]]:
    """What the real statistics print of transfers whose durations and bytes are given here."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

    found = []
    for transfers in ([(2_500, 120, 24_969_216, 3048)], [(900, 80, 393_216, 48)] * 3, []):
        stats = NixlKVConnectorStats()
        for duration, post, size, count in transfers:
            stats.record_transfer(
                SimpleNamespace(
                    xferDuration=duration, postDuration=post, totalBytes=size, descCount=count
                )
            )
        text = ", ".join(f"{name}={value}" for name, value in stats.reduce().items())
        found.append({"transfers": transfers, "text": f"KV Transfer metrics: {text}"})
    return found


def record() -> dict[str, Any]:
    """All legs, and lines of the log."""
    engine, p = prefill(40)
    after_send = [len(engine.blocks("p"))]
    engine.step(sending=["p"])
    after_send.append(len(engine.blocks("p")))
    params = p["params"]
    legs = {
        "prefill 40": p, "blocks of P before and after sent": after_send,
        "decode 40": decode(40, params), "decode 40, warm": decode(40, params, warm=True),
        "decode 40, two blocks": decode(40, params, num_blocks=3),
        "decode 40, fail": decode(40, params, invalid=1),
        "decode 40, recompute": decode(40, params, policy="recompute", invalid=1),
        "decode 40, aborted": decode(40, params, aborts=True),
    }  # fmt: skip
    for count in (1, 15, 16, 17):
        _, of = prefill(count)
        legs[f"prefill {count}"] = of
        legs[f"decode {count}"] = decode(count, of["params"])
    return json.loads(
        json.dumps({"upstream": installed().upstream, "legs": legs, "lines": lines()})
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(record(), indent=1) + "\n")

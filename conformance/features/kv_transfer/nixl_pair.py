"""Two real schedulers with the scheduler's half of `NixlConnector`, and a wire that a script is.

    PYTHONPATH=upstream python -m conformance.record nixl_pair     # with torch, for a processor

NIXL itself is not needed: the half beside the scheduler decides and names blocks, and the worker's
half, which moves bytes, is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

BLOCK_SIZE = 16
ABOUT = (
    "A prompt of 3, 4, 5, ... through P and then D; block size 16. 'steps' holds what either did, "
    "in order: 'planned', 'status', 'computed', 'block_ids', 'free_blocks' between plan and "
    "update; 'to_read', the blocks that the metadata tells D's worker to fill (none: tell P "
    "alone), 'to_send', whose blocks P's worker may let be read, 'leases', whose leases D renews; "
    "'tokens' and 'finished' after the update. A read that begins in a step of D is reported "
    "'load_steps' later, to both. 'kv_transfer_params' are what P's answer holds."
)


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt on its way through P and D."""

    name: str
    prompt_len: int = 40
    load_steps: int = 1
    """Steps from the one in which a read begins to the one whose update reports it."""
    warm: int = 0
    """Tokens of the prompt that D has computed before, for another client."""
    num_blocks: int = 20
    """Of D's pool, the null block among them."""
    invalid: tuple[int, ...] = ()
    """Which of the blocks that D reads fail, by place in its table."""
    policy: str = "fail"
    aborts_at: int = -1
    """The step in which the client of D goes away; 0: before D was asked to plan."""


CASES = (
    Case("a load of 40 tokens", load_steps=2),
    Case("D has the first two blocks", warm=40),
    Case("D is full", num_blocks=3),
    Case("the second block fails", invalid=(1,), policy="fail"),
    Case("the second block fails, recompute", invalid=(1,), policy="recompute"),
    Case("aborted before it is looked at", aborts_at=0),
    Case("aborted while it loads", aborts_at=1, load_steps=3),
    *(Case(f"a prompt of {n}", prompt_len=n) for n in (1, 15, 16, 17, 48)),
)
MOST = 8
"""Steps of D at most."""


def cases() -> Iterator[dict[str, Any]]:
    """Each of `CASES`, step by step: one line."""
    yield from map(recorded, CASES)


class Engine:
    """A real scheduler with its connector's half; what a worker would report is said to `step`."""

    def __init__(self, name: str, num_blocks: int = 20, policy: str = "fail") -> None:
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from conformance import real

        config = {
            "num_blocks": num_blocks, "block_size": BLOCK_SIZE, "max_num_seqs": 4,
            "max_num_batched_tokens": 256, "long_prefill_token_threshold": 0,
            "enable_prefix_caching": True, "enable_chunked_prefill": True, "max_model_len": 256,
            "policy": "fcfs",
        }  # fmt: skip
        self.real = real
        self.scheduler: Any = real.make_scheduler(config)
        told = self.scheduler.vllm_config
        told.kv_transfer_config = KVTransferConfig(
            kv_connector="NixlConnector", kv_role="kv_both", engine_id=name,
            kv_load_failure_policy=policy,
        )  # fmt: skip
        # What the scheduler's constructor does where a connector is configured.
        self.connector: Any = KVConnectorFactory.create_connector(
            config=told, role=KVConnectorRole.SCHEDULER,
            kv_cache_config=self.scheduler.kv_cache_config,
        )  # fmt: skip
        self.scheduler.connector = self.connector
        self.connector.bind_gpu_block_pool(self.scheduler.kv_cache_manager.block_pool)
        self.scheduler.recompute_kv_load_failures = policy == "recompute"
        self.requests: dict[str, Any] = {}
        self.read: dict[str, list[list[int]]] = {}
        """By request the blocks that the worker was told to fill, group by group."""

    def add(self, name: str, length: int, max_tokens: int, params: Mapping[str, Any]) -> Any:
        """Queue a prompt of the one text that there is; the real request."""
        add = {
            "request_id": name, "prompt_token_ids": list(range(3, 3 + length)), "priority": 0,
            "max_tokens": max_tokens, "arrival_time": 0.0, "ignore_eos": True,
        }  # fmt: skip
        request = self.real.make_request(add, BLOCK_SIZE, 2)
        request.kv_transfer_params = dict(params) or None
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def blocks(self, name: str) -> list[int]:
        """The blocks that a request holds, none where it is gone."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(name)[0])

    def step(
        self, received: Collection[str] = (), sent: Collection[str] = (),
        invalid: Collection[int] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """Plan, note, and take one token of each row that samples."""
        from vllm.v1.outputs import KVConnectorOutput

        plan = self.scheduler.schedule()
        meta = plan.kv_connector_metadata
        begun = {
            name: [list(group) for group in read.local_block_ids]
            for name, read in meta.reqs_to_recv.items()
        }
        self.read |= begun
        pool = self.scheduler.kv_cache_manager.block_pool
        beats = self.connector.connector_scheduler._heartbeat_by_engine  # sent every 5 s
        noted: dict[str, Any] = {
            "planned": dict(plan.num_scheduled_tokens),
            "status": {name: r.status.name for name, r in self.scheduler.requests.items()},
            "computed": {name: r.num_computed_tokens for name, r in self.requests.items()},
            "block_ids": {name: self.blocks(name) for name in self.scheduler.requests},
            "free_blocks": pool.get_num_free_blocks(),
            "to_read": {name: [b for ids in groups for b in ids] for name, groups in begun.items()},
            "to_send": sorted(meta.reqs_to_send),
            "leases": sorted(name for beat in beats.values() for name in beat.req_ids),
        }  # fmt: skip
        tokens = {
            name: 7 for name in plan.num_scheduled_tokens
            if self.requests[name].num_computed_tokens >= self.requests[name].num_tokens
        }  # fmt: skip
        output = self.real.runner_output(plan, tokens)
        output.kv_connector_output = KVConnectorOutput(
            finished_sending=set(sent), finished_recving=set(received),
            invalid_block_ids=set(invalid),
        )  # fmt: skip
        noted["finished"] = {}
        for told in self.scheduler.update_from_output(plan, output).values():
            for each in told.outputs:
                if each.kv_transfer_params:
                    noted["kv_transfer_params"] = each.kv_transfer_params
                if each.finish_reason is not None:
                    noted["finished"][each.request_id] = str(each.finish_reason)
        noted["tokens"] = {name: r.num_output_tokens for name, r in self.requests.items()}
        return noted


ASKS = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
"""What a proxy asks of P."""


def recorded(case: Case) -> dict[str, Any]:
    """One case."""
    p, d = Engine("P"), Engine("D", case.num_blocks, case.policy)
    p.add("r", case.prompt_len, 1, ASKS)
    steps: list[dict[str, Any]] = [{"engine": "P", **p.step()}]
    if case.warm:
        d.add("before", case.warm, 1, {})
        steps.append({"engine": "D", **d.step()})
    d.add("r", case.prompt_len, 3, steps[0]["kv_transfer_params"])
    reading: dict[str, int] = {}
    for number in range(MOST):
        if case.aborts_at == number:
            d.real.abort(d.scheduler, "r")
        due = {name for name, step in reading.items() if step <= number}
        reading = {name: step for name, step in reading.items() if name not in due}
        table = d.blocks("r") if due else ()
        steps.append(
            {"engine": "D", **d.step(due, invalid=[table[i] for i in case.invalid if due])}
        )
        begun: dict[str, list[int]] = steps[-1]["to_read"]
        reading |= {name: number + case.load_steps for name, blocks in begun.items() if blocks}
        notices = due | {name for name, blocks in begun.items() if not blocks}
        steps.append({"engine": "P", **p.step(sent=notices)})
        if not (d.scheduler.requests or p.scheduler.requests):
            break
    return {"case": asdict(case), "steps": steps}

"""The legs of lab 15-02, and lines that NIXL's own statistics print.

    PYTHONPATH=upstream python -m conformance.features.kv_transfer.nixl FILE     # with torch

The engines are those of `nixl_pair`: real schedulers with the scheduler's half of NIXL, blocks of
16 tokens. No NIXL and no GPU: what a worker would report is said here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conformance.features.kv_transfer.nixl_pair import ASKS, Engine


def prefill(num_tokens: int) -> tuple[Engine, dict[str, Any]]:
    """The prefill leg: the engine, and what came."""
    engine = Engine("P")
    request = engine.add("p", num_tokens, 1, ASKS)
    step = engine.step()
    return engine, {
        "plan": step["planned"], "status": request.status.name, "held": engine.blocks("p"),
        "params": json.loads(json.dumps(step["kv_transfer_params"])),
    }  # fmt: skip


def decode(
    num_tokens: int, params: dict[str, Any], warm: bool = False, num_blocks: int = 20,
    policy: str = "fail", invalid: int | None = None, aborts: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The decode leg, up to its first token."""
    engine = Engine("D", num_blocks, policy)
    if warm:
        engine.add("before", num_tokens, 1, {})
        engine.step()
    request = engine.add("d", num_tokens, 3, params)
    if aborts:
        engine.real.abort(engine.scheduler, "d")
        engine.step()
        return {"status": request.status.name, "read": engine.read.get("d")}
    plans, statuses = [engine.step()["planned"]], [request.status.name]
    held, read = engine.blocks("d"), engine.read.get("d")
    computed = request.num_computed_tokens
    if held:
        bad = {held[invalid]} if invalid is not None else set()
        plans.append(engine.step(["d"], (), bad)["planned"])
        statuses.append(request.status.name)
        computed = request.num_computed_tokens
        plans.append(engine.step()["planned"])
        statuses.append(request.status.name)
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
    engine.step(sent=["p"])
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
        json.dumps({"upstream": engine.real.upstream, "legs": legs, "lines": lines()})
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(record(), indent=1) + "\n")

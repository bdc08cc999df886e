"""Record which engine the real v0.22.1 front end chooses, request by request."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

Case = dict[str, Any]

ABOUT = (
    '`{"num_engines", "client_index", "client_count", "events": [...]}`. An event is `["choose", '
    "rank, chosen]`: `rank` is what the request asks for (None: any engine), `chosen` the answer; "
    '`["update", counts]`: published counts, [waiting, running] of each engine; or `["counts", '
    "counts]`: what the front end believes at this point."
)


def cases(count: int = 1000) -> Iterator[Case]:
    """The cases; the same every time."""
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    for number in range(count):
        rng = random.Random(number)
        num_engines = rng.choice((2, 2, 3, 4, 8, 16))
        client_count = rng.choice((1, 1, 2, 3, 8))
        client_index = rng.randrange(client_count)
        client = DPLBAsyncMPClient.__new__(DPLBAsyncMPClient)  # no processes, no sockets
        client.client_count, client.client_index = client_count, client_index
        client.eng_start_index = num_engines * client_index // client_count
        client.core_engines = [bytes([i]) for i in range(num_engines)]
        client.lb_engines = [[0, 0] for _ in range(num_engines)]
        client.reqs_in_flight = {}
        events: list[list[Any]] = []
        busy = rng.choice((2, 10, 200))
        for step in range(40):
            if rng.random() < 0.15:
                counts = [
                    [rng.randint(0, busy // 2), rng.randint(0, busy)] for _ in range(num_engines)
                ]
                events.append(["update", counts])
                client.lb_engines = [list(pair) for pair in counts]
            else:
                rank = rng.randrange(num_engines) if rng.random() < 0.1 else None
                asked = SimpleNamespace(
                    request_id=f"r{step}", data_parallel_rank=rank, pooling_params=None
                )
                events.append(["choose", rank, client.get_core_engine_for_request(asked)[0]])
            if step % 10 == 9:
                events.append(["counts", [list(pair) for pair in client.lb_engines]])
        yield {
            "num_engines": num_engines, "client_index": client_index,
            "client_count": client_count, "events": events,
        }  # fmt: skip

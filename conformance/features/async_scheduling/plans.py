"""Record plans of the asynchronous scheduler of the real v0.22.1."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Case = dict[str, Any]
EOS, OTHER = 2, 7

ABOUT = (
    "The real `AsyncScheduler` with a queue two deep: step k+1 is planned before step k is "
    'known. `{"config", "eos_token_id", "requests", "outputs", "steps"}`. `requests` are all '
    "added before step 0. A step holds `num_scheduled_tokens` (empty when nothing can be "
    "planned), `running` with [num_tokens, num_computed_tokens, num_output_placeholders] of "
    "each after planning, and `updated`, the step whose tokens were taken in afterwards (None "
    "while the queue fills), with the ids that `finished` then. `outputs` is what each request "
    "said; a token sampled past the end is dropped by the real scheduler and not listed."
)


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    from collections import deque

    from conformance import real

    rng = random.Random(10)
    for _ in range(40):
        config = {
            "num_blocks": 256, "block_size": 4, "enable_prefix_caching": False,
            "max_num_seqs": rng.choice((1, 2, 4)), "max_num_batched_tokens": rng.choice((4, 8, 64)),
            "long_prefill_token_threshold": 0, "enable_chunked_prefill": True,
            "max_model_len": rng.choice((12, 64)), "policy": "fcfs",
        }  # fmt: skip
        scheduler = real.make_scheduler(config, async_scheduling=True)
        adds, script = [], {}
        for index in range(rng.randint(1, 4)):
            max_tokens = rng.randint(1, 6)
            script[f"r{index}"] = [EOS if rng.random() < 0.25 else OTHER for _ in range(8)]
            adds.append(
                {"request_id": f"r{index}", "prompt_token_ids": [OTHER] * rng.randint(1, 10),
                 "max_tokens": max_tokens, "priority": 0, "arrival_time": float(index),
                 "ignore_eos": False}
            )  # fmt: skip
        live = {add["request_id"]: real.make_request(add, 4, EOS) for add in adds}
        for request in live.values():
            scheduler.add_request(request)
        position = dict.fromkeys(live, 0)
        queue: deque[tuple[int, Any, dict[str, int]]] = deque()
        steps: list[dict[str, Any]] = []
        while scheduler.has_unfinished_requests() or queue:
            plan = scheduler.schedule()
            sampled = {}
            for request_id in plan.num_scheduled_tokens:
                if not live[request_id].is_prefill_chunk:
                    sampled[request_id] = script[request_id][position[request_id]]
                    position[request_id] += 1
            if plan.num_scheduled_tokens:
                queue.append((len(steps), plan, sampled))
            running = {
                r.request_id: [r.num_tokens, r.num_computed_tokens, r.num_output_placeholders]
                for r in scheduler.running
            }
            updated, before = None, set(scheduler.requests)
            if len(queue) == 2 or not plan.num_scheduled_tokens:
                updated, old_plan, old_sampled = queue.popleft()
                scheduler.update_from_output(old_plan, real.runner_output(old_plan, old_sampled))
            steps.append(
                {
                    "num_scheduled_tokens": dict(plan.num_scheduled_tokens),
                    "running": running,
                    "updated": updated,
                    "finished": sorted(before - set(scheduler.requests)),
                }
            )
        yield {
            "config": config,
            "eos_token_id": EOS,
            "requests": adds,
            "outputs": {r: list(request.output_token_ids) for r, request in live.items()},
            "finish_reasons": {r: str(live[r].get_finished_reason()) for r in live},
            "steps": steps,
        }

"""Random faults by the thousand: `python -m mini_vllm.kv_transfer.tests.faults 10000`.

Pairs of engines of consecutive seeds, until so many faults have happened. After each, every request
has ended with the tokens of one engine or with an error that says why, and every block is free.
"""

from __future__ import annotations

import sys
from collections import Counter

from mini_vllm.kv_transfer.tests.support import Pair, alone, random_pair, transfer_of


def check(made: Pair) -> None:
    """What must hold when a pair has nothing left to do."""
    for job in made.jobs.values():
        if (request := job.request) is None:
            continue  # its producer or its client went away before
        if request.finish_reason == "length":
            assert request.output_token_ids == alone(job.prompt, job.max_tokens), job
        elif request.finish_reason == "error":
            assert str(request.stop_reason).startswith("its KV could not be loaded: "), job
        else:
            assert request.finish_reason == "abort" and job.aborts_at >= 0, job
    for of in (made.consumer,) if made.is_dead else (made.producer, made.consumer):
        room = transfer_of(of)
        assert of.scheduler.kv.usage == 0.0 and not room.gate.held and not room.gate.loading
        assert not len(room.worker_half.outbox) and not room.worker_half.inbox.loads


def run(most_faults: int, seed: int = 0) -> Counter[str]:
    """Faults that happened, by kind, "pairs", and in which order two reports of an aborted request
    came."""
    happened: Counter[str] = Counter()
    orders: Counter[str] = Counter()
    num_pairs = 0
    while sum(happened.values()) < most_faults:
        made = random_pair(seed + num_pairs, 0.6)
        try:
            made.run()
            check(made)
        except Exception as error:
            raise AssertionError(f"seed {seed + num_pairs}: {error}") from error
        happened.update(made.network.happened)
        orders.update(made.orders)
        num_pairs += 1
    return Counter({**happened, **orders, "pairs": num_pairs})


if __name__ == "__main__":
    found = run(int(sys.argv[1]))
    for kind, count in found.most_common():
        print(f"{count:7,} {kind}")

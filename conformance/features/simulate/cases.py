"""Write the cases of lab 18-03: what people who run vLLM ask, as its own scheduler decides it.

    python -m conformance.features.simulate.cases phase-18-.../recordings/cases.jsonl.gz

Promises: every step is the pinned scheduler's, of its archive, without torch; `upgrade` has the
steps of 0.33.0 beside them, and `rate` the counters of 0.11.0. A case holds no answer, only what is
asked: a symptom, the request that has it, and a goal that can be counted.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.real_core import core_of
from conformance.recorders.run import Run, Stalled, run

LATER = "0.33.0"
COUNTS_ALL = "0.11.0"
"""Its hit rate has the look-ups of preempted requests in it: upstream's 25780."""
KINDS = ("hits", "queue", "gaps", "twice", "adapters", "upgrade", "alive", "rate")
CONFIG: dict[str, Any] = {
    "num_blocks": 200, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 256,
    "long_prefill_token_threshold": 0, "enable_prefix_caching": True,
    "enable_chunked_prefill": True, "max_model_len": 1024, "policy": "fcfs",
}  # fmt: skip


class Workload:
    """Requests as they are added; tokens that no other request has, unless they are given."""

    def __init__(self, seed: int, **knobs: Any) -> None:
        self.draw, self.seed = random.Random(seed), seed
        self.config = CONFIG | knobs
        self.events: dict[int, dict[str, Any]] = {}
        self.outputs: dict[str, list[int]] = {}

    def add(
        self, step: int, prompt: int, outputs: int, begins: list[int] | None = None,
        priority: int = 0, lora: int = 0,
    ) -> str:  # fmt: skip
        """A request; its id."""
        name = f"r{len(self.outputs)}"
        begins = begins or []
        own = [10_000 * (len(self.outputs) + 1) + place for place in range(prompt - len(begins))]
        added = {
            "request_id": name, "prompt_token_ids": begins + own, "max_tokens": outputs,
            "priority": priority, "arrival_time": float(step), "ignore_eos": True,
        }  # fmt: skip
        if self.config.get("max_loras"):
            added["lora"] = lora
        self.events.setdefault(step, {"step": step, "add": [], "abort": []})["add"].append(added)
        self.outputs[name] = [7] * outputs
        return name

    def recorded(self, kind: str, subject: str, goal: dict[str, int], **more: Any) -> Any:
        """The case: what vLLM decides, and what is asked."""
        asked = {
            "seed": self.seed, "eos_token_id": 2, "config": self.config,
            "events": [self.events[step] for step in sorted(self.events)], "outputs": self.outputs,
        }  # fmt: skip
        entry = _recorded(asked)
        found = {**entry, "case": kind, "subject": subject, "goal": goal, **more}
        if kind == "upgrade":
            later = run(asked, core_of(LATER), grows=False)
            found["later"] = {"release": LATER, "steps": later["steps"]}
        if kind == "rate":
            found["dashboard"] = _hit_rate(asked, entry["steps"])
        return found


def _recorded(asked: dict[str, Any]) -> Any:
    """A workload's steps; where the scheduler stands still for ever, with the first that do."""
    made = Run(copy.deepcopy(asked), core_of())
    try:
        return made.recorded()
    except Stalled:
        return Run(copy.deepcopy(asked), core_of()).recorded(most=len(made.steps) - 1)


def _hit_rate(asked: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """What the counters of `COUNTS_ALL` say after the same requests."""
    core = core_of(COUNTS_ALL)
    made = Run(copy.deepcopy(asked), core)
    manager = made.scheduler.kv_cache_manager
    manager.log_stats = True
    stats = core.namespace.load("vllm.v1.metrics.stats").PrefixCacheStats()
    manager.prefix_cache_stats = stats
    theirs = made.recorded()["steps"]
    assert [step["num_scheduled_tokens"] for step in theirs] == [
        step["num_scheduled_tokens"] for step in steps
    ], "that release decides this workload otherwise"
    return {"release": COUNTS_ALL, "queries": stats.queries, "hits": stats.hits}


def hits(seed: int) -> Any:
    """Prompts that begin alike, with less than a block."""
    work = Workload(seed, block_size=64, num_blocks=80)
    shared = work.draw.randint(49, 62)
    begins = [3 + place for place in range(shared)]
    work.add(0, work.draw.randint(70, 120), 4)
    for turn in range(1, 6):
        work.add(4 * turn, work.draw.randint(90, 180), 4, begins)
    return work.recorded("hits", "r3", {"hits": 4 * 48})


def queue(seed: int) -> Any:
    """A long prompt at the head that does not fit, and short ones behind it."""
    work = Workload(seed, num_blocks=41)
    work.add(0, work.draw.randint(200, 240), 60 + work.draw.randint(0, 8))
    work.add(2, work.draw.randint(450, 500), 8, priority=5)
    for turn in range(4):
        work.add(3 + turn, work.draw.randint(20, 40), 4)
    return work.recorded("queue", "r3", {"worst_wait_of_subject": 4})


def gaps(seed: int) -> Any:
    """A request that decodes, and prompts that come together."""
    work = Workload(seed, max_num_batched_tokens=1024)
    subject = work.add(0, work.draw.randint(10, 20), 40)
    for _ in range(2):
        work.add(6, work.draw.randint(220, 330), 3)
    work.add(20, work.draw.randint(120, 200), 3)
    return work.recorded("gaps", subject, {"fullest_step": 64, "steps": 44})


def twice(seed: int) -> Any:
    """More running requests than the cache can hold to their end."""
    work = Workload(seed, num_blocks=26, enable_prefix_caching=False)
    for turn in range(6):
        work.add(turn // 3, work.draw.randint(50, 62), work.draw.randint(28, 40))
    return work.recorded("twice", "r0", {"preemptions": 0, "steps": 80})


def adapters(seed: int) -> Any:
    """One adapter per step, and requests for two."""
    work = Workload(seed, max_loras=1)
    work.add(0, work.draw.randint(20, 60), 24 + work.draw.randint(0, 9), lora=1)
    subject = work.add(2, work.draw.randint(20, 60), 6, lora=2)
    for turn in range(3):
        work.add(3 + turn, work.draw.randint(20, 60), 5, lora=1 if turn < 2 else 2)
    return work.recorded("adapters", subject, {"steps": 28})


def upgrade(seed: int) -> Any:
    """Turns of a few prompts in a small pool: which block is given away first."""
    work = Workload(seed, num_blocks=9, block_size=4, max_num_batched_tokens=64)
    for turn in range(16):
        begins = [100 * (turn % 3) + 3 + place for place in range(8)]
        work.add(6 * turn, 9 + work.draw.randint(0, 2), 4, begins)
    return work.recorded("upgrade", "r3", {"hits": 60})


def alive(seed: int) -> Any:
    """A request that outgrows the pool: it preempts itself, and stands at the head for ever."""
    work = Workload(seed, num_blocks=40)
    work.add(0, work.draw.randint(100, 160), 12)
    work.add(2, 600 + work.draw.randint(1, 20), 30 + work.draw.randint(0, 8))
    for turn in range(4):
        work.add(40 + turn, work.draw.randint(20, 40), 4)
    return work.recorded("alive", "r3", {"worst_wait_of_subject": 4}, health=200)


def rate(seed: int) -> Any:
    """As `twice`, and with the prefix cache: a victim finds its own blocks again."""
    work = Workload(seed, num_blocks=26)
    for turn in range(6):
        work.add(turn // 3, work.draw.randint(50, 62), work.draw.randint(28, 40))
    return work.recorded("rate", "r0", {"preemptions": 0, "steps": 80})


MAKE = {
    "hits": hits, "queue": queue, "gaps": gaps, "twice": twice, "adapters": adapters,
    "upgrade": upgrade, "alive": alive, "rate": rate,
}  # fmt: skip


def cases() -> Iterator[Any]:
    """Each kind three times: the first is shown, the others are for grading too."""
    for number, kind in enumerate(KINDS):
        for turn in range(3):
            yield MAKE[kind](1800 + 10 * number + turn)


def main() -> int:
    """Write the file."""
    with gzip.GzipFile(Path(sys.argv[1]), "wb", mtime=0) as file:
        for line in cases():
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write the cases of lab 18-03: what people who run vLLM ask, as its own scheduler decides it.

    python -m conformance.features.simulate.cases phase-18-.../recordings/cases.jsonl.gz

Promises: every step is the pinned scheduler's, of its archive, without torch; `upgrade` has the
steps of 0.33.0 beside them, `rate` the counters of 0.11.0, and `counters` those of 0.18.0 up to the
step in which `prometheus_client` refuses one. A case holds no answer, only what is asked: a
symptom, the request that has it, and a goal that can be counted.
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

from conformance.real_core import RealCore, core_of
from conformance.recorders.run import Run, Stalled, run
from conformance.recorders.stand_ins import Connector

LATER = "0.33.0"
COUNTS_ALL = "0.11.0"
"""Its hit rate has the look-ups of preempted requests in it: upstream's 25780."""
FALLS = "0.18.0"
"""Its counters fall: upstream's 36755. 0.19.0 cuts them off at 0, 37460 mends them."""
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
KINDS = ("hits", "queue", "gaps", "twice", "adapters", "upgrade", "alive", "rate", "counters")
CONFIG: dict[str, Any] = {
    "num_blocks": 200, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 256,
    "long_prefill_token_threshold": 0, "enable_prefix_caching": True,
    "enable_chunked_prefill": True, "max_model_len": 1024, "policy": "fcfs",
}  # fmt: skip


class Tier(Connector):
    """A store outside that takes every full block at the end of the step that computes it, and
    gives it back at once, as an offloading connector that loads while it is asked."""

    def __init__(self) -> None:
        super().__init__({})
        self.scheduler: Any = None
        self.block_size = 0
        self.stored: set[Any] = set()
        self.brought: dict[str, int] = {}
        """Tokens that this step's admissions take from it."""

    def get_num_new_matched_tokens(self, request: Any, found: int) -> tuple[int, bool]:
        """Full blocks beyond the `found` tokens; one token is left to be computed."""
        have = first = found // self.block_size
        while have < (request.num_tokens - 1) // self.block_size and (
            request.block_hashes[have] in self.stored
        ):
            have += 1
        return (have - first) * self.block_size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        self.brought[request.request_id] = external

    def build_connector_meta(self, plan: Any) -> None:
        """The plan is made, no counter has moved yet: what it will have computed is stored."""
        for name, count in plan.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            full = (request.num_computed_tokens + count) // self.block_size
            self.stored.update(request.block_hashes[:full])


class WithTier(Run):
    """A run whose scheduler has a `Tier`; its steps have `external`, what admissions took."""

    def __init__(self, asked: dict[str, Any], core: RealCore) -> None:
        super().__init__(asked, core)
        self.tier = self.connector = self.scheduler.connector = Tier()
        self.tier.scheduler, self.tier.block_size = self.scheduler, self.config["block_size"]

    def _observe(self, plan: Any, held: dict[str, list[int]]) -> dict[str, Any]:
        step = super()._observe(plan, held)
        step["external"] = {name: count for name, count in self.tier.brought.items() if count}
        self.tier.brought.clear()
        return step


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
        entry, said = _counted(asked) if kind == "counters" else (_recorded(asked), {})
        found = {**entry, **said, "case": kind, "subject": subject, "goal": goal, **more}
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


def _counted(asked: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A workload with a `Tier`, at the pin; and what the counters of `FALLS` come to on its way:
    their totals, and the step in which one would fall."""
    entry = WithTier(copy.deepcopy(asked), core_of()).recorded()
    core = core_of(FALLS)
    made = WithTier(copy.deepcopy(asked), core)
    new_stats = core.namespace.load("vllm.v1.metrics.stats").PromptTokenStats
    from prometheus_client import CollectorRegistry, Counter  # the recorder's alone

    totals = Counter("prompt_tokens_by_source", "-", ["source"], registry=CollectorRegistry())
    found: dict[str, Any] = {"release": FALLS}
    began: set[str] = set()
    update = made._update

    def counting(plan: Any, sampled: Any, reasons: Any) -> Any:
        """As `OutputProcessor` hands a step's first tokens to `IterationStats`."""
        planned = [made.live[name] for name in plan.num_scheduled_tokens]
        ended = update(plan, sampled, reasons)
        stats = new_stats()
        for request in planned:
            if request.num_output_tokens and request.request_id not in began:
                began.add(request.request_id)
                stats.update_from_output(
                    request.num_cached_tokens, request.num_external_computed_tokens,
                    request.num_prompt_tokens,
                )  # fmt: skip
        for source in SOURCES:
            try:
                totals.labels(source).inc(stats.get_by_source(source))
            except ValueError as error:
                found.setdefault("died", {"step": len(made.steps) - 1, "error": str(error)})
        if "died" not in found:
            found["totals"] = {s: int(totals.labels(s)._value.get()) for s in SOURCES}
        return ended

    made._update = counting  # type: ignore[method-assign]
    theirs = made.recorded()["steps"]
    assert [step["num_scheduled_tokens"] for step in theirs] == [
        step["num_scheduled_tokens"] for step in entry["steps"]
    ], f"{FALLS} decides this workload otherwise"
    assert "died" in found, "no counter falls"
    return entry, {"dashboard": found}


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


def counters(seed: int) -> Any:
    """A long prompt that is preempted before its first token, and a tier that has kept it."""
    work = Workload(seed, num_blocks=60, max_num_batched_tokens=64)
    begins = [3 + place for place in range(work.draw.randint(20, 60))]
    for turn in range(6):
        prompt = work.draw.randint(50, 60)
        work.add(0, prompt, 50 + work.draw.randint(0, 9), begins if turn == 5 else None)
    work.add(14, len(begins) // 16 * 16 + work.draw.randint(468, 480), 6, begins)
    work.add(16, work.draw.randint(20, 40), 6)
    return work.recorded("counters", "r7", {"falls": 0, "steps": 75}, tier=True)


MAKE = {
    "hits": hits, "queue": queue, "gaps": gaps, "twice": twice, "adapters": adapters,
    "upgrade": upgrade, "alive": alive, "rate": rate,
    "counters": counters,
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

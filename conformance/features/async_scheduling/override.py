"""An override of a vendor's scheduler on the real cores of several releases, frame by frame.

A device hands back a token for a row that is still being prefilled; its scheduler must drop it.
Lab 17-04 has three ways to do that. Each runs here as a subclass of a release's own
`AsyncScheduler`: `python -m conformance.features.async_scheduling.override` writes the lab's
recordings. It needs the archives of `RELEASES` (`course upstream fetch --version`).

A frame is one request's tokens of one step, on their way while the next step is planned. The model
is greedy: its token depends on the place in the sequence alone, so one that is lost is sampled
again.
"""

from __future__ import annotations

import copy
import gzip
import inspect
import json
import logging
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance import workload_file
from conformance.features import ROOT
from conformance.real_core import core_of
from conformance.recorders.run import RefusedError, Run
from conformance.workloads import Workload
from labkit.modules import load_module

LAB = ROOT / "phase-17-hardware-backends-and-plugins" / "labs" / "lab-04-review-a-plugin"
RELEASES = ("0.22.1", "0.23.0", "0.24.0", "0.26.0", "0.27.0", "0.28.0", "0.30.0", "0.33.0")
FRAMES_OF = ("0.22.1", "0.26.0", "0.27.0", "0.33.0")
"""The releases whose frames are kept: the pin, the last on which the override held, the next, the
newest."""
SEEDS = tuple(range(40))
FRAME_SEEDS = tuple(range(12))
MADE_UP = 99
"""The token that the device makes up for a row that is not to sample; no script holds it."""

DEVICES = ("none", "early", "every")
"""For which rows of a prompt that is not yet whole the device makes up a token: for none, for those
whose next chunk cannot be the last, for every one."""


def workload(seed: int) -> Workload:
    """Requests that do not fit together: chunked prompts, decodes and preemptions."""
    rng = random.Random(seed)
    sizes = [
        (rng.choice((3, 5, 9, 14, 20, 26)), rng.randint(6, 20)) for _ in range(rng.randint(3, 6))
    ]
    most = max(-(-sum(size) // 4) for size in sizes)
    requests = "\n".join(
        f"- {{id: r{number}, prompt: {prompt}, max_tokens: {tokens}, step: {rng.randint(0, 4)}}}"
        for number, (prompt, tokens) in enumerate(sizes)
    )
    made = workload_file.parse(
        f"config: {{num_blocks: {most + 2 + rng.randint(0, 3)}, max_num_seqs: 6, block_size: 4, "
        f"async_scheduling: true, max_num_batched_tokens: {rng.randint(6, 12)}, "
        f"enable_prefix_caching: false}}\nrequests:\n{requests}\n"
    )
    for name, said in made["outputs"].items():
        made["outputs"][name] = [10 + place % 60 for place in range(len(said))]
    return made


class Device(Run):
    """A run on a device that samples by place, and makes up tokens; its scheduler may be mixed."""

    def __init__(self, made: Workload, version: str, device: str, mixin: type | None) -> None:
        real = copy.copy(core_of(version))
        if mixin is not None:
            base = real._async_scheduler
            real._async_scheduler = type(mixin.__name__, (mixin, base), {})
        super().__init__(copy.deepcopy(made), real)
        budget = self.config["max_num_batched_tokens"]
        self.least_left = {"none": math.inf, "early": budget, "every": 0}[device]
        self.requests: dict[str, Any] = {}
        self.plans: list[tuple[Any, dict[str, dict[str, Any]]]] = []
        self.arrived: list[tuple[int, list[dict[str, Any]]]] = []

    def _makes_up(self, request: Any, least_left: float) -> bool:
        """Whether the device makes up a token for this row of the step just planned."""
        left: int = request.num_tokens - request.num_computed_tokens
        return bool(request.is_prefill_chunk) and left > least_left

    def _sample(self, plan: Any) -> dict[str, list[int]]:
        self.requests |= self.live
        rows = {name: self._row(self.live[name]) for name in plan.num_scheduled_tokens}
        self.plans.append((plan, rows))
        sampled: dict[str, list[int]] = {}
        for name in plan.num_scheduled_tokens:
            request = self.live[name]
            if request.is_prefill_chunk:
                if self._makes_up(request, self.least_left):
                    sampled[name] = [MADE_UP]
                continue
            place = request.num_computed_tokens - request.num_prompt_tokens
            said = self.script[name]
            sampled[name] = [said[place] if place < len(said) else 0]
        return sampled

    def _row(self, request: Any) -> dict[str, Any]:
        """A request as the plan leaves it, and which devices make up a token for it."""
        budget = self.config["max_num_batched_tokens"]
        limits = {"early": budget, "every": 0}
        return {
            "is_prefill_chunk": request.is_prefill_chunk,
            "num_computed_tokens": request.num_computed_tokens,
            "num_tokens": request.num_tokens,
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_output_placeholders": request.num_output_placeholders,
            "made_up": [d for d, left in limits.items() if self._makes_up(request, left)],
        }

    def _update(
        self, plan: Any, sampled: dict[str, list[int]], reasons: dict[str, str]
    ) -> list[str]:
        frames = [
            {
                "id": name,
                "num_output_placeholders": self.live[name].num_output_placeholders,
                "is_stale": getattr(self.live[name], "num_stale_output_tokens", 0) > 0,
                "tokens": sampled.get(name, []),
            }
            for name in plan.num_scheduled_tokens
            if name in self.live
        ]
        if plan.num_scheduled_tokens:
            number = next(i for i, (of, _) in enumerate(self.plans) if of is plan)
            self.arrived.append((number, frames))
        return super()._update(plan, sampled, reasons)


def run(version: str, seed: int, device: str, mixin: type | None) -> Device | str:
    """One workload to its end; the scheduler's own error where it fails."""
    made = Device(workload(seed), version, device, mixin)
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        made.recorded()
    except RefusedError as error:
        return str(error.__cause__.__class__.__name__)
    finally:
        logging.disable(level)
    return made


def told(made: Device) -> dict[str, Any]:
    """What can be compared of two runs."""
    return {
        "texts": {name: list(of.output_token_ids) for name, of in sorted(made.requests.items())},
        "preemptions": sum(len(step["preempted"]) for step in made.steps),
        "steps": len(made.steps),
        "tokens computed": sum(sum(s["num_scheduled_tokens"].values()) for s in made.steps),
    }


def mixins() -> dict[str, type | None]:
    """The release's own scheduler, and the lab's three overrides."""
    plugin, lab = load_module(LAB / "plugin.py"), load_module(LAB / "solution.py")
    return {"stock": None, "Guard": plugin.Guard, "Patched": plugin.Patched, "Thin": lab.Thin}


def outcome(version: str, device: str, mixin: type | None, plain: list[Any]) -> dict[str, Any]:
    """All seeds under one override beside `plain`: the release's own, on a device without fault."""
    row = {"workloads": len(SEEDS), "died": 0, "other texts": 0, "same plans": 0}
    sums = {"preemptions": 0, "steps": 0, "tokens computed": 0}
    for seed, expected in zip(SEEDS, plain, strict=True):
        made = run(version, seed, device, mixin)
        if isinstance(made, str):
            row["died"] += 1
            continue
        came = told(made)
        row["other texts"] += came["texts"] != expected["texts"]
        row["same plans"] += came == expected
        for key in sums:
            sums[key] += came[key]
    return row | sums


def outcomes() -> Iterator[dict[str, Any]]:
    """Every release, device and override."""
    ways = mixins()
    for version in RELEASES:
        plain = [told(run(version, seed, "none", None)) for seed in SEEDS]  # type: ignore[arg-type]
        for device in DEVICES:
            for name, mixin in ways.items():
                row = outcome(version, device, mixin, plain)
                yield {"release": version, "device": device, "scheduler": name, **row}


def frames() -> Iterator[dict[str, Any]]:
    """The releases' own schedulers on a device without fault, for the lab's `replayed.py`."""
    for version in FRAMES_OF:
        kind = core_of(version)._async_scheduler
        parameters = {
            name: list(inspect.signature(getattr(kind, name)).parameters)[1:]
            for name in ("schedule", "_update_request_with_output")
        }
        for seed in FRAME_SEEDS:
            made = run(version, seed, "none", None)
            assert isinstance(made, Device), f"{version}, seed {seed}: {made}"
            yield {
                "release": version, "commit": core_of(version).commit, "seed": seed,
                "parameters": parameters, "plans": [rows for _, rows in made.plans],
                "arrived": made.arrived,
            }  # fmt: skip


def write(path: Path, lines: Iterator[dict[str, Any]]) -> None:
    """Equal lines give equal bytes."""
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        for line in lines:
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


if __name__ == "__main__":
    write(LAB / "recordings" / "outcomes.jsonl.gz", outcomes())
    write(LAB / "recordings" / "frames.jsonl.gz", frames())

"""The whole real engine with adapters on one and two tensor ranks, step by step, and ours.

    course engine run -m conformance.record steps-lora-tp2        # the real engine
    python -m conformance.features.lora.steps                     # compare: any machine

Every request has one of four adapters: the shipped ones, and a made one of embedding and head. Two
slots serve them, so requests are skipped and slots taken over, and the pool is small enough to
preempt. There are no base requests, which the pinned form for processors adapts once every slot is
taken (`texts.py`). Greedy, synchronous, float32 there and float64 here.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conformance import real_engine, recording, replay
from conformance.features.lora import texts
from mini_vllm.lora.request import LoRARequest

RUNS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp2-sharded": {"tensor_parallel_size": 2, "fully_sharded_loras": True},
}
"""By name, what differs. "tp2" runs with `worker_ranks`."""
NAMES = (*texts.NAMES, "both")
KNOBS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4}


def workload(num_prompts: int = 64, max_tokens: int = 32) -> dict[str, Any]:
    """That of `real_engine` with half the requests, each with the adapter of the one before or
    another."""
    work = real_engine.workload(num_prompts, max_tokens)
    work["config"] |= {"max_loras": KNOBS["max_loras"], "num_blocks": 60}
    rng, last = random.Random(7), 1
    for event in work["events"]:
        for add in event["add"]:
            last = last if rng.random() < 0.5 else rng.randint(1, len(NAMES))
            add["lora"] = last
    return {**work, "seed": 11}


def adapters(made: Path, kind: Any = LoRARequest) -> dict[int, Any]:
    """The adapters of `NAMES`, by number; `made` has those of `texts.write_ends`."""
    folders = [*(texts.ADAPTERS / name for name in texts.NAMES), made / "both"]
    return {n: kind(f"lora{n}", n, str(folder)) for n, folder in enumerate(folders, start=1)}


def recorded(run: str) -> Iterator[dict[str, Any]]:
    """One line: "recording" in the format of `recording.py`, and "machine"."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    import vllm
    from vllm.lora.request import LoRARequest as RealLoRARequest

    work = workload()
    worker = "worker_ranks.NoGather" if run == "tp2" else "worker.NoPinning"
    llm = vllm.LLM(
        dtype="float32", async_scheduling=False, enforce_eager=True,
        worker_extension_cls=f"conformance.features.lora.{worker}",
        **KNOBS, **RUNS[run], **real_engine.options(work["config"]),
    )  # fmt: skip
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    with tempfile.TemporaryDirectory() as folder:
        found = real_engine.drive(
            llm.llm_engine, scheduler, work,
            lambda **wishes: vllm.SamplingParams(temperature=0.0, **wishes),
            adapters(texts.write_ends(Path(folder)), RealLoRARequest),
        )  # fmt: skip
    yield {"recording": found["recording"], "machine": real_engine.provenance("float32")}


def kept(run: str, folder: Path = texts.KEPT) -> dict[str, Any]:
    """One recording."""
    (found,) = recording.lines(folder / f"steps-lora-{run}.jsonl.gz")
    return found


def mini(run: str, entry: Mapping[str, Any], **more: Any) -> dict[str, list[int]]:
    """What the mini engine answers to the recorded arrivals, on as many ranks."""
    engine = real_engine.mini_engine(entry["config"], **KNOBS, **RUNS[run], **more)
    with tempfile.TemporaryDirectory() as folder:
        return real_engine.run_on_arrivals(engine, entry, adapters(texts.write_ends(Path(folder))))


def compare(run: str) -> tuple[list[str], str]:
    """What differs, in words, and a line that says what was compared."""
    entry = kept(run)["recording"]
    num_steps, difference = replay.replay(entry)
    wrong = [] if difference is None else [f"scheduler: {difference}"]
    said = mini(run, entry)
    wrong += [
        f"text of {name}: recorded {tokens}, mini {said.get(name)}"
        for name, tokens in entry["outputs"].items()
        if said.get(name) != tokens
    ]
    return wrong, f"{run}: {num_steps} steps, {len(said)} texts: {len(wrong)} differ"


def main() -> int:
    """Compare every recorded run with the mini engine; returns the exit status."""
    found = [compare(run) for run in RUNS]
    for wrong, line in found:
        print(*wrong[:4], line, sep="\n")
    return int(any(wrong for wrong, _ in found))


if __name__ == "__main__":
    raise SystemExit(main())

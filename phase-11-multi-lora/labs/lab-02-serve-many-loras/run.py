"""Three adapters and the base on a real vLLM 0.22.1: who runs, who says what, who has a slot.

    course gpu run 11-02                       the shipped model and adapters
    course gpu run 11-02 --cpu                 vLLM's CPU build
    python run.py --sizes                      also three more starts: what slots cost the KV cache
    python run.py --predict                    what must come, without vLLM

Each engine is a process of its own, with DEBUG lines and its scheduler watched. Needs
vllm==0.22.1; without it the run says so and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit import processes, versions
from labkit.modules import load_module

HERE = Path(__file__).resolve().parent
MODELS = HERE.parents[2] / "models"
MODEL, ADAPTERS = MODELS / "byte-llama", MODELS / "adapters"
IDS = {"shout": 1, "quote": 2, "code": 3, "zero": 4}
TOKENS = 24
MIXED = (
    ["The scheduler", "The KV cache is", "A block is", "Open a file and"],
    [None, "shout", "quote", "code"],
)
SWAPPED = (MIXED[0], ["code", None, "shout", "quote"])
QUEUE = (
    ["The scheduler", "A block is", "The KV cache is", "Every thread", "Split the path", "A model"],
    ["shout", "quote", "shout", None, "code", "quote"],
)
SIZES: tuple[tuple[int, int], ...] = ((0, 0), (1, 8), (8, 64))


# --- one engine, in a process of its own ----------------------------------------------------------


def zero_adapter(folder: Path) -> Path:
    """A copy of `shout` whose B is 0: it must say what the base says."""
    from safetensors.numpy import load_file, save_file

    copy = folder / "zero"
    shutil.copytree(ADAPTERS / "shout", copy)
    file = copy / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({n: t * (0 if ".lora_B." in n else 1) for n, t in tensors.items()}, file)
    return copy


def one_engine(arguments: argparse.Namespace) -> None:
    """Start an engine in this process, so that its scheduler can be watched; serve some batches."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform

    slots, rank, cpu = arguments.slots, arguments.rank, current_platform.is_cpu()
    knobs: dict[str, Any] = {}
    if slots:
        knobs = {"enable_lora": True, "max_loras": slots, "max_lora_rank": rank}
        knobs["max_cpu_loras"] = max(slots, 2)
        if cpu:  # a torch that was built for CUDA pins memory, which no processor can
            knobs["worker_extension_cls"] = "conformance.features.lora.worker.NoPinning"
    llm = LLM(
        model=str(MODEL),
        dtype="float32" if cpu else "auto",
        enforce_eager=cpu,
        async_scheduling=False,
        max_model_len=256,
        max_num_seqs=64,
        gpu_memory_utilization=arguments.util,
        **knobs,
    )
    processes.tell("the engine is up")
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, plans = scheduler.schedule, []

    def watched(*given: Any, **more: Any) -> Any:
        plan = schedule(*given, **more)
        if plan.num_scheduled_tokens:
            plans.append([int(name.split("-")[0]) for name in plan.num_scheduled_tokens])
        return plan

    scheduler.schedule = watched
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    def served(prompts: list[str], who: list[str | None], folders: dict[str, str]) -> Any:
        """Texts and plans of one batch."""
        plans.clear()
        wanted = [
            LoRARequest(name, IDS[name], folders.get(name, str(ADAPTERS / name))) if name else None
            for name in who
        ]
        outputs = llm.generate(prompts, params, lora_request=wanted, use_tqdm=False)
        first = plans[0][0]  # ids go on counting from one batch to the next
        return {
            "texts": [list(output.outputs[0].token_ids) for output in outputs],
            "plans": [[place - first for place in plan] for plan in plans],
        }

    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        zero = {"zero": str(zero_adapter(Path(folder)))}
        for name, (prompts, who) in json.loads(arguments.batches).items():
            result[name] = served(prompts, who, zero)
    processes.answer(result)


# --- what must come -------------------------------------------------------------------------------


def told(plans: list[list[int]]) -> str:
    """Plans in one line: equal ones together."""
    runs = [(list(plan), len(list(same))) for plan, same in groupby(plans)]
    return ", ".join(f"{count} x {plan}" if count > 1 else str(plan) for plan, count in runs)


def verdict(name: str, want: Any, came: Any) -> bool:
    """One line for an expectation; whether it holds."""
    print(f"{'as predicted' if want == came else 'NOT AS PREDICTED'}: {name}: {came}")
    if want != came:
        print(f"    expected {want}")
    return bool(want == came)


def alone(batch: tuple[list[str], list[str | None]]) -> dict[str, Any]:
    """The same requests, each a batch of its own."""
    return {f"alone {place}": ([p], [w]) for place, (p, w) in enumerate(zip(*batch, strict=True))}


def launch(arguments: argparse.Namespace, slots: int, rank: int, batches: dict[str, Any]) -> Any:
    """An engine with so many slots, on some batches: what ran."""
    print(f"=== max_loras={slots}, max_lora_rank={rank}: starting an engine", flush=True)
    command = [__file__, "--slots", str(slots), "--rank", str(rank), "--util", str(arguments.util)]
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "DEBUG"}
    if versions.on_cpu():
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return processes.start([*command, "--batches", json.dumps(batches)], env=env)


def spare(lab: ModuleType, arguments: argparse.Namespace) -> bool:
    """Four slots for three adapters: mixed, swapped, alone, and an adapter that changes nothing."""
    zeros: list[str | None] = ["zero"] * 4
    batches = {"mixed": MIXED, "swapped": SWAPPED, "zero": (MIXED[0], zeros)}
    batches |= {"base": (MIXED[0], [None] * 4), **alone(MIXED)}
    ran = launch(arguments, 5, 8, batches)
    came = ran.needed()
    print("backend:", lab.log_value(ran.text, "backend"))
    trace = lab.run_mini(*MIXED, 4, TOKENS)
    right = verdict("plans of the mixed batch", told(trace.plans), told(came["mixed"]["plans"]))
    if versions.on_cpu():
        right &= verdict(
            "texts as the mini engine's", [True] * 4,
            [one == other for one, other in zip(trace.texts, came["mixed"]["texts"], strict=True)],
        )  # fmt: skip
    differ = [a != b for a, b in zip(came["mixed"]["texts"], came["swapped"]["texts"], strict=True)]
    right &= verdict("other adapters, other texts", [True] * 4, differ)
    right &= verdict(
        "an adapter with B = 0 says what the base says", True,
        came["zero"]["texts"] == came["base"]["texts"],
    )  # fmt: skip
    for place, who in enumerate(MIXED[1]):
        at = lab.first_divergence(came["mixed"]["texts"][place], came[f"alone {place}"]["texts"][0])
        words = "never" if at is None else f"at token {at}"
        print(f"{who or 'base'}, in the mixed batch and alone: they part {words}")
    return right


def full(lab: ModuleType, arguments: argparse.Namespace) -> bool:
    """One slot for three adapters: who waits, and what the slot held."""
    ran = launch(arguments, 1, 8, {"queue": QUEUE})
    came = ran.needed()["queue"]
    trace = lab.run_mini(*QUEUE, 1, TOKENS)
    right = verdict("plans on one slot", told(trace.plans), told(came["plans"]))
    events = [event for event in lab.slot_events(ran.text) if event.adapter_id in (1, 2, 3)]
    for event in events:
        print(f"  {event.what} {event.adapter_id}", "" if event.slot is None else event.slot)
    last = IDS[QUEUE[1][trace.finished[-1]] or "shout"]
    right &= verdict("the slot at the end", [last], lab.slots_after(events, 1))
    same = [one == other for one, other in zip(trace.texts, came["texts"], strict=True)]
    for who, equal in zip(QUEUE[1], same, strict=True):
        print(f"  {who or 'base'}: {'as' if equal else 'NOT as'} the mini engine's text")
    if versions.on_cpu():
        print("  (at the pin a base row has the last slot's delta here while every slot is taken)")
    return right


def sizes(lab: ModuleType, arguments: argparse.Namespace) -> None:
    """What slots take from the KV cache: three starts, nothing served."""
    for slots, rank in SIZES:
        ran = launch(arguments, slots, rank, {})
        ran.needed()
        for name in ("model_gib", "load_seconds", "kv_tokens"):
            try:
                print(f"  {name}: {lab.log_value(ran.text, name)}")
            except KeyError:
                print(f"  {name}: this build's log does not have it")


def main() -> int:
    parser = argparse.ArgumentParser(description="Adapters on a real vLLM.")
    parser.add_argument("--util", type=float, default=0.5, help="share of the GPU's memory")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--predict", action="store_true", help="say what must come, and end")
    parser.add_argument("--sizes", action="store_true", help="also: slots against the KV cache")
    parser.add_argument("--slots", type=int, help="one engine, in this process")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batches", default="{}")
    arguments = parser.parse_args()
    if arguments.slots is not None:
        one_engine(arguments)
        return 0
    lab = load_module(Path(arguments.file))
    for words, batch, slots in (("mixed, a slot to spare", MIXED, 4), ("on one slot", QUEUE, 1)):
        print(f"predicted, {words}: {told(lab.run_mini(*batch, slots, TOKENS).plans)}")
    if arguments.predict:
        return 0
    versions.need_vllm("--predict, or the tests")
    right = spare(lab, arguments)
    right &= full(lab, arguments)
    if arguments.sizes:
        sizes(lab, arguments)
    print("all as predicted" if right else "something is not as predicted; see above")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Lab 11-02: what a server with adapters says, and what it must do.

A log has a line for each adapter that is read, for each that is put into a slot, and for each that
is thrown out. The mini engine says beforehand which requests run in which step. What holds:

- R1: a value that the log does not have is an error, never a guess.
- R2: a slot holds one adapter at a time, so its history can be replayed, and a log that
  contradicts itself is found out.
- R3: the same requests, the same slots: the same plans, in any engine that decides as the pin does.

Sources: `vllm/lora/model_manager.py:285` `LoRAModelManager.activate_adapter`,
`vllm/v1/worker/gpu_model_runner.py:5132` `GPUModelRunner.load_model`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mini_vllm
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.lora.request import LoRARequest

ADAPTERS = Path(mini_vllm.__file__).parents[1] / "models" / "adapters"
IDS = {"shout": 1, "quote": 2, "code": 3}
"""The shipped adapters and the ids they get here (given)."""

PATTERNS = {
    "backend": r"Using (PunicaWrapper\w+)\.",
    "model_gib": r"Model loading took ([\d.]+) GiB",
    "load_seconds": r"Model loading took .*?([\d.]+) seconds",
    "kv_tokens": r"KV cache size: ([\d,]+) tokens",
}
EVENT = re.compile(
    r"Adding lora\. Model id: (?P<read>\d+)"
    r"|Activating LoRA\. int id: (?P<activate>\d+), slot index: (?P<slot>\d+)"
    r"|Removing adapter int id: (?P<remove>\d+)"
)


@dataclass(frozen=True, slots=True)
class Event:
    """One line about an adapter (given)."""

    what: str
    """"read", "activate" or "remove"."""
    adapter_id: int
    slot: int | None = None
    """Of "activate"."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What an engine did with some requests (given)."""

    plans: list[list[int]]
    """Per step: places of the requests in it, in scheduling order."""
    finished: list[int]
    """Places of the requests in the order in which they ended."""
    texts: list[list[int]]
    """Output ids by place."""


def log_value(text: str, name: str) -> str | float | int:
    """One value of a start-up log: the last one, where it stands there more than once.

    A trace, in lines as the pinned version writes them: "Using PunicaWrapperGPU." has the backend
    "PunicaWrapperGPU"; "Model loading took 1.17 GiB memory and 2.534512 seconds" has model_gib 1.17
    and load_seconds 2.534512 (newer runners leave the word "memory" out); "GPU KV cache size:
    512,064 tokens" has kv_tokens 512064.

    Args:
        text: a log, with whatever stands in front of each message.
        name: "backend" (a text), "model_gib", "load_seconds" (floats) or "kv_tokens" (an int).

    Raises:
        KeyError: the log has no such line, or `name` is none of these (R1).
    """
    found = re.findall(PATTERNS[name], text)
    if not found:
        raise KeyError(name)
    if name == "backend":
        return found[-1]
    return int(found[-1].replace(",", "")) if name == "kv_tokens" else float(found[-1])


def slot_events(text: str) -> list[Event]:
    """What a DEBUG log says of adapters, in its order.

    A trace: "Adding lora. Model id: 2, int id: 2" is Event("read", 2); "Activating LoRA. int id: 2,
    slot index: 0" is Event("activate", 2, 0); "Removing adapter int id: 1" is Event("remove", 1).
    Other lines are none.
    """
    events = []
    for found in EVENT.finditer(text):
        what = found.lastgroup if found.lastgroup != "slot" else "activate"
        assert what is not None
        slot = found["slot"]
        events.append(Event(what, int(found[what]), None if slot is None else int(slot)))
    return events


def slots_after(events: Sequence[Event], max_loras: int) -> list[int | None]:
    """Which adapter stands in each slot at the end (R2).

    A trace with 2 slots: activate 1 in 0, activate 2 in 1, remove 1, activate 3 in 0: [3, 2].

    An adapter that is removed while it stands in no slot was in memory only.

    Returns:
        By slot, None for an empty one.

    Raises:
        ValueError: an activation into a slot that does not exist or is taken, or of an adapter that
            stands in a slot already.
    """
    slots: list[int | None] = [None] * max_loras
    for event in events:
        if event.what == "remove" and event.adapter_id in slots:
            slots[slots.index(event.adapter_id)] = None
        elif event.what == "activate":
            if event.slot is None or not 0 <= event.slot < max_loras:
                raise ValueError(f"events: slot {event.slot}: need 0 to {max_loras - 1}")
            if slots[event.slot] is not None or event.adapter_id in slots:
                raise ValueError(f"events: {event}: the slots hold {slots}")
            slots[event.slot] = event.adapter_id
    return slots


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Place of the first token in which two texts differ; None for equal ones.

    A text that ends earlier differs where the other goes on.
    """
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def run_mini(
    prompts: Sequence[str], who: Sequence[str | None], max_loras: int, max_tokens: int = 8
) -> Trace:
    """Requests through `mini_vllm` on the shipped model, step by step (R3).

    All are queued before the first step, greedy, each of `max_tokens` tokens. The engine has
    `max_loras` slots and otherwise its defaults; `dtype="float32"`.

    A trace: who = shout, quote, shout, None on one slot, 2 tokens each: plans [0, 2, 3] twice, then
    [1] twice; finished 0, 2, 3, 1.

    Args:
        prompts: one for each request.
        who: the adapter of each, a key of `IDS`, or None for the base.

    Raises:
        ValueError: not one prompt for each request, or an adapter that is not shipped.
    """
    if len(prompts) != len(who):
        raise ValueError(f"prompts: need {len(who)}, one for each request; came {len(prompts)}")
    unknown = set(who) - {*IDS, None}
    if unknown:
        raise ValueError(f"who: {unknown}: need one of {', '.join(IDS)}, or None")
    engine = LLMEngine(dtype="float32", enable_lora=True, max_loras=max_loras)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    trace = Trace([], [], [[] for _ in who])
    engine.observers.append(
        lambda plan: trace.plans.append([int(name) for name in plan.num_scheduled_tokens])
    )
    for place, (prompt, name) in enumerate(zip(prompts, who, strict=True)):
        lora = LoRARequest(name, IDS[name], str(ADAPTERS / name)) if name else None
        engine.add_request(prompt, params, request_id=str(place), lora_request=lora)
    while engine.has_unfinished_requests():
        for request in engine.step():
            trace.finished.append(int(request.request_id))
            trace.texts[int(request.request_id)] = list(request.output_token_ids)
    return trace

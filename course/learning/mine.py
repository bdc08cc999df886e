"""The learner's own classes, put into the engine.

A lab with `part: block_pool` supplies the attribute of its module that has the name of the
engine's own: `EngineParts.block_pool` is `BlockPool`, so the lab must define `BlockPool`.
A part with another name than the default's has it in `NAMES`; one that is several functions is the
module. Where a lab's contract is smaller than the slot, `lab_contracts` stands between.
Promises: only files that pass their lab are used; an error in one is shown as theirs; a part is
called theirs in the engine when the engine has called it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from course.files import load_module
from course.learning.labs import CourseError, Lab

if TYPE_CHECKING:
    from mini_vllm import EngineParts

NAMES = {
    "step": "engine_step",
    "stop_check": "stop_status",
    "detokenizer": "StreamingDetokenizer",
    "experts": "moe_forward_grouped",
    "drafter": "ngram_propose",
    "verifier": "speculative_token",
    "adapter_slots": "AdapterSlotCache",
    "adapter_delta": "lora_delta",
    "token_masks": "allowed_tokens",
    "wait_gate": "GrammarGate",
    "encoder_gate": "EncoderGate",
    "shards": "shard_qkv",
    "dispatcher": "CudagraphDispatcher",
    "front_door": "FrontDoor",
}
"""What a lab defines for a part whose default has another name, or that has no default."""
MODULES = ("verifier", "shards")
"""Parts that are a lab's whole module."""
ASKED_BY = {
    "scheduler": "--drafts 0",
    "step": "--drafts 0",
    "experts": "--model byte-moe",
    "verifier": "--temperature 1",
    "adapter_slots": "--adapter shout",
    "adapter_delta": "--adapter shout",
    "token_masks": '--regex "[a-z ]+"',
    "wait_gate": '--regex "[a-z ]+"',
    "encoder_gate": "--model byte-sees",
    "shards": "--tensor-parallel-size 2",
    "dispatcher": "--cudagraph-mode FULL_AND_PIECEWISE",
}
"""Parts that a plain run does not call, or not once a drafter is passed too, and what
`course run --mine` needs so that it does."""


def command(part: str) -> str:
    """The command that calls a learner's `part`."""
    if part == "front_door":  # a run has no clients
        return "course serve --mine"
    asked = f" {ASKED_BY[part]}" if part in ASKED_BY else ""
    return f'course run --mine{asked} "Once upon a time"'


NOT_SUPPLIED = ("rooms", "origin", "async_scheduler", "request")
"""Fields of `EngineParts` that no lab has: `request` is made of `stop_check`."""


def _core_parts() -> dict[str, Any]:
    """The parts of the core that labs supply, and the engine's own class or function for each."""
    from mini_vllm import EngineParts

    fields = dataclasses.fields(EngineParts)
    return {f.name: f.default for f in fields if f.name not in NOT_SUPPLIED}


def part_names() -> list[str]:
    """The parts that a lab may supply."""
    return list(dict.fromkeys([*_core_parts(), *NAMES]))


def attribute_of(part: str) -> str:
    """The name a lab module must give to what it supplies for `part`.

    Raises:
        CourseError: the engine has no such part.
    """
    if part not in part_names():
        raise CourseError(
            f"part {part!r} is not a part of the engine: use one of {', '.join(part_names())}"
        )
    return NAMES.get(part) or str(getattr(_core_parts()[part], "__name__", part))


def engine_parts(supplied: Mapping[str, Any]) -> EngineParts:
    """What labs supply, by the names of `part_names`, as the engine takes it."""
    from course.learning import lab_contracts
    from mini_vllm import EngineParts
    from mini_vllm.features import ROOMS

    bridged: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "step": ("step", lab_contracts.step),
        "stop_check": ("request", lab_contracts.request),
        "detokenizer": ("detokenizer", lab_contracts.detokenizer),
        "shards": ("shards", lab_contracts.shards),
    }
    supplied = dict(supplied)
    for part, (slot, build) in bridged.items():
        if part in supplied:
            supplied[slot] = build(supplied.pop(part))
    core = {field.name for field in dataclasses.fields(EngineParts)}
    rooms = {
        folder: {name: supplied[name] for name in room.parts if name in supplied}
        for folder, room in ROOMS.items()
    }
    return EngineParts(
        **{name: part for name, part in supplied.items() if name in core},
        rooms={folder: parts for folder, parts in rooms.items() if parts},
    )


class Calls(Counter[str]):
    """Calls by part."""

    error: Exception | None = None
    """What one of the parts raised last: of an engine on a thread nothing else is left of it."""


def counted(supplied: dict[str, Any]) -> Calls:
    """Have each part count its calls from now on; the counter, by part.

    A function is replaced in `supplied`; the methods of a class and the functions of a module are
    replaced where they stand, so they count when they call one another too. Making an object of a
    class is not a call.
    """
    calls = Calls()

    def counting(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def count(*given: Any, **named: Any) -> Any:
            calls[part] += 1
            try:
                return function(*given, **named)
            except Exception as error:
                calls.error = error
                raise

        return count

    for part, own in list(supplied.items()):
        if not inspect.isclass(own) and not isinstance(own, ModuleType):
            supplied[part] = counting(part, own)
            continue
        for name, value in list(vars(own).items()):
            method = isinstance(value, staticmethod | classmethod)
            function = value.__func__ if method else value
            special = name.startswith("__") and name != "__call__"
            here = getattr(function, "__module__", None) == getattr(own, "__module__", own.__name__)
            if special or not inspect.isfunction(function) or not here:
                continue
            wrapped = counting(part, function)
            setattr(own, name, type(value)(wrapped) if method else wrapped)
    return calls


def parts_of(
    labs: list[Lab], passed: Callable[[Lab], bool], file: Callable[[Lab], Path]
) -> tuple[dict[str, Any], dict[str, Lab]]:
    """The parts supplied by the labs that `passed`, from `file(lab)`, and whose they are.

    Where two labs supply the same part, the later one wins.
    """
    parts: dict[str, Any] = {}
    owners: dict[str, Lab] = {}
    for lab in labs:
        part = lab.manifest.part
        if part is None or not passed(lab):
            continue
        name = attribute_of(part)
        module = load_module(file(lab))
        if not hasattr(module, name):
            raise CourseError(f"{lab.id}: {file(lab).name} defines no {name} for the part {part}")
        parts[part] = module if part in MODULES else getattr(module, name)
        owners[part] = lab
    return parts, owners


def own_failure(error: BaseException, owners: dict[str, Lab]) -> str:
    """In words, where a learner's part failed; empty when it is not theirs that did.

    The engine names a part that has returned what it must not.
    """
    named = str(error).partition(" part")[0].rpartition(" ")[2].removeprefix("parts.")
    if isinstance(error, RuntimeError) and named in owners:
        return f"Your part from lab {owners[named].id} stopped the engine: {error}"
    folders = {lab.folder.resolve(): lab for lab in owners.values()}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        lab = folders.get(Path(frame.filename).resolve().parent)
        if lab is not None:
            where = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
            return (
                f"Your part from lab {lab.id} stopped the engine: {type(error).__name__}: {error}\n"
                f"    {where}: {frame.line}"
            )
    return ""

"""A lab's desk asks vLLM: one workload, decided or counted by the learner's text and by vLLM.

A lab that builds a class decides step by step (`conformance.ask`); one that predicts numbers has
them compared with what the real scheduler's steps come to. Promises: the text is loaded as a module
of its own, and a text that cannot be loaded, lacks its name or raises is told as such; the
reference parts of the engine do the rest.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance import decisions, replay, workload_file
from conformance.ask import MEANINGS, ask, plan_of
from conformance.real_core import RealCore
from conformance.words import show
from conformance.workloads import Workload
from course.files import load_module
from course.site import live_real

Numbers = dict[str, Any]
"""By what they belong to: a step, a request."""


@dataclass(frozen=True, slots=True)
class Lab:
    """What a lab can ask."""

    workload: str
    """The one that its desk begins with."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """By part of the engine, the name of the class in the lab's file; empty where it counts."""
    counts: Callable[[ModuleType, Workload, RealCore], tuple[Numbers, Numbers]] | None = None
    """The real scheduler's numbers and the lab's, with the same names."""
    what: str = ""
    """What is counted."""


# ---------------------------------------------------------------------- labs that count


def _adds(workload: Workload) -> list[dict[str, Any]]:
    return [add for event in workload["events"] for add in event["add"]]


def _decided(workload: Workload, core: RealCore) -> list[dict[str, Any]]:
    """The real scheduler's steps. Raises ValueError where it stops by itself."""
    steps = decisions.decide(workload, core)
    if steps and "fault" in steps[-1]:
        raise ValueError(f"workload: vLLM {core.version} {steps[-1]['fault']}")
    return steps


def _need(workload: Workload, count: int) -> list[dict[str, Any]]:
    adds = _adds(workload)
    if len(adds) != count:
        raise ValueError(f"workload: has {len(adds)} requests, this lab predicts for {count}")
    return adds


def _hits(steps: list[dict[str, Any]]) -> dict[str, int]:
    """Tokens that each request had from the cache when it was admitted first."""
    return {
        name: step["num_computed_tokens"][name] - step["num_scheduled_tokens"][name]
        for step in steps
        for name in step["new"]
    }


def _steps_of(numbers: list[int]) -> Numbers:
    return {f"{place}": number for place, number in enumerate(numbers)}


def chunks(lab: ModuleType, workload: Workload, core: RealCore) -> tuple[Numbers, Numbers]:
    """03-02: tokens of a lone prompt in each step until its first output."""
    (add,) = _need(workload, 1)
    name, size, config = add["request_id"], len(add["prompt_token_ids"]), workload["config"]
    real: list[int] = []
    for step in _decided(workload, core):
        if sum(real) < size:
            real.append(step["num_scheduled_tokens"].get(name, 0))
    knobs = config["long_prefill_token_threshold"], config["max_num_batched_tokens"]
    return _steps_of(real), _steps_of(lab.chunk_sizes(size, *knobs))


def costs(lab: ModuleType, workload: Workload, core: RealCore) -> tuple[Numbers, Numbers]:
    """03-05: tokens of each step of the first request, from its second output on."""
    victim, long = _need(workload, 2)
    config, name = workload["config"], victim["request_id"]
    plans = [step["num_scheduled_tokens"] for step in _decided(workload, core)]
    real = [sum(plan.values()) for plan in plans if name in plan][1:]
    mine = lab.predict_costs(
        config["long_prefill_token_threshold"], len(long["prompt_token_ids"]),
        victim["max_tokens"], config["max_num_batched_tokens"],
    )  # fmt: skip
    return _steps_of(real), _steps_of(mine)


def each_hit(lab: ModuleType, workload: Workload, core: RealCore) -> tuple[Numbers, Numbers]:
    """03-03: what each prompt takes from the cache."""
    adds = _adds(workload)
    prompts = [add["prompt_token_ids"] for add in adds]
    mine = lab.predict_each(prompts, workload["config"]["block_size"])
    names = [add["request_id"] for add in adds]
    return _hits(_decided(workload, core)), dict(zip(names, mine, strict=False))


def second_hit(lab: ModuleType, workload: Workload, core: RealCore) -> tuple[Numbers, Numbers]:
    """02-03: what a prompt finds after an equal one."""
    first, second = _need(workload, 2)
    if first["prompt_token_ids"] != second["prompt_token_ids"]:
        raise ValueError("workload: its two prompts differ; this lab predicts for two equal ones")
    size, name = len(second["prompt_token_ids"]), second["request_id"]
    mine = {name: lab.cached_tokens(size, workload["config"]["block_size"])}
    return {name: _hits(_decided(workload, core))[name]}, mine


def savings(lab: ModuleType, workload: Workload, core: RealCore) -> tuple[Numbers, Numbers]:
    """03-06: tokens that the cache saves, from two runs of the real scheduler."""
    prompts = [add["prompt_token_ids"] for add in _adds(workload)]
    size = len(prompts[0])
    if any(len(prompt) != size for prompt in prompts):
        raise ValueError("workload: its prompts differ in length; this lab needs one length")
    columns = zip(*prompts, strict=True)
    shared = next((place for place, of in enumerate(columns) if len(set(of)) > 1), size)
    totals = []
    for caching in (False, True):
        made = copy.deepcopy(workload)
        made["config"]["enable_prefix_caching"] = caching
        plans = [step["num_scheduled_tokens"] for step in _decided(made, core)]
        totals.append(sum(sum(plan.values()) for plan in plans))
    mine = lab.saved_tokens(len(prompts), shared, size, workload["config"]["block_size"])
    return {"all": totals[0] - totals[1]}, {"all": mine}


# ---------------------------------------------------------------------- the labs

_PRESSURE = """config: {num_blocks: 9, block_size: 4}
requests:
- {id: A, prompt: 11, max_tokens: 12}
- {id: B, prompt: 11, max_tokens: 12}
- {id: C, prompt: 5, max_tokens: 3, step: 2}"""
_EQUAL = """config: {block_size: 4}
requests:
- {id: A, prompt: [5, 6, 7, 8, 9, 10, 11, 12], max_tokens: 2}
- {id: B, prompt: [5, 6, 7, 8, 9, 10, 11, 12], max_tokens: 2, step: 3}"""
_SHARED = """config: {block_size: 4}
requests:
- {id: A, prompt: [5, 6, 7, 8, 9, 10, 11, 12], max_tokens: 2}
- {id: B, prompt: [5, 6, 7, 8, 9, 20, 21, 22], max_tokens: 2}
- {id: C, prompt: [5, 6, 7, 8, 9, 10, 11, 12], max_tokens: 2}"""

LABS = {
    "02-01": Lab(_PRESSURE, {"block_pool": "BlockPool"}),
    "02-03": Lab(_EQUAL, counts=second_hit, what="tokens from the cache"),
    "02-05": Lab(_PRESSURE, {"kv_cache_manager": "KVCacheManager"}),
    "03-01": Lab(_PRESSURE, {"scheduler": "Scheduler"}),
    "03-02": Lab(
        "config: {long_prefill_token_threshold: 24, max_num_batched_tokens: 32}\n"
        "requests:\n- {id: A, prompt: 100, max_tokens: 1}",
        counts=chunks, what="tokens of the prompt in each step",
    ),
    "03-03": Lab(_SHARED, counts=each_hit, what="tokens from the cache"),
    "03-04": Lab(_PRESSURE, {"scheduler": "Scheduler"}),
    "03-05": Lab(
        "config: {long_prefill_token_threshold: 50, num_blocks: 100}\n"
        "requests:\n- {id: victim, prompt: 4, max_tokens: 8}\n"
        "- {id: long, prompt: 120, max_tokens: 2, step: 1}",
        counts=costs, what="tokens in the victim's steps",
    ),
    "03-06": Lab(_SHARED, counts=savings, what="tokens that the cache saves"),
    "03-07": Lab(
        "config: {num_blocks: 8, max_num_seqs: 2, max_num_batched_tokens: 16, policy: priority,\n"
        "  long_prefill_token_threshold: 8}\n"
        "requests:\n- {id: low, prompt: 24, max_tokens: 2, priority: 5}\n"
        "- {id: high, prompt: 4, max_tokens: 2, step: 1}",
        {"scheduler": "FixedScheduler"},
    ),
}  # fmt: skip
"""By id. Lab 03-07 is to part from vLLM where vLLM reads what was never written.

Of the others of phases 02 and 03, 02-02 admits by an allocation alone, with nobody who leaves, and
02-04 and 02-06 compute attention: vLLM's scheduler decides none of it.
"""


def ask_mine(lab: str, text: str, workload: str, release: str = live_real.PIN) -> dict[str, Any]:
    """Decide, or count, a workload with what `text` defines, and with vLLM.

    Args:
        lab: one of `LABS`.
        text: the lab's file.
        workload: a seed of the recordings, or the short form of `conformance/workload_file.py`.

    Returns:
        `release`; `rows`: the name of a row (a step, or a request), vLLM's and the text's, "" after
        the first difference; `at`: the first row that differs, or None; `verdict`, in words.

    Raises:
        ValueError: one of the arguments cannot be read, by name.
    """
    if lab not in LABS:
        raise ValueError(f"lab={lab!r}: need one of {', '.join(LABS)}")
    try:
        given = workload.strip()
        asked = workload_file.read(given) if given.isdecimal() else workload_file.parse(workload)
    except workload_file.WorkloadError as error:
        raise ValueError(f"workload: {error}") from None
    core = live_real.core(release)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "starter.py"
        path.write_text(text, encoding="utf-8")
        try:
            module = load_module(path, "_lab_asked")
            named = LABS[lab].parts.items()
            parts: dict[str, Any] = {part: getattr(module, name) for part, name in named}
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"starter.py does not load: {type(error).__name__}: {error}"
            ) from error
    if (count := LABS[lab].counts) is not None:
        return _counted(LABS[lab].what, functools.partial(count, module, asked, core), core.version)
    return _decided_beside(asked, core, parts)


def _decided_beside(asked: Workload, core: RealCore, parts: dict[str, Any]) -> dict[str, Any]:
    """Every step of both."""
    answer = ask(asked, core, functools.partial(replay.mini_scheduler, **parts))
    found = answer.difference
    at = None if found is None else found.step
    rows = [
        [f"{place}", plan_of(step), plan_of(answer.ours[place]) if place < len(answer.ours) else ""]
        for place, step in enumerate(answer.real)
    ]
    if found is None:
        verdict = f"{len(rows)} steps, the same in vLLM {core.version} and in yours."
    else:
        what = MEANINGS.get(found.field, found.field)
        verdict = (
            f"Step {found.step} is the first that differs, in {found.field}: {what}. "
            f"vLLM {core.version}: {show(found.expected)}. Yours: {show(found.got)}."
        )
    if answer.fault:
        verdict += f" vLLM ends here: {answer.fault}."
    return {"release": core.version, "rows": rows, "at": at, "verdict": verdict}


def _counted(
    what: str, count: Callable[[], tuple[Numbers, Numbers]], version: str
) -> dict[str, Any]:
    """Every number of both."""
    try:
        real, mine = count()
    except ValueError:
        raise
    except Exception as error:  # whatever a learner's text raises
        raise ValueError(f"starter.py: {type(error).__name__}: {error}") from error
    names = [*real, *(name for name in mine if name not in real)]
    rows = [[name, f"{real.get(name, 'none')}", f"{mine.get(name, 'none')}"] for name in names]
    at = next((place for place, row in enumerate(rows) if row[1] != row[2]), None)
    verdict = f"{what}, the same in vLLM {version} and in yours."
    if at is not None:
        name, theirs, yours = rows[at]
        verdict = (
            f"{what}: {name} is the first that differs. vLLM {version}: {theirs}. Yours: {yours}."
        )
    verdict = verdict[0].upper() + verdict[1:]
    return {"release": version, "rows": rows, "at": at, "verdict": verdict}

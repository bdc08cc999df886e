"""The smallest workload that still shows something.

Promises: `shrink` returns a workload for which `shows` is true, and to which none of the steps of
`smaller` can be applied any more, or the best one after `tries` questions. The same every time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from conformance.workload_file import CONFIG, SAYS, own
from conformance.workloads import Workload


def shrink(workload: Workload, shows: Callable[[Workload], bool], tries: int = 1500) -> Workload:
    """The smallest workload found that still shows it.

    Args:
        workload: one that does.
        shows: whether a workload still does; it may not change what it is given.
        tries: how many workloads to ask about at most.

    Raises:
        ValueError: `workload` itself does not show it.
    """
    if not shows(workload):
        raise ValueError("workload: does not show what it is to be shrunk for")
    best, shrinks = copy.deepcopy(workload), True
    while shrinks and tries > 0:
        shrinks = False
        for candidate in smaller(best):
            tries -= 1
            if shows(candidate):
                best, shrinks = candidate, True
                break
            if tries <= 0:
                break
    return best


def smaller(workload: Workload) -> Iterator[Workload]:
    """Workloads that are one step smaller or plainer, the largest steps first."""
    yield from _without_requests(workload)
    yield from _plainer_config(workload)
    yield from _earlier(workload)
    yield from _plainer_requests(workload)


def _requests(workload: Workload) -> list[tuple[int, int]]:
    """(event, place) of every arrival."""
    return [
        (index, place)
        for index, event in enumerate(workload["events"])
        for place in range(len(event["add"]))
    ]


def _without_requests(workload: Workload) -> Iterator[Workload]:
    """Half of the requests, then each alone, then each abort."""
    places = _requests(workload)
    groups = [places[len(places) // 2 :], places[: len(places) // 2]] if len(places) > 3 else []
    for gone in [*groups, *([place] for place in reversed(places))]:
        if len(gone) == len(places):
            continue
        made = copy.deepcopy(workload)
        names = {workload["events"][i]["add"][j]["request_id"] for i, j in gone}
        for event in made["events"]:
            event["add"] = [a for a in event["add"] if a["request_id"] not in names]
            event["abort"] = [r for r in event["abort"] if r not in names]
        for name in names:
            made["outputs"].pop(name, None)
        yield _tidy(made)
    for index, event in enumerate(workload["events"]):
        for place in range(len(event["abort"])):
            made = copy.deepcopy(workload)
            del made["events"][index]["abort"][place]
            yield _tidy(made)


def _tidy(workload: Workload) -> Workload:
    workload["events"] = [e for e in workload["events"] if e["add"] or e["abort"]]
    return workload


def _plainer_config(workload: Workload) -> Iterator[Workload]:
    """Features away, knobs to their usual values, sizes down."""
    config = workload["config"]
    for feature in ("speculative", "async_scheduling", "max_loras"):
        if feature in config:
            made = copy.deepcopy(workload)
            del made["config"][feature]
            if feature == "max_loras":
                for event in made["events"]:
                    for add in event["add"]:
                        add.pop("lora", None)
            if feature == "speculative":
                made.pop("acceptance", None)
            yield made
    for key in (
        "policy",
        "long_prefill_token_threshold",
        "enable_chunked_prefill",
        "max_model_len",
    ):
        if config[key] != CONFIG[key]:
            yield _with(workload, key, CONFIG[key])
    if config["enable_prefix_caching"]:
        yield _with(workload, "enable_prefix_caching", False)
    for key, least in (("num_blocks", 2), ("max_num_batched_tokens", 1), ("max_num_seqs", 1)):
        value = config[key]
        for step in (value // 2, 8, 1):
            if step and value - step >= least:
                yield _with(workload, key, value - step)
    if config["block_size"] > CONFIG["block_size"]:
        yield _with(workload, "block_size", CONFIG["block_size"])


def _with(workload: Workload, key: str, value: Any) -> Workload:
    made = copy.deepcopy(workload)
    made["config"][key] = value
    return made


def _earlier(workload: Workload) -> Iterator[Workload]:
    """Events closer together."""
    for index, event in enumerate(workload["events"]):
        before = workload["events"][index - 1]["step"] + 1 if index else 0
        for step in {before, event["step"] - 1}:
            if before <= step < event["step"]:
                made = copy.deepcopy(workload)
                gap = event["step"] - step
                for later in made["events"][index:]:
                    later["step"] -= gap
                    for add in later["add"]:
                        if add["arrival_time"] == later["step"] + gap:
                            add["arrival_time"] -= gap
                        if add.get("grammar"):
                            ready = max(0, add["grammar"]["ready_at"] - gap)
                            add["grammar"] = {**add["grammar"], "ready_at": ready}
                yield made


def _plainer_requests(workload: Workload) -> Iterator[Workload]:
    """Shorter prompts and answers, usual keys."""
    for number, (index, place) in enumerate(_requests(workload)):
        add = workload["events"][index]["add"][place]
        step, said = workload["events"][index]["step"], workload["outputs"][add["request_id"]]
        prompt, most = add["prompt_token_ids"], add["max_tokens"]
        changes: list[dict[str, Any]] = [
            {"prompt_token_ids": prompt[:-less]}
            for less in (len(prompt) // 2, 4, 1)
            if 0 < less < len(prompt)
        ]
        changes += [{"max_tokens": most - less} for less in (most // 2, 1) if 0 < less < most]
        usual = {"priority": 0, "arrival_time": float(step), "ignore_eos": True}
        changes += [{key: value} for key, value in usual.items() if add[key] != value]
        changes += [{key: None} for key in ("lora", "grammar") if add.get(key)]
        if prompt != own(number, len(prompt)):
            changes.append({"prompt_token_ids": own(number, len(prompt))})
        for change in changes:
            made = copy.deepcopy(workload)
            changed = made["events"][index]["add"][place]
            changed.update({k: v for k, v in change.items() if v is not None})
            for key in [k for k, v in change.items() if v is None]:
                del changed[key]
            yield made
        drafts = workload["config"].get("speculative", {}).get("num_speculative_tokens", 0)
        for plain in ([SAYS] * len(said), said[: most + drafts + 1]):
            if said != plain:
                made = copy.deepcopy(workload)
                made["outputs"][add["request_id"]] = plain
                yield made

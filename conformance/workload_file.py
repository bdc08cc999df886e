"""Workloads by hand: a short form in YAML, beside the full one of the recordings.

    config: {num_blocks: 6, block_size: 4, policy: priority}
    requests:
    - {id: A, prompt: 11, max_tokens: 1, priority: 9}
    - {id: B, prompt: [50, 51, 52, 53], max_tokens: 6, step: 1}

`prompt` is a number of tokens that no other request has, or the tokens. Left out, a knob is that of
`CONFIG` and a request's key that of `REQUEST`. With `config.speculative`, `acceptance` says how
often a draft is what the target says. A number in place of a file is a seed of `workloads.py`; a
file of recordings gives its first line, or `FILE:SEED`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from conformance import recording, workloads

CONFIG: dict[str, Any] = {
    "num_blocks": 65,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "long_prefill_token_threshold": 0,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "max_model_len": 256,
    "policy": "fcfs",
}
"""The knobs that a short form leaves out; one block of the pool is the null block."""

REQUEST: dict[str, Any] = {
    "id": None,
    "prompt": None,
    "max_tokens": 4,
    "step": 0,
    "priority": 0,
    "says": None,
    "abort_at": None,
    "lora": None,
    "grammar": None,
    "ignore_eos": True,
    "arrival_time": None,
}
"""The keys of a request; `id` and `prompt` are needed. `says` are the tokens that are sampled."""

FEATURES = ("speculative", "async_scheduling", "max_loras")
SAYS = 7


class WorkloadError(ValueError):
    """A workload cannot be read; the message names the file, the key and what is accepted."""


def read(name: str) -> workloads.Workload:
    """The workload that a seed, a file or `FILE:SEED` names.

    Raises:
        WorkloadError: there is no such file, or what it holds is not a workload.
    """
    if name.isdecimal():
        return workloads.generate(int(name))
    path, _, seed = name.rpartition(":")
    if path and seed.lstrip("-").isdecimal():
        return _recorded(Path(path), int(seed))
    if name.endswith((".jsonl", ".jsonl.gz")):
        return _recorded(Path(name), None)
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WorkloadError(f"{name}: {reason}; need a seed, FILE or FILE:SEED") from None
    try:
        return parse(text)
    except WorkloadError as error:
        raise WorkloadError(f"{name}: {error}") from None


def parse(text: str) -> workloads.Workload:
    """The workload that YAML or JSON says, in the short form or in the full one.

    Raises:
        WorkloadError: it is neither.
    """
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise WorkloadError(f"not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise WorkloadError("need an object with config and requests, or a recording")
    workload = _bare(found) if "events" in found else expand(found)
    if problem := recording.problem_of_workload(workload):
        raise WorkloadError(problem)
    return workload


def expand(short: Mapping[str, Any]) -> workloads.Workload:
    """The full form of a short one.

    Raises:
        WorkloadError: a key is unknown, missing, or of another kind.
    """
    _known(short, ("config", "requests", "eos_token_id", "acceptance"), "")
    config, asked = short.get("config") or {}, short.get("requests")
    if not isinstance(config, dict) or not isinstance(asked, list) or not asked:
        raise WorkloadError("need config (an object) and requests (a list, at least one)")
    _known(config, (*CONFIG, *FEATURES), "config.")
    events: dict[int, dict[str, Any]] = {}
    outputs: dict[str, list[int]] = {}
    for index, request in enumerate(asked):
        where = f"requests[{index}]."
        if not isinstance(request, dict):
            raise WorkloadError(f"{where[:-1]}={request!r}: need an object with id and prompt")
        _known(request, REQUEST, where)
        given = {**REQUEST, **request}
        request_id = str(given["id"] if given["id"] is not None else f"r{index}")
        if request_id in outputs:
            raise WorkloadError(f"{where}id={request_id!r}: another request has it")
        prompt, step = given["prompt"], given["step"]
        if type(prompt) is int and prompt > 0:
            prompt = own(index, prompt)
        for key, value in (("step", step), ("max_tokens", given["max_tokens"])):
            if type(value) is not int or value < 0:
                raise WorkloadError(f"{where}{key}={value!r}: need a number, at least 0")
        add = {
            "request_id": request_id,
            "prompt_token_ids": prompt,
            "max_tokens": given["max_tokens"],
            "priority": given["priority"],
            "arrival_time": float(step if given["arrival_time"] is None else given["arrival_time"]),
            "ignore_eos": given["ignore_eos"],
            **{key: given[key] for key in ("lora", "grammar") if given[key] is not None},
        }
        outputs[request_id] = given["says"] or [SAYS] * given["max_tokens"]
        events.setdefault(step, {"add": [], "abort": []})["add"].append(add)
        if given["abort_at"] is not None:
            events.setdefault(given["abort_at"], {"add": [], "abort": []})["abort"].append(
                request_id
            )
    return {
        "seed": 0,
        "eos_token_id": short.get("eos_token_id", workloads.EOS),
        "config": {**CONFIG, **config},
        "events": [{"step": step, **events[step]} for step in sorted(events)],
        "outputs": outputs,
        **({"acceptance": short["acceptance"]} if "acceptance" in short else {}),
    }


def own(number: int, length: int) -> list[int]:
    """The tokens that no other request has, of the request of that number."""
    return [1000 * (number + 1) + position for position in range(length)]


def shorten(workload: Mapping[str, Any]) -> str:
    """The short form of a workload, as YAML that `parse` reads."""
    config = {k: v for k, v in workload["config"].items() if CONFIG.get(k) != v}
    if "speculative" in config:
        told = ("method", "num_speculative_tokens")
        config["speculative"] = {key: config["speculative"][key] for key in told}
    aborts = {r: event["step"] for event in workload["events"] for r in event.get("abort", ())}
    lines = [f"config: {_flow(config)}"]
    if "acceptance" in workload:
        lines.append(f"acceptance: {workload['acceptance']}")
    lines.append("requests:")
    number = -1
    for event in workload["events"]:
        for add in event.get("add", ()):
            request_id, number = add["request_id"], number + 1
            says = list(workload["outputs"].get(request_id, ()))
            prompt = add["prompt_token_ids"]
            request = {
                "id": request_id,
                "prompt": len(prompt) if prompt == own(number, len(prompt)) else prompt,
                "max_tokens": add["max_tokens"],
                "step": event["step"],
                "priority": add["priority"],
                "says": None if set(says) <= {SAYS} else says,
                "abort_at": aborts.get(request_id),
                "lora": add.get("lora") or None,
                "grammar": add.get("grammar"),
                "ignore_eos": add["ignore_eos"],
                "arrival_time": None
                if add["arrival_time"] == event["step"]
                else add["arrival_time"],
            }
            kept = {k: v for k, v in request.items() if k == "max_tokens" or REQUEST[k] != v}
            lines.append(f"- {_flow(kept)}")
    return "\n".join(lines)


def _flow(value: Any) -> str:
    """One line of YAML, which JSON is."""
    return json.dumps(value)


def _recorded(path: Path, seed: int | None) -> workloads.Workload:
    """One workload of a file of recordings."""
    try:
        for entry in recording.read(path, None):
            if seed is None or entry["seed"] == seed:
                return _bare(entry)
    except recording.RecordingError as error:
        raise WorkloadError(str(error)) from None
    raise WorkloadError(f"{path}: holds no workload of seed {seed}")


def _bare(entry: Mapping[str, Any]) -> workloads.Workload:
    """A recording without what was decided."""
    keys = ("seed", "eos_token_id", "config", "events", "outputs", "acceptance")
    return {"seed": 0, **{key: entry[key] for key in keys if key in entry}}


def _known(found: Mapping[str, Any], names: Any, where: str) -> None:
    for key in found:
        if key not in names:
            raise WorkloadError(f"{where}{key}: unknown; need one of {', '.join(names)}")

"""The bug museum in a page: a report, a decision, then the mini part and the releases side by side.

Promises: what is shown as run was run just now, by the mini part that has the bug or by the code of
a release that lies with the site; what `python -m conformance.museum.recorder` recorded says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from conformance import workload_file
from conformance.museum import EXHIBITS, INVARIANTS, Exhibit, Shown, recorded
from conformance.workloads import Workload
from course.site import live_real
from course.site.play_pins import RUNTIME_BYTES
from course.site.widgets.scheduler_desk import MODEL_BYTES

FIRST = "In which step is it seen first?"
NOTHING = "From which step on is nothing planned?"


def document() -> dict[str, Any]:
    """Every exhibit with what was recorded of it, and the rooms."""
    return {
        "rooms": INVARIANTS,
        "exhibits": [
            {
                "number": number, "title": each.title, "report": each.report, "also": each.also,
                "url": each.url, "given": given(each), "room": each.invariant,
                "cause": each.cause, "mend": each.mend, "bad": each.bad, "good": each.good,
                "step": _recorded(number)[each.bad].step if each.workload else None,
                "when": NOTHING if each.stalls else FIRST,
                "answers": [
                    _answer(f"vLLM {version}", "recorded", shown)
                    for version, shown in _recorded(number).items()
                ],
            }
            for number, each in EXHIBITS.items()
        ],
        "bytes": RUNTIME_BYTES - MODEL_BYTES,
    }  # fmt: skip


def ask(number: int) -> list[dict[str, Any]]:
    """Run an exhibit: on the mini part that has it, on the pin, on the releases that it names.

    Returns:
        Of each `of`, who answered; `how`, "mini", "run" or "recorded"; `broken`, `step`, `lines`.

    Raises:
        ValueError: no such exhibit.
    """
    from conformance.museum.mini import PARTS

    if number not in EXHIBITS:
        known = ", ".join(map(str, EXHIBITS))
        raise ValueError(f"number={number!r}: not exhibited; there are {known}")
    exhibit = EXHIBITS[number]
    answers = []
    if number in PARTS:
        answers.append(_answer(PARTS[number].name, "mini", PARTS[number].show()))
    here = live_real.releases()
    for version, shown in _recorded(number).items():
        how = "recorded"
        if version in here:
            how, shown = "run", exhibit.show(live_real.core(version))
        answers.append(_answer(f"vLLM {version}", how, shown))
    return answers


def _recorded(number: int) -> dict[str, Shown]:
    """What was recorded of an exhibit, by release: the pin first, then by age."""
    kept = recorded(number)
    return dict(sorted(kept.items(), key=lambda item: item[0] != live_real.PIN))


def _answer(of: str, how: str, shown: Shown) -> dict[str, Any]:
    return {"of": of, "how": how, **asdict(shown), "lines": list(shown.lines)}


# ------------------------------------------------------------------ what a scheduler is given


def given(exhibit: Exhibit) -> list[str]:
    """The workload in words, a line for the engine and one for each request; empty without one."""
    workload = exhibit.workload
    if workload is None:
        return []
    adds = [(event["step"], add) for event in workload["events"] for add in event["add"]]
    gone = {name: event["step"] for event in workload["events"] for name in event["abort"]}
    kept = ", a victim's blocks are kept until its plan has run" if exhibit.prepare else ""
    return [
        _engine(workload) + kept,
        *(_request(step, add, gone.get(add["request_id"])) for step, add in adds),
    ]


def _engine(workload: Workload) -> str:
    config = workload["config"]
    said = [
        f"{_count(config['num_blocks'] - 1, 'usable block')} of {config['block_size']} tokens",
        f"{_count(config['max_num_batched_tokens'], 'token')} a step",
        f"{_count(config['max_num_seqs'], 'request')} at once",
    ]
    if config["policy"] != "fcfs":
        said.append("priorities, the smallest first")
    if config.get("async_scheduling"):
        said.append("two plans in flight")
    if threshold := config["long_prefill_token_threshold"]:
        said.append(f"chunks of at most {threshold}")
    if not config["enable_chunked_prefill"]:
        said.append("no chunks")
    if config["max_model_len"] != workload_file.CONFIG["max_model_len"]:
        said.append(f"max_model_len {config['max_model_len']}")
    said.append("prefix caching" if config["enable_prefix_caching"] else "no prefix caching")
    return ", ".join(said)


def _request(step: int, add: Mapping[str, Any], gone: int | None) -> str:
    said = [f"a prompt of {len(add['prompt_token_ids'])}", f"max_tokens {add['max_tokens']}"]
    if add.get("min_tokens"):
        said.append(f"min_tokens {add['min_tokens']}")
    if add["priority"]:
        said.append(f"priority {add['priority']}")
    if kv := add.get("kv"):
        said.append(_loaded(kv))
    if step:
        said.append(f"comes in step {step}")
    if gone is not None:
        said.append(f"aborted in step {gone}")
    return f"{add['request_id']}: {', '.join(said)}"


def _loaded(kv: Mapping[str, Any]) -> str:
    if not kv["external_tokens"]:
        return "a connector that holds nothing of it"
    tokens = f"{kv['external_tokens']} of it can be loaded"
    if kv.get("fails"):
        return f"{tokens}, which fails once"
    if kv["load_async"] and kv["load_steps"] is None:
        return f"{tokens}, and no report comes"
    return tokens


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

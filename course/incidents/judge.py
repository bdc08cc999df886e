"""What the recording of a bad day contradicts, and what a knob does to it.

Promises: a cause is right if nothing that was recorded contradicts it; a wrong one is answered with
the line that does, and with the file it stands in. What the trace decides, and what a knob does, is
lab 18-03's judging, on the requests that the clients of that day sent.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.modules import sibling
from mini_vllm.observe.flight import Flight, pairs

ROOT = Path(__file__).resolve().parents[2]
DAYS = Path(__file__).parent / "days"
_LAB = ROOT / "phase-18-performance-engineering" / "labs" / "lab-03-diagnose"
judging: Any = sibling(_LAB / "README.md", "judging")

CAUSES: dict[str, str] = {
    **judging.CAUSES["queue"],
    "prefill-beside-decode": judging.CAUSES["gaps"]["prefill-beside-decode"],
    "preemption": judging.CAUSES["twice"]["preemption"],
    "short-prefix": judging.CAUSES["hits"]["short-prefix"],
    "caching-off": judging.CAUSES["hits"]["caching-off"],
    "clients-leave": "clients go before their answers end",
}
"""One list for all days."""
KNOBS = (
    "block_size", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold",
    "enable_prefix_caching", "policy", "max_loras",
)  # fmt: skip
"""What may be turned. The number of blocks is the memory, and stays."""


@dataclass(frozen=True, slots=True)
class Told:
    """What is said of a day before it is looked at."""

    complaint: str
    """A user's words."""
    symptom: str
    """The kind of lab 18-03 whose measure the limit is."""
    subject: str
    """The request that the user means."""
    limit: Mapping[str, int]
    """Counts to keep, as in lab 18-03: hits are a least, others a most; times in steps."""


DAY = {
    "monday": Told(
        "A short question, r3, stood long before its first word came.",
        "queue", "r3", {"worst_wait_of_subject": 4, "steps": 80},
    ),
    "tuesday": Told(
        "My answer, r0, comes smoothly, and then it stops dead, again and again.",
        "gaps", "r0", {"fullest_step": 72, "steps": 64},
    ),
    "wednesday": Told(
        "We pay for more computation than our requests ask for. Have a look at r6.",
        "twice", "r6", {"preemptions": 0, "steps": 120},
    ),
    "thursday": Told(
        "The server is nearly idle, and still r1 waits while later ones are answered.",
        "adapters", "r1", {"worst_wait_of_subject": 2},
    ),
    "friday": Told(
        "Nine of us asked at the same moment. The last, r8, got its first word long after.",
        "queue", "r8", {"worst_wait_of_subject": 30},
    ),
    "saturday": Told(
        "Few requests run, the cache is nearly empty, and r6 waits and waits.",
        "queue", "r6", {"worst_wait_of_subject": 10},
    ),
    "sunday": Told(
        "Since this morning's release every prompt is computed from its first token. r7 is one.",
        "hits", "r7", {"hits": 1000},
    ),
}  # fmt: skip
NAMES = tuple(DAY)


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line that contradicts a cause."""

    file: str
    line: int
    """From 1."""
    quoted: str
    says: str


@dataclass(slots=True)
class Recorded:
    """One day as it was recorded."""

    name: str
    case: dict[str, Any]
    """As lab 18-03 has cases; steps that plan nothing are left out."""
    lines: list[str]
    """Of the trace."""
    at: list[int]
    """Line of the trace by step of the case."""
    log: list[str]
    metrics: list[str]
    sent: dict[str, str]
    """By request, the line of what its client sent."""
    moments: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    """What each look at /metrics was, and its values by name and labels."""

    @property
    def told(self) -> Told:
        return DAY[self.name]


def folder_of(name: str) -> Path:
    """Where a day lies.

    Raises:
        KeyError: there is no such day.
    """
    if name not in DAY:
        raise KeyError(name)
    return DAYS / name


@functools.cache
def load(name: str) -> Recorded:
    """A day's files, read once.

    Raises:
        KeyError: there is no such day.
    """
    folder = folder_of(name)
    text = (folder / "requests.jsonl").read_text(encoding="utf-8")
    sent = {each["request"]: each for each in map(json.loads, text.splitlines())}
    flight = Flight(folder / "trace.jsonl.gz")
    reader = _Reader(flight.head, sent)
    for number, line in enumerate(flight, 2):
        reader.take(number, line)
    told = DAY[name]
    case = reader.case | {"case": told.symptom, "subject": told.subject, "goal": dict(told.limit)}
    metrics = (folder / "metrics.txt").read_text(encoding="utf-8").splitlines()
    log = (folder / "server.log").read_text(encoding="utf-8").splitlines()
    lines = dict(zip(sent, text.splitlines(), strict=True))
    return Recorded(name, case, reader.lines, reader.at, log, metrics, lines, _moments(metrics))


class _Reader:
    """Makes a case of lab 18-03 of a flight recorder's lines."""

    def __init__(self, head: Mapping[str, Any], sent: Mapping[str, Mapping[str, Any]]) -> None:
        config = {
            name: head[name]
            for name in (
                "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens",
                "enable_prefix_caching", "max_model_len", "policy",
            )
        }  # fmt: skip
        for name in ("long_prefill_token_threshold", "enable_chunked_prefill"):
            config[name] = head["knobs"][name]
        if "max_loras" in head:
            config["max_loras"] = head["max_loras"]
        self.case: dict[str, Any] = {"config": config, "events": [], "steps": []}
        self.lines = [json.dumps(head, separators=(",", ":"))]
        self.at: list[int] = []
        self.sent = sent
        self.names: dict[int, str] = {}
        self.plan: dict[str, int] = {}
        self.queues: dict[str, list[str]] = {"running": [], "waiting": [], "skipped": []}
        self.coming: list[dict[str, Any]] = []

    def take(self, number: int, line: Mapping[str, Any]) -> None:
        """One line, the `number`th of the file."""
        self.lines.append(json.dumps(line, separators=(",", ":")))
        if "add" in line:
            self._add(line)
        elif "step" in line:
            self._step(number, line)

    def _add(self, line: Mapping[str, Any]) -> None:
        found = re.match(r"cmpl-(r\d+)-", line["id"])
        assert found, f"{line['id']}: no request of the clients"
        name = self.names[line["add"]] = found[1]
        asked = self.sent[name]
        assert len(asked["prompt_token_ids"]) == line["prompt"], name
        added = {
            "request_id": name, "prompt_token_ids": asked["prompt_token_ids"],
            "max_tokens": line["max"], "priority": line["priority"], "arrival_time": line["at"],
            "ignore_eos": True,
        }  # fmt: skip
        if "max_loras" in self.case["config"]:
            added["lora"] = line.get("lora", 0)
        self.coming.append(added)

    def _step(self, number: int, line: Mapping[str, Any]) -> None:
        if "plan" in line:
            self.plan = {self.names[n]: count for n, count in pairs(line["plan"])}
        for name in self.queues:
            if name in line:
                self.queues[name] = [self.names[n] for n in line[name][1:]]
        if not self.plan:
            return
        steps = self.case["steps"]
        if self.coming:
            self.case["events"].append({"step": len(steps), "add": self.coming, "abort": []})
            self.coming = []
        tables = pairs(line.get("blocks", []))
        steps.append({
            "num_scheduled_tokens": dict(self.plan),
            "new": {self.names[n]: found for n, found in pairs(line.get("new", []))},
            "resumed": [self.names[n] for n, _ in pairs(line.get("resumed", []))],
            "preempted": [self.names[n] for n in line.get("preempted", [])],
            "running": self.queues["running"], "waiting": self.queues["waiting"],
            "skipped_waiting": self.queues["skipped"], "free_blocks": line["free"],
            "block_ids": {self.names[n]: ids for n, ids in tables},
        })  # fmt: skip
        self.at.append(number)


def _moments(lines: list[str]) -> list[tuple[str, dict[str, float]]]:
    found: list[tuple[str, dict[str, float]]] = []
    for line in lines:
        if line.startswith("# GET /metrics, "):
            found.append((line.removeprefix("# GET /metrics, "), {}))
        elif line:
            name, _, value = line.rpartition(" ")
            found[-1][1][name] = float(value)
    return found


# ------------------------------------------------------------------ what is shown of a day

SHOWN = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
    "prompt_tokens_total", "generation_tokens_total",
)  # fmt: skip
"""Of /metrics, in the table."""


COUNTED = {
    "worst_wait_of_subject": "steps that {} waits for its first token",
    "fullest_step": "tokens of the fullest step in which {} gets one",
    "preemptions": "preemptions",
    "hits": "prompt tokens found in the cache",
    "steps": "steps until all answers have ended",
}
"""What a limit counts, in words, with the request that is meant."""


def limit(day: Recorded) -> str:
    """The counts to keep, in words."""
    words = [
        f"{name} {'at least' if name == 'hits' else 'at most'} {value} "
        f"({COUNTED[name].format(day.told.subject)})"
        for name, value in day.told.limit.items()
    ]
    return ", ".join(words)


def stat_lines(day: Recorded) -> list[str]:
    """Of the log the lines of the stat logger."""
    return [line for line in day.log if "Avg prompt throughput" in line]


def value_of(values: dict[str, float], name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(
        value for key, value in values.items() if key.split("{", 1)[0] == f"vllm:{name}"
    )  # fmt: skip


# ------------------------------------------------------------------ what contradicts a cause


def contradiction(day: Recorded, cause: str) -> Evidence | None:
    """What contradicts a cause; None where nothing does.

    Raises:
        ValueError: a cause that is not in `CAUSES`; they are listed.
    """
    if cause not in CAUSES:
        raise ValueError(f"cause={cause!r}: need one of {', '.join(CAUSES)}")
    if cause == "clients-leave":
        return _metric(day, 'vllm:request_success_total{.*finished_reason="abort"',
                       "after the last answer, no request had been aborted", "0.0")  # fmt: skip
    if cause == "caching-off":
        return _metric(day, 'vllm:cache_config_info{.*enable_prefix_caching="True"',
                       "the cache of prefixes is on", "")  # fmt: skip
    if cause == "preemption":
        found = _metric(day, "vllm:num_preemptions_total", "nothing was ever preempted", "0.0")
        if found:
            return found
    if cause == "adapter-slots" and "max_loras" not in day.case["config"]:
        number, line = next(
            (n, line) for n, line in enumerate(day.log, 1) if "non-default args" in line
        )
        return Evidence("server.log", number, line, "the server was started without adapters")
    said = _of_trace(day, cause)
    return _quoted(day, said) if said else None


def _of_trace(day: Recorded, cause: str) -> str:
    """What the trace says against a cause: by lab 18-03 where it judges the symptom, and otherwise
    that the subject's symptom is of another kind than what the cause makes."""
    case, subject = day.case, day.told.subject
    if cause in judging.CAUSES[day.told.symptom]:
        return str(judging.contradiction(case, cause))
    if cause == "short-prefix":
        return str(judging.contradiction({**case, "case": "hits"}, cause))
    plans = [step["num_scheduled_tokens"] for step in case["steps"]]
    first = next(number for number, plan in enumerate(plans) if subject in plan)
    if day.told.symptom in ("queue", "adapters"):
        waits = judging.waits(case, subject)[0]
        return (
            f"step {waits}: {subject} stands in a queue, and nothing of it is computed before step "
            f"{first}: it waits for its first token, not between two"
        )
    if day.told.symptom == "gaps":
        decoding = [n for n, plan in enumerate(plans) if plan.get(subject) == 1]
        fullest = max(decoding, key=lambda n: sum(plans[n].values()))
        return (
            f"step {fullest}: {subject} runs and gets its token, one of "
            f"{sum(plans[fullest].values())}: it stands in no queue"
        )
    if day.told.symptom == "twice":
        lost = next(n for n, step in enumerate(case["steps"]) if step["resumed"])
        name = case["steps"][lost]["resumed"][0]
        return (
            f"step {lost}: {name} had run, and {plans[lost][name]} tokens of it are planned once "
            "more: this cause delays work and makes no more of it"
        )
    return (
        f"step {first}: {plans[first][subject]} tokens of {subject} are planned at once, so that "
        f"it found {case['steps'][first]['new'][subject]}: this cause delays work and makes no "
        "more of it"
    )


def _metric(day: Recorded, pattern: str, says: str, value: str) -> Evidence | None:
    """The last line of /metrics that fits, if its value is `value` ("": any)."""
    fits = [n for n, line in enumerate(day.metrics) if re.match(pattern, line)]
    if not fits:
        return None
    line = day.metrics[fits[-1]]
    if value and line.rpartition(" ")[2] != value:
        return None
    return Evidence("metrics.txt", fits[-1] + 1, line, says)


def _quoted(day: Recorded, said: str) -> Evidence:
    """The line of the trace that a text speaks of; of prompts, what the client sent."""
    found = re.search(r"step (\d+)", said)
    if not found:
        number = list(day.sent).index(day.told.subject)
        return Evidence("requests.jsonl", number + 1, day.sent[day.told.subject], said)
    number = day.at[int(found[1])]
    return Evidence("trace.jsonl.gz", number, day.lines[number - 1], said)


# ------------------------------------------------------------------ what a knob does


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the simulator came to with a knob turned."""

    counts: dict[str, int]
    """Those that the limit names, and the steps."""
    missed: str
    """Which part of the limit does not hold; "" where all do."""


def replay(day: Recorded, knob: str = "", value: str = "") -> Replayed:
    """Serve the day's requests again, with one knob turned, or with none.

    Raises:
        ValueError: no such knob, or a value that it does not take.
    """
    turned: dict[str, Any] = {}
    if knob:
        if knob not in KNOBS:
            raise ValueError(f"knob={knob!r}: need one of {', '.join(KNOBS)}")
        if knob == "max_loras" and "max_loras" not in day.case["config"]:
            raise ValueError("max_loras: no request of this day has an adapter")
        turned[knob] = _value(knob, value)
    found = judging.measure(day.case, **turned)
    names = dict.fromkeys([*day.told.limit, "steps"])
    counts = {name: getattr(found, name) for name in names}
    return Replayed(counts, judging.missed(day.case, found))


def _value(knob: str, text: str) -> Any:
    if knob == "policy":
        if text not in ("fcfs", "priority"):
            raise ValueError(f"policy={text!r}: need fcfs or priority")
        return text
    if knob == "enable_prefix_caching":
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{knob}={text!r}: need true or false")
        return text.lower() == "true"
    least = 0 if knob == "long_prefill_token_threshold" else 1
    if not re.fullmatch(r"\d{1,6}", text) or int(text) < least:
        raise ValueError(f"{knob}={text!r}: need a whole number from {least} to 999999")
    return int(text)

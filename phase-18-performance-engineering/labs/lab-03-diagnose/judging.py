"""Reads the cases of lab 18-03: what in a recording contradicts a diagnosis, and what a knob does.

Promises: a contradiction is read from the recorded steps and names one; a knob is measured with the
course's simulator on the case's own requests, one step a second, so that seconds are steps.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mini_vllm.config import EngineConfig
from mini_vllm.plan import ExternalTokens, Gate
from mini_vllm.simulate.cost import LinearCost
from mini_vllm.simulate.simulator import Simulator
from mini_vllm.simulate.traces import TraceError, TraceRequest

Case = dict[str, Any]
CAUSES = {
    "hits": {
        "short-prefix": "the prompts begin alike, with less than a block",
        "other-prompts": "the prompts do not begin alike",
        "evicted": "what was cached was given to another request",
        "caching-off": "the cache of prefixes is off",
    },
    "queue": {
        "head-needs-blocks": "the head of the queue needs more blocks than are free",
        "max-num-seqs": "as many requests run as may",
        "budget": "the step's budget is used up",
        "adapter-slots": "the adapters of the step are as many as may be",
    },
    "gaps": {
        "prefill-beside-decode": "prompts are computed in the step of a decode",
        "many-decodes": "too many requests decode in one step",
    },
    "twice": {
        "preemption": "blocks ran out, and what was computed is computed again",
        "sent-twice": "a client sent a request again",
    },
    "upgrade": {
        "cached-prefix": "one release still has a prefix that the other gave away",
        "other-order": "requests are admitted in another order",
        "preemption": "one release preempts where the other does not",
    },
}
CAUSES["adapters"] = CAUSES["queue"]
CAUSES["alive"] = {
    "never-fits": "the head of the queue needs more blocks than there are",
    "head-needs-blocks": "the head of the queue waits for blocks that others hold",
    "slow": "it moves, more slowly than clients wait",
    "max-num-seqs": "as many requests run as may",
}
CAUSES["rate"] = {
    "own-blocks": "a preempted request finds its own blocks again, and that is counted",
    "prompts-alike": "prompts begin alike without anybody's knowledge",
    "sent-twice": "a client sent a request again",
}
CAUSES["counters"] = {
    "admitted-twice": "what the tier gave at the last admission is taken from what the first found",
    "load-failed": "a load from the tier failed, and its tokens were taken off again",
    "counted-again": "a prompt that was preempted is counted a second time",
    "more-than-the-prompt": "more tokens are found than the prompt has",
}
ALLOWED = (
    "block_size", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold",
    "enable_prefix_caching", "policy", "max_loras", "max_model_len", "release",
)  # fmt: skip
"""Knobs that a fix may turn. The number of blocks is the memory, and stays."""


def load(path: Path) -> list[Case]:
    """All cases of a file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def adds(case: Case) -> dict[str, dict[str, Any]]:
    """What was asked, by request, with the step before which it came."""
    return {
        add["request_id"]: {**add, "step": event["step"]}
        for event in case["events"]
        for add in event["add"]
    }


def waits(case: Case, request_id: str) -> list[int]:
    """Steps in which a request stands in a queue and gets nothing."""
    return [
        number
        for number, step in enumerate(case["steps"])
        if request_id in [*step["waiting"], *step.get("skipped_waiting", ())]
        and request_id not in step["num_scheduled_tokens"]
    ]


def shared(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Tokens with which two prompts begin alike."""
    pairs = zip(one["prompt_token_ids"], other["prompt_token_ids"], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(one["prompt_token_ids"]))


# ------------------------------------------------------------------ what contradicts a cause


def contradiction(case: Case, cause: str) -> str:
    """What in the recording contradicts a cause; empty where nothing does.

    Raises:
        ValueError: a cause that is none of the case's; the accepted ones are listed.
    """
    known = CAUSES[case["case"]]
    if cause not in known:
        raise ValueError(f"cause={cause!r}: need one of {', '.join(known)}")
    if case["case"] in ("queue", "adapters"):
        return _of_waiting(case, cause)
    return {
        "hits": _of_hits, "gaps": _of_gaps, "twice": _of_twice, "upgrade": _of_upgrade,
        "alive": _of_alive, "rate": _of_rate, "counters": _of_counters,
    }[case["case"]](case, cause)  # fmt: skip


def _of_hits(case: Case, cause: str) -> str:
    config, asked, subject = case["config"], adds(case), case["subject"]
    size, mine = config["block_size"], adds(case)[case["subject"]]
    earlier = [each for name, each in asked.items() if name < subject]
    most = max((shared(mine, each) for each in earlier), default=0)
    if cause == "caching-off" and config["enable_prefix_caching"]:
        return "the configuration has enable_prefix_caching=True"
    if cause == "other-prompts" and most:
        return f"an earlier prompt begins with the same {most} tokens as {subject}"
    if cause == "short-prefix" and not 0 < most < size:
        return f"{most} tokens are shared, {most // size} blocks of {size}"
    if cause == "evicted":
        used = config["num_blocks"] - 1 - min(step["free_blocks"] for step in case["steps"])
        ids = {b for step in case["steps"] for ids in step["block_ids"].values() for b in ids}
        if len(ids) < config["num_blocks"] - 1:
            return (
                f"{len(ids)} of {config['num_blocks'] - 1} blocks were ever in a table (at most "
                f"{used} at once): none was given away a second time while others were unused"
            )
    return ""


def _of_waiting(case: Case, cause: str) -> str:
    """A cause of a wait holds in most of its steps: the first and last may have another one."""
    found = [_of_step(case, cause, number) for number in waits(case, case["subject"])]
    against = [each for each in found if each]
    if 2 * len(against) <= len(found):
        return ""
    return f"{against[0]} (so it is in {len(against)} of the {len(found)} steps that it waits)"


def _of_step(case: Case, cause: str, number: int) -> str:
    """What contradicts the cause in one step of the wait."""
    config, asked, subject = case["config"], adds(case), case["subject"]
    step = case["steps"][number]
    used = sum(step["num_scheduled_tokens"].values())
    if cause == "max-num-seqs" and len(step["running"]) < config["max_num_seqs"]:
        return (
            f"step {number}: {len(step['running'])} run and {subject} waits, "
            f"max_num_seqs={config['max_num_seqs']}"
        )
    if cause == "budget" and used < config["max_num_batched_tokens"]:
        most = config["max_num_batched_tokens"]
        return f"step {number}: {used} of {most} tokens are used and {subject} waits"
    if cause == "head-needs-blocks":
        head = [*step.get("skipped_waiting", ()), *step["waiting"]][0]
        need = -(-len(asked[head]["prompt_token_ids"]) // config["block_size"])
        if step["free_blocks"] >= need:
            free = step["free_blocks"]
            return f"step {number}: {free} blocks are free, {head} is first and needs {need}"
    if cause == "adapter-slots":
        if not config.get("max_loras"):
            return "no request of this case has an adapter"
        held = {asked[name]["lora"] for name in step["running"]} - {0}
        if len(held) < config["max_loras"] or asked[subject]["lora"] in held | {0}:
            return f"step {number}: adapters {sorted(held)} run, and {subject} waits"
    return ""


def _of_gaps(case: Case, cause: str) -> str:
    subject = case["subject"]
    decoding = [
        (number, step["num_scheduled_tokens"])
        for number, step in enumerate(case["steps"])
        if step["num_scheduled_tokens"].get(subject) == 1
    ]
    number, counts = max(decoding, key=lambda pair: sum(pair[1].values()))
    ones = sum(count == 1 for count in counts.values())
    if cause == "many-decodes":
        return (
            f"step {number} has {sum(counts.values())} tokens, and {ones} of its {len(counts)} "
            "requests get one token"
        )
    return "" if sum(counts.values()) > ones else f"step {number}: every request gets one token"


def _of_twice(case: Case, cause: str) -> str:
    if cause == "sent-twice":
        prompts = [tuple(add["prompt_token_ids"]) for add in adds(case).values()]
        if len(set(prompts)) < len(prompts):
            return ""
        resumed = [(k, step["resumed"]) for k, step in enumerate(case["steps"]) if step["resumed"]]
        return f"no two prompts are equal, and step {resumed[0][0]} resumes {resumed[0][1]}"
    return "" if any(step["preempted"] for step in case["steps"]) else "no step preempts"


def _of_upgrade(case: Case, cause: str) -> str:
    here, there = case["steps"], case["later"]["steps"]
    pairs = list(zip(here, there, strict=False))
    if cause == "preemption" and not any(a["preempted"] or b["preempted"] for a, b in pairs):
        return f"neither release preempts in any of {len(pairs)} steps"
    number = next(
        k for k, (a, b) in enumerate(pairs)
        if a["num_scheduled_tokens"] != b["num_scheduled_tokens"]
    )  # fmt: skip
    mine, theirs = (each["num_scheduled_tokens"] for each in pairs[number])
    if cause == "other-order" and list(mine) == list(theirs):
        return f"step {number}, the first that differs, has {list(mine)} in both releases"
    if cause == "cached-prefix" and sum(mine.values()) == sum(theirs.values()):
        return f"step {number}, the first that differs, computes as many tokens in both releases"
    return ""


def _of_alive(case: Case, cause: str) -> str:
    config, steps, asked = case["config"], case["steps"], adds(case)
    plans = [step["num_scheduled_tokens"] for step in steps]
    number, step, blocks = len(steps) - 1, steps[-1], config["num_blocks"] - 1
    if cause == "slow":
        first = next(k for k in range(len(plans)) if not any(plans[k:]))
        return "" if first == number else f"from step {first} to {number} no token is computed"
    if cause == "max-num-seqs":
        return _of_step(case, cause, number)
    if cause == "head-needs-blocks":
        free = step["free_blocks"]
        if step["running"]:
            return ""
        return f"step {number}: {free} of {blocks} blocks are free and none runs: no more will come"
    head = step["waiting"][0]
    known = sum(plan.get(head, 0) for plan in plans) + 1
    known = max(known, len(asked[head]["prompt_token_ids"]))
    need = -(-known // config["block_size"])
    return "" if need > blocks else f"{head} has {known} tokens, {need} of {blocks} blocks"


def _of_rate(case: Case, cause: str) -> str:
    prompts = [tuple(add["prompt_token_ids"]) for add in adds(case).values()]
    size = case["config"]["block_size"]
    if cause == "sent-twice":
        return "" if len(set(prompts)) < len(prompts) else "no two prompts are equal"
    if cause == "prompts-alike":
        first = {prompt[:size] for prompt in prompts}
        return "" if len(first) < len(prompts) else f"no two prompts have the same first {size}"
    return "" if any(step["resumed"] for step in case["steps"]) else "no request is resumed"


def admissions(case: Case, name: str) -> list[tuple[int, int, int]]:
    """Each admission of a request: the step, the tokens found, those of the tier among them."""
    return [
        (
            number,
            step["num_computed_tokens"][name] - step["num_scheduled_tokens"][name],
            step["external"].get(name, 0),
        )
        for number, step in enumerate(case["steps"])
        if name in [*step["new"], *step["resumed"]]
    ]


def first_tokens(case: Case) -> dict[str, int]:
    """The step of each request's first token: the first that has computed its whole prompt."""
    found: dict[str, int] = {}
    for number, step in enumerate(case["steps"]):
        for name, add in adds(case).items():
            if name in step["num_scheduled_tokens"] and (
                step["num_computed_tokens"][name] >= len(add["prompt_token_ids"])
            ):
                found.setdefault(name, number)
    return found


def _of_counters(case: Case, cause: str) -> str:
    died = case["dashboard"]["died"]["step"]
    name = next(name for name, number in first_tokens(case).items() if number == died)
    prompt = len(adds(case)[name]["prompt_token_ids"])
    came = [each for each in admissions(case, name) if each[0] <= died]
    if cause == "more-than-the-prompt":
        number, found, _ = max(came, key=lambda each: each[1])
        return (
            "" if found > prompt else f"step {number}: {name} finds {found}, its prompt is {prompt}"
        )
    if cause == "counted-again":
        said = [
            number for number in range(died) if case["steps"][number]["sampled_token_ids"].get(name)
        ]
        if said:
            return ""
        return f"a prompt is counted with its first token, and {name} says none before step {died}"
    if cause == "load-failed":
        number, found, external = came[-1]
        step = case["steps"][number]
        if step["num_computed_tokens"][name] < found:
            return ""
        return (
            f"step {number}: the tier gives {name} {external} tokens, and after it "
            f"{step['num_computed_tokens'][name]} are computed, so it goes on behind them"
        )
    return "" if len(came) > 1 and came[0][1] < came[-1][2] else f"{name}: admitted {came}"


# ------------------------------------------------------------------ what a knob does


class Tier(Gate):
    """The store of `counters`: it has each full block from the step after it was computed."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.stored: set[int] = set()
        self.coming: list[tuple[Any, int]] = []
        self.brought: dict[str, int] = {}
        self.falls = 0
        """First tokens with which 0.18.0's `local_cache_hit` falls."""

    def begins(self, plan: Any) -> None:
        for request, full in self.coming:
            self.stored.update(request.block_hashes[:full])
        self.coming.clear()

    def found(self, request: Any, num_cached: int) -> ExternalTokens:
        have = first = num_cached // self.block_size
        most = (request.num_tokens - 1) // self.block_size
        while have < most and request.block_hashes[have] in self.stored:
            have += 1
        self.brought[request.request_id] = (have - first) * self.block_size
        return ExternalTokens(self.brought[request.request_id])

    def scheduled(self, request: Any, num_new: int, plan: Any) -> None:
        end = request.num_computed_tokens + num_new
        self.coming.append((request, end // self.block_size))
        if request.num_output_tokens == 0 and end >= request.num_prompt_tokens:
            found = request.num_cached_tokens
            found += found + 1 == request.num_prompt_tokens  # it recomputes a whole hit's last one
            self.falls += found < self.brought[request.request_id]


@dataclass(slots=True)
class Counts:
    """What the simulator came to; times in steps."""

    steps: int = 0
    """Until the last request ended."""
    preemptions: int = 0
    computed_twice: int = 0
    hits: int = 0
    fullest_step: int = 0
    """Tokens of the fullest step in which the subject gets one token."""
    worst_wait_of_subject: int = 0
    """Steps in which the subject waits for its first."""
    falls: int = 0
    """Requests with which a counter of 0.18.0 would fall."""
    refused: list[str] = field(default_factory=list)
    """Requests whose prompt is too long for `max_model_len`."""
    plans: list[dict[str, int]] = field(default_factory=list)
    stuck: str = ""


def trace_of(case: Case, max_model_len: int) -> list[TraceRequest]:
    """The case's requests for the simulator: a prefix of each length has an id of its own.

    As at the server's door, an answer ends where `max_model_len` does, and a prompt as long as that
    is refused.
    """
    ids: dict[tuple[int, int], int] = {}
    found = []
    for add in adds(case).values():
        outputs = min(add["max_tokens"], max_model_len - len(add["prompt_token_ids"]))
        if outputs < 1:
            continue
        chain = 0
        hashes = []
        for token in add["prompt_token_ids"]:
            chain = ids.setdefault((chain, token), len(ids) + 1)
            hashes.append(chain)
        found.append(
            TraceRequest(
                float(add["step"]), len(hashes), outputs, tuple(hashes), 1,
                add["priority"], add.get("lora", 0),
            )
        )  # fmt: skip
    return found


def measure(case: Case, **knobs: Any) -> Counts:
    """Serve the case's requests with some knobs turned. The memory stays: of larger blocks there
    are fewer.

    Raises:
        ValueError: a knob that a fix may not turn, or a value that is refused.
    """
    if unknown := set(knobs) - set(ALLOWED):
        raise ValueError(f"{', '.join(sorted(unknown))}: need one of {', '.join(ALLOWED)}")
    if case.get("tier") and (odd := {"release", "enable_prefix_caching"} & set(knobs)):
        raise ValueError(f"{odd.pop()}: with a tier the simulator turns the other knobs only")
    config = {**case["config"], **knobs}
    tokens = (config["num_blocks"] - 1) * case["config"]["block_size"]
    config["num_blocks"] = tokens // config["block_size"] + 1
    release, loras = config.pop("release", "0.22.1"), config.pop("max_loras", None)
    cost = LinearCost({"step": 1.0}, "a second per step")
    tiers = [Tier(config["block_size"])] if case.get("tier") else []
    simulator = Simulator(
        EngineConfig.of(config), cost, release=release, max_loras=loras, gates=tiers
    )
    names = list(adds(case))
    subject = names.index(case["subject"])
    counts = Counts()
    counts.refused = [
        name
        for name, add in adds(case).items()
        if len(add["prompt_token_ids"]) >= config["max_model_len"]
    ]

    def seen(begin: float, end: float, plan: Any, work: Any) -> None:
        planned = {names[int(name)]: count for name, count in plan.num_scheduled_tokens.items()}
        counts.plans.append(planned)
        if planned.get(case["subject"]) == 1:
            counts.fullest_step = max(counts.fullest_step, work.tokens)

    simulator.observers.append(seen)
    try:
        result = simulator.run(trace_of(case, config["max_model_len"]))
    except (RuntimeError, TraceError) as error:
        counts.stuck = str(error)
        return counts
    counts.falls = sum(tier.falls for tier in tiers)
    counts.steps, counts.preemptions = round(result.duration), result.preemptions
    counts.computed_twice, counts.hits = result.recomputed_tokens or 0, result.hits
    own = next(each for each in result.outcomes if each.number == subject)
    counts.worst_wait_of_subject = round(own.first_scheduled - own.arrival)
    return counts


def missed(case: Case, counts: Counts) -> str:
    """Which part of the case's goal does not hold; empty where all do. Hits are a least, other
    counts a most."""
    if counts.stuck:
        return counts.stuck
    if counts.refused:
        return f"{', '.join(counts.refused)} would be refused at the door"
    for name, limit in case["goal"].items():
        value = getattr(counts, name)
        if (value < limit) if name == "hits" else (value > limit):
            bound = "at least" if name == "hits" else "at most"
            return f"{name} is {value}, the goal is {bound} {limit}"
    return ""

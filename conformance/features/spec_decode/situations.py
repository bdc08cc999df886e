"""How often each situation of drafts occurs in the recordings with drafts.

Everything is read off the recordings alone; `python -m conformance.situations` counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from conformance.steps import Situations, Step, counted


@dataclass(frozen=True, slots=True)
class _Step(Step):
    """One step of a recording, with what came before and after it."""

    @property
    def is_async(self) -> bool:
        return bool(self.config.get("async_scheduling"))

    @property
    def held(self) -> Mapping[str, list[int]]:
        """Drafts before `schedule`; placeholders are not among them."""
        return self.now.get("spec_token_ids", {})

    @property
    def planned(self) -> Mapping[str, list[int]]:
        return self.now["scheduled_spec_decode_tokens"]

    @property
    def verified(self) -> Iterable[tuple[str, int, int]]:
        """Per request with drafts in the plan and a sample: id, drafts, accepted."""
        for request_id, drafts in self.planned.items():
            if tokens := self.now["sampled_token_ids"].get(request_id):
                yield request_id, len(drafts), len(tokens) - 1

    @property
    def trimmed(self) -> Iterable[str]:
        """Scheduled requests that got fewer drafts into the plan than they held."""
        for request_id, drafts in self.held.items():
            scheduled = request_id in self.now["num_scheduled_tokens"]
            if scheduled and len(self.planned.get(request_id, ())) < len(drafts):
                yield request_id

    @property
    def budget_is_spent(self) -> bool:
        spent = sum(self.now["num_scheduled_tokens"].values())
        return spent == self.config["max_num_batched_tokens"]

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config["block_size"])

    def cut(self, request_id: str) -> bool:
        """The request ended in this step and its last frame has tokens behind the end."""
        if self.is_async or request_id not in self.now["finished"]:
            return False
        tokens, output = self.now["sampled_token_ids"][request_id], self.entry["outputs"]
        before = len(output[request_id])
        for step in self.entry["steps"][: self.index]:
            before -= len(step["sampled_token_ids"].get(request_id, ()))
        return before < len(tokens)


def _ended_inside(step: _Step, reason: str) -> bool:
    reasons = step.now["finish_reasons"]
    return any(reasons[r] == reason and step.cut(r) for r in step.now["finished"])


def _kept_unscheduled(step: _Step) -> bool:
    gone = {*step.now["num_scheduled_tokens"], *step.now["preempted"]}
    after = step.next.get("spec_token_ids", {})
    return any(r not in gone and after.get(r) == drafts for r, drafts in step.held.items())


def _lookahead_block(step: _Step) -> bool:
    """A planned request holds more blocks than its scheduled tokens need."""
    if not step.config["speculative"]["num_lookahead_tokens"]:
        return False
    admitted, counters = {*step.now["new"], *step.now["resumed"]}, step.now["num_computed_tokens"]
    return any(
        len(step.now["block_ids"][r]) > step.blocks(counters[r])
        for r in step.now["num_scheduled_tokens"]
        if r not in admitted
    )


def _admitted_without_lookahead(step: _Step) -> bool:
    """The last block of an admitted prompt has less room than the lookahead asks for."""
    ahead, counters = (
        step.config["speculative"]["num_lookahead_tokens"],
        step.now["num_computed_tokens"],
    )
    return any(
        len(step.now["block_ids"][r]) < step.blocks(counters[r] + ahead)
        for r in [*step.now["new"], *step.now["resumed"]]
        if counters[r] + ahead <= step.config["max_model_len"]
    )


def _blocks_stay(step: _Step) -> bool:
    """After a rejection the table is longer than the counter needs."""
    for request_id, drafts, accepted in step.verified:
        counter = step.now["num_computed_tokens"][request_id]
        known = counter - (drafts - accepted)
        if step.blocks(known) < step.blocks(counter):
            return True
    return False


def _dropped_mid_prefill(step: _Step) -> bool:
    offered, live = step.now.get("draft_token_ids", {}), step.now["running"]
    sampled = step.now["sampled_token_ids"]
    return any(drafts and r in live and r not in sampled for r, drafts in offered.items())


def _hit(step: _Step) -> bool:
    admitted = [*step.now["new"], *step.now["resumed"]]
    scheduled, counters = step.now["num_scheduled_tokens"], step.now["num_computed_tokens"]
    return any(counters[r] > scheduled[r] for r in admitted)


def _unplanned(step: _Step) -> Iterable[str]:
    """Running requests with tokens in flight that are not in the plan though budget is left."""
    if step.budget_is_spent or step.now["preempted"]:
        return []
    waiting_for = step.now["num_output_placeholders"] if step.is_async else {}
    scheduled = step.now["num_scheduled_tokens"]
    return [r for r in step.now["running"] if r in waiting_for and r not in scheduled]


def _at_model_length(step: _Step, request_id: str) -> bool:
    return bool(
        step.now["num_computed_tokens"].get(request_id, 0) >= step.config["max_model_len"] - 1
    )


def _late(step: _Step) -> set[str]:
    """Requests of the previous plan that this step's update gives tokens to."""
    return set(step.before.get("sampled_token_ids", ())) if step.is_async else set()


_SITUATIONS: Situations[_Step] = {
    "drafts held": ("a request has drafts when the step is planned", lambda s: s.held),
    "drafts that do not fit": (
        "fewer are planned than held",
        lambda s: any(True for _ in s.trimmed),
    ),
    "a step with lookahead": (
        "the drafter has a KV cache of its own, and a request is planned",
        lambda s: s.config["speculative"]["num_lookahead_tokens"] and s.now["num_scheduled_tokens"],
    ),
    "an admission with eagle": (
        "prefixes are looked up for a drafter that reads hidden states",
        lambda s: (
            s.config["speculative"]["use_eagle"]
            and s.config["enable_prefix_caching"]
            and s.now["new"]
        ),
    ),
    "drafts in the plan": ("at least one draft is to be verified", lambda s: s.planned),
    "a draft rejected": (
        "at least one draft is not what the target says",
        lambda s: any(accepted < drafts for _, drafts, accepted in s.verified),
    ),
    "some drafts accepted": (
        "at least one draft is kept and at least one is not",
        lambda s: any(0 < accepted < drafts for _, drafts, accepted in s.verified),
    ),
    "all drafts accepted": (
        "every draft is kept, and the token after them",
        lambda s: any(accepted == drafts for _, drafts, accepted in s.verified),
    ),
    "all drafts rejected": (
        "one token comes of it, as without drafts",
        lambda s: any(accepted == 0 for *_, accepted in s.verified),
    ),
    "stop inside accepted tokens": (
        "EOS has accepted tokens behind it",
        lambda s: _ended_inside(s, "stop"),
    ),
    "length inside accepted tokens": (
        "the cap or the model's length has accepted tokens behind it",
        lambda s: _ended_inside(s, "length"),
    ),
    "blocks stay after a rejection": (
        "the counter goes back over a block's edge, the table does not",
        _blocks_stay,
    ),
    "preempted with drafts": (
        "a victim holds drafts, and loses them",
        lambda s: any(r in s.held for r in s.now["preempted"]),
    ),
    "unscheduled request keeps its drafts": (
        "the budget ends before it; a step later it holds the same",
        _kept_unscheduled,
    ),
    "budget trims drafts": (
        "the step is full, and drafts that were held are not in it",
        lambda s: s.budget_is_spent and any(True for _ in s.trimmed),
    ),
    "threshold trims drafts": (
        "a decode gets exactly the threshold and leaves drafts out",
        lambda s: any(
            s.now["num_scheduled_tokens"][r] == s.config["long_prefill_token_threshold"]
            for r in s.trimmed
        ),
    ),
    "max_model_len trims drafts": (
        "the counter stops one short of the model's length, and drafts are left out",
        lambda s: any(_at_model_length(s, r) for r in s.trimmed),
    ),
    "drafts before admissions": (
        "requests wait, drafts have spent the step's budget",
        lambda s: s.budget_is_spent and s.planned and s.now["waiting"],
    ),
    "drafts for a request mid-prefill": ("dropped", _dropped_mid_prefill),
    "drafts for a request that ended": (
        "ignored",
        lambda s: any(s.now.get("draft_token_ids", {}).get(r) for r in s.now["finished"]),
    ),
    "no drafts handed over": (
        "the drafter was not asked after the step",
        lambda s: s.now.get("draft_token_ids") == {} and s.now["num_scheduled_tokens"],
    ),
    "lookahead takes a block": ("slots for drafts that are made in this step", _lookahead_block),
    "admitted without lookahead": (
        "an admission gets no slots for drafts",
        _admitted_without_lookahead,
    ),
    "lone request preempts itself": (
        "nobody is left running: the lookahead of the only one does not fit, and it crawls",
        lambda s: not s.now["running"] and s.now["preempted"],
    ),
    "hit with eagle": (
        "an admission finds blocks, one less than there are",
        lambda s: s.config["speculative"]["use_eagle"] and _hit(s),
    ),
    "tokens in flight": (
        "asynchronous: a step is planned before the tokens of the last one are known",
        lambda s: s.now.get("num_output_placeholders"),
    ),
    "preempted with tokens in flight": (
        "asynchronous: a victim keeps its placeholders",
        lambda s: any(r in s.now.get("num_output_placeholders", ()) for r in s.now["preempted"]),
    ),
    "tokens for a preempted request": (
        "asynchronous: what was sampled before the preemption is appended after it",
        lambda s: any(r in _late(s) for r in s.now["preempted"]),
    ),
    "ends while waiting": (
        "asynchronous: such tokens end the request in the queue",
        lambda s: any(r in s.now["waiting"] for r in s.now["finished"]),
    ),
    "frame of a request that is gone": (
        "asynchronous: it ends while its next frame is in flight",
        lambda s: s.is_async and any(r in s.now["sampled_token_ids"] for r in s.now["finished"]),
    ),
    "in flight reaches max_tokens": (
        "asynchronous: not planned, even if every draft is rejected",
        lambda s: any(not _at_model_length(s, r) for r in _unplanned(s)),
    ),
    "in flight reaches max_model_len": (
        "asynchronous: not planned, though the drafts may be rejected",
        lambda s: any(_at_model_length(s, r) for r in _unplanned(s)),
    ),
}

COUNTED = counted("spec-situations", ("spec", "async_spec"), _Step, _SITUATIONS)

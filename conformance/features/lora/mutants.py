"""Wrong treatments of adapters, each one edit away from the right one, that the recordings catch.

As `features/core/mutants.py`, for the gate, the second queue and the adapter in the blocks' hashes.
"""

from __future__ import annotations

from conformance.features.lora.situations import situations_of
from conformance.mutants import Catalogue, Mutant

_FULL = 'return "admit" if len(self.active) < self.max_loras else "skip"'
_HELD = "if adapter is None or adapter.lora_int_id in self.active:"
_BEGIN = 'by the past."""\n        self.active = set()\n'
_TAKES = "            self.active.add(adapter.lora_int_id)\n"
_KEPT = "        self.skipped.extendleft(reversed(passed))\n"
_NEXT = "        return self.skipped or self.waiting\n"
_MORE_URGENT = 'if self.config.policy == "priority" and self.skipped and self.waiting:'
_PASSED = "                passed.append(request)\n"
_BREAK = "            if num_new == 0:\n                break\n"
_PREEMPTED = (
    "        elif request.status == RequestStatus.PREEMPTED:\n"
    "            queue.appendleft(request)\n"
)
_FOUND = "return self.skipped if request in self.skipped else self.waiting"
_ROOT = "root_hash(request.extra_keys)"


def _gate(name: str, old: str, new: str, situation: str) -> Mutant:
    return Mutant(name, (("lora.gate", old, new),), "lora", situation)


def _scheduler(name: str, old: str, new: str, situation: str) -> Mutant:
    return Mutant(name, (("scheduler", old, new),), "lora", situation)


def _queues(name: str, old: str, new: str, situation: str) -> Mutant:
    return Mutant(name, (("queues", old, new),), "lora", situation)


def _hash(name: str, new: str, situation: str) -> Mutant:
    return Mutant(name, (("kv_cache", _ROOT, new),), "lora", situation)


MUTANTS = (
    _gate(
        "stops at an adapter without a slot",
        '"admit" if len(self.active) < self.max_loras else "skip"',
        '"admit" if len(self.active) < self.max_loras else "stop"',
        "a request skipped",
    ),
    _gate("gates nobody", _FULL, 'return "admit"', "a request skipped"),
    _gate(
        "lets one adapter too many in",
        "len(self.active) < self.max_loras",
        "len(self.active) <= self.max_loras",
        "a request skipped",
    ),
    _gate(
        "keeps a slot free",
        "len(self.active) < self.max_loras",
        "len(self.active) < max(1, self.max_loras - 1)",
        "an adapter in the plan",
    ),
    _gate(
        "looks at the bound before it looks for the adapter",
        _HELD,
        "if adapter is None or len(self.active) == 0:",
        "an adapter in the plan",
    ),
    _gate(
        "gives base requests a slot",
        "        if num_new and (adapter := adapter_of(request)):\n" + _TAKES,
        "        adapter = adapter_of(request)\n"
        "        self.active.add(adapter.lora_int_id if adapter else 0)\n",
        "an adapter in the plan",
    ),
    _gate(
        "gates base requests",
        _HELD,
        "if adapter is not None and adapter.lora_int_id in self.active:",
        "every slot taken",
    ),
    _gate(
        "forgets the adapters that run",
        _TAKES,
        "            if request.request_id in plan.num_cached_tokens:\n"
        "                self.active.add(adapter.lora_int_id)\n",
        "a request skipped",
    ),
    _gate(
        "forgets the adapters that this step admits",
        _TAKES,
        "            if request.request_id not in plan.num_cached_tokens:\n"
        "                self.active.add(adapter.lora_int_id)\n",
        "more adapters than slots",
    ),
    _gate("never frees a slot", _BEGIN, 'by the past."""\n', "more adapters than slots"),
    _gate(
        "counts requests, not adapters",
        "            self.active.add(adapter.lora_int_id)\n",
        "            self.active |= {adapter.lora_int_id, -len(self.active) - 1}\n",
        "an adapter in the plan",
    ),
    _scheduler(
        "ends the scan after a skip",
        _PASSED,
        _PASSED + "                break\n",
        "a request skipped",
    ),
    _queues(
        "puts the skipped back at the head of waiting",
        _KEPT,
        "        self.waiting.extendleft(reversed(passed))\n",
        "a request skipped",
    ),
    _queues(
        "puts the skipped at the back of waiting",
        _KEPT,
        "        self.waiting.extend(passed)\n",
        "a request skipped",
    ),
    _queues(
        "turns the order of the skipped round",
        _KEPT,
        "        self.skipped.extendleft(passed)\n",
        "several skipped",
    ),
    _queues(
        "puts the skipped behind those not reached",
        _KEPT,
        "        self.skipped.extend(passed)\n",
        "several skipped",
    ),
    _scheduler(
        "forgets the skipped when the scan ends early",
        _BREAK,
        _BREAK.replace(" break\n", " passed.clear()\n                break\n"),
        "a request skipped",
    ),
    _queues(
        "serves waiting before skipped",
        _NEXT,
        "        return self.waiting or self.skipped\n",
        "a request skipped",
    ),
    _queues(
        "serves skipped first under every policy",
        _MORE_URGENT,
        "if False:",
        "skipped under priority",
    ),
    _queues(
        "puts a preempted request among the skipped",
        _PREEMPTED,
        _PREEMPTED.replace("queue.", "self.skipped."),
        "a preemption",
    ),
    _queues(
        "looks for an aborted request in waiting alone",
        _FOUND,
        "return self.waiting",
        "a skipped request aborted",
    ),
    _hash("shares blocks among all adapters", "root_hash(())", "same tokens, two adapters"),
    _hash(
        "tells an adapter from the base, not from another adapter",
        'root_hash(("adapter",) if request.extra_keys else ())',
        "same tokens, two adapters",
    ),
    _hash(
        "keeps every request's blocks apart",
        "root_hash(request.extra_keys and (request.request_id,))",
        "same tokens, one adapter",
    ),
    Mutant(
        "leaves the adapter out of the first block's hash",
        (
            ("kv_cache", _ROOT, "root_hash(())"),
            (
                "kv_cache",
                "parent = hash_block_tokens(parent, token_ids[start : start + size], own)",
                "extra = request.extra_keys if start else ()\n"
                "            tokens = token_ids[start : start + size]\n"
                "            parent = hash_block_tokens(parent, tokens, extra)",
            ),
        ),
        "lora",
        "same tokens, two adapters",
    ),
)  # fmt: skip

CATALOGUES = {"lora-mutants": Catalogue(MUTANTS, situations_of)}

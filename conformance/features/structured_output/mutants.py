"""Wrong treatments of grammars, each one edit away from the right one, that the recordings catch.

As `features/core/mutants.py`, for the gate, the second queue, the rows and the refused token.
"""

from __future__ import annotations

from conformance.features.structured_output.situations import situations_of
from conformance.mutants import Catalogue, Mutant

_BIRTH = "        queue = self.skipped if request.waits_for else self.waiting\n"
_KEPT = "        self.skipped.extendleft(reversed(passed))\n"
_NEXT = "        return self.skipped or self.waiting\n"
_MORE_URGENT = 'if self.config.policy == "priority" and self.skipped and self.waiting:'
_PASSED = "                passed.append(request)\n"
_FOUND = "return self.skipped if request in self.skipped else self.waiting"
_READY = "if constraint is None or not constraint.is_ready():"
_PROMOTE = "        request.waits_for = None\n"
_SAMPLES = " and request.request_id in plan.sampling_req_ids"
_ROWS = "            for request in plan.scheduled_requests\n"
_REFUSED = "        if not self.constraint.follow(request):\n"
_ERROR = "            request.status = RequestStatus.FINISHED_ERROR\n"
_SUPER = "        ended = bool(super().maybe_finish(max_model_len))  # type: ignore[misc]\n"


def _gate(name: str, old: str, new: str, situation: str) -> Mutant:
    return Mutant(name, (("structured_output.gate", old, new),), "grammar", situation)


def _scheduler(name: str, old: str, new: str, situation: str) -> Mutant:
    return Mutant(name, (("scheduler", old, new),), "grammar", situation)


def _queues(name: str, old: str, new: str, situation: str) -> Mutant:
    return Mutant(name, (("queues", old, new),), "grammar", situation)


def _request(name: str, old: str, new: str, situation: str) -> Mutant:
    return Mutant(name, (("structured_output.request", old, new),), "grammar", situation)


MUTANTS = (
    _gate("waits for no grammar", _READY, "if constraint is None:", "waits for its grammar"),
    _gate(
        "stops at a grammar that is not ready",
        f'        {_READY}\n            return "skip"\n',
        f'        {_READY}\n            return "stop"\n',
        "waits for its grammar",
    ),
    _gate(
        "asks again after a preemption",
        '        if request.waits_for is None:\n            return "admit"\n',
        '        if constraint_of(request) and not request.waits_for '
        'and request.num_preemptions:\n'
        '            request.waits_for = "grammar"\n            return "skip"\n'
        '        if request.waits_for is None:\n            return "admit"\n',
        "preempted",
    ),
    _gate("never says that it is ready", _PROMOTE, "        pass\n", "has a grammar"),
    _gate(
        "admits one step late",
        f'{_PROMOTE}        return "admit"\n',
        f'{_PROMOTE}        return "skip"\n',
        "has a grammar",
    ),
    _gate("masks chunks of a prompt", _SAMPLES, "", "chunk without a row"),
    _gate(
        "masks everybody who samples",
        "constraint_of(request) is not None and request",
        "request",
        "a free request beside",
    ),
    _gate(
        "orders rows by request",
        _ROWS,
        "            for request in sorted(\n"
        "                plan.scheduled_requests, key=lambda each: each.request_id)\n",
        "several rows",
    ),
    _gate(
        "puts rows of new requests first",
        _ROWS,
        "            for request in plan.scheduled_requests[::-1]\n",
        "several rows",
    ),
    _queues(
        "lets them be born in waiting",
        _BIRTH,
        "        queue = self.waiting\n",
        "has a grammar",
    ),
    _queues(
        "puts preempted ones among the skipped",
        _BIRTH,
        _BIRTH.replace("request.waits_for", 'hasattr(request, "constraint")'),
        "preempted",
    ),
    _queues(
        "lets the youngest in front of the skipped",
        "            queue.append(request)\n",
        "            (queue.appendleft if request.waits_for else queue.append)(request)\n",
        "has a grammar",
    ),
    _queues(
        "forgets the priority of the skipped",
        "            insort(queue, request)\n",
        "            (queue.append if request.waits_for else "
        "lambda r: insort(queue, r))(request)\n",
        "has a grammar",
    ),
    _queues(
        "serves waiting before skipped",
        _NEXT,
        "        return self.waiting or self.skipped\n",
        "has a grammar",
    ),
    _queues(
        "serves skipped first under every policy",
        _MORE_URGENT,
        "if False:",
        "waits under priority",
    ),
    _scheduler(
        "ends the scan at a wait",
        _PASSED,
        _PASSED + "                break\n",
        "waits for its grammar",
    ),
    _queues(
        "puts who waits back into waiting",
        _KEPT,
        "        self.waiting.extendleft(reversed(passed))\n",
        "waits for its grammar",
    ),
    _queues(
        "turns the order of those who wait round",
        _KEPT,
        "        self.skipped.extendleft(passed)\n",
        "several wait",
    ),
    _queues(
        "puts who waits behind those not reached",
        _KEPT,
        "        self.skipped.extend(passed)\n",
        "waits for its grammar",
    ),
    _queues(
        "looks for an aborted request in waiting alone",
        _FOUND,
        "return self.waiting",
        "a waiting one aborted",
    ),
    _request("takes a refused token for a good one", _REFUSED, "        if 0:\n", "refused token"),
    _request(
        "lets EOS outrank a refusal",
        _REFUSED,
        _REFUSED.replace("if not", "if request.finish_reason != 'stop' and not"),
        "refused EOS",
    ),
    _request(
        "lets the cap outrank a refusal",
        _REFUSED,
        _REFUSED.replace("if not", "if request.finish_reason != 'length' and not"),
        "refused at the cap",
    ),
    _request(
        "calls a refusal an abort",
        _ERROR,
        _ERROR.replace("ERROR", "ABORTED"),
        "refused token",
    ),
    _request(
        "ends only at a token that would end it",
        "            return True\n        return ended\n",
        "            return ended\n        return ended\n",
        "refused token",
    ),
)  # fmt: skip

CATALOGUES = {"grammar-mutants": Catalogue(MUTANTS, situations_of)}

"""Wrong asynchronous schedulers, one edit away from the right one: `async.jsonl.gz` catches each.

As `mutants.MUTANTS`, which are misreadings of what both schedulers share. `python -m
conformance.mutants --write` counts these too.
"""

from __future__ import annotations

from conformance.mutants import Catalogue, Mutant

_FILE = "async_scheduler"
_SAMPLES = "if request.num_computed_tokens >= known:"
_HEARD = "if not tokens or request.is_finished:"
_CAP = "start + 2 - in_flight >= most"


def _mutant(name: str, old: str, new: str, module: str = _FILE) -> Mutant:
    return Mutant(name, ((module, old, new),), "async", "")


MUTANTS = (
    _mutant("promises a token to every scheduled request", _SAMPLES, "if True:"),
    _mutant(
        "promises the first token only",
        _SAMPLES,
        "if request.num_computed_tokens >= known and not request.num_output_tokens:",
    ),
    _mutant("plans past max_tokens", f"if in_flight and {_CAP}:", "if False:", "scheduler"),
    _mutant("stops a token before max_tokens", _CAP, "start + 3 - in_flight >= most", "scheduler"),
    _mutant("counts what is in flight twice at max_tokens", _CAP, "start + 2 >= most", "scheduler"),
    _mutant(
        "moves the counters with the tokens only",
        "request.num_computed_tokens += plan.num_scheduled_tokens[request_id]",
        "request.num_computed_tokens += 0",
    ),
    _mutant(
        "drops the tokens of a preempted request",
        _HEARD,
        "if not tokens or request.is_finished or request.num_computed_tokens == 0:",
    ),
    _mutant(
        "forgets the placeholders at a preemption",
        "        request.num_computed_tokens = 0\n        request.spec_token_ids = ()\n",
        "        request.num_computed_tokens = request.num_output_placeholders = 0\n"
        "        request.spec_token_ids = ()\n",
        "scheduler",
    ),
    _mutant(
        "leaves what ends while it waits in the queue",
        "            queue.remove(request)\n",
        "            pass\n",
    ),
    _mutant(
        "keeps the placeholder of a token that has come",
        "            request.num_output_placeholders -= 1\n",
        "            pass\n",
    ),
    _mutant(
        "indexes blocks whose tokens are on their way",
        "request.num_computed_tokens - request.num_output_placeholders",
        "request.num_computed_tokens",
    ),
    _mutant(
        "indexes no block that a decode fills",
        "            self.kv.cache_blocks(request, num_known)\n",
        "            pass\n",
    ),
    _mutant("takes the token of a request that has ended", _HEARD, "if not tokens:"),
    _mutant(
        "plans once more for what has ended",
        "        if finished:\n            self.running",
        "        if False:\n            self.running",
    ),
    _mutant(
        "never gives the blocks of the ended back",
        "                self._release(request)\n",
        "                pass\n",
    ),
)

CATALOGUES = {"async-mutants": Catalogue(MUTANTS)}

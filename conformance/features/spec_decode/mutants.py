"""Wrong treatments of drafts, each one edit away from the right one, that the recordings catch.

As `mutants.py`, whose command counts these too, for the rules that only matter with drafts.
"""

from __future__ import annotations

from conformance.features.spec_decode.situations import situations_of
from conformance.mutants import Catalogue, Mutant

_DROPPED = "            request.spec_token_ids = ()\n        for gate in self.gates:"
_PREEMPTED = "        request.spec_token_ids = ()\n        request.num_preemptions += 1\n"
_ROOM = "            room = limit - 1 - request.num_computed_tokens\n"
_REJECTED = "                request.num_computed_tokens -= plan.num_rejected(request_id, tokens)\n"
_APPENDED = """                if request.maybe_finish(self.max_model_len):
                    finished.append(request)
"""
_LOOKAHEAD = "        if lookahead := self.config.num_lookahead_tokens:\n"
_HITS = "self.kv.allocate_slots(request, num_new, hits)"
_CAP = "if self.max_model_len is not None and num_slots > self.max_model_len:"
_TAKES = "request.spec_token_ids = drafts if self._sampled.get(request_id) else ()"
_INDEX = "self.kv.cache_blocks(request, num_known)"

MUTANTS = (
    Mutant(
        "does not move the counter back for rejected drafts",
        (("scheduler", _REJECTED, "                pass\n"),),
        "spec",
        "a draft rejected",
    ),
    Mutant(
        "counts the token after the drafts as accepted",
        (("scheduler", _REJECTED, _REJECTED.replace(")\n", ") - (request_id in drafts)\n")),),
        "spec",
        "drafts in the plan",
    ),
    Mutant(
        "keeps drafts that were in the plan",
        (("scheduler", _DROPPED, _DROPPED.replace("request.spec_token_ids = ()", "pass")),),
        "spec",
        "drafts held",
    ),
    Mutant(
        "keeps the drafts of a victim",
        (("scheduler", _PREEMPTED, "        request.num_preemptions += 1\n"),),
        "spec",
        "preempted with drafts",
    ),
    Mutant(
        "does not schedule drafts",
        (("scheduler", " + len(request.spec_token_ids) - start", " - start"),),
        "spec",
        "drafts held",
    ),
    Mutant(
        "keeps the last drafts where some must go",
        (
            (
                "scheduler",
                "request.spec_token_ids[:num_drafts]",
                "request.spec_token_ids[-num_drafts:]",
            ),
        ),
        "spec",
        "drafts that do not fit",
    ),
    Mutant(
        "plans all drafts where some do not fit",
        (("scheduler", "request.spec_token_ids[:num_drafts]", "request.spec_token_ids"),),
        "spec",
        "drafts that do not fit",
    ),
    Mutant(
        "spares drafts the threshold",
        (
            (
                "scheduler",
                "                num_new = clamp(num_new, budget if budget < room else room)\n",
                "                if request.spec_token_ids:\n"
                "                    num_new = min(num_new, budget, room)\n"
                "                else:\n"
                "                    num_new = clamp(num_new, budget if budget < room else room)\n",
            ),
        ),
        "spec",
        "threshold trims drafts",
    ),
    Mutant(
        "lets drafts fill the last position of the model",
        (("scheduler", _ROOM, _ROOM.replace("limit - 1 -", "limit -")),),
        "spec",
        "max_model_len trims drafts",
    ),
    Mutant(
        "looks for a stop only at the last accepted token",
        (
            (
                "scheduler",
                _APPENDED,
                _APPENDED.replace("if request", "if token is tokens[-1] and request").replace(
                    "token is tokens[-1]", "request.num_tokens == old + len(tokens)"
                ),
            ),
            (
                "scheduler",
                "            for token in tokens:\n",
                "            old = request.num_tokens\n            for token in tokens:\n",
            ),
        ),
        "spec",
        "stop inside accepted tokens",
    ),
    Mutant(
        "gives drafts to a request mid-prefill",
        (("scheduler", _TAKES, "request.spec_token_ids = drafts"),),
        "spec",
        "drafts for a request mid-prefill",
    ),
    Mutant(
        "indexes blocks that hold drafts",
        (
            (
                "kv_cache",
                "num_known = min(num_tokens, request.num_tokens)",
                "num_known = num_tokens",
            ),
        ),
        "spec",
        "drafts in the plan",
    ),
    Mutant(
        "gives nobody lookahead",
        (("scheduler", _LOOKAHEAD, "        if lookahead := 0:\n"),),
        "spec",
        "a step with lookahead",
    ),
    Mutant(
        "gives admissions lookahead",
        (
            (
                "scheduler",
                _HITS,
                _HITS.replace(
                    "hits)", "hits, num_lookahead_tokens=self.config.num_lookahead_tokens)"
                ),
            ),
        ),
        "spec",
        "a step with lookahead",
    ),
    Mutant(
        "gives slots beyond the model's length",
        (("kv_cache", _CAP, "if False:"),),
        "spec",
        "a step with lookahead",
    ),
    Mutant(
        "keeps the last block of a hit with eagle",
        (("kv_cache", "if self.use_eagle and blocks:", "if False:"),),
        "spec",
        "an admission with eagle",
    ),
    Mutant(
        "drops the placeholders of a victim",
        (("scheduler", _PREEMPTED, _PREEMPTED + "        request.num_output_placeholders = 0\n"),),
        "async_spec",
        "preempted with tokens in flight",
    ),
    Mutant(
        "expects one token of every step in flight",
        (
            (
                "async_scheduler",
                "request.num_output_placeholders += 1 + num_drafts",
                "request.num_output_placeholders += 1",
            ),
        ),
        "async_spec",
        "drafts in the plan",
    ),
    Mutant(
        "keeps placeholders for rejected drafts",
        (
            (
                "async_scheduler",
                "                request.num_output_placeholders -= rejected\n",
                "                pass\n",
            ),
        ),
        "async_spec",
        "a draft rejected",
    ),
    Mutant(
        "moves the counter of a preempted request below zero",
        (("async_scheduler", "if request.num_computed_tokens > 0:", "if True:"),),
        "async_spec",
        "tokens for a preempted request",
    ),
    Mutant(
        "plans a step for a request that is about to reach max_tokens",
        (("scheduler", "if in_flight and start + 2 - in_flight >= most:", "if False:"),),
        "async_spec",
        "tokens in flight",
    ),
    Mutant(
        "indexes blocks that hold tokens in flight",
        (
            (
                "async_scheduler",
                _INDEX,
                "self.kv.cache_blocks(request, request.num_computed_tokens)",
            ),
        ),
        "async_spec",
        "tokens in flight",
    ),
    Mutant(
        "throws away what a preempted request had in flight",
        (
            (
                "async_scheduler",
                "if not tokens or request.is_finished:",
                "if not tokens or request.is_finished or request not in self.running:",
            ),
        ),
        "async_spec",
        "tokens for a preempted request",
    ),
)

CATALOGUES = {"spec-mutants": Catalogue(MUTANTS, situations_of)}

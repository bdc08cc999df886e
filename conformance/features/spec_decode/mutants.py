"""Wrong treatments of drafts, each one edit away from the right one, that the recordings catch.

As `mutants.py`, whose command counts these too, for the rules that only matter with drafts.
"""

from __future__ import annotations

from conformance.features.spec_decode.situations import COUNTED
from conformance.mutants import Catalogue, diffs

MUTANTS = diffs(
    """
does not move the counter back for rejected drafts
@ scheduler | a draft rejected
-                request.num_computed_tokens -= plan.num_rejected(request_id, tokens)
+                pass

counts the token after the drafts as accepted
@ scheduler | drafts in the plan
-                request.num_computed_tokens -= plan.num_rejected(request_id, tokens)
+                rejected = plan.num_rejected(request_id, tokens)
+                request.num_computed_tokens -= rejected - (request_id in drafts)

keeps drafts that were in the plan
@ scheduler | drafts held
-            request.spec_token_ids = ()
+            pass
         for gate in self.gates:

keeps the drafts of a victim
@ scheduler | preempted with drafts
-        request.spec_token_ids = ()
         request.num_preemptions += 1

does not schedule drafts
@ scheduler | drafts held
- + len(request.spec_token_ids) - start
+ - start

keeps the last drafts where some must go
@ scheduler | drafts that do not fit
-request.spec_token_ids[:num_drafts]
+request.spec_token_ids[-num_drafts:]

plans all drafts where some do not fit
@ scheduler | drafts that do not fit
-request.spec_token_ids[:num_drafts]
+request.spec_token_ids

spares drafts the threshold
@ scheduler | threshold trims drafts
-                num_new = clamp(num_new, budget if budget < room else room)
+                if request.spec_token_ids:
+                    num_new = min(num_new, budget, room)
+                else:
+                    num_new = clamp(num_new, budget if budget < room else room)

lets drafts fill the last position of the model
@ scheduler | max_model_len trims drafts
-            room = limit - 1 - request.num_computed_tokens
+            room = limit - request.num_computed_tokens

looks for a stop only at the last accepted token
@ scheduler | stop inside accepted tokens
-                if request.maybe_finish(self.max_model_len):
+                is_last = request.num_tokens == old + len(tokens)
+                if is_last and request.maybe_finish(self.max_model_len):
                     finished.append(request)
@ scheduler
+            old = request.num_tokens
             for token in tokens:

gives drafts to a request mid-prefill
@ scheduler | drafts for a request mid-prefill
-request.spec_token_ids = drafts if self._sampled.get(request_id) else ()
+request.spec_token_ids = drafts

indexes blocks that hold drafts
@ kv_cache | drafts in the plan
-num_known = min(num_tokens, request.num_tokens)
+num_known = num_tokens

gives nobody lookahead
@ scheduler | a step with lookahead
-        if lookahead := self.config.num_lookahead_tokens:
+        if lookahead := 0:

gives admissions lookahead
@ scheduler | a step with lookahead
-self.kv.allocate_slots(request, num_new, hits)
+self.kv.allocate_slots(
+                    request, num_new, hits, self.config.num_lookahead_tokens
+                )

gives slots beyond the model's length
@ kv_cache | a step with lookahead
-if self.max_model_len is not None and num_slots > self.max_model_len:
+if False:

keeps the last block of a hit with eagle
@ kv_cache | an admission with eagle
-if self.use_eagle and blocks:
+if False:

drops the placeholders of a victim
@ scheduler | preempted with tokens in flight | async_spec
         request.spec_token_ids = ()
         request.num_preemptions += 1
+        request.num_output_placeholders = 0

expects one token of every step in flight
@ async_scheduler | drafts in the plan | async_spec
-request.num_output_placeholders += 1 + num_drafts
+request.num_output_placeholders += 1

keeps placeholders for rejected drafts
@ async_scheduler | a draft rejected | async_spec
-                request.num_output_placeholders -= rejected
+                pass

moves the counter of a preempted request below zero
@ async_scheduler | tokens for a preempted request | async_spec
-if request.num_computed_tokens > 0:
+if True:

plans a step for a request that is about to reach max_tokens
@ scheduler | tokens in flight | async_spec
-if in_flight and start + 2 - in_flight >= most:
+if False:

indexes blocks that hold tokens in flight
@ async_scheduler | tokens in flight | async_spec
-self.kv.cache_blocks(request, num_known)
+self.kv.cache_blocks(request, request.num_computed_tokens)

throws away what a preempted request had in flight
@ async_scheduler | tokens for a preempted request | async_spec
-if not tokens or request.is_finished:
+if not tokens or request.is_finished or request not in self.running:
""",
    "spec",
)

CATALOGUES = {"spec-mutants": Catalogue(MUTANTS, COUNTED.situations_of)}

"""Wrong asynchronous schedulers, one edit away from the right one: `async.jsonl.gz` catches each.

As `mutants.MUTANTS`, which are misreadings of what both schedulers share. `python -m
conformance.mutants --write` counts these too.
"""

from __future__ import annotations

from conformance.mutants import Catalogue, diffs

MUTANTS = diffs(
    """
promises a token to every scheduled request
@ async_scheduler
-if request.num_computed_tokens >= known:
+if True:

promises the first token only
@ async_scheduler
-if request.num_computed_tokens >= known:
+if request.num_computed_tokens >= known and not request.num_output_tokens:

plans past max_tokens
@ scheduler
-if in_flight and start + 2 - in_flight >= most:
+if False:

stops a token before max_tokens
@ scheduler
-start + 2 - in_flight >= most
+start + 3 - in_flight >= most

counts what is in flight twice at max_tokens
@ scheduler
-start + 2 - in_flight >= most
+start + 2 >= most

moves the counters with the tokens only
@ async_scheduler
-plan.advance(request)
+plan.num_computed_tokens[request.request_id] = request.num_computed_tokens

drops the tokens of a preempted request
@ async_scheduler
-if not tokens or request.is_finished:
+if not tokens or request.is_finished or request.num_computed_tokens == 0:

forgets the placeholders at a preemption
@ scheduler
-        request.num_computed_tokens = 0
+        request.num_computed_tokens = request.num_output_placeholders = 0
         request.spec_token_ids = ()

leaves what ends while it waits in the queue
@ async_scheduler
-            queue.remove(request)
+            pass

keeps the placeholder of a token that has come
@ async_scheduler
-        request.num_output_placeholders -= request.num_tokens - before
+        pass

indexes blocks whose tokens are on their way
@ async_scheduler
-request.num_computed_tokens - request.num_output_placeholders
+request.num_computed_tokens

indexes no block that a decode fills
@ async_scheduler
-            self.kv.cache_blocks(request, num_known)
+            pass

takes the token of a request that has ended
@ async_scheduler
-if not tokens or request.is_finished:
+if not tokens:

plans once more for what has ended
@ async_scheduler
-        if finished:
+        if False:
             self.running

never gives the blocks of the ended back
@ async_scheduler
-                self._release(request)
+                pass
""",
    "async",
)

CATALOGUES = {"async-mutants": Catalogue(MUTANTS)}

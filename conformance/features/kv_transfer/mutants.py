"""Wrong treatments of loads and sends, each one edit away from the right one, that the recordings
catch.

As `features/core/mutants.py`, for the gate and for what the scheduler does with its answers.
"""

from __future__ import annotations

from conformance.features.kv_transfer.situations import COUNTED
from conformance.mutants import Catalogue, diffs

MUTANTS = diffs(
    """
admits a request before its load is reported
@ kv_transfer.gate | a load begins
-        if request.request_id not in self._received:
+        if False:

stops the scan at a request that loads
@ kv_transfer.gate | a load begins
         if request.request_id not in self._received:
-            return "skip"
+            return "stop"

gives up on a request whose connector cannot say yet
@ kv_transfer.gate | the connector cannot say yet
             self.num_unknown += 1
-            return None
+            return ExternalTokens(0)

makes every load wait
@ kv_transfer.gate | a load without a wait
-load_async and num_tokens > 0
+num_tokens > 0

lets no load wait
@ kv_transfer.gate | a load begins
-load_async and num_tokens > 0
+False

gives a request that loads a slot
@ scheduler | a load begins
             budget > 0 and len(self.running)
+             + sum(bool(r.num_computed_tokens) for r in self.skipped)

indexes blocks when their load begins
@ scheduler | a load begins
-hits, lookahead, external.num_tokens, external.load_async
+hits, lookahead, external.num_tokens, False

gives a load no blocks
@ kv_cache | a load begins
         if num_new_tokens < (0 if num_external_computed_tokens else 1):
+            pass
+        if delay_cache_blocks:
+            return []
+        if num_new_tokens < 0:

asks the prefix cache of a request that was loaded
@ scheduler | loaded and admitted
-        if loaded := request.num_computed_tokens:
+        if loaded := 0:

never indexes what was loaded
@ scheduler | loaded and admitted
-            self.kv.cache_blocks(request, loaded)
+            pass

computes nothing of a prompt that was loaded whole
@ scheduler | a prompt that is loaded whole
-min(loaded, request.num_tokens - 1)
+loaded

computes the last token of every load again
@ scheduler | loaded and admitted
-min(loaded, request.num_tokens - 1)
+loaded - 1

frees the blocks of a request that is aborted while it loads
@ kv_transfer.gate | aborted while it loads
-            why.add("recving")
+            pass

keeps the blocks of a request that is aborted when it is loaded
@ kv_transfer.gate | aborted when it is loaded
-is not None and request_id not in self._received:
+is not None:

frees blocks that are being sent
@ kv_transfer.gate | blocks of one that has ended
-            why.add("sending")
+            pass

asks the connector about the blocks of a victim
@ kv_transfer.gate | a preemption
-        if not request.is_finished:
+        if False:
             return False

frees what was sent before what was received
@ kv_transfer.gate | received and sent in one update
         self.connector.update_connector_output(output)
+        for request_id in output.finished_sending:
+            self._let_go(request_id, "sending")

frees what was sent in the reverse order
@ kv_transfer.gate | several reports
-        for request_id in output.finished_sending:
+        for request_id in [*output.finished_sending][::-1]:

never frees what was received for a request that is gone
@ kv_transfer.gate | received and freed
-                self._let_go(request_id, "recving")
+                pass

reads no report of a load beside one of a send
@ kv_transfer.gate | received and sent in one update
-            elif request_id in self.loading:
+            elif request_id in self.loading and not output.finished_sending:

keeps the counter of a load that failed
@ kv_transfer.gate | a load fails and is computed | connector_failures
             request.num_computed_tokens = num_valid
+            request.num_computed_tokens = dict((r.request_id, n) for r, n in waiting)[
+                request.request_id]
             self._note_failure

throws a whole load away where a part failed
@ kv_transfer.gate | a load fails | connector_failures
-            yield request, first * self._block_size
+            yield request, 0

keeps the blocks of a load of which nothing came
@ kv_transfer.gate | a load fails and is computed | connector_failures
-            self.kv.free(request)  # nothing came
+            pass  # nothing came

takes the token that came from a failed load
@ kv_transfer.gate | a running request loses tokens | connector_failures
-                sampled.pop(request.request_id, None)
+                pass

counts the chunk that came from a failed load
@ kv_transfer.gate | a running request loses tokens | connector_failures
         for request, num_valid in self._truncated.values():
-            if not request.is_finished:
+            if False:
                 request.num_computed_tokens = num_valid

reads no report of a load in an update in which one failed
@ kv_transfer.gate | a load fails | connector_failures
-        for request_id in output.finished_recving:
+        for request_id in () if failures else output.finished_recving:

recomputes though it is to fail
@ kv_transfer.gate | a load fails and ends its request | connector_failures
         failures, self._failures, self._truncated = self._failures, {}, {}
-        if self.kv_load_failure_policy == "fail":
+        if False:

leaves failed blocks in the index where requests fail
@ kv_transfer.gate | a load fails and ends its request | connector_failures
-            if evicts and (
+            if evicts and False and (

has everybody who holds a failed block compute it again
@ kv_transfer.gate | a failed block is shared | connector_failures
-            known = marked if self.share_invalid_blocks else ()
+            known = ()

takes failed blocks out of the index where they are computed again
@ kv_transfer.gate | a running request loses tokens | connector_failures
-            if evicts and (self.kv_load_failure_policy == "fail" or not self.share_invalid_blocks):
+            if evicts:

admits what was loaded only beside others
@ kv_transfer.gate | the next step is planned already | connector_async
-        self._promote(request)
-        return "admit"
+        self._promote(request)
+        return "admit" if plan.scheduled_requests else "skip"
""",
    "connector",
)

CATALOGUES = {"kv_transfer-mutants": Catalogue(MUTANTS, COUNTED.situations_of)}

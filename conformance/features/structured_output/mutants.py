"""Wrong treatments of grammars, each one edit away from the right one, that the recordings catch.

As `features/core/mutants.py`, for the gate, the second queue, the rows and the refused token.
"""

from __future__ import annotations

from conformance.features.structured_output.situations import COUNTED
from conformance.mutants import Catalogue, diffs

MUTANTS = diffs(
    """
waits for no grammar
@ structured_output.gate | waits for its grammar
-if constraint is None or not constraint.is_ready():
+if constraint is None:

stops at a grammar that is not ready
@ structured_output.gate | waits for its grammar
         if constraint is None or not constraint.is_ready():
-            return "skip"
+            return "stop"

asks again after a preemption
@ structured_output.gate | preempted
+        if constraint_of(request) and not request.waits_for and request.num_preemptions:
+            request.waits_for = "grammar"
+            return "skip"
         if request.waits_for is None:
             return "admit"

never says that it is ready
@ structured_output.gate | has a grammar
-        request.waits_for = None
+        pass

admits one step late
@ structured_output.gate | has a grammar
         request.waits_for = None
-        return "admit"
+        return "skip"

masks chunks of a prompt
@ structured_output.gate | chunk without a row
- and request.request_id in plan.sampling_req_ids
+

masks everybody who samples
@ structured_output.gate | a free request beside
-constraint_of(request) is not None and request
+request

orders rows by request
@ structured_output.gate | several rows
-            for request in plan.scheduled_requests
+            for request in sorted(
+                plan.scheduled_requests, key=lambda each: each.request_id)

puts rows of new requests first
@ structured_output.gate | several rows
-            for request in plan.scheduled_requests
+            for request in plan.scheduled_requests[::-1]

lets them be born in waiting
@ queues | has a grammar
-        queue = self.skipped if request.waits_for else self.waiting
+        queue = self.waiting

puts preempted ones among the skipped
@ queues | preempted
-        queue = self.skipped if request.waits_for else self.waiting
+        queue = self.skipped if hasattr(request, "constraint") else self.waiting

lets the youngest in front of the skipped
@ queues | has a grammar
-            queue.append(request)
+            (queue.appendleft if request.waits_for else queue.append)(request)

forgets the priority of the skipped
@ queues | has a grammar
-            insort(queue, request)
+            (queue.append if request.waits_for else lambda r: insort(queue, r))(request)

serves waiting before skipped
@ queues | has a grammar
-        return self.skipped or self.waiting
+        return self.waiting or self.skipped

serves skipped first under every policy
@ queues | waits under priority
-if self.config.policy == "priority" and self.skipped and self.waiting:
+if False:

ends the scan at a wait
@ scheduler | waits for its grammar
                 passed.append(request)
+                break

puts who waits back into waiting
@ queues | waits for its grammar
-        self.skipped.extendleft(reversed(passed))
+        self.waiting.extendleft(reversed(passed))

turns the order of those who wait round
@ queues | several wait
-        self.skipped.extendleft(reversed(passed))
+        self.skipped.extendleft(passed)

puts who waits behind those not reached
@ queues | waits for its grammar
-        self.skipped.extendleft(reversed(passed))
+        self.skipped.extend(passed)

looks for an aborted request in waiting alone
@ queues | a waiting one aborted
-return self.skipped if request in self.skipped else self.waiting
+return self.waiting

takes a refused token for a good one
@ structured_output.request | refused token
-        if not self.constraint.follow(request):
+        if 0:

lets EOS outrank a refusal
@ structured_output.request | refused EOS
-        if not self.constraint.follow(request):
+        if request.finish_reason != 'stop' and not self.constraint.follow(request):

lets the cap outrank a refusal
@ structured_output.request | refused at the cap
-        if not self.constraint.follow(request):
+        if request.finish_reason != 'length' and not self.constraint.follow(request):

calls a refusal an abort
@ structured_output.request | refused token
-            request.status = RequestStatus.FINISHED_ERROR
+            request.status = RequestStatus.FINISHED_ABORTED

ends only at a token that would end it
@ structured_output.request | refused token
-            return True
+            return ended
         return ended
""",
    "grammar",
)

CATALOGUES = {"grammar-mutants": Catalogue(MUTANTS, COUNTED.situations_of)}

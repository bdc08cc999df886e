"""Wrong treatments of adapters, each one edit away from the right one, that the recordings catch.

As `features/core/mutants.py`, for the gate, the second queue and the adapter in the blocks' hashes.
"""

from __future__ import annotations

from conformance.features.lora.situations import COUNTED
from conformance.mutants import Catalogue, diffs

MUTANTS = diffs(
    """
stops at an adapter without a slot
@ lora.gate | a request skipped
-"admit" if len(self.active) < self.max_loras else "skip"
+"admit" if len(self.active) < self.max_loras else "stop"

gates nobody
@ lora.gate | a request skipped
-return "admit" if len(self.active) < self.max_loras else "skip"
+return "admit"

lets one adapter too many in
@ lora.gate | a request skipped
-len(self.active) < self.max_loras
+len(self.active) <= self.max_loras

keeps a slot free
@ lora.gate | an adapter in the plan
-len(self.active) < self.max_loras
+len(self.active) < max(1, self.max_loras - 1)

looks at the bound before it looks for the adapter
@ lora.gate | an adapter in the plan
-if adapter is None or adapter.lora_int_id in self.active:
+if adapter is None or len(self.active) == 0:

gives base requests a slot
@ lora.gate | an adapter in the plan
-        if num_new and (adapter := adapter_of(request)):
-            self.active.add(adapter.lora_int_id)
+        adapter = adapter_of(request)
+        self.active.add(adapter.lora_int_id if adapter else 0)

gates base requests
@ lora.gate | every slot taken
-if adapter is None or adapter.lora_int_id in self.active:
+if adapter is not None and adapter.lora_int_id in self.active:

forgets the adapters that run
@ lora.gate | a request skipped
-            self.active.add(adapter.lora_int_id)
+            if request.request_id in plan.num_cached_tokens:
+                self.active.add(adapter.lora_int_id)

forgets the adapters that this step admits
@ lora.gate | more adapters than slots
-            self.active.add(adapter.lora_int_id)
+            if request.request_id not in plan.num_cached_tokens:
+                self.active.add(adapter.lora_int_id)

never frees a slot
@ lora.gate | more adapters than slots
-        self.active = set()

counts requests, not adapters
@ lora.gate | an adapter in the plan
-            self.active.add(adapter.lora_int_id)
+            self.active |= {adapter.lora_int_id, -len(self.active) - 1}

ends the scan after a skip
@ scheduler | a request skipped
                 passed.append(request)
+                break

puts the skipped back at the head of waiting
@ queues | a request skipped
-        self.skipped.extendleft(reversed(passed))
+        self.waiting.extendleft(reversed(passed))

puts the skipped at the back of waiting
@ queues | a request skipped
-        self.skipped.extendleft(reversed(passed))
+        self.waiting.extend(passed)

turns the order of the skipped round
@ queues | several skipped
-        self.skipped.extendleft(reversed(passed))
+        self.skipped.extendleft(passed)

puts the skipped behind those not reached
@ queues | several skipped
-        self.skipped.extendleft(reversed(passed))
+        self.skipped.extend(passed)

forgets the skipped when the scan ends early
@ scheduler | a request skipped
             if num_new == 0:
+                passed.clear()
                 break

serves waiting before skipped
@ queues | a request skipped
-        return self.skipped or self.waiting
+        return self.waiting or self.skipped

serves skipped first under every policy
@ queues | skipped under priority
-if self.config.policy == "priority" and self.skipped and self.waiting:
+if False:

puts a preempted request among the skipped
@ queues | a preemption
         elif request.status == RequestStatus.PREEMPTED:
-            queue.appendleft(request)
+            self.skipped.appendleft(request)

looks for an aborted request in waiting alone
@ queues | a skipped request aborted
-return self.skipped if request in self.skipped else self.waiting
+return self.waiting

shares blocks among all adapters
@ kv_cache | same tokens, two adapters
-root_hash(request.extra_keys)
+root_hash(())

tells an adapter from the base, not from another adapter
@ kv_cache | same tokens, two adapters
-root_hash(request.extra_keys)
+root_hash(("adapter",) if request.extra_keys else ())

keeps every request's blocks apart
@ kv_cache | same tokens, one adapter
-root_hash(request.extra_keys)
+root_hash(request.extra_keys and (request.request_id,))

leaves the adapter out of the first block's hash
@ kv_cache | same tokens, two adapters
-root_hash(request.extra_keys)
+root_hash(())
@ kv_cache
-parent = hash_block_tokens(parent, token_ids[start : start + size], own)
+extra = request.extra_keys if start else ()
+            tokens = token_ids[start : start + size]
+            parent = hash_block_tokens(parent, tokens, extra)
""",
    "lora",
)

CATALOGUES = {"lora-mutants": Catalogue(MUTANTS, COUNTED.situations_of)}

"""Wrong schedulers, each one edit away from the right one, that the recordings must catch."""

from __future__ import annotations

from conformance.features.core.situations import situations_of
from conformance.mutants import Catalogue, diffs

MUTANTS = diffs("""
touches the hits before the capacity check and leaks them on refusal
@ kv_cache | head blocked by memory | prefix
+        self.block_pool.touch(new_computed_blocks)
         needed = self.get_num_blocks_to_allocate(
             request.request_id, request.num_tokens, new_computed_blocks
         )
         return needed <= self.block_pool.get_num_free_blocks()
@ kv_cache
-            self.block_pool.touch(hits)
+            pass

touches the hits before the capacity check and gives them back on refusal
@ kv_cache | refused because hits were free | withdrawal
-        needed = self.get_num_blocks_to_allocate(
-            request.request_id, request.num_tokens, new_computed_blocks
-        )
-        return needed <= self.block_pool.get_num_free_blocks()
+        self.block_pool.touch(new_computed_blocks)
+        needed = self.get_num_blocks_to_allocate(
+            request.request_id, request.num_tokens, new_computed_blocks
+        )
+        fits = needed <= self.block_pool.get_num_free_blocks()
+        self.block_pool.free_blocks(reversed(new_computed_blocks))
+        return fits

does not count revived hits as consumed
@ kv_cache | refused because hits were free | prefix
         needed = self.get_num_blocks_to_allocate(
             request.request_id, request.num_tokens, new_computed_blocks
         )
+        needed -= sum(b.ref_cnt == 0 for b in new_computed_blocks)
         return needed <= self.block_pool.get_num_free_blocks()

admits when the first chunk fits, not the whole sequence
@ kv_cache | head blocked by memory | basic
-        needed = self.get_num_blocks_to_allocate(
-            request.request_id, request.num_tokens, new_computed_blocks
-        )
-        return needed <= self.block_pool.get_num_free_blocks()
+        return True

keeps one block per hash, the last
@ block_pool | same content in two blocks | prefix
-        holders = self.cached_block_hash_to_block[block_hash]
-        del holders[block.block_id]
-        if not holders:
-            del self.cached_block_hash_to_block[block_hash]
+        holders = self.cached_block_hash_to_block.get(block_hash, {})
+        holders.pop(block.block_id, None)
+        if not holders:
+            self.cached_block_hash_to_block.pop(block_hash, None)
@ block_pool
-            self.cached_block_hash_to_block.setdefault(block_hash, {})[block.block_id] = block
+            self.cached_block_hash_to_block[block_hash] = {block.block_id: block}

keeps one block per hash, the first
@ block_pool | same content in two blocks | prefix
-        holders = self.cached_block_hash_to_block[block_hash]
-        del holders[block.block_id]
-        if not holders:
-            del self.cached_block_hash_to_block[block_hash]
+        holders = self.cached_block_hash_to_block.get(block_hash, {})
+        holders.pop(block.block_id, None)
+        if not holders:
+            self.cached_block_hash_to_block.pop(block_hash, None)
@ block_pool
-            self.cached_block_hash_to_block.setdefault(block_hash, {})[block.block_id] = block
+            self.cached_block_hash_to_block.setdefault(block_hash, {block.block_id: block})

forgets a block's content when it is freed
@ block_pool | hit revives a free block | prefix
+                self.evict(block)
                 self.free_queue.append(block)

frees a table head first
@ kv_cache | table of several blocks freed | pressure
-free_blocks(reversed(table))
+free_blocks(table)

indexes blocks only once they are computed
@ kv_cache | indexed before it is computed | prefix
-num_known = min(num_tokens, request.num_tokens)
+num_known = request.num_computed_tokens

lets a hit cover the last token
@ kv_cache | hit capped before the last token | prefix
-request.block_hashes[: (request.num_tokens - 1) // self.block_size]
+request.block_hashes[: request.num_tokens // self.block_size]

looks up only the prompt of a resumed request
@ kv_cache | resumed with hits | prefix
-request.block_hashes[: (request.num_tokens - 1) // self.block_size]
+request.block_hashes[: (request.num_prompt_tokens - 1) // self.block_size]

preempts from the front of running
@ queues | preemption | pressure
-return self.running.pop()
+return self.running.pop(0)

queues a preempted request at the back
@ queues | preemption | pressure
-queue.appendleft(request)
+queue.append(request)

admits in a preempting step
@ scheduler | preempting step could admit | withdrawal
-if not plan.preempted_req_ids:
+if True:

admits the newest first
@ scheduler | several wait | basic
-request = queue[0]
+request = queue[-1]
@ scheduler
-            queue.popleft()
+            queue.pop()

admits one request too many
@ scheduler | head blocked by slots | basic
-len(self.running) < self.max_num_seqs
+len(self.running) <= self.max_num_seqs

applies the threshold to admissions only
@ scheduler | chunk cut by the threshold | basic
-num_new = clamp(num_new, budget if budget < room else room)
+num_new = max(0, min(num_new, budget, room))

chunks although chunked prefill is off
@ scheduler | whole prompt waits | whole-prompts
-needs_whole = not self.config.enable_chunked_prefill
+needs_whole = False

reports length when EOS and the cap tie
@ request | EOS at max_tokens | limits
-if last == self.eos_token_id and not params.ignore_eos:
+if last == self.eos_token_id and not params.ignore_eos and num_output_tokens < params.max_tokens:

lets a sequence exceed max_model_len by one
@ request | ends by max_model_len | limits
-self.num_tokens >= max_model_len
+self.num_tokens > max_model_len

frees the finished in reverse
@ scheduler | two end in one step | basic
 finished.append(request)
-                    self._release(request)
@ scheduler
+        for request in reversed(finished):
+            self._release(request)
         if finished:

does not refund a withdrawn victim's budget
@ scheduler | refund spent | withdrawal
-budget += self._withdraw(victim, plan)
+self._withdraw(victim, plan)

skips a request after withdrawing one before it
@ scheduler | victim withdrawn from the plan | withdrawal
-                    index -= 1
+                    pass

preempts the last of several least urgent requests
@ queues | equal keys among victims | priority
-max(self.running, key
+max(reversed(self.running), key

ignores arrival times in the priority queue
@ request | equal priority, earlier arrival first | priority
-mine < (other.priority, other.arrival_time, other.request_id)
+(mine[0], mine[2]) < (other.priority, other.request_id)
""")

CATALOGUES = {"mutants": Catalogue(MUTANTS, situations_of)}

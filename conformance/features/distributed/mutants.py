"""Wrong ways to split a model, each one edit away from the right one, and the test that sees it.

Ranks import the package, so a mutant is a copy of it: the edit is made there, and the test named is
run on the copy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from conformance import mutants as replayed
from conformance.features import ROOT
from conformance.mutants import Mutant
from labkit.tables import markdown_table

LIMIT_S = 120.0

TESTS = {
    "equal": "test_ranks_equal.py::"
    "test_ranks_answer_as_one_process_with_chunks_hits_and_preemptions",
    "sum": "test_ranks_collectives.py::"
    "test_all_reduce_adds_in_the_order_of_the_ranks_and_gives_all_the",
    "bytes": "test_ranks_collectives.py::test_a_step_sends_two_all_reduces_per_layer_the_embedding",
    "parts": "test_ranks_groups.py::test_the_parts_of_all_ranks_cover_every_tensor",
    "kv": "test_ranks_groups.py::test_two_ranks_with_one_kv_head_between_them_have_the_same",
    "adapters": "test_ranks_adapters.py::test_ranks_adapt_as_one_process",
    "drafts": "test_ranks_drafts.py::test_ranks_draft_and_accept_as_one_process",
    "hangs": "test_ranks_faults.py::test_a_rank_that_hangs_past_the_deadline_is_named",
}
"""Short names of tests that catch mutants: `file::test`, as pytest takes it; a beginning of the
test's name will do."""

MUTANTS = replayed.diffs("""
adds the bias on every rank
@ distributed.layers | equal[biases-tp4]
-bias if group.rank == 0 else None
+bias

averages instead of adding
@ distributed.collectives | sum
-(pair[0] + pair[1])
+((pair[0] + pair[1]) / 2)

adds its own array first
@ distributed.collectives | sum
-        total = addends[0].copy()
-        for rank in range(1, self.size):
+        total = own.copy()
+        for rank in self._peers():

forgets the all-reduce after a row-parallel layer
@ distributed.layers | equal[dense-tp2]
-return self.group.all_reduce(self.linear(x), self.name)
+return self.linear(x)

reduces after the MLP only
@ distributed.layers | equal[dense-tp2]
-ROW_PARALLEL = ("self_attn.o_proj", "mlp.down_proj")
+ROW_PARALLEL = ("mlp.down_proj",)

forgets the all-reduce after a layer of experts
@ distributed.layers | equal[moe-tp2]
-return self.group.all_reduce(partial, self.name)
+return partial

deals heads out like cards instead of in runs
@ distributed.shards | parts
-return (_nth(rank, config.num_attention_heads * config.head_dim // tp),)
+return (slice(rank * config.head_dim, None, tp * config.head_dim),)

slices Q, K and V as one matrix
@ distributed.shards | test_ranks_groups.py::test_a_rank_has_its_own_heads_of_q_k_and_v
-return (_nth(rank // replicas, heads * config.head_dim),)
+rows = rank * (config.num_attention_heads + 2 * config.num_key_value_heads) // tp
+        return (_nth(max(0, rows - config.num_attention_heads), heads * config.head_dim),)

gives ranks that share a KV head different ones
@ distributed.shards | kv
-_nth(rank // replicas,
+_nth(rank % config.num_key_value_heads,

gives every rank the first KV heads
@ distributed.shards | equal[biases-tp4]
-replicas = max(1, tp // config.num_key_value_
+replicas = max(tp, tp // config.num_key_value_

gives the columns of the down projection out backwards
@ distributed.shards | equal[dense-tp2]
-return slice(None), _nth(rank, inner // tp)
+return slice(None), _nth(tp - 1 - rank, inner // tp)

looks up tokens of lower ranks from the end
@ distributed.layers | equal[dense-tp2]
-here = (local >= 0) & (local < len(self.weight))
+here = local < len(self.weight)

leaves the padding in the logits
@ distributed.layers | test_ranks_equal.py::test_random_sampling_draws_the_same_tokens
-[:, : self.vocab_size]
+

puts what it gathers in an order of its own
@ distributed.collectives | test_ranks_collectives.py::test_all_gather_gives_all_of_everybody
 "all_gather", name, dict.fromkeys(peers, x), {rank: arrays[rank] for rank in peers}
         )
-        return arrays
+        return arrays[self.rank :] + arrays[: self.rank]

takes what it sends twice
@ distributed.collectives | test_ranks_collectives.py::test_all_to_all_gives_each_its_pieces
-arrays[self.rank] = parts[self.rank]
+arrays[self.rank] = parts[0]

counts the first round of an all-reduce only
@ distributed.collectives | sum
-            self.stats.bytes_sent[operation, name] += num_bytes
+            pass
         self.transport

gives left-over layers to the last stages
@ distributed.groups | test_ranks_groups.py::test_left_over_layers_go_to_the_middle
-sizes[-2 - stage] += 1
+sizes[-1 - stage] += 1

begins a stage one layer late
@ distributed.groups | equal[dense-pp4]
-return range(start, start + sizes[pp_rank])
+return range(start + (pp_rank > 0), start + sizes[pp_rank])

loses at the border what the stage has added
@ distributed.model | equal[dense-pp4]
-run_layers(self.layers, hidden, batch,
+run_layers(self.layers, hidden.copy(), batch,

sends its stage's normed hidden states
@ distributed.model | equal[dense-pp4]
-self.pp.send(hidden, place.pp_rank + 1, "hidden_states")
+self.pp.send(hidden / np.abs(hidden).max(), place.pp_rank + 1, "hidden_states")

runs the plan before this one
@ distributed.pipeline | equal[dense-pp4]
-number = self.ranks.submit(self.runner.prepare_batch(plan))
+stale = self.batch_queue[-1][0] if self.batch_queue else plan
+        stale = stale if stale.scheduled_requests else plan
+        number = self.ranks.submit(self.runner.prepare_batch(stale))

keeps one batch more in flight than there are stages
@ distributed.pipeline | test_ranks_pipeline.py::test_the_queue_waits_for_the_oldest
-super().__init__(runner, row_sampler, features, depth)
+super().__init__(runner, row_sampler, features, depth + 1)

moves no counter before the token is there
@ distributed.pipeline | test_ranks_pipeline.py::test_a_request_in_flight_is_passed_over
-plan.advance(request)
+plan.num_computed_tokens[request.request_id] = request.num_computed_tokens

samples a position again after a preemption in flight
@ distributed.pipeline | test_ranks_pipeline.py::test_a_position_is_not_sampled_twice
-return 0 if is_last and self.tokens_to_come[request.request_id] else num_new
+return num_new

asks rank 0 for the logits
@ distributed.config | equal[dense-pp4]
-return self.world_size - self.tensor_parallel_size
+return 0

adds the first expert's result twice
@ distributed.experts | equal[moe-tp4-ep1]
-for slot in range(1, top_k):
+for slot in range(top_k):

combines results without their weights
@ distributed.experts | equal[moe-tp4-ep1]
-results *= topk_weights[mine]
+results *= 1 + 0 * topk_weights[mine]

gives experts that are left over to the last ranks
@ distributed.groups | test_ranks_groups.py::test_experts_are_shared_evenly
-start = ep_rank * short + min(ep_rank, left_over)
-    return range(start, start + short + (ep_rank < left_over))
+start = ep_rank * short
+    return range(start, start + short + left_over * (ep_rank == ep_size - 1))

merges partial outputs as if all parts weighed the same
@ distributed.context | test_ranks_groups.py::test_merged_parts_are_the_attention_over_all_keys
-weights = np.exp(lses - lses.max(axis=0))
+weights = np.ones_like(lses)

takes exponents before it takes the largest off
@ distributed.context | test_ranks_groups.py::test_merged_parts_are_the_attention_over_all_keys
-weights = np.exp(lses - lses.max(axis=0))
+weights = np.exp(lses)

lets a query see a position too many of another rank
@ distributed.context | equal[dense-tp4-dcp2]
-visible = num_local(batch.positions[tokens] + 1, rank, size)
+visible = np.minimum(held[i], num_local(batch.positions[tokens] + 2, rank, size))

spreads a context in runs and reads it dealt out
@ distributed.context | equal[dense-tp4-dcp2]
-slots = np.where(offset % size == rank, block * block_size + offset // size, 0)
+slots = np.where(offset // block_size == rank, block * block_size + offset % block_size, 0)

names the rank that complains, not the one that hangs
@ distributed.autopsy | hangs[shared_memory]
-return RankError(peer, f"does not respond
+return RankError(rank, f"does not respond

leaves the others running when one has died
@ distributed.pool | test_ranks_faults.py::test_a_rank_killed_between_two_steps
         self.failure = self.failure or failure
-        self.end()
+        self._inbox.put(None)

keeps the name of the shared memory
@ distributed.pool | test_ranks_faults.py::test_an_engine_that_is_closed
         self._gather("ready", deadline)
         if self._segment is not None:
             self._segment.close()
-            self._segment.unlink()
-            self._segment = None

writes over the end of the ring
@ distributed.transport | sum
-self._write_at = (self._write_at + count) % self._size
+self._write_at = (self._write_at + count) % (self._size - 8)

gives a request's last row of logits alone, whatever drafts it verifies
@ distributed.model | drafts[dense]
-last = hidden[batch.logits_indices]
+last = hidden[batch.query_start_loc[1:] - 1]

gives every rank the first rank's part of an adapter
@ lora.ranks | adapters[dense-tp2]
-part = part_of(f"{name}.weight", config, place)
+part = part_of(f"{name}.weight", config, Place.of(0, place.tp_size, 1))

adapts a row-parallel layer on the first rank alone
@ lora.ranks | adapters[dense-tp2]
-            row_parallel.linear = linear
+            row_parallel.linear = linear if model.tp.rank == 0 else inner

adds a row-parallel layer's delta behind its all-reduce
@ lora.ranks | adapters[dense-tp2]
-        inner = base if row_parallel is None else row_parallel.linear
+        inner, row_parallel = base, None

adapts the embedding of a rank's own tokens alone
@ lora.ranks | adapters[dense-tp2]
-    if name in (EMBEDDING, HEAD):
+    if name == EMBEDDING:
+        held = np.zeros_like(pair[0])
+        mine = part_of("model.embed_tokens.weight", config, place)[0]
+        held[:, mine] = pair[0][:, mine]
+        return held, pair[1]
+    if name == HEAD:

adapts the logits of a rank's own tokens alone
@ lora.ranks | adapters[dense-tp2]
-    if name in (EMBEDDING, HEAD):
+    if name == HEAD:
+        held = np.zeros_like(pair[1])
+        mine = part_of("lm_head.weight", config, place)[0]
+        held[mine] = pair[1][mine]
+        return pair[0], held
+    if name == EMBEDDING:

adds the embedding's delta once for each rank
@ lora.ranks | adapters[dense-tp2]
-    if name in (EMBEDDING, HEAD):
+    if name == EMBEDDING:
+        return pair[0], pair[1] * place.tp_size
+    if name == HEAD:

leaves in a slot what an adapter does not replace
@ lora.ranks | adapters[dense-tp2]
-                part.slots[slot] = pack(packed, mine)
+                part.slots[slot] = pack(packed, mine) or part.slots[slot]

says nothing to the ranks of a batch of base requests
@ lora.ranks | adapters[dense-tp2]
-        self._tell(set_step, self.step.segments, self.step.row_slots)
+        if self.step.segments:
+            self._tell(set_step, self.step.segments, self.step.row_slots)

sends ranks the batch as it was before it was sorted
@ lora.ranks | adapters[dense-tp2]
-        batch = group_by_slot(batch, self.step)
+        group_by_slot(batch, self.step)

gathers shrunk rows by rank where B reads them by matrix
@ lora.ranks | adapters[dense-tp2-sharded]
-whole = parts.transpose(1, 2, 0, 3)
+whole = parts.transpose(1, 0, 2, 3)

expands what one rank has shrunk
@ lora.ranks | adapters[dense-tp2-sharded]
-        shrunk = self.group.all_reduce(shrunk, f"{self.name}.lora_a")
+        self.group.all_reduce(shrunk, f"{self.name}.lora_a")

expands to the first columns on every rank
@ lora.ranks | adapters[dense-tp2-sharded]
-            first = self.group.rank * len(b)
+            first = 0

adapts experts by the first rank's part of A and B
@ lora.ranks | adapters[moe-tp2]
-part = part_of(f"{name}.weight", config, place)
+part = part_of(
+        f"{name}.weight", config,
+        Place.of(0, place.tp_size, 1) if ".experts." in name else place,
+    )

adapts experts on the first rank alone
@ lora.ranks | adapters[moe-tp2]
-            block.forward = experts = LoRAExperts(block, self.step, config.max_loras)
+            experts = LoRAExperts(block, self.step, config.max_loras)
+            block.forward = experts if model.tp.rank == 0 else block.forward

sends the whole activation where a part would do
@ distributed.collectives | sum
-outgoing = {rank: flat[parts[rank]] for rank in self._peers()}
+outgoing = {rank: flat[parts[rank]].repeat(2)[: len(own)] for rank in self._peers()}
""")
"""Edits of what runs in ranks; in the place of a situation, the test that catches each."""


def caught_by(mutant: Mutant) -> str:
    """The test named, in full."""
    name, bracket, case = mutant.situation.partition("[")
    return TESTS.get(name, name) + bracket + case


def caught(mutant: Mutant) -> bool:
    """Whether the test named fails on the mutated copy. It must pass on the copy as it is."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "mini_vllm", copy / "mini_vllm")  # what is compiled too: each rank
        # would compile the package anew
        for module, text in replayed.sources(mutant).items():
            path = copy / "mini_vllm" / f"{module.replace('.', '/')}.py"
            path.write_text(text, encoding="utf-8")
        return _status(copy, caught_by(mutant)) != 0


def _status(copy: Path, test: str) -> int:
    """Exit status of the tests whose names begin so, run on a copy of the package."""
    file, _, name = test.partition("::")
    path = str(copy / "mini_vllm" / "distributed" / "tests" / file)
    chosen = [f"{path}::{name}"] if name.endswith("]") else [path, "-k", name]
    environment = {
        **os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
        "--import-mode=importlib", "-W", "ignore", *chosen,
    ]  # fmt: skip
    try:
        ended = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return 124
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"{test}: pytest ended with {ended.returncode}\n{ended.stdout}")
    return ended.returncode


def counted() -> tuple[str, bool]:
    """The table, and whether the test named catches every mutant."""
    held = []
    for mutant in MUTANTS:
        held.append(caught(mutant))
        print(f"{'caught' if held[-1] else 'MISSED':>6}  distributed    {mutant.name}", flush=True)
    rows = [
        [m.name, f"`{m.edits[0][0].replace('.', '/')}.py`", f"`{caught_by(m).partition('::')[2]}`"]
        for m in MUTANTS
    ]
    return markdown_table(["ranks that ...", "edit in", "caught by the test"], rows), all(held)


PIPELINE = replayed.diffs(
    """
moves no counter before the token is there
@ distributed.pipeline
-plan.advance(request)
+plan.num_computed_tokens[request.request_id] = request.num_computed_tokens

drops the token of a preempted request
@ distributed.pipeline
-            if request.is_finished:
-                continue  # aborted meanwhile
+            if request.is_finished or request not in self.running:
+                continue

leaves what ends while it waits in the queue
@ distributed.pipeline
-                        self._queue_of(request).remove(request)
+                        pass

admits nobody whose token is to come
@ distributed.pipeline
-return 0 if is_last and self.tokens_to_come
+return 0 if self.tokens_to_come

promises a token for every chunk
@ distributed.pipeline
-            if request.num_computed_tokens >= request.num_tokens:
+            if request.num_computed_tokens:
""",
    "pipeline",
)
"""Wrong schedulers of several batches in flight, which the recordings of them catch."""

CATALOGUES = {"pipeline-mutants": replayed.Catalogue(PIPELINE), "rank-mutants": counted}

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
from dataclasses import dataclass
from pathlib import Path

from conformance import mutants as replayed
from conformance.features import ROOT
from labkit.tables import markdown_table

LIMIT_S = 120.0

_EQUAL = "test_ranks_equal.py::test_ranks_answer_as_one_process_with_chunks_hits_and_preemptions"
_SUM = "test_ranks_collectives.py::test_all_reduce_adds_in_the_order_of_the_ranks_and_gives_all_the"
_BYTES = "test_ranks_collectives.py::test_a_step_sends_two_all_reduces_per_layer_the_embedding"
_PARTS = "test_ranks_groups.py::test_the_parts_of_all_ranks_cover_every_tensor"
_KV = "test_ranks_groups.py::test_two_ranks_with_one_kv_head_between_them_have_the_same"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of a file of `mini_vllm/distributed/`, and who catches it."""

    name: str
    file: str
    old: str
    new: str
    caught_by: str
    """`file::test`, as pytest takes it; a beginning of the test's name will do."""

    def edit(self, text: str) -> str:
        """The changed source. Raises ValueError when the old text is not in it exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(
                f"mutant {self.name!r}: {self.file} holds {text.count(self.old)} times {self.old!r}"
            )
        return text.replace(self.old, self.new)


def _equal(name: str, file: str, old: str, new: str, case: str) -> Mutant:
    return Mutant(name, file, old, new, f"{_EQUAL}[{case}]")


MUTANTS = (
    _equal(
        "adds the bias on every rank", "layers.py", "bias if group.rank == 0 else None", "bias",
        "biases-tp4",
    ),
    Mutant(
        "averages instead of adding", "collectives.py", "(pair[0] + pair[1])",
        "((pair[0] + pair[1]) / 2)", _SUM,
    ),
    Mutant(
        "adds its own array first", "collectives.py",
        "        total = addends[0].copy()\n        for rank in range(1, self.size):\n",
        "        total = own.copy()\n        for rank in self._peers():\n", _SUM,
    ),
    _equal(
        "forgets the all-reduce after a row-parallel layer", "layers.py",
        "return self.group.all_reduce(self.linear(x), self.name)", "return self.linear(x)",
        "dense-tp2",
    ),
    _equal(
        "reduces after the MLP only", "layers.py",
        'ROW_PARALLEL = ("self_attn.o_proj", "mlp.down_proj")', 'ROW_PARALLEL = ("mlp.down_proj",)',
        "dense-tp2",
    ),
    _equal(
        "forgets the all-reduce after a layer of experts", "layers.py",
        "return self.group.all_reduce(partial, self.name)", "return partial", "moe-tp2",
    ),
    Mutant(
        "deals heads out like cards instead of in runs", "shards.py",
        "return (_nth(rank, config.num_attention_heads * config.head_dim // tp),)",
        "return (slice(rank * config.head_dim, None, tp * config.head_dim),)", _PARTS,
    ),
    Mutant(
        "slices Q, K and V as one matrix", "shards.py",
        "return (_nth(rank // replicas, heads * config.head_dim),)",
        "return (_nth(max(0, rank * (config.num_attention_heads + 2 * config.num_key_value_heads)"
        " // tp - config.num_attention_heads), heads * config.head_dim),)",
        "test_ranks_groups.py::test_a_rank_has_its_own_heads_of_q_k_and_v",
    ),
    Mutant(
        "gives ranks that share a KV head different ones", "shards.py", "_nth(rank // replicas,",
        "_nth(rank % config.num_key_value_heads,", _KV,
    ),
    _equal(
        "gives every rank the first KV heads", "shards.py",
        "replicas = max(1, tp // config.num_key_value_",
        "replicas = max(tp, tp // config.num_key_value_", "biases-tp4",
    ),
    _equal(
        "gives the columns of the down projection out backwards", "shards.py",
        "return slice(None), _nth(rank, inner // tp)",
        "return slice(None), _nth(tp - 1 - rank, inner // tp)", "dense-tp2",
    ),
    _equal(
        "looks up tokens of lower ranks from the end", "layers.py",
        "here = (local >= 0) & (local < len(self.weight))", "here = local < len(self.weight)",
        "dense-tp2",
    ),
    Mutant(
        "leaves the padding in the logits", "layers.py", "[:, : self.vocab_size]", "",
        "test_ranks_equal.py::test_random_sampling_draws_the_same_tokens",
    ),
    Mutant(
        "puts what it gathers in an order of its own", "collectives.py",
        '"all_gather", name, dict.fromkeys(peers, x), {rank: arrays[rank] for rank in peers}\n'
        "        )\n        return arrays",
        '"all_gather", name, dict.fromkeys(peers, x), {rank: arrays[rank] for rank in peers}\n'
        "        )\n        return arrays[self.rank :] + arrays[: self.rank]",
        "test_ranks_collectives.py::test_all_gather_gives_all_of_everybody",
    ),
    Mutant(
        "takes what it sends twice", "collectives.py",
        "arrays[self.rank] = parts[self.rank]", "arrays[self.rank] = parts[0]",
        "test_ranks_collectives.py::test_all_to_all_gives_each_its_pieces",
    ),
    Mutant(
        "counts the first round of an all-reduce only", "collectives.py",
        "            self.stats.bytes_sent[operation, name] += num_bytes\n        self.transport",
        "            pass\n        self.transport", _SUM,
    ),
    Mutant(
        "gives left-over layers to the last stages", "groups.py", "sizes[-2 - stage] += 1",
        "sizes[-1 - stage] += 1", "test_ranks_groups.py::test_left_over_layers_go_to_the_middle",
    ),
    _equal(
        "begins a stage one layer late", "groups.py",
        "return range(start, start + sizes[pp_rank])",
        "return range(start + (pp_rank > 0), start + sizes[pp_rank])", "dense-pp4",
    ),
    _equal(
        "loses at the border what the stage has added", "model.py",
        "run_layers(self.layers, hidden, batch,", "run_layers(self.layers, hidden.copy(), batch,",
        "dense-pp4",
    ),
    _equal(
        "sends its stage's normed hidden states", "model.py",
        'self.pp.send(hidden, place.pp_rank + 1, "hidden_states")',
        "self.pp.send(hidden / np.abs(hidden).max(), place.pp_rank + 1,"
        ' "hidden_states")', "dense-pp4",
    ),
    _equal(
        "runs the plan before this one", "pipeline.py",
        "number = self.ranks.submit(self.runner.prepare_batch(plan))",
        "stale = self.batch_queue[-1][0] if self.batch_queue else plan\n"
        "        stale = stale if stale.scheduled_requests else plan\n"
        "        number = self.ranks.submit(self.runner.prepare_batch(stale))",
        "dense-pp4",
    ),
    Mutant(
        "keeps one batch more in flight than there are stages", "pipeline.py",
        "super().__init__(runner, row_sampler, features, depth)",
        "super().__init__(runner, row_sampler, features, depth + 1)",
        "test_ranks_pipeline.py::test_the_queue_waits_for_the_oldest",
    ),
    Mutant(
        "moves no counter before the token is there", "pipeline.py",
        "plan.advance(request)",
        "plan.num_computed_tokens[request.request_id] = request.num_computed_tokens",
        "test_ranks_pipeline.py::test_a_request_in_flight_is_passed_over",
    ),
    Mutant(
        "samples a position again after a preemption in flight", "pipeline.py",
        "return 0 if is_last and self.tokens_to_come[request.request_id] else num_new",
        "return num_new",
        "test_ranks_pipeline.py::test_a_position_is_not_sampled_twice",
    ),
    _equal(
        "asks rank 0 for the logits", "config.py",
        "return self.world_size - self.tensor_parallel_size", "return 0", "dense-pp4",
    ),
    _equal(
        "adds the first expert's result twice", "experts.py", "for slot in range(1, top_k):",
        "for slot in range(top_k):", "moe-tp4-ep1",
    ),
    _equal(
        "combines results without their weights", "experts.py",
        "results *= topk_weights[mine]", "results *= 1 + 0 * topk_weights[mine]", "moe-tp4-ep1",
    ),
    Mutant(
        "gives experts that are left over to the last ranks", "groups.py",
        "start = ep_rank * short + min(ep_rank, left_over)\n"
        "    return range(start, start + short + (ep_rank < left_over))",
        "start = ep_rank * short\n"
        "    return range(start, start + short + left_over * (ep_rank == ep_size - 1))",
        "test_ranks_groups.py::test_experts_are_shared_evenly",
    ),
    Mutant(
        "merges partial outputs as if all parts weighed the same", "context.py",
        "weights = np.exp(lses - lses.max(axis=0))", "weights = np.ones_like(lses)",
        "test_ranks_groups.py::test_merged_parts_are_the_attention_over_all_keys",
    ),
    Mutant(
        "takes exponents before it takes the largest off", "context.py",
        "weights = np.exp(lses - lses.max(axis=0))", "weights = np.exp(lses)",
        "test_ranks_groups.py::test_merged_parts_are_the_attention_over_all_keys",
    ),
    _equal(
        "lets a query see a position too many of another rank", "context.py",
        "visible = num_local(batch.positions[tokens] + 1, rank, size)",
        "visible = np.minimum(held[i], num_local(batch.positions[tokens] + 2, rank, size))",
        "dense-tp4-dcp2",
    ),
    _equal(
        "spreads a context in runs and reads it dealt out", "context.py",
        "slots = np.where(offset % size == rank, block * block_size + offset // size, 0)",
        "slots = np.where(offset // block_size == rank, block * block_size"
        " + offset % block_size, 0)",
        "dense-tp4-dcp2",
    ),
    Mutant(
        "names the rank that complains, not the one that hangs", "autopsy.py",
        'return RankError(peer, f"does not respond', 'return RankError(rank, f"does not respond',
        "test_ranks_faults.py::test_a_rank_that_hangs_past_the_deadline_is_named[shared_memory]",
    ),
    Mutant(
        "leaves the others running when one has died", "pool.py",
        "        self.failure = self.failure or failure\n        self.end()\n",
        "        self.failure = self.failure or failure\n        self._inbox.put(None)\n",
        "test_ranks_faults.py::test_a_rank_killed_between_two_steps",
    ),
    Mutant(
        "keeps the name of the shared memory", "pool.py",
        "            self._segment.close()\n            self._segment.unlink()\n"
        "            self._segment = None\n\n",
        "            self._segment.close()\n\n",
        "test_ranks_faults.py::test_an_engine_that_is_closed",
    ),
    Mutant(
        "writes over the end of the ring", "transport.py",
        "self._write_at = (self._write_at + count) % self._size",
        "self._write_at = (self._write_at + count) % (self._size - 8)", _SUM,
    ),
    Mutant(
        "sends the whole activation where a part would do", "collectives.py",
        "outgoing = {rank: flat[parts[rank]] for rank in self._peers()}",
        "outgoing = {rank: flat[parts[rank]].repeat(2)[: len(own)] for rank in self._peers()}",
        _SUM,
    ),
)  # fmt: skip


def caught(mutant: Mutant) -> bool:
    """Whether the test named fails on the mutated copy. It must pass on the copy as it is."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "mini_vllm", copy / "mini_vllm", ignore=skipped)
        path = copy / "mini_vllm" / "distributed" / mutant.file
        path.write_text(mutant.edit(path.read_text(encoding="utf-8")), encoding="utf-8")
        return _status(copy, mutant.caught_by) != 0


def _status(copy: Path, test: str) -> int:
    """Exit status of the tests whose names begin so, run on a copy of the package."""
    file, _, name = test.partition("::")
    path = str(copy / "mini_vllm" / "distributed" / "tests" / file)
    chosen = [f"{path}::{name}"] if name.endswith("]") else [path, "-k", name]
    environment = {
        **os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist",
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
        [m.name, f"`distributed/{m.file}`", f"`{m.caught_by.partition('::')[2]}`"] for m in MUTANTS
    ]
    return markdown_table(["ranks that ...", "edit in", "caught by the test"], rows), all(held)


def _pipeline(name: str, old: str, new: str) -> replayed.Mutant:
    return replayed.Mutant(name, (("distributed.pipeline", old, new),), "pipeline", "")


PIPELINE = (
    _pipeline(
        "moves no counter before the token is there",
        "plan.advance(request)",
        "plan.num_computed_tokens[request.request_id] = request.num_computed_tokens",
    ),
    _pipeline(
        "drops the token of a preempted request",
        "            if request.is_finished:\n                continue  # aborted meanwhile\n",
        "            if request.is_finished or request not in self.running:\n"
        "                continue\n",
    ),
    _pipeline(
        "leaves what ends while it waits in the queue",
        "                        self._queue_of(request).remove(request)\n",
        "                        pass\n",
    ),
    _pipeline(
        "admits nobody whose token is to come",
        "return 0 if is_last and self.tokens_to_come",
        "return 0 if self.tokens_to_come",
    ),
    _pipeline(
        "promises a token for every chunk",
        "            if request.num_computed_tokens >= request.num_tokens:\n",
        "            if request.num_computed_tokens:\n",
    ),
)
"""Wrong schedulers of several batches in flight, which the recordings of them catch."""

CATALOGUES = {"pipeline-mutants": replayed.Catalogue(PIPELINE), "rank-mutants": counted}

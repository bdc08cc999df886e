"""Wrong schedulers, each one edit away from the right one, that the recordings must catch."""

from __future__ import annotations

from conformance.features.core.situations import situations_of
from conformance.mutants import Catalogue, Mutant

_INDEX = "self.cached_block_hash_to_block"
_EVICT_ANY = (
    "block_pool",
    f"""        holders = {_INDEX}[block_hash]
        del holders[block.block_id]
        if not holders:
            del {_INDEX}[block_hash]
""",
    f"""        holders = {_INDEX}.get(block_hash, {{}})
        holders.pop(block.block_id, None)
        if not holders:
            {_INDEX}.pop(block_hash, None)
""",
)
_INSERT = f"            {_INDEX}.setdefault(block_hash, {{}})[block.block_id] = block\n"
_NEEDED = """        needed = self.get_num_blocks_to_allocate(
            request.request_id, request.num_tokens, new_computed_blocks
        )
"""
_FITS = "needed <= self.block_pool.get_num_free_blocks()"
_GATE = f"{_NEEDED}        return {_FITS}\n"
_TOUCH = "        self.block_pool.touch(new_computed_blocks)\n"
_ADOPT = "            self.block_pool.touch(hits)\n"

MUTANTS = (
    Mutant(
        "touches the hits before the capacity check and leaks them on refusal",
        (
            (
                "kv_cache",
                _GATE,
                f"{_TOUCH}{_GATE}",
            ),
            ("kv_cache", _ADOPT, "            pass\n"),
        ),
        "prefix",
        "head blocked by memory",
    ),
    Mutant(
        "touches the hits before the capacity check and gives them back on refusal",
        (
            (
                "kv_cache",
                _GATE,
                f"{_TOUCH}{_NEEDED}        fits = {_FITS}\n"
                "        self.block_pool.free_blocks(reversed(new_computed_blocks))\n"
                "        return fits\n",
            ),
        ),
        "withdrawal",
        "refused because hits were free",
    ),
    Mutant(
        "does not count revived hits as consumed",
        (
            (
                "kv_cache",
                _GATE,
                f"{_NEEDED}        needed -= sum(b.ref_cnt == 0 for b in new_computed_blocks)\n"
                f"        return {_FITS}\n",
            ),
        ),
        "prefix",
        "refused because hits were free",
    ),
    Mutant(
        "admits when the first chunk fits, not the whole sequence",
        (("kv_cache", _GATE, "        return True\n"),),
        "basic",
        "head blocked by memory",
    ),
    Mutant(
        "keeps one block per hash, the last",
        (
            _EVICT_ANY,
            (
                "block_pool",
                _INSERT,
                f"            {_INDEX}[block_hash] = {{block.block_id: block}}\n",
            ),
        ),
        "prefix",
        "same content in two blocks",
    ),
    Mutant(
        "keeps one block per hash, the first",
        (
            _EVICT_ANY,
            (
                "block_pool",
                _INSERT,
                f"            {_INDEX}.setdefault(block_hash, {{block.block_id: block}})\n",
            ),
        ),
        "prefix",
        "same content in two blocks",
    ),
    Mutant(
        "forgets a block's content when it is freed",
        (
            (
                "block_pool",
                "                self.free_queue.append(block)\n",
                "                self.evict(block)\n"
                "                self.free_queue.append(block)\n",
            ),
        ),
        "prefix",
        "hit revives a free block",
    ),
    Mutant(
        "frees a table head first",
        (("kv_cache", "free_blocks(reversed(table))", "free_blocks(table)"),),
        "pressure",
        "table of several blocks freed",
    ),
    Mutant(
        "indexes blocks only once they are computed",
        (
            (
                "kv_cache",
                "num_known = min(num_tokens, request.num_tokens)",
                "num_known = request.num_computed_tokens",
            ),
        ),
        "prefix",
        "indexed before it is computed",
    ),
    Mutant(
        "lets a hit cover the last token",
        (
            (
                "kv_cache",
                "request.block_hashes[: (request.num_tokens - 1) // self.block_size]",
                "request.block_hashes[: request.num_tokens // self.block_size]",
            ),
        ),
        "prefix",
        "hit capped before the last token",
    ),
    Mutant(
        "looks up only the prompt of a resumed request",
        (
            (
                "kv_cache",
                "request.block_hashes[: (request.num_tokens - 1) // self.block_size]",
                "request.block_hashes[: (request.num_prompt_tokens - 1) // self.block_size]",
            ),
        ),
        "prefix",
        "resumed with hits",
    ),
    Mutant(
        "preempts from the front of running",
        (("queues", "return self.running.pop()", "return self.running.pop(0)"),),
        "pressure",
        "preemption",
    ),
    Mutant(
        "queues a preempted request at the back",
        (("queues", "queue.appendleft(request)", "queue.append(request)"),),
        "pressure",
        "preemption",
    ),
    Mutant(
        "admits in a preempting step",
        (("scheduler", "if not plan.preempted_req_ids:", "if True:"),),
        "withdrawal",
        "preempting step could admit",
    ),
    Mutant(
        "admits the newest first",
        (
            ("scheduler", "request = queue[0]", "request = queue[-1]"),
            ("scheduler", "            queue.popleft()\n", "            queue.pop()\n"),
        ),
        "basic",
        "several wait",
    ),
    Mutant(
        "admits one request too many",
        (
            (
                "scheduler",
                "len(self.running) < self.max_num_seqs",
                "len(self.running) <= self.max_num_seqs",
            ),
        ),
        "basic",
        "head blocked by slots",
    ),
    Mutant(
        "applies the threshold to admissions only",
        (
            (
                "scheduler",
                "num_new = clamp(num_new, budget if budget < room else room)",
                "num_new = max(0, min(num_new, budget, room))",
            ),
        ),
        "basic",
        "chunk cut by the threshold",
    ),
    Mutant(
        "chunks although chunked prefill is off",
        (
            (
                "scheduler",
                "needs_whole = not self.config.enable_chunked_prefill",
                "needs_whole = False",
            ),
        ),
        "whole-prompts",
        "whole prompt waits",
    ),
    Mutant(
        "reports length when EOS and the cap tie",
        (
            (
                "request",
                "if last == self.eos_token_id and not params.ignore_eos:",
                "if last == self.eos_token_id and not params.ignore_eos"
                " and num_output_tokens < params.max_tokens:",
            ),
        ),
        "limits",
        "EOS at max_tokens",
    ),
    Mutant(
        "lets a sequence exceed max_model_len by one",
        (("request", "self.num_tokens >= max_model_len", "self.num_tokens > max_model_len"),),
        "limits",
        "ends by max_model_len",
    ),
    Mutant(
        "frees the finished in reverse",
        (
            (
                "scheduler",
                "finished.append(request)\n                    self._release(request)\n",
                "finished.append(request)\n",
            ),
            (
                "scheduler",
                "        if finished:\n",
                "        for request in reversed(finished):\n            self._release(request)\n"
                "        if finished:\n",
            ),
        ),
        "basic",
        "two end in one step",
    ),
    Mutant(
        "does not refund a withdrawn victim's budget",
        (
            (
                "scheduler",
                "budget += self._withdraw(victim, plan)",
                "self._withdraw(victim, plan)",
            ),
        ),
        "withdrawal",
        "refund spent",
    ),
    Mutant(
        "skips a request after withdrawing one before it",
        (("scheduler", "                    index -= 1\n", "                    pass\n"),),
        "withdrawal",
        "victim withdrawn from the plan",
    ),
    Mutant(
        "preempts the last of several least urgent requests",
        (("queues", "max(self.running, key", "max(reversed(self.running), key"),),
        "priority",
        "equal keys among victims",
    ),
    Mutant(
        "ignores arrival times in the priority queue",
        (
            (
                "request",
                "mine < (other.priority, other.arrival_time, other.request_id)",
                "(mine[0], mine[2]) < (other.priority, other.request_id)",
            ),
        ),
        "priority",
        "equal priority, earlier arrival first",
    ),
)

CATALOGUES = {"mutants": Catalogue(MUTANTS, situations_of)}

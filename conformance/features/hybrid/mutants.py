"""Wrong managers of groups, each one edit away from the right one, that the recordings catch."""

from __future__ import annotations

from conformance.features.hybrid.situations import COUNTED
from conformance.mutants import Catalogue, Mutant

_PASSED = "return max(0, num_computed - self.window + 1)"
_STATE = "return max(0, num_computed - 1)"
_CONTIGUOUS = "return -(-(self.window - 1) // self.block_size)"


def _groups(name: str, old: str, new: str, situation: str, file: str = "hybrid") -> Mutant:
    return Mutant(name, (("kv.groups", old, new),), file, situation)


def _coordinator(name: str, old: str, new: str, situation: str, file: str = "hybrid") -> Mutant:
    return Mutant(name, (("kv.coordinator", old, new),), file, situation)


MUTANTS = (
    _groups("keeps what a window has passed", _PASSED, "return 0", "a window has passed a block"),
    _groups(
        "forgets a token too early", _PASSED, _PASSED.replace("+ 1", "+ 2"),
        "a step with a window",
    ),
    _groups(
        "wants a block more for a window's hit", _CONTIGUOUS, f"{_CONTIGUOUS} + 1",
        "a step with a window",
    ),
    _groups(
        "wants every block of a window's hit",
        "        if run >= wanted:\n", "        if run >= wanted + len(hashes):\n", "a hit",
    ),
    _groups(
        "reserves a whole sequence for a window",
        "        return -(-longest // self.block_size) + 1\n", "        return None\n",
        "a step with a window",
    ),
    _groups(
        "gives tables back from the left", "self.pool.free_blocks(reversed(table))",
        "self.pool.free_blocks(table)", "a table is given back",
    ),
    _groups(
        "counts hits behind the window as taken", "behind = hits[max(0, skipped - held) :]",
        "behind = hits", "a hit behind null blocks",
    ),
    _coordinator(
        "gives back other requests' tables as well",
        "group.free(request.request_id)", "group.free(request.request_id) or group.tables.clear()",
        "a table is given back",
    ),
    _coordinator(
        "lets hits end anywhere", "self.alignment = math.lcm(*sizes)",
        "self.alignment = math.gcd(*sizes)", "unequal blocks",
    ),
    _coordinator(
        "indexes only what all groups fill at once",
        "            group.cache_blocks(request, aligned, hashes, self.alignment)\n",
        "            if num_tokens == aligned:\n"
        "                group.cache_blocks(request, aligned, hashes, self.alignment)\n",
        "a step with caching",
    ),
    _coordinator(
        "leaves full tables as long as they were found",
        "            del found[group.index][length // group.block_size :]\n", "            pass\n",
        "a step with caching",
    ),
    _coordinator(
        "leaves no block out for drafts", "drops = self.use_eagle and number not in dropped",
        "drops = False", "an admission with drafts", "hybrid_spec",
    ),
    _coordinator(
        "leaves a block out in every round", "drops = self.use_eagle and number not in dropped",
        "drops = self.use_eagle", "an admission with drafts", "hybrid_spec",
    ),
    _coordinator(
        "looks no block further before it leaves one out", "limit = min(now + size, most)",
        "limit = now", "an admission with drafts", "hybrid_spec",
    ),
    _groups(
        "keeps every state", _STATE, "return 0", "a state has passed a block", "states"
    ),
    _groups(
        "forgets the last state", _STATE, "return num_computed", "a step with states",
        "states",
    ),
    _groups(
        "begins from a state that the same step writes",
        "return bool(hits) and hits[-1].block_hash in self.cached_this_step", "return False",
        "a step with states", "states",
    ),
    _coordinator(
        "wants every state of a hit", "SlidingWindowGroup: window_hit, MambaGroup: state_hit",
        "SlidingWindowGroup: window_hit, MambaGroup: full_hit",
        "a hit of a state", "states",
    ),
    _groups(
        "ends steps anywhere", "return num_new // self.block_size * self.block_size",
        "return num_new", "a step with states", "states_align",
    ),
    _groups(
        "computes a prompt's last block at once",
        "return last - start if start < last else num_new", "return num_new",
        "a step that ends at a block", "states_align",
    ),
    _groups(
        "takes a block for every block of a step",
        "        table += [self.pool.null_block] * (required - 1 - before)\n",
        "        table += self.pool.get_new_blocks(required - 1 - before)\n",
        "a step with states", "states_align",
    ),
    _groups(
        "keeps the state before the last",
        "        if last is None or last >= -(-num_computed // self.block_size) - 1:\n",
        "        if True:\n", "a step with states", "states_align",
    ),
)  # fmt: skip

CATALOGUES = {"hybrid-mutants": Catalogue(MUTANTS, COUNTED.situations_of)}

"""A small pool that the reader fills and empties: what the widget's arithmetic is held against.

Promises: the browser moves blocks by a model of its own; `replay` does the same moves with the
engine's `KVCacheManager`, and a browser test compares the two on hundreds of random stories.
Mirrors `vllm/v1/core/kv_cache_manager.py:110` `KVCacheManager`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mini_vllm.block_pool import KVCacheBlock
from mini_vllm.config import SamplingParams
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.request import Request

NUM_BLOCKS = 10
BLOCK_SIZE = 4
MOST_CHARACTERS = 36
"""Of a prompt: as many tokens as the pool has room for."""
ORDERS = {"tail": "tail first, as vLLM", "head": "head first"}
PROMPTS = ("Be kind.Hello!", "Be kind.Why so?", "A stranger talks too long...")
REPLY = " and so on,"
"""What requests say, again and again."""

Op = Sequence[str]
"""("add", name, prompt), ("grow", name, character) or ("end", name)."""


class HeadFirst(KVCacheManager):
    """Releases a table from its beginning: what vLLM does not do."""

    def free(self, request: Request) -> None:
        """As `KVCacheManager.free`, in the other order."""
        table = self.req_to_blocks.pop(request.request_id, None)
        self._num_cached.pop(request.request_id, None)
        if table:
            self.block_pool.free_blocks(table)


class Story:
    """One manager and the requests on it, moved by one `Op` at a time."""

    def __init__(self, order: str, num_blocks: int, block_size: int) -> None:
        made = {"tail": KVCacheManager, "head": HeadFirst}[order]
        self.kv = made(num_blocks, block_size)
        self.live: dict[str, Request] = {}
        self.last: dict[str, Any] = {}
        self._texts: dict[int, str] = {}  # of every hash that was ever made

    def move(self, op: Op) -> None:
        """Do one `Op`; a refused one changes nothing but `last`."""
        kind, name = op[0], op[1]
        before = {b.block_id: b.block_hash for b in self.kv.block_pool.blocks}
        hits: list[KVCacheBlock] = []
        new: list[KVCacheBlock] | None = []
        if kind == "add":
            hits, new = self._add(name, op[2])
        elif kind == "grow":
            new = self._grow(self.live[name], op[2])
        else:
            self.kv.free(self.live.pop(name))
        taken = [block.block_id for block in new or ()]
        self.last = {
            "refused": new is None,
            "hits": [block.block_id for block in hits],
            "found": len(hits) * self.kv.block_size,
            "new": taken,
            "evicted": [self._texts[h] for i in taken if (h := before[i]) is not None],
        }

    def _add(self, name: str, prompt: str) -> tuple[list[KVCacheBlock], list[KVCacheBlock] | None]:
        request = Request(name, list(prompt.encode()), SamplingParams(ignore_eos=True))
        hits, found = self.kv.get_computed_blocks(request)
        self._remember(request)
        request.num_computed_tokens = found
        new = self.kv.allocate_slots(request, request.num_tokens - found, hits)
        if new is not None:
            request.num_computed_tokens = request.num_tokens
            self.live[name] = request
        return hits, new

    def _grow(self, request: Request, character: str) -> list[KVCacheBlock] | None:
        request.append_output_token(ord(character))
        new = self.kv.allocate_slots(request, 1)
        if new is None:
            request.all_token_ids.pop()
            request.num_tokens -= 1
        else:
            request.num_computed_tokens += 1
            self._remember(request)
        return new

    def _remember(self, request: Request) -> None:
        text, size = bytes(request.all_token_ids).decode(), self.kv.block_size
        for number, value in enumerate(request.block_hashes):
            self._texts[value] = text[: (number + 1) * size]

    def state(self) -> dict[str, Any]:
        """Counts, keys, queue, index and tables; a block's key is the text up to its end."""
        pool = self.kv.block_pool
        index = pool.cached_block_hash_to_block.items()
        return {
            "refs": [block.ref_cnt for block in pool.blocks],
            "keys": [
                None if (h := block.block_hash) is None else self._texts[h] for block in pool.blocks
            ],
            "free": [block.block_id for block in pool.free_queue.get_all_free_blocks()],
            "index": {self._texts[value]: list(holders) for value, holders in index},
            "tables": {name: self.kv.get_block_ids(name) for name in self.live},
            "last": self.last,
        }


def replay(
    ops: Sequence[Op], order: str, num_blocks: int = NUM_BLOCKS, block_size: int = BLOCK_SIZE
) -> dict[str, Any]:
    """The state after a story, as JSON types."""
    story = Story(order, num_blocks, block_size)
    for op in ops:
        story.move(op)
    return story.state()


_ALONE = (("add", "A", PROMPTS[0]), ("end", "A"))
_STRANGER = (*_ALONE, ("add", "B", PROMPTS[2]), ("end", "B"))
QUESTIONS: tuple[tuple[str, tuple[Op, ...], str, str, str], ...] = (
    ("A, of 14 tokens, has four blocks and ends. How many of the nine may now be handed out?",
     _ALONE, "tail", "free",
     "Free blocks keep their text, but whoever needs one may have it."),
    ("Its prompt comes again at once. How many tokens are found?",
     (*_ALONE, ("add", "B", PROMPTS[0])), "tail", "found",
     "Three full blocks of four; the fourth was never full."),
    ("A ends; a stranger takes seven blocks and ends. A's prompt comes again. Tokens found?",
     (*_STRANGER, ("add", "C", PROMPTS[0])), "tail", "found",
     "The stranger took seven from the front, A's third among them; the first two are left."),
    ("The same story with tables freed head first. Tokens found?",
     (*_STRANGER, ("add", "C", PROMPTS[0])), "head", "found",
     "The stranger took A's first block, and nothing behind it can be reached."),
)  # fmt: skip
"""What is asked, after which story, freed in which order, and what answers."""


def document() -> dict[str, Any]:
    """The widget's document."""
    questions = []
    for ask, ops, order, field, because in QUESTIONS:
        after = replay(ops, order)
        answer = len(after["free"]) if field == "free" else after["last"]["found"]
        story = [list(op) for op in ops]
        questions.append(
            {"ask": ask, "ops": story, "order": order, "answer": answer, "because": because}
        )
    return {
        "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "orders": ORDERS,
        "prompts": list(PROMPTS), "reply": REPLY, "most": MOST_CHARACTERS,
        "story": [["add", "A", PROMPTS[0]]], "questions": questions,
    }  # fmt: skip

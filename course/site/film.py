"""The block film: a short story of the KV cache, one frame per call, taken from the real pool.

Promises: every frame is read off `mini_vllm`'s `KVCacheManager` right after one call of it; ids,
counts, queue order and index are never written by hand; the same code gives the same film. Only
the sentences are ours. Mirrors `vllm/v1/core/kv_cache_manager.py:110` `KVCacheManager`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypedDict

from mini_vllm.block_pool import BlockPool, KVCacheBlock
from mini_vllm.config import SamplingParams
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.request import Request

BLOCK_SIZE = 4
NUM_BLOCKS = 10
PROMPTS = {
    "A": "Be kind.Hello!",
    "B": "Be kind.Why so?",
    "C": "A stranger came",
    "D": "Be kind.Why so?",
    "E": "No room for me?",
}
"""One token per character. A and B share eight of them, two blocks; D repeats B."""
REPLY = "Hi."
"""What A generates: two tokens fill its last block, the third needs a new one."""


class BlockState(TypedDict):
    """One physical block. `tokens` is what its memory holds, stale text of free blocks included."""

    id: int
    ref_cnt: int
    hash: str | None
    is_null: bool
    tokens: str


class Frame(TypedDict):
    """The whole cache after one call. `hits` are the blocks a lookup found, else empty."""

    call: str
    returns: str
    say: str
    blocks: list[BlockState]
    free_queue: list[int]
    index: dict[str, list[int]]
    tables: dict[str, list[int]]
    changed: list[int]
    hits: list[int]


class Film(TypedDict):
    """A title, the two sizes, and the frames in order. JSON-able."""

    title: str
    block_size: int
    num_blocks: int
    frames: list[Frame]


class _Camera:
    """Drives one manager and takes a frame after each call."""

    def __init__(self, block_pool: Callable[[int, bool], BlockPool]) -> None:
        self.kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, block_pool=block_pool)
        self.requests: dict[str, Request] = {}
        self.frames: list[Frame] = []
        self._memory = [""] * NUM_BLOCKS  # what the runner would have written into each block
        self._names: dict[int, str] = {}  # hash -> h1, h2, ... in order of first appearance

    def take(self, call: str, returns: str, say: str, hits: list[int] | None = None) -> None:
        """Append a frame of the present state."""
        pool = self.kv.block_pool
        index = {
            self._name(value): sorted(holders)
            for value, holders in pool.cached_block_hash_to_block.items()
        }
        blocks: list[BlockState] = [
            {
                "id": block.block_id,
                "ref_cnt": block.ref_cnt,
                "hash": None if block.block_hash is None else self._name(block.block_hash),
                "is_null": block.is_null,
                "tokens": self._memory[block.block_id],
            }
            for block in pool.blocks
        ]
        queue = [block.block_id for block in pool.free_queue.get_all_free_blocks()]
        changed: list[int] = []
        if self.frames:
            last = self.frames[-1]
            was_free, is_free = set(last["free_queue"]), set(queue)
            changed = [
                block["id"]
                for before, block in zip(last["blocks"], blocks, strict=True)
                if before != block or (block["id"] in was_free) != (block["id"] in is_free)
            ]
        tables = {name: self.kv.get_block_ids(name) for name in sorted(self.kv.req_to_blocks)}
        self.frames.append(
            Frame(
                call=call, returns=returns, say=say, blocks=blocks, free_queue=queue,
                index=index, tables=tables, changed=changed, hits=hits or [],
            )
        )  # fmt: skip

    def look_up(self, name: str, say: Callable[[list[int]], str]) -> list[KVCacheBlock]:
        """Create request `name` and ask for its cached prefix."""
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        request = Request(name, list(PROMPTS[name].encode()), params)
        self.requests[name] = request
        hits, num_cached = self.kv.get_computed_blocks(request)
        ids = [block.block_id for block in hits]
        self.take(f"get_computed_blocks({name})", f"{ids}, {num_cached}", say(ids), ids)
        return hits

    def admit(
        self, name: str, hits: list[KVCacheBlock], say: Callable[[list[int] | None], str]
    ) -> None:
        """Allocate the whole prompt of `name` on top of its hits, as the scheduler does."""
        request = self.requests[name]
        request.num_computed_tokens = num_cached = len(hits) * BLOCK_SIZE
        num_new = request.num_tokens - num_cached
        ids = self._allocate(request, num_new, hits)
        adopted = f", {[block.block_id for block in hits]}" if hits else ""
        self.take(f"allocate_slots({name}, {num_new}{adopted})", str(ids), say(ids))

    def decode(self, name: str, character: str, say: Callable[[list[int] | None], str]) -> None:
        """One decode step: the token sampled last gets its slot."""
        request = self.requests[name]
        request.append_output_token(ord(character))
        ids = self._allocate(request, 1, None)
        self.take(f"allocate_slots({name}, 1)", str(ids), say(ids))

    def free(self, name: str, say: Callable[[list[int]], str]) -> None:
        """The request ends."""
        self.kv.free(self.requests.pop(name))
        queue = [block.block_id for block in self.kv.block_pool.free_queue.get_all_free_blocks()]
        self.take(f"free({name})", "None", say(queue))

    def _allocate(
        self, request: Request, num_new: int, hits: list[KVCacheBlock] | None
    ) -> list[int] | None:
        """`allocate_slots`, then the writes of the step it stands for."""
        new = self.kv.allocate_slots(request, num_new, hits)
        if new is None:
            request.num_computed_tokens = 0
            return None
        text = bytes(request.all_token_ids).decode()
        first = request.num_computed_tokens // BLOCK_SIZE
        table = self.kv.get_block_ids(request.request_id)
        for position, block_id in enumerate(table[first:], start=first):
            self._memory[block_id] = text[position * BLOCK_SIZE : (position + 1) * BLOCK_SIZE]
        request.num_computed_tokens += num_new
        return [block.block_id for block in new]

    def _name(self, block_hash: int) -> str:
        return self._names.setdefault(block_hash, f"h{len(self._names) + 1}")


def pool_film(block_pool: Callable[[int, bool], BlockPool] = BlockPool) -> Film:
    """Record the story of ten blocks.

    Cold prefill of A; B hits A's first two blocks; A decodes across a block boundary; A ends; B
    ends; a stranger takes blocks from the front of the queue; D revives B's prefix out of the
    queue; E does not fit and leaves no trace.

    Args:
        block_pool: the pool to film, `mini_vllm`'s unless you pass your own class.

    Returns:
        The film. Frame 0 is the empty pool; every later frame follows one call.

    Raises:
        Whatever a broken pool raises on the way.
    """
    camera = _Camera(block_pool)
    usable = camera.kv.block_pool.get_num_free_blocks()
    camera.take(
        "BlockPool(10)",
        "",
        f"Ten blocks of {BLOCK_SIZE} tokens; block 0 is the null block, so {usable} can be handed "
        "out, in id order.",
    )
    hits = camera.look_up("A", lambda ids: "The index is empty, so nothing of A is cached.")
    camera.admit(
        "A",
        hits,
        lambda ids: (
            f"A gets blocks {_ids(ids)}; the three full ones are hashed and enter the "
            "index at once, the partial one does not."
        ),
    )
    hits = camera.look_up(
        "B",
        lambda ids: (
            f"B starts with the same eight tokens: blocks {_ids(ids)} are hits, and a "
            "lookup changes nothing."
        ),
    )
    camera.admit(
        "B",
        hits,
        lambda ids: (
            f"The hits are touched, so their ref_cnt is 2; only blocks {_ids(ids)} are "
            "new, and they are B's alone."
        ),
    )
    camera.decode(
        "A",
        REPLY[0],
        lambda ids: "A's new token fits into its last block: the answer is [], success.",
    )
    camera.decode(
        "A",
        REPLY[1],
        lambda ids: "A's last block is full now, so it gets a hash and enters the index.",
    )
    camera.decode(
        "A", REPLY[2], lambda ids: f"A crosses a block boundary and takes block {_ids(ids)}."
    )
    camera.free(
        "A",
        lambda queue: (
            "A ends and its table is released tail first; the two shared blocks drop to "
            "ref_cnt 1 and stay out of the queue."
        ),
    )
    camera.free(
        "B",
        lambda queue: (
            f"B ends, tail first too: every block is free, block {queue[-1]}, the head of "
            "the prefix, is last in the queue, and every hash is kept."
        ),
    )
    hits = camera.look_up("C", lambda ids: "A stranger shares nothing: no hit.")
    camera.admit(
        "C",
        hits,
        lambda ids: (
            f"It takes {_ids(ids)} from the front: two never used, then A's tail, whose "
            "cached block is evicted only now."
        ),
    )
    hits = camera.look_up(
        "D",
        lambda ids: f"D repeats B's prompt: blocks {_ids(ids)} are free, and still hits.",
    )
    camera.admit(
        "D",
        hits,
        lambda ids: (
            f"The hits leave the queue, out of its middle and off its end, and keep their "
            f"hashes; block {_ids(ids)} comes from the front and loses its own."
        ),
    )
    hits = camera.look_up("E", lambda ids: "E shares nothing either.")
    camera.admit(
        "E",
        hits,
        lambda ids: "E needs four blocks and one is free: None, and not a single count has moved.",
    )
    return Film(
        title="Ten blocks, five requests",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        frames=camera.frames,
    )


def _ids(ids: list[int] | None) -> str:
    """Ids as words: "5", "1 and 2", "1, 2 and 5"."""
    words = [str(block_id) for block_id in ids or ()]
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]])) or "none"


if __name__ == "__main__":
    print(json.dumps(pool_film(), indent=1))

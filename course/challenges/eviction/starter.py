"""eviction: which blocks a full prefix cache gives up.

A trace gives for each request the ids of its prompt's blocks, in order; equal ids are equal
prefixes, as in the traces that Mooncake published. Requests come one after the other. What leads a
prompt and is cached is a hit. All its blocks are cached afterwards, and others have to go.

`Answer.evict(blocks, needed)` gets the prompt's block ids and how many cached blocks must go, and
returns that many ids, each cached and none of the prompt's own. Every request calls it, also with
`needed` 0. A block in the middle of a prompt counts only if all blocks before it are hits.

The score is the number of hits: more are better. An id that is not cached, or too few, score
nothing.

vLLM's number is that of its own block pool: the block that was released longest ago goes first, of
one request the last block first.
"""


class Answer:
    """First in, first out."""

    def __init__(self, setup):
        """Begin with an empty cache.

        Args:
            setup: {"capacity": blocks that fit}.
        """
        self.cached = []

    def evict(self, blocks, needed):
        """`needed` ids of cached blocks that are not in `blocks`, a list."""
        own = set(blocks)
        gone = [block for block in self.cached if block not in own][:needed]
        left = set(gone)
        self.cached = [block for block in self.cached if block not in left]
        inside = set(self.cached)
        self.cached += [block for block in blocks if block not in inside]
        return gone

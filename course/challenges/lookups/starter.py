"""lookups: how much of a prompt is cached, with few looks at the index.

Before a request is scheduled, the engine asks the prefix cache's index for the prompt's blocks, one
hash after the other, until one is missing. You answer the same with fewer looks.

`Answer.hits(blocks)` gets the hashes of a prompt's blocks, in order, and returns how many of them
lead the prompt and are cached. `cached(block)` looks one hash up. Two things always hold: a block
is cached only while every block before it in its prompt is, and prompts are conversations that come
back longer, under system prompts that many share. Other clients use the same cache: blocks appear
and disappear between two prompts of yours.

The score is the number of looks: fewer are better. A wrong count scores nothing.

vLLM's number is that of its own loop, which looks at every block up to the first that is missing.
"""


class Answer:
    """Looks at every block, even behind the first that is missing."""

    def __init__(self, setup, cached):
        """Begin.

        Args:
            setup: {}.
            cached: cached(block) says whether a block of the prompt at hand is cached.
        """
        self.cached = cached

    def hits(self, blocks):
        """The number of leading blocks that are cached, 0 to len(blocks)."""
        found = [self.cached(block) for block in blocks]
        return found.index(False) if False in found else len(blocks)

"""sizes: which sizes of a CUDA graph to capture for your traffic.

A decode step runs on the smallest captured size that holds its batch. The difference is padding:
tokens that are computed for nothing. Each size costs memory and time at the start, so their number
is bounded. vLLM captures the same sizes whatever the traffic. You have seen yours.

`Answer.sizes()` returns the sizes: at most `most` whole numbers from 1 to `max_num_seqs`, which has
to be among them, since no batch is larger. The traffic goes on as it was: tenants who each keep
some requests running, who come and go, and now and then a crowd.

The score is the padding of the steps that come later, in tokens: fewer are better. Too many sizes,
or none for the largest batch, score nothing.

vLLM's number is that of its default ladder, which has `most` sizes up to `max_num_seqs`.
"""


class Answer:
    """Powers of two, whatever the traffic."""

    def __init__(self, setup):
        """Begin.

        Args:
            setup: {"past": decoding requests of each step so far, "most": how many sizes there may
                be, "max_num_seqs": the largest batch}.
        """
        self.largest = setup["max_num_seqs"]

    def sizes(self):
        """The sizes to capture, in any order."""
        return [2**power for power in range(10) if 2**power < self.largest] + [self.largest]

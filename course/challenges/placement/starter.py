"""placement: experts on ranks so that tokens travel little.

In expert parallelism each rank holds some experts, and a token's hidden state is sent to every rank
that holds one of its experts, once per rank, and not to the rank where it is. Which experts serve
together, and for whose tokens, is not random.

`Answer(setup)` gets tokens that were routed: for each the rank where it is and its experts.
`Answer.place()` returns the rank of each expert, the same number of experts on every rank. Then
other tokens of the same traffic are routed.

The score is the bytes sent, 4,096 for each token and rank: fewer are better.

vLLM's number is that of its linear placement: the first experts on rank 0, and so on.
"""


class Answer:
    """Shares the work: experts that serve together go to different ranks."""

    def __init__(self, setup):
        """Take the traffic.

        Args:
            setup: {"ranks", "experts": how many, "tokens": [[rank, [expert, ...]], ...]}.
        """
        self.setup = setup

    def place(self):
        """The rank of each expert, a list."""
        ranks, experts = self.setup["ranks"], self.setup["experts"]
        place = []
        for expert in range(experts):
            shared = [0] * ranks
            for _, chosen in self.setup["tokens"]:
                if expert in chosen:
                    for other in chosen:
                        if other < expert:
                            shared[place[other]] += 1
            open_ranks = [r for r in range(ranks) if place.count(r) < experts // ranks]
            place.append(min(open_ranks, key=lambda r: shared[r]))
        return place

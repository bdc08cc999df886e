"""rebalance: experts that follow their load, with few moves.

Ranks hold copies of experts, `slots` each; an expert's load is split evenly among its copies, two
copies on one rank count twice there. Every so often the loads have changed, and a new placement is
made. A copy that a rank did not hold before is sent to it, which is a move.

`Answer(setup)` gets the first placement. `Answer.rebalance(loads, limit)` gets the new loads and
returns a placement: for each rank a list of its `slots` experts. Every expert is somewhere. The
load of the busiest rank must not be over `limit`, a fraction `[numerator, denominator]`: 5 % above
what vLLM's placement reaches.

The score is the number of moves: fewer are better. A placement over the limit scores nothing.

vLLM's number is that of its EPLB policy, which places everything anew from the loads.
"""

from fractions import Fraction


class Answer:
    """Copies what is hottest, and puts the heaviest copy on the lightest rank, each time anew.

    Each time another rank is the first, so that none gets the hottest expert always.
    """

    def __init__(self, setup):
        """Take the first placement.

        Args:
            setup: {"ranks", "slots", "experts": how many, "placement": experts of each rank}.
        """
        self.setup = setup
        self.first = 0

    def rebalance(self, loads, limit):
        """The experts of each rank.

        Args:
            loads: of each expert, whole numbers.
            limit: [numerator, denominator], the most that a rank's load may be.
        """
        ranks, slots = self.setup["ranks"], self.setup["slots"]
        copies = [1] * len(loads)
        for _ in range(ranks * slots - len(loads)):
            hottest = max(range(len(loads)), key=lambda e: Fraction(loads[e], copies[e]))
            copies[hottest] += 1
        each = [Fraction(load, count) for load, count in zip(loads, copies, strict=True)]
        items = [e for e in range(len(loads)) for _ in range(copies[e])]
        items.sort(key=lambda e: -each[e])
        placed = [[] for _ in range(ranks)]
        weights = [Fraction(0)] * ranks
        self.first += 1
        order = [(self.first + r) % ranks for r in range(ranks)]
        for expert in items:
            open_ranks = [r for r in order if len(placed[r]) < slots]
            rank = min(open_ranks, key=lambda r: weights[r])
            placed[rank].append(expert)
            weights[rank] += each[expert]
        return placed

"""Starts from who asks most, then exchanges pairs of experts while that saves."""


class Answer:
    def __init__(self, setup):
        self.ranks, self.experts = setup["ranks"], setup["experts"]
        counts = {}
        for rank, experts in setup["tokens"]:
            key = (rank, tuple(sorted(experts)))
            counts[key] = counts.get(key, 0) + 1
        self.tokens = sorted(counts.items())
        self.of = [[] for _ in range(self.experts)]
        for token in self.tokens:
            for expert in token[0][1]:
                self.of[expert].append(token)

    def _cost(self, tokens, place):
        return sum(
            count * len({place[e] for e in experts} - {rank}) for (rank, experts), count in tokens
        )

    def place(self):
        asked = [[0] * self.ranks for _ in range(self.experts)]
        for (rank, experts), count in self.tokens:
            for expert in experts:
                asked[expert][rank] += count
        room = [self.experts // self.ranks] * self.ranks
        place = [-1] * self.experts
        wishes = sorted(
            (-asked[e][r], e, r) for e in range(self.experts) for r in range(self.ranks)
        )
        for _, expert, rank in wishes:
            if place[expert] < 0 and room[rank]:
                place[expert] = rank
                room[rank] -= 1
        better = True
        while better:
            better = False
            for a in range(self.experts):
                for b in range(a):
                    if place[a] == place[b]:
                        continue
                    before = self._cost(self.of[a], place) + self._cost(self.of[b], place)
                    place[a], place[b] = place[b], place[a]
                    if self._cost(self.of[a], place) + self._cost(self.of[b], place) < before:
                        better = True
                    else:
                        place[a], place[b] = place[b], place[a]
        return place

"""Keeps what is placed, and changes single slots and pairs until the limit holds."""

from fractions import Fraction


class Answer:
    def __init__(self, setup):
        self.slots = setup["slots"]
        self.placed = [list(row) for row in setup["placement"]]

    def rebalance(self, loads, limit):
        limit = Fraction(*limit)
        # Everything anew, on the ranks that hold most of it: what small changes are compared with.
        anew = self._anew(loads)
        kept = self._mended([list(row) for row in self.placed], loads, limit)
        choices = [each for each in (kept, anew) if each is not None]
        self.placed = min(choices, key=self._moves)
        return self.placed

    def _moves(self, placed):
        total = 0
        for old, new in zip(self.placed, placed, strict=True):
            left = list(old)
            for expert in new:
                if expert in left:
                    left.remove(expert)
                else:
                    total += 1
        return total

    def _weights(self, placed, loads):
        copies = [0] * len(loads)
        for row in placed:
            for expert in row:
                copies[expert] += 1
        each = [Fraction(load, max(1, count)) for load, count in zip(loads, copies, strict=True)]
        return [sum(each[e] for e in row) for row in placed], each, copies

    def _mended(self, placed, loads, limit):
        for _ in range(30):
            weights, _, copies = self._weights(placed, loads)
            if max(weights) <= limit:
                return placed
            best = None
            top = max(range(len(placed)), key=lambda r: weights[r])

            def consider(key, rows):
                nonlocal best
                if best is None or key < best[0]:
                    best = (key, rows)

            for i, a in enumerate(placed[top]):
                for other in range(len(placed)):
                    if other == top:
                        continue
                    for j, b in enumerate(placed[other]):
                        if a == b:
                            continue
                        # exchange, two moves
                        rows = {
                            top: self._with(placed[top], i, b),
                            other: self._with(placed[other], j, a),
                        }
                        consider(self._key(placed, rows, loads, limit, 2), rows)
                        if copies[b] > 1:  # a's copy replaces one of b
                            rows = {other: self._with(placed[other], j, a)}
                            consider(self._key(placed, rows, loads, limit, 1), rows)
            for row, experts in best[1].items():
                placed[row] = experts
        return None

    def _with(self, row, at, expert):
        return [*row[:at], expert, *row[at + 1 :]]

    def _key(self, placed, rows, loads, limit, moves):
        trial = [rows.get(r, row) for r, row in enumerate(placed)]
        weights, _, _ = self._weights(trial, loads)
        over = sum((max(0, w - limit) for w in weights), Fraction(0))
        return (over * moves if over else Fraction(-1, moves)), moves

    def _anew(self, loads):
        ranks = len(self.placed)
        copies = [1] * len(loads)
        for _ in range(ranks * self.slots - len(loads)):
            copies[max(range(len(loads)), key=lambda e: Fraction(loads[e], copies[e]))] += 1
        each = [Fraction(load, count) for load, count in zip(loads, copies, strict=True)]
        items = sorted(
            (e for e in range(len(loads)) for _ in range(copies[e])), key=lambda e: -each[e]
        )
        placed, weights = [[] for _ in range(ranks)], [Fraction(0)] * ranks
        for expert in items:
            rank = min(
                (r for r in range(ranks) if len(placed[r]) < self.slots), key=lambda r: weights[r]
            )
            placed[rank].append(expert)
            weights[rank] += each[expert]
        free, rows = set(range(ranks)), [None] * ranks
        pairs = sorted(
            (-sum(1 for e in set(placed[a]) if e in self.placed[b]), a, b)
            for a in range(ranks)
            for b in range(ranks)
        )
        used = set()
        for _, a, b in pairs:
            if a not in used and b in free:
                rows[b] = placed[a]
                used.add(a)
                free.remove(b)
        return rows

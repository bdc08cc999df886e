"""Looks first behind the blocks that earlier prompts had, then gallops, then halves."""


class Answer:
    def __init__(self, setup, cached):
        self.cached = cached
        self.seen = set()

    def hits(self, blocks):
        guess = 0
        while guess < len(blocks) and blocks[guess] in self.seen:
            guess += 1
        low, high = 0, len(blocks)  # the answer is from low to high
        step = 1
        if guess and not self.cached(blocks[guess - 1]):
            high = guess - 1
        else:
            low = guess
            while low < high:
                at = min(low + step, high)
                if not self.cached(blocks[at - 1]):
                    high = at - 1
                    break
                low, step = at, 2 * step
        while low < high:
            middle = (low + high + 1) // 2
            if self.cached(blocks[middle - 1]):
                low = middle
            else:
                high = middle - 1
        self.seen.update(blocks)
        return low

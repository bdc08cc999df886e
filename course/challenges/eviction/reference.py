"""Blocks of prompts that begin as no other did go first, then the least recently used."""


class Answer:
    def __init__(self, setup):
        self.used = {}  # block: (the first block of its prompt, when, minus its place)
        self.begun = {}  # first block: how many prompts began with it
        self.now = 0

    def evict(self, blocks, needed):
        self.now += 1
        own = set(blocks)
        self.begun[blocks[0]] = self.begun.get(blocks[0], 0) + 1

        def worth(block):
            first, when, place = self.used[block]
            return self.begun[first] > 1, when, place

        gone = sorted((block for block in self.used if block not in own), key=worth)[:needed]
        for block in gone:
            del self.used[block]
        for place, block in enumerate(blocks):
            self.used[block] = (blocks[0], self.now, -place)
        return gone

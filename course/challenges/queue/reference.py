"""A sorted list: a place is found by halving, and taking or leaving compares nothing."""


class Answer:
    def __init__(self, setup, less):
        self.less = less
        self.waiting = []

    def add(self, ticket):
        low, high = 0, len(self.waiting)
        while low < high:
            middle = (low + high) // 2
            if self.less(ticket, self.waiting[middle]):
                high = middle
            else:
                low = middle + 1
        self.waiting.insert(low, ticket)

    def pop(self):
        return self.waiting.pop(0)

    def remove(self, tickets):
        gone = set(tickets)
        self.waiting = [ticket for ticket in self.waiting if ticket not in gone]

"""queue: a priority queue that compares little.

The scheduler's waiting queue under `--scheduling-policy priority`. Requests arrive, are taken in
order of urgency, come back when they are preempted, and leave in groups when clients give up.

You write `Answer`. Its methods get and give tickets, whole numbers that say nothing about urgency.
Which of two goes first only `less(a, b)` knows. The score is how often you call it: fewer are
better. What `pop` returns must be the most urgent ticket in the queue, or the try scores nothing.

vLLM's number is that of its own `PriorityRequestQueue`, a binary heap that is built anew whenever
requests leave.
"""


class Answer:
    """The queue."""

    def __init__(self, setup, less):
        """Begin empty.

        Args:
            setup: {}.
            less: less(a, b) says whether ticket a goes before ticket b. No two are equal.
        """
        self.less = less
        self.waiting = []

    def add(self, ticket):
        """A request arrives, or comes back."""
        self.waiting.append(ticket)

    def pop(self):
        """Take the most urgent ticket out and return it. The queue is not empty."""
        first = self.waiting[0]
        for ticket in self.waiting[1:]:
            if self.less(ticket, first):
                first = ticket
        self.waiting.remove(first)
        return first

    def remove(self, tickets):
        """These leave, a list of tickets that are in the queue."""
        for ticket in tickets:
            self.waiting.remove(ticket)

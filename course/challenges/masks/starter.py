"""masks: the words of a batch's grammar masks that are written anew.

Each step every request of a batch has a mask over the vocabulary, one bit a token, in words of 32
bits. The masks lie in a table with a row for each request. The table keeps what was written in the
step before; a step writes words, and the rows that the batch uses must then hold its masks.

`Answer.step(names, masks)` gets the requests of this step and their masks, a list of words each. It
returns `{"rows": [...], "writes": [[row, word, value], ...]}`: `rows` names the requests in the
order of their rows, the first rows of the table, and each write puts a value into the table.
Requests enter and leave; between two steps of a request its mask changes in few words or in many.

The score is the bytes written, four for each write: fewer are better. A row that does not hold its
request's mask scores nothing.

vLLM's number is that of its own manager, which fills the row of every request in every step.
"""


class Answer:
    """Writes the whole table, used or not."""

    def __init__(self, setup):
        """Begin; the table holds zeros.

        Args:
            setup: {"rows": of the table, "words": per row}.
        """
        self.setup = setup

    def step(self, names, masks):
        """Rows and writes of one step.

        Args:
            names: request ids, at most as many as rows.
            masks: of each, `words` whole numbers from 0 to 2**32 - 1.
        """
        empty = [0] * self.setup["words"]
        table = [*masks, *[empty] * (self.setup["rows"] - len(masks))]
        writes = [
            [row, word, value] for row, mask in enumerate(table) for word, value in enumerate(mask)
        ]
        return {"rows": names, "writes": writes}

"""Knows the table; each row goes to the request whose mask differs least from it, and only what
differs is written."""


class Answer:
    def __init__(self, setup):
        self.table = [[0] * setup["words"] for _ in range(setup["rows"])]

    def step(self, names, masks):
        count = len(names)
        costs = sorted(
            (sum(a != b for a, b in zip(mask, self.table[row], strict=True)), number, row)
            for number, mask in enumerate(masks)
            for row in range(count)
        )
        row_of, taken = {}, set()
        for _, number, row in costs:
            if number not in row_of and row not in taken:
                row_of[number] = row
                taken.add(row)
        rows, writes = [""] * count, []
        for number, row in row_of.items():
            rows[row] = names[number]
            for word, value in enumerate(masks[number]):
                if self.table[row][word] != value:
                    self.table[row][word] = value
                    writes.append([row, word, value])
        return {"rows": rows, "writes": writes}

"""Bytes written into a table of grammar masks. vLLM's: `vllm/v1/structured_output/__init__.py:204`
`StructuredOutputManager.grammar_bitmask`, which fills a row for each request in each step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from course.challenges.judge import Player, Wrong, whole, wholes

TITLE = "The words of grammar masks that are written anew"
UNIT = "bytes"
FEWER = True
MARKS = (("vLLM's", 1, 1), ("bronze", 1, 2), ("silver", 1, 4))

ROWS, WORDS, STEPS = 12, 32, 50
FULL = 2**32 - 1


def workload(seed: str) -> list[list[list[Any]]]:
    """Per step the requests, `[name, mask]` each: automata whose states have masks."""
    rng = random.Random(seed)
    grammars = []
    for _ in range(4):
        base = [rng.choice((0, 0, 0, rng.randrange(FULL))) for _ in range(WORDS)]
        states = [[FULL] * WORDS]  # a free text
        for _ in range(6):
            state = list(base)
            for word in rng.sample(range(WORDS), rng.choice((1, 2, 3, 12))):
                state[word] = rng.choice((0, FULL, rng.randrange(FULL)))
            states.append(state)
        grammars.append(states)
    live: list[list[int]] = []  # name, grammar, state, steps left
    steps, name = [], 0
    for _ in range(STEPS):
        live = [request for request in live if request[3]]
        while len(live) < ROWS and (len(live) < 3 or rng.randrange(2)):
            live.append([name, rng.randrange(4), rng.randrange(7), rng.randrange(3, 20)])
            name += 1
        for request in live:
            request[3] -= 1
            if rng.randrange(5) >= 2:
                request[2] = rng.randrange(7)
        steps.append([[f"r{n}", grammars[g][s]] for n, g, s, _ in live])
    return steps


def play(answer: Callable[..., Player], load: list[list[list[Any]]]) -> int:
    """Bytes written."""
    table = [[0] * WORDS for _ in range(ROWS)]
    player = answer({"rows": ROWS, "words": WORDS})
    count = 0
    for number, step in enumerate(load):
        masks = {each[0]: each[1] for each in step}
        came = player.call("step", list(masks), list(masks.values()))
        if not isinstance(came, dict) or came.keys() != {"rows", "writes"}:
            raise Wrong(f"step {number}: need a dict of rows and writes")
        rows, writes = came["rows"], came["writes"]
        if not isinstance(rows, list) or sorted(map(str, rows)) != sorted(masks):
            raise Wrong(f"step {number}: rows are not the {len(masks)} requests, each once")
        if not isinstance(writes, list):
            raise Wrong(f"step {number}: writes must be a list")
        for each in writes:
            if not isinstance(each, list) or len(each) != 3:
                raise Wrong(f"step {number}: a write is {str(each)[:60]}, need [row, word, value]")
            row, word, value = wholes("a write", each, 0, FULL, 3)
            table[whole("row", row, 0, ROWS - 1)][whole("word", word, 0, WORDS - 1)] = value
        for row, name in enumerate(rows):
            if table[row] != masks[name]:
                raise Wrong(f"step {number}: row {row} does not hold the mask of {name}")
        count += 4 * len(writes)
    return count


def vllm(load: list[list[list[Any]]]) -> int:
    """A whole row for each request of each step."""
    return sum(4 * WORDS * len(step) for step in load)


def real() -> Callable[[list[list[list[Any]]]], int]:
    """The same by the pinned tree's own manager, with grammars that count what they fill."""
    from types import SimpleNamespace

    import torch
    from vllm.v1.structured_output import StructuredOutputManager

    def written(load: list[list[list[Any]]]) -> int:
        filled: list[int] = []

        class Grammar:
            def __init__(self, mask: list[int]) -> None:
                self.mask = torch.tensor(mask, dtype=torch.int64).to(torch.int32)

            def is_terminated(self) -> bool:
                return False

            def fill_bitmask(self, bitmask: Any, index: int) -> None:
                bitmask[index] = self.mask
                filled.append(4 * self.mask.numel())

        manager = StructuredOutputManager.__new__(StructuredOutputManager)
        manager._grammar_bitmask = torch.zeros((ROWS, WORDS), dtype=torch.int32)
        manager._full_mask = torch.tensor(-1, dtype=torch.int32)
        manager.fill_bitmask_parallel_threshold = 128
        manager.vllm_config = SimpleNamespace(speculative_config=None)
        manager.should_fill_bitmask = lambda request: True
        for step in load:
            requests = {
                name: SimpleNamespace(
                    structured_output_request=SimpleNamespace(grammar=Grammar(mask))
                )
                for name, mask in step
            }
            manager.grammar_bitmask(requests, list(requests), {})
        return sum(filled)

    return written

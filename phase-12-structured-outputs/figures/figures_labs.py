"""The figures of the labs of phase 12: what their reference solutions say, drawn.

`course figures 12` writes them. No upstream counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, Svg
from mini_vllm.structured_output.compiler import grammar_of
from mini_vllm.structured_output.machine import Machine
from mini_vllm.structured_output.masks import allocate_bitmask, unpack
from mini_vllm.structured_output.matcher import Matcher
from mini_vllm.structured_output.network import compile_network
from mini_vllm.structured_output.vocabulary import Vocabulary

LABS = Path(__file__).resolve().parents[1] / "labs"
BATCHES = 40


def solution(folder: str) -> ModuleType:
    """The reference solution of a lab as a module of its own."""
    return load_module(LABS / folder / "solution.py")


def table() -> str:
    """Lab 01: a table of states, the tokens that live in each, and one row."""
    lab = solution("lab-01-regex-fsm-mask")
    vocab = dict(enumerate(["0", "x", "0x", "1", "a", "ff", "1x", "q", "@", "zz"]))
    eos = len(vocab)
    fsm = lab.compile_pattern("0x[0-9a-f]+")
    svg = Svg(
        780, 300, "The table of 0x[0-9a-f]+ and the tokens that live in each state",
        "Four states in a row: 0 leads to the second, x to the third, a digit or a to f to the "
        "fourth, which leads to itself and accepts. Below each state the eleven tokens, those that "
        "may follow in colour; below them the packed row.",
    )  # fmt: skip
    width = 186
    for state, row in sorted(fsm.transitions.items()):
        x = 16 + state * (width + 4)
        accepts = state in fsm.accepting
        svg.box(x + 20, 14, 106, 34, [f"state {state}"], fill=GREEN if accepts else GREY)
        edges = "".join(sorted(row))
        word = edges if len(edges) == 1 else "0-9 a-f"
        if state + 1 in row.values():
            svg.line(x + 128, 31, x + width + 20, 31, arrow=True)
            svg.text(x + 160, 24, word, size=12, anchor="middle")
        if state in row.values():
            svg.text(x + 132, 28, "and again", size=12)
            svg.text(x + 132, 44, word, size=12)
        legal = lab.allowed_tokens(fsm, state, vocab) | ({eos} if accepts else set())
        for token in range(eos + 1):
            column, line = token % 4, token // 4
            text = vocab.get(token, "EOS")
            fill = BLUE if token in legal else None
            place = (x + column * 44, 70 + line * 46)
            if fill:
                svg.cell(*place, 40, text, fill)
            else:
                svg.text(place[0] + 20, place[1] + 20, text, size=12, anchor="middle", css="soft")
        (word_,) = lab.pack_row(legal, eos + 1).tolist()
        svg.text(x + 4, 232, f"row [{word_}]", size=13, bold=True)
        bits = format(word_, f"0{eos + 1}b")
        svg.text(x + 4, 252, f"bits {bits}", size=12, css="soft")
    said = "A token is legal when all of its characters live: 1x begins well after 0x, and dies."
    svg.text(16, 284, said, size=12, css="soft")
    return svg.render()


def depth() -> str:
    """Lab 03: mode and depth while a text is read."""
    lab = solution("lab-03-json-pushdown")
    text = '{"a":{"b":1},"c":0}'
    machine = lab.JsonMachine()
    svg = Svg(
        780, 330, "Mode and depth while a nested object is read",
        "The depth rises with each opening brace and falls with each closing one. Boxes on top "
        "hold the characters, bars their depth; below, what may follow 1 outside of an object and "
        "inside of one: the mode is the same and the symbols are not.",
    )  # fmt: skip
    colors = [GREY, BLUE, ORANGE, PURPLE]
    left, width, floor = 92, 35, 176
    svg.text(16, 34, "read", size=13, bold=True)
    svg.text(16, 130, "depth", size=13, bold=True)
    for place, char in enumerate(text):
        machine.feed(char)
        x = left + place * width
        svg.cell(x, 16, width - 4, char, colors[machine.depth])
        height = 44 * machine.depth
        if height:
            svg.rect(x, floor - height, width - 4, height, fill=colors[machine.depth])
        label = str(machine.depth)
        svg.text(x + (width - 4) / 2, floor + 18, label, size=12, anchor="middle", css="soft")
    svg.line(left, floor, left + len(text) * width, floor)
    for line, prefix in enumerate(("1", '{"a":1')):
        other = lab.JsonMachine()
        for char in prefix:
            other.feed(char)
        y = 226 + line * 50
        svg.text(16, y + 20, f"after {prefix}", size=13, bold=True)
        svg.box(140, y, 170, 32, [f"mode {other.mode}, depth {other.depth}"], fill=colors[line])
        rest = sorted(other.allowed() - lab.DIGITS)
        words = "digits and " + "  ".join("EOS" if each == lab.EOS else each for each in rest)
        svg.text(330, y + 20, words, size=13)
    return svg.render()


def power() -> str:
    """Lab 03: what 40 batches of each kind of fuzz test find."""
    lab = solution("lab-03-json-pushdown")

    class LeadingZeros(lab.JsonMachine):  # type: ignore[misc, name-defined]
        """Takes 0123."""

        def feed(self, symbol: str) -> None:
            """As the machine, and a 0 is a digit like any other."""
            super().feed(symbol)
            if self.mode == "int_zero":
                self.mode = "int"

    fixed, redrawn = (
        [lab.fuzz(LeadingZeros, redraw, seed) for seed in range(BATCHES)]
        for redraw in (False, True)
    )
    svg = Svg(
        780, 236, "Bad texts that 40 batches of 50 generations find in a machine that takes 0123",
        f"With one random order of preference for each generation {sum(map(bool, fixed))} batches "
        f"find one, with scores drawn anew for every token {sum(map(bool, redrawn))}.",
    )  # fmt: skip
    scale = 88 / max(redrawn)
    for row, (name, found, color) in enumerate(
        (("one order for a run", fixed, GREY), ("anew for each token", redrawn, GREEN))
    ):
        floor = 70 + row * 130
        svg.text(16, floor - 40, name, size=13, bold=True)
        caught = sum(map(bool, found))
        svg.text(16, floor - 20, f"{caught} of {len(found)} batches", size=13)
        mean = sum(found) / len(found)
        svg.text(16, floor - 2, f"{mean:.1f} bad texts a batch", size=12, css="soft")
        for batch, count in enumerate(found):
            height = scale * count
            if count:
                svg.rect(220 + batch * 13.6, floor - height, 10, height, fill=color)
        svg.line(220, floor, 220 + BATCHES * 13.6, floor)
    svg.text(
        220, 222, "a bar for each batch of 50 generations, 40 tokens each", size=12, css="soft"
    )
    return svg.render()


def rows() -> str:
    """Lab 04: rows of the bitmask, and the rows of logits that they land on."""
    lab = solution("lab-04-waits-and-rows").GrammarRows()
    regexes = {"b": "yes|no", "a": "[0-9]+x"}
    drafts = {"a": [ord("7"), ord("x")], "c": [ord("q")]}
    order, batch = list(regexes), ["a", "c", "b"]
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)] + [None], [256])
    grammars = {
        name: Matcher(
            Machine(compile_network(grammar_of(("regex", text, False, False)))), vocabulary
        )
        for name, text in regexes.items()
    }
    bitmask = lab.fill_rows(order, grammars, drafts, allocate_bitmask(8, 257))
    svg = Svg(
        780, 330, "Rows of the bitmask and the rows of logits that they land on",
        "On the left four rows in scheduling order: one of b, three of a with its drafts 7 and x, "
        "each with what it allows. On the right six rows of logits in the order a, c, b; lines "
        "lead from each row to its logits; the two of c, which is free, have none.",
    )  # fmt: skip
    colors = {"a": BLUE, "b": ORANGE, "c": GREY}
    svg.text(16, 26, "bitmask, in scheduling order b, a", size=13, bold=True)
    svg.text(540, 26, "logits, in batch order a, c, b", size=13, bold=True)
    places: list[tuple[str, list[str]]] = []
    for name in order:
        said = [chr(token) for token in drafts.get(name, ())]
        places += [(name, said[:count]) for count in range(len(said) + 1)]
    for row, (name, said) in enumerate(places):
        y = 48 + row * 44
        bits = unpack(bitmask[row], 257)
        legal = ["EOS" if token == 256 else chr(token) for token in range(257) if bits[token]]
        words = " ".join(legal).replace(" ".join("0123456789"), "0-9")
        after = f" after {''.join(said)}" if said else ""
        svg.cell(16, y, 110, f"{row}: {name}{after}", colors[name])
        svg.text(140, y + 18, f"allows {words}", size=13)
    found = lab.rows_of_logits(batch, order, drafts)
    owners = [name for name in batch for _ in range(1 + len(drafts.get(name, ())))]
    for index, (row, name) in enumerate(zip(found, owners, strict=True)):
        y = 48 + index * 44
        svg.cell(640, y, 110, f"{index}: {name}", colors[name])
        if row is not None:
            svg.line(330, 61 + row * 44, 632, y + 13, arrow=True)
    said_ = "c has no grammar and no row; its draft has logits all the same."
    svg.text(16, 318, said_, size=12, css="soft")
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-01-table.svg": table,
    "lab-03-depth.svg": depth,
    "lab-03-power.svg": power,
    "lab-04-rows.svg": rows,
}

"""The figures of phase 12; `course figures` draws them.

`waits`, `odds` and `allowed` show traces of `mini_vllm` on the shipped model and its machines;
`row`, `rows` and `depth` are what the engine's own functions say; the rest is drawn. No upstream
counterpart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from course.truth.plots import Axes
from mini_vllm import LLM, SamplingParams
from mini_vllm.structured_output import StructuredOutputsParams
from mini_vllm.structured_output.compiler import Compilation, CompiledGrammar
from mini_vllm.structured_output.explain import allowed_bytes, machine_of
from mini_vllm.structured_output.masks import allocate_bitmask, row_of, unpack
from mini_vllm.structured_output.request import constraint_of
from mini_vllm.structured_output.vocabulary import Vocabulary

HEX = StructuredOutputsParams(regex="0x[0-9a-f]+")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
}
TEXT = '{"name": "Ann", "age": 7}'
EOS = 256


# ------------------------------------------------------------------ from traces


@functools.cache
def day() -> list[tuple[list[str], list[str]]]:
    """Of each step: who runs, who waits; b's grammar arrives before step 4, d before step 3."""
    engine = LLM(dtype="float64").llm_engine
    ran: list[list[str]] = []
    engine.observers.append(
        lambda plan: ran.append([r.request_id for r in plan.scheduled_requests])
    )

    def add(name: str, tokens: int, wanted: StructuredOutputsParams | None = None) -> None:
        params = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=wanted is None, structured_outputs=wanted
        )
        engine.add_request("The address is ", params, request_id=name)

    add("a", 6)
    add("b", 4, HEX)
    late = constraint_of(engine.requests["b"])
    compiled, late.compilation = late.compilation, Compilation(late.key, Future())
    add("c", 3)
    steps: list[tuple[list[str], list[str]]] = []
    while len(steps) < 3 or engine.has_unfinished_requests():
        if len(steps) == 2:
            add("d", 3)
        if len(steps) == 3:
            late.compilation.future.set_result(compiled.future.result())
        engine.step()
        steps.append((ran[-1], [r.request_id for r in engine.scheduler.skipped]))
    return steps


def waits() -> str:
    """Who runs and who waits for a grammar, step by step."""
    steps = day()
    first = next(i for i, (runs, _) in enumerate(steps, 1) if "b" in runs)
    svg = Svg(
        780, 210, "One late grammar among four requests",
        f"Four requests over {len(steps)} steps. a, c and d have no grammar and run at once; b "
        f"waits for its grammar until step {first}.",
    )  # fmt: skip
    width = 600 / len(steps)
    for step in range(len(steps)):
        svg.text(160 + (step + 0.5) * width, 26, str(step + 1), anchor="middle", size=13)
    svg.text(16, 26, "step", size=12, css="soft")
    for row, name in enumerate("abcd"):
        y = 38 + row * 36
        svg.text(16, y + 18, f"{name}: {'0x[0-9a-f]+' if name == 'b' else 'free'}", size=14)
        for step, (runs, waiting) in enumerate(steps):
            x = 160 + step * width
            if name in runs:
                svg.cell(x, y, width - 4, "runs", ORANGE if name == "b" else GREY)
            elif name in waiting:
                svg.cell(x, y, width - 4, "waits", RED, opacity=0.2)
    svg.text(16, 200, "c came after b and ran first: the wait is no barrier.", size=12, css="soft")
    return svg.render()


class _Watch:
    """Keeps the rows of logits as they are before a mask."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []

    def validate_drafts(self, request: Any, in_flight: Any, drafts: Any) -> list[int]:
        return list(drafts)

    def failures(self) -> dict[str, str]:
        return {}

    def __call__(self, request: Any, row: np.ndarray) -> np.ndarray:
        self.rows.append(row.copy())
        return row


@functools.cache
def legal_mass() -> list[tuple[str, str, list[float]]]:
    """Of three greedy runs: a name, the text, and the legal tokens' probability at each place."""
    llm, watch = LLM(dtype="float64"), _Watch()
    llm.llm_engine.row_sampler.masks.append(watch)
    found = []
    for prompt, name, wanted in (
        ("The date is ", "date", StructuredOutputsParams(regex="[0-9]{4}-[0-9]{2}-[0-9]{2}")),
        ("Is it full? ", "choice", StructuredOutputsParams(choice=("yes", "no", "maybe"))),
        ("Answer: ", "schema", StructuredOutputsParams(
            json={"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
            disable_any_whitespace=True)),
    ):  # fmt: skip
        watch.rows.clear()
        params = SamplingParams(max_tokens=40, temperature=0, structured_outputs=wanted)
        text = llm.generate(prompt, params)[0].outputs[0].text
        masses = []
        for place, row in zip(allowed_bytes(wanted, text), watch.rows, strict=True):
            mass = np.exp(row - row.max())
            legal = [*place.allowed, *([EOS] if place.may_end else [])]
            masses.append(float(mass[legal].sum() / mass.sum()))
        found.append((name, text, masses))
    return found


def odds() -> str:
    """The legal tokens' mass before the mask."""
    runs = legal_mass()
    svg = Svg(
        780, 330, "What the model would have said anyway",
        "Probability of the legal tokens before the mask at each place of three greedy texts: "
        + "; ".join(f"{text} between {min(m):.3f} and {max(m):.3f}" for _, text, m in runs),
    )  # fmt: skip
    most = max(len(masses) for _, _, masses in runs)
    axes = Axes(svg, (60, 62, 690, 212), (0, most - 1), (0, 1))
    axes.frame(
        "place in the text; the last one of each is EOS", "legal mass before the mask",
        range(most), {i / 4: f"{i / 4:.2f}" for i in range(5)},
    )  # fmt: skip
    for place, ((name, text, masses), color) in enumerate(
        zip(runs, (BLUE, ORANGE, GREEN), strict=True)
    ):
        axes.curve(list(enumerate(masses)), color, width=2.5)
        axes.dots(list(enumerate(masses)), color)
        x = 60 + (0, 220, 400)[place]
        svg.circle(x + 6, 16, 5, fill=color)
        svg.text(x + 18, 21, f"{name}: {text}", size=13)
    return svg.render()


def allowed() -> str:
    """How many bytes may follow, place by place of a JSON text."""
    places = allowed_bytes(StructuredOutputsParams(json=PERSON, disable_any_whitespace=True), TEXT)
    svg = Svg(
        780, 290, "How many bytes may follow, place by place",
        f"{TEXT}: " + ", ".join(str(len(place.allowed)) for place in places)
        + "; the last place allows EOS alone.",
    )  # fmt: skip
    width = 740 / len(places)
    for index, (char, place) in enumerate(zip([*TEXT, "EOS"], places, strict=True)):
        x, count = 20 + index * width, len(place.allowed)
        height = 26 * np.log2(1 + count + place.may_end)
        color = GREY if count + place.may_end == 1 else BLUE
        svg.rect(x + 2, 250 - height, width - 4, height, fill=color, opacity=0.55, radius=2)
        svg.text(x + width / 2, 244 - height, str(count or ""), anchor="middle", size=12)
        size = 10 if len(char) > 1 else 15
        svg.text(x + width / 2, 270, char, anchor="middle", size=size, css="ink mono")
    svg.text(20, 24, "grey: forced; blue: the model chooses; logarithmic", size=12, css="soft")
    return svg.render()


# ------------------------------------------------------------------ what the engine says


def row() -> str:
    """Eleven tokens, three states, three packed rows."""
    words = ["0", "x", "0x", "1", "a", "ff", "1x", "q", "@", "zz"]
    vocabulary = Vocabulary([word.encode() for word in words] + [None], [10])
    machine = machine_of(HEX)
    texts = ("", "0x", "0x1")
    states = [machine.run(machine.initial, text.encode()) for text in texts]
    rows = [row_of(machine, state, vocabulary) for state in states if state is not None]
    svg = Svg(
        780, 216, "States, tokens, bits, a number",
        "; ".join(f"after {t!r} the row is {int(r[0])}" for t, r in zip(texts, rows, strict=True)),
    )  # fmt: skip
    svg.text(16, 30, "token", size=12, css="soft")
    svg.text(16, 54, "bit", size=12, css="soft")
    for token, word in enumerate([*words, "EOS"]):
        svg.text(136 + token * 48, 30, word, anchor="middle", size=14, css="ink mono")
        svg.text(136 + token * 48, 54, str(token), anchor="middle", size=12, css="soft")
    svg.text(700, 54, "the int32", anchor="middle", size=12, css="soft")
    for index, (text, bits) in enumerate(zip(texts, rows, strict=True)):
        y = 68 + index * 46
        svg.text(16, y + 20, f"after {text!r}", size=13)
        for token, legal in enumerate(unpack(bits, 11)):
            color, value = (GREEN, "1") if legal else (GREY, "0")
            svg.cell(115 + token * 48, y, 42, value, color, opacity=0.5 if legal else 0.12)
        svg.text(700, y + 20, str(int(bits[0])), anchor="middle", size=15, bold=True)
    return svg.render()


def rows() -> str:
    """Rows under two drafts, in the order in which they are made."""
    words = [*"0123456789", "x", "q"]
    vocabulary = Vocabulary([word.encode() for word in words] + [None], [12])
    machine = machine_of(StructuredOutputsParams(regex="[0-9]+x"))
    grammar = CompiledGrammar(machine, vocabulary).matcher()
    bitmask = allocate_bitmask(3, vocabulary.size)
    legal = []
    for index, draft in enumerate([7, 10, None]):
        grammar.fill_bitmask(bitmask, index)
        names = [[*words, "EOS"][t] for t in np.flatnonzero(unpack(bitmask[index], 13))]
        legal.append(" ".join(names).replace(" ".join("0123456789"), "0-9"))
        if draft is not None:
            assert grammar.accept_tokens("r", [draft])
    grammar.rollback(2)
    assert grammar.num_accepted == 0
    svg = Svg(
        780, 220, "Three rows for two drafts",
        f"Rows allow {legal[0]}; after draft 7 {legal[1]}; after draft x {legal[2]}. Then two "
        "tokens are taken back.",
    )  # fmt: skip
    svg.text(16, 26, "[0-9]+x, drafts 7 and x", size=13, bold=True)
    for index, said in enumerate(legal):
        x = 30 + index * 262
        svg.box(x, 50, 170, 56, [f"fill row {index}", said], fill=BLUE)
        if index:
            svg.line(x - 88, 78, x - 6, 78, arrow=True)
            svg.text(x - 48, 66, f"read {'7x'[index - 1]}", anchor="middle", size=13)
    svg.polyline([(639, 112), (639, 160), (115, 160)], stroke=ORANGE, width=2)
    svg.line(115, 160, 115, 112, stroke=ORANGE, width=2, arrow=True)
    svg.text(376, 182, "take back 2: only the sampler knows which drafts are true",
             anchor="middle", size=13, fill=ORANGE)  # fmt: skip
    return svg.render()


def depth() -> str:
    """States that nested brackets need, and that a pattern needs."""
    nested = machine_of(StructuredOutputsParams(grammar='root ::= "[" root "]" | "x"'))
    points, flat_points = [], []
    flat = machine_of(StructuredOutputsParams(regex=r"\[+x\]+"))
    for deep in range(1, 33):
        text = b"[" * deep + b"x" + b"]" * deep
        nested.run(nested.initial, text)
        flat.run(flat.initial, text)
        points.append((deep, nested.num_states))
        flat_points.append((deep, flat.num_states))
    svg = Svg(
        780, 320, "States met, over the depth of the text",
        f"Nested brackets: {points[-1][1]} states at depth 32. The pattern that does not pair "
        f"them: {flat_points[-1][1]} at every depth.",
    )  # fmt: skip
    axes = Axes(svg, (60, 30, 520, 240), (0, 32), (0, 72))
    axes.frame("brackets opened", "states met", range(0, 33, 4), range(0, 73, 12))
    axes.curve(points, ORANGE, width=2.5)
    axes.curve(flat_points, BLUE, width=2.5)
    axes.label(32, points[-1][1], f"paired: {points[-1][1]}", fill=ORANGE)
    axes.label(32, flat_points[-1][1], f"not paired: {flat_points[-1][1]}", fill=BLUE)
    return svg.render()


# ------------------------------------------------------------------ drawn


def loop() -> str:
    """The four moves of a step."""
    svg = Svg(
        780, 250, "Four moves for each token",
        "The machine's state gives a row of bits. The model gives logits. The row masks the "
        "logits; a token is sampled; the token moves the machine, and goes to the model.",
    )  # fmt: skip
    svg.box(20, 30, 160, 62, ["machine", "1 its state"], fill=PURPLE)
    svg.box(240, 30, 150, 62, ["row of bits", "2 the set"], fill=BLUE)
    svg.box(20, 158, 160, 62, ["model", "forward"], fill=GREY)
    svg.box(240, 158, 150, 62, ["logits", "one a token"], fill=GREY)
    svg.box(450, 94, 140, 62, ["3 mask", "-inf where 0"], fill=ORANGE)
    svg.box(640, 94, 120, 62, ["sample", "a token"], fill=GREEN)
    svg.line(184, 61, 236, 61, arrow=True)
    svg.line(184, 189, 236, 189, arrow=True)
    svg.line(394, 66, 446, 110, arrow=True)
    svg.line(394, 184, 446, 142, arrow=True)
    svg.line(594, 125, 636, 125, arrow=True)
    svg.polyline([(700, 90), (700, 12), (100, 12)], stroke=GREEN, width=2)
    svg.line(100, 12, 100, 27, stroke=GREEN, width=2, arrow=True)
    svg.text(410, 28, "4 advance", size=13, fill=GREEN, bold=True)
    svg.polyline([(700, 160), (700, 240), (100, 240)], stroke=GREY, width=2)
    svg.line(100, 240, 100, 224, stroke=GREY, width=2, arrow=True)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "loop.svg": loop,
    "row.svg": row,
    "allowed.svg": allowed,
    "depth.svg": depth,
    "waits.svg": waits,
    "rows.svg": rows,
    "odds.svg": odds,
}

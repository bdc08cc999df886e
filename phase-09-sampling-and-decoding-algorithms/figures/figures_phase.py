"""The figures of phase 09's chapters; `course figures` draws them.

`survivors`, `beams` and `siblings` show traces of `mini_vllm` on the shipped model, run here in
float64; `partings` a recording of the real engine. No upstream counterpart.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conformance.features.sampling.invariance import kept
from course.site.widgets import sampling_knobs
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from mini_vllm import BeamSearchParams, LLMEngine, SamplingParams
from mini_vllm.sample.beam_search import beam_search


def shown(text: bytes) -> str:
    """Bytes as characters that can be seen."""
    return text.decode().replace("\n", "↵").replace(" ", "·")


def pipeline() -> str:
    """The stages between a row of logits and a token, in upstream's order."""
    svg = Svg(
        780, 268, "From a row of logits to a token, in vLLM's order",
        "Edits: grammar mask, allowed ids, bad words, min_tokens and bias and own processors, "
        "penalties. Greedy rows then take the argmax. The others: temperature, min-p, top-k, "
        "top-p, softmax and a draw.",
    )  # fmt: skip
    svg.text(16, 24, "edit: can change the argmax", bold=True, fill=ORANGE)
    edits = (
        ("grammar mask", "by the runner"), ("allowed ids", "-inf"), ("bad words", "-inf"),
        ("processors", "min_tokens, bias, own"), ("penalties", "repetition, freq., pres."),
    )  # fmt: skip
    for place, lines in enumerate(edits):
        svg.box(16 + place * 152, 36, 138, 52, lines, fill=ORANGE, size=13)
        if place:
            svg.line(3 + place * 152, 62, 15 + place * 152, 62, arrow=True)
    svg.line(692, 88, 692, 124, arrow=True)
    svg.box(624, 126, 138, 46, ("split", "by temperature"), fill=GREY)
    svg.line(624, 149, 584, 149, arrow=True)
    svg.box(420, 126, 160, 46, ("argmax", "temperature 0"), fill=BLUE)
    svg.line(692, 172, 692, 212)
    svg.line(692, 212, 669, 212, arrow=True)
    svg.text(16, 170, "sharpen, cut, draw: cannot change the argmax", bold=True, fill=GREEN)
    cuts = ("temperature", "min-p", "top-k", "top-p", "softmax", "draw")
    for place, words in enumerate(cuts):
        x = 572 - place * 110
        svg.box(x, 192, 94, 40, (words,), fill=GREEN, size=12)
        if place:
            svg.line(x + 110, 212, x + 97, 212, arrow=True)
    svg.text(
        764, 258, "at the end greedy and drawn rows are merged", size=12, css="soft", anchor="end"
    )
    return svg.render()


def survivors() -> str:
    """The open row of the widget under seven settings."""
    row = sampling_knobs.rows()["open"]
    order = sampling_knobs.ORDERS["vLLM's"]
    settings: tuple[tuple[str, dict[str, float]], ...] = (
        ("as it came", {}), ("temperature .5", {"temperature": 0.5}),
        ("temperature 2", {"temperature": 2.0}), ("top_k 8", {"top_k": 8}),
        ("top_p .6", {"top_p": 0.6}), ("min_p .1", {"min_p": 0.1}),
        ("T 2, min_p .1", {"temperature": 2.0, "min_p": 0.1}),
    )  # fmt: skip
    ids = np.argsort(-np.array(row["logits"]), kind="stable")[:26]
    svg = Svg(
        780, 50 + 48 * len(settings), "One row of byte-llama's logits under seven settings",
        "Bars are the 26 likeliest tokens after 'before, so that '. Temperature changes heights, "
        "the filters remove tokens, and min-p keeps more at a higher temperature.",
    )  # fmt: skip
    for line, (name, knobs) in enumerate(settings):
        left, law = sampling_knobs.stages(row, sampling_knobs.OFF | knobs, order)
        base = 50 + line * 48
        svg.text(16, base, name, size=13)
        svg.line(140, base + 2, 634, base + 2)
        for place, token in enumerate(ids):
            height = 56 * float(law[token])
            if law[token] > 0:
                svg.rect(
                    142 + place * 19, base + 2 - height, 15, height,
                    fill=BLUE, opacity=0.6, tip=f"{chr(token)!r}: {law[token]:.3f}",
                )  # fmt: skip
        svg.text(764, base, f"{left[-1]} of 257 left", size=13, anchor="end")
    base = 50 + len(settings) * 48 - 28
    for place, token in enumerate(ids):
        words = shown(bytes([token]))
        svg.text(149 + place * 19, base, words, size=12, anchor="middle", css="soft mono")
    return svg.render()


def batch() -> str:
    """Three unlike requests as rows of per-parameter tensors."""
    svg = Svg(
        780, 246, "Three unlike requests in one batch",
        "Each parameter is one tensor with a value per row: temperature, top_k, top_p. Generators "
        "are a dict by row. Stages run over the whole matrix of logits.",
    )  # fmt: skip
    columns = ("temperature", "top_k", "top_p", "generators")
    values = (
        ("0, run as 1", "257, all", "1", "-"), (".7", "50", "1", "-"),
        ("1", "257, all", ".9", "seed 7"),
    )  # fmt: skip
    names = ("greedy", "top-k", "top-p, seeded")
    colors = (BLUE, ORANGE, PURPLE)
    for place, name in enumerate(columns):
        svg.text(224 + place * 108, 26, name, size=12, anchor="middle", bold=True)
    svg.text(680, 26, "logits [batch, vocab]", size=12, anchor="middle", bold=True)
    for line, (name, cells) in enumerate(zip(names, values, strict=True)):
        y = 40 + line * 44
        svg.text(16, y + 21, f"row {line}: {name}", size=13, fill=colors[line], bold=True)
        for place, cell in enumerate(cells):
            svg.rect(174 + place * 108, y, 100, 32, fill=colors[line], opacity=0.25, radius=4)
            svg.text(224 + place * 108, y + 21, cell, size=12, anchor="middle")
        for place in range(9):
            svg.rect(612 + place * 16, y, 13, 32, fill=colors[line], opacity=0.25, radius=2)
    svg.text(16, 194, "one operation over the matrix per stage, not one call per request", size=13)
    notes = (
        (PURPLE, "row 2's seed takes the whole batch off FlashInfer's sampler"),
        (BLUE, "rows 1 and 2 draw, so row 0 is drawn as well, and its argmax put back"),
    )
    for line, (color, words) in enumerate(notes):
        svg.text(16, 216 + line * 21, words, size=13, fill=color)
    return svg.render()


def partings() -> str:
    """Where the real engine's bfloat16 texts part, alone against together."""
    found = kept("bfloat16")
    changed = sorted(found["changed"], key=lambda each: each["position"])
    tokens, same = found["max_tokens"], found["num_prompts"] - len(found["changed"])
    svg = Svg(
        780, 76 + 44 * (len(changed) + 1), "Greedy texts of vLLM alone and together, bfloat16",
        f"{same} of {found['num_prompts']} texts of {tokens} tokens are equal. "
        + " ".join(
            f"Prompt {each['prompt']} parts at token {each['position']}, gap {each['gap']:g}."
            for each in changed
        ),
    )  # fmt: skip
    wide = 430 / tokens
    lines = [(f"{same} prompts", tokens, "equal to the end")]
    for each in changed:
        gap = f"gap 2^{round(np.log2(each['gap']))}" if each["gap"] else "a tie"
        words = f"token {each['position']}: {gap}"
        lines.append((f"prompt {each['prompt']}", each["position"], words))
    for line, (name, equal, words) in enumerate(lines):
        y = 20 + line * 44
        svg.text(16, y + 19, name, size=13)
        for token in range(tokens):
            color = GREEN if token < equal else RED
            svg.rect(130 + token * wide, y, wide - 1.5, 28, fill=color, opacity=0.5, radius=1)
        svg.text(574, y + 19, words, size=13)
    base = 20 + len(lines) * 44 + 14
    svg.text(130, base, "token 0", size=12, css="soft")
    svg.text(560, base, f"token {tokens - 1}", size=12, css="soft", anchor="end")
    svg.text(16, base + 24, "green: the same alone and among 99 others; red: no longer", size=12)
    return svg.render()


PROMPT, WIDTH, STEPS = "The scheduler ", 3, 8


def live_beams() -> tuple[list[list[bytes]], list[tuple[bytes, float]], tuple[bytes, float]]:
    """The live beams after each step, the results, and greedy's text with its logprob."""
    engine = LLMEngine(dtype="float64")
    generate, steps = engine.generate, []

    def spy(prompts: list[list[int]], params: SamplingParams) -> object:
        steps.append([bytes(ids[len(PROMPT) :]) for ids in prompts])
        return generate(prompts, params)

    engine.generate = spy  # type: ignore[method-assign, assignment]

    def search(width: int) -> list[tuple[bytes, float]]:
        asked = BeamSearchParams(width, STEPS, ignore_eos=True, length_penalty=0.0)
        [found] = beam_search(engine, [PROMPT], asked)
        return [(bytes(s.tokens[len(PROMPT) :]), s.cum_logprob) for s in found.sequences]

    results = search(WIDTH)
    levels = [*steps[1:], [text for text, _ in results]]
    return levels, results, search(1)[0]


def beams() -> str:
    """A beam of three on the shipped model."""
    levels, results, (greedy, greedy_score) = live_beams()
    best = results[0][0]
    svg = Svg(
        780, 300, f"A beam of {WIDTH} on byte-llama, {STEPS} steps",
        f"Greedy's text {shown(greedy)!r} scores {greedy_score:.2f}. The beam holds it until other "
        f"prefixes push it out, and ends with {shown(best)!r}, {results[0][1]:.2f}.",
    )  # fmt: skip
    svg.text(16, 24, f"after {PROMPT!r}, at each step the best first", size=12, css="soft")
    for step, level in enumerate(levels):
        x = 40 + step * 84
        for rank, text in enumerate(level):
            y = 46 + rank * 62
            color = GREEN if best.startswith(text) else ORANGE if greedy.startswith(text) else GREY
            if step:
                before = 46 + levels[step - 1].index(text[:-1]) * 62
                svg.line(x - 46, before + 16, x - 2, y + 16, stroke=color, width=2)
            svg.rect(x, y, 36, 32, fill=color, opacity=0.35, radius=4)
            svg.text(x + 18, y + 21, shown(text[-1:]), size=15, anchor="middle", css="ink mono")
            if step == STEPS - 1:
                svg.text(x + 46, y + 21, f"{results[rank][1]:.2f}", size=13)
    svg.text(40, 250, f"green: the best found, {shown(best)!r}", size=13, fill=GREEN, bold=True)
    words = f"orange: greedy's prefixes; its text ends as {shown(greedy)!r} with {greedy_score:.2f}"
    svg.text(40, 276, words, size=13, fill=ORANGE, bold=True)
    return svg.render()


def siblings() -> str:
    """Block tables of four siblings over the steps of one run."""
    engine = LLMEngine(dtype="float64", block_size=16)
    plans: list[list[int]] = []
    tables: list[list[list[int]]] = []

    def note(plan: object) -> None:
        scheduled = plan.num_scheduled_tokens  # type: ignore[attr-defined]
        plans.append(list(scheduled.values()))
        tables.append([list(engine.scheduler.kv.get_block_ids(name)) for name in scheduled])

    engine.observers.append(note)
    prompt = "The engine keeps one block table per request."
    asked = SamplingParams(temperature=1.0, n=4, seed=7, max_tokens=24, ignore_eos=True)
    engine.generate([prompt], asked)
    shared = set.intersection(*(set(table) for table in tables[-1]))
    svg = Svg(
        780, 290, f"Four answers to {len(prompt)} tokens, blocks of 16",
        f"Step 1 computes {plans[0]} tokens, every other step one each. Blocks "
        f"{sorted(shared)} are in all four tables; the others belong to one answer.",
    )  # fmt: skip
    for place, step in enumerate((0, 4, 20)):
        x = 66 + place * 240
        svg.text(x, 26, f"step {step + 1}: {' + '.join(map(str, plans[step]))}", bold=True)
        for line, table in enumerate(tables[step]):
            y = 40 + line * 44
            if not place:
                svg.text(16, y + 21, f"{line}_r", size=13, css="ink mono")
            for column, block in enumerate(table):
                color = GREEN if block in shared else BLUE
                svg.rect(x + column * 40, y, 35, 32, fill=color, opacity=0.4, radius=4)
                svg.text(x + column * 40 + 17, y + 21, str(block), size=13, anchor="middle")
    held = len({block for table in tables[-1] for block in table})
    apart = sum(len(table) for table in tables[-1])
    svg.text(16, 244, "green: one block in four tables, reference count 4", fill=GREEN, bold=True)
    words = f"blue: an answer's own; at the end {held} blocks in all, {apart} without sharing"
    svg.text(16, 270, words, fill=BLUE, bold=True)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "pipeline.svg": pipeline,
    "survivors.svg": survivors,
    "batch.svg": batch,
    "partings.svg": partings,
    "beams.svg": beams,
    "siblings.svg": siblings,
}

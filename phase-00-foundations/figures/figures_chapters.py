"""The figures of phase 00.

Numbers come from the labs' own functions, from traces of mini_vllm, or from the measurements saved
in `../experiments/measured/`. No upstream counterpart.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType

import numpy as np

from course.files import load_module
from course.truth.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    Svg,
)
from course.truth.plots import Axes
from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine

PHASE = Path(__file__).resolve().parent.parent

A100 = {"peak_flops": 312e12, "mem_bw": 2.0e12}
N_8B, KV_8B, ATTENTION_8B = 8e9, 131_072, 524_288


def solution(lab: str) -> ModuleType:
    """The solution of one of this phase's labs, as a module."""
    return load_module(PHASE / "labs" / lab / "solution.py")


# ------------------------------------------------------------------ drawings without data


def loop() -> str:
    """The generation loop."""
    svg = Svg(
        720,
        190,
        "The generation loop of a language model",
        "Token ids go through the model, which gives one score per vocabulary entry; one id is "
        "picked, appended to the tokens, and the loop repeats until end of sequence.",
    )
    boxes = [
        (20, "tokens", "[72, 105]", GREY),
        (200, "model", "one forward pass", BLUE),
        (380, "logits", "257 scores", PURPLE),
        (560, "pick", "one token id", ORANGE),
    ]
    for x, name, note, color in boxes:
        svg.box(x, 40, 140, 62, [name, note], fill=color)
    for x in (160, 340, 520):
        svg.line(x + 4, 71, x + 36, 71, width=1.6, arrow=True)
    svg.line(630, 104, 630, 146, width=1.6)
    svg.line(630, 146, 90, 146, width=1.6)
    svg.line(90, 146, 90, 106, width=1.6, arrow=True)
    svg.text(
        360, 166, "append the id and run again, until EOS or the length limit", anchor="middle"
    )
    return svg.render()


def decoder() -> str:
    """The shape of a Llama-family decoder."""
    svg = Svg(
        720,
        470,
        "The shape of a Llama-family decoder",
        "Token ids become rows of the embedding table. Each of 32 layers adds the result of "
        "attention and then of the MLP to the residual stream, each after a norm. A final norm and "
        "the language model head turn the last row into logits.",
    )
    svg.box(40, 20, 200, 46, ["token ids", "[num_tokens]"], fill=GREY)
    svg.box(40, 96, 200, 46, ["embedding row", "[num_tokens, 4096]"], fill=GREY)
    svg.box(40, 400, 200, 46, ["norm, then LM head", "[rows, 128256] logits"], fill=PURPLE)
    svg.rect(20, 164, 680, 212, css="paper", radius=8)
    svg.text(690, 182, "one decoder layer, repeated 32 times", anchor="end", css="soft", size=12)
    svg.line(140, 66, 140, 94, width=1.6, arrow=True)
    svg.line(140, 142, 140, 398, width=2.4, css="ink-line", arrow=True)
    svg.text(114, 275, "residual stream", anchor="middle", css="soft", size=12, rotate=-90)
    rows = [
        (196, "attention", "mixes positions", BLUE, "uses the KV cache"),
        (296, "MLP", "each position alone", GREEN, "needs no memory of the past"),
    ]
    for y, name, note, color, memory in rows:
        svg.line(140, y + 14, 214, y + 14, width=1.6, arrow=True)
        svg.box(216, y, 90, 52, ["norm", "RMSNorm"], fill=GREY)
        svg.line(306, y + 26, 346, y + 26, width=1.6, arrow=True)
        svg.box(348, y, 150, 52, [name, note], fill=color)
        svg.text(512, y + 31, memory, css="soft", size=12)
        svg.line(423, y + 52, 423, y + 66, width=1.6)
        svg.line(423, y + 66, 152, y + 66, width=1.6, arrow=True)
        svg.circle(140, y + 66, 9, GREY)
        svg.text(140, y + 70.5, "+", anchor="middle", bold=True, size=13)
    return svg.render()


def mask() -> str:
    """Attention weights of four tokens, with and without the causal mask, computed."""
    queries = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    keys = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    scores = queries @ keys.T / math.sqrt(2)
    scores[np.triu_indices(4, k=1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    svg = Svg(
        640,
        300,
        "The causal mask on four tokens",
        "A 4 by 4 grid of attention weights. Row i is the query at position i; entries to the "
        "right of the diagonal are masked, so every row sums to 1 over positions 0 to i.",
    )
    side, left, top = 52, 120, 46
    for row in range(4):
        svg.text(left - 12, top + row * side + 31, f"query {row}", anchor="end", css="soft")
        svg.text(left + row * side + side / 2, top - 10, f"key {row}", anchor="middle", css="soft")
        for column in range(4):
            x, y = left + column * side, top + row * side
            if column > row:
                svg.rect(x, y, side - 3, side - 3, fill=GREY, opacity=0.15, radius=3)
                svg.text(x + 24, y + 30, "-inf", anchor="middle", css="soft mono", size=11)
            else:
                weight = weights[row, column]
                svg.rect(x, y, side - 3, side - 3, fill=BLUE, opacity=0.15 + 0.7 * weight, radius=3)
                svg.text(x + 24, y + 30, f"{weight:.3f}", anchor="middle", css="ink mono", size=12)
    svg.text(370, 88, "row 2 is the worked example:", bold=True)
    svg.text(370, 112, "scores 1, 0, 1, scaled by 1/sqrt(2),", size=12.5)
    svg.text(370, 132, "softmax 0.401, 0.198, 0.401", size=12.5)
    svg.text(370, 168, "Grey: the future. Its scores are set", size=12.5)
    svg.text(370, 188, "to -inf before the softmax, so its", size=12.5)
    svg.text(370, 208, "weights are exactly 0.", size=12.5)
    svg.text(left + 2 * side, 282, "each row sums to 1", anchor="middle", css="soft", size=12)
    return svg.render()


# ------------------------------------------------------------------ computed from the labs


def work() -> str:
    """Every K/V computation of 5 prompt and 10 new tokens, from lab 01's own call logs."""
    lab = solution("lab-01-kv-cache-speedup")
    prompt, n_new = [1, 2, 3, 4, 5], 10
    plain, cached = lab.KVWork(), lab.KVWork()
    lab.generate_no_cache(prompt, n_new, plain)
    lab.generate_with_cache(prompt, n_new, cached)
    svg = Svg(
        720,
        280,
        "K/V computations with and without a cache",
        f"Five prompt tokens and ten new ones. Without a cache {plain.units} squares, a growing "
        f"block of rows; with a cache {cached.units} squares, each position once.",
    )
    side = 18
    for left, meter, title, color in (
        (60, plain, f"no cache: {plain.units} units", ORANGE),
        (410, cached, f"with a cache: {cached.units} units", BLUE),
    ):
        svg.text(left, 24, title, bold=True, size=14)
        svg.text(left, 268, "position 0 to 14", css="soft", size=12)
        svg.text(left - 8, 24, "step", css="soft", size=12, anchor="end")
        step, previous = 0, -1
        for _, position in meter.calls:
            starts_again = position == 0 and previous >= 0
            decodes = meter is cached and position >= len(prompt)
            step += int(starts_again or decodes)
            previous = position
            svg.rect(
                left + position * side,
                34 + step * (side + 1),
                side - 2,
                side - 2,
                fill=color,
                opacity=0.75,
                radius=2,
                tip=f"step {step}, position {position}",
            )
        for row in range(step + 1):
            svg.text(left - 8, 47 + row * (side + 1), str(row), size=10.5, anchor="end", css="soft")
    return svg.render()


def kv_cost() -> str:
    """Bytes of KV cache per token of the shipped configs, factor by factor."""
    lab = solution("lab-02-kv-memory-calculator")
    folder = PHASE / "labs" / "lab-02-kv-memory-calculator" / "configs"
    rows = []
    for name in ("qwen2.5-0.5b", "opt-125m", "deepseek-v3", "llama-3-8b"):
        config = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        rows.append((name, lab.read_geometry(config)))
    config = json.loads((folder / "llama-3-8b.json").read_text(encoding="utf-8"))
    del config["num_key_value_heads"]
    rows.append(("llama-3-8b, were it MHA", lab.read_geometry(config)))
    svg = Svg(
        720,
        40 + 54 * len(rows),
        "KV cache bytes per token of five model shapes",
        "Bars with the five factors of each model: stored vectors, layers, KV heads, head "
        "dimension, bytes per number.",
    )
    widest = max(math.prod(v for _, v in lab.factor_table(g)) for _, g in rows)
    for i, (name, geometry) in enumerate(rows):
        factors = [value for _, value in lab.factor_table(geometry)]
        per_token = math.prod(factors)
        y = 26 + 54 * i
        color = {"MHA": ORANGE, "GQA": BLUE, "MLA": GREEN}[geometry.kind]
        svg.text(16, y + 4, name, bold=True)
        svg.text(
            16,
            y + 21,
            f"{geometry.kind}: " + " x ".join(map(str, factors)),
            css="soft mono",
            size=11.5,
        )
        length = 300 * per_token / widest
        svg.rect(300, y - 9, length, 24, fill=color, opacity=0.8, radius=3)
        svg.text(300 + length + 8, y + 8, f"{per_token:,} B", size=12.5)
    svg.text(300, 30 + 54 * len(rows), "bytes per token, all layers", css="soft", size=12)
    return svg.render()


def sampling() -> str:
    """One row of logits through temperature, top-k and top-p, from lab 03."""
    lab = solution("lab-03-sampling-basics")
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    cooled = logits / 0.8
    after_k = lab.apply_top_k(cooled, 3)
    after_p = lab.apply_top_p(after_k, 0.75)
    stages = [
        ("softmax of the logits", logits),
        ("temperature 0.8", cooled),
        ("then top-k 3", after_k),
        ("then top-p 0.75", after_p),
    ]
    svg = Svg(
        720,
        240,
        "The sampling pipeline on four tokens",
        "Four bar charts: probabilities 0.4, 0.3, 0.2, 0.1; sharpened by temperature 0.8; the "
        "last token removed by top-k 3 and the rest renormalised; the third removed by top-p 0.75.",
    )
    for i, (title, row) in enumerate(stages):
        probabilities = lab.softmax(row)
        left = 20 + 178 * i
        svg.text(left, 26, title, bold=True, size=12.5)
        for token, probability in enumerate(probabilities):
            height = 210 * probability
            x, y = left + 38 * token, 200 - height
            svg.rect(
                x,
                y,
                30,
                max(height, 0.5),
                fill=(BLUE, GREEN, ORANGE, PURPLE)[token],
                opacity=0.8,
                radius=2,
            )
            svg.text(
                x + 15,
                y - 6,
                f"{probability:.3f}" if probability else "0",
                size=10.5,
                anchor="middle",
            )
            svg.text(x + 15, 218, str(token), size=11, anchor="middle", css="soft")
        svg.line(left - 4, 200, left + 150, 200)
    return svg.render()


def roofline() -> str:
    """Decode and prefill steps of an 8B model on an A100's roofline, from lab 04."""
    lab = solution("lab-04-prefill-vs-decode")
    ridge = lab.ridge_point(**A100)
    svg = Svg(
        720,
        400,
        "Prefill and decode of an 8B model on an A100 roofline",
        "Attainable arithmetic rate over arithmetic intensity, both logarithmic. The sloped part "
        "is memory bandwidth, the flat part the arithmetic peak; they meet at 156 FLOP per byte.",
    )
    axes = Axes(svg, (70, 40, 620, 300), (0.5, 5000), (0.5e12, 600e12), log_x=True, log_y=True)
    axes.frame(
        "arithmetic intensity, FLOP per byte",
        "attainable TFLOP/s",
        {1: "1", 10: "10", 100: "100", ridge: "156", 1000: "1000"},
        {1e12: "1", 10e12: "10", 100e12: "100", 312e12: "312"},
    )
    axes.curve([(0.5, 0.5 * A100["mem_bw"]), (ridge, 312e12), (5000, 312e12)], GREY, width=2.5)
    decode = []
    for batch in (1, 8, 64, 156, 512):
        intensity = lab.arithmetic_intensity(N_8B, batch)
        decode.append((intensity, min(312e12, intensity * A100["mem_bw"])))
        axes.label(*decode[-1], f"B={batch}", ORANGE, dx=-8, dy=-8, anchor="end")
    axes.dots(decode, ORANGE, radius=5)
    with_kv = []
    for batch in (1, 8, 64, 156, 512):
        intensity = lab.decode_intensity_with_kv(N_8B, batch, 2048, KV_8B, ATTENTION_8B)
        with_kv.append((intensity, min(312e12, intensity * A100["mem_bw"])))
    axes.dots(with_kv, RED, radius=4)
    for tokens, dx, dy, anchor in ((128, 8, 14, "start"), (2048, 0, -10, "middle")):
        intensity = lab.arithmetic_intensity(N_8B, tokens)
        point = (intensity, min(312e12, intensity * A100["mem_bw"]))
        axes.dots([point], BLUE, radius=5)
        axes.label(*point, f"T={tokens}", BLUE, dx=dx, dy=dy, anchor=anchor)
    axes.label(9, 3.2e12, "decode, weights only", ORANGE)
    axes.label(9, 2.2e12, "decode with the KV of 2,048 tokens: never past 64", RED)
    axes.label(9, 1.5e12, "prefill of T tokens", BLUE)
    return svg.render()


def kv_term() -> str:
    """Decode intensity over batch for several context lengths: it saturates."""
    lab = solution("lab-04-prefill-vs-decode")
    svg = Svg(
        720,
        400,
        "Batching and the KV cache: intensity saturates",
        "Arithmetic intensity of decode over batch size, both logarithmic. Without the KV term the "
        "line crosses the ridge at batch 156. With it the curves flatten; above 803 tokens of "
        "context they never reach the ridge.",
    )
    axes = Axes(svg, (70, 40, 500, 300), (1, 10000), (0.8, 3000), log_x=True, log_y=True)
    axes.frame(
        "batch size",
        "FLOP per byte",
        {1: "1", 10: "10", 100: "100", 1000: "1,000", 10000: "10,000"},
        {1: "1", 10: "10", 100: "100", 1000: "1,000"},
    )
    batches = [10 ** (i / 12) for i in range(49)]
    axes.curve(
        [(b, lab.arithmetic_intensity(N_8B, b)) for b in batches if b <= 3000], GREY, dash="5 4"
    )
    axes.label(1600, 1500, "weights only", GREY, dx=-16, dy=0, anchor="end")
    for context, color in ((128, GREEN), (803, PURPLE), (2048, ORANGE), (8192, RED)):
        points = [
            (b, lab.decode_intensity_with_kv(N_8B, b, context, KV_8B, ATTENTION_8B))
            for b in batches
        ]
        axes.curve(points, color)
        axes.label(*points[-1], f"{context:,} tokens: {points[-1][1]:.0f}", color)
    ridge = lab.ridge_point(**A100)
    axes.curve([(1, ridge), (10000, ridge)], BLUE, width=1.4, dash="2 3")
    axes.label(1, ridge, "ridge of an A100: 156", BLUE, dx=6, dy=-7)
    return svg.render()


# ------------------------------------------------------------------ traces of mini_vllm


def counters() -> str:
    """The two counters of one request, step by step, from a real trace."""
    engine = LLMEngine(model="toy", long_prefill_token_threshold=4)
    request_id = engine.add_request("hello, world", SamplingParams(max_tokens=6, ignore_eos=True))
    request = engine.requests[request_id]
    rows = [(request.num_tokens, request.num_computed_tokens)]
    while engine.has_unfinished_requests():
        engine.step()
        rows.append((request.num_tokens, request.num_computed_tokens))
    svg = Svg(
        720,
        350,
        "num_tokens and num_computed_tokens of one request",
        f"A prompt of {request.num_prompt_tokens} tokens in chunks of 4, then 6 output tokens. "
        "The computed counter climbs to the known tokens, then trails them by one.",
    )
    last = len(rows) - 1
    axes = Axes(svg, (60, 40, 620, 250), (0, last), (0, 20))
    axes.frame(
        "steps done",
        "tokens",
        range(last + 1),
        range(0, 21, 4),
    )
    for index, color, name in ((0, ORANGE, "num_tokens"), (1, BLUE, "num_computed_tokens")):
        points = [(step, row[index]) for step, row in enumerate(rows)]
        axes.curve(points, color, width=2.5)
        axes.dots(points, color)
        axes.label(*points[-1], f"{name}", color, dx=-8, dy=-12 if index == 0 else 46, anchor="end")
    for step, (known, computed) in enumerate(rows):
        svg.line(axes.x(step), axes.y(computed) - 5, axes.x(step), axes.y(known) + 5, dash="3 3")
        svg.text(
            axes.x(step) + (6 if known - computed > 1 else -3.5),
            (axes.y(computed) + axes.y(known)) / 2 + 4
            if known - computed > 1
            else axes.y(computed) + 17,
            str(known - computed),
            size=11.5,
            css="soft",
        )
    svg.text(axes.x(1), axes.y(16.5), "prefill: a wide gap closes in chunks", css="soft", size=12)
    svg.text(axes.x(5.2), axes.y(9.5), "decode: the gap is 1 at every step", css="soft", size=12)
    return svg.render()


def steps() -> str:
    """Tokens of each request in each step of a small batch, from a real trace."""
    engine = LLMEngine(model="toy", max_num_batched_tokens=16, max_num_seqs=8)
    arrivals = {
        0: [("A", "The KV cache keeps keys", 8)],
        2: [("B", "a longer prompt arrives while A decodes", 6)],
        3: [("C", "short", 5)],
    }
    plan: list[dict[str, int]] = []
    computed_before: list[dict[str, bool]] = []

    def note(output: object) -> None:
        scheduled = output.num_scheduled_tokens  # type: ignore[attr-defined]
        plan.append(dict(scheduled))
        computed_before.append(
            {
                name: engine.requests[name].num_computed_tokens
                < engine.requests[name].num_prompt_tokens
                for name in scheduled
            }
        )

    engine.observers.append(note)
    step = 0
    while step == 0 or engine.has_unfinished_requests():
        for name, prompt, max_tokens in arrivals.get(step, []):
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            engine.add_request(prompt, params, request_id=name)
        engine.step()
        step += 1
    svg = Svg(
        720,
        330,
        "Three requests share each step of a small engine",
        "Stacked bars, one per step, at most 16 tokens high: request A prefills then decodes; B "
        "prefills in what A leaves of the budget; C joins; decodes take one token each.",
    )
    axes = Axes(svg, (60, 40, 620, 230), (0, len(plan)), (0, 18))
    axes.frame(
        "step",
        "tokens computed in the step (budget 16)",
        {i + 0.5: str(i) for i in range(len(plan))},
        (0, 4, 8, 12, 16),
    )
    colors = {"A": BLUE, "B": ORANGE, "C": GREEN}
    for i, scheduled in enumerate(plan):
        bottom = 0
        for name, count in scheduled.items():
            axes.bars(
                [(i + 0.5, count - 0.1)],
                colors[name],
                base=bottom,
                width=0.85,
                opacity=0.85 if computed_before[i][name] else 0.45,
                tips=[f"step {i}: {name} {count} token(s)"],
            )
            if count > 1:
                words, middle = f"{name} {count}", bottom + count / 2
                axes.label(i + 0.5, middle, words, dx=0, anchor="middle")
            bottom += count
    axes.rule(y=16, stroke=RED)
    svg.text(680, 32, "strong: prompt tokens, pale: decode", anchor="end", css="soft", size=12)
    return svg.render()


# ------------------------------------------------------------------ measurements


def experiment(name: str) -> ModuleType:
    """One of this phase's measuring scripts, as a module."""
    return load_module(PHASE / "experiments" / f"{name}.py")


def measured(name: str) -> dict:
    """A saved measurement; which machine made it is inside."""
    path = PHASE / "experiments" / "measured" / name
    return json.loads(path.read_text(encoding="utf-8"))


def my_roofline() -> str:
    """Predicted and measured time of a matrix product over its columns."""
    return experiment("measure_roofline").figure(measured("roofline.json"))


def growth() -> str:
    """FLOP and seconds of generation with and without a cache."""
    return experiment("measure_kv_cache").figure(measured("kv-cache.json"))


FIGURES = {
    "loop.svg": loop,
    "decoder.svg": decoder,
    "mask.svg": mask,
    "work.svg": work,
    "kv-cost.svg": kv_cost,
    "sampling.svg": sampling,
    "roofline.svg": roofline,
    "kv-term.svg": kv_term,
    "counters.svg": counters,
    "steps.svg": steps,
    "my-roofline.svg": my_roofline,
    "growth.svg": growth,
}

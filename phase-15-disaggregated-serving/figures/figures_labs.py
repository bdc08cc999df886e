"""The figures of the labs of phase 15: what their reference solutions come to, drawn.

`course figures 15` writes them. No upstream counterpart.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from course.truth.plots import Axes
from labkit import shipped_model
from mini_vllm import LLMEngine, SamplingParams

LABS = Path(__file__).resolve().parents[1] / "labs"


def solution(folder: str) -> ModuleType:
    """The reference solution of a lab as a module of its own."""
    return load_module(LABS / folder / "solution.py")


def penalty() -> str:
    """Lab 03: what the wire adds to the first token, for three models and layer streaming."""
    lab = solution("lab-03-disagg-economics")
    prefill_s, tokens = 0.2048, 2048
    links = [5 * 2 ** (k / 4) for k in range(26)]

    def share(per_token: int, gbps: float) -> float:
        moved = lab.transfer_seconds(lab.kv_payload_bytes(tokens, per_token), gbps)
        return float(lab.disagg_ttft_penalty(moved, prefill_s))

    def streamed(per_token: int, gbps: float, layers: int = 32) -> float:
        moved = share(per_token, gbps) * prefill_s
        return max(moved / layers, moved - prefill_s * (layers - 1) / layers) / prefill_s

    svg = Svg(
        780, 330, "Penalty of the first token over the link",
        f"A prompt of {tokens} tokens, prefill 204.8 ms. At 10 Gb/s an 8B pays "
        f"{share(131_072, 10):.1%}, layer by layer {streamed(131_072, 10):.1%}; at 200 Gb/s "
        f"{share(131_072, 200):.1%}. The limit is 25 %.",
    )  # fmt: skip
    axes = Axes(svg, (64, 24, 540, 250), (5, 400), (0, 1.5), log_x=True)
    axes.frame(
        "link, Gb/s", "share of the prefill", (5, 10, 25, 50, 100, 200, 400), (0, 0.5, 1, 1.5)
    )
    for name, colour, value in (
        ("70B", RED, lambda g: share(327_680, g)),
        ("8B", BLUE, lambda g: share(131_072, g)),
        ("MLA, 61 layers", GREEN, lambda g: share(70_272, g)),
        ("8B, layer by layer", ORANGE, lambda g: streamed(131_072, g)),
    ):
        axes.curve([(g, value(g)) for g in links if value(g) <= 1.5], colour, name=name)
    axes.rule(y=0.25)
    axes.legend(620, 40)
    axes.label(400, 0.25, "limit, 25 %", dx=10)
    return svg.render()


def handoff() -> str:
    """Lab 01: one request's tokens in two engines' blocks, and on the wire between them."""
    lab, prompt = solution("lab-01-kv-handoff"), "hello world"
    source, other = (
        LLMEngine(shipped_model(), num_blocks=blocks, block_size=size, dtype="float64")
        for blocks, size in ((5, 4), (6, 8))
    )
    source.add_request("other", SamplingParams(max_tokens=1))
    source.step()  # its two blocks come back, the last one first
    source.add_request(prompt, SamplingParams(max_tokens=6, ignore_eos=True), request_id="r")
    source.step()
    tables = [source.scheduler.kv.get_block_ids("r")]
    moved = lab.export_request(source, "r")
    lab.import_request(other, moved)
    tables.append(other.scheduler.kv.get_block_ids("r"))
    num_computed = moved.num_computed_tokens
    svg = Svg(
        780, 262, "A request between two engines",
        f"{num_computed} tokens of '{prompt}' in blocks {tables[0]} of 4 at the source, in their "
        f"own order on the wire, and in blocks {tables[1]} of 8 at the destination.",
    )  # fmt: skip
    for row, (name, size) in enumerate((("source", 4), ("wire", 0), ("destination", 8))):
        y = 40 + 80 * row
        svg.text(16, y + 18, name, size=13, bold=True)
        table = tables[row // 2] if size else []
        for index in range(len(table) * size or num_computed):
            x = 130 + 34 * index + (10 * (index // size) if size else 0)
            word = prompt[index].replace(" ", "_") if index < num_computed else ""
            svg.cell(x, y, 30, word, (BLUE if size else ORANGE) if word else GREY)
            if size and index % size == 0:
                svg.text(x, y - 8, f"block {table[index // size]}", size=12, css="soft")
    return svg.render()


def owner_lanes() -> str:
    """Lab 04: who has the blocks, step by step, where the pin dies, and as mended."""
    lab, folder = solution("lab-04-who-owns-this-block"), LABS / "lab-04-who-owns-this-block"
    with gzip.open(folder / "recordings" / "owners.jsonl.gz", "rt") as file:
        stories = [json.loads(line) for line in file]
    deaths = [s for s in stories if "workload" in s and "line" in s["moments"][-1]]
    colours = {"request": GREEN, "wire": BLUE, "peer": PURPLE, "wire and peer": ORANGE}
    svg = Svg(
        780, 62 + 84 * len(deaths), "Who has the blocks",
        "; ".join(
            f"{s['name']}: at the pin "
            + ", ".join(f"step {m['step']} {m['owner']}" for m in s["moments"])
            for s in deaths
        ),
    )  # fmt: skip
    for row, story in enumerate(deaths):
        top, mended = 30 + 84 * row, lab.Mended()
        svg.text(16, top, story["name"], size=13, bold=True)
        moments = story["moments"]
        lanes = {"pin": [m["owner"] for m in moments], "mended": []}
        for moment in moments:
            lanes["mended"].append([mended.hear(event) for event in moment["events"]][-1])
        ends = [*(m["step"] for m in moments[1:]), moments[-1]["step"] + 1]
        for lane, (name, owners) in enumerate(lanes.items()):
            y = top + 8 + 30 * lane
            svg.text(16, y + 18, name, size=12, css="soft")
            for moment, end, owner in zip(moments, ends, owners, strict=True):
                x, width = 90 + 96 * moment["step"], 96 * (end - moment["step"]) - 4
                fill = RED if owner == "dies" else colours.get(owner, GREY)
                svg.cell(x, y, width, owner, fill)
    svg.text(90, 48 + 84 * len(deaths), "steps, 96 pixels each", size=12, css="soft")
    return svg.render()


def legs() -> str:
    """Lab 02: the two recorded legs of a request of 40 tokens, in the order of what is sent."""
    file = LABS / "lab-02-pd-pair" / "recordings" / "nixl.json"
    of = json.loads(file.read_text())["legs"]
    p, d = of["prefill 40"], of["decode 40"]
    plans, blocks = d["plans"], p["params"]["remote_block_ids"][0]
    rows = (
        ("proxy", "P", "the prompt, max_tokens=1", BLUE),
        ("P", "proxy", f"1 token (dropped), kv_transfer_params: blocks {blocks}", BLUE),
        ("proxy", "D", "the client's body and kv_transfer_params", GREEN),
        ("P", "D", f"K, V: {blocks} to {d['read'][0]}: D plans {plans[0] or 'nothing'}", ORANGE),
        ("D", "P", f"read: P holds {of['blocks of P before and after sent'][1]} blocks", ORANGE),
        ("D", "proxy", f"D computes {plans[2]['d']} token, then its own first token", GREEN),
    )  # fmt: skip
    svg = Svg(
        780, 70 + 44 * len(rows), "Two legs",
        "; ".join(f"{a} to {b}: {words}" for a, b, words, _ in rows),
    )  # fmt: skip
    lanes = {"P": 60, "proxy": 390, "D": 720}
    for name, x in lanes.items():
        svg.text(x, 22, name, size=14, bold=True, anchor="middle")
        svg.line(x, 32, x, 60 + 44 * len(rows), css="soft-line")
    for row, (a, b, words, colour) in enumerate(rows):
        y, left = 68 + 44 * row, lanes[a] < lanes[b]
        svg.line(lanes[a], y, lanes[b], y, stroke=colour)
        svg.line(lanes[b], y, lanes[b] - (8 if left else -8), y - 5, stroke=colour)
        svg.line(lanes[b], y, lanes[b] - (8 if left else -8), y + 5, stroke=colour)
        svg.text((lanes[a] + lanes[b]) / 2, y - 7, words, size=12, anchor="middle")
    return svg.render()


def routers() -> str:
    """Lab 05: what each router computes and how long its worst queue is, on both samples."""
    folder, lab = LABS / "lab-05-route-it", solution("lab-05-route-it")
    fleet = load_module(folder / "fleet.py")

    def by(choose: Callable[..., int]) -> Any:
        return SimpleNamespace(choose=choose)

    found = {}
    for kind in ("chat", "hot"):
        arrivals, turn = fleet.load(folder / "recordings" / f"{kind}.jsonl.gz"), count()
        made = {
            "yours": lab.Balanced(), "the mini engine's": fleet.Peer("both"),
            "by_prefix": by(lab.by_prefix), "by_load": by(lab.by_load),
            "round-robin": by(lambda arrival, reports, turn=turn: next(turn) % len(reports)),
        }  # fmt: skip
        found[kind] = {name: fleet.play(arrivals, routes) for name, routes in made.items()}
    svg = Svg(
        780, 330, "Work and waiting of five routers",
        "; ".join(
            f"{kind}, {name}: {s.computed:,} tokens computed, worst queue {s.worst_queue:,.0f}"
            for kind, of in found.items() for name, s in of.items()
        ),
    )  # fmt: skip
    for column, (kind, of) in enumerate(found.items()):
        box = (70 + 300 * column, 34, 240, 220)
        axes = Axes(svg, box, (0.8, 8), (8, 4_000), log_x=True, log_y=True)
        axes.frame(
            f"{kind}: computed, million tokens", "worst queue, thousand tokens",
            {1: "1", 2: "2", 4: "4", 8: "8"}, {10: "10", 100: "100", 1_000: "1,000"},
        )  # fmt: skip
        colours = (ORANGE, BLUE, RED, PURPLE, GREY)
        for colour, (name, score) in zip(colours, of.items(), strict=True):
            point = score.computed / 1e6, score.worst_queue / 1e3
            tip = f"{name}: {score.computed:,} computed, queue {score.worst_queue:,.0f}"
            axes.dots([point], colour, radius=6, tips=[tip], name=None if column else name)
        if not column:
            axes.legend(640, 40)
    return svg.render()


def windows() -> str:
    """Lab 06: ten windows, what the counters say of their prompts and what plans computed."""
    file = LABS / "lab-06-does-my-decoder-prefill-again" / "recordings" / "windows.jsonl.gz"
    with gzip.open(file, "rt") as lines:
        found = [w for w in map(json.loads, lines) if not w["name"].startswith("seed")]
    parts = (("local_compute", ORANGE), ("local_cache_hit", GREEN), ("external_kv_transfer", BLUE))
    svg = Svg(
        780, 62 + 30 * len(found), "What counters say and what was computed",
        "; ".join(
            f"{w['name']}: " + ", ".join(
                f"{name} {w['seen']['prompt_tokens_by_source'][name]}" for name, _ in parts
            ) + f", computed {w['computed']}" for w in found
        ),
    )  # fmt: skip
    for column, (name, colour) in enumerate(parts):
        svg.rect(16 + 190 * column, 12, 14, 14, fill=colour, opacity=0.45)
        svg.text(36 + 190 * column, 24, name, size=12)
    svg.rect(586, 12, 14, 14, fill=RED)
    svg.text(606, 24, "computed in plans", size=12)
    for row, window in enumerate(found):
        y, x = 42 + 30 * row, 350.0
        svg.text(16, y + 17, window["name"], size=12)
        for name, colour in parts:
            if tokens := window["seen"]["prompt_tokens_by_source"][name]:
                svg.rect(x, y, 10 * tokens - 2, 22, fill=colour, opacity=0.45)
                x += 10 * tokens
        svg.rect(350 + 10 * window["computed"] - 8, y + 7, 8, 8, fill=RED)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-01-handoff.svg": handoff,
    "lab-04-owners.svg": owner_lanes,
    "lab-02-legs.svg": legs,
    "lab-05-routers.svg": routers,
    "lab-06-windows.svg": windows,
    "lab-03-penalty.svg": penalty,
}

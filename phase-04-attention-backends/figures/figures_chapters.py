"""Figures of the chapters of phase 04.

`step-metadata` and `head-scores` are drawn from runs of `mini_vllm` made here, `matrix` and
`reasons` from the recording of the real selector, `cascade` and `launch` from the arithmetic of the
functions they name. `paths`, `mask` and `merge` are diagrams. No upstream counterpart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from conformance.parts import selector_outcome as outcome
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
from mini_vllm import EngineParts, LLMEngine, SamplingParams
from mini_vllm.attention import paged_attention
from mini_vllm.batch import ForwardBatch

COLORS = {
    "FLASH_ATTN": BLUE,
    "FLASHINFER": GREEN,
    "TRITON_ATTN": ORANGE,
    "FLEX_ATTENTION": PURPLE,
    "TURBOQUANT": RED,
    "FLASH_ATTN_MLA": BLUE,
    "FLASHMLA": PURPLE,
    "FLASHINFER_MLA": GREEN,
    "TRITON_MLA": ORANGE,
    "FLASHMLA_SPARSE": PURPLE,
    "FLASHINFER_MLA_SPARSE": GREEN,
    "error": GREY,
}


# ------------------------------------------------------------------ the recorded selector


MLA: dict[str, Any] = {"use_mla": True}
SPARSE: dict[str, Any] = {"use_mla": True, "use_sparse": True}
ROWS: list[tuple[str, dict[str, Any] | None, dict[str, Any]]] = [
    ("16 bits, head 128", None, {}),
    ("head 64", None, {"head_size": 64}),
    ("head 80", None, {"head_size": 80}),
    ("head 100", None, {"head_size": 100}),
    ("head 512", None, {"head_size": 512}),
    ("fp32, head 128", None, {"dtype": "float32"}),
    ("fp32, head 16", None, {"dtype": "float32", "head_size": 16}),
    ("KV fp8", None, {"kv_cache_dtype": "fp8"}),
    ("KV fp8_e5m2", None, {"kv_cache_dtype": "fp8_e5m2"}),
    ("KV int8 per token and head", None, {"kv_cache_dtype": "int8_per_token_head"}),
    ("sinks, head 64", {"has_sink": True}, {"head_size": 64}),
    ("mm_prefix, head 256", {"use_mm_prefix": True}, {"head_size": 256}),
    ("batch-invariant", None, {"batch_invariant": True}),
    ("MLA", MLA, {"head_size": 576}),
    ("MLA, KV fp8", MLA, {"head_size": 576, "kv_cache_dtype": "fp8"}),
    ("MLA, sparse", SPARSE, {"head_size": 576}),
]
DEVICES = {
    "7.5": "T4",
    "8.0": "A100",
    "8.9": "L4, L40S",
    "9.0": "H100, H200",
    "10.0": "B200",
    "12.0": "RTX 50",
}


def matrix() -> str:
    """Which backend the real selector chooses, by configuration and device."""
    left, top, width, height = 190.0, 74.0, 97.0, 26.0
    title = "What the selector chooses"
    words = [title + ", from the recording of the real one."]
    svg_height = top + height * len(ROWS) + 24
    svg = Svg(left + width * len(DEVICES) + 12, svg_height, title, "")
    svg.text(12, 24, title, bold=True)
    for column, (capability, name) in enumerate(DEVICES.items()):
        x = left + width * (column + 0.5)
        svg.text(x, top - 24, capability, anchor="middle", bold=True)
        svg.text(x, top - 9, name, anchor="middle", css="soft", size=11)
    for row, (label, feature, asked) in enumerate(ROWS):
        y = top + height * row
        svg.text(left - 10, y + 17, label, anchor="end", size=12)
        said = []
        for column, capability in enumerate(DEVICES):
            valid = outcome(capability, feature, **asked)["valid"]
            name = valid[0] if valid else "error"
            x = left + width * column
            svg.rect(x + 2, y + 2, width - 4, height - 4, fill=COLORS[name], opacity=0.25, radius=4)
            short = name.replace("FLEX_ATTENTION", "FLEX_ATTN").replace("_SPARSE", "_SP")
            svg.text(x + width / 2, y + 17, short, size=9.5, anchor="middle")
            said.append(f"{capability} {name}")
        words.append(f"{label}: {', '.join(said)}.")
    svg.description = " ".join(words)
    return svg.render()


def reasons() -> str:
    """The priority list of one configuration, with the recorded reasons, without and with a
    block size of the user's."""
    title = "DeepSeek-style MLA, fp8 cache, on an H100: the list is walked from the top"
    svg = Svg(800, 332, title, "")
    svg.text(12, 24, title, bold=True)
    said = [title + "."]
    for column, block_size in enumerate((None, 16)):
        found = outcome("9.0", MLA, head_size=576, kv_cache_dtype="fp8", block_size=block_size)
        names = ["FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA", "FLASHMLA_SPARSE"]
        x = 12 + 396 * column
        words = "no --block-size" if block_size is None else f"--block-size {block_size}"
        svg.text(x, 54, words, css="ink mono", size=13)
        for row, name in enumerate(names):
            y = 68 + 50 * row
            chosen = found["valid"] and found["valid"][0] == name
            color = GREEN if chosen else BLUE if name in found["valid"] else RED
            svg.rect(x, y, 380, 42, fill=color, opacity=0.22, radius=5, stroke=color)
            svg.text(x + 10, y + 17, name, size=12, bold=True)
            why = found["rejected"].get(name)
            note = "chosen" if chosen else "valid, further down" if why is None else "; ".join(why)
            svg.text(x + 10, y + 34, note, size=11, css="soft")
            said.append(f"{words}, {name}: {note}.")
    svg.description = " ".join(said)
    return svg.render()


# ------------------------------------------------------------------ runs of mini_vllm


def mixed_step() -> ForwardBatch:
    """A step with a decode, a chunk in the middle of a prompt, and a fresh prompt."""
    seen: list[ForwardBatch] = []

    def watched(query: np.ndarray, cache: np.ndarray, batch: ForwardBatch, scale: float) -> Any:
        if not seen or seen[-1] is not batch:
            seen.append(batch)
        return paged_attention(query, cache, batch, scale)

    engine = LLMEngine(
        model="byte-llama",
        num_blocks=33,
        block_size=4,
        max_num_batched_tokens=16,
        parts=EngineParts(attention=watched),
    )
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    for prompt in ("seven b", "a longer prompt", "fresh"):
        engine.add_request(prompt, sampling)
    while engine.has_unfinished_requests():
        engine.step()
    return next(
        batch
        for batch in seen
        if {1} < set(np.diff(batch.query_start_loc).tolist()) and len(batch.seq_lens) == 3
    )


def step_metadata() -> str:
    """The metadata of a real mixed step: lengths, read map, write map."""
    batch = mixed_step()
    loc, lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    names, colors = "ABC", (BLUE, ORANGE, GREEN)
    title = "One step of mini_vllm: three requests, one ragged batch, block size 4"
    svg = Svg(800, 318, title, "")
    svg.text(12, 24, title, bold=True)
    svg.text(12, 54, "rows of the batch", size=12, bold=True)
    svg.text(12, 72, "position", size=11, css="soft")
    svg.text(12, 110, "slot_mapping", size=11, css="soft mono")
    said = [title + "."]
    cell, left = 46.0, 138.0
    for row in range(loc[-1]):
        who = next(i for i in range(len(lens)) if row < loc[i + 1])
        x = left + cell * row
        svg.rect(x + 2, 58, cell - 4, 24, fill=colors[who], opacity=0.3, radius=4)
        text = f"{names[who]} {batch.positions[row]}"
        svg.text(x + cell / 2, 75, text, anchor="middle", size=12)
        svg.line(x + cell / 2, 84, x + cell / 2, 96, arrow=True)
        svg.text(
            x + cell / 2,
            110,
            str(batch.slot_mapping[row]),
            anchor="middle",
            css="ink mono",
            size=12,
        )
    for edge, value in enumerate(loc):
        x = left + cell * value
        svg.line(x, 50, x, 118, css="ink-line", dash="3 3")
        svg.text(x, 134, str(value), anchor="middle", size=12, css="ink mono")
        said.append(f"query_start_loc[{edge}] is {value}.")
    svg.text(12, 134, "query_start_loc", size=11, css="soft mono")
    svg.text(12, 170, "per request", size=12, bold=True)
    heads = ("query_len", "seq_len", "start_pos", "block table, the read map")
    for x, head in zip((138, 238, 328, 428), heads, strict=True):
        svg.text(x, 170, head, size=11, css="soft")
    for i, name in enumerate(names):
        y = 192 + 34 * i
        query_len, seq_len = loc[i + 1] - loc[i], lens[i]
        table = batch.block_tables[i, : math.ceil(seq_len / batch.block_size)].tolist()
        svg.rect(12, y - 15, 90, 24, fill=colors[i], opacity=0.3, radius=4)
        kind = "decode" if query_len == 1 else "chunk" if seq_len > query_len else "prompt"
        svg.text(20, y + 2, f"{name}: {kind}", size=12)
        for x, value in zip(
            (138, 238, 328), (query_len, seq_len, seq_len - query_len), strict=True
        ):
            svg.text(x + 20, y + 2, str(value), size=13, css="ink mono")
        for place, block in enumerate(table):
            x = 428 + 40 * place
            svg.rect(x, y - 15, 36, 24, stroke=colors[i], radius=4)
            svg.text(x + 18, y + 2, str(block), anchor="middle", size=12, css="ink mono")
        said.append(
            f"{name}: query_len {query_len}, seq_len {seq_len}, start_pos {seq_len - query_len}, "
            f"block table {table}."
        )
    svg.text(
        12,
        302,
        "start_pos = seq_len - query_len; slot = block x 4 + offset, for this step's tokens only",
        size=12,
        css="soft",
    )
    svg.description = " ".join(said)
    return svg.render()


TEXT = "The scheduler gives each request a number of tokens, and the kernel reads its block table"


def head_of_a_trained_model(layer: int, head: int) -> np.ndarray:
    """Scaled scores of a decode step's query against all keys: [seq_len], float64."""
    seen: list[np.ndarray] = []

    def watched(query: np.ndarray, cache: np.ndarray, batch: ForwardBatch, scale: float) -> Any:
        if len(query) == 1:
            seq_len = int(batch.seq_lens[0])
            kv_head = head * cache.shape[3] // query.shape[1]
            keys = cache[0, batch.block_tables[0], :, kv_head].reshape(-1, cache.shape[4])
            seen.append(keys[:seq_len] @ query[0, head] * scale)
        return paged_attention(query, cache, batch, scale)

    engine = LLMEngine(
        model="byte-llama",
        dtype="float64",
        num_blocks=33,
        block_size=16,
        parts=EngineParts(attention=watched),
    )
    engine.generate([TEXT], SamplingParams(max_tokens=2, ignore_eos=True))
    return seen[layer]


def head_scores() -> str:
    """Scores of one head of the shipped model, the running maximum, and corr per block."""
    scores = head_of_a_trained_model(2, 0)
    title = "A head of the shipped model reads six blocks"
    svg = Svg(800, 386, title, "")
    svg.text(12, 22, title, bold=True)
    axes = Axes(svg, (64, 56, 712, 236), (-1, len(scores)), (-150, 160))
    ticks = {float(start): str(start) for start in range(0, len(scores) + 1, 16)}
    axes.frame("", "score", ticks, (-150, -100, -50, 0, 50, 100, 150))
    axes.curve([(-1, 88.72), (len(scores), 88.72)], RED, dash="5 4", width=1.5)
    axes.label(0, 88.72, "exp overflows float32 above 88.7", RED, dy=-6)
    axes.dots([(i, round(float(s), 2)) for i, s in enumerate(scores)], BLUE, radius=3)
    stairs, running, said = [], -math.inf, []
    svg.text(12, 328, "m", size=12, css="soft")
    svg.text(12, 348, "corr", size=12, css="soft")
    for start in range(0, len(scores), 16):
        stop = min(start + 16, len(scores))
        before, running = running, max(running, float(scores[start:stop].max()))
        stairs += [(start - 0.5, running), (stop - 0.5, running)]
        corr = math.exp(before - running)
        corr_text = "1" if corr == 1 else "0" if corr == 0 else f"{corr:.0e}"
        x = axes.x(start + 7.5)
        svg.text(x, 328, f"{running:.1f}", anchor="middle", size=12, css="ink mono")
        svg.text(x, 348, corr_text, anchor="middle", size=12, css="ink mono")
        said.append(f"block {start // 16}: m {running:.1f}, corr {corr_text}")
    axes.curve(stairs, ORANGE, width=2.5)
    axes.label(20, running, "m, the running maximum", ORANGE, dy=14)
    svg.text(420, 374, "key position; a block is 16 keys", size=12, anchor="middle", css="soft")
    svg.description = (
        "Scores of layer 2, head 0 of byte-llama for the query of a decode step, over 90 keys, "
        f"from {scores.min():.0f} to {scores.max():.0f}. " + "; ".join(said) + "."
    )
    return svg.render()


# ------------------------------------------------------------------ arithmetic


def cascade_times(
    num_reqs: int, prefix: int, heads: int = 32, kv_heads: int = 8
) -> tuple[int, int]:
    """The two times that upstream's heuristic compares, on 132 SMs, all requests decoding."""
    tiles = math.ceil(prefix / 128)
    cascade = math.ceil(heads * math.ceil(num_reqs / 128) / 132) * tiles
    per_head = math.ceil(heads // kv_heads / 128)
    return cascade, math.ceil(num_reqs * kv_heads * per_head * tiles / 132)


def cascade() -> str:
    """When the heuristic turns cascade attention on."""
    title = "Cascade or flash-decoding: the heuristic's two times"
    words = (
        "32 query heads, 8 KV heads, 132 SMs, a shared prefix of 2,048 tokens. The cascade time is "
        "16 for every batch up to 128. The flash-decoding time rises with the number of requests: "
        "8 at 8, 16 at 16, 17 at 17, 63 at 64. Cascade needs to be strictly smaller, so it starts "
        "at 17 requests."
    )
    svg = Svg(780, 330, title, words)
    svg.text(12, 22, title, bold=True)
    axes = Axes(svg, (56, 56, 690, 210), (0, 66), (0, 70))
    axes.frame(
        "decoding requests that share 2,048 tokens",
        "time, in tiles of 128 keys",
        {float(n): str(n) for n in (1, 8, 17, 32, 48, 64)},
        {float(n): str(n) for n in (0, 16, 32, 48, 64)},
    )
    batches = range(1, 65)
    axes.curve([(n, cascade_times(n, 2048)[0]) for n in batches], ORANGE, width=2.5)
    axes.curve([(n, cascade_times(n, 2048)[1]) for n in batches], BLUE, width=2.5)
    axes.label(40, 16, "cascade: 16", ORANGE, dy=16)
    axes.label(40, 40, "flash-decoding", BLUE, dx=-60, dy=-14)
    first = next(n for n in range(8, 65) if cascade_times(n, 2048)[0] < cascade_times(n, 2048)[1])
    axes.dots([(first, cascade_times(first, 2048)[1])], RED, radius=5)
    axes.label(
        first, cascade_times(first, 2048)[1], f"on from {first}", RED, dx=-4, dy=-12, anchor="end"
    )
    return svg.render()


def programs(num_seqs: int, kv_heads: int = 8) -> int:
    """Programs with work in a decode step of the Triton backend; others return at once."""
    return num_seqs * kv_heads * (16 if num_seqs <= 128 // kv_heads else 1)


def launch() -> str:
    """How many programs the Triton backend launches over the batch size."""
    title = "Programs with work in a decode step: Triton backend, 8 KV heads, long contexts"
    words = (
        "Up to 16 sequences the keys are cut into 16 segments: 128 programs for one sequence and "
        "2,048 for 16. At 17 each sequence has one program per KV head: 136, about the number of "
        "SMs of an H100, and from there 8 more per sequence. Without segments one sequence would "
        "have 8."
    )
    svg = Svg(780, 340, title, words)
    svg.text(12, 22, title, bold=True)
    axes = Axes(svg, (64, 56, 690, 214), (1, 256), (4, 4096), log_x=True, log_y=True)
    axes.frame(
        "sequences",
        "programs",
        {float(n): str(n) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)},
        {float(n): f"{n:,}" for n in (8, 128, 1024, 2048)},
    )
    axes.curve([(1, 132), (256, 132)], GREY, dash="5 4", width=1.5)
    axes.label(256, 132, "132 SMs", GREY, dx=-4, dy=14, anchor="end")
    axes.curve([(n, n * 8) for n in (1, 17)], BLUE, dash="3 3", width=1.5)
    axes.label(2.2, 18, "one program per sequence and KV head", BLUE, dx=10, dy=10)
    low, high = range(1, 17), range(17, 257)
    axes.curve([(n, programs(n)) for n in low], ORANGE, width=2.5)
    axes.curve([(n, programs(n)) for n in high], BLUE, width=2.5)
    axes.label(3, programs(3), "16 segments each", ORANGE, dx=-10, dy=-8, anchor="end")
    axes.dots([(1, 128), (16, 2048)], ORANGE)
    axes.dots([(17, 136)], BLUE)
    return svg.render()


# ------------------------------------------------------------------ diagrams


def paths() -> str:
    """Four roles and three paths: metadata, write, read."""
    title = "Who calls whom: four roles, three paths"
    words = (
        "At start-up the Attention layer asks the selector, which asks the platform's priority "
        "list, and gets a backend; the backend names an impl and a metadata builder. In each step "
        "the model runner makes CommonAttentionMetadata, the builder turns it into the backend's "
        "own, and it is put into the forward context under the layer's name. The layer then "
        "issues two ops: the write op calls the impl's do_kv_cache_update with the slot mapping, "
        "the attention op calls the impl's forward, which reads by block table. Both touch the "
        "paged KV cache."
    )
    svg = Svg(820, 400, title, words)
    svg.text(12, 22, title, bold=True)
    svg.text(12, 50, "once, at start-up", size=12, css="soft")
    svg.box(12, 60, 150, 52, ["Attention", "the layer"], fill=BLUE)
    svg.box(222, 60, 150, 52, ["selector", "memoised"], fill=GREY)
    svg.box(432, 60, 160, 52, ["platform", "list of priorities"], fill=GREY)
    svg.box(652, 60, 156, 52, ["AttentionBackend", "declares, names"], fill=PURPLE)
    for x1, x2 in ((162, 222), (372, 432), (592, 652)):
        svg.line(x1, 86, x2, 86, arrow=True)
    svg.line(12, 134, 808, 134, css="grid-line")
    svg.text(12, 156, "each step", size=12, css="soft")
    svg.box(12, 168, 150, 52, ["model runner", "Common...Metadata"], fill=GREY)
    svg.box(222, 168, 150, 52, ["builder", "metadata of its own"], fill=GREEN)
    svg.box(432, 168, 160, 52, ["forward context", "by layer name"], fill=GREY)
    for x1, x2 in ((162, 222), (372, 432)):
        svg.line(x1, 194, x2, 194, arrow=True)
    svg.line(720, 112, 720, 264, dash="4 4", arrow=True)
    svg.text(728, 190, "its impl", size=11, css="soft")
    svg.line(660, 112, 372, 172, dash="4 4", arrow=True)
    svg.text(530, 128, "its builder", size=11, css="soft")
    svg.box(12, 264, 150, 52, ["Attention.forward", "q, k, v"], fill=BLUE)
    svg.box(222, 250, 180, 36, ["1 write op"], fill=ORANGE)
    svg.box(222, 298, 180, 36, ["2 attention op"], fill=ORANGE)
    svg.line(162, 282, 222, 268, arrow=True)
    svg.line(162, 298, 222, 316, arrow=True)
    svg.line(500, 220, 402, 262, arrow=True)
    svg.line(520, 220, 402, 308, arrow=True)
    svg.box(632, 264, 176, 52, ["AttentionImpl", "and its kernels"], fill=GREEN)
    svg.line(402, 268, 632, 280, arrow=True)
    svg.line(402, 316, 632, 300, arrow=True)
    svg.text(530, 264, "do_kv_cache_update", size=11, css="soft mono", anchor="middle")
    svg.text(530, 326, "forward", size=11, css="soft mono", anchor="middle")
    svg.box(222, 352, 586, 34, ["paged KV cache"], fill=GREY)
    svg.line(660, 316, 660, 352, arrow=True)
    svg.text(652, 340, "slots", size=11, css="soft", anchor="end")
    svg.line(770, 352, 770, 316, arrow=True)
    svg.text(762, 340, "block table", size=11, css="soft", anchor="end")
    return svg.render()


def mask() -> str:
    """The causal mask of three requests, aligned at the bottom right."""
    title = "One causal mask, aligned at the bottom right: three requests of one call"
    words = (
        "A decode with query length 1 and sequence length 8 sees all 8 keys. A chunk of 4 with "
        "sequence length 8 sees 5, 6, 7 and 8 keys. A whole prompt of 5 sees 1, 2, 3, 4 and 5."
    )
    svg = Svg(780, 230, title, words)
    svg.text(12, 22, title, bold=True)
    cell = 22
    requests = (
        ("decode", 1, 8, BLUE, 20),
        ("chunk", 4, 8, ORANGE, 280),
        ("prompt", 5, 5, GREEN, 560),
    )
    for name, query_len, seq_len, color, left in requests:
        start = seq_len - query_len
        svg.text(left, 50, f"{name}: {query_len} rows, seq_len {seq_len}", size=12)
        svg.text(left, 66, f"start_pos {start}", size=12, css="soft")
        for row in range(query_len):
            y = 76 + cell * row
            for key in range(seq_len):
                seen = key <= start + row
                svg.rect(
                    left + cell * key + 1,
                    y + 1,
                    cell - 2,
                    cell - 2,
                    fill=color if seen else GREY,
                    opacity=0.55 if seen else 0.12,
                    radius=3,
                )
            svg.text(left + cell * seq_len + 8, y + 16, str(start + row + 1), size=12, css="soft")
    svg.text(
        20,
        212,
        "at the right of a row: how many keys it sees, start_pos + row + 1",
        size=12,
        css="soft",
    )
    return svg.render()


def merge() -> str:
    """Split keys, partial states, one merge: the trace of the guide."""
    title = "Two halves, two states, one merge"
    words = (
        "Keys with scores 0 and ln 2 give the state m ln 2, denom 1.5, acc 2.5. Keys with scores "
        "ln 4 and ln 8 give ln 8, 1.5, 5.5. Scaled to the larger maximum, the first becomes 0.375 "
        "and 0.625; added, 1.875 and 6.125; divided, 49/15."
    )
    svg = Svg(780, 250, title, words)
    svg.text(12, 22, title, bold=True)
    svg.box(12, 50, 180, 56, ["scores 0, ln 2", "values 1, 2"], fill=BLUE)
    svg.box(12, 146, 180, 56, ["scores ln 4, ln 8", "values 3, 4"], fill=ORANGE)
    svg.box(240, 50, 200, 56, ["ln 2,  1.5,  2.5", "m, denom, acc"], fill=BLUE)
    svg.box(240, 146, 200, 56, ["ln 8,  1.5,  5.5", "m, denom, acc"], fill=ORANGE)
    svg.box(500, 98, 150, 56, ["ln 8, 1.875, 6.125", "merged"], fill=GREEN)
    svg.box(690, 98, 78, 56, ["49/15", "acc / denom"], fill=GREEN)
    for x1, y1, x2, y2 in (
        (192, 78, 240, 78),
        (192, 174, 240, 174),
        (440, 78, 500, 116),
        (440, 174, 500, 138),
        (650, 126, 690, 126),
    ):
        svg.line(x1, y1, x2, y2, arrow=True)
    svg.text(486, 88, "x 1/4", size=12, css="soft")
    svg.text(486, 172, "x 1", size=12, css="soft")
    svg.text(12, 236, "two programs, at the same time, in any order", size=12, css="soft")
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "paths.svg": paths,
    "step-metadata.svg": step_metadata,
    "head-scores.svg": head_scores,
    "mask.svg": mask,
    "merge.svg": merge,
    "matrix.svg": matrix,
    "reasons.svg": reasons,
    "launch.svg": launch,
    "cascade.svg": cascade,
}
